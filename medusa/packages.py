"""Where compiled steps are kept: a folder each, in the user's cache folder, named by all that a step depends on.

A step holds for any weights of its model (:mod:`medusa.ahead`), so weights are no part of the name; the model's code
and settings are, and the sizes and types of what it holds, the versions of torch and transformers, our own sources and
the processor with the number of threads. What is kept is a program: a folder or file that somebody else owns or may
write to is not taken, nor one that is not whole. Either is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa.ahead import LIBRARY
from medusa.files import is_own, write_json
from medusa.machine import cache_folder
from medusa.native import processor

if TYPE_CHECKING:
    from medusa.trunk import Trunk

ABOUT = "about.json"
MOST_BYTES = 512 * 2**20  # of all steps that are kept: some hundreds; those not used for longest go
LOST_S = 86400.0  # after which a folder that was being filled is taken for one of a process that was killed
NAMES = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
)  # what a config says of a checkpoint, not of the model
DEEP = 4  # levels of values in values that are looked at
# Of this package, what a step is made by and what it runs.
SOURCES = (
    "ahead.py",
    "cache.py",
    "compiled.py",
    "family.py",
    "few_rows.cpp",
    "few_rows_op.cpp",
    "folded.py",
    "packed.py",
    "products.py",
    "traced.py",
    "tree_attention.cpp",
    "tree_attention.py",
    "tree_attention_op.cpp",
    "trunk.py",
)
HELD = frozenset({"_parameters", "_buffers", "_modules"})  # told apart from a module's other attributes


def steps_folder() -> Path:
    """The folder with all steps that are kept."""
    return cache_folder() / "steps"


def description(trunk: Trunk) -> str:
    """What steps of a trunk depend on, whatever their size: a hash."""
    digest = hashlib.sha256()
    for part in _parts(trunk):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _parts(trunk: Trunk) -> Iterator[str]:
    """Part by part: the objects of one large whole would have Python look through all it holds for garbage."""
    model = trunk.model
    yield repr((torch.__version__, torch.version.git_version, version("transformers"), _own_sources(), processor()))
    yield from _told({key: value for key, value in model.config.to_dict().items() if key not in NAMES})
    own = trunk._body is None, trunk.copies, trunk.windows, trunk.layers, trunk.scaled
    yield repr((getattr(trunk.config, "_attn_implementation", None), own))
    yield repr(sorted({_source(type(module).__module__) for module in model.modules()}))
    for name, module in model.named_modules():
        way = getattr(getattr(module, "medusa_packed", None), "way", None)
        yield f"{name} {type(module).__module__} {type(module).__qualname__} {getattr(way, 'name', None)}"
        yield from _told({key: value for key, value in vars(module).items() if key not in HELD})
    for held in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        yield from (f"{name} {tuple(each.shape)} {each.stride()} {each.dtype}" for name, each in held)


def name_of(described: str, rows: int, nodes: int, layers: Sequence[int]) -> str:
    """The name of a step of a trunk with this :func:`description`, compiled for torch's threads as they are."""
    parts = (described, rows, nodes, tuple(layers), torch.get_num_threads())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def is_there(name: str) -> bool:
    """Whether something is kept by that name; whether it can be used, :func:`find` tells."""
    return os.path.isdir(steps_folder() / name)  # a folder that only others may look into is none


def find(name: str) -> Path | None:
    """The folder of a step; None where there is none that is whole and the user's own."""
    folder = steps_folder() / name
    try:
        files = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["files"]
        own = all(map(is_own, (folder.parent, folder, *(folder / file for file in files))))
        if not own or LIBRARY not in files or any(_sum(folder / file) != sum_ for file, sum_ in files.items()):
            return None
        os.utime(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder


def keep(name: str, made: Path, about: dict[str, Any]) -> Path | None:
    """Keep the files in ``made`` as a step; return its folder, or None where the cache folder takes no files.

    It is filled beside its place and renamed, so that one that is there is whole.
    """
    place = steps_folder() / name
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=place.parent, ignore_cleanup_errors=True) as beside:
            files = [Path(shutil.copyfile(file, Path(beside) / file.name)) for file in made.iterdir()]
            write_json(Path(beside) / ABOUT, {**about, "files": {file.name: _sum(file) for file in files}})
            for file in Path(beside).iterdir():
                file.chmod(0o600)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(beside, place)
        _bound()
    except OSError:
        pass  # another process may have been faster
    return find(name)


def drop(name: str) -> None:
    """Keep a step no longer."""
    shutil.rmtree(steps_folder() / name, ignore_errors=True)


def _bound() -> None:
    """Drop what was not used for longest where all is too large, and what nobody fills any more."""
    folders = sorted((each.stat().st_mtime, each) for each in steps_folder().iterdir() if each.is_dir())
    left = sum(_size(folder) for _, folder in folders)
    for used, folder in folders:
        lost = folder.name.startswith(".")
        if (lost and time.time() - used > LOST_S) or (not lost and left > MOST_BYTES):
            left -= _size(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _told(value: Any, level: int = 0) -> Iterator[str]:
    """Plain values as they are, what holds some with them, and of anything else what it is called."""
    if value is None or isinstance(value, str | int | float | torch.dtype | torch.device):
        yield repr(value)
    elif isinstance(value, dict) and level < DEEP:
        for key, each in value.items():
            yield key if isinstance(key, str) else ""  # numbers of hooks count all hooks of the process
            yield from _told(each, level + 1)
        yield ")"
    elif isinstance(value, list | tuple) and level < DEEP:
        for each in value:
            yield from _told(each, level + 1)
        yield ")"
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value)))
    else:
        named = value if hasattr(value, "__qualname__") else type(value)
        yield f"{named.__module__}.{named.__qualname__}"


@cache
def _source(module: str) -> str:
    """A hash of a module's source; its name where there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return _sum(Path(file)) if file and Path(file).is_file() else module


@cache
def _own_sources() -> tuple[str, ...]:
    return tuple(_sum(Path(__file__).with_name(name)) for name in SOURCES)
