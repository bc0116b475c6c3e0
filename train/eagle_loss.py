"""The loss of an EAGLE layer over the passes in which it reads its own output, chunked so that logits never pile up.

Pass j at position t+j guesses token t+2+j, as it will in drafting when token t is the last one verified: so pass j
learns from the same pairs as head j (see medusa.train.loss), and is counted like it.

A chunk's logits are made in the forward for the loss, dropped, and made again in the backward for the gradients. With
version 1 that is all; with version 3, whose projection is trained, its gradient then exists once, not once per pass.

Dimensions: B batch, T time, M = B * T, N counted pairs of a pass, C pairs of a chunk, D hidden, K passes, V vocabulary
(a layer's logits have a column for each token it drafts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from medusa.eagle import EagleLayer

from .loss import HeadLoss, default_chunk
from .objectives import Teacher, score
from .pairs import FIRST, Pairs


class EagleLoss(NamedTuple):
    """Sums and counts per pass: ``tokens`` as of heads; ``feature_sums_K`` the distances of states, differentiable.

    A distance is the mean over the state's numbers of smooth L1. (A tuple, for DDP to look into.)
    """

    tokens: HeadLoss
    feature_sums_K: Tensor

    def total(self, feature_weight: float, counts_K: Tensor | None = None) -> Tensor:
        """The loss to minimise: of each pass the mean of tokens' losses and of distances, as :meth:`HeadLoss.total`."""
        sums_K = self.tokens.loss_sums_K + feature_weight * self.feature_sums_K
        return self.tokens._replace(loss_sums_K=sums_K).total(counts_K=counts_K)


def eagle_loss(
    layer: EagleLayer,
    states: Sequence[Tensor],
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    segments_BT: Tensor | None,
    weights_K: Tensor,
    chunk: int | None = None,
    *,
    taught: bool = False,
    features: bool = False,
) -> EagleLoss:
    """Loss of every pass on every pair that :func:`medusa.train.pairs.pair_mask` lets count.

    Args:
        layer: the layer; its projection, if it has its own, gets gradients, the trunk's never does.
        states: what each pass gave for the pairs of two tokens [B, T-1, D]; they get gradients.
        hidden_BTD: the trunk's last states.
        labels_BT: the tokens, -100 where not supervised. Not shifted.
        segments_BT: ids of packed documents; None if each row is one.
        weights_K: weight of each pass in :meth:`EagleLoss.total`.
        chunk: pairs whose logits exist at a time; :func:`medusa.train.loss.default_chunk` if None.
        taught: learn the trunk's law of a token (cross-entropy to it) in place of the label.
        features: sum up the distances to the trunk's states too (EAGLE, section 4.2); zeros otherwise.
    """
    width = layer.trunk.vocab_size if layer.draft_ids is None else len(layer.draft_ids)
    chunk = chunk or default_chunk(width)
    hidden_MD, columns_M = hidden_BTD.flatten(0, 1), layer.columns(labels_BT.flatten())
    whole = max(1, chunk * width // layer.trunk.vocab_size)  # rows of all tokens as large as a chunk
    work = _Work(layer, columns_M, Teacher.of(layer, None, hidden_MD, whole) if taught else None)
    parts, distances = [], []
    for step, state_BTD in enumerate(states):
        pairs = Pairs.of(labels_BT, segments_BT, columns_M, step)
        state_MD = torch.nn.functional.pad(state_BTD, (0, 0, 0, 1)).flatten(0, 1)  # counted as tokens are
        index_N = pairs.index_N + step
        distances.append(_distance(state_MD[index_N], hidden_MD[index_N + 1]) if features else state_MD.new_zeros(()))
        parts.append((pairs, *work.score(state_MD, pairs.scored(taught) + step, chunk)))
    of_tokens = HeadLoss.of(parts, weights_K)
    return EagleLoss(of_tokens, torch.stack(distances).to(of_tokens.loss_sums_K.dtype))


def _distance(state_ND: Tensor, feature_ND: Tensor) -> Tensor:
    """Sum over pairs of the mean smooth L1 between the layer's states and the trunk's, in at least fp32."""
    wide = torch.promote_types(state_ND.dtype, torch.float32)
    total = torch.nn.functional.smooth_l1_loss(state_ND.to(wide), feature_ND.to(wide), reduction="sum")
    return total / state_ND.shape[1]


@dataclass(frozen=True)
class _Work:
    """What the passes learn: ``columns_M`` are the flattened batch's tokens in the layer's own vocabulary."""

    layer: EagleLayer
    columns_M: Tensor
    teacher: Teacher | None

    def score(self, state_MD: Tensor, index_N: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """Sum of the losses at ``index_N``, where the states stand, and hits [2] at top-1 and top-5."""
        losses, hits = [], []
        for index_C in index_N.split(chunk):  # of no pairs there is one chunk, an empty one: zero gradients
            part: tuple[Tensor, Tensor] = (
                checkpoint(self._chunk, state_MD[index_C], index_C, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else self._chunk(state_MD[index_C], index_C)
            )
            losses.append(part[0])
            hits.append(part[1])
        return torch.stack(losses).sum(), torch.stack(hits).sum(0)

    def _chunk(self, state_CD: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _Scored.apply(self.layer.logits(state_CD), index_C, self)
        return found


class _Scored(torch.autograd.Function):
    """(logits [C, V], index [C], work) -> loss sum, hits [2]; the gradient is known in closed form."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, index_C: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
        target_C = index_C + FIRST
        column_C1 = work.columns_M[target_C][:, None]
        loss, hits, gradient_CV = score(logits_CV, column_C1, work.teacher, target_C - 1)
        ctx.save_for_backward(gradient_CV.to(logits_CV.dtype))
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, _hits: Tensor) -> tuple[Tensor, None, None]:
        (gradient_CV,) = ctx.saved_tensors
        return (gradient_CV * scale).to(gradient_CV.dtype), None, None
