"""What a step of the decode loop consists of, measured from outside: the loop knows nothing of it.

For the time of a run the methods that make up a step are replaced, on copies and on the objects of that run alone, by
ones that note when they begin and end. A moment belongs to the innermost part that is under way. On a GPU moments are
events in its queue, which are read once all is done: nothing waits for the device that would not wait otherwise, and a
part has the device's time from its first work to the next part's, gaps in which the device waits for the host included.

Dimensions: B rows, N nodes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from medusa.accept import Acceptance, DeterministicRule
from medusa.decoding import Decoder
from medusa.drafters.base import Drafter
from medusa.drafters.heads import Unrolled
from medusa.errors import UserError
from medusa.laws import Laws
from medusa.rules import RecursiveRule
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput

from ..calls import prepare

# The parts of a step, in the order in which tables and plots show them.
TRUNK, HEADS, TREE, MASK = "trunk", "heads", "tree", "mask"
ACCEPTANCE, COMMIT, DRAFTER, TEXT, LOOP = "acceptance", "commit", "drafter", "text", "loop"
PARTS = {
    TRUNK: "trunk forward",
    HEADS: "heads",
    TREE: "tree building",
    MASK: "mask and positions",
    ACCEPTANCE: "acceptance",
    COMMIT: "cache commit",
    DRAFTER: "drafter's own commit",
    TEXT: "text",
    LOOP: "the loop itself",
}
BARE = "bare"  # beside the step: the trunk's forward once more
NOT_OURS = (TRUNK, HEADS)
WALL, CPU = "wall", "cpu"
CLOCKS = {WALL: "the clock on the wall", CPU: "the processor time of this process"}


class Clock(Protocol):
    """Notes moments, and tells what lies between them once all is done."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def settle(self) -> None:
        """Have all moments known: called once, at the end."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Seconds."""
        ...


class HostClock:
    """The processor's own clock: the wall's, or the time that this process had, which others' work leaves as it is."""

    def __init__(self, mark: Callable[[], float] = time.perf_counter) -> None:
        self.mark = mark

    def settle(self) -> None:
        """They are known already."""

    def between(self, start: float, end: float) -> float:
        """Seconds."""
        return end - start


class DeviceClock:
    """Events in a GPU's queue. ``event`` makes one, ``wait`` waits for all that was queued."""

    def __init__(
        self, event: Callable[[], Any] | None = None, wait: Callable[[], object] = torch.cuda.synchronize
    ) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._wait = wait

    def mark(self) -> Any:
        """Queue an event."""
        event = self._event()
        event.record()
        return event

    def settle(self) -> None:
        """Wait for the last event."""
        self._wait()

    def between(self, start: Any, end: Any) -> float:
        """Seconds."""
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device, name: str = WALL) -> Clock:
    """The clock of that name for a device's work. UserError: processor time of a GPU's."""
    if device.type == "cuda":
        if name != WALL:
            raise UserError(f"a GPU's work can't be told by {CLOCKS[name]}: leave the clock out")
        return DeviceClock()
    return HostClock(time.perf_counter if name == WALL else time.process_time)


