"""A static tree of Hydra's heads for one greedy row on a processor: between two heads there is one call of C++.

Which tokens a level holds, which of them are parents and what the next head reads of them takes torch some six
operations a level; on a small trunk these were most of what a step does besides its forward.

Dimensions: C what a head reads, D hidden, W parents (nodes with children).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa.drafters.children import Selection
from medusa.largest import KINDS, Level, native

# A head, the state [1, 1, D] and what the head reads behind W ways [1, W, C]: its logits [1, W, V'].
Law = Callable[[int, Tensor, Tensor], Tensor]


class Layer(Protocol):
    """A level of a tree whose nodes are ordered by depth, as :class:`medusa.drafters.medusa._Level` has it."""

    ranks: int
    parent_W: Tensor
    best: Selection
    inner: Selection | None
    above: Selection | None


def serves(table: Tensor) -> bool:
    """Whether these embeddings are on a processor, of a kind that is known, and there is a compiler."""
    return table.device.type == "cpu" and table.dtype in KINDS and native() is not None


class Filling:
    """What is the same in every step: the levels, and the memory in which heads find what they read.

    Args:
        layers: of the tree.
        table: the embeddings [V', E] of the tokens that can be drafted, which :func:`serves` let pass, in one piece.
        size: D.
    """

    def __init__(self, layers: Sequence[Layer], table: Tensor, size: int) -> None:
        self._table = table
        self._reads: list[Tensor] = []
        self._levels = []
        width, piece = size + table.shape[1], table.shape[1]
        for layer in layers:
            inner, above = ([] if each is None else each.indices for each in (layer.inner, layer.above))
            self._reads.append(torch.empty(1, len(inner), width + piece, dtype=table.dtype))
            self._levels.append(self._level(layer, inner, above, width))
            width += piece

    def _level(self, layer: Layer, inner: Sequence[int], above: Sequence[int], width: int) -> Level:
        cells, bytes_ = layer.best.indices, self._table.element_size()
        return Level(
            kind=KINDS[self._table.dtype],
            rows=len(layer.parent_W),
            ranks=layer.ranks,
            cells=_array(cells),
            inner=_array(inner),
            above=_array(above),
            children=len(cells),
            ways=len(inner),
            table=self._table.data_ptr(),
            piece=self._table.shape[1] * bytes_,
            width=width * bytes_,
            next=self._reads[-1].data_ptr(),
        )

    def columns(self, hidden_11D: Tensor, read_11C: Tensor, law: Law) -> list[int]:
        """The children's columns of the logits, in order of their nodes; ``read_11C`` is what the first head reads."""
        columns: list[int] = []
        fill, read = native().fill, read_11C
        for head, level in enumerate(self._levels):
            logits_1WV = law(head, hidden_11D, read)
            assert logits_1WV.dtype is self._table.dtype, "logits of a kind that the embeddings are not of"
            found = (ctypes.c_long * level.children)()
            fill(level, logits_1WV.data_ptr(), logits_1WV.shape[2], logits_1WV.stride(1), read.data_ptr(), found)
            columns += found
            read = self._reads[head]
        return columns


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
    return (ctypes.c_long * len(numbers))(*numbers)
