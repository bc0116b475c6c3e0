"""Where an engine is loaded from, and onto what."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from medusa.checkpoint import MANIFEST, TREE, WEIGHTS, read_manifest, trunk_source
from medusa.data.trunks import SOURCES, fetched, shipped_heads
from medusa.dialects import PUBLISHED, has_heads_inside, is_published, published_trunk
from medusa.eagle_files import PLACE, eagle_place, eagle_trunk
from medusa.errors import UserError, nearest, reason
from medusa.machine import bfloat16_pays, pick_device
from medusa.trunk import Trunk

# Of a hub repository: the engine, not its logs and plots.
PATTERNS = [MANIFEST, WEIGHTS, TREE, "trunk/*", "merged/*", f"{PLACE.as_posix()}/*", "*.md", *PUBLISHED]
REASON = 160  # characters of what the hub says: its first sentence or two


def find(source: str, revision: str | None) -> Path | None:
    """The local folder of an engine or trunk, fetched from the hub if need be; None for a hub id without an engine.

    The name of a trunk that `medusa trunk` makes stands for the heads that ship for it.

    Raises:
        UserError: neither a folder nor a repository that can be had.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if (heads := shipped_heads(source)) is not None:
        return heads
    parent = folder.parent
    if source.startswith((".", "/", "~")) or (parent != Path(".") and parent.is_dir()):
        beside = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
        raise UserError(
            f"no folder {source} here{nearest(folder.name, beside)}: give one made by `medusa train`, or a hub id"
        )
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
        if has_heads_inside(found):
            found = Path(snapshot_download(source, revision=revision, allow_patterns=["*"]))
    except (OSError, ValueError) as error:  # the hub's errors are of these kinds
        why = textwrap.shorten(reason(error), REASON)
        raise UserError(
            f"no folder {source} here (make it with `medusa train`), and not from the hub: {why}"
        ) from error
    return found if is_ours(found) or is_published(found) else None


def is_ours(folder: Path) -> bool:
    """Whether a folder is of the kind that `medusa train` makes: with heads, an EAGLE layer, or both."""
    return (folder / MANIFEST).is_file() or eagle_place(folder) is not None


def load_trunk(
    folder: Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    check: bool = True,
    **options: Any,
) -> Trunk:
    """The trunk that the checkpoint in ``folder`` belongs to; ``options`` go to ``Trunk.load``.

    That of heads which ship with the package is made first, where it is not there, and its own dtype is fp32, or
    bf16 where that is clearly faster. Raises UserError if it is no checkpoint, or the trunk can't be had or loaded.
    """
    name, revision = named_trunk(folder)
    if name in SOURCES:
        name = str(fetched(name, lambda line: print(line, file=sys.stderr, flush=True)))
        if dtype == "auto" and options.get("tp_plan") is None and bfloat16_pays(pick_device(device)):
            dtype = torch.bfloat16
    return Trunk.load(name, dtype=dtype, device=device, revision=revision, check=check, **options)


def named_trunk(folder: Path) -> tuple[str, str | None]:
    """The folder or hub id of the trunk that a checkpoint belongs to, and the revision. Raises as load_trunk."""
    if not (folder / MANIFEST).is_file():
        if is_published(folder):
            return published_trunk(folder), None
        if (place := eagle_place(folder)) is not None:
            return eagle_trunk(place)
    manifest = read_manifest(folder)
    return trunk_source(folder, manifest), manifest.revision
