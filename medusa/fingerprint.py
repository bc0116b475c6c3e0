"""Which trunk heads belong to: a hash of the config's shape and of a few values of every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

VALUES = 64  # leading values of each tensor: enough to tell trunks apart, and no 16 GB are read
ROUNDS_ALIKE = (torch.float64, torch.float32, torch.bfloat16)  # loads that agree once rounded to bf16


def fingerprint(model: Any) -> str:
    """Sixteen hexadecimal digits that name a model's weights, the same in whatever type they are loaded.

    Values are rounded to bf16 and tensors named by their content alone, since the library's names for them move. A
    quantised or fp16 load no longer holds those values: there the source files are read, if they are at hand.
    """
    config = model.config.get_text_config()
    shape = {
        key: getattr(config, key, None) for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }
    exact = model.dtype in ROUNDS_ALIKE and getattr(model, "hf_quantizer", None) is None
    source = Path(getattr(model, "name_or_path", "") or "/nonexistent")
    tensors = _of_files(source) if not exact and any(source.glob("*.safetensors")) else _of_memory(model)
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for part in sorted({_part(values) for values in tensors}):  # a set: tied weights may be listed once or twice
        digest.update(part)
    return digest.hexdigest()[:16]


def _part(values: Tensor) -> bytes:
    rounded = values.detach().cpu().float().bfloat16().float()
    return hashlib.sha256(rounded.contiguous().numpy().tobytes()).digest()


def _of_files(folder: Path) -> Iterator[Tensor]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                yield weights.get_slice(name)[:1].flatten()[:VALUES]


def _of_memory(model: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter[:1].flatten()[:VALUES]
