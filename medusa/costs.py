"""What a step costs on this machine, by the tree it verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from medusa.decoding import Decoder, Request
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.machine import seconds
from medusa.tree import Topology

Progress = Callable[[int, int], None]  # done, total


def step_costs(
    heads: MedusaHeads,
    topologies: Sequence[Topology],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Progress | None = None,
) -> list[tuple[float, float]]:
    """Median milliseconds of a whole step and of the trunk's forward alone, for each tree, measured in turns.

    ``prompts`` are the rows of the batch that the cost is wanted for: usually one.
    """
    steps: list[list[float]] = [[] for _ in topologies]
    forwards: list[list[float]] = [[] for _ in topologies]
    decoders = [_fresh(heads, topology, prompts) for topology in topologies]
    for turn in range(rounds):
        for index, topology in enumerate(topologies):
            if _room(decoders[index]) <= topology.depth:  # a row with less room is served a smaller tree
                decoders[index] = _fresh(heads, topology, prompts)
            decoder = decoders[index]
            with torch.inference_mode():
                tree = decoder.session.propose(decoder.root_B, topology.depth)
                forwards[index].append(seconds(lambda d=decoder, t=tree: d.trunk.tree_forward(t, d.cache)))  # type: ignore[misc]
            steps[index].append(seconds(decoder.step))
        if progress:
            progress(turn + 1, rounds)
    return [(1e3 * median(step), 1e3 * median(forward)) for step, forward in zip(steps, forwards, strict=True)]


def _fresh(heads: MedusaHeads, topology: Topology, prompts: Sequence[Sequence[int]]) -> Decoder:
    decoder = Decoder(heads.trunk, MedusaDrafter(heads, topology))
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
