"""What one head's guesses are scored by: sums of losses over some pairs, with their gradients in closed form.

Each loss takes ``law_CV``, the log-probabilities of the head's law q over the tokens it drafts from, and turns that
tensor into the gradient of the sum by the logits, so that no third one of its size is needed. The trunk's law p may
have mass on tokens that the head does not draft; it is never renormalised.

Dimensions: C pairs of a chunk, D hidden, M tokens of the flattened batch, V the tokens that heads draft from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa.trunk import Trunk


def hard(law_CV: Tensor, column_C1: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(x) of one token x each, whose columns are given: sum, gradient [C, V]."""
    loss = -law_CV.gather(1, column_C1).sum()
    gradient_CV = law_CV.exp_()  # q - onehot(x)
    return loss, gradient_CV.scatter_add_(1, column_C1, gradient_CV.new_full(column_C1.shape, -1.0))


def soft(law_CV: Tensor, p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_v p(v) log q(v), the mean of :func:`hard` under p: sum, gradient [C, V].

    It is KL(p || q) and p's own entropy, which no head changes. The sum is over the tokens that the head drafts, and p
    is not renormalised to them: a place whose next token is mostly none of them weighs little, as with hard labels,
    instead of teaching the few that are left.
    """
    loss = -torch.linalg.vecdot(p_CV, law_CV).sum()
    return loss, law_CV.exp_().mul_(p_CV.sum(1, keepdim=True)).sub_(p_CV)


def overlap(law_CV: Tensor, p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """-log a with a = sum_v min(p(v), q(v)): sum, gradient [C, V]. ``p_CV`` is used up.

    a is the probability that a token drawn from q is accepted (Leviathan et al. 2023, theorem 3.5). The sum runs over
    the tokens that the head drafts and p keeps its mass on the others, which is lost to acceptance. With p a one-hot
    law it is :func:`hard`.
    """
    q_CV = law_CV.exp_()
    rising_CV = q_CV.masked_fill(q_CV >= p_CV, 0)  # where more of q is more of a
    a_C1 = torch.minimum(p_CV, q_CV, out=p_CV).sum(1, keepdim=True).clamp(min=torch.finfo(q_CV.dtype).tiny)
    q_CV.mul_(rising_CV.sum(1, keepdim=True)).sub_(rising_CV).div_(a_C1)
    return -a_C1.log().sum(), q_CV


def score(
    logits_CV: Tensor, column_C1: Tensor, teacher: Teacher | None, read_C: Tensor, acceptance: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses, hits [2] at top-1 and top-5, and the gradient [C, V] of the sum by the logits.

    At least fp32 from here on, whatever the logits are in. Two tensors of C x V are alive: the logits and this one's
    log-probabilities, which become the gradient in place (a teacher adds two).

    Args:
        logits_CV: of what drafts.
        column_C1: its columns of the labels, -1 for one outside the draft vocabulary.
        teacher: whose law is learnt in place of the label.
        read_C: where the last token stands that this law follows.
        acceptance: learn :func:`overlap` with it, and not :func:`soft`.
    """
    law_CV = _wide(logits_CV).log_softmax(-1)
    # Counted from below: a NaN is then a miss, not a hit.
    rank_C1 = law_CV.shape[1] - 1 - (law_CV < law_CV.gather(1, column_C1.clamp(min=0))).sum(1, keepdim=True)
    hits = torch.stack([((rank_C1 < best) & (column_C1 >= 0)).sum() for best in (1, 5)])
    if teacher is None:
        loss, gradient_CV = hard(law_CV, column_C1)
    else:
        loss, gradient_CV = (overlap if acceptance else soft)(law_CV, teacher.law(read_C).to(law_CV.dtype))
    return loss, hits, gradient_CV


class Drafts(Protocol):
    """What a teacher needs of what it teaches: heads, or an EAGLE layer."""

    @property
    def trunk(self) -> Trunk:
        """The trunk that it drafts for."""

    @property
    def draft_ids(self) -> Tensor | None:
        """The tokens that it drafts; None for all."""

    def trunk_rows(self) -> tuple[Tensor, Tensor | None] | tuple[()]:
        """The rows of the trunk's projection for those tokens (see :meth:`medusa.heads.MedusaHeads.trunk_rows`)."""


@dataclass(frozen=True)
class Teacher:
    """The trunk's law after each token of a batch, over the tokens that are drafted.

    ``rows`` is :meth:`Drafts.trunk_rows`. The logits are either there, ``logits_MV``, or made
    of the trunk's states ``states_MD``, a few at a time. ``total_M`` is the logarithm of the sum of their exponentials
    over the whole vocabulary.
    """

    drafts: Drafts
    rows: tuple[Tensor, Tensor | None] | tuple[()]
    logits_MV: Tensor | None
    states_MD: Tensor | None
    total_M: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, drafts: Drafts, logits_MV: Tensor | None, states_MD: Tensor | None, chunk: int) -> Teacher:
        """A teacher of logits [M, all tokens], or else of states [M, D]; ``chunk`` rows of logits exist at a time."""
        given = states_MD if logits_MV is None else logits_MV
        assert given is not None
        totals = []
        for part in given.split(chunk):
            logits = drafts.trunk.project(part) if logits_MV is None else part
            totals.append(_wide(logits).logsumexp(-1))
        return cls(drafts, drafts.trunk_rows(), logits_MV, states_MD, torch.cat(totals))

    def law(self, index_C: Tensor) -> Tensor:
        """The laws [C, V] after the tokens at ``index_C``, at least in fp32. To be called without gradients."""
        if self.logits_MV is None:
            assert self.states_MD is not None
            logits_CV = self.drafts.trunk.project(self.states_MD[index_C], *self.rows)
        elif self.drafts.draft_ids is None:
            logits_CV = self.logits_MV[index_C]
        else:
            logits_CV = self.logits_MV[index_C[:, None], self.drafts.draft_ids]
        return _wide(logits_CV).sub_(self.total_M[index_C, None]).exp_()  # each of the three has made new logits


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
