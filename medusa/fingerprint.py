"""Which trunk heads belong to: a hash of the config's sizes and of signs in every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

VALUES = 256  # leading values of each tensor: enough to tell trunks apart, and no 16 GB are read


def fingerprint(model: Any) -> str:
    """Sixteen hexadecimal digits that name a model's weights, the same in whatever type they are loaded.

    What is hashed are signs, which no rounding changes, and tensors are named by their content alone, since the
    library's names for them move. A quantised load rounds to zero: there the source files are read, if at hand.
    """
    config = model.config.get_text_config()
    sizes = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    shape = {key: getattr(config, key, None) for key in sizes}
    source = Path(getattr(model, "name_or_path", "") or "/nonexistent")
    quantised = getattr(model, "hf_quantizer", None) is not None and any(source.glob("*.safetensors"))
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for part in sorted({_part(values) for values in (_of_files(source) if quantised else _of_memory(model))}):
        digest.update(part)  # of a set: tied weights may be listed once or twice
    return digest.hexdigest()[:16]


def _part(values: Tensor) -> bytes:
    return hashlib.sha256(values.detach().signbit().cpu().numpy().tobytes()).digest()


def _of_files(folder: Path) -> Iterator[Tensor]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                values = weights.get_slice(name)
                yield (values[:VALUES] if values.get_shape() else weights.get_tensor(name)).reshape(-1)[:VALUES]


def _of_memory(model: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.detach().reshape(-1)[:VALUES]
