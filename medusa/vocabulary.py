"""The draft vocabulary: the tokens that heads choose from, where all of them would cost too much.

Text is mostly made of few tokens, and a head's projection costs in proportion to its rows: on a small trunk with a
large vocabulary more than all else. So heads may draft from the most frequent tokens alone (Zhao et al. 2025, FR-Spec).
Only guesses are lost by it: the trunk still verifies in its whole vocabulary.

Ids stand in ascending order. So a set of tokens has one form, its order is that of the whole vocabulary (with every id
in it nothing changes), and an id's place is found by bisection, without a table of V.

Dimensions: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from medusa.errors import UserError
from medusa.trunk import Trunk


def token_counts(texts: Iterable[Tensor], vocab: int) -> Tensor:
    """How often each id below ``vocab`` occurs in ``texts``, of any shapes: int64 [V].

    Ids below 0, the labels of tokens that are not supervised, do not count: give labels to count what heads predict.
    """
    counts_V = torch.zeros(vocab, dtype=torch.long)
    for ids in texts:
        counts_V += ids[ids >= 0].cpu().bincount(minlength=vocab)
    return counts_V


def draft_vocabulary(trunk: Trunk, counts_V: Tensor, size: int, name: str = "heads.vocab") -> Tensor:
    """The ``size`` tokens that occur most often, by ``counts_V`` int64 [V]: int64 [size], ascending.

    EOS and the tokenizer's special tokens are among them wherever they occur at all, since they end and divide texts.
    Of equally frequent tokens the lower id is taken, in a BPE the one merged earlier. Ids that the tokenizer lacks are
    left out, whatever their counts. ``name`` is that of the setting, for errors.

    Raises:
        UserError: a size beyond the tokenizer's, or too small for the special tokens that occur.
    """
    assert counts_V.shape == (trunk.vocab_size,)
    if not 1 <= size <= trunk.draftable:
        raise UserError(f"{name}={size}: the tokenizer has {trunk.draftable} tokens; give 1 to that many, or null")
    counts_V = counts_V[: trunk.draftable].clone()
    special = {*getattr(trunk.tokenizer, "all_special_ids", ()), *trunk.eos_ids}
    kept = sorted(token for token in special if token < len(counts_V) and counts_V[token] > 0)
    if len(kept) > size:
        raise UserError(f"{name}={size}: {len(kept)} special tokens occur in the text; give at least that many")
    counts_V[kept] = counts_V.max() + 1
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values


def check_ids(ids: Tensor, size: int, trunk: Trunk) -> None:
    """Raise UserError unless ``ids`` are ``size`` ascending ids of tokens that the tokenizer has."""
    if ids.dtype != torch.long or ids.shape != (size,):
        raise UserError(f"draft_ids are {ids.dtype} {tuple(ids.shape)}: heads.vocab={size} needs that many int64 ids")
    if bool((ids.diff() <= 0).any()):
        raise UserError("draft_ids do not ascend: give each id once, in ascending order")
    if int(ids[0]) < 0 or int(ids[-1]) >= trunk.draftable:
        raise UserError(f"draft_ids reach from {int(ids[0])} to {int(ids[-1])}: ids lie in 0..{trunk.draftable - 1}")
