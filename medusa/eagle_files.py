"""The folder of an EAGLE layer: beside the heads of a run, or alone, as ``RUN/drafters/eagle``.

``eagle.json`` (format, the layer's config and sizes, trunk and its fingerprint), ``eagle.safetensors`` (its weights,
and the ids of its draft vocabulary if it has one) and ``tree.json``, the tree it fills.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.checkpoint import DRAFT_IDS, TREE, read_tree
from medusa.eagle import EagleConfig, EagleLayer, EagleSizes
from medusa.errors import UserError, reason
from medusa.files import read_json, write_atomically, write_json
from medusa.tree import Topology
from medusa.trunk import Trunk

FORMAT = 1
EAGLE, EAGLE_WEIGHTS = "eagle.json", "eagle.safetensors"
PLACE = Path("drafters") / "eagle"  # in the folder of a run
DEPTH = 4  # tokens of the chain that is drafted where no tree was calibrated
AGAIN = "train the layer anew with `medusa train`"


@dataclass(frozen=True)
class EagleManifest:
    """What ``eagle.json`` says. ``trunk`` is a hub id or, if ``local``, a folder relative to the layer's own."""

    config: EagleConfig
    sizes: EagleSizes
    trunk: str
    fingerprint: str
    revision: str | None = None
    local: bool = False


def eagle_place(folder: Path) -> Path | None:
    """Where the EAGLE layer of ``folder`` is: in the place that a run has for it, or there itself; None without one."""
    return next((each for each in (folder / PLACE, folder) if (each / EAGLE).is_file()), None)


def save_eagle(
    folder: Path, layer: EagleLayer, trunk: str, revision: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the layer's weights, then the manifest that makes the folder one of a layer.

    ``folder`` is the layer's own, ``RUN / PLACE`` in a run. ``trunk`` is a hub id or a folder; a folder is stored
    relative to the layer's. ``dtype``: of the weights; None for the trunk's, in which the layer computes.
    """
    dtype = dtype or layer.trunk.dtype
    weights = {
        name: value.detach().to(dtype if value.is_floating_point() else value.dtype).contiguous().cpu()
        for name, value in layer.state_dict().items()
    }
    write_atomically(folder / EAGLE_WEIGHTS, lambda temporary: save_file(weights, temporary, {"format": "pt"}))
    if local := Path(trunk).is_dir():
        trunk = os.path.relpath(Path(trunk).resolve(), folder.resolve())
    manifest = EagleManifest(layer.config, layer.sizes, trunk, layer.trunk.fingerprint(), revision, local)
    content = {"format": FORMAT, **vars(manifest)}
    write_json(folder / EAGLE, content | {"config": asdict(layer.config), "sizes": layer.sizes.as_json()})


def read_eagle_manifest(folder: Path) -> EagleManifest:
    """Read ``eagle.json``; UserError if the folder holds no layer, or one of another format."""
    path = folder / EAGLE
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise UserError(f"{path} has format {content.get('format')}: this version reads format {FORMAT}")
    del content["format"]
    try:
        config, sizes = EagleConfig(**content.pop("config")), EagleSizes(**content.pop("sizes"))
        manifest = EagleManifest(config, sizes, **content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # UserError is a ValueError
        raise UserError(f"{path}: {reason(error)}; {AGAIN}") from error
    if not isinstance(manifest.trunk, str):
        raise UserError(f"{path}: trunk is {manifest.trunk!r}, not a name: {AGAIN}")
    return manifest


def eagle_trunk(folder: Path) -> tuple[str, str | None]:
    """The name to load the trunk of a layer by, its folder or a hub id, and the revision. UserError if it is gone."""
    manifest = read_eagle_manifest(folder)
    if not manifest.local:
        return manifest.trunk, manifest.revision
    place = (folder / manifest.trunk).resolve()
    if not place.is_dir():
        raise UserError(f"the trunk of the EAGLE layer in {folder} is not at {place}: move it back, or {AGAIN}")
    return str(place), None


def load_eagle(folder: Path, trunk: Trunk, dtype: torch.dtype | None = None) -> EagleLayer:
    """Load a layer for ``trunk``, to keep it in ``dtype``, or the trunk's (see :class:`medusa.eagle.EagleLayer`).

    Raises:
        UserError: another trunk than it was trained for, or tensors that are missing, left over or mis-shaped.
    """
    manifest = read_eagle_manifest(folder)
    found = trunk.fingerprint()
    if found != manifest.fingerprint:
        raise UserError(
            f"the EAGLE layer in {folder} was trained for trunk {manifest.fingerprint}, this trunk is {found}: load the"
            f" trunk it names ({manifest.trunk}), or train a layer for this one"
        )
    path = folder / EAGLE_WEIGHTS
    try:
        weights = load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: {AGAIN}") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} can't be read ({reason(error)}): {AGAIN}") from error
    draft_ids = None if manifest.config.vocab is None else weights.get(DRAFT_IDS)
    try:
        layer = EagleLayer(manifest.config, trunk, draft_ids, sizes=manifest.sizes, initialise=False, dtype=dtype)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    fill(layer, weights, path)
    return layer.eval()


def fill(layer: EagleLayer, weights: Mapping[str, Tensor], path: Path) -> None:
    """Put ``weights`` into a layer. UserError that names ``path`` if they are not exactly its own."""
    own = layer.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        needed = tuple(own[name].shape) if name in own else "none of that name"
        if found != needed:
            raise UserError(
                f"{path}: tensor {name} is {found}, an EAGLE layer of these sizes needs {needed}: its files don't"
                " belong together, or are of another trunk"
            )
    layer.load_state_dict(dict(weights))


def eagle_tree(folder: Path) -> Topology:
    """The tree of the layer in ``folder``; without one a chain of 4."""
    return read_tree(folder) if (folder / TREE).is_file() else Topology.chain(DEPTH)
