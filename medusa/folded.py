"""Attention under a mask without copies of keys and values.

Where several query heads share one head of keys and values, the library's ``sdpa`` attention repeats keys and values
for every step of more than one token that has a mask: the whole cache is copied, in every layer. There are two other
ways. *Folded*, the query heads of a group are laid behind each other along the query axis: nothing is copied but the
mask, once per step. *Our own* is :mod:`medusa.tree_attention`, on a processor, which copies nothing. They are the same
sum, so that rounding alone differs. Used where they are faster, which is tried at load.

One of the files that know transformers' models.

Dimensions: B rows, N new tokens, G query heads per head of keys and values, T slots in view, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa.errors import UserError
from medusa.family import FOLDED, LIBRARY, OWN
from medusa.machine import in_turns, own_seconds
from medusa.parallel import agreed
from medusa.selfcheck import check_tree
from medusa.tree_attention import available, define, fits, in_trace, tree_attention

if TYPE_CHECKING:
    from medusa.trunk import Trunk

Mask = Tensor | dict[str, Tensor | None] | None

MOST = 64  # tokens: beyond that the products take the time, and G masks would be large
TRIAL, TRIAL_SLOTS = (1, 8), 512  # nodes of each trial, and slots in view: plain decoding, and a usual tree
CLOSE = 1.2  # times the least: about as fast
CHANGES = "softcap", "s_aux", "output_attentions"  # what attention is asked for beside the plain sum


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


def own_attention(
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
    """Attention [B, N, heads, D] by :mod:`medusa.tree_attention`, as an operation in traces; where that doesn't serve,
    with gradients, or if a score is to be changed, the library's.
    """
    asked = [options.get(name) for name in CHANGES]
    plain = dropout == 0.0 and position_bias is None and all(each is None or each is False for each in asked)
    recorded = torch.is_grad_enabled() or torch.jit.is_tracing()
    if plain and not recorded and fits(query, key, value, attention_mask):
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        attend = in_trace if is_compiling() else tree_attention
        return attend(query, key, value, attention_mask, scale), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **options
    )


def settle(trunk: Trunk, choose: bool = True) -> Trunk:
    """Check a trunk (:func:`medusa.selfcheck.check_tree`), with the attention that is fastest here; return it.

    One that is not exact with another attention stays as it was. ``choose=False``: it stays as it is.

    Raises:
        UserError: it can't be driven exactly.
    """
    name = agreed(trunk.model, fastest(trunk)) if choose and _can_change(trunk) else LIBRARY
    if name != LIBRARY:
        _register()
        try:
            _attend_by(trunk, name)
            check_tree(trunk)
        except UserError:
            _attend_by(trunk, LIBRARY)
        else:
            return trunk
    check_tree(trunk)
    return trunk


def _can_change(trunk: Trunk) -> bool:
    can = getattr(trunk.model, "_can_set_attn_implementation", lambda: False)
    return getattr(trunk.config, "_attn_implementation", None) == LIBRARY and can()


def _register() -> None:
    define()
    for name, attend in ((FOLDED, folded_attention), (OWN, own_attention)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, sdpa_mask)


def _attend_by(trunk: Trunk, name: str) -> None:
    trunk.model.set_attn_implementation(name)
    trunk.copies = copies_in(trunk.config)


@contextmanager
def library_attention(*models: Any) -> Iterator[None]:
    """Models with the library's own attention for a while, to compare with."""
    names = {model: getattr(model.config, "_attn_implementation", None) for model in models}
    changed = {model: name for model, name in names.items() if name in (FOLDED, OWN)}
    for model in changed:
        model.set_attn_implementation(LIBRARY)
    try:
        yield
    finally:
        for model, name in changed.items():
            model.set_attn_implementation(name)


@torch.inference_mode()
def fastest(trunk: Trunk, clock: Callable[..., float] = own_seconds) -> str:
    """The attention that is fastest in one layer, for a token and for a tree: tried in turns, milliseconds in all.

    Of two that are about as fast it is the one that copies less, so that luck on a busy machine seldom decides.
    """
    plane, ways = trunk.layers[0].keys, _ways(trunk)
    if len(ways) == 1:
        return next(iter(ways))
    middle = {name: median(tried) for name, tried in in_turns(ways, plane.device, clock).items()}
    enough = CLOSE * min(middle.values())
    return next(name for name in (OWN, FOLDED, LIBRARY) if middle.get(name, math.inf) <= enough)


def _ways(trunk: Trunk) -> dict[str, Callable[[], object]]:
    """The attentions that such a trunk can have, each tried over :data:`TRIAL`."""
    plane, copies = trunk.layers[0].keys, groups(trunk.config)
    made = {"dtype": plane.dtype, "device": plane.device}
    module: Any = torch.nn.Module()
    module.num_key_value_groups = copies
    key = torch.zeros(1, plane.heads, TRIAL_SLOTS, plane.size, **made)  # type: ignore[call-overload]
    queries = [torch.zeros(1, copies * plane.heads, nodes, plane.size, **made) for nodes in TRIAL]  # type: ignore[call-overload]
    masks = [None if nodes == 1 else torch.zeros(1, 1, nodes, TRIAL_SLOTS, **made) for nodes in TRIAL]  # type: ignore[call-overload]

    def tried(attend: Callable[..., object], copies: int = 1) -> Callable[[], object]:
        given = [fold_mask(mask, copies) for mask in masks]
        return lambda: [attend(module, query, key, key, mask) for query, mask in zip(queries, given, strict=True)]

    ways = {LIBRARY: tried(sdpa_attention_forward)}
    if copies > 1:
        ways[FOLDED] = tried(folded_attention, copies)
    if all(fits(query, key, key, mask) for query, mask in zip(queries, masks, strict=True)) and available():
        ways[OWN] = tried(own_attention)
    return ways
