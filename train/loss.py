"""The joint loss of all heads, chunked so that their K x B x T x V logits never exist.

Head k at position t predicts token t+2+k (Cai et al. 2024, section 2.2, in our numbering of heads). The loss is a pure
function: tensors in, sums and counts per head out, so that micro-batches and ranks add up exactly before anything is
divided.

The gradients are made in the forward, chunk by chunk, and only scaled in the backward: the logits of a chunk are used
at once and dropped, nothing is computed twice, and what is kept has the size of the gradients, not of the tokens.

Dimensions: B batch, T time, M = B * T, N counted pairs of a head, C pairs of a chunk, D hidden, K heads, V vocabulary
(of the trunk; a head's logits have a column for each token it drafts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa.errors import UserError
from medusa.heads import MedusaHeads

from .objectives import Teacher, score
from .pairs import FIRST, Pairs


def weights(num: int, decay: float = 0.8) -> Tensor:
    """Weights of ``num`` heads, ``decay``^k, so that head 0 weighs 1: float64 [K]."""
    return decay ** torch.arange(num, dtype=torch.float64)


def default_chunk(vocab: int) -> int:
    """Pairs per chunk for a vocabulary of ``vocab``: a power of two, at most 2^24 logits where that leaves 64 pairs.

    2^24 are 64 MiB in fp32. Each chunk also makes and adds a whole gradient of the projection, hence not fewer; where V
    is small, 1024 to 4096 pairs take the same time, and 128 half as long again.
    """
    return min(4096, max(64, 1 << (2**24 // vocab).bit_length() - 1))


class HeadLoss(NamedTuple):
    """Sums and counts per head: add those of micro-batches and ranks, then divide. (A tuple, for ZeRO-3 to look into.)

    ``loss_sums_K`` in nats, differentiable, unweighted; ``counts_K`` int64, the pairs summed over; ``top1_K`` and
    ``top5_K`` int64, how many targets were first, or among the first five, of the head's law (a tie counts as a
    miss); ``weights_K`` as given; ``outside_K`` int64, the pairs whose target is outside the draft vocabulary.

    Those are among ``counts_K``: so the divisor needs no vocabulary, and a pair weighs the same with and without one.
    As labels they add nothing to the loss, and they are never hits.
    """

    loss_sums_K: Tensor
    counts_K: Tensor
    top1_K: Tensor
    top5_K: Tensor
    weights_K: Tensor
    outside_K: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[Pairs, Tensor, Tensor]], weights_K: Tensor) -> HeadLoss:
        """Of each head its pairs, the sum of their losses, and hits [2] at top-1 and top-5."""
        pairs, sums, hits = zip(*parts, strict=True)
        counts_K = torch.tensor([each.index_N.numel() for each in pairs], device=sums[0].device)
        outside_K = torch.stack([each.index_N.numel() - each.inside_N.sum() for each in pairs])
        top1_K, top5_K = torch.stack(hits, 1)
        return cls(torch.stack(sums), counts_K, top1_K, top5_K, weights_K, outside_K)

    def total(self, weights_K: Tensor | None = None, counts_K: Tensor | None = None) -> Tensor:
        """The loss to minimise: sum over heads of weight x mean over the head's own pairs.

        ``weights_K``: other weights than those given to the loss. ``counts_K``: the pairs of the whole batch where
        this is one part of it, by accumulation or on one rank; the parts' totals then add up to the batch's. Without
        any supervised token the loss is 0 and so are its gradients.
        """
        weights_K = (self.weights_K if weights_K is None else weights_K).to(self.loss_sums_K)
        counts_K = self.counts_K if counts_K is None else counts_K
        return (weights_K * self.loss_sums_K / counts_K.clamp(min=1)).sum()


def multi_head_loss(
    heads: MedusaHeads,
    hidden_BTD: Tensor,
    ids_BT: Tensor,
    labels_BT: Tensor,
    segments_BT: Tensor | None,
    weights_K: Tensor,
    chunk: int | None = None,
    teacher: Tensor | None = None,
    *,
    teacher_states: Tensor | None = None,
    acceptance: bool = False,
) -> HeadLoss:
    """Loss of every head on every pair that :func:`medusa.train.pairs.pair_mask` lets count.

    It is the cross-entropy to the label, if there is no teacher.

    A teacher's law is the trunk's of the same token, that after t+1+k. Top-1 and top-5 stay those of the label.

    Args:
        heads: the heads; their parameters get gradients, the trunk's embedding and projection never do.
        hidden_BTD: the trunk's last states; they get a gradient if they require one.
        ids_BT: the tokens, read at t+1 … by root and hydra heads.
        labels_BT: the tokens again, -100 where not supervised. Not shifted.
        segments_BT: ids of packed documents (see :func:`medusa.train.pairs.pair_mask`); None if each row is one.
        weights_K: weight of each head in :meth:`HeadLoss.total`.
        chunk: pairs whose logits exist at a time; :func:`default_chunk` if None.
        teacher: logits [B, T, V] of the trunk. The loss is then the cross-entropy to its law
            (:func:`medusa.train.objectives.soft`).
        teacher_states: the trunk's last states [B, T, D] instead: they are projected by chunks, so that the teacher's
            logits never exist as a whole, once for each head. They get no gradient.
        acceptance: of a teacher, take minus the logarithm of the probability that a guess is accepted
            (:func:`medusa.train.objectives.overlap`).

    Raises:
        UserError: a chunk below 1, not one weight per head, or acceptance without a teacher.
    """
    assert hidden_BTD.shape[:2] == ids_BT.shape == labels_BT.shape
    assert segments_BT is None or segments_BT.shape == ids_BT.shape
    num, chunk = heads.config.num, _chunk(heads, chunk, weights_K)
    taught = _teacher(heads, teacher, teacher_states, chunk)
    if acceptance and taught is None:
        raise UserError("acceptance=True and no teacher: what is accepted is told by the trunk's law; give its logits")
    hidden_MD, labels_M = hidden_BTD.flatten(0, 1), labels_BT.flatten()
    columns_M = heads.columns(labels_M)
    with torch.no_grad():  # once for all heads: as large as the states
        ids_M = ids_BT.flatten()
        embedded_ME = heads.embed(ids_M)
    parts = []
    for head in range(num):
        pairs = Pairs.of(labels_BT, segments_BT, columns_M, head)
        index_N = pairs.scored(taught is not None)
        work = _Work(heads, head, ids_M, embedded_ME, columns_M, taught, acceptance, index_N, chunk)
        loss, hit = _GradientsInForward.apply(work, torch.is_grad_enabled(), hidden_MD, *heads.heads[head].parameters())
        parts.append((pairs, loss, hit))
    return HeadLoss.of(parts, weights_K)


def _chunk(heads: MedusaHeads, chunk: int | None, weights_K: Tensor) -> int:
    """Pairs per chunk, of options that are in range."""
    if chunk is None:
        chunk = default_chunk(_width(heads))
    if chunk < 1:
        raise UserError(f"chunk={chunk}: give at least 1, the positions whose logits exist at a time")
    if weights_K.shape != (heads.config.num,):
        raise UserError(f"{weights_K.numel()} head weights for {heads.config.num} heads: give one weight per head")
    return chunk


def _width(heads: MedusaHeads) -> int:
    """Columns of a head's logits."""
    return heads.config.vocab or heads.trunk.vocab_size


