"""A pretended GPU: tensors that say they are on ``cuda:0`` and live on the processor, with all traffic written down.

Everything computes for real, so that whole texts can be decoded on it. What a GPU would refuse is refused: an operation
on tensors of both places, a generator of the other one. What makes the host wait for a GPU is noted: values that it
asks for, operations whose result has a size that depends on values, and copies to the device that are not
``non_blocking``. How fast a GPU is, and what its kernels compute, nobody can pretend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.trunk import Trunk

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)  # of values that the host has
TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
SETS = (Tensor.__getitem__, Tensor.__setitem__)
# after which the host has to know a value, or the size of the result
ASKING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
ASKING |= {"bincount", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor"}
ASKING |= {"item", "is_nonzero", "argwhere", "nonzero_numpy", "allclose"}  # as they come where no gradient is asked for
MASKS, INDEXING = (torch.bool, torch.uint8), ("index", "index_put", "index_put_", "_index_put_impl_")
SAYS: dict[Any, Any] = {  # what a tensor on the device says of itself
    Tensor.device.__get__: DEVICE,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    Tensor.get_device: DEVICE.index,
}


@dataclass
class Traffic:
    """What went between host and device, in order."""

    reads: list[str] = field(default_factory=list)  # what the host asked for: it waits
    blocking: list[str] = field(default_factory=list)  # values from the host: it waits as well
    queued: list[str] = field(default_factory=list)  # values from the host that it does not wait for

    @property
    def waits(self) -> list[str]:
        """Where the host waits for all that was queued before."""
        return [*self.reads, *self.blocking]

    def read(self, what: str) -> None:
        """The host asks for values."""
        self.reads.append(f"{what} {_where()}")

    def upload(self, what: str, non_blocking: bool = False) -> None:
        """Values go to the device."""
        (self.queued if non_blocking else self.blocking).append(f"{what} {_where()}")


def _where() -> str:
    """The line of the package that is being run, or that has something uploaded."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if "medusa" in file.parts and file.name != "uploads.py":
            return f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


MOVING = (Tensor.data.__set__, torch._has_compatible_shallow_copy_type)  # type: ignore[attr-defined]


