"""Acceptance: which drafted path the trunk would have produced itself, and the token that follows it.

Dimensions: B batch, N nodes, A accepted nodes (the root included), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from medusa.largest import walk
from medusa.laws import Laws
from medusa.tree import DraftTree, Shape
from medusa.uploads import upload, whole_numbers


class Walk(NamedTuple):
    """A row's accepted path, and the tokens that it emits: those of the path below the root, and the one after it."""

    path: list[int]
    tokens: list[int]


class Acceptance:
    """The accepted path of each row.

    ``path_BA`` int64: node ids from the root (always accepted) downwards, -1 beyond the row's end. ``last_B`` is the
    path's last node. ``next_token_B`` is the trunk's token after the path: the next root. Filler is never a token id,
    so that no row can accept a token nobody drafted. ``walks`` say the same where the host knows it already.
    """

    walks: Sequence[Walk] | None = None

    def __init__(self, path_BA: Tensor, last_B: Tensor, next_token_B: Tensor) -> None:
        self.path_BA, self.last_B, self.next_token_B = path_BA, last_B, next_token_B

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
        self.walks = [Walk(path, [*(each[node] for node in path[1:]), each[tree.size]]) for path, each in pairs]
        return self.walks


class Walked(Acceptance):
    """Walks that the host made; the device has them where somebody asks: views for one row, else one transfer back.

    ``choice_BN``: the tokens after all nodes, where the device knows them.
    """

    walks: Sequence[Walk]

    def __init__(self, walks: Sequence[Walk], shape: Shape, choice_BN: Tensor | None = None) -> None:
        self.walks, self._shape, self._choice_BN = walks, shape, choice_BN

    @cached_property
    def path_BA(self) -> Tensor:  # type: ignore[override]
        if len(self.walks) == 1:
            return self._shape.paths[:, self.walks[0].path[-1]]
        return self._sent[:, :-2]

    @cached_property
    def last_B(self) -> Tensor:  # type: ignore[override]
        if len(self.walks) == 1:
            return self.path_BA[:, len(self.walks[0].path) - 1]
        return self._sent[:, -2]

    @cached_property
    def next_token_B(self) -> Tensor:  # type: ignore[override]
        if self._choice_BN is None:
            return whole_numbers([tokens[-1:] for _, tokens in self.walks], -1)  # on a processor
        if len(self.walks) == 1:
            return self._choice_BN[:, self.walks[0].path[-1]]
        return self._sent[:, -1]

    @cached_property
    def _sent(self) -> Tensor:
        """Of each row its path, filled up with -1, the path's last node, and the token after it."""
        levels = self._shape.levels
        rows = [[*path, *[-1] * (levels - len(path)), path[-1], tokens[-1]] for path, tokens in self.walks]
        return upload(rows, self._shape.paths.device)


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
        # To walk a small tree on the host takes less than to queue the dozen operations that do it on the device.
        if tree.tokens_BN.is_cpu and (logits_BNV := laws.greedy_BNV) is not None:
            found = walk(logits_BNV, tree.shape.parents, tree.tokens_BN, tree.valid_BN)
            if found is not None:
                return Walked([Walk(*each) for each in found], tree.shape)
        choice_BN = laws.choice_BN
        return Walked([_walk(*row) for row in _transfer(tree, choice_BN)], tree.shape, choice_BN)


def _transfer(tree: DraftTree, choice_BN: Tensor) -> Iterator[tuple[list[int], ...]]:
    """Each row's tokens, those after them, parents and which nodes are no fillers: the step's one transfer."""
    size, known = tree.size, None if tree.shape.topology is None else list(tree.shape.topology.parents)
    parts = [tree.tokens_BN, choice_BN, tree.valid_BN]
    if known is None:
        parts.append(tree.shape.parents.expand_as(choice_BN))
    for row in torch.cat(parts, 1).tolist():
        tokens, choices, valid, parents = (row[start : start + size] for start in range(0, 4 * size, size))
        yield tokens, choices, valid, known or parents


def _walk(tokens: Sequence[int], choices: Sequence[int], valid: Sequence[int], parents: Sequence[int]) -> Walk:
    """From the root downwards to the child that is the trunk's own choice; children come behind their parents."""
    at, path = 0, [0]
    for node in range(1, len(tokens)):
        if parents[node] == at and tokens[node] == choices[at] and valid[node]:
            path.append(node)
            at = node
    return Walk(path, [choices[node] for node in path])


def accept_up_to(tree: DraftTree, last_B: Tensor, choice_BN: Tensor) -> Acceptance:
    """The acceptance that ends at node ``last_B``, continued by that node's entry of ``choice_BN``."""
    return Acceptance(tree.shape.paths_to(last_B), last_B, choice_BN.gather(1, last_B[:, None])[:, 0])
