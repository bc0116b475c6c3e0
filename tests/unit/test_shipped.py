"""Heads that ship with the package: whole, small, and bound to a trunk that `medusa trunk` makes."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from medusa.checkpoint import WEIGHTS, load_tree, read_manifest
from medusa.data import trunks

NAMES = sorted(folder.name for folder in trunks.HEADS.iterdir() if folder.is_dir())


@pytest.mark.parametrize("name", NAMES)
def test_shipped_heads_are_whole_and_small(name: str) -> None:
    folder = trunks.shipped_heads(name)
    assert folder is not None
    manifest = read_manifest(folder)
    assert manifest.trunk == name and not manifest.local
    assert load_tree(folder, manifest.heads).size > 1
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8e6
    with safe_open(folder / WEIGHTS, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    assert tensors.pop("draft_ids").shape == (manifest.heads.vocab,)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert all(value.isfinite().all() for value in tensors.values())
