"""Trees made of known runs of tokens, a tree of its own for every row: what drafters without laws propose.

Dimensions: B batch, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.drafters.shapes import shape_along, whole_numbers
from medusa.tree import DraftTree, Shape, Topology


class Branches:
    """One row's tree: runs of tokens that follow the root, those that begin alike merged.

    Args:
        root: the last token chosen.
        most: nodes that may be added.
    """

    def __init__(self, root: int, most: int) -> None:
        self.most = most
        self.parents = [-1]
        self.tokens = [root]
        self.valid = [True]
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> child

    @property
    def full(self) -> bool:
        """Whether no node may be added any more."""
        return len(self._children) >= self.most

    def starts_with(self, token: int) -> bool:
        """Whether a run begins with this token."""
        return (0, token) in self._children

    def add(self, run: Sequence[int]) -> bool:
        """Add a run, as much of it as there is room for; return whether it brought a new node."""
        node, before = 0, len(self._children)
        for token in run:
            if self.full and (node, token) not in self._children:
                break
            node = self.child(node, token)
        return len(self._children) > before

    def child(self, parent: int, token: int) -> int:
        """The child of a node that holds this token, added if there is none; return its number."""
        if (parent, token) not in self._children:
            self._children[parent, token] = self.unacceptable(parent, token)
            self.valid[-1] = True
        return self._children[parent, token]

    def find(self, parent: int | None, token: int) -> int | None:
        """The child of a node that holds this token, None if there is none, or no node."""
        return None if parent is None else self._children.get((parent, token))

    def unacceptable(self, parent: int, token: int) -> int:
        """Add a node that is scored and can't be accepted, whatever its token; return its number."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.valid.append(False)
        return len(self.parents) - 1


def as_tree(rows: Sequence[Branches], device: torch.device, least: int = 1) -> DraftTree:
    """The rows' trees as one; fillers below the root make up for what a row has less than the largest, or ``least``."""
    size = max(least, *(len(row.parents) for row in rows))
    parents = [row.parents + [0] * (size - len(row.parents)) for row in rows]
    tokens = [row.tokens + [0] * (size - len(row.tokens)) for row in rows]
    valid = [row.valid + [False] * (size - len(row.valid)) for row in rows]
    tokens_BN = whole_numbers(tokens, len(rows), size).to(device)
    return DraftTree(_shape(parents, device), tokens_BN, torch.tensor(valid, device=device))


def _shape(parents: Sequence[Sequence[int]], device: torch.device) -> Shape:
    if len(parents[0]) == 1:
        return Shape.static(Topology.root(), device)
    shared = parents[:1] if all(row == parents[0] for row in parents) else parents
    ways = [_ways(row) for row in shared]
    deepest = max(len(way) for row in ways for way in row)
    rows, size = len(shared), len(parents[0])
    paths = whole_numbers((way + [-1] * (deepest - len(way)) for row in ways for way in row), rows, size, deepest)
    depths = whole_numbers(((len(way) - 1 for way in row) for row in ways), rows, size)
    above = whole_numbers(((0, *row[1:]) for row in shared), rows, size)  # the root is its own parent
    return shape_along(paths.to(device), above.to(device), depths.to(device))


def _ways(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root to each node."""
    ways = [[0]]
    for node in range(1, len(parents)):
        ways.append([*ways[parents[node]], node])
    return ways


def accepted(tree: DraftTree, path_BA: Tensor) -> list[list[int]]:
    """Each row's accepted tokens below the root."""
    pairs = zip(tree.tokens_BN.tolist(), path_BA.tolist(), strict=True)
    return [[tokens[node] for node in path[1:] if node >= 0] for tokens, path in pairs]
