"""Acceptance: which drafted path the trunk would have produced itself, and the token that follows it.

Dimensions: B batch, N nodes, A accepted nodes (the root included), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa.laws import Laws
from medusa.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row.

    ``path_BA`` int64: node ids from the root (always accepted) downwards, -1 beyond the row's end. ``last_B`` is the
    path's last node. ``next_token_B`` is the trunk's token after the path: the next root. Filler is never a token id,
    so that no row can accept a token nobody drafted.
    """

    path_BA: Tensor
    last_B: Tensor
    next_token_B: Tensor

    @property
    def length_B(self) -> Tensor:
        """Accepted nodes of each row, the root included: int64 [B], at least 1."""
        return (self.path_BA >= 0).sum(-1)


class AcceptRule(Protocol):
    """Decides from the trunk's laws after all processors, one per node for that node's own prefix."""

    lossless: bool

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance: ...


class DeterministicRule:
    """Lossless acceptance of children that were not drawn at random.

    Accepting each child x in turn with probability p(x), else zeroing it and renormalising, is the same law as
    drawing y ~ p once and following the child that equals y, if there is one (the i-th child is reached with
    probability 1 - p(x_1) - … - p(x_{i-1}) and accepted with p(x_i) over that). So the emitted tokens are draws of
    the trunk's own law, one per position: at temperature 0 its argmax, at any temperature the very tokens that
    plain decoding draws from the same uniforms.
    """

    lossless = True

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        shape, choice_BN = tree.shape, laws.choice_BN
        if tree.size == 1:  # nothing was drafted
            root_B1 = torch.zeros_like(choice_BN)
            return Acceptance(root_B1, root_B1[:, 0], choice_BN[:, 0])
        agrees_BN = (tree.tokens_BN == shape.at_parents(choice_BN)) & tree.valid_BN
        # a node is reached when all on its way agree; siblings are distinct, so there is one deepest such node
        reached_BN = (agrees_BN[:, None] | shape.off_path).all(-1)
        return accept_up_to(tree, (reached_BN * shape.depths).argmax(-1), choice_BN)


def accept_up_to(tree: DraftTree, last_B: Tensor, choice_BN: Tensor) -> Acceptance:
    """The acceptance that ends at node ``last_B``, continued by that node's entry of ``choice_BN``."""
    return Acceptance(tree.shape.paths_to(last_B), last_B, choice_BN.gather(1, last_B[:, None])[:, 0])
