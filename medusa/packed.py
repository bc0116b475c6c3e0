"""Weights packed for few rows: on a processor, a step over a small tree then costs about what one token costs.

A forward of one token reads every weight once; one of eight needs no more bytes, and a processor has the arithmetic to
spare. Yet the usual product of few rows with a matrix takes two to four times as long as that of one row, for its
kernels are made for many. Those of :mod:`medusa.products` are not, if they may lay the weights out as they like.

The packed weights are a copy: the model keeps its own, which it is trained, saved and read by. It is the same sum, in
an order that does not go by the number of rows. Which way is the fastest, or the usual one, is tried at load.

One of the files that know transformers' models: GPT-2 and its kin have a linear layer of their own.

Dimensions: M rows, D_in and D_out columns of a layer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.pytorch_utils import Conv1D

from medusa.errors import UserError
from medusa.machine import own_seconds
from medusa.parallel import spread
from medusa.products import WAYS, Way, times

MANY = 256  # rows beyond which arithmetic bounds the usual product too, and it is no slower: a long prompt's
PROBE = 16  # values of a weight that tell whether it was written to
HELD = "medusa_packed"
SHARE = 0.5  # of the memory that is free, at most, for the packed copies


class Weight:
    """A layer's packed weight, and the state that its own weight was in."""

    def __init__(self, layer: Any, way: Way) -> None:
        rows = _rows(layer).detach()
        self.way, self.columns, self.packed = way, len(rows), way.pack(rows)
        self.held = layer.weight.detach()  # what it was made of: its address is nobody else's meanwhile
        self.most = MANY * rows.shape[1]  # numbers of an input
        self.state = _state(layer.weight)
        self.places = places(self.held.numel())
        self.probe = self.held.flatten()[self.places]

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output [.., D_out] for an input [.., D_in]."""
        return self.way.product(input, self.packed, bias, self.columns)

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is the packed copy of a weight, as far as torch counts what is written to it."""
        return self.state == _state(weight)

    def is_stale(self, weight: Tensor) -> bool:
        """Whether the weight has changed, also where nothing counts it: writes to ``.data``, fused optimizers."""
        return not self.is_of(weight) or not torch.equal(weight.detach().flatten()[self.places], self.probe)


def places(count: int) -> Tensor:
    """Some of so many values, from the first to the last: int64 [PROBE]."""
    return torch.arange(PROBE) * (count - 1) // (PROBE - 1)


class Packs:
    """What a linear layer becomes: it reads its packed weight, but where gradients are wanted, somebody makes a trace,
    the input has another dtype or many rows, or its weight was changed since. There it is as it was, and so is what is
    pickled or copied of it."""

    medusa_packed: Weight | None
    _parameters: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        packed, own = self.medusa_packed, self._parameters  # where a module looks first for what isn't there is slower
        if packed is None or not _serves(packed, own.get("weight"), input):
            output: Tensor = super().forward(input)  # type: ignore[misc]
            return output
        return packed.product(input, own["bias"])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _bare, (_usual(self),), {name: value for name, value in vars(self).items() if name != HELD}


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _rows(layer: Any) -> Tensor:
    """The weight [D_out, D_in]."""
    weight: Tensor = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


@cache
def _packing(kind: type[nn.Module]) -> type[nn.Module]:
    """A kind of linear layer that packs."""
    return type(f"Packed{kind.__name__}", (Packs, kind), {})


