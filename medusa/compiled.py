"""Compiled steps: the trunk's forward over trees of a given size, compiled for this machine.

A step is compiled per number of rows and nodes; the length of the text may change from call to call. What is compiled
is :meth:`medusa.trunk.Trunk.forward_with_gradients` itself, so that a family's own ways stay one piece of code. A tree
that is somewhat smaller than a step takes it with fillers behind its nodes. All other forwards, such as the prefill,
run as they do without compilation. Layers whose weights are packed (:mod:`medusa.packed`) are packed in steps too.

On a processor steps are compiled ahead of time (:mod:`medusa.ahead`) and kept (:mod:`medusa.packages`), so that the
next process has them in milliseconds. Elsewhere torch traces and compiles them in each process.

Dimensions: B rows, N nodes, T slots in view, D hidden, V vocabulary.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from medusa import packages
from medusa.ahead import Library, Step, can_be_ahead, compile_ahead, is_settled
from medusa.cache import SlotCache, StepCache
from medusa.errors import UserError, reason
from medusa.family import turning_point
from medusa.parallel import spread
from medusa.selfcheck import COARSE, TOLERANCE
from medusa.traced import traceable

if TYPE_CHECKING:
    from medusa.trunk import Trunk

FILLED = 2  # a step takes trees of at least its nodes over this: beyond that, fillers cost more than compiling brings
INDUCTOR = "inductor"


class StepSize(NamedTuple):
    """What a trace is made for."""

    rows: int
    nodes: int


class CompiledSteps:
    """Forwards of a trunk over trees of the sizes given, each compiled, or taken from the disk, when it is first met.

    ``layers``: whose states steps return as well, where they are asked for. ``backend`` is torch.compile's; with
    another than inductor, nothing is kept. ``makes=False``: what is not kept is not compiled but runs eagerly.

    Raises:
        UserError: rotary frequencies that go by the positions of each forward, which a trace would freeze; a trunk that
            is shared out over several processes.
    """

    def __init__(
        self,
        trunk: Trunk,
        sizes: Iterable[StepSize],
        *,
        layers: Iterable[int] = (),
        backend: str | Callable[..., Any] = INDUCTOR,
        makes: bool = True,
    ) -> None:
        if turning_point(trunk.config)[0] is not None:
            raise UserError(
                f"model type {trunk.family!r} has rotary frequencies that go by each forward's positions, so it can't"
                " be compiled: leave compile out"
            )
        if spread(trunk.model):
            raise UserError("compile with tp_plan: steps that processes take together run eagerly; leave compile out")
        self.trunk = trunk
        self.sizes: list[StepSize] = []
        self.layers: tuple[int, ...] = ()
        self.backend, self.makes = backend, makes
        self.ahead = backend == INDUCTOR and can_be_ahead(trunk)
        self.compiled: dict[StepSize, Step] = {}
        self._seen: list[object] = []
        self._tracing = Lock()  # a model's layers are of another kind while it is traced
        self.add(sizes, layers)

    def add(self, sizes: Iterable[StepSize], layers: Iterable[int] = ()) -> None:
        """Have these sizes compiled as well. With other ``layers`` than before all is compiled anew, as it is met."""
        self.sizes = sorted({*self.sizes, *sizes})
        if more := {*layers} - {*self.layers}:
            self.layers = tuple(sorted({*self.layers, *more}))
            self.compiled = {}

    def refresh(self) -> None:
        """Forget what was compiled ahead where the model is another now: an adapter was put on it, or turned off, say.

        Asked before each prompt. What weights are, steps see by themselves.
        """
        if not self.ahead:
            return
        seen = _make_up(self.trunk.model)
        if len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self.compiled, self._seen = {}, seen

    def size_for(self, rows: int, nodes: int, layers: Iterable[int] = ()) -> StepSize | None:
        """The size in which a tree of ``nodes`` nodes runs; None if none is near enough, or states are missing."""
        if not {*layers} <= {*self.layers}:
            return None
        fit = (size for size in self.sizes if size.rows == rows and nodes <= size.nodes <= FILLED * nodes)
        return next(fit, None)

    @torch.inference_mode()
    def __call__(
        self,
        size: StepSize,
        ids_BN: Tensor,
        cache: SlotCache,
        mask: Tensor | dict[str, Tensor | None] | None,
        positions_BN: Tensor,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Logits [B, N, V], hidden [B, N, D] and states, as :meth:`Trunk.forward` gives them for the same arguments.

        Raises:
            UserError: a model that can't be traced or compiled.
        """
        nodes = ids_BN.shape[1]
        total, fillers = cache.reserve(size.nodes), size.nodes - nodes
        planes, slots_BN = cache.planes(size.nodes)
        bias: Tensor | dict[str, Tensor]
        if isinstance(mask, dict):
            bias = {kind: self._bias(seen, size, total, fillers) for kind, seen in mask.items()}
        else:
            bias = self._bias(mask, size, total, fillers)
        arguments = (_padded(ids_BN, fillers), _padded(positions_BN, fillers), bias, slots_BN, planes)
        step = self.compiled.get(size)
        if step is None or (isinstance(step, Library) and not step.is_current):
            output = self._first(size, *arguments)
        else:
            output = step(*arguments)
        logits_BNV, hidden_BND, *states = (each[:, :nodes] for each in output)
        return logits_BNV, hidden_BND, tuple(states[self.layers.index(layer)] for layer in layers)

    def _bias(self, seen: Tensor | None, size: StepSize, total: int, fillers: int) -> Tensor:
        """A mask always, and one per row: a step without one would be another trace. Nobody sees a filler but itself
        and other fillers, which see all: a row without any slot to see has no softmax.
        """
        trunk = self.trunk
        if seen is None:
            seen = torch.zeros(1, 1, size.nodes - fillers, total - fillers, dtype=trunk.dtype, device=trunk.device)
        seen = seen.expand(size.rows, -1, -1, -1)
        if not fillers:
            return _laid_out(seen)
        return pad(pad(seen, (0, fillers), value=torch.finfo(seen.dtype).min), (0, 0, 0, fillers))

    def _first(self, size: StepSize, *arguments: Any) -> tuple[Tensor, ...]:
        """The call that compiles; others that come meanwhile wait for it."""
        with self._tracing:
            return (self._take if self.ahead else self._trace)(size, *arguments)

    def _take(self, size: StepSize, *arguments: Any) -> tuple[Tensor, ...]:
        """Take the step from the disk, or compile it. Its first call is also taken eagerly, and the two compared."""
        step: Any = self.compiled.get(size)
        if step is not None and step.is_current:  # another thread took it meanwhile
            taken: tuple[Tensor, ...] = step(*arguments)
            return taken
        plain, name = _traced(self.trunk, self.layers), self._name(size)
        expected = plain(*arguments)
        if not is_settled(self.trunk.model):  # until the next prompt
            return expected
        step = self._kept(name)
        output = None if step is None else _as_expected(step, arguments, expected)
        if output is None and self.makes:
            step = self._made(size, name, plain, arguments)
            output = _as_expected(step, arguments, expected)
        if output is not None and step is not None:
            self.compiled[size] = step
            return output
        packages.drop(name)
        if self.makes:
            raise UserError(
                f"model type {self.trunk.family!r} gives other numbers when it is compiled here: leave compile out"
            )
        self.sizes = [each for each in self.sizes if each != size]  # several threads may come here
        return plain(*arguments)  # once more: keys and values were written to

    def _name(self, size: StepSize) -> str:
        return packages.name_of(packages.description(self.trunk), *size, self.layers)

    def _kept(self, name: str) -> Library | None:
        folder = packages.find(name)
        try:
            return None if folder is None else Library(folder, self.trunk)
        except RuntimeError:  # of another kind of system, or in a folder whose files can't be run
            return None

    def _made(self, size: StepSize, name: str, plain: Step, arguments: Sequence[Any]) -> Library:
        about = {"model": self.trunk.family, **size._asdict(), "layers": self.layers}
        with tempfile.TemporaryDirectory() as folder, self._explained():
            compile_ahead(self.trunk, plain, arguments, Path(folder))
            return Library(packages.keep(name, Path(folder), about) or Path(folder), self.trunk)

    def _trace(self, size: StepSize, *arguments: Any) -> tuple[Tensor, ...]:
        if size in self.compiled:
            return self.compiled[size](*arguments)
        _, _, bias, _, planes = arguments
        for each in bias.values() if isinstance(bias, dict) else (bias,):
            torch._dynamo.mark_dynamic(each, 3)
        for plane in (plane for pair in planes for plane in pair):
            torch._dynamo.mark_dynamic(plane, 2)
        # the model is frozen: to look at each of its modules in every step is a fifth of a small trunk's step
        unguarded: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        step: Step = torch.compile(
            _traced(self.trunk, self.layers), backend=self.backend, fullgraph=True, dynamic=False, options=unguarded
        )
        with traceable(self.trunk.model), self._explained():
            output = step(*arguments)
        self.compiled[size] = step
        return output

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # as are all errors of torch's compiler
            raise UserError(
                f"model type {self.trunk.family!r} can't be compiled here ({reason(error)}): leave compile out"
            ) from error


