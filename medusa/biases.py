"""Additive masks: 0 where a node may look, else the dtype's least number.

Dimensions: B batch, N nodes, A levels.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool -> additive mask: 0 where seen, else the dtype's minimum."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


class Biases:
    """The masks of trees that follow each other: one buffer per size, zeros and then the tree.

    A longer prefix begins further left in it, so that only the tree is written anew, if that. It grows by doubling.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, torch.dtype], tuple[Tensor, weakref.ref[Tensor]]] = {}

    def behind(self, paths: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """That of a tree behind ``length`` slots that every node sees: [B|1, 1, N, length + N].

        ``paths`` int64 [B|1, N, A]: each node's ancestors and itself, -1 beyond. The mask is a view, to be used before
        another tree's is asked for.
        """
        rows, size, _ = paths.shape
        key = rows, size, dtype
        bias, held = self._held.get(key, (None, None))
        if bias is None or bias.shape[-1] < length + size:
            room = 2 * max(length, 128)
            bias, held = torch.zeros(rows, 1, size, room + size, dtype=dtype, device=paths.device), None
        room = bias.shape[-1] - size
        if held is None or held() is not paths:
            bias.narrow(3, room, size).fill_(torch.finfo(dtype).min)
            # what lies beyond a path falls into the column before the tree: the prefix's last one, which is seen
            bias.narrow(3, room - 1, size + 1).scatter_(3, paths[:, None] + 1, 0.0)
            self._held[key] = bias, weakref.ref(paths)
        bias = bias.narrow(3, room - length, length + size)
        return bias if bias.device.type == "cpu" else bias.contiguous()  # a GPU's kernels want aligned rows
