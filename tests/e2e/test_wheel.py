"""The package as users get it: built, installed apart from this tree, and run beside files that bear our names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["medusa", "train", "infer", "configs", "data", "setup.cfg", "pyproject.toml", "LICENSE", "README.md"]
HOSTILE = "raise SystemExit('imported the file of a stranger: ' + __file__)\n"


def run(*command: str | Path, cwd: Path) -> str:
    """Run ``command`` in ``cwd`` without this process's own import path, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive from a copy of the tree, and the wheel from the archive."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out)
    assert len(list(out.glob("*.tar.gz"))) == 1
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in an environment of its own, which borrows this one's third-party packages."""
    scratch = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", scratch, cwd=scratch)
    interpreter = scratch / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", wheel, cwd=scratch)
    # A folder named in a .pth is searched, but the .pth files inside it are not read: an editable install of this
    # tree stays out of sight.
    site = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=scratch).strip()
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site) / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return interpreter


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A user's folder whose files have the names of our own folders and stop whoever imports them."""
    (tmp_path / "train.py").write_text(HOSTILE)
    (tmp_path / "configs.py").write_text(HOSTILE)
    for name in ("infer", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(HOSTILE)
    return tmp_path


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == {"medusa", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    expected = {"medusa/py.typed"}
    for package, folder in [("medusa", "medusa"), *((f"medusa/{name}", name) for name in SOURCES[1:5])]:
        for suffix in ("py", "cpp", "yaml", "json", "jsonl", "html", "css", "js", "safetensors", "md"):
            found = (file.relative_to(ROOT / folder) for file in (ROOT / folder).glob(f"**/*.{suffix}"))
            expected |= {f"{package}/{file.as_posix()}" for file in found}
    assert {name for name in names if name.startswith("medusa/")} == expected
    assert "medusa/configs/tinyshakespeare.yaml" in names


def test_the_installed_package_ignores_files_with_our_names(python: Path, hostile: Path) -> None:
    code = (
        "import medusa, medusa.train, medusa.infer, medusa.data, medusa.configs\n"
        "print(medusa.__file__, medusa.train.__file__, medusa.configs.path('tinyshakespeare'), sep='\\n')"
    )
    for file in run(python, "-c", code, cwd=hostile).split():
        assert Path(file).is_relative_to(python.parents[1]), f"{file} is not the installed one"


def test_the_installed_command_runs_beside_files_with_our_names(python: Path, hostile: Path) -> None:
    for command in (["--version"], ["--help"], ["train", "--help"]):
        assert run(python, "-m", "medusa", *command, cwd=hostile)
    for command in (["--version"], ["data", "--help"]):
        assert run(python.parent / "medusa", *command, cwd=hostile)


def test_the_installed_package_decodes_beside_files_with_our_names(python: Path, hostile: Path) -> None:
    code = (
        "from medusa.decoding import Request, generate_ids\n"
        "from medusa.testing import ScriptedDrafter, plain_greedy, tiny_trunk\n"
        "trunk, prompts = tiny_trunk('llama'), [[1, 2, 3], [5]]\n"
        "plain = [plain_greedy(trunk, prompt, 8) for prompt in prompts]\n"
        "drafter = ScriptedDrafter(plain, honesty=0.5)\n"
        "assert generate_ids(trunk, drafter, [Request(prompt, 8) for prompt in prompts]) == plain\n"
        "print('decoded')"
    )
    assert run(python, "-c", code, cwd=hostile) == "decoded\n"
