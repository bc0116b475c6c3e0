"""Heads that others published, in the three layouts of the reference's checkpoints (Cai et al. 2024).

* Own projection: ``medusa_lm_head.safetensors`` or ``.pt`` with ``{head}.{layer}.linear.weight`` and ``.bias`` of the
  residual blocks and ``{head}.{layers}.weight`` of the projection, beside a ``config.json`` that names the trunk.
* Inside a full model (Medusa-2): the same names behind ``medusa_head.``, beside the trunk's own weights, which may be
  sharded.
* Shared projection: either of them without the projections; the trunk's own is used.

The tensors say how many heads there are: published configs are known to be wrong about it. A head's mathematics are
those of kind ``medusa`` here; only its first bias is not zero, which the weights bring along.

Dimensions: D hidden, V vocabulary.
"""

from __future__ import annotations

import heapq
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.checkpoint import TREE, check_depth, load_tree
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.tree import Topology
from medusa.trunk import Trunk
from medusa.weights import read_object, read_tensors, tensor_files

CONFIG = "config.json"
# Safetensors first: nothing in them can run.
HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MODEL_FILES = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")]
PUBLISHED = [CONFIG, "medusa_lm_head.*"]  # of a hub repository whose heads are apart
PREFIX = "medusa_head."  # of the heads' names inside a full model
_NAME = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.(linear\.weight|linear\.bias|weight)")

# The tree for heads of which nothing is known. The reference's authors report a first guess that is right about 60 %
# of the time, and over 80 % among five candidates; that each further head loses a fifth is our assumption.
TOP1, PER_HEAD, PER_RANK = 0.6, 0.8, 0.25
NODES = 16  # the root included: where verification costs little more than one token on a GPU


@dataclass(frozen=True)
class _Source:
    """Where the heads are: ``path`` names them in errors, ``files`` has the file of every tensor beside them too."""

    path: Path
    prefix: str
    files: dict[str, Path]

    @property
    def whole(self) -> bool:
        """Whether the trunk's weights are there as well."""
        return not all(name.startswith(self.prefix) for name in self.files)

    def read(self) -> dict[str, Tensor]:
        """The heads' tensors, by their names without the prefix."""
        mine = {name: file for name, file in self.files.items() if name.startswith(self.prefix)}
        read: dict[str, Tensor] = {}
        for file in set(mine.values()):
            read |= read_tensors(file, [name for name in mine if mine[name] == file])
        for name, value in read.items():
            if not value.is_floating_point():
                raise UserError(f"{self.path}: tensor {name} is of {value.dtype}: give heads that are not quantised")
        return {name.removeprefix(self.prefix): value for name, value in read.items()}


def is_published(folder: Path) -> bool:
    """Whether ``folder`` holds heads in one of the published layouts; UserError if its weights can't be read."""
    return _find(folder) is not None


def has_heads_inside(folder: Path) -> bool:
    """Whether the config tells of heads that are in no file of their own: they are among the model's weights."""
    return "medusa_num_heads" in _config(folder) and not any((folder / file).is_file() for file in HEADS_FILES)


def published_trunk(folder: Path) -> str:
    """The name to load the trunk by: the folder itself if it is a full model, else what its config names.

    A name that begins with a dot is relative to ``folder``. Raises UserError if there is none.
    """
    if _source(folder).whole:
        return str(folder)
    base = _config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / CONFIG} names no trunk (base_model_name_or_path is {base!r}): write there the folder or hub id"
            " of the model that the heads were trained on"
        )
    return str((folder / base).resolve()) if base.startswith(".") else base


def published_names(config: HeadsConfig) -> dict[str, str]:
    """The published name of every tensor of heads of kind ``medusa``, and our own for the same tensor.

    Raises:
        UserError: heads with a Markov bias, for which there is no published layout.
    """
    if config.markov is not None:
        raise UserError(f"heads.markov={config.markov}: no published layout has a Markov bias; train heads without one")
    names = {}
    for head in range(config.num):
        for layer in range(config.layers):
            for part in ("weight", "bias"):
                names[f"{head}.{layer}.linear.{part}"] = f"heads.{head}.blocks.{layer}.linear.{part}"
        if config.projection == "own":
            names[f"{head}.{config.layers}.weight"] = f"heads.{head}.projection.weight"
    return names


