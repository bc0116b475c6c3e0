"""Which trunk heads belong to: a hash of the config's sizes and of signs in every weight."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from medusa.errors import UserError
from medusa.parallel import whole

VALUES = 256  # leading values of each tensor: enough to tell trunks apart, and no 16 GB are read
# Of a layer's experts, which files hold one by one, the library makes tensors that begin with the first one's; what
# corrects their router is no parameter.
INNER = re.compile(r"\.experts\.([1-9]\d*\.|0\.(up_proj|w3)\.)|\.e_score_correction_bias$")


def fingerprint(model: Any) -> str:
    """Sixteen hexadecimal digits that name a model's weights, the same in whatever type they are loaded.

    What is hashed are signs, which no rounding changes, and tensors are named by their content alone, since the
    library's names for them move. Adapters on the model are left out: heads made for the base fit. A quantised load
    rounds to zero, an offloaded one has nothing in memory: there the source files are read. (What was saved quantised,
    a GGUF file of few bits too, is a source of its own.)

    Raises:
        UserError: a quantised or offloaded model whose source files, as safetensors, are not at hand.
    """
    config = model.config.get_text_config()
    sizes = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    shape = {key: getattr(config, key, None) for key in sizes}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for part in sorted({_part(values) for values in (_of_memory(model) if _at_hand(model) else _of_files(model))}):
        digest.update(part)  # of a set: tied weights may be listed once or twice
    return digest.hexdigest()[:16]


def _part(values: Tensor) -> bytes:
    return hashlib.sha256(values.detach().signbit().cpu().numpy().tobytes()).digest()


def _at_hand(model: Any) -> bool:
    """Whether the source weights are in memory: neither offloaded nor quantised, but for a GGUF file unpacked."""
    plain = all(each.is_floating_point() and not each.is_meta for each in model.parameters())
    quantiser = getattr(model, "hf_quantizer", None)
    return plain and (quantiser is None or quantiser.quantization_config.quant_method == "gguf")


def _of_files(model: Any) -> Iterator[Tensor]:
    files = _source_files(model)
    if not files:
        raise UserError(
            f"trunk {model.name_or_path} is quantised or offloaded, and its fingerprint needs the *.safetensors it was"
            " loaded from, which are not there: load it in memory, in full"
        )
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                values = weights.get_slice(name)
                if not INNER.search(name) and math.prod(values.get_shape()) > 1:
                    yield values[:VALUES].reshape(-1)[:VALUES]


def _source_files(model: Any) -> list[Path]:
    """The safetensors that a model was loaded from, in its folder or the hub's cache."""
    name = getattr(model, "name_or_path", "")
    if not name or Path(name).is_dir():
        return sorted(Path(name or "/nonexistent").glob("*.safetensors"))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision = getattr(model.config, "_commit_hash", None)
    try:
        return sorted(Path(snapshot_download(name, revision=revision, local_files_only=True)).glob("*.safetensors"))
    except LocalEntryNotFoundError:
        return []


def _of_memory(model: Any) -> Iterator[Tensor]:
    added = {id(parameter) for parameter in _of_adapters(model)}
    for parameter in model.parameters():
        if id(parameter) not in added and parameter.numel() > 1:  # a lone scalar is now a parameter, now a buffer
            yield whole(parameter.detach()).reshape(-1)[:VALUES]


def _of_adapters(model: Any) -> Iterator[Tensor]:
    """What peft put beside the model's own weights: its layers say by which names."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            part = getattr(module, name.partition(".")[0], None)
            if isinstance(part, Module):
                yield from part.parameters()
