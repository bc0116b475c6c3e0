"""Which tokens what drafts learns to guess, and from which positions: head k at position t predicts token t+2+k.

Dimensions: B batch, T time, M = B * T, N counted pairs of a head, K heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # the label of a token that is not supervised, as everywhere in torch and transformers
FIRST = 2  # head 0 predicts t+2: the trunk's own head predicts t+1


def pair_mask(labels_BT: Tensor, segments_BT: Tensor | None, head: int) -> Tensor:
    """Which positions t head ``head`` learns from: bool [B, T].

    The target t+2+head must exist, be supervised (its label is not -100), and lie in the segment of t. A segment is
    one run of equal ids, and no id comes back later in its row, so equal ids at both ends mean that no seam lies
    between them. Left padding must be a segment of its own.
    """
    shift = FIRST + head
    mask_BT = torch.zeros_like(labels_BT, dtype=torch.bool)
    starts = mask_BT[:, : max(0, labels_BT.shape[1] - shift)]
    starts.copy_(labels_BT[:, shift:] != IGNORE)
    if segments_BT is not None:
        starts &= segments_BT[:, : starts.shape[1]] == segments_BT[:, shift:]
    return mask_BT


def count_pairs(labels_BT: Tensor, segments_BT: Tensor | None, num: int) -> Tensor:
    """How many pairs each of ``num`` heads learns from: int64 [K].

    Needs no forward: summed over micro-batches and ranks *before* the first of them, it is the divisor that makes
    accumulation exact with uneven lengths too.
    """
    return torch.stack([pair_mask(labels_BT, segments_BT, head).sum() for head in range(num)])


class Pairs(NamedTuple):
    """What one head learns from, as positions t in the flattened batch.

    ``index_N`` are all pairs that count, ``inside_N`` says of each whether its target is in the draft vocabulary.
    """

    index_N: Tensor
    inside_N: Tensor

    @classmethod
    def of(cls, labels_BT: Tensor, segments_BT: Tensor | None, columns_M: Tensor, head: int) -> Pairs:
        """The pairs of head ``head``; ``columns_M`` are the labels' columns in its logits (see ``Bound.columns``)."""
        index_N = pair_mask(labels_BT, segments_BT, head).flatten().nonzero()[:, 0]
        return cls(index_N, columns_M[index_N + FIRST + head] >= 0)

    def scored(self, taught: bool) -> Tensor:
        """Those with something to learn: outside the draft vocabulary a law is, a label is not."""
        return self.index_N if taught else self.index_N[self.inside_N]
