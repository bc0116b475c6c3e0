"""Where an engine is loaded from, and onto what."""

from __future__ import annotations

from pathlib import Path

import torch

from medusa.checkpoint import MANIFEST, TREE, WEIGHTS, read_manifest, trunk_source
from medusa.errors import UserError, nearest
from medusa.trunk import Trunk

PATTERNS = [MANIFEST, WEIGHTS, TREE, "trunk/*", "*.md"]  # of a hub repository: the engine, not its logs and plots


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
            f"no folder {source}{nearest(folder.name, beside)}: give one made by `medusa train`, or a hub id"
        )
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
    except (OSError, ValueError) as error:  # the hub's errors are of these kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"{source} is no folder here and can't be had from the hub ({reason}): give a folder made by `medusa"
            " train`, or a hub id"
        ) from error
    return found if (found / MANIFEST).is_file() else None


def load_trunk(
    folder: Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    check: bool = True,
) -> Trunk:
    """The trunk that the checkpoint in ``folder`` belongs to. Raises UserError if it is no checkpoint."""
    manifest = read_manifest(folder)
    name, revision = trunk_source(folder, manifest), manifest.revision
    return Trunk.load(name, dtype=dtype, device=device, revision=revision, check=check)
