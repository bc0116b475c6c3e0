"""Where the largest values of the last dimension stand: what greedy decoding asks of logits, and drafters of theirs.

torch's own operations look at one value after the other on a processor. ``largest.cpp`` looks at many, and by one call
where torch takes several operations; without a compiler, and elsewhere, these are what is left. Of equal values the
first one counts, a NaN as the largest.

Dimensions: R ranks, V values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from medusa.native import library
from medusa.uploads import upload

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
SOME = 1 << 14  # values that take less to be looked at than to be handed to numpy


class Level(ctypes.Structure):
    """What ``fill`` of ``largest.cpp`` takes."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("kind", "rows", "ranks")),
        *((name, ctypes.POINTER(ctypes.c_long)) for name in ("cells", "inner", "above")),
        *((name, ctypes.c_long) for name in ("children", "ways")),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("piece", "width")),
        ("next", ctypes.c_void_p),
    ]


@cache
def native() -> Any:
    """The functions of ``largest.cpp``; None without a compiler."""
    found = library("largest")
    if found is None:
        return None
    number, address = ctypes.c_long, ctypes.c_void_p
    found.largest.argtypes = [address, ctypes.c_int, *[number] * 4, address, address, address, number]
    found.fill.argtypes = [ctypes.POINTER(Level), address, number, number, address, address]
    found.grow.argtypes = [*[address] * 2, ctypes.c_int, number, number, ctypes.c_double, address, number, address]
    found.grow.argtypes += [number, address]
    found.new_growth.argtypes, found.new_growth.restype = [number] * 3, address
    found.begin.argtypes = found.drop_growth.argtypes = found.grown.argtypes = [address]
    found.walk.argtypes = [address, ctypes.c_int, number, number, *[address] * 5]
    found.read_off.argtypes = [address, number, address, address]
    found.grow.restype = found.grown.restype = found.walk.restype = number
    for each in (found.largest, found.fill, found.begin, found.drop_growth, found.read_off):
        each.restype = None
    return found


@cache
def _array(kind: Any, size: int) -> Any:
    return kind * size


def laid_out(values: Tensor) -> tuple[int, int, int, int, int] | None:
    """How ``largest.cpp`` finds the values: address, kind, rows, columns, stride of rows; None where it can't."""
    kind = KINDS.get(values.dtype)
    if kind is None or values.device.type != "cpu" or native() is None:
        return None
    columns = stride = values.shape[-1]
    if not values.is_contiguous():
        if values.shape[:-2].numel() != 1 or values.stride(-1) != 1:  # rows that are not all one distance apart
            return None
        stride = values.stride(-2)
    return values.data_ptr(), kind, values.numel() // columns, columns, stride


def largest(values: Tensor) -> Tensor:
    """Where each row's largest value stands, the first of equals: [.., V] -> int64 [..]."""
    rows = laid_out(values)
    if rows is not None:
        at = torch.empty(values.shape[:-1], dtype=torch.long)
        native().largest(*rows, 1, at.data_ptr(), None, None, 1)
        return at
    if values.device.type != "cpu":
        return values.max(-1).indices
    if values.numel() <= SOME:
        return values.argmax(-1)
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()  # exact, and in the same order
    return torch.as_tensor(values.detach().numpy().argmax(-1))  # many at a time too


def walk(
    values_BNV: Tensor, parents: Tensor, tokens_BN: Tensor, valid_BN: Tensor
) -> list[tuple[list[int], list[int]]] | None:
    """Each row's nodes from the root downwards to the child that holds its parent's largest value, and those values'
    places; None where ``largest.cpp`` can't say. ``parents`` [B|1, N]: children come behind them.

    Only rows of nodes on the way are looked at. This stands in each step behind a forward, which has emptied the
    processor's memory of all code: so it calls little.
    """
    kind, (rows, nodes, columns) = KINDS.get(values_BNV.dtype), values_BNV.shape
    if kind is None or not values_BNV.is_cpu or native() is None:
        return None
    values_BNV, tokens_BN, valid_BN = values_BNV.contiguous(), tokens_BN.contiguous(), valid_BN.contiguous()
    parents = parents.contiguous()
    take, path, choices = native().walk, (ctypes.c_long * nodes)(), (ctypes.c_long * nodes)()
    at, tokens, valid, above = values_BNV.data_ptr(), tokens_BN.data_ptr(), valid_BN.data_ptr(), parents.data_ptr()
    row_bytes, above_step = nodes * columns * values_BNV.element_size(), 8 * nodes if len(parents) > 1 else 0
    found = []
    for _ in range(rows):
        count = take(at, kind, nodes, columns, above, tokens, valid, path, choices)
        found.append((path[:count], choices[:count]))
        at, above, tokens, valid = at + row_bytes, above + above_step, tokens + 8 * nodes, valid + nodes
    return found


def ranked(values: Tensor, ranks: int) -> Tensor:
    """Where each row's ``ranks`` largest values stand, the largest first: [.., V] -> int64 [.., R]."""
    rows = laid_out(values)
    if rows is None or not 0 < ranks <= rows[3]:  # torch says what is wrong
        return values.topk(ranks).indices
    at = torch.empty(*values.shape[:-1], ranks, dtype=torch.long)
    native().largest(*rows, ranks, at.data_ptr(), None, None, 1)
    return at


def ranked_laws(logits: Tensor, ranks: int, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The same, and the logarithms of their probabilities before that: both [.., R].

    ``temperatures``: one, or as many as the last dimension but one has rows.
    """
    rows = laid_out(logits)
    if rows is None or not 0 < ranks <= rows[3]:
        wide = torch.promote_types(logits.dtype, torch.float32)  # half precision would blur them
        warm = temperatures[0] if len(temperatures) == 1 else upload(temperatures, logits.device, wide)[:, None]
        best = (logits.to(wide) / warm).log_softmax(-1).topk(ranks)
        return best.values, best.indices
    shape = (*logits.shape[:-1], ranks)
    log, at = torch.empty(shape, dtype=torch.double), torch.empty(shape, dtype=torch.long)
    warm_K = _array(ctypes.c_double, len(temperatures))(*temperatures)
    native().largest(*rows, ranks, at.data_ptr(), log.data_ptr(), warm_K, len(temperatures))
    return log, at
