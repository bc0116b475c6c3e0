"""The clock of the benchmark: contenders timed in turns on the same prompts, and what one step consists of.

Dimensions: B batch, A accepted nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from medusa.accept import Acceptance
from medusa.cache import SlotCache
from medusa.decoding import Decoder, Request
from medusa.drafters.base import Drafter, DraftSession
from medusa.folded import library_attention
from medusa.machine import seconds
from medusa.packed import as_loaded
from medusa.sampling import Chance
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput

from .contenders import GREEDY, Task, our_way


@dataclass(frozen=True)
class Run:
    """One prompt continued once.

    ``steps`` are the trunk's forwards after the prefill; ``prefill_seconds`` is None where it can't be told apart;
    ``accepted`` holds the drafted tokens that each step accepted, ``pace`` what :class:`~.contenders.Trial` says of it.
    """

    ids: list[int]
    seconds: float
    steps: int
    prefill_seconds: float | None = None
    accepted: tuple[int, ...] = ()
    pace: tuple[tuple[int, float], ...] = ()


Contender = Callable[[Sequence[int], int], Run]  # prompt, number of new tokens


def plain_generate(trunk: Trunk) -> Contender:
    """The library's own greedy ``generate`` with its default cache and attention and the weights as loaded."""

    def run(prompt: Sequence[int], tokens: int) -> Run:
        ids_1T = torch.tensor([list(prompt)], device=trunk.device)
        mask_1T = torch.ones_like(ids_1T)
        out: list[Tensor] = []
        with as_loaded(trunk.model), library_attention(trunk.model):
            taken = seconds(
                lambda: out.append(
                    trunk.model.generate(input_ids=ids_1T, attention_mask=mask_1T, max_new_tokens=tokens, **GREEDY)
                )
            )
        return Run(out[0][0, len(prompt) :].tolist(), taken, tokens - 1)

    return run


def our_loop(trunk: Trunk, drafter: Drafter) -> Contender:
    """The decode loop with ``drafter``. EOS is a token like any other here, so that all runs have the same length."""
    way = our_way(trunk, drafter)

    def run(prompt: Sequence[int], tokens: int) -> Run:
        trial = way([prompt], Task(tokens))
        return Run(trial.rows[0], trial.seconds, len(trial.accepted), trial.first_seconds, trial.accepted, trial.pace)

    return run


def compare(
    contenders: dict[str, Contender],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    repeats: int,
    advance: Callable[..., object] = lambda **_: None,
) -> dict[str, list[list[Run]]]:
    """Run every contender on every prompt ``repeats`` times: ``runs[name][prompt][repeat]``.

    Contenders take turns prompt by prompt, and who begins rotates, so that a machine that slows down for a while
    slows all of them. One unmeasured round comes first.
    """
    for run in contenders.values():
        run(prompts[0], tokens)
    names = list(contenders)
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in names}
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                runs[name][index].append(contenders[name](prompt, tokens))
                advance(tokens=tokens)
    return runs


@dataclass(frozen=True)
class StepCost:
    """Where a step's time goes: medians over steps with the whole tree, in milliseconds.

    ``heads_ms`` is the drafter's whole proposal; ``forward_ms`` the trunk's forward inside the step. The two bare
    forwards call the model itself with the same ids, mask and positions right after the step: one with our cache, one
    with the library's ``DynamicCache``. ``bare_ms`` is the faster of the two.
    """

    nodes: int
    steps: int
    step_ms: float
    heads_ms: float
    forward_ms: float
    bare_ms: float
    bare_slot_cache_ms: float
    bare_library_cache_ms: float
    overhead: float  # (step - heads) / bare trunk forward
    own_share: float  # (step - heads - trunk forward in the step) / step


@dataclass(frozen=True)
class Anatomy:
    """A step's cost, and how often each node of the tree was accepted: share of steps."""

    cost: StepCost
    node_share: list[float]


@torch.inference_mode()
def dissect(
    trunk: Trunk,
    drafters: dict[str, Drafter],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    advance: Callable[..., object] = lambda **_: None,
) -> dict[str, Anatomy]:
    """Take the steps of ``drafters`` apart, step by step in turns, on ``prompts`` continued by ``tokens`` tokens.

    ``advance(tokens=n)`` is called after each prompt.
    """
    parts: dict[str, list[_Parts]] = {name: [] for name in drafters}
    paths: dict[str, list[tuple[int, list[int]]]] = {name: [] for name in drafters}
    for prompt in prompts:
        watches = {name: _Watch(trunk, drafter, prompt, tokens) for name, drafter in drafters.items()}
        while any(watch.decoder.live for watch in watches.values()):
            for name, watch in watches.items():
                if watch.decoder.live:
                    parts[name].append(watch.step())
        for name, watch in watches.items():
            paths[name] += [(nodes, path_BA[0].tolist()) for nodes, path_BA in watch.session.paths]
        advance(tokens=tokens * len(drafters))
    return {name: _anatomy(parts[name], paths[name]) for name in drafters}


