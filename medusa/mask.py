"""The attention mask of a tree step.

Dimensions: B batch, N nodes, T slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.tree import Shape, as_bias


def attention_bias(
    shape: Shape, lengths: Sequence[int], total: int, dtype: torch.dtype, window: int | None = None
) -> Tensor | None:
    """Additive mask of a tree step: ``[B|1, 1, N, total]``, 0 where a node may look, else the dtype's minimum.

    Row ``b`` holds its prefix in slots ``0 .. lengths[b]-1`` and the tree in the N slots after it. A node sees the
    prefix and its own ancestors, itself included; within a sliding ``window`` only keys whose *logical* position is
    less than ``window`` behind its own. None when every node sees every slot. (Additive, because eager attention
    adds whatever mask it gets.)
    """
    size = shape.depths.shape[-1]
    if window is not None and max(lengths) + shape.levels <= window:
        window = None  # the window reaches back to the start of every row
    if window is None and len(set(lengths)) == 1 and total == lengths[0] + size:
        return None if size == 1 else shape.bias_behind(lengths[0], dtype)
    return _ragged_bias(shape, lengths, total, dtype, window)


def _ragged_bias(shape: Shape, lengths: Sequence[int], total: int, dtype: torch.dtype, window: int | None) -> Tensor:
    size, rows, device = shape.depths.shape[-1], len(lengths), shape.depths.device
    length_B1 = torch.tensor(lengths, device=device)[:, None]
    slot_BT = torch.arange(total, device=device) - length_B1  # < 0: the prefix; 0 .. N-1: the tree's nodes
    node_BT = slot_BT.clamp(0, size - 1)
    index_BNT = node_BT[:, None, :].expand(rows, size, total)
    seen_BNT = shape.ancestors.expand(rows, -1, -1).gather(2, index_BNT) & (slot_BT < size)[:, None, :]
    seen_BNT |= (slot_BT < 0)[:, None, :]
    if window is not None:
        key_BT = length_B1 + torch.where(slot_BT < 0, slot_BT, shape.depths.expand(rows, -1).gather(1, node_BT))
        query_BN = length_B1 + shape.depths
        seen_BNT &= key_BT[:, None, :] > query_BN[:, :, None] - window
    return as_bias(seen_BNT, dtype)[:, None]
