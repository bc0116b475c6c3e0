"""What a model's config says of it: windows, limits, scales, and what can't be driven with a token tree.

Read off the config alone: no short trial would show a window of 4,096 tokens, or frequencies that change after 8,192.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from medusa.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
# Sub-configs of a language model alone; any other stands for a second sense: pictures, sound.
OWN_PARTS = ("text_config", "attn_config", "ffn_config", "quantization_config")
SENSES = ("vision", "audio", "image", "video", "speech", "vq")
LIBRARY, FOLDED, OWN = "sdpa", "medusa_folded", "medusa_attention"  # the last two are ours: medusa/folded.py
MASKED = (LIBRARY, "eager")  # the library's attentions that take a mask per query and key


def refuse_by_config(family: str, config: Any, has_positions: bool = True, stateful: bool = False) -> None:
    """Refuse by name a model whose attention does not go by explicit positions, or whose layers can't roll back.

    ``config`` is the whole model's. ``has_positions``: whether its forward takes ``position_ids``. ``stateful``:
    whether it carries a state from token to token.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model type {family!r} is an encoder-decoder: use a trunk that is a causal language model")
    if parts := other_parts(config):
        raise UserError(
            f"model type {family!r} is more than a language model ({', '.join(parts)}): give its text model, saved on"
            " its own, as the trunk"
        )
    if stateful:
        raise UserError(
            f"model type {family!r} keeps a running state (state-space or linear-attention layers), which can't roll"
            " back a rejected draft: use a trunk with attention only"
        )
    text = text_config(config)
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - {FULL, SLIDING})
    if unknown:
        raise UserError(
            f"model type {family!r} has layers of type {', '.join(unknown)}, which can't score a token tree or can't"
            " roll back a rejected draft: use a trunk with full or sliding attention only"
        )
    _refuse_positions(family, text, has_positions)
    refuse_attention(getattr(text, "_attn_implementation", None))


def refuse_attention(name: Any) -> None:
    """Refuse an attention that takes no mask per query and key; None and a choice per part are left to the library."""
    if isinstance(name, str) and name not in (*MASKED, FOLDED, OWN):
        raise UserError(f"attn_implementation={name!r} takes no mask of a token tree: give {' or '.join(MASKED)}")


def _refuse_positions(family: str, config: Any, has_positions: bool) -> None:
    reasons = {
        "has ALiBi": bool(getattr(config, "alibi", False)),
        "has local layers": "local" in (getattr(config, "attention_layers", None) or ()),
        "takes none: ALiBi, or relative attention": not has_positions,
    }
    if found := next((reason for reason, given in reasons.items() if given), None):
        raise UserError(
            f"model type {family!r} does not attend by explicit positions (it {found}), so a token tree can't be scored"
            " exactly: use a trunk with rotary or learned positions"
        )


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model, often all of it."""
    try:
        return config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # it holds several
        return config


def other_parts(config: Any) -> list[str]:
    """The sub-configs of a model that is more than a language model: its pictures, its sound. Empty for the others."""
    held = [key for key, value in vars(config).items() if key.endswith(("_config", "_encoder")) and value is not None]
    other = [key for key in held if key not in OWN_PARTS and key.startswith(SENSES)]
    return other or (held if text_config(config) is not config else [])


def windows(config: Any) -> dict[str, int | None]:
    """Sliding window per layer type; a model without layer types has one entry, for all of its layers."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        return {FULL: window}
    return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}


def context(config: Any) -> int | None:
    """Most positions the model can take; None if it knows no limit."""
    sizes = (getattr(config, key, None) for key in CONTEXT_KEYS)
    return next((size for size in sizes if isinstance(size, int)), None)


def turning_point(config: Any) -> tuple[int | None, bool]:
    """The position at which rotary frequencies change, if they do, and whether they go on changing beyond it."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for kind in kinds:
        if kind.get("rope_type") == "dynamic":
            return context(config), True
        if kind.get("rope_type") == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            return kind.get("original_max_position_embeddings") or own or context(config), False
    return None, False


class Scaling(NamedTuple):
    """What a model does to its projection's output: Cohere's factor, Granite's divisor, Gemma's softcap."""

    factor: float | None
    divisor: float | None
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> Scaling:
        """Read once: a config takes its time to find what it lacks."""
        names = "logit_scale", "logits_scaling", "final_logit_softcapping"
        return cls(*(getattr(config, name, None) for name in names))

    def __call__(self, logits: Any) -> Any:
        """The logits [.., V] that the model would give."""
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()
