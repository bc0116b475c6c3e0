"""The joint loss of all heads, chunked so that their K x B x T x V logits never exist.

Head k at position t predicts token t+2+k (Cai et al. 2024, section 2.2, in our numbering of heads). The loss is a pure
function: tensors in, sums and counts per head out, so that micro-batches and ranks add up exactly before anything is
divided.

The gradients are made in the forward, chunk by chunk, and only scaled in the backward: the logits of a chunk are used
at once and dropped, nothing is computed twice, and what is kept has the size of the gradients, not of the tokens.

Dimensions: B batch, T time, M = B * T, N counted pairs of a head, C pairs of a chunk, D hidden, K heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa.errors import UserError
from medusa.heads import MedusaHeads

IGNORE = -100  # the label of a token that is not supervised, as everywhere in torch and transformers
FIRST = 2  # head 0 predicts t+2: the trunk's own head predicts t+1


def weights(num: int, decay: float = 0.8) -> Tensor:
    """Weights of ``num`` heads, ``decay``^k, so that head 0 weighs 1: float64 [K]."""
    return decay ** torch.arange(num, dtype=torch.float64)


def default_chunk(vocab: int) -> int:
    """Pairs per chunk for a vocabulary of ``vocab``: a power of two, at most 2^24 logits where that leaves 64 pairs.

    2^24 are 64 MiB in fp32. Each chunk also makes and adds a whole gradient of the projection, hence not fewer; where V
    is small, 1024 to 4096 pairs take the same time, and 128 half as long again.
    """
    return min(4096, max(64, 1 << (2**24 // vocab).bit_length() - 1))


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


@dataclass(frozen=True)
class HeadLoss:
    """Sums and counts per head: add those of micro-batches and ranks, then divide.

    ``loss_sums_K`` in nats, differentiable, unweighted; ``counts_K`` int64, the pairs summed over; ``top1_K`` and
    ``top5_K`` int64, how many targets were first, or among the first five, of the head's law (a tie counts as a
    miss); ``weights_K`` as given.
    """

    loss_sums_K: Tensor
    counts_K: Tensor
    top1_K: Tensor
    top5_K: Tensor
    weights_K: Tensor

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
) -> HeadLoss:
    """Cross-entropy of every head on every pair that :func:`pair_mask` lets count.

    Args:
        heads: the heads; their parameters get gradients, the trunk's embedding and projection never do.
        hidden_BTD: the trunk's last states; they get a gradient if they require one.
        ids_BT: the tokens, read at t+1 … by root and hydra heads.
        labels_BT: the tokens again, -100 where not supervised. Not shifted.
        segments_BT: ids of packed documents (see :func:`pair_mask`); None if each row is one.
        weights_K: weight of each head in :meth:`HeadLoss.total`.
        chunk: pairs whose logits exist at a time; :func:`default_chunk` if None.
        teacher: logits [B, T, V] of the trunk. The loss is then the cross-entropy to its law of the same token, that
            at t+1+k, instead of to the label (top-1 and top-5 stay those of the label).

    Raises:
        UserError: a chunk below 1, or not one weight per head.
    """
    num = heads.config.num
    chunk = default_chunk(heads.trunk.vocab_size) if chunk is None else chunk
    if chunk < 1:
        raise UserError(f"chunk={chunk}: give at least 1, the positions whose logits exist at a time")
    if weights_K.shape != (num,):
        raise UserError(f"{weights_K.numel()} head weights for {num} heads: give one weight per head")
    assert hidden_BTD.shape[:2] == ids_BT.shape == labels_BT.shape
    assert segments_BT is None or segments_BT.shape == ids_BT.shape
    assert teacher is None or teacher.shape[:2] == ids_BT.shape
    hidden_MD, labels_M = hidden_BTD.flatten(0, 1), labels_BT.flatten()
    with torch.no_grad():  # once for all heads: as large as the states
        embedded_ME = heads.embed(ids_BT.flatten())
    teacher_MV = None if teacher is None else teacher.detach().flatten(0, 1)
    sums, counts, top1, top5 = [], [], [], []
    for head in range(num):
        index_N = pair_mask(labels_BT, segments_BT, head).flatten().nonzero()[:, 0]
        work = _Work(heads, head, embedded_ME, labels_M, teacher_MV, index_N, chunk)
        parameters = heads.heads[head].parameters()
        loss, hits = _GradientsInForward.apply(work, torch.is_grad_enabled(), hidden_MD, *parameters)
        sums.append(loss)
        counts.append(index_N.numel())
        top1.append(hits[0])
        top5.append(hits[1])
    counts_K = torch.tensor(counts, device=ids_BT.device)
    return HeadLoss(torch.stack(sums), counts_K, torch.stack(top1), torch.stack(top5), weights_K)


@dataclass(frozen=True)
class _Work:
    """What one head has to learn: ``index_N`` are its positions in the flattened batch."""

    heads: MedusaHeads
    head: int
    embedded_ME: Tensor
    labels_M: Tensor
    teacher_MV: Tensor | None
    index_N: Tensor
    chunk: int

    def logits(self, hidden_CD: Tensor, index_C: Tensor) -> Tensor:
        """Logits [C, V] of the head at ``index_C``, differentiable."""
        context = None
        if reads := self.heads.config.reads(self.head):
            offsets = torch.arange(1, reads + 1, device=index_C.device)
            context = self.heads.context(self.head, self.embedded_ME[index_C[:, None] + offsets])
        return self.heads.logits(self.head, self.heads.features(self.head, hidden_CD, context))

    def score(self, logits_CV: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of the losses, hits [2] at top-1 and top-5, and the gradient [C, V] of the sum.

        At least fp32 from here on, whatever the logits are in. Two tensors of C x V are alive: the logits and this
        one's log-probabilities, which become the gradient in place (a teacher adds two).
        """
        target_C1 = self.labels_M[index_C + FIRST + self.head][:, None]
        law_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).log_softmax(-1)
        chosen_C1 = law_CV.gather(1, target_C1)
        # Counted from below: a NaN is then a miss, not a hit.
        rank_C = law_CV.shape[1] - 1 - (law_CV < chosen_C1).sum(1)
        hits = torch.stack([(rank_C < 1).sum(), (rank_C < 5).sum()])
        if self.teacher_MV is None:
            gradient_CV = law_CV.exp_()  # of -log softmax(x)[target]: softmax(x) - onehot(target)
            gradient_CV.scatter_add_(1, target_C1, gradient_CV.new_full(target_C1.shape, -1.0))
            return -chosen_C1.sum(), hits, gradient_CV
        wanted_CV = self.teacher_MV[index_C + FIRST - 1 + self.head].to(law_CV.dtype).softmax(-1)
        loss = -torch.linalg.vecdot(wanted_CV, law_CV).sum()
        return loss, hits, law_CV.exp_().sub_(wanted_CV)


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
