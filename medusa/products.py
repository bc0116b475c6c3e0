"""Ways of multiplying few rows by a matrix on a processor whose weights are laid out anew for it.

A product of one row reads every weight once; one of eight needs no more bytes, and a processor has the arithmetic to
spare. The usual product is made for many rows and comes nowhere near either limit. Milliseconds on one thread of an
Intel Xeon (Sapphire Rapids) for SmolLM2-135M's vocabulary projection, 49,152 x 576, of which 6.4 are reading in fp32 at
best, and 3.2 in bf16:

==============  ====  ====  ====  ====  ====
rows               1     4     8    16    32
==============  ====  ====  ====  ====  ====
fp32, usual     10.8  24.8  39.2  25.9  34.0
oneDNN, packed  12.1  13.3  15.3  19.3  27.8
few rows         9.6   9.1  10.4  11.4  24.4
bf16, usual     10.7  10.1  10.3  10.9  14.8
oneDNN, packed   8.9   9.0   9.1   9.5  14.4
few rows         5.7   5.6   5.7   6.1  10.3
==============  ====  ====  ====  ====  ====

Dimensions: M rows, D_in and D_out columns of a layer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.machine import in_turns, own_seconds
from medusa.native import library

EXPECTED_ROWS = 8  # a usual tree's: oneDNN's layout goes by that, and trials are made with them
# Units in the last place of the largest number, by which two orders of summation may differ; in bf16 sums are in fp32.
ROUNDING = {torch.float32: 64, torch.bfloat16: 4}


class Way(Protocol):
    """How weights are laid out, and multiplied by."""

    name: str

    def fits(self, weight: Tensor) -> bool:
        """Whether such a weight [D_out, D_in], on a processor, can be packed here."""

    def pack(self, weight: Tensor) -> Tensor:
        """The copy of a weight [D_out, D_in] that :meth:`product` reads."""

    def product(self, input: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> Tensor:
        """A linear layer's output [.., D_out] for an input [.., D_in]; ``columns``: D_out."""


class OneDNN:
    """torch's own packed product, in oneDNN's layout: fp32, and bf16 where the processor has instructions for it."""

    name = "oneDNN"

    def fits(self, weight: Tensor) -> bool:
        """As :class:`Way` has it."""
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return False
        half = weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return weight.dtype is torch.float32 or half

    def pack(self, weight: Tensor) -> Tensor:
        """As :class:`Way` has it."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), EXPECTED_ROWS)
        return packed

    def product(self, input: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> Tensor:
        """As :class:`Way` has it. In bf16 it is the usual product to the bit."""
        bias = None if bias is None else bias.contiguous()  # oneDNN reads it as if it were
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, packed, bias, "none", [], "")
        return output


class FewRows:
    """Our own product in fp32 and bf16, compiled at first use (``few_rows.cpp``): it reads weights about as fast as
    memory gives them.

    A number of its output is the same sum in the same order whatever the number of rows and threads. Packed weights are
    blocks [blocks, words, width of a block], zeros behind the last column; a word is a number of fp32, or two of bf16.
    """

    name = "few rows"

    def fits(self, weight: Tensor) -> bool:
        """As :class:`Way` has it: in bf16 for an even number of columns."""
        dtype = weight.dtype
        suits = dtype is torch.float32 or (dtype is torch.bfloat16 and weight.shape[-1] % 2 == 0)
        return suits and _few_rows() is not None

    def pack(self, weight: Tensor) -> Tensor:
        """As :class:`Way` has it."""
        width = _few_rows().columns()
        words = pad(weight, (0, 0, 0, -len(weight) % width)).contiguous().view(torch.int32)
        return words.unflatten(0, (-1, width)).transpose(1, 2).contiguous()

    def product(self, input: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> Tensor:
        """As :class:`Way` has it, for an input and a bias that lie on the processor."""
        input, words = input.contiguous(), packed.shape[1]
        half = input.dtype is torch.bfloat16
        shape = list(input.shape)  # a slice of it, as torch makes them, takes longer than a small product
        inner = 2 * words if half else words
        if shape[-1] != inner:  # the C++ would read and write beyond them
            raise RuntimeError(f"an input of {shape[-1]} columns, and a weight of {inner}")
        shape[-1] = columns
        output = input.new_empty(shape)
        bias = None if bias is None else bias.to(input.dtype).contiguous()  # held to the end of the call
        _few_rows().product(
            input.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            input.numel() // inner,
            words,
            columns,
            half,
            torch.get_num_threads(),
        )
        return output

    def address(self) -> int:
        """Where the product is, for what calls it without Python; 0 where there is none."""
        found = _few_rows()
        return 0 if found is None else ctypes.cast(found.product, ctypes.c_void_p).value or 0


WAYS: tuple[Way, ...] = (FewRows(), OneDNN())


@cache
def _few_rows() -> Any:
    """The compiled source; None without a compiler."""
    found = library("few_rows")
    if found is not None:
        numbers, sizes = [ctypes.c_void_p] * 4, [ctypes.c_long] * 3
        found.product.argtypes, found.product.restype = [*numbers, *sizes, ctypes.c_int, ctypes.c_int], None
    return found


def times(
    ways: Iterable[Way],
    weight: Tensor,
    bias: Tensor | None,
    usual: Callable[[Tensor], Tensor],
    clock: Callable[..., float] = own_seconds,
) -> dict[Way | None, float]:
    """Seconds of a layer's product with a usual tree's rows in each of the ways, None for the ``usual`` one.

    ``weight`` [D_out, D_in] lies on a processor. The least of what was tried in turns, as others' work only adds to it;
    infinite where a way gives another product than the usual one.
    """
    rows = torch.randn(EXPECTED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    runs: dict[Way | None, Callable[[], Tensor]] = {None: lambda: usual(rows)}
    for each in ways:
        runs[each] = partial(each.product, rows, each.pack(weight), bias, len(weight))
    right = {way: is_right(run(), usual(rows)) for way, run in runs.items()}
    found = in_turns(runs, rows.device, clock)
    return {way: min(found[way]) if right[way] else math.inf for way in runs}


def is_right(found: Tensor, usual: Tensor) -> bool:
    """Whether a product is the usual one but for rounding."""
    return bool((found - usual).abs().max() <= ROUNDING[usual.dtype] * torch.finfo(usual.dtype).eps * usual.abs().max())
