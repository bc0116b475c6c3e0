"""The trunk's continuations of held-out prompts, in a file of the run folder: who goes on with a run has them again.

They are made once and then read by every evaluation, and of a large trunk they take minutes. The file names what they
depend on; one of another trunk, other prompts or other settings is made anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medusa.calibrate import Continuations
from medusa.files import write_atomically
from medusa.trunk import Trunk


@dataclass(frozen=True)
class Continued:
    """Continuations, and the number of torch's threads that made them: their last bits depend on it."""

    held: Continuations
    threads: int


def key_of(trunk: Trunk, prompts: Sequence[Sequence[int]], *settings: object) -> str:
    """Names what continuations depend on: trunk, precision, device, prompts, and ``settings`` by how they print."""
    own = trunk.fingerprint(), trunk.dtype, trunk.device.type, settings, [list(prompt) for prompt in prompts]
    return hashlib.blake2b(repr(own).encode(), digest_size=16).hexdigest()


def read(path: Path, key: str, device: torch.device) -> Continued | None:
    """What was written under ``key``, its states on ``device``; None where there is no such file, or half of one."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            about = file.metadata() or {}
            if about.get("key") != key:
                return None
            ids, lengths, starts, hidden = (file.get_tensor(name) for name in ("ids", "lengths", "starts", "hidden"))
    except (OSError, SafetensorError):
        return None
    sizes = lengths.tolist()
    texts = [text.tolist() for text in ids.split(sizes)]
    states = [part.clone() for part in hidden.split(sizes)]  # as they were made: each with memory of its own
    return Continued(Continuations(texts, starts.tolist(), states), int(about["threads"]))


def write(path: Path, key: str, made: Continued) -> None:
    """Write continuations under ``key``, atomically, in place of what is there."""
    held = made.held
    tensors = {
        "ids": torch.tensor([token for ids in held.ids for token in ids]),
        "lengths": torch.tensor([len(ids) for ids in held.ids]),
        "starts": torch.tensor(held.starts),
        "hidden": torch.cat(held.hidden).cpu(),
    }
    about = {"key": key, "threads": str(made.threads)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, about))