def _anatomy(parts: Sequence[_Parts], paths: Sequence[tuple[int, list[int]]]) -> Anatomy:
    """Of steps with the whole tree: the last ones of a run have a trimmed one."""
    size = max(part.nodes for part in parts)
    full = [path for nodes, path in paths if nodes == size]
    node_share = [sum(node in path for path in full) / len(full) for node in range(size)]
    return Anatomy(_cost(size, [part for part in parts if part.nodes == size]), node_share)


class _Parts(NamedTuple):
    """Seconds of one step and of what it consists of."""

    nodes: int
    step: float
    heads: float
    forward: float
    slot: float
    library: float


def _cost(size: int, parts: Sequence[_Parts]) -> StepCost:
    slot, library = (median(getattr(part, name) for part in parts) for name in ("slot", "library"))
    faster = "slot" if slot <= library else "library"  # so that no slow cache makes a step look lean
    bare = [getattr(part, faster) for part in parts]
    return StepCost(
        nodes=size,
        steps=len(parts),
        step_ms=1e3 * median(part.step for part in parts),
        heads_ms=1e3 * median(part.heads for part in parts),
        forward_ms=1e3 * median(part.forward for part in parts),
        bare_ms=1e3 * min(slot, library),
        bare_slot_cache_ms=1e3 * slot,
        bare_library_cache_ms=1e3 * library,
        overhead=median((part.step - part.heads) / each for part, each in zip(parts, bare, strict=True)),
        own_share=median((part.step - part.heads - part.forward) / part.step for part in parts),
    )


class _Watch:
    """A decoder whose proposals and trunk forwards are timed; nothing is changed on trunk, model or drafter."""

    def __init__(self, trunk: Trunk, drafter: Drafter, prompt: Sequence[int], tokens: int) -> None:
        self.trunk = trunk
        self.forward = _WatchedForward(trunk.forward)
        watched = copy.copy(trunk)
        watched.forward = self.forward  # type: ignore[method-assign]
        self.decoder = Decoder(watched, drafter)
        self.decoder.admit([Request(prompt, tokens)])
        self.session = _WatchedSession(self.decoder.session)
        self.decoder.session = self.session
        self.slot_cache = trunk.new_cache(1)
        self.library_cache = DynamicCache()
        ids_1T = torch.tensor([list(prompt)], device=trunk.device)
        trunk.model(**trunk.arguments(ids_1T, self.library_cache))
        self.turn = 0

    def step(self) -> _Parts:
        """Take one step, then repeat its forward with either cache."""
        lengths = list(self.decoder.cache.lengths)
        step = seconds(self.decoder.step)
        nodes, inside = self.forward.call[0].shape[1], (self.session.seconds, self.forward.seconds)
        self.slot_cache.set_lengths(lengths)
        self.slot_cache.reserve(nodes)
        self.library_cache.crop(lengths[0] - self.library_cache.get_seq_length())
        self.turn += 1
        if self.turn % 2:  # neither cache always comes first
            slot, library = self._bare(self.slot_cache), self._bare(self.library_cache)
        else:
            library, slot = self._bare(self.library_cache), self._bare(self.slot_cache)
        return _Parts(nodes, step, *inside, slot, library)

    def _bare(self, cache: SlotCache | DynamicCache) -> float:
        ids_BN, _, mask, positions_BN = self.forward.call[:4]
        call = self.trunk.arguments(ids_BN, cache, mask, positions_BN)
        return seconds(lambda: self.trunk.model(**call))


class _WatchedForward:
    """Stands in for the trunk's forward: keeps the arguments and the time of the last call."""

    def __init__(self, forward: Callable[..., TrunkOutput]) -> None:
        self.forward = forward
        self.call: tuple[Any, ...] = ()
        self.seconds = 0.0

    def __call__(self, *call: Any, **options: Any) -> TrunkOutput:
        self.call = call
        output: list[TrunkOutput] = []
        self.seconds = seconds(lambda: output.append(self.forward(*call, **options)))
        return output[0]


class _WatchedSession:
    """Stands in for a drafter's session: times the proposal, keeps (nodes, accepted path) of each step."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.seconds = 0.0
        self.paths: list[tuple[int, Tensor]] = []

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        self.session.start(prompts, hidden_BD, output)

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        trees: list[DraftTree] = []
        self.seconds = seconds(lambda: trees.append(self.session.propose(root_B, room, chance)))
        return trees[0]

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        self.session.commit(tree, verified, acceptance)
        self.paths.append((tree.size, acceptance.path_BA))  # read later: this is inside the time of the step

    def select(self, rows: Sequence[int]) -> None:
        self.session.select(rows)

    def admit(self, slots: Sequence[int], other: DraftSession) -> None:
        self.session.admit(slots, other)
