"""What SGLang and vLLM read in the folder of an EAGLE-3 layer, and compute with it: a small model to check exports by.

Written down from the engines' own models, apart from ``eagle_exports.py`` and from the layer in ``eagle_block.py``, so
that an error there does not hide itself. One of the files that know transformers' models: rotary frequencies are those
that its Llama makes of the config, as the engines' do.

Dimensions: T pairs, D hidden, F fused features, V vocabulary, V' the tokens drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medusa.errors import UserError
from medusa.weights import read_object, read_tensors, tensor_files

SGLANG, SPECULATORS = "sglang", "speculators"


@dataclass(frozen=True)
class EngineLayer:
    """A layer as an engine holds it. ``states``: which of the trunk's it fuses, as transformers counts them."""

    weights: dict[str, Tensor]
    config: LlamaConfig
    states: tuple[int, ...]
    tokens: Tensor | None
    vocab: int
    tensors: int

    def fuse(self, features: Tensor) -> Tensor:
        """[.., F] -> [.., D]."""
        return linear(features, self._of("fc", features))

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of a text, each of an embedding and a hidden state: their own states [T, D], and logits [T, V].

        The hidden states are fused ones or, of drafted pairs, the states of the pairs before. Logits are -inf for
        tokens that are never drafted.
        """
        heads, size = self.config.num_attention_heads, self.config.head_dim
        pairs = len(embedded_TD)
        read = torch.cat([self._norm("input_layernorm", embedded_TD), self._norm("hidden_norm", hidden_TD)], -1)
        q, k, v = (
            linear(read, self._of(f"self_attn.{name}_proj", read)).view(pairs, -1, size).transpose(0, 1)
            for name in "qkv"
        )
        turn = LlamaRotaryEmbedding(self.config)(read, torch.arange(pairs)[None])
        q, k = (_turned(x, *turn) for x in (q, k))
        k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
        scores = q @ k.mT / size**0.5
        scores = scores.masked_fill(torch.ones(pairs, pairs, dtype=torch.bool).triu(1), -torch.inf)
        gathered = (scores.softmax(-1) @ v).transpose(0, 1).reshape(pairs, -1)
        state = hidden_TD + linear(gathered, self._of("self_attn.o_proj", read))
        inner = self._norm("post_attention_layernorm", state)
        gate, up = (linear(inner, self._of(f"mlp.{name}_proj", inner)) for name in ("gate", "up"))
        state = state + linear(silu(gate) * up, self._of("mlp.down_proj", inner))
        logits = linear(self._norm("norm", state), self._of("lm_head", state))
        if self.tokens is None:
            return state, logits
        whole = logits.new_full((pairs, self.vocab), -torch.inf)
        whole[:, self.tokens] = logits
        return state, whole

    def _of(self, name: str, x: Tensor) -> Tensor:
        return self.weights[name].to(x.dtype)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self._of(name, x)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def read_eagle(folder: Path, to: str, hidden: int, vocab: int, layers: int) -> EngineLayer:
    """As SGLang's ``LlamaForCausalLMEagle3`` or vLLM's ``Eagle3LlamaForCausalLM`` loads the folder.

    ``hidden``, ``vocab`` and ``layers`` are the trunk's.

    Raises:
        UserError: what the engine would not take, or take for something else.
    """
    given = read_object(folder / "config.json")
    said, states = _sglang(folder, given) if to == SGLANG else _speculators(folder, given)
    config = LlamaConfig(**{key: value for key, value in said.items() if key not in ("model_type", "architectures")})
    if (config.hidden_size, config.vocab_size, config.num_hidden_layers) != (hidden, vocab, 1):
        raise UserError(f"{folder}: its config is not of one layer on a trunk of {hidden} numbers and {vocab} tokens")
    if len(states) != 3 or not all(0 < state < layers for state in states):
        raise UserError(f"{folder}: it fuses the states {list(states)}, the engine needs 3 of 1 to {layers - 1}")
    rows = given.get("draft_vocab_size")
    rows = vocab if rows is None else rows
    prefix = "midlayer" if to == SGLANG else "layers.0"
    weights = _read(folder / "model.safetensors", config, prefix, hidden, rows, vocab)
    offset, drafted = weights.pop("d2t", None), weights.pop("t2d", None)
    count = len(weights) + 2 * (offset is not None)
    tokens = None if offset is None else offset + torch.arange(rows)
    if tokens is not None and (drafted is None or not torch.equal(drafted.nonzero()[:, 0], tokens.sort().values)):
        raise UserError(f"{folder}: d2t and t2d name different tokens")
    short = {name.removeprefix(f"{prefix}.").removesuffix(".weight"): value for name, value in weights.items()}
    return EngineLayer(short, config, states, tokens, vocab, count)


def _sglang(folder: Path, given: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Its config is the layer's own; it names the layers that write what is fused."""
    if given.get("architectures") != ["LlamaForCausalLMEagle3"] or given.get("tie_word_embeddings", True):
        raise UserError(f"{folder}: SGLang does not take this config for an EAGLE-3 layer with a projection of its own")
    ids = (given.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    return given, tuple(layer + 1 for layer in ids)


def _speculators(folder: Path, given: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """vLLM's config is the nested one of the layer; the rest says how it is used."""
    try:
        proposal = given["speculators_config"]["proposal_methods"][0]
        complete = proposal["speculative_tokens"] >= 1 and given["speculators_config"]["verifier"]["name_or_path"]
        nested = dict(given["transformer_layer_config"])
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{folder}: its config is none of speculators ({error!r} is missing)") from error
    if given.get("speculators_model_type") != "eagle3" or not complete:
        raise UserError(f"{folder}: vLLM does not take this config for an EAGLE-3 layer")
    if given.get("norm_before_residual", True):
        raise UserError(f"{folder}: by norm_before_residual the engine adds to the hidden state's norm")
    return nested, tuple(given.get("eagle_aux_hidden_state_layer_ids") or ())


def _read(path: Path, config: LlamaConfig, prefix: str, hidden: int, rows: int, vocab: int) -> dict[str, Tensor]:
    """The tensors, which must be the engine's own: none missing, left over or of another shape."""
    size, inner = config.head_dim, config.intermediate_size
    heads, shared = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.hidden_norm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (heads, 2 * hidden),
        f"{prefix}.self_attn.k_proj.weight": (shared, 2 * hidden),
        f"{prefix}.self_attn.v_proj.weight": (shared, 2 * hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
    }
    if rows < vocab:
        shapes |= {"d2t": (rows,), "t2d": (vocab,)}
    weights = read_tensors(path, list(tensor_files(path)))
    for name in sorted(shapes.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != shapes.get(name):
            needed = shapes.get(name, "none of that name")
            raise UserError(f"{path}: tensor {name} is {found}, the engine needs {needed}")
    return weights
