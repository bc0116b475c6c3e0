"""Compiled steps: the trunk's forward over trees of a given size, traced once and compiled for this machine.

A trace is made per number of rows and nodes; the length of the text may change from call to call. What is traced is
:meth:`medusa.trunk.Trunk.forward_with_gradients` itself, so that a family's own ways stay one piece of code. A tree
that is somewhat smaller than a trace takes it with fillers behind its nodes. All other forwards, such as the prefill,
run as they do without compilation. Layers whose weights are packed (:mod:`medusa.packed`) are packed in traces too.

Dimensions: B rows, N nodes, T slots in view, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.cache import SlotCache, StepCache
from medusa.errors import UserError, reason
from medusa.family import turning_point
from medusa.parallel import spread
from medusa.traced import traceable

if TYPE_CHECKING:
    from medusa.trunk import Trunk

Step = Callable[..., tuple[Tensor, ...]]
SMALL = 32 * 2**20  # bytes of weights, which a processor's caches about hold: calls then take as long as the products
FILLED = 2  # a trace takes trees of at least its nodes over this: beyond that, fillers cost more than tracing brings


class StepSize(NamedTuple):
    """What a trace is made for."""

    rows: int
    nodes: int


class CompiledSteps:
    """Forwards of a trunk over trees of the sizes given, each compiled when it is first met.

    ``layers``: whose states steps return as well, where they are asked for. ``backend`` is torch.compile's, ``options``
    are settings of inductor while it compiles, by default those of :func:`settings`.

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
        backend: str | Callable[..., Any] = "inductor",
        options: dict[str, Any] | None = None,
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
        self.backend, self.options = backend, settings(trunk) if options is None else options
        self.compiled: dict[StepSize, Step] = {}
        self._tracing = Lock()  # a model's layers are of another kind while it is traced
        self.add(sizes, layers)

    def add(self, sizes: Iterable[StepSize], layers: Iterable[int] = ()) -> None:
        """Have these sizes compiled as well. With other ``layers`` than before all is compiled anew, as it is met."""
        self.sizes = sorted({*self.sizes, *sizes})
        if more := {*layers} - {*self.layers}:
            self.layers = tuple(sorted({*self.layers, *more}))
            self.compiled = {}

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
        output = self.compiled[size](*arguments) if size in self.compiled else self._first(size, *arguments)
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
        """The call that traces and compiles; others that come meanwhile wait for it."""
        with self._tracing:
            return self.compiled[size](*arguments) if size in self.compiled else self._trace(size, *arguments)

    def _trace(self, size: StepSize, *arguments: Any) -> tuple[Tensor, ...]:
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
        with torch._inductor.config.patch(self.options), traceable(self.trunk.model):
            try:
                output = step(*arguments)
            except RuntimeError as error:  # as are all errors of torch's compiler
                raise UserError(
                    f"model type {self.trunk.family!r} can't be compiled here ({reason(error)}): leave compile out"
                ) from error
        self.compiled[size] = step
        return output


def settings(trunk: Trunk) -> dict[str, Any]:
    """Of inductor, for this trunk: a small one's products are called from C++, a tenth to a quarter less time.

    A large one's calls are little beside its products, and the C++ compiler would take minutes over them.
    """
    weights = sum(weight.nbytes for weight in trunk.model.parameters())
    return {"cpp_wrapper": trunk.device.type == "cpu" and weights <= SMALL}


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


def _padded(values_BN: Tensor, fillers: int) -> Tensor:
    return pad(values_BN, (0, fillers)) if fillers else _laid_out(values_BN)


def _laid_out(values: Tensor) -> Tensor:
    """A copy with a layout of its own: a trace is made for one layout, and views have many."""
    return values.clone(memory_format=torch.contiguous_format)
