"""Trees made of known runs of tokens, a tree of its own for every row: what drafters without laws propose.

Dimensions: B batch, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa.accept import Acceptance
from medusa.biases import Biases
from medusa.tree import DraftTree, Row, Shape
from medusa.uploads import whole_numbers


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


def as_tree(rows: Sequence[Branches], device: torch.device, least: int = 1, biases: Biases | None = None) -> DraftTree:
    """The rows' trees as one; fillers below the root make up for what a row has less than the largest, or ``least``.

    ``biases``: of the trees of all steps, where a session keeps them.
    """
    size = max(least, *(len(row.parents) for row in rows))
    known = [_padded(row, size) for row in rows]
    shared = known[:1] if all(row.parents == known[0].parents for row in known) else known
    ways = [_ways(row.parents) for row in shared]
    levels, count = max(len(way) for row in ways for way in row), len(shared)
    parts = [  # what the device needs, in one transfer
        *(way + [-1] * (levels - len(way)) for row in ways for way in row),
        *([0, *row.parents[1:]] for row in shared),  # the root is its own parent
        *([len(way) - 1 for way in row] for row in ways),
        *(row.tokens for row in known),
        *(row.valid for row in known),
    ]
    numbers = whole_numbers(parts, -1).to(device, non_blocking=True)
    nodes = count * size
    paths, parents, depths, tokens, valid = numbers.split([nodes * levels, nodes, nodes, *[len(rows) * size] * 2])
    depths_BN, parents_BN, paths = depths.view(count, size), parents.view(count, size), paths.view(count, size, levels)
    shape = Shape(depths_BN, parents_BN, paths, biases=biases or Biases())
    return DraftTree(shape, tokens.view(-1, size), valid.view(-1, size) > 0)


def _padded(row: Branches, size: int) -> Row:
    more = size - len(row.parents)
    return Row(row.parents + [0] * more, row.tokens + [0] * more, row.valid + [False] * more)


def _ways(parents: Sequence[int]) -> list[list[int]]:
    """The nodes from the root to each node."""
    ways = [[0]]
    for node in range(1, len(parents)):
        ways.append([*ways[parents[node]], node])
    return ways


def accepted(tree: DraftTree, acceptance: Acceptance) -> list[list[int]]:
    """Each row's accepted tokens below the root."""
    return [walk.tokens[:-1] for walk in acceptance.on_host(tree)]