def stored_sizes(trunk: Trunk, sizes: Iterable[StepSize], layers: Iterable[int] = ()) -> list[StepSize]:
    """Those of the sizes whose steps are kept on the disk, for this very trunk and machine."""
    if not os.path.isdir(packages.steps_folder()) or not can_be_ahead(trunk):
        return []
    described, asked = packages.description(trunk), tuple(sorted({*layers}))
    return [size for size in sizes if packages.is_there(packages.name_of(described, *size, asked))]


def _make_up(model: nn.Module) -> list[object]:
    """What a model's forward is, but for weights, and numbers that a forward may count: objects, to be told apart by
    identity."""
    found: list[object] = []
    for module in model.modules():
        found += [module, type(module)]
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers") or isinstance(value, Tensor) or type(value) in (int, float):
                continue
            found.append(value)
            if isinstance(value, dict):  # hooks, and what adapters keep by name
                found += value.values()
    return found


def _traced(trunk: Trunk, layers: tuple[int, ...]) -> Step:
    def step(
        ids_BN: Tensor,
        positions_BN: Tensor,
        bias: Any,
        slots_BN: Tensor,
        planes: Sequence[Sequence[Tensor]],
    ) -> tuple[Tensor, ...]:
        some = next(iter(bias.values())) if isinstance(bias, dict) else bias
        cache = StepCache(planes, slots_BN, some.shape[3])
        output = trunk.forward_with_gradients(ids_BN, cache, bias, positions_BN, layers=layers)
        return output.logits, output.hidden, *output.states

    # torch keeps traces by code object, and looks through all of one: each size gets its own
    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


def _as_expected(step: Step, arguments: Sequence[Any], expected: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """What a step gives; None unless that is what is expected, as far as :mod:`medusa.selfcheck` lets it differ."""
    try:
        found = step(*arguments)
    except RuntimeError:  # a library that can't run here
        return None
    return found if len(found) == len(expected) and all(map(_close, found, expected)) else None


def _close(found: Tensor, expected: Tensor) -> bool:
    largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    allowed = TOLERANCE.get(expected.dtype, COARSE) * max(largest, 1.0)
    same = found.shape == expected.shape and found.dtype == expected.dtype
    return same and torch.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True)


def _padded(values_BN: Tensor, fillers: int) -> Tensor:
    return pad(values_BN, (0, fillers)) if fillers else _laid_out(values_BN)


def _laid_out(values: Tensor) -> Tensor:
    """A copy with a layout of its own: a trace is made for one layout, and views have many."""
    return values.clone(memory_format=torch.contiguous_format)
