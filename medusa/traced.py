"""Packed products inside a trace.

torch's tracer knows no tensor of oneDNN's layout, so a trace can't hold a packed weight, and :mod:`medusa.packed` steps
aside while one is made. What a trace can hold is an operation of our own. There are two. ``packed_linear`` takes the
layer's usual weight and finds the packed one by it whenever it runs. So all traces share the one packed copy, which
goes when its layer goes; what is traced holds no address or count, so that the compiler finds it on the disk in the
next process. ``few_rows`` takes a packed weight of our own layout, which is a plain tensor; steps that are compiled
ahead of time have it as an input and call the product from C++.

One of the files that know transformers' models, as :mod:`medusa.packed` is.

Dimensions: D_in and D_out columns of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from medusa.packed import Packs, Weight
from medusa.products import FewRows

WORDS = "medusa_words"

# By the address of a layer's weight, which is all that an operation is given. It owns nothing.
_LAYERS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


class InTrace:
    """A packed layer while a trace is made."""

    weight: Tensor
    bias: Tensor | None
    medusa_packed: Weight | None
    _buffers: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        packed = self.medusa_packed
        if packed is None or input.dtype is not self.weight.dtype or input.numel() > packed.most:
            output: Tensor = super().forward(input)  # type: ignore[misc]
            return output
        product: Tensor
        if WORDS in self._buffers:
            words, threads = self._buffers[WORDS], torch.get_num_threads()
            bias = None if self.bias is None else self.bias.to(input.dtype).contiguous()  # C++ asks no more
            product = torch.ops.medusa.few_rows(input.contiguous(), words, bias, packed.columns, threads)
            return product
        product = torch.ops.medusa.packed_linear(input, self.weight, self.bias, isinstance(self, Conv1D))
        return product


@contextmanager
def traceable(model: nn.Module) -> Iterator[int]:
    """Traces that are made of ``model`` meanwhile hold its packed products; yields how many layers have one."""
    found = (layer for layer in model.modules() if isinstance(layer, Packs))
    kinds: dict[Any, Any] = {layer: type(layer) for layer in found if not isinstance(layer, InTrace)}
    _define()
    for layer, kind in kinds.items():
        _LAYERS[layer.weight.data_ptr()] = layer
        layer.__class__ = _in_trace(kind)
    try:
        yield len(kinds)
    finally:
        for layer, kind in kinds.items():
            layer.__class__ = kind


@contextmanager
def with_words(model: nn.Module) -> Iterator[list[Any]]:
    """Layers that are packed in our own layout have the packed weight as a buffer meanwhile, and traces that are made
    of :func:`traceable` ones read that; yields these layers.
    """
    layers: list[Any] = [each for each in model.modules() if isinstance(each, Packs) and _has_words(each)]
    for layer in layers:
        layer._buffers[WORDS] = layer.medusa_packed.packed
    try:
        yield layers
    finally:
        for layer in layers:
            del layer._buffers[WORDS]


def _has_words(layer: Packs) -> bool:
    return layer.medusa_packed is not None and isinstance(layer.medusa_packed.way, FewRows)


@cache
def _in_trace(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Traced{kind.__name__}", (InTrace, kind), {})


@cache
def _define() -> torch.library.Library:
    """The operations. ``transposed``: the weight is [D_in, D_out], as GPT-2 has it; ``columns``: D_out.

    By hand, as ``torch.library.custom_op`` takes several times as long per call.
    """
    library = torch.library.Library("medusa", "FRAGMENT")
    library.define("packed_linear(Tensor input, Tensor weight, Tensor? bias, bool transposed) -> Tensor")
    library.impl("packed_linear", _product, "CPU")
    torch.library.register_fake("medusa::packed_linear", _meta, lib=library)
    library.define("few_rows(Tensor input, Tensor words, Tensor? bias, int columns, int threads) -> Tensor")
    library.impl("few_rows", _few_rows, "CPU")
    torch.library.register_fake("medusa::few_rows", _meta_of_words, lib=library)
    return library


def _product(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The usual product where the layer is packed no more, or its weight was changed since, as for :class:`Packs`."""
    packed: Any = getattr(_LAYERS.get(weight.data_ptr()), "medusa_packed", None)
    if packed is None or not packed.is_of(weight):
        return linear(input, weight.T if transposed else weight, bias)
    output: Tensor = packed.product(input, bias)
    return output


def _meta(input: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[1 if transposed else 0])


def _few_rows(input: Tensor, words: Tensor, bias: Tensor | None, columns: int, threads: int) -> Tensor:
    return FewRows().product(input, words, bias, columns)


def _meta_of_words(input: Tensor, words: Tensor, bias: Tensor | None, columns: int, threads: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], columns)