def load_published(folder: Path, trunk: Trunk) -> MedusaHeads:
    """Load published heads for ``trunk``.

    Warns where the config disagrees with the tensors, which win, and that nothing tells whether the heads were
    trained on this trunk; that they fit its vocabulary and hidden size is checked.

    Raises:
        UserError: no heads there, or tensors that are missing, left over or mis-shaped, or a file that holds anything
            but tensors.
    """
    source = _source(folder)
    weights = source.read()
    config = _sizes(source, weights)
    heads = MedusaHeads(config, trunk)
    state, names = heads.state_dict(), published_names(config)
    for name in sorted(names.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        needed = tuple(state[names[name]].shape) if name in names else "none of that name"
        if found != needed:
            raise UserError(
                f"{source.path}: tensor {source.prefix}{name} is {found}, {config.num} heads of {config.layers} layers"
                f" on a trunk of hidden size {trunk.hidden_size} and vocabulary {trunk.vocab_size} need {needed}: get"
                " the whole file, and the trunk that the heads were trained on"
            )
    _compare(folder, config)
    # Published projections have no bias: where the trunk's has one, the heads' is none.
    biases = {name: torch.zeros_like(state[name]) for name in state.keys() - set(names.values())}
    heads.load_state_dict({ours: weights[name] for name, ours in names.items()} | biases)
    loaded_from = getattr(trunk.model, "name_or_path", "") or "/nonexistent"
    if not (source.whole and Path(loaded_from).resolve() == folder.resolve()):
        warnings.warn(
            f"heads in {folder} don't say which weights they were trained on: that this trunk is theirs is taken on"
            " trust (with another the text stays right, and few guesses are)",
            stacklevel=2,
        )
    return heads.eval()


def published_tree(folder: Path, heads: HeadsConfig) -> Topology:
    """The tree to fill: ``tree.json`` if there is one, else the config's ``medusa_choices``, else an assumed one.

    Raises:
        UserError: a tree that is malformed or deeper than there are heads.
    """
    if (folder / TREE).is_file():
        return load_tree(folder, heads)
    choices = _config(folder).get("medusa_choices")
    if choices is None:
        warnings.warn(
            f"{folder} comes without a tree: one of {NODES} nodes for heads of usual accuracy is used; measure your own"
            f" with medusa.calibrate.recalibrate, which writes {TREE} there",
            stacklevel=2,
        )
        return assumed_tree(heads.num)
    if not isinstance(choices, list):
        raise UserError(f"medusa_choices in {folder / CONFIG} are {choices!r:.60}: give a list of paths")
    try:
        topology = Topology.from_choices(choices)
        check_depth(topology, heads)
    except UserError as error:
        raise UserError(f"medusa_choices in {folder / CONFIG}: {error}") from error
    return topology


def assumed_tree(heads: int, nodes: int = NODES) -> Topology:
    """The tree of ``nodes`` nodes with the most expected tokens per step, if heads guess as commonly reported.

    Assumed: rank r of head k is right with probability 0.6 * 0.8^k * 0.25^r, each head independently of the others.
    """
    paths: list[tuple[int, ...]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(-TOP1, (0,))]
    while len(paths) < nodes - 1:
        chance, path = heapq.heappop(frontier)  # negative: the likeliest first
        paths.append(path)
        heapq.heappush(frontier, (chance * PER_RANK, (*path[:-1], path[-1] + 1)))
        if len(path) < heads:
            heapq.heappush(frontier, (chance * TOP1 * PER_HEAD ** len(path), (*path, 0)))
    return Topology.from_paths(paths)


def _find(folder: Path) -> _Source | None:
    for path in (folder / file for file in HEADS_FILES):
        if path.is_file():
            return _Source(path, "", tensor_files(path))
    for path in (folder / file for file in MODEL_FILES):
        if path.is_file():  # the first one is what the library loads the trunk from
            files = tensor_files(path)
            return _Source(path, PREFIX, files) if any(name.startswith(PREFIX) for name in files) else None
    return None


def _source(folder: Path) -> _Source:
    source = _find(folder)
    if source is None:
        raise UserError(
            f"{folder} holds no published heads: give a folder with {' or '.join(HEADS_FILES)}, or a model with"
            f" {PREFIX}* among its weights"
        )
    return source


def _sizes(source: _Source, names: Iterable[str]) -> HeadsConfig:
    """What the tensors' names say; gaps in the numbers are left for the comparison to find."""
    heads, blocks, projection = set(), set(), "shared"
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(
                f"{source.path}: tensor {source.prefix}{name} belongs to no published layout, whose names are"
                f" {source.prefix}0.0.linear.weight and the like: give heads in the reference's own format"
            )
        heads.add(int(match[1]))
        if match[3] == "weight":
            projection = "own"
        else:
            blocks.add(int(match[2]))
    if not blocks:
        raise UserError(
            f"{source.path} holds no residual block ({source.prefix}0.0.linear.weight): give heads of 1 layer or more"
        )
    return HeadsConfig("medusa", len(heads), len(blocks), projection)


def _compare(folder: Path, config: HeadsConfig) -> None:
    said = _config(folder)
    for key, found in (("medusa_num_heads", config.num), ("medusa_num_layers", config.layers)):
        if said.get(key, found) != found:
            warnings.warn(
                f"{folder / CONFIG} has {key} {said[key]!r}, the tensors are those of {found}: {found} are used",
                stacklevel=3,
            )


def _config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
