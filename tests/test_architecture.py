"""The layers as data, and what keeps them: who may import whom, what is loaded when, how long code may get.

The rules read the source by its syntax tree, so they see imports inside functions and for type checks too.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The folder of each package. medusa/train and so on are links to the folders beside it: read once, at the real place.
FOLDERS = {
    "medusa": ROOT / "medusa",
    "medusa.configs": ROOT / "configs",
    "medusa.data": ROOT / "data",
    "medusa.infer": ROOT / "infer",
    "medusa.train": ROOT / "train",
}

# Lowest first; a module imports from the layers below its own. The name of a package stands for its modules too,
# but for "medusa", which is its __init__ alone. Data and configs have a layer of their own, below train and infer.
LAYERS: list[tuple[str, list[str]]] = [
    (
        "base",
        [
            "medusa",
            "medusa.cli",
            "medusa.encoding",
            "medusa.errors",
            "medusa.files",
            "medusa.launch",
            "medusa.machine",
            "medusa.native",
            "medusa.progress",
            "medusa.uploads",
            "medusa.weights",
        ],
    ),
    (
        "L0",
        [
            "medusa.accept",
            "medusa.biases",
            "medusa.expected",
            "medusa.filters",
            "medusa.largest",
            "medusa.laws",
            "medusa.mask",
            "medusa.penalties",
            "medusa.processing",
            "medusa.processors",
            "medusa.rules",
            "medusa.sampling",
            "medusa.suffix",
            "medusa.tree",
        ],
    ),
    (
        "L1",
        [
            "medusa.ahead",
            "medusa.cache",
            "medusa.checkpoint",
            "medusa.compiled",
            "medusa.cut",
            "medusa.dialects",
            "medusa.bound",
            "medusa.bound_files",
            "medusa.eagle",
            "medusa.eagle_block",
            "medusa.eagle_engines",
            "medusa.eagle_exports",
            "medusa.eagle_files",
            "medusa.eagle_published",
            "medusa.engines",
            "medusa.exports",
            "medusa.family",
            "medusa.fingerprint",
            "medusa.folded",
            "medusa.graphs",
            "medusa.head_parts",
            "medusa.heads",
            "medusa.loading",
            "medusa.matrices",
            "medusa.packages",
            "medusa.packed",
            "medusa.parallel",
            "medusa.prefill",
            "medusa.products",
            "medusa.selfcheck",
            "medusa.traced",
            "medusa.tree_attention",
            "medusa.trunk",
            "medusa.vocabulary",
        ],
    ),
    ("L2", ["medusa.drafters"]),
    (
        "L3",
        [
            "medusa.broken",
            "medusa.calibrate",
            "medusa.confidence",
            "medusa.costs",
            "medusa.curveplots",
            "medusa.curves",
            "medusa.decoding",
            "medusa.eagle_calibrate",
            "medusa.families",
            "medusa.lawkit",
            "medusa.lawtoys",
            "medusa.plots",
            "medusa.requests",
            "medusa.sizing",
            "medusa.tables",
            "medusa.testing",
        ],
    ),
    ("L4 data", ["medusa.configs", "medusa.data"]),
    ("L4", ["medusa.infer", "medusa.train"]),
    ("L5", ["medusa.__main__"]),
]

# The packages whose modules import each other freely.
FREE_INSIDE = ["medusa.configs", "medusa.data", "medusa.infer", "medusa.train"]

# Every other import inside one layer is written down: who -> whom. Keys and values may be packages.
SIDEWAYS = {
    "medusa.accept": ["medusa.largest", "medusa.laws", "medusa.tree"],
    "medusa.calibrate": ["medusa.confidence", "medusa.costs", "medusa.decoding"],
    "medusa.checkpoint": ["medusa.bound_files", "medusa.heads", "medusa.trunk"],
    "medusa.dialects": ["medusa.checkpoint", "medusa.heads", "medusa.trunk"],
    "medusa.ahead": ["medusa.packed", "medusa.products", "medusa.traced", "medusa.tree_attention", "medusa.trunk"],
    "medusa.compiled": [
        "medusa.ahead",
        "medusa.cache",
        "medusa.family",
        "medusa.packages",
        "medusa.parallel",
        "medusa.selfcheck",
        "medusa.traced",
        "medusa.trunk",
    ],
    "medusa.cut": ["medusa.family", "medusa.trunk"],
    "medusa.drafters": [
        "medusa.drafters.base",
        "medusa.drafters.best_first",
        "medusa.drafters.branches",
        "medusa.drafters.children",
        "medusa.drafters.filled",
        "medusa.drafters.grown",
        "medusa.drafters.heads",
        "medusa.drafters.levels",
    ],
    "medusa.drafters.dynamic": ["medusa.drafters.medusa"],
    "medusa.drafters.eagle": ["medusa.drafters.none"],
    "medusa.drafters.mixed": ["medusa.drafters.dynamic", "medusa.drafters.prompt_lookup"],
    "medusa.drafters.sized": ["medusa.drafters.medusa"],
    "medusa.costs": ["medusa.decoding"],
    "medusa.eagle_calibrate": ["medusa.calibrate", "medusa.confidence", "medusa.costs"],
    "medusa.curveplots": ["medusa.curves", "medusa.plots"],
    "medusa.data.inspect": ["medusa.configs"],
    "medusa.eagle": [
        "medusa.bound",
        "medusa.cache",
        "medusa.eagle_block",
        "medusa.head_parts",
        "medusa.trunk",
    ],
    "medusa.eagle_block": ["medusa.head_parts"],
    "medusa.eagle_files": ["medusa.bound_files", "medusa.checkpoint", "medusa.eagle", "medusa.trunk"],
    "medusa.eagle_published": ["medusa.bound_files", "medusa.eagle", "medusa.eagle_block", "medusa.trunk"],
    "medusa.eagle_exports": ["medusa.eagle", "medusa.exports", "medusa.matrices"],
    "medusa.exports": ["medusa.heads", "medusa.matrices"],
    "medusa.matrices": ["medusa.head_parts", "medusa.heads", "medusa.trunk"],
    "medusa.decoding": ["medusa.requests"],
    "medusa.lawkit": ["medusa.decoding"],
    "medusa.lawtoys": ["medusa.lawkit"],
    "medusa.laws": ["medusa.largest", "medusa.processors", "medusa.sampling", "medusa.tree"],
    "medusa.mask": ["medusa.biases", "medusa.tree"],
    "medusa.penalties": ["medusa.tree"],
    "medusa.processors": ["medusa.penalties", "medusa.processing"],
    "medusa.fingerprint": ["medusa.parallel"],
    "medusa.folded": [
        "medusa.family",
        "medusa.parallel",
        "medusa.selfcheck",
        "medusa.tree_attention",
        "medusa.trunk",
    ],
    "medusa.bound_files": ["medusa.bound", "medusa.trunk"],
    "medusa.bound": ["medusa.parallel", "medusa.selfcheck", "medusa.trunk", "medusa.vocabulary"],
    "medusa.graphs": ["medusa.cache", "medusa.compiled", "medusa.trunk"],
    "medusa.heads": ["medusa.bound", "medusa.head_parts", "medusa.trunk"],
    "medusa.loading": ["medusa.family", "medusa.parallel"],
    "medusa.packages": ["medusa.ahead", "medusa.trunk"],
    "medusa.packed": ["medusa.parallel", "medusa.products"],
    "medusa.parallel": ["medusa.family"],
    "medusa.prefill": ["medusa.cache", "medusa.packed", "medusa.trunk"],
    "medusa.rules": ["medusa.accept", "medusa.laws", "medusa.sampling", "medusa.tree"],
    "medusa.sampling": ["medusa.filters", "medusa.largest"],
    "medusa.selfcheck": ["medusa.parallel", "medusa.trunk"],
    "medusa.sizing": ["medusa.calibrate", "medusa.costs"],
    "medusa.testing": ["medusa.decoding", "medusa.families"],
    "medusa.traced": ["medusa.packed", "medusa.products"],
    "medusa.tree": ["medusa.biases"],
    "medusa.trunk": [
        "medusa.cache",
        "medusa.compiled",
        "medusa.family",
        "medusa.fingerprint",
        "medusa.folded",
        "medusa.loading",
        "medusa.packed",
        "medusa.prefill",
        "medusa.selfcheck",
    ],
    "medusa.vocabulary": ["medusa.trunk"],
}

# Corpora know nothing of models, recipes nothing of code.
BASE_ONLY = ["medusa.configs", "medusa.data"]

# Inside medusa/ (not train/, infer/, data/), where transformers is known. testing: configurations of tiny models;
# encoding: the type of its tokenizers.
TRANSFORMERS_USERS = [
    "medusa.cache",
    "medusa.eagle_block",
    "medusa.eagle_engines",
    "medusa.encoding",
    "medusa.folded",
    "medusa.loading",
    "medusa.packed",
    "medusa.parallel",
    "medusa.testing",
    "medusa.traced",
    "medusa.trunk",
]

# Optional or slow to import: inside the function that needs them, and only in the packages named.
EVERYWHERE = ["medusa"]
LAZY = {
    "accelerate": ["medusa.train"],
    "datasets": ["medusa.data", "medusa.train"],
    "deepspeed": ["medusa.data", "medusa.train"],
    "fastapi": ["medusa.infer.serve.app"],
    "gguf": ["medusa.data"],
    "jsonargparse": EVERYWHERE,
    "matplotlib": EVERYWHERE,
    "peft": ["medusa.data", "medusa.loading", "medusa.train"],
    "prometheus_client": ["medusa.infer.serve.metrics", "medusa.infer.serve.app"],
    "rich": EVERYWHERE,
    "tensorboard": ["medusa.train"],
    "uvicorn": ["medusa.infer.serve.app"],
    "wandb": ["medusa.data", "medusa.train"],
}

MODULE_LINES = 300
FUNCTION_LINES = 60
BODY_LINES = 40  # of a function without its signature and docstring: what documents arguments may be long


@dataclass(frozen=True)
class Import:
    """One name that a module imports: a module of ours in full, the top-level name of any other."""

    target: str
    line: int
    lazy: bool  # inside a function, or for type checks only


def modules() -> dict[str, Path]:
    """Return every module of the product by its one right name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in _python_files(folder):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts])
            found[name.removesuffix(".__init__")] = file
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and entry.name != "__pycache__":
            yield from _python_files(entry)
        elif entry.suffix == ".py":
            yield entry


