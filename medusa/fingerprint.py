"""Which trunk heads belong to: a hash of the config's shape and of sampled slices of the source weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

SAMPLES = 8  # tensors looked at
VALUES = 64  # leading values of each: enough to tell trunks apart, and no 16 GB are read


def fingerprint(model: Any) -> str:
    """Sixteen hexadecimal digits that name a model's source weights.

    The source files are read where there are any, so that a bf16 or quantised load of the same trunk matches;
    a model made in memory is read itself.
    """
    config = model.config.get_text_config()
    shape = {
        key: getattr(config, key, None) for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    source = getattr(model.config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    for name, values in _from_files(Path(source)) if source and Path(source).is_dir() else _from_memory(model):
        digest.update(name.encode())
        digest.update(values.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread(names: list[str]) -> list[str]:
    """``SAMPLES`` names, evenly spread over the sorted list."""
    names = sorted(names)
    count = min(SAMPLES, len(names))
    return [names[index * (len(names) - 1) // max(count - 1, 1)] for index in range(count)]


def _from_files(folder: Path) -> list[tuple[str, Tensor]]:
    where: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            where.update(dict.fromkeys(weights.keys(), file))
    sampled = []
    for name in _spread(list(where)):
        with safe_open(where[name], framework="pt") as weights:
            rows = weights.get_slice(name)
            sampled.append((name, rows[:1].flatten()[:VALUES]))
    return sampled


def _from_memory(model: Any) -> list[tuple[str, Tensor]]:
    weights = dict(model.named_parameters())  # a tied weight is listed once, as it is saved once
    return [(name, weights[name][:1].flatten()[:VALUES]) for name in _spread(list(weights))]