class _Asked(TorchDispatchMode):
    """Notes operations within a function that ask for values."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks(func, args):
            self.traffic.read(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def asks(func: Any, args: Any) -> bool:
    """Whether the host has to know values before an operation of the dispatcher returns."""
    name = func.overloadpacket.__name__
    if name in INDEXING:
        return any(x is not None and x.dtype in MASKS for x in args[1])
    return name in ASKING or f"{name}.{func._overloadname}" in ASKING


class PretendedGPU(TorchFunctionMode):
    """While it is on, ``cuda`` can be named as a device, and tensors that were put there are on it."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    @contextmanager
    def noted(self) -> Iterator[Traffic]:
        """What goes to and fro meanwhile."""
        before, self.traffic = self.traffic, Traffic()
        try:
            yield self.traffic
        finally:
            self.traffic = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAYS and is_there(args[0]):
            return SAYS[func]
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._to(func, *args, **kwargs)
        if func is Tensor.copy_:
            return self._copy(*args, **kwargs)
        if func in MOVING:
            return _moved(func, *args)
        tensors = _tensors((args, kwargs))
        there, named = any(map(is_there, tensors)), kwargs.get("device")
        if named is not None:
            kwargs = kwargs | {"device": HOST}
        goes = there if named is None else _on_device(named)
        if there and func in TO_HOST:
            self.traffic.read(func.__name__)
            return func(*args, **kwargs)
        if goes:
            self._check(func, args, kwargs, tensors)
        with _Asked(self.traffic) if there else nullcontext():
            out = func(*args, **kwargs)
            out = iter(list(out)) if func is Tensor.__iter__ else out
        if func is Tensor.__iter__:
            return iter([_put(each) for each in out] if there else out)
        if goes and func is not Tensor.__setitem__:
            if any(x is given for x in _tensors(out) for given in tensors if not is_there(given)):
                raise RuntimeError(f"{func.__name__} gave a tensor of the processor back")
            _put(out)
        return out

    def _check(self, func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> None:
        """What a GPU refuses, and what it takes from the host."""
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != DEVICE.type:
            raise RuntimeError(f"{func.__name__}: a generator of the processor for numbers on {DEVICE}")
        if func in MAKERS or func is Tensor.new_tensor:
            self.traffic.upload(func.__name__)
            return
        if func in SETS:  # an index may come from the host
            lists = [x for x in (args[1] if isinstance(args[1], tuple) else (args[1],)) if _given(x)]
            for _ in lists:
                self.traffic.upload("index")
            tensors = [args[0], *(x for x in args[2:] if isinstance(x, Tensor))]
        if any(x.dim() and not is_there(x) for x in tensors):
            raise RuntimeError(f"{func.__name__}: tensors on the processor and on {DEVICE} in one operation")

    def _to(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to`` and its kin: values move where the device differs."""
        target, dtype, non_blocking = _target(func, args, kwargs)
        here = is_there(tensor)
        goes = here if target is None else _on_device(target)
        moved = tensor.to(dtype or tensor.dtype, copy=goes != here or bool(kwargs.get("copy")))
        if here and not goes:
            assert not non_blocking, "what is read without waiting may not be there yet"
            self.traffic.read("to cpu")
        elif goes and not here:
            self.traffic.upload("to", non_blocking)
        return _put(moved) if goes else moved  # type: ignore[no-any-return]

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if is_there(to) and not is_there(source):
            self.traffic.upload("copy_", non_blocking)
        elif is_there(source) and not is_there(to):
            self.traffic.read("copy_ to cpu")
        return to.copy_(source)


def _moved(func: Any, parameter: Tensor, to: Tensor) -> Any:
    """What ``nn.Module.to`` does to a parameter, whose place is then that of what it gets."""
    if func is MOVING[0]:
        vars(parameter).pop("_pretended", None)
        if is_there(to):
            _put(parameter)
    return func(parameter, to)


def is_there(x: Any) -> bool:
    """Whether it is a tensor on the pretended device."""
    return isinstance(x, Tensor) and "_pretended" in vars(x)


def _put(x: Any) -> Any:
    for each in _tensors(x):
        each._pretended = True  # type: ignore[attr-defined]
    return x


def _tensors(x: Any) -> list[Tensor]:
    """Those in arguments or results, however deep in lists."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, list | tuple):
        return []
    return [each for part in x for each in _tensors(part)]


def _on_device(device: Any) -> bool:
    return torch.device(device).type == DEVICE.type


def _given(index: Any) -> bool:
    return isinstance(index, list) or (isinstance(index, Tensor) and index.dim() > 0 and not is_there(index))


def _target(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, torch.dtype | None, bool]:
    """Device, dtype and whether the host goes on, as ``Tensor.to`` is given them."""
    device, dtype, non_blocking = kwargs.get("device"), kwargs.get("dtype"), bool(kwargs.get("non_blocking"))
    if func is not Tensor.to:
        return (HOST if func is Tensor.cpu else DEVICE), None, non_blocking or True in args
    for each in [*args, kwargs.get("other")]:
        if isinstance(each, Tensor):
            device, dtype = DEVICE if is_there(each) else HOST, each.dtype
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, bool):
            non_blocking = each
        elif each is not None:
            device = each
    return device, dtype, non_blocking


def move(*things: Any) -> None:
    """Put every tensor that these objects hold on the device, to be called while that is on."""
    seen: dict[int, Any] = {}
    left = list(things)
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            thing._pretended = True  # type: ignore[attr-defined]
        elif isinstance(thing, Mapping):
            left += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            left += thing
        else:
            left += vars(thing).values() if hasattr(thing, "__dict__") else ()
    for thing in seen.values():
        if isinstance(thing, Trunk):
            thing.layers = thing._find_layers()
