"""Recorded steps: a trunk's compiled steps as CUDA graphs, so that a GPU never waits for the host within a forward.

A step over a small tree queues hundreds of kernels, which on a small or fast trunk takes longer than they run. A CUDA
graph is recorded once and queued as one. It reads and writes fixed addresses, which decides all else here:

* inputs are copied into buffers of their own before each replay, and what comes out is copied away after it;
* the text's length is rounded up to whole blocks of slots, those beyond it masked: one recording per block;
* keys and values lie in storages that stay, :class:`Berth`: a cache that is met elsewhere (a new request's, one that
  grew or whose rows left) moves into a free one, once, and takes over what was recorded there. What was recorded goes
  when its storage goes, so nothing can replay into memory that is somebody else's.

**It has not been run on a GPU.** All but :class:`CudaRecorder` is tested on a processor, with a recorder that repeats
a step's operations on the very tensors that they had; of that class it is tested that nothing which it records asks
the device for anything or copies from the host.

Dimensions: B rows, N nodes, T slots in view, D hidden, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.cache import BLOCK, SlotCache
from medusa.compiled import CompiledSteps, StepSize, _traced
from medusa.errors import UserError, reason
from medusa.uploads import upload

if TYPE_CHECKING:
    from medusa.trunk import Trunk

Mask = Tensor | dict[str, Tensor | None] | None
Work = Callable[[], None]
Recorder = Callable[[Work], Work]  # takes work on tensors that stay where they are; gives back what repeats it

WARM_UPS = 3  # before a recording: libraries set themselves up, kernels are chosen
KEPT = 4  # storages that no cache is in, kept with what was recorded over them


class CudaRecorder:
    """Records work as CUDA graphs, which share their memory: they are replayed one after the other, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # what is captured may not be the default stream

    def __call__(self, work: Work) -> Work:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    work()
            current.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                work()
        return graph.replay


class Berth:
    """Storages [planes, B, heads, S, size] that stay where they are, and what was recorded over them.

    Of at least ``slots`` slots per row, for caches like ``cache``. Whose they are is found out from that cache: it may
    be gone, or have moved on.
    """

    def __init__(self, cache: SlotCache, slots: int) -> None:
        most = BLOCK
        while most <= slots:
            most *= 2  # texts that grow move seldom
        self.slots = most + BLOCK  # a view is never the whole plane: traces tell the two apart
        with torch.inference_mode(False):  # a cache may be written to in any mode
            self.storages = [each.new_zeros(*each.shape[:3], self.slots, each.shape[4]) for each in cache.storages]
        self.recorded: dict[Any, Work] = {}
        self._owner: Callable[[], SlotCache | None] = lambda: None

    @property
    def owner(self) -> SlotCache | None:
        """The cache that lies here."""
        cache = self._owner()
        return cache if cache is not None and cache.storages[0] is self.storages[0] else None

    def fits(self, cache: SlotCache, slots: int) -> bool:
        """Whether ``cache`` could lie here, with so many slots in view."""
        mine, theirs = ([(*s.shape[:3], s.shape[4], s.dtype, s.device) for s in x.storages] for x in (self, cache))
        return mine == theirs and slots < self.slots

    def take(self, cache: SlotCache) -> None:
        """``cache`` lies here from now on."""
        cache.move_to(self.storages)
        self._owner = weakref.ref(cache)


class _Inputs:
    """What a recording reads beside the cache: ids, positions and the rows' lengths, and a mask per kind of layer."""

    def __init__(self, trunk: Trunk, size: StepSize, total: int, kinds: Iterable[str]) -> None:
        made = {"dtype": torch.long, "device": trunk.device}
        self.ids_BN, self.positions_BN = (torch.zeros(*size, **made) for _ in range(2))  # type: ignore[call-overload]
        self.lengths_B1 = torch.zeros(size.rows, 1, **made)  # type: ignore[call-overload]
        self.behind_N = torch.arange(size.nodes, device=trunk.device)
        shape = (size.rows, 1, size.nodes, total)
        self.biases = {kind: torch.zeros(shape, dtype=trunk.dtype, device=trunk.device) for kind in kinds}

    def fill(self, ids_BN: Tensor, positions_BN: Tensor, mask: Mask, lengths: Sequence[int]) -> None:
        """Copy a step's arguments in. It may have fewer nodes: fillers see all there is, and nobody sees them."""
        nodes = ids_BN.shape[1]
        self.ids_BN[:, :nodes].copy_(ids_BN)
        self.positions_BN[:, :nodes].copy_(positions_BN)
        if len(set(lengths)) == 1:
            self.lengths_B1.fill_(lengths[0])
        else:
            self.lengths_B1.copy_(upload(lengths, self.lengths_B1.device)[:, None])
        for kind, seen in _by_kind(mask):
            bias = self.biases[kind]
            bias[:, :, :nodes].fill_(torch.finfo(bias.dtype).min)
            bias[:, :, nodes:].zero_()
            part = bias[:, :, :nodes, : max(lengths) + nodes]
            part.zero_() if seen is None else part.copy_(seen)

    def arguments(self, planes: Any) -> tuple[Any, ...]:
        """What a step is called with."""
        bias = self.biases.get("", self.biases)  # one for all layers, or one per kind
        return self.ids_BN, self.positions_BN, bias, self.lengths_B1 + self.behind_N, planes


