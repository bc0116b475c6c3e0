"""Grouped-query attention under a mask without copies of keys and values.

Where several query heads share one head of keys and values, the library's ``sdpa`` attention repeats keys and values
for every step of more than one token that has a mask: the whole cache is copied, in every layer. Here the query heads
of a group are laid behind each other along the query axis instead: nothing is copied but the mask, once per step. It is
the same sum, so that rounding alone differs. Used where it is faster, which is tried at load.

One of the files that know transformers' models.

Dimensions: B rows, N new tokens, G query heads per head of keys and values, T slots in view, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa.errors import UserError
from medusa.family import FOLDED, LIBRARY
from medusa.machine import seconds
from medusa.parallel import agreed
from medusa.selfcheck import check_tree

if TYPE_CHECKING:
    from medusa.trunk import Trunk

Mask = Tensor | dict[str, Tensor | None] | None

MOST = 64  # tokens: beyond that the products take the time, and G masks would be large
TRIAL = 8, 512  # nodes and slots in view of the trial: a usual step
ROUNDS = 9


def groups(config: Any) -> int:
    """G; 1 where every query head has keys and values of its own."""
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1 or heads % shared:
        return 1
    return heads // shared


def copies_in(config: Any) -> int:
    """How often a mask goes to a model with this config: G where it attends folded, else once."""
    return groups(config) if getattr(config, "_attn_implementation", None) == FOLDED else 1


def fold_mask(mask: Mask, copies: int) -> Mask:
    """The mask [B|1, 1, N, T] as :func:`folded_attention` wants it: ``copies`` times below itself, where that pays."""
    if copies == 1:
        return mask
    if isinstance(mask, dict):
        return {kind: None if each is None else _fold(each, copies) for kind, each in mask.items()}
    return None if mask is None else _fold(mask, copies)


def _fold(mask: Tensor, copies: int) -> Tensor:
    return mask.repeat(1, 1, copies, 1) if 1 < mask.shape[2] <= MOST else mask


def folded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [B, N, heads, D], by the protocol of transformers' attention functions; the library's without a fold.

    A mask of one row serves all; one of G x N rows is a folded mask, of which a layer with other groups takes its part.
    """
    nodes, fold = query.shape[2], query.shape[1] // key.shape[1]
    if attention_mask is not None:
        fits = attention_mask.shape[1] == 1 and attention_mask.shape[2] in (1, fold * nodes)
        if fits and fold > 1 and position_bias is None:
            return _attend(query, key, value, attention_mask, fold, dropout, scaling)
        attention_mask = attention_mask[:, :, :nodes]
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **options
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, fold: int, dropout: float, scaling: float | None
) -> tuple[Tensor, None]:
    rows, heads, nodes, size = query.shape
    folded = query.reshape(rows, heads // fold, fold * nodes, size)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous(), None


def settle(trunk: Trunk, choose: bool = True) -> Trunk:
    """Check a trunk (:func:`medusa.selfcheck.check_tree`), folded if its model can be and is faster here; return it.

    One that is not exact folded stays as it was. ``choose=False``: it stays as it is.

    Raises:
        UserError: it can't be driven exactly.
    """
    if choose and _can_fold(trunk) and agreed(trunk.model, folding_pays(trunk)):
        AttentionInterface.register(FOLDED, folded_attention)
        AttentionMaskInterface.register(FOLDED, sdpa_mask)
        try:
            _attend_by(trunk, FOLDED)
            check_tree(trunk)
        except UserError:
            _attend_by(trunk, LIBRARY)
        else:
            return trunk
    check_tree(trunk)
    return trunk


def _can_fold(trunk: Trunk) -> bool:
    can = getattr(trunk.model, "_can_set_attn_implementation", lambda: False)
    return groups(trunk.config) > 1 and getattr(trunk.config, "_attn_implementation", None) == LIBRARY and can()


def _attend_by(trunk: Trunk, name: str) -> None:
    trunk.model.set_attn_implementation(name)
    trunk.copies = copies_in(trunk.config)


@torch.inference_mode()
def folding_pays(trunk: Trunk, clock: Callable[[Callable[[], object]], float] = seconds) -> bool:
    """Whether one layer's attention over a usual tree is faster folded: tried in turns, some milliseconds in all."""
    plane, copies, (nodes, total) = trunk.layers[0].keys, groups(trunk.config), TRIAL
    made = {"dtype": plane.dtype, "device": plane.device}
    query = torch.ones(1, copies * plane.heads, nodes, plane.size, **made)  # type: ignore[call-overload]
    key = torch.ones(1, plane.heads, total, plane.size, **made)  # type: ignore[call-overload]
    mask = torch.zeros(1, 1, nodes, total, **made)  # type: ignore[call-overload]
    module: Any = torch.nn.Module()
    module.num_key_value_groups = copies
    folded = _fold(mask, copies)
    ways = {
        FOLDED: lambda: folded_attention(module, query, key, key, folded),
        LIBRARY: lambda: sdpa_attention_forward(module, query, key, key, mask),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(clock(way))
    return median(times[FOLDED]) < median(times[LIBRARY])
