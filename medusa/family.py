"""What a model's config says about how it attends: windows, limits, and what can't be driven with a token tree.

Read off the config alone: no short trial would show a window of 4,096 tokens, or frequencies that change after 8,192.
"""

from __future__ import annotations

from typing import Any

from medusa.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def refuse_by_config(family: str, config: Any, has_positions: bool) -> None:
    """Refuse by name a model whose attention does not go by explicit positions, or whose layers can't roll back.

    ``has_positions``: whether its forward takes ``position_ids``.
    """
    local = "local" in (getattr(config, "attention_layers", None) or ())
    if not has_positions or getattr(config, "alibi", False) or local:
        raise UserError(
            f"model type {family!r} does not attend by explicit positions (it has ALiBi or local layers), so a token"
            " tree can't be scored exactly: use a trunk with rotary or learned positions"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING})
    if unknown:
        raise UserError(
            f"model type {family!r} has layers of type {', '.join(unknown)}, which can't roll back a rejected draft:"
            " use a trunk with full or sliding attention only"
        )


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
