"""The checkpoint folder: heads, tree and the trunk they belong to.

``medusa.json`` (format, head sizes, trunk and its fingerprint), ``heads.safetensors`` (their weights, and the ids of
their draft vocabulary if they have one), ``tree.json``, and ``trunk/`` where the trunk was made here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medusa.bound_files import BoundFiles, TrunkRef
from medusa.errors import UserError, reason
from medusa.files import read_json, write_json
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.tree import Topology
from medusa.trunk import Trunk

MANIFEST, WEIGHTS, TREE = "medusa.json", "heads.safetensors", "tree.json"
# What training and calibration leave beside them.
CONFIG, RUN, LOG, CALIBRATION = "config.yaml", "run.json", "train_log.jsonl", "calibration.json"


FILES = BoundFiles("the heads", MANIFEST, WEIGHTS)


@dataclass(frozen=True)
class Manifest(TrunkRef):
    """What ``medusa.json`` says."""

    heads: HeadsConfig


def save_heads(
    folder: Path, heads: MedusaHeads, trunk: str, revision: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the heads' weights and the manifest (see :meth:`medusa.bound_files.BoundFiles.save`)."""
    # Left out where there is none, so that heads without these can still be read by versions that know neither.
    config = {name: value for name, value in asdict(heads.config).items() if value is not None}
    FILES.save(folder, heads, {"heads": config}, trunk, revision, dtype)


def read_manifest(folder: Path) -> Manifest:
    """Read ``medusa.json``; UserError if the folder is no checkpoint or of another format."""
    content = FILES.read(folder)
    heads = content.get("heads")
    kinds = {
        field.name: (int, type(None)) if field.default is None else (type(field.default),)
        for field in fields(HeadsConfig)
    }
    if not isinstance(heads, dict) or any(not isinstance(heads.get(name), kind) for name, kind in kinds.items()):
        needed = ", ".join(
            f"{name} ({kind[0].__name__}{' or none' if kind[1:] else ''})" for name, kind in kinds.items()
        )
        raise UserError(f"{folder / MANIFEST}: heads need {needed}, found {heads}; {FILES.again}")
    try:
        return Manifest(**content | {"heads": HeadsConfig(**heads)})
    except (TypeError, UserError) as error:  # a field that is missing or does not exist, or a value out of its range
        raise UserError(f"{folder / MANIFEST}: {reason(error)}; {FILES.again}") from error


def trunk_source(folder: Path, manifest: Manifest) -> str:
    """The name to load the trunk by: its folder, if it was one, else a hub id. UserError if the folder is gone."""
    return FILES.trunk_source(folder, manifest)


def load_heads(folder: Path, trunk: Trunk, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Load heads for ``trunk``, to keep them in ``dtype``, or the trunk's (see :class:`medusa.heads.MedusaHeads`).

    Raises:
        UserError: another trunk than they were trained for, or tensors that are missing, left over or mis-shaped.
    """
    manifest = read_manifest(folder)
    make = partial(MedusaHeads, manifest.heads, trunk, initialise=False, dtype=dtype)
    return FILES.load(folder, manifest, trunk, manifest.heads.vocab, make)


def save_tree(folder: Path, topology: Topology, extra: dict[str, Any] | None = None) -> None:
    """Write ``tree.json``: the paths of all nodes, and what calibration found."""
    paths = [list(path) for path in topology.paths[1:]]
    write_json(folder / TREE, {"paths": paths, **(extra or {})})


def load_tree(folder: Path, heads: HeadsConfig) -> Topology:
    """Read ``tree.json``; UserError if the tree is deeper than there are heads."""
    topology = read_tree(folder)
    check_depth(topology, heads)
    return topology


def read_tree(folder: Path) -> Topology:
    """Read ``tree.json``, whatever the heads."""
    paths = read_json(folder / TREE).get("paths")
    if not isinstance(paths, list):
        raise UserError(f"{folder / TREE} lists no paths: make it anew with `medusa calibrate`")
    return Topology.from_choices(paths) if paths else Topology.root()


def check_depth(topology: Topology, heads: HeadsConfig) -> None:
    """Refuse a tree that needs more heads than there are."""
    if topology.depth > heads.num:
        raise UserError(
            f"the tree is {topology.depth} deep and there are {heads.num} heads: one head per level is needed; trim the"
            f" tree to depth {heads.num} or train more heads"
        )
