"""What a step costs on this machine, by the tree it verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from medusa.decoding import Decoder, Request
from medusa.drafters.base import Drafter, parts_of
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.sized import SizedDrafter
from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.machine import own_seconds
from medusa.packed import packed
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

Progress = Callable[[int, int], None]  # done, total
TEXT = 128  # tokens of a made-up text: what a step takes grows slowly with it
RAGGED = 16  # rows of a batch rarely have one length, and those that do are cheaper


def step_costs(
    heads: MedusaHeads,
    topologies: Sequence[Topology],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Progress | None = None,
) -> list[tuple[float, float]]:
    """Median milliseconds of a whole step and of the trunk's forward alone, for each tree, measured in turns.

    They are those of a machine that does nothing else (:func:`medusa.machine.own_seconds`).
    ``prompts`` are the rows of the batch that the cost is wanted for: usually one.
    """
    drafters = [MedusaDrafter(heads, topology) for topology in topologies]
    return drafter_costs(heads.trunk, drafters, topologies, prompts, rounds, progress)


def drafter_costs(
    trunk: Trunk,
    drafters: Sequence[Drafter],
    topologies: Sequence[Topology],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Progress | None = None,
) -> list[tuple[float, float]]:
    """:func:`step_costs` of any drafters, each of which fills the tree of its place."""
    parts = {part: None for drafter in drafters for part in parts_of(drafter)}  # several trees share their heads
    with packed(trunk.model, *parts):
        return _in_turns(trunk, drafters, topologies, prompts, rounds, progress)


def _in_turns(
    trunk: Trunk,
    drafters: Sequence[Drafter],
    topologies: Sequence[Topology],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Progress | None,
) -> list[tuple[float, float]]:
    steps: list[list[float]] = [[] for _ in topologies]
    forwards: list[list[float]] = [[] for _ in topologies]
    decoders = [_fresh(trunk, *each, prompts) for each in zip(drafters, topologies, strict=True)]
    shapes = [Shape.static(topology, trunk.device) for topology in topologies]
    for turn in range(rounds):
        for index, topology in enumerate(topologies):
            if _room(decoders[index]) <= topology.depth:  # a row with less room is served a smaller tree
                decoders[index] = _fresh(trunk, drafters[index], topology, prompts)
            decoder = decoders[index]
            with torch.inference_mode():
                tree = _tree(shapes[index], decoder.root_B)
                forward = own_seconds(lambda d=decoder, t=tree: d.trunk.tree_forward(t, d.cache), trunk.device)  # type: ignore[misc]
            forwards[index].append(forward)
            steps[index].append(own_seconds(decoder.step, trunk.device))
        if progress:
            progress(turn + 1, rounds)
    return [(1e3 * median(step), 1e3 * median(forward)) for step, forward in zip(steps, forwards, strict=True)]


def _tree(shape: Shape, root_B: Tensor) -> DraftTree:
    """A tree of the roots' tokens: a forward takes the same time whatever its tokens are."""
    tokens_BN = root_B[:, None].expand(-1, shape.depths.shape[-1]).contiguous()
    return DraftTree(shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))


def _fresh(trunk: Trunk, drafter: Drafter, topology: Topology, prompts: Sequence[Sequence[int]]) -> Decoder:
    decoder = Decoder(trunk, drafter)
    decoder.admit([Request(prompt, 256) for prompt in prompts])
    if _room(decoder) <= topology.depth:
        raise UserError(
            f"a prompt of {max(map(len, prompts))} tokens leaves room for {_room(decoder)}, too few for a tree"
            f" {topology.depth} deep: take shorter prompts"
        )
    return decoder


def _room(decoder: Decoder) -> int:
    """How many tokens every row may still emit; 0 once one of them has ended."""
    return min((row.left for row in decoder.rows.values()), default=0) if None not in decoder.slots else 0


class Scratch:
    """A batch of ``rows`` made-up texts, to time steps of any of ``trees`` on: in one cache, whatever their number."""

    def __init__(self, heads: MedusaHeads, trees: Sequence[Topology], rows: int) -> None:
        self.trunk, self.trees, self._next = heads.trunk, trees, 0
        self._drafter = SizedDrafter(MedusaDrafter(heads, Topology.root()), trees, lambda slots: self._next)
        self._most = self.trunk.horizon(1) or 4 * TEXT
        size = min(TEXT, self._most // 2)
        self._lengths = [size - row % min(RAGGED, size) for row in range(rows)]
        self._decoder = self._fresh()

    def _fresh(self) -> Decoder:
        """A batch of texts that nobody read: what a step takes does not depend on what their slots hold, zeros here."""
        decoder = Decoder(self.trunk, self._drafter)
        left = self._most - max(self._lengths)
        decoder.admit([Request([row % self.trunk.vocab_size], left) for row in range(len(self._lengths))])
        decoder.cache.reserve(max(self._lengths))
        decoder.cache.set_lengths(self._lengths)
        return decoder

    def step(self, index: int) -> float:
        """Seconds of a whole step with the tree at ``index``, as for :func:`step_costs`."""
        if _room(self._decoder) <= self.trees[index].depth:  # a row with less room is served a smaller tree
            self._decoder = self._fresh()
        self._next = index
        return own_seconds(self._decoder.step, self.trunk.device)
