"""The loss of the joint stage: the trunk's own, and the heads' beside it (Cai et al. 2024, section 2.2.2).

Dimensions: B batch, T time, N supervised pairs, C pairs of a chunk, D hidden, K heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from medusa.trunk import Trunk

from .loss import HeadLoss, default_chunk
from .pairs import pair_mask
from .training import JointTraining


@dataclass(frozen=True)
class JointLoss:
    """The trunk's loss as a sum in nats over ``count`` next tokens, differentiable, and the heads' loss."""

    trunk_sum: Tensor
    count: Tensor
    heads: HeadLoss

    def total(self, heads_weight: float, counts: Tensor | None = None) -> Tensor:
        """The trunk's mean loss + ``heads_weight`` x the weighted sum of the heads' mean losses.

        ``counts`` [1 + K]: the divisors of the whole step, the trunk's first, where this is one part of it.
        """
        count, counts_K = (self.count, None) if counts is None else (counts[0], counts[1:])
        return self.trunk_sum / count.clamp(min=1) + heads_weight * self.heads.total(counts_K=counts_K)


def trunk_loss(
    trunk: Trunk,
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    segments_BT: Tensor | None,
    teacher_BTD: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the trunk's losses of supervised next tokens within segments, in nats, and their number.

    Cross-entropy to the token itself; of a teacher, whose states are given, KL(teacher's law || trunk's law). Logits
    exist by chunks of positions and are made again in the backward: the projection is frozen, so that costs no gradient
    of its size.
    """
    index_N = pair_mask(labels_BT, segments_BT, -1).flatten().nonzero()[:, 0]
    hidden_ND, token_N = hidden_BTD.flatten(0, 1)[index_N], labels_BT.flatten()[index_N + 1]
    teacher_ND = None if teacher_BTD is None else teacher_BTD.flatten(0, 1)[index_N]
    size = chunk or default_chunk(trunk.vocab_size)
    sums = []
    for start in range(0, max(len(index_N), 1), size):  # of no pairs there is one chunk, an empty one: zero gradients
        part = slice(start, start + size)
        taught_CD = None if teacher_ND is None else teacher_ND[part]
        sums.append(
            checkpoint(
                _loss_of_chunk,
                trunk,
                hidden_ND[part],
                token_N[part],
                taught_CD,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.stack(sums).sum(), torch.tensor(len(index_N), device=labels_BT.device)


def _loss_of_chunk(trunk: Trunk, hidden_CD: Tensor, token_C: Tensor, teacher_CD: Tensor | None) -> Tensor:
    law_CV = _law(trunk, hidden_CD)
    if teacher_CD is None:
        return nn.functional.nll_loss(law_CV, token_C, reduction="sum")
    with torch.no_grad():
        teacher_CV = _law(trunk, teacher_CD)
    return nn.functional.kl_div(law_CV, teacher_CV, reduction="sum", log_target=True)


def _law(trunk: Trunk, hidden: Tensor) -> Tensor:
    """The trunk's log-probabilities, at least in fp32."""
    logits = trunk.project(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def heads_weight(step: int, training: JointTraining) -> float:
    """What the heads' loss weighs at ``step``, from 0: the first quarter of a sine over the warm-up, then its peak."""
    risen = min(1.0, (step + 1) / max(training.heads_warmup, 1))
    return training.heads_weight * math.sin(0.5 * math.pi * risen)
