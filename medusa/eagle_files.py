"""The folder of an EAGLE layer: beside the heads of a run, or alone, as ``RUN/drafters/eagle``.

``eagle.json`` (format, the layer's config and sizes, trunk and its fingerprint), ``eagle.safetensors`` (its weights,
and the ids of its draft vocabulary if it has one) and ``tree.json``, the tree it fills.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from medusa.bound_files import BoundFiles, TrunkRef
from medusa.checkpoint import TREE, read_tree
from medusa.eagle import EagleConfig, EagleLayer, EagleSizes
from medusa.errors import UserError, reason
from medusa.tree import Topology
from medusa.trunk import Trunk

EAGLE, EAGLE_WEIGHTS = "eagle.json", "eagle.safetensors"
PLACE = Path("drafters") / "eagle"  # in the folder of a run
DEPTH = 4  # tokens of the chain that is drafted where no tree was calibrated


FILES = BoundFiles("the EAGLE layer", EAGLE, EAGLE_WEIGHTS)


@dataclass(frozen=True)
class EagleManifest(TrunkRef):
    """What ``eagle.json`` says."""

    config: EagleConfig
    sizes: EagleSizes


def eagle_place(folder: Path) -> Path | None:
    """Where the EAGLE layer of ``folder`` is: in the place that a run has for it, or there itself; None without one."""
    return next((each for each in (folder / PLACE, folder) if (each / EAGLE).is_file()), None)


def save_eagle(
    folder: Path, layer: EagleLayer, trunk: str, revision: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the layer's weights and the manifest (see :meth:`medusa.bound_files.BoundFiles.save`).

    ``folder`` is the layer's own, ``RUN / PLACE`` in a run.
    """
    own = {"config": asdict(layer.config), "sizes": layer.sizes.as_json()}
    FILES.save(folder, layer, own, trunk, revision, dtype)


def read_eagle_manifest(folder: Path) -> EagleManifest:
    """Read ``eagle.json``; UserError if the folder holds no layer, or one of another format."""
    content = FILES.read(folder)
    try:
        config, sizes = EagleConfig(**content.pop("config")), EagleSizes(**content.pop("sizes"))
        return EagleManifest(config, sizes, **content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # UserError is a ValueError
        raise UserError(f"{folder / EAGLE}: {reason(error)}; {FILES.again}") from error


def eagle_trunk(folder: Path) -> tuple[str, str | None]:
    """The name to load the trunk of a layer by, its folder or a hub id, and the revision. UserError if it is gone."""
    manifest = read_eagle_manifest(folder)
    return FILES.trunk_source(folder, manifest), None if manifest.local else manifest.revision


def load_eagle(folder: Path, trunk: Trunk, dtype: torch.dtype | None = None) -> EagleLayer:
    """Load a layer for ``trunk``, to keep it in ``dtype``, or the trunk's (see :class:`medusa.eagle.EagleLayer`).

    Raises:
        UserError: another trunk than it was trained for, or tensors that are missing, left over or mis-shaped.
    """
    manifest = read_eagle_manifest(folder)
    make = partial(EagleLayer, manifest.config, trunk, sizes=manifest.sizes, initialise=False, dtype=dtype)
    return FILES.load(folder, manifest, trunk, manifest.config.vocab, make)


def eagle_tree(folder: Path) -> Topology:
    """The tree of the layer in ``folder``; without one a chain of 4."""
    return read_tree(folder) if (folder / TREE).is_file() else Topology.chain(DEPTH)