MODULES = modules()


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> tuple[Import, ...]:
    return tuple(_imports(name, syntax(name), lazy=False))


def _imports(name: str, node: ast.AST, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(_target(alias.name), node.lineno, lazy)
    elif isinstance(node, ast.ImportFrom):
        source = _absolute(name, node)
        for alias in node.names:
            yield Import(_target(f"{source}.{alias.name}"), node.lineno, lazy)
    typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or typing_only
    for child in ast.iter_child_nodes(node):
        yield from _imports(name, child, lazy or inside)


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _target(dotted: str) -> str:
    """Return the longest part of ``dotted`` that is a module of ours, or its first part."""
    parts = dotted.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in MODULES), parts[0])


def within(name: str, packages: list[str]) -> bool:
    """Return whether ``name`` is one of ``packages`` or a module in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def layer(name: str) -> int | None:
    for index, (_, members) in enumerate(LAYERS):
        if name in members or within(name, [member for member in members if member != "medusa"]):
            return index
    return None


def ours() -> Iterator[tuple[str, Import]]:
    """Yield each import of one of our modules by another, where both have a layer."""
    for name in MODULES:
        for each in imports(name):
            if each.target in MODULES and each.target != name and layer(name) is not None:
                yield name, each


def sideways(name: str, target: str) -> bool:
    """Return whether the design lets ``name`` import ``target`` of its own layer."""
    if any(within(name, [package]) and within(target, [package]) for package in FREE_INSIDE):
        return True
    return any(within(name, [importer]) and within(target, allowed) for importer, allowed in SIDEWAYS.items())


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def at(name: str, line: int) -> str:
    return f"{MODULES[name].relative_to(ROOT)}:{line}"


def test_every_module_has_a_layer() -> None:
    report([f"{at(name, 1)}: no layer: add {name} to LAYERS" for name in MODULES if layer(name) is None])


def test_the_table_names_no_module_that_is_gone() -> None:
    named = {member for _, members in LAYERS for member in members} | set(SIDEWAYS) | set(TRANSFORMERS_USERS)
    report([f"{name}: in this file's tables, but there is no such module" for name in sorted(named - set(MODULES))])


def test_imports_point_downwards() -> None:
    problems = []
    for name, each in ours():
        mine, other = layer(name), layer(each.target)
        assert mine is not None
        if other is None or other > mine or (other == mine != 0 and not sideways(name, each.target)):
            problems.append(f"{at(name, each.line)}: {name} imports {each.target}, which is not in a layer below it")
    report(problems)


def test_data_and_configs_import_only_the_base_of_the_core() -> None:
    problems = [
        f"{at(name, each.line)}: {name} imports {each.target}: only the base layer is allowed"
        for name, each in ours()
        if within(name, BASE_ONLY) and layer(each.target) != 0 and not sideways(name, each.target)
    ]
    report(problems)


def test_no_import_by_a_top_level_name() -> None:
    # Beside a user's own train.py these would run it.
    names = {package.rpartition(".")[2] for package in FOLDERS} - {"medusa"}
    problems = [
        f"{at(name, each.line)}: imports {each.target}: say medusa.{each.target}"
        for name in MODULES
        for each in imports(name)
        if each.target in names
    ]
    report(problems)


def test_optional_packages_are_imported_late_and_in_place() -> None:
    problems = []
    for name in MODULES:
        for each in imports(name):
            if each.target not in LAZY:
                continue
            if not each.lazy:
                problems.append(f"{at(name, each.line)}: import {each.target} inside the function that needs it")
            if not within(name, LAZY[each.target]):
                problems.append(f"{at(name, each.line)}: {each.target} belongs in {', '.join(LAZY[each.target])}")
    report(problems)


def test_only_named_modules_of_the_core_know_transformers() -> None:
    packages = [package for package in FOLDERS if package != "medusa"]
    problems = [
        f"{at(name, each.line)}: {name} imports transformers: only {', '.join(TRANSFORMERS_USERS)} may"
        for name in MODULES
        for each in imports(name)
        if each.target == "transformers" and not within(name, packages) and name not in TRANSFORMERS_USERS
    ]
    report(problems)


def test_only_the_command_imports_by_string() -> None:
    # An import by string would pass by every rule above.
    problems = [
        f"{at(name, node.lineno)}: import_module"
        for name in MODULES
        if name != "medusa.__main__"
        for node in ast.walk(syntax(name))
        if "import_module" in (getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "name", None))
    ]
    report(problems)


def test_every_command_has_its_module() -> None:
    from medusa.__main__ import COMMANDS

    report(
        [f"medusa {name}: no {command.module}" for name, command in COMMANDS.items() if command.module not in MODULES]
    )


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function with its module's name."""
    for name in MODULES:
        for node in ast.walk(syntax(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines from a function's first statement behind its docstring to its end."""
    statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return statements[-1].end_lineno - statements[0].lineno + 1 if statements else 0


def test_modules_are_short() -> None:
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    report(
        [
            f"{at(name, 1)}: {lines} lines, the limit is {MODULE_LINES - 1}"
            for name, lines in lengths.items()
            if lines >= MODULE_LINES
        ]
    )


def test_functions_are_short() -> None:
    problems = []
    for name, node in functions():
        for what, lines, most in (
            ("", node.end_lineno - node.lineno + 1, FUNCTION_LINES),
            ("the body of ", body_lines(node), BODY_LINES),
        ):
            if lines > most:
                problems.append(f"{at(name, node.lineno)}: {what}{node.name} has {lines} lines, over {most}")
    report(problems)


def test_a_body_is_counted_without_its_docstring() -> None:
    def length(text: str) -> int:
        (node,) = ast.parse(text).body
        assert isinstance(node, ast.FunctionDef)
        return body_lines(node)

    assert length('def f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    b = a\n\n    return b\n') == 3
    assert length("def f():\n    return (\n        1\n    )\n") == 3
    assert length('def f():\n    """Nothing."""\n') == 0


def test_no_module_is_loaded_under_two_names() -> None:
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in LAZY:
                raise
    seen: dict[str, str] = {}
    problems = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in FOLDERS.values()):
            continue
        first = seen.setdefault(os.path.realpath(file), name)
        if first != name:
            problems.append(f"{file} is loaded as {first} and as {name}")
        if name.partition(".")[0] != "medusa":
            problems.append(f"{file} is loaded as {name}, not from the package medusa")
    report(problems)


@pytest.mark.parametrize("package", ["medusa.infer.engine"])
def test_inference_needs_torch_and_transformers_alone(package: str) -> None:
    # None in sys.modules makes a package absent, for transformers' own look-ups too.
    code = (
        "import importlib, json, sys\n"
        f"absent = {sorted(LAZY)!r}\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        f"importlib.import_module({package!r})\n"
        "from medusa.infer import Engine\n"
        "print(json.dumps([name for name in absent if sys.modules[name] is not None]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