def _serves(packed: Weight, weight: Tensor | None, input: Tensor) -> bool:
    if torch.is_grad_enabled() or is_compiling() or torch.jit.is_tracing():
        return False
    if weight is None or weight.is_inference():  # pruned, normed, or another one
        return False
    few = input.numel() <= packed.most
    return few and input.dtype is weight.dtype and input.is_cpu and packed.is_of(weight)


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes as a weight is written to, or another is put in its place."""
    return weight.data_ptr(), weight._version


def settle_products(model: nn.Module, choose: bool | None = None) -> None:
    """Pack a model's weights where that is faster here, and as far as memory allows.

    ``choose``: None for that; True to pack all that can be, False none.

    Raises:
        UserError: ``choose`` is True, and there is nothing that can be packed.
    """
    if choose is not False and not pack(model, always=choose is True) and choose:
        raise UserError(
            "packed=True: the trunk has no linear layers on a processor, in fp32 or bf16 and in one process, that"
            " can be packed here: leave packed out"
        )


def pack(model: nn.Module, always: bool = False) -> int:
    """Pack the linear layers of a model where that is faster, or ``always``; return how many are packed.

    Nothing is packed where the copies would take more than half of the memory that is free, unless ``always``.
    """
    layers: list[Any] = [layer for layer in model.modules() if _can_pack(layer)]
    needed, free = sum(layer.weight.nbytes for layer in layers), free_memory()
    if spread(model) or (not always and free is not None and needed > SHARE * free):
        return 0
    for dtype in {layer.weight.dtype for layer in layers}:
        alike = [layer for layer in layers if layer.weight.dtype is dtype]
        if (way := fastest(alike, usual=not always)) is not None:
            for layer in alike:
                layer.medusa_packed = Weight(layer, way)
                layer.__class__ = _packing(layer.__class__)
    return packed_layers(model)


def unpack(model: nn.Module) -> None:
    """Drop the packed weights: every layer is what it was."""
    for layer in _packed(model):
        del layer.medusa_packed
        layer.__class__ = _usual(layer)


def refresh(model: nn.Module) -> None:
    """Pack anew what was written to since: an adapter that was merged, say. What can't be packed any more is not."""
    for layer in _packed(model):
        held, weight = layer.medusa_packed, layer._parameters.get("weight")
        gone = weight is None or weight.is_inference()
        if held is not None and (gone or held.is_stale(weight)):
            fits = not gone and _is_plain(weight) and held.way.fits(_rows(layer))
            layer.medusa_packed = Weight(layer, held.way) if fits else None


def packed_layers(model: nn.Module) -> int:
    """How many layers of a model are packed."""
    return len(_packed(model))


def packed_ways(model: nn.Module) -> list[str]:
    """The names of the ways in which a model's layers are packed: one, but where they have several dtypes."""
    return sorted({layer.medusa_packed.way.name for layer in _packed(model) if layer.medusa_packed is not None})


def _packed(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, Packs)]


def _usual(layer: Any) -> type[nn.Module]:
    ours = (each for each in type(layer).__mro__ if not issubclass(each, Packs) and issubclass(each, nn.Module))
    return next(ours)


@contextmanager
def packed(*models: nn.Module) -> Iterator[None]:
    """Models as an engine decodes with them, for a while: packed where that is faster, but those that are already."""
    bare = [model for model in models if not packed_layers(model)]
    for model in bare:
        pack(model)
    try:
        yield
    finally:
        for model in bare:
            unpack(model)


@contextmanager
def as_loaded(*models: nn.Module) -> Iterator[None]:
    """Models with the library's own products for a while, to compare with."""
    kinds = {layer: type(layer) for model in models for layer in _packed(model)}
    for layer in kinds:
        layer.__class__ = _usual(layer)
    try:
        yield
    finally:
        for layer, kind in kinds.items():
            layer.__class__ = kind


@torch.inference_mode()
def fastest(layers: Sequence[Any], usual: bool = True, clock: Callable[..., float] = own_seconds) -> Way | None:
    """The packed way in which these layers, of one dtype, together give their products with a usual tree's rows in the
    least time; None where the usual way, if it may be, is faster still.

    One way for all: what is tried a shape at a time goes by luck on a busy machine. Each shape is tried once, some
    milliseconds in all.
    """
    kinds = Counter(map(_kind, layers))
    ones = {_kind(layer): layer for layer in layers}
    ways = [way for way in WAYS if all(way.fits(_rows(layer)) for layer in layers)]
    total: dict[Way | None, float] = defaultdict(float)
    for kind, layer in ones.items():
        for way, seconds in times(ways, _rows(layer), layer.bias, layer, clock).items():
            total[way] += kinds[kind] * seconds
    if not usual:
        del total[None]
    return min((way for way in total if total[way] < math.inf), key=total.__getitem__, default=None)


def _kind(layer: Any) -> tuple[Any, ...]:
    return (*layer.weight.shape, layer.bias is None)


def _can_pack(layer: Any) -> bool:
    """A linear layer, torch's own or of a kind with ``packs``, with plain weights on a processor, that nobody has put a
    forward of its own on."""
    kind = type(layer)
    known = kind in (nn.Linear, Conv1D) or getattr(kind, "packs", False)
    if not known or isinstance(layer, Packs) or "forward" in vars(layer):
        return False
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and not weight.is_inference()
        and _is_plain(weight)
        and any(way.fits(weight) for way in WAYS)
    )


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is numbers in a processor's memory."""
    return weight.layout is torch.strided and weight.device.type == "cpu" and weight.numel() > 0


def free_memory() -> int | None:
    """Bytes of memory that can be had without swapping; None where the system doesn't tell."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    for line in info.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
