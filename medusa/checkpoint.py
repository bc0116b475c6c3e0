"""The checkpoint folder: heads, tree and the trunk they belong to.

``medusa.json`` (format, head sizes, trunk and its fingerprint), ``heads.safetensors`` (their weights, and the ids of
their draft vocabulary if they have one), ``tree.json``, and ``trunk/`` where the trunk was made here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.errors import UserError, reason
from medusa.files import read_json, write_atomically, write_json
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.tree import Topology
from medusa.trunk import Trunk
from medusa.vocabulary import check_ids

FORMAT = 1
MANIFEST, WEIGHTS, TREE = "medusa.json", "heads.safetensors", "tree.json"
DRAFT_IDS = "draft_ids"  # the tensor beside the weights: which tokens the heads draft from
# What training and calibration leave beside them.
CONFIG, RUN, LOG, CALIBRATION = "config.yaml", "run.json", "train_log.jsonl", "calibration.json"


@dataclass(frozen=True)
class Manifest:
    """What ``medusa.json`` says. ``trunk`` is a hub id or, if ``local``, a folder relative to the checkpoint's own."""

    heads: HeadsConfig
    trunk: str
    fingerprint: str
    revision: str | None = None
    local: bool = False


def save_heads(
    folder: Path, heads: MedusaHeads, trunk: str, revision: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the heads' weights, then the manifest that makes the folder a checkpoint.

    ``trunk`` is a hub id or a folder; a folder is stored relative to the checkpoint, so that both move together.
    ``dtype``: of the weights; None for the trunk's, in which heads compute: what they were kept in beside that for
    training would be read by nobody.
    """
    dtype = dtype or heads.trunk.dtype
    weights = {
        name: value.detach().to(dtype if value.is_floating_point() else value.dtype).contiguous().cpu()
        for name, value in heads.state_dict().items()
    }
    write_atomically(folder / WEIGHTS, lambda temporary: save_file(weights, temporary, {"format": "pt"}))
    if local := Path(trunk).is_dir():
        trunk = os.path.relpath(Path(trunk).resolve(), folder.resolve())
    manifest = Manifest(heads.config, trunk, heads.trunk.fingerprint(), revision, local)
    content = {"format": FORMAT, **asdict(manifest)}
    # Left out where there is none, so that heads without these can still be read by versions that know neither.
    content["heads"] = {name: value for name, value in content["heads"].items() if value is not None}
    write_json(folder / MANIFEST, content)


def read_manifest(folder: Path) -> Manifest:
    """Read ``medusa.json``; UserError if the folder is no checkpoint or of another format."""
    content = read_json(folder / MANIFEST)
    if content.get("format") != FORMAT:
        raise UserError(f"{folder / MANIFEST} has format {content.get('format')}: this version reads format {FORMAT}")
    del content["format"]
    heads = content.get("heads")
    kinds = {
        field.name: (int, type(None)) if field.default is None else (type(field.default),)
        for field in fields(HeadsConfig)
    }
    if not isinstance(heads, dict) or any(not isinstance(heads.get(name), kind) for name, kind in kinds.items()):
        needed = ", ".join(
            f"{name} ({kind[0].__name__}{' or none' if kind[1:] else ''})" for name, kind in kinds.items()
        )
        raise UserError(
            f"{folder / MANIFEST}: heads need {needed}, found {heads}; train the heads anew with `medusa train`"
        )
    try:
        manifest = Manifest(**content | {"heads": HeadsConfig(**heads)})
    except (TypeError, UserError) as error:  # a field that is missing or does not exist, or a value out of its range
        raise UserError(f"{folder / MANIFEST}: {reason(error)}; train the heads anew with `medusa train`") from error
    if not isinstance(manifest.trunk, str):
        raise UserError(f"{folder / MANIFEST}: trunk is {manifest.trunk!r}, not a name: train the heads anew")
    return manifest


def trunk_source(folder: Path, manifest: Manifest) -> str:
    """The name to load the trunk by: its folder, if it was one, else a hub id. UserError if the folder is gone."""
    if not manifest.local:
        return manifest.trunk
    place = (folder / manifest.trunk).resolve()
    if not place.is_dir():
        raise UserError(f"the trunk of {folder} is not at {place}: move it back, or train the heads anew")
    return str(place)


def load_heads(folder: Path, trunk: Trunk, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Load heads for ``trunk``, to keep them in ``dtype``, or the trunk's (see :class:`medusa.heads.MedusaHeads`).

    Raises:
        UserError: another trunk than they were trained for, or tensors that are missing, left over or mis-shaped.
    """
    manifest = read_manifest(folder)
    found = trunk.fingerprint()
    if found != manifest.fingerprint:
        raise UserError(
            f"heads in {folder} were trained for trunk {manifest.fingerprint}, this trunk is {found}: load the trunk"
            f" they name ({manifest.trunk}), or train heads for this one"
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path} does not exist: train the heads anew with `medusa train`")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} can't be read ({error}): train the heads anew with `medusa train`") from error
    draft_ids = _draft_ids(path, weights, manifest.heads, trunk)
    heads = MedusaHeads(manifest.heads, trunk, draft_ids, initialise=False, dtype=dtype)
    _check_shapes(path, weights, {name: tuple(value.shape) for name, value in heads.state_dict().items()})
    heads.load_state_dict(weights)
    return heads.eval()


def _draft_ids(path: Path, weights: Mapping[str, Tensor], config: HeadsConfig, trunk: Trunk) -> Tensor | None:
    """The ids of the draft vocabulary, if the heads have one."""
    if config.vocab is None:
        return None
    _check_shapes(path, {name: weights[name] for name in weights if name == DRAFT_IDS}, {DRAFT_IDS: (config.vocab,)})
    try:
        check_ids(weights[DRAFT_IDS], config.vocab, trunk)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return weights[DRAFT_IDS]


def _check_shapes(path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are missing, left over or mis-shaped."""
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != expected.get(name):
            raise UserError(
                f"{path}: tensor {name} is {found}, the heads of {MANIFEST} need"
                f" {expected.get(name, 'none of that name')}: the two files don't belong together"
            )


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
