"""Where an engine is loaded from, and onto what."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch

from medusa.checkpoint import MANIFEST, TREE, WEIGHTS, read_manifest, trunk_source
from medusa.dialects import PUBLISHED, has_heads_inside, is_published, published_trunk
from medusa.errors import UserError, nearest, reason
from medusa.trunk import Trunk

# Of a hub repository: the engine, not its logs and plots.
PATTERNS = [MANIFEST, WEIGHTS, TREE, "trunk/*", "*.md", *PUBLISHED]
REASON = 160  # characters of what the hub says: its first sentence or two


def find(source: str, revision: str | None) -> Path | None:
    """The local folder of an engine or trunk, fetched from the hub if need be; None for a hub id without an engine.

    Raises:
        UserError: neither a folder nor a repository that can be had.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
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
    return found if (found / MANIFEST).is_file() or is_published(found) else None


def load_trunk(
    folder: Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    check: bool = True,
    **options: Any,
) -> Trunk:
    """The trunk that the checkpoint in ``folder`` belongs to; ``options`` go to ``Trunk.load``.

    Raises UserError if it is no checkpoint, or the trunk can't be loaded.
    """
    if not (folder / MANIFEST).is_file() and is_published(folder):
        return Trunk.load(published_trunk(folder), dtype=dtype, device=device, check=check, **options)
    manifest = read_manifest(folder)
    name, revision = trunk_source(folder, manifest), manifest.revision
    return Trunk.load(name, dtype=dtype, device=device, revision=revision, check=check, **options)
