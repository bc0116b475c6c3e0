"""Shapes of trees that change in every step, from what a drafter knows of them anyway.

Dimensions: B batch, A levels, N nodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from medusa.tree import Shape


def shape_along(paths: Tensor, parents_BN: Tensor, depths_BN: Tensor) -> Shape:
    """What :meth:`medusa.tree.Shape.of` makes of the parents, without its products: the ``paths`` are known.

    All as :class:`medusa.tree.Shape` has them: the root is its own parent.
    """
    rows, size = parents_BN.shape
    ancestors = torch.zeros(rows, size, size + 1, dtype=torch.bool, device=paths.device)
    ancestors.scatter_(2, paths % (size + 1), True)  # -1 falls into a column that is dropped
    return Shape(ancestors[..., :size], depths_BN, parents_BN, paths)


def whole_numbers(rows: Iterable[Iterable[int]], *shape: int) -> Tensor:
    """Int64 of this shape, on the host, of the rows' numbers in order: nested lists take several times as long."""
    return torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.long).view(shape)