def _teacher(heads: MedusaHeads, logits: Tensor | None, states: Tensor | None, chunk: int) -> Teacher | None:
    assert logits is None or states is None, "one teacher"
    if logits is None and states is None:
        return None
    logits_MV, states_MD = (None if given is None else given.flatten(0, 1) for given in (logits, states))
    whole = max(1, chunk * _width(heads) // heads.trunk.vocab_size)  # rows of all tokens as large as a chunk
    return Teacher.of(heads, logits_MV, states_MD, whole)


@dataclass(frozen=True)
class _Work:
    """What one head has to learn: ``index_N`` are its positions in the flattened batch."""

    heads: MedusaHeads
    head: int
    ids_M: Tensor
    embedded_ME: Tensor
    columns_M: Tensor
    teacher: Teacher | None
    acceptance: bool
    index_N: Tensor
    chunk: int

    def logits(self, hidden_CD: Tensor, index_C: Tensor) -> Tensor:
        """Logits [C, V] of the head at ``index_C``, differentiable."""
        context = None
        if reads := self.heads.config.reads(self.head):
            offsets = torch.arange(1, reads + 1, device=index_C.device)
            context = self.heads.context(self.head, self.embedded_ME[index_C[:, None] + offsets])
        logits_CV = self.heads.logits(self.head, self.heads.features(self.head, hidden_CD, context))
        return self.heads.behind(self.head, logits_CV, self.ids_M[index_C + 1 + self.head])

    def score(self, logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What :func:`medusa.train.objectives.score` gives for the head at ``index_C``."""
        target_C = index_C + FIRST + self.head
        return score(logits_CV, self.columns_M[target_C][:, None], self.teacher, target_C - 1, self.acceptance)


class _GradientsInForward(torch.autograd.Function):
    """One head: (work, whether gradients are wanted, hidden [M, D], its parameters) -> loss sum, hits [2]."""

    @staticmethod
    def forward(ctx: Any, work: _Work, track: bool, hidden_MD: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        states_wanted = track and ctx.needs_input_grad[2]
        learners = [p for p in parameters if track and p.requires_grad]
        losses, hits = [], []
        sums: list[Tensor] = []
        states_grad = torch.zeros_like(hidden_MD) if states_wanted else None
        for index_C in work.index_N.split(work.chunk):  # of no pairs there is one chunk, an empty one: zero gradients
            hidden_CD = hidden_MD[index_C].requires_grad_(states_wanted)
            loss, hit, grads = _learn(work, index_C, hidden_CD, learners)
            losses.append(loss)
            hits.append(hit)
            if states_grad is not None:
                states_grad[index_C] = grads.pop()
            sums = _add(sums, grads)
            del grads  # as large as the projection: gone before the next chunk makes its own
        made = [total.to(learner.dtype) for total, learner in zip(sums, learners, strict=True)]
        ctx.present = [states_wanted, *(track and p.requires_grad for p in parameters)]
        ctx.save_for_backward(*([states_grad] if states_grad is not None else []), *made)
        return torch.stack(losses).sum(), torch.stack(hits).sum(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, _hits: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        return None, None, *(next(saved) * scale if present else None for present in ctx.present)


def _learn(
    work: _Work, index_C: Tensor, hidden_CD: Tensor, learners: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss sum, hits [2] and the gradients of one chunk: of ``learners``, then of the states if they require one."""
    leaves = [*learners, hidden_CD] if hidden_CD.requires_grad else [*learners]
    with torch.set_grad_enabled(bool(leaves)):
        logits_CV = work.logits(hidden_CD, index_C)
    loss, hits, gradient_CV = work.score(logits_CV.detach(), index_C)
    if not leaves:
        return loss, hits, []
    return loss, hits, list(torch.autograd.grad(logits_CV, leaves, gradient_CV.to(logits_CV.dtype)))


def _add(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Add a chunk's gradients in at least fp32: half precision would lose what later chunks add."""
    if not sums:
        return [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return [total.add_(grad) for total, grad in zip(sums, grads, strict=True)]
