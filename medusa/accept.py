"""Acceptance: which drafted path the trunk would have produced itself, and the token that follows it.

Dimensions: B batch, N nodes, A accepted nodes (the root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from medusa.laws import Laws
from medusa.tree import DraftTree, Shape


class Walk(NamedTuple):
    """A row's accepted path, and the tokens that it emits: those of the path below the root, and the one after it."""

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Acceptance:
    """The accepted path of each row.

    ``path_BA`` int64: node ids from the root (always accepted) downwards, -1 beyond the row's end. ``last_B`` is the
    path's last node. ``next_token_B`` is the trunk's token after the path: the next root. Filler is never a token id,
    so that no row can accept a token nobody drafted. ``walks`` say the same where the host knows it already.
    """

    path_BA: Tensor
    last_B: Tensor
    next_token_B: Tensor
    walks: Sequence[Walk] | None = None

    @property
    def length_B(self) -> Tensor:
        """Accepted nodes of each row, the root included: int64 [B], at least 1."""
        return (self.path_BA >= 0).sum(-1)

    def on_host(self, tree: DraftTree) -> Sequence[Walk]:
        """What each row of ``tree`` accepted: one transfer, where the rule has not made it."""
        if self.walks is not None:
            return self.walks
        packed = torch.cat([tree.tokens_BN, self.next_token_B[:, None], self.path_BA], 1).tolist()
        paths = [[node for node in each[tree.size + 1 :] if node >= 0] for each in packed]
        pairs = zip(paths, packed, strict=True)
        return [Walk(path, [*(each[node] for node in path[1:]), each[tree.size]]) for path, each in pairs]


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
        shape, size, choice_BN = tree.shape, tree.size, laws.choice_BN
        known = None if shape.topology is None else shape.topology.parents
        parts = [tree.tokens_BN, choice_BN, tree.valid_BN]
        if known is None:
            parts.append(shape.parents.expand_as(choice_BN))
        # To walk a small tree on the host takes less than to queue the dozen operations that do it on the device.
        walks = []
        for row in torch.cat(parts, 1).tolist():  # the step's one transfer
            tokens, choices, valid, parents = (row[start : start + size] for start in range(0, 4 * size, size))
            walks.append(_walk(tokens, choices, valid, known or parents))
        return _walked(walks, shape, choice_BN)


def _walk(tokens: Sequence[int], choices: Sequence[int], valid: Sequence[int], parents: Sequence[int]) -> Walk:
    """From the root downwards to the child that is the trunk's own choice; children come behind their parents."""
    at, path = 0, [0]
    for node in range(1, len(tokens)):
        if parents[node] == at and tokens[node] == choices[at] and valid[node]:
            path.append(node)
            at = node
    return Walk(path, [choices[node] for node in path])


def _walked(walks: Sequence[Walk], shape: Shape, choice_BN: Tensor) -> Acceptance:
    """Walks that the host made, as the device has them: views for one row, one transfer back for several."""
    if len(walks) == 1:
        path = walks[0].path
        path_1A = shape.paths[:, path[-1]]
        return Acceptance(path_1A, path_1A[:, len(path) - 1], choice_BN[:, path[-1]], walks)
    rows = [[*path, *[-1] * (shape.levels - len(path)), path[-1], tokens[-1]] for path, tokens in walks]
    packed = torch.tensor(rows).to(choice_BN.device, non_blocking=True)
    return Acceptance(packed[:, :-2], packed[:, -2], packed[:, -1], walks)


def accept_up_to(tree: DraftTree, last_B: Tensor, choice_BN: Tensor) -> Acceptance:
    """The acceptance that ends at node ``last_B``, continued by that node's entry of ``choice_BN``."""
    return Acceptance(tree.shape.paths_to(last_B), last_B, choice_BN.gather(1, last_B[:, None])[:, 0])
