"""Weights in files that others wrote: safetensors, pickles without the risk, and indices of sharded models."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa.errors import UserError, reason

ENOUGH = 160  # characters of what a library says: its first sentence or two


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; UserError if it doesn't."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as JSON ({reason(error)}): get the file anew") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: get the file anew")
    return content


def tensor_files(path: Path) -> dict[str, Path]:
    """Every tensor's name, and the file that holds it: ``path`` itself, or what it says if it is an index.

    Raises:
        UserError: a file that can't be read, or an index that leads out of its folder.
    """
    if path.suffix != ".json":
        return dict.fromkeys(_names(path), path)
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{path} has no weight_map of tensors to files: get the file anew")
    for name, file in files.items():
        if Path(file).name != file:
            raise UserError(f"{path} has {name} in {file}: only files beside the index are read; get it anew")
    return {name: path.parent / file for name, file in files.items()}


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors ``names`` of a ``.safetensors`` file or a pickle; UserError if one is not there."""
    if lost := set(names) - set(_names(path)):
        raise UserError(f"{path} lacks {min(lost)}, which the index says it has: get the whole checkpoint")
    if path.suffix != ".safetensors":
        held = _unpickle(path)
        return {name: held[name] for name in names}
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def _names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_unpickle(path))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} can't be read ({reason(error)[:ENOUGH]}): get the whole checkpoint") from error


def _unpickle(path: Path) -> dict[str, Tensor]:
    """A ``.pt`` or ``.bin`` file of tensors, mapped instead of read where its format allows; no code in it is run."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, EOFError) as error:
        raise UserError(
            f"{path} is damaged or holds pickled objects beside tensors, which are never run: get it as safetensors"
        ) from error
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({reason(error)[:ENOUGH]}): get the whole checkpoint") from error
    named = isinstance(held, dict) and all(isinstance(name, str) for name in held)
    if not named or not all(isinstance(value, Tensor) for value in held.values()):
        raise UserError(f"{path} holds something else than tensors by name: get the heads' state_dict")
    return held
