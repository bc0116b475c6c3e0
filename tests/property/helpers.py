"""What the property tests of trees, masks and the cache share: trunks made once, trees drawn, paths read off them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from hypothesis import settings
from hypothesis import strategies as st

from medusa.testing import tiny_trunk
from medusa.tree import DraftTree, Shape
from medusa.trunk import Trunk

FAST = settings(max_examples=40, deadline=None)
FAMILIES = ("llama", "gpt2", "neox", "mistral", "gemma3")


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


def line_of(parents: Sequence[int], node: int) -> list[int]:
    """From the root to the node."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line[::-1]


def parents_of(draw: st.DrawFn, size: int) -> list[int]:
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def tree_of(parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> DraftTree:
    """A tree without fillers; one row of parents may serve all rows of tokens."""
    tokens_BN = torch.tensor(tokens)
    return DraftTree(Shape.of(torch.tensor(parents)), tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))


def padded(rows: Sequence[Sequence[int]], pad: int = 0, width: int = 0) -> torch.Tensor:
    """Rows of different lengths as one tensor, padded on the right."""
    width = max(width, *map(len, rows), 0)
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
