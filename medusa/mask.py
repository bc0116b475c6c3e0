"""The attention mask and the positions of a tree step. Text that is read on is a chain, so a tree too.

Dimensions: B batch, N nodes, T slots in view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.biases import as_bias
from medusa.tree import Shape
from medusa.uploads import upload


def chain_shape(size: int, device: torch.device | str) -> Shape:
    """``Shape.static`` of a chain of ``size`` nodes, made without matrix products, since it may be long."""
    nodes = torch.arange(size, device=device)
    paths = torch.where(torch.ones(1, size, size, dtype=torch.bool, device=device).tril(), nodes, -1)
    return Shape(nodes[None], (nodes[None] - 1).clamp(min=0), paths)


def positions(shape: Shape, lengths: Sequence[int], horizon: int | None) -> Tensor:
    """Position of each node, int64 [B, N]: its row's length and its depth.

    Those at ``horizon`` or beyond it, which no row may reach, are cut to the last below it: the model could fail on
    them, or take its rotary frequencies by them.
    """
    if len(set(lengths)) == 1:
        positions_BN = shape.depths + lengths[0]
        if len(positions_BN) < len(lengths):
            positions_BN = positions_BN.expand(len(lengths), -1)
    else:
        positions_BN = upload(lengths, shape.depths.device)[:, None] + shape.depths
    if horizon is not None and max(lengths) + shape.levels > horizon:
        return positions_BN.clamp(max=horizon - 1)
    return positions_BN


def attention_bias(
    shape: Shape, lengths: Sequence[int], total: int, dtype: torch.dtype, window: int | None = None, known: int = 0
) -> Tensor | None:
    """Additive mask of a tree step: ``[B|1, 1, N, total]``, 0 where a node may look, else the dtype's minimum.

    Row ``b`` holds its prefix in slots ``0 .. lengths[b]-1`` and the tree in the N slots after it. A node sees the
    prefix and its own ancestors, itself included; within a sliding ``window`` only keys whose *logical* position is
    less than ``window`` behind its own. None when every node sees every slot. (Additive, because eager attention
    adds whatever mask it gets.) The first ``known`` nodes, read before, have no row in it.
    """
    size = shape.depths.shape[-1]
    if window is not None and max(lengths) + shape.levels <= window:
        window = None  # the window reaches back to the start of every row
    if window is None and len(set(lengths)) == 1 and total == lengths[0] + size:
        return None if size == 1 else _without(shape.biases.behind(shape.paths, lengths[0], dtype), known)
    return _without(_ragged_bias(shape, lengths, total, dtype, window), known)


def _without(bias: Tensor, known: int) -> Tensor:
    return bias[:, :, known:].contiguous() if known else bias


def bias_of(seen_BnN: Tensor, lengths: Sequence[int], total: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, n, total] of ``n`` nodes alone, by bool [B, n, N]: which nodes of the tree each one sees."""
    if len(set(lengths)) == 1 and total == lengths[0] + seen_BnN.shape[-1]:
        return torch.nn.functional.pad(as_bias(seen_BnN, dtype), (lengths[0], 0))[:, None]
    size = seen_BnN.shape[-1]
    slot_BT = torch.arange(total, device=seen_BnN.device) - upload(lengths, seen_BnN.device)[:, None]
    index_BnT = slot_BT.clamp(0, size - 1)[:, None].expand(-1, seen_BnN.shape[1], -1)
    seen_BnT = (seen_BnN.gather(2, index_BnT) & (slot_BT < size)[:, None]) | (slot_BT < 0)[:, None]
    return as_bias(seen_BnT, dtype)[:, None]


def _ragged_bias(shape: Shape, lengths: Sequence[int], total: int, dtype: torch.dtype, window: int | None) -> Tensor:
    size, rows, device = shape.depths.shape[-1], len(lengths), shape.depths.device
    length_B1 = upload(lengths, device)[:, None]
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
