"""The likeliest tree of Hydra's heads for one greedy row on a processor: between two heads there is one call of C++.

It is what :func:`medusa.drafters.best_first.grown_by_host` makes, which takes torch some fifteen operations a level and
the host as long again.

Dimensions: A levels, C what a head reads, D hidden, N nodes, W parents (nodes with children).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.biases import Biases
from medusa.drafters.filled import Law
from medusa.largest import KINDS, native
from medusa.tree import Shape


class Growing:
    """A tree under way, the same memory in every step.

    Args:
        most: nodes below the root.
        ranks: candidates behind each node.
        temperatures: of each head.
        table: the embeddings [V', E] of the tokens that can be drafted, as :class:`medusa.drafters.filled.Filling`
            takes them.
        size: D.
    """

    def __init__(self, most: int, ranks: int, temperatures: Sequence[float], table: Tensor, size: int) -> None:
        self._table, self._temperatures, self._biases = table, temperatures, Biases()
        bytes_, piece = table.element_size(), table.shape[1]
        self._piece, self._width = piece * bytes_, (size + piece) * bytes_  # of what the first head reads
        widths = range(size + 2 * piece, size + (len(temperatures) + 2) * piece, piece)
        self._reads = [torch.empty(1, most, width, dtype=table.dtype) for width in widths]
        self._growth = native().new_growth(most, most, ranks)
        weakref.finalize(self, native().drop_growth, self._growth)

    def grow(self, hidden_11D: Tensor, read_11C: Tensor, law: Law) -> tuple[list[int], list[int]]:
        """All nodes' parents, and below the root the columns of the logits that they stand for.

        ``read_11C`` is what the first head reads.
        """
        native().begin(self._growth)
        read_1WC, wide, levels = read_11C, 1, 1
        while wide and levels <= len(self._temperatures):
            wide = self._level(levels - 1, law(levels - 1, hidden_11D, read_1WC), read_1WC)
            read_1WC = self._reads[levels - 1].narrow(1, 0, wide)
            levels += 1
        nodes = native().grown(self._growth)
        self._numbers, self._paths = (ctypes.c_long * (3 * nodes))(), (ctypes.c_long * (nodes * levels))()
        native().read_off(self._growth, levels, self._numbers, self._paths)
        return self._numbers[:nodes], self._numbers[2 * nodes + 1 :]

    def shape(self) -> Shape:
        """That of the tree that has just been grown."""
        parents_1N, depths_1N, _ = torch.frombuffer(self._numbers, dtype=torch.long).view(3, 1, -1).unbind()
        paths = torch.frombuffer(self._paths, dtype=torch.long)
        return Shape(depths_1N, parents_1N, paths.view(1, parents_1N.shape[1], -1), biases=self._biases)

    def _level(self, head: int, logits_1WV: Tensor, read_1WC: Tensor) -> int:
        """Take in what a head says behind the parents; return how many there are of the next level."""
        grow: int = native().grow(
            self._growth,
            logits_1WV.data_ptr(),
            KINDS[logits_1WV.dtype],
            logits_1WV.shape[2],
            logits_1WV.stride(1),
            self._temperatures[head],
            read_1WC.data_ptr(),
            self._width + head * self._piece,
            self._table.data_ptr(),
            self._piece,
            self._reads[head].data_ptr(),
        )
        return grow
