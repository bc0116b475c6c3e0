"""Acceptance: which drafted path the trunk would have produced itself, and the token that follows it.

Dimensions: B batch, N nodes, A accepted nodes (the root included), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa.sampling import choose
from medusa.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row.

    ``path_BA`` int64: node ids from the root (always accepted) downwards, -1 beyond the row's ``length_B`` (at least
    1). ``next_token_B`` is the trunk's token after the path: the next root. Filler is never a token id, so that no
    row can accept a token nobody drafted.
    """

    path_BA: Tensor
    length_B: Tensor
    next_token_B: Tensor


class AcceptRule(Protocol):
    """Decides from the trunk's laws ``p_BNV`` after all processors, one per node for that node's own prefix.

    ``uniform_BN`` are the draws for the token after each node, or None when every row is greedy.
    """

    lossless: bool

    def __call__(self, tree: DraftTree, p_BNV: Tensor, uniform_BN: Tensor | None) -> Acceptance: ...


class DeterministicRule:
    """Lossless acceptance of children that were not drawn at random.

    Accepting each child x in turn with probability p(x), else zeroing it and renormalising, is the same law as
    drawing y ~ p once and following the child that equals y, if there is one (the i-th child is reached with
    probability 1 - p(x_1) - … - p(x_{i-1}) and accepted with p(x_i) over that). So the emitted tokens are draws of
    the trunk's own law, one per position: at temperature 0 its argmax, at any temperature the very tokens that
    plain decoding draws from the same uniforms.
    """

    lossless = True

    def __call__(self, tree: DraftTree, p_BNV: Tensor, uniform_BN: Tensor | None) -> Acceptance:
        choice_BN = choose(p_BNV, uniform_BN)
        shape = tree.shape
        parents_BN = shape.parents.expand_as(choice_BN)
        agrees_BN = (tree.tokens_BN == choice_BN.gather(1, parents_BN)) & tree.valid_BN
        agrees_BN[:, 0] = True
        # a node is reached when nothing on its way disagrees; siblings are distinct, so one deepest node wins
        reached_BN = ~(shape.ancestors & ~agrees_BN[:, None, :]).any(-1)
        last_B = torch.where(reached_BN, shape.depths, -1).argmax(-1)
        return accept_up_to(tree, last_B, choice_BN)


def accept_up_to(tree: DraftTree, last_B: Tensor, choice_BN: Tensor) -> Acceptance:
    """The acceptance that ends at node ``last_B``, continued by that node's entry of ``choice_BN``."""
    rows, size = choice_BN.shape
    shape = tree.shape
    last_B1 = last_B[:, None]
    on_path_BN = shape.ancestors.expand(rows, -1, -1).gather(1, last_B1[..., None].expand(-1, 1, size))[:, 0]
    # node ids scattered to their depth; nodes off the path go to a column that is dropped
    column_BN = torch.where(on_path_BN, shape.depths, shape.levels)
    nodes_BN = torch.arange(size, device=choice_BN.device).expand(rows, -1)
    path_BA = choice_BN.new_full((rows, shape.levels + 1), -1).scatter_(1, column_BN, nodes_BN)[:, :-1]
    return Acceptance(path_BA, on_path_BN.sum(-1), choice_BN.gather(1, last_B1)[:, 0])