class GraphedSteps(CompiledSteps):
    """Compiled steps, each recorded when it is first met at some length of text, and replayed from then on.

    ``recorder`` is a :class:`CudaRecorder` where none is given. ``compiled=False`` records what runs eagerly: nothing
    is compiled, kernels are the library's. What is returned is the caller's own.

    One stream: whoever decodes on several at once gives each its own trunk.

    Raises:
        UserError: as :class:`CompiledSteps`; a trunk that is not on one GPU, where no recorder is given.
    """

    def __init__(
        self,
        trunk: Trunk,
        sizes: Iterable[StepSize],
        *,
        recorder: Recorder | None = None,
        compiled: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(trunk, sizes, **options)
        if recorder is None and not graphs_apply(trunk):
            raise UserError(f"a trunk on {trunk.device}: CUDA graphs are for one that is on one GPU as a whole")
        self.record = CudaRecorder(trunk.device) if recorder is None else recorder
        self.compiles = compiled
        self._replaying = Lock()  # inputs and outputs are shared
        self._berths: list[Berth] = []  # the one used last stands last
        self._inputs: dict[tuple[StepSize, int], _Inputs] = {}
        self._outputs: dict[tuple[StepSize, tuple[int, ...]], list[Tensor]] = {}

    @torch.inference_mode()
    def __call__(
        self,
        size: StepSize,
        ids_BN: Tensor,
        cache: SlotCache,
        mask: Mask,
        positions_BN: Tensor,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """As :meth:`CompiledSteps.__call__`, replayed.

        Raises:
            UserError: a model whose steps can't be recorded: one that asks for values in its forward, for instance.
        """
        nodes, total = ids_BN.shape[1], -(-cache.reserve(size.nodes) // BLOCK) * BLOCK
        with self._replaying:
            berth = self._berth(cache, total)
            if (size, total) not in self._inputs:
                self._inputs[size, total] = _Inputs(self.trunk, size, total, [kind for kind, _ in _by_kind(mask)])
            self._inputs[size, total].fill(ids_BN, positions_BN, mask, cache.lengths)
            key = size, total, self.layers
            if key not in berth.recorded:
                berth.recorded[key] = self._recording(size, total, cache)
            berth.recorded[key]()
            logits_BNV, hidden_BND, *states = (x[:, :nodes].clone() for x in self._outputs[size, self.layers])
        return logits_BNV, hidden_BND, tuple(states[self.layers.index(layer)] for layer in layers)

    def _berth(self, cache: SlotCache, total: int) -> Berth:
        """Where ``cache`` lies, with so many slots in view; it moves there if it does not yet."""
        own = [berth for berth in self._berths if berth.owner is cache and total < berth.slots]
        free = [berth for berth in self._berths if berth.owner is None and berth.fits(cache, total)]
        berth = next(iter(own or sorted(free, key=lambda each: each.slots)), None) or Berth(cache, total)
        if not own:
            berth.take(cache)
        self._berths = [*(each for each in self._berths if each is not berth), berth]
        idle = [each for each in self._berths if each.owner is None]
        for each in idle[: len(idle) - KEPT]:
            self._berths.remove(each)
        return berth

    def _recording(self, size: StepSize, total: int, cache: SlotCache) -> Work:
        """Take the step once, for the shapes of what comes out, and record it."""
        inputs, planes = self._inputs[size, total], cache.planes(size.nodes)[0]
        found = self._step(size, *inputs.arguments(planes))
        outputs = self._outputs.setdefault((size, self.layers), [torch.empty_like(each) for each in found])

        def work() -> None:
            for output, each in zip(outputs, self._step(size, *inputs.arguments(planes)), strict=True):
                output.copy_(each)

        try:
            return self.record(work)
        except RuntimeError as error:
            raise UserError(
                f"steps of model type {self.trunk.family!r} can't be recorded as CUDA graphs ({reason(error)}): leave"
                " compile out"
            ) from error

    def _step(self, size: StepSize, *arguments: Any) -> tuple[Tensor, ...]:
        if not self.compiles and size not in self.compiled:
            self.compiled[size] = _traced(self.trunk, self.layers)
        return self.compiled[size](*arguments) if size in self.compiled else self._first(size, *arguments)


def graphs_apply(trunk: Trunk) -> bool:
    """Whether a trunk lies on one GPU as a whole."""
    held = {weight.device for weight in trunk.model.parameters()}
    devices = held | {plane.device for layer in trunk.layers for plane in (layer.keys, layer.values)}
    return len(devices) == 1 and devices.pop().type == "cuda"


def _by_kind(mask: Mask) -> Iterator[tuple[str, Tensor | None]]:
    yield from mask.items() if isinstance(mask, dict) else [("", mask)]
