"""EAGLE-3 layers in the layouts that SGLang and vLLM (by way of `speculators`) read.

Tensors are those of the paper's own checkpoints (Li et al. 2025, EAGLE-3): ``fc``, one decoder layer with
``hidden_norm`` and ``input_layernorm``, ``norm``, ``lm_head``, and of a draft vocabulary ``d2t`` (what is added to a
column's number to give its token) and ``t2d`` (which tokens are drafted). The layer is ``midlayer`` for SGLang and
``layers.0`` for the other. The embedding is left out: both take the trunk's.

Which of the trunk's states are fused is counted differently. Here and in vLLM number k is what layer k reads, counted
from 0, so 0 is the embedding; SGLang's config has the layer that writes it, k - 1. Neither can take the last state,
which is behind the final norm.

Dimensions: D hidden, V vocabulary, V' the tokens drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa.eagle import EagleConfig, EagleLayer
from medusa.exports import Export
from medusa.matrices import NotExpressible, refuse_bias, rounded, scaled

FUSED = 3  # states that both engines' own layers fuse


@dataclass(frozen=True)
class EagleLayout:
    """One engine's layout: what it is called, how its names of the layer's tensors begin, and its config."""

    engine: str
    layer: str
    config: Callable[[EagleLayer, dict[str, Any], str, int], dict[str, Any]]


def _sglang(layer: EagleLayer, sizes: dict[str, Any], base: str, depth: int) -> dict[str, Any]:
    written_by = [state - 1 for state in layer.layers]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **sizes,
        "draft_vocab_size": _rows(layer),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": written_by},
        "base_model_name_or_path": base,
    }


def _speculators(layer: EagleLayer, sizes: dict[str, Any], base: str, depth: int) -> dict[str, Any]:
    kind = sizes.pop("torch_dtype")
    greedy = {"proposal_type": "greedy", "speculative_tokens": depth}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "torch_dtype": kind,
        "draft_vocab_size": _rows(layer),
        # Left out, it counts as true in vLLM: then the norm of the hidden state would be added to, not that state.
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(layer.layers),
        "tie_word_embeddings": False,
        "transformer_layer_config": sizes,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": base, "architectures": [type(layer.trunk.model).__name__]},
        },
    }


EAGLE_LAYOUTS = {
    "sglang": EagleLayout("SGLang", "midlayer", _sglang),
    "speculators": EagleLayout("vLLM (speculators)", "layers.0", _speculators),
}


def refuse_eagle(config: EagleConfig, layout: EagleLayout) -> None:
    """Refuse what can be seen to be beyond a layout without any weights.

    Raises:
        NotExpressible: a version that the layout has no words for.
    """
    if config.version != 3:
        raise NotExpressible(
            f"eagle.version={config.version}: the layer of that version has norms here that published ones lack, and"
            f" {layout.engine} knows only those"
        )


def export_eagle(
    layer: EagleLayer, layout: EagleLayout, *, base: str, depth: int, dtype: torch.dtype | None = None
) -> Export:
    """What the folder of this layer holds; ``base`` is the name by which the engine finds the trunk.

    ``depth``: tokens drafted in a step, for layouts that say so. ``dtype``: of the weights; None for what they are in.

    Raises:
        NotExpressible: a layer that the engines have no words for.
        UserError: weights that overflow ``dtype``.
    """
    refuse_eagle(layer.config, layout)
    _check(layer, layout)
    kept = dtype or next(layer.parameters()).dtype
    weights: dict[str, Tensor] = {}
    for name, value in layer.state_dict().items():
        if name == "lm_head.weight":
            weights[name] = rounded(scaled(value, layer.trunk), kept, "the layer's projection")
        elif name not in ("draft_ids", "lm_head.bias"):
            own = name.removeprefix("body.")
            theirs = f"{layout.layer}.{own.removeprefix('layer.')}" if own.startswith("layer.") else own
            weights[theirs] = rounded(value, kept, theirs)
    ids, vocab = layer.draft_ids, layer.trunk.vocab_size
    if ids is not None and len(ids) < vocab:
        ids = ids.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    config = layout.config(layer, _llama(layer, kept), base, depth)
    return Export(config, weights, ("model.safetensors",), [])


def _rows(layer: EagleLayer) -> int:
    """V'."""
    assert layer.lm_head is not None
    return len(layer.lm_head.weight)


def _llama(layer: EagleLayer, dtype: torch.dtype) -> dict[str, Any]:
    """The layer as a Llama of one layer, in the words of such a model's config."""
    sizes, rope = layer.sizes, dict(layer.sizes.rope)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    own = layer.trunk.config
    return {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": sizes.eps,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "max_position_embeddings": layer.trunk.context or 2048,
        "vocab_size": layer.trunk.vocab_size,
        "bos_token_id": getattr(own, "bos_token_id", None),
        "eos_token_id": getattr(own, "eos_token_id", None),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _check(layer: EagleLayer, layout: EagleLayout) -> None:
    """Refuse what neither engine's own layer does.

    Raises:
        NotExpressible: what it is.
    """
    sizes, total = layer.sizes, layer.trunk.config.num_hidden_layers
    if len(layer.layers) != FUSED or max(layer.layers) >= total:
        raise NotExpressible(
            f"the layer fuses the states {list(layer.layers)} of the trunk, and {layout.engine} takes {FUSED}, all"
            f" before the last, {total}"
        )
    if sizes.embedding != sizes.hidden or layer.trunk.hidden_size != layer.trunk.config.hidden_size:
        raise NotExpressible(
            f"the trunk's embeddings are of {sizes.embedding} numbers and its states of {sizes.hidden}:"
            f" {layout.engine} takes them to be alike"
        )
    if sizes.fc_bias or sizes.qkv_bias:
        raise NotExpressible(f"the layer has biases that {layout.engine} has no place for")
    assert layer.lm_head is not None
    refuse_bias(layer.lm_head.bias)
    ids = torch.arange(min(4, layer.trunk.vocab_size), device=layer.trunk.device)
    if not torch.equal(layer.trunk.embed(ids), layer.trunk.model.get_input_embeddings().weight[ids]):
        raise NotExpressible(
            f"the trunk (model type {layer.trunk.family!r}) scales its embeddings as it looks them up, and"
            f" {layout.engine} gives the layer the bare ones"
        )
