"""Attention of a tree step by C++ of our own, on a processor (``tree_attention.cpp``, compiled at first use).

A step reads all keys and values of a text for a few queries, and torch's attention comes near neither of the two limits
that memory and arithmetic set there. Here every key and value is read once, where it lies, for all queries of a step
and all query heads of a group. Slots that a mask hides from all of them, beyond a window or a row's end, are not read.

Milliseconds of one layer of SmolLM2-135M (9 query heads, 3 of keys and values, 64 wide) on one thread of an AMD EPYC,
of which 0.46 are reading 8,000 slots in fp32, and 1.4 the arithmetic of 8 nodes:

=======================  =======  =======  =======  =======
slots x nodes            1024x1   1024x8   8000x1   8000x8
=======================  =======  =======  =======  =======
torch's folded, fp32     0.22     0.50     1.7      3.6
our own, fp32            0.13     0.33     0.9      2.5
torch's folded, bf16     1.04     0.40     8.1      2.9
our own, bf16            0.10     0.32     0.6      2.5
=======================  =======  =======  =======  =======

A query's result goes by its own numbers alone: its bits are the same whatever other nodes, rows, hidden slots or
threads there are.

Dimensions: B rows, N new tokens, H heads of keys and values, G query heads for each of them, T slots in view, D head
size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from medusa.native import library

DTYPES = (torch.float32, torch.bfloat16)  # the second with all sums in fp32
MOST = 256  # new tokens: beyond that, what each span of slots leaves of each query would be large
MOST_GROUP, MOST_SIZE = 96, 256  # query heads, head size: limits of the C++
ADDRESSES = ("q", "k", "v", "mask", "output")
SIZES = ("B", "H", "G", "N", "T", "D")
STRIDES = (
    *("q_row", "q_head", "q_node"),
    *("k_row", "k_head", "k_slot"),
    *("v_row", "v_head", "v_slot"),
    *("mask_row", "mask_node"),
)


class _Problem(ctypes.Structure):
    """``Problem`` of the C++."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, ctypes.c_long) for name in (*SIZES, *STRIDES)),
        ("scale", ctypes.c_float),
        ("half", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


@cache
def _native() -> Any:
    """The function of ``tree_attention.cpp``; None without a compiler."""
    found = library("tree_attention")
    if found is None:
        return None
    found.attention.argtypes = [ctypes.POINTER(_Problem)]
    return found.attention


def address() -> int:
    """Where the function of the C++ is, for what calls it without Python."""
    return ctypes.cast(_native(), ctypes.c_void_p).value or 0


def available() -> bool:
    """Whether there is a compiler that can: what it made before goes by the compiler."""
    return _native() is not None


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether :func:`tree_attention` serves a query [B, H x G, N, D], keys and values [B, H, T, D], an additive mask.

    The mask is one for all heads: [B|1, 1, N, T], or None where a single token sees all slots.
    """
    rows, heads, nodes, size = query.shape
    shared, slots = key.shape[1:3]
    if not query.dtype is key.dtype is value.dtype or key.dtype not in DTYPES or key.device.type != "cpu":
        return False
    if key.shape != value.shape or key.shape != (rows, shared, slots, size) or not shared or heads % shared:
        return False
    if not 0 < nodes <= MOST or heads // shared > MOST_GROUP or size > MOST_SIZE or 0 in key.shape:
        return False
    if mask is None:
        return nodes == 1
    return mask.dtype is key.dtype and mask.shape[0] in (1, rows) and mask.shape[1:] == (1, nodes, slots)


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, threads: int = 0
) -> Tensor:
    """softmax(``scale`` q k^T + mask) v of what :func:`fits`: [B, N, H x G, D], rounded otherwise than torch's.

    ``threads``: 0 for torch's number. Slots whose mask is -inf or the dtype's minimum have no part in it, whatever they
    hold but NaN and infinities. A token that sees none gets what a softmax over the mask alone gives it, or zeros if
    that is -inf throughout.
    """
    query, key, value = _in_line(query), _in_line(key), _in_line(value)
    rows, heads, nodes, size = query.shape
    shared, slots = key.shape[1:3]
    output = query.new_empty((rows, nodes, heads, size))
    if mask is None:
        seen, mask_strides = None, (0, 0)
    else:
        mask = _in_line(mask)
        seen, mask_strides = mask.data_ptr(), (mask.stride(0) if len(mask) > 1 else 0, mask.stride(2))
    found = _native()(
        _Problem(
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), seen, output.data_ptr()),
            *(rows, shared, heads // shared, nodes, slots, size),
            *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides),
            *(scale, key.dtype is torch.bfloat16, threads or torch.get_num_threads()),
        )
    )
    if not found:
        raise MemoryError(f"no memory for attention of {nodes} tokens to {slots} slots")
    return output


def _in_line(states: Tensor) -> Tensor:
    """States whose last dimension lies in one piece, as the C++ reads them."""
    return states if states.stride(3) == 1 else states.contiguous()


def in_trace(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """:func:`tree_attention` as an operation of a trace; what is exported holds the number of threads as it is now."""
    threads = 0 if is_dynamo_compiling() else torch.get_num_threads()
    states = _in_line(query), _in_line(key), _in_line(value), None if mask is None else _in_line(mask)
    output: Tensor = torch.ops.medusa.tree_attention(*states, scale, threads)
    return output


@cache
def define() -> torch.library.Library:
    """Have the operation ``medusa::tree_attention``, which traces may hold.

    By hand, as ``torch.library.custom_op`` takes several times as long per call.
    """
    made = torch.library.Library("medusa", "FRAGMENT")
    made.define(
        "tree_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int threads) -> Tensor"
    )
    made.impl("tree_attention", tree_attention, "CPU")
    torch.library.register_fake("medusa::tree_attention", _meta, lib=made)
    return made


def _meta(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, threads: int) -> Tensor:
    rows, heads, nodes, size = query.shape
    return query.new_empty((rows, nodes, heads, size))
