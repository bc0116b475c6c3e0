"""What other engines read in a folder of heads, and compute with it: small models of them to check exports by.

Each reader goes by its engine's own loader: which config keys it takes, which names and shapes of tensors its modules
have, and what their forward does. Engines skip tensors whose names they don't know and leave modules as they were made
where one is missing, in silence; here both are refused. Nothing is shared with ``exports.py``, so that an error there
does not hide itself.

Dimensions: K heads, D hidden, V vocabulary, V' the tokens that heads draft from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from medusa.errors import UserError
from medusa.weights import read_object, read_tensors, tensor_files

Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class EngineHeads:
    """Heads as an engine holds them: each has layers of weight and bias, and a projection whose rows are ``tokens``."""

    layers: list[list[tuple[Tensor, Tensor]]]
    projections: list[Tensor]
    tokens: Tensor | None
    vocab: int
    tensors: int

    def logits(self, hidden: Tensor) -> list[Tensor]:
        """Each head's logits [.., V] of states [.., D], in their precision; -inf for tokens that it never drafts."""
        return [self._head(index, hidden) for index in range(len(self.layers))]

    def _head(self, index: int, x: Tensor) -> Tensor:
        for weight, bias in self.layers[index]:
            x = x + silu(linear(x, weight.to(x.dtype), bias.to(x.dtype)))
        logits = linear(x, self.projections[index].to(x.dtype))
        if self.tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf)
        whole[..., self.tokens] = logits
        return whole


def read_vllm(folder: Path, hidden: int, vocab: int) -> EngineHeads:
    """As vLLM's ``MedusaConfig`` and ``Medusa.load_weights`` do."""
    given = read_object(folder / "config.json")
    if given.get("architectures") != ["MedusaModel"] or given.get("model_type") != "medusa":
        raise UserError(f"{folder}: vLLM does not take this config for Medusa heads")
    config = dict(given)
    for key in list(config):  # its own rewriting, by which any key of such a name is taken for one of the two
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    _expect(folder, config, hidden_size=hidden, vocab_size=vocab, medusa_fc_bias=True)
    num, depth, rows = config["num_heads"], config["num_hidden_layers"], config["truncated_vocab_size"]
    shared = bool(config.get("original_lm_head", False))
    shapes: Shapes = {}
    for head in range(num):
        for layer in range(depth):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
        if head == 0 or not shared:
            shapes[f"lm_heads.{head}.weight"] = (rows, hidden)
    if rows < vocab:
        shapes["token_map"] = (rows,)
    weights = _read(folder / "model.safetensors", shapes)
    layers = [
        [(weights[f"blocks.{k}.layers.{j}.weight"], weights[f"blocks.{k}.layers.{j}.bias"]) for j in range(depth)]
        for k in range(num)
    ]
    projections = [weights[f"lm_heads.{0 if shared else head}.weight"] for head in range(num)]
    return EngineHeads(layers, projections, weights.get("token_map"), vocab, len(weights))


def read_tgi(folder: Path, hidden: int, vocab: int) -> EngineHeads:
    """As Text Generation Inference's ``MedusaHeadV1`` does, which it tries first."""
    config = read_object(folder / "config.json")
    if "architectures" in config:
        raise UserError(f"{folder}: with a key architectures TGI takes this config for another speculator")
    return _reference(folder, "medusa_lm_head.safetensors", config, hidden, vocab)


def read_tensorrt(folder: Path, hidden: int, vocab: int) -> EngineHeads:
    """As TensorRT-LLM's ``load_medusa_hf`` does: the pickle if there is one; safetensors else, which must be equal."""
    config = read_object(folder / "config.json")
    _expect(folder, config, num_medusa_heads=config.get("medusa_num_heads"))
    _paths(folder, config)
    return _both(folder, config, hidden, vocab)


def read_reference(folder: Path, hidden: int, vocab: int) -> EngineHeads:
    """As the reference's ``MedusaModel.from_pretrained`` does, which reads the pickle; safetensors must be equal."""
    config = read_object(folder / "config.json")
    _paths(folder, config)
    return _both(folder, config, hidden, vocab)


ENGINES: dict[str, Callable[[Path, int, int], EngineHeads]] = {
    "vllm": read_vllm,
    "tgi": read_tgi,
    "tensorrt-llm": read_tensorrt,
    "medusa-v1": read_reference,
}


def _both(folder: Path, config: dict[str, Any], hidden: int, vocab: int) -> EngineHeads:
    read, other = (_reference(folder, f"medusa_lm_head.{end}", config, hidden, vocab) for end in ("pt", "safetensors"))
    for mine, theirs in zip(_flat(read), _flat(other), strict=True):
        if not torch.equal(mine, theirs):
            raise UserError(f"{folder}: medusa_lm_head.pt and medusa_lm_head.safetensors hold different weights")
    return read


def _flat(heads: EngineHeads) -> list[Tensor]:
    return [value for layers in heads.layers for pair in layers for value in pair] + heads.projections


def _reference(folder: Path, file: str, config: dict[str, Any], hidden: int, vocab: int) -> EngineHeads:
    if not isinstance(config.get("base_model_name_or_path"), str):
        raise UserError(f"{folder}: its config names no trunk (base_model_name_or_path)")
    num, depth = config.get("medusa_num_heads"), config.get("medusa_num_layers")
    if not isinstance(num, int) or not isinstance(depth, int):
        raise UserError(f"{folder}: its config has medusa_num_heads {num!r} and medusa_num_layers {depth!r}")
    shapes: Shapes = {}
    for head in range(num):
        for layer in range(depth):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        shapes[f"{head}.{depth}.weight"] = (vocab, hidden)
    weights = _read(folder / file, shapes)
    layers = [
        [(weights[f"{head}.{layer}.linear.weight"], weights[f"{head}.{layer}.linear.bias"]) for layer in range(depth)]
        for head in range(num)
    ]
    return EngineHeads(layers, [weights[f"{head}.{depth}.weight"] for head in range(num)], None, vocab, len(weights))


def _paths(folder: Path, config: dict[str, Any]) -> None:
    """A tree as engines take it: a path for each node but the root, none deeper than there are heads."""
    choices, num = config.get("medusa_choices"), config.get("medusa_num_heads", 0)
    known = {()} | {tuple(path) for path in choices or ()}
    if not choices or any(len(path) > num or path[:-1] not in known for path in known - {()}):
        raise UserError(f"{folder}: medusa_choices {choices!r:.60} are no tree for {num} heads")


def _expect(folder: Path, config: dict[str, Any], **needed: Any) -> None:
    for key, value in needed.items():
        if config.get(key) != value:
            raise UserError(f"{folder}: its config has {key} {config.get(key)!r}, the engine needs {value!r}")


def _read(path: Path, shapes: Shapes) -> dict[str, Tensor]:
    """The tensors of a file, which must be those of ``shapes``: none missing, left over or of another shape."""
    weights = read_tensors(path, list(tensor_files(path)))
    for name in sorted(shapes.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != shapes.get(name):
            raise UserError(
                f"{path}: tensor {name} is {found}, the engine needs {shapes.get(name, 'none of that name')}"
            )
    return weights