class Recorder:
    """The parts under way, innermost last, and each moment at which that changed."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.under_way: list[str] = []
        self._marks: list[tuple[str, Any]] = []  # what begins, "" for nothing, and when

    def enter(self, part: str) -> None:
        """``part`` begins."""
        self.under_way.append(part)
        self._marks.append((part, self.clock.mark()))

    def leave(self) -> None:
        """The innermost part ends."""
        self.under_way.pop()
        self._marks.append((self.under_way[-1] if self.under_way else "", self.clock.mark()))

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work`` with its time noted: within a step, and not within the part itself or the heads."""

        def call(*arguments: Any, **options: Any) -> Any:
            if not self.under_way or HEADS in self.under_way or part in self.under_way:
                return work(*arguments, **options)
            self.enter(part)
            try:
                return work(*arguments, **options)
            finally:
                self.leave()

        return call

    def spans(self) -> list[dict[str, float]]:
        """Of each span from nothing under way to nothing: seconds by part. For the end: it waits for the device."""
        self.clock.settle()
        spans, span = [], dict[str, float]()
        for (part, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if part:
                span[part] = span.get(part, 0.0) + self.clock.between(start, end)
            else:
                spans.append(span)
                span = {}
        return [*spans, span] if span else spans


@dataclass(frozen=True)
class Parts:
    """One step: its tree's nodes, the tokens it brought, the slots it looked at, and seconds.

    ``seconds`` are those of each part; ``bare`` is the trunk's forward of the same shape, right after.
    """

    nodes: int
    tokens: int
    view: int
    seconds: dict[str, float]
    bare: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


@torch.inference_mode()
def profile(
    trunk: Trunk,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    advance: Callable[..., object] = lambda **_: None,
    clock: Callable[[], Clock] | None = None,
) -> dict[str, list[Parts]]:
    """The steps of each drafter, in turns step by step, while ``prompts`` are continued by ``tokens`` tokens each.

    Decoding is greedy and no EOS ends it. ``advance(tokens=n)`` is called after each prompt. ``clock`` makes one for
    each run; left out, it is the wall's, or a GPU's.
    """
    clock = clock or (lambda: clock_for(trunk.device))
    found: dict[str, list[Parts]] = {name: [] for name in drafters}
    for prompt in prompts:
        watches = {name: Watch(trunk, each, prompt, tokens, Recorder(clock())) for name, each in drafters.items()}
        while any(watch.decoder.live for watch in watches.values()):
            for watch in watches.values():
                if watch.decoder.live:
                    watch.step()
        for name, watch in watches.items():
            found[name] += watch.parts()
        advance(tokens=tokens * len(drafters))
    return found


class Watch:
    """A decoder and the text it makes, with the parts of each step noted; trunk, model and drafter stay as they are."""

    def __init__(self, trunk: Trunk, drafter: Drafter, prompt: Sequence[int], tokens: int, recorder: Recorder) -> None:
        self.trunk, self.recorder = trunk, recorder
        given = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
        self.tally = prepare(trunk, drafter, [prompt], given).tallies[0]
        self._forward = recorder.timed(TRUNK, trunk.forward)
        watched = copy.copy(trunk)
        watched.forward = self._noted  # type: ignore[method-assign]
        watched.tree_forward = recorder.timed(MASK, watched.tree_forward)  # type: ignore[method-assign]
        rule: Any = recorder.timed(ACCEPTANCE, _accept)
        self.decoder = Decoder(watched, drafter, rule)
        self.tally.add(0, self.decoder.admit([self.tally.request]), 0.0)
        watch_session(self.decoder.session, recorder)
        cache: Any = self.decoder.cache
        cache.commit = recorder.timed(COMMIT, cache.commit)
        self._bare_cache = trunk.new_cache(1)
        self._steps: list[tuple[int, int, int]] = []

    def _noted(self, *arguments: Any, **options: Any) -> TrunkOutput:
        self._call = arguments, options
        output: TrunkOutput = self._forward(*arguments, **options)
        return output

    def step(self) -> None:
        """Take a step, and the trunk's forward of it once more."""
        lengths = list(self.decoder.cache.lengths)
        self.recorder.enter(LOOP)
        step = self.decoder.step()
        self.recorder.enter(TEXT)
        self.tally.add(0, step, 0.0)
        self.recorder.leave()
        self.recorder.leave()
        (ids_BN, _, *rest), options = self._call
        self._bare_cache.set_lengths(lengths)
        view = self._bare_cache.reserve(ids_BN.shape[1])
        self.recorder.enter(BARE)
        self.trunk.forward(ids_BN, self._bare_cache, *rest, **options)
        self.recorder.leave()
        self._steps.append((step.nodes, step.accepted[0] + 1, view))

    def parts(self) -> list[Parts]:
        """All steps; a device is waited for here."""
        spans = self.recorder.spans()
        return [
            Parts(*step, seconds, bare[BARE])
            for step, seconds, bare in zip(self._steps, spans[::2], spans[1::2], strict=True)
        ]


def _accept(tree: DraftTree, laws: Laws) -> Acceptance:
    """By the lossless rule that fits, as the loop does."""
    return (DeterministicRule() if tree.sampled_BN is None else RecursiveRule())(tree, laws)


def watch_session(session: Any, recorder: Recorder) -> None:
    """Note a drafting session's own work: proposals as tree building but for what networks do in them, and commits.

    A network is whatever module or model it holds, or a session that it has in turn holds: each is replaced by a copy
    that shares all with it and whose methods are timed.
    """
    _watch_networks(session, recorder)
    session.propose = recorder.timed(TREE, session.propose)
    session.commit = recorder.timed(DRAFTER, session.commit)


def _watch_networks(holder: Any, recorder: Recorder) -> None:
    for name, value in list(vars(holder).items()):
        if hasattr(value, "propose"):
            _watch_networks(value, recorder)
        elif isinstance(value, (torch.nn.Module, Unrolled)):
            setattr(holder, name, _watched_module(value, recorder))
        elif isinstance(value, Trunk):
            watched = copy.copy(value)
            watched.forward = recorder.timed(HEADS, value.forward)  # type: ignore[method-assign]
            setattr(holder, name, watched)


def _watched_module(module: torch.nn.Module | Unrolled, recorder: Recorder) -> torch.nn.Module | Unrolled:
    """A copy of a module or of heads whose own public methods are timed; inside they call each other as before."""
    watched: Any = copy.copy(module)
    for kind in type(module).__mro__:
        if kind is torch.nn.Module:
            break
        for name, member in vars(kind).items():
            if callable(member) and not name.startswith("_") and name not in vars(watched):
                setattr(watched, name, recorder.timed(HEADS, getattr(module, name)))
    made: torch.nn.Module | Unrolled = watched
    return made
