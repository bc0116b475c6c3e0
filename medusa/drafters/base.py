"""The protocol that every drafter speaks.

A drafter is shared and has no state of a request; it opens a session per batch, which owns what it remembers.

Dimensions: B batch, D hidden, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa.accept import Acceptance
from medusa.bound import Bound
from medusa.sampling import Chance
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput


class DraftSession(Protocol):
    """What a drafter remembers about a batch of rows."""

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Take in the prompts and the trunk's output on them; ``hidden_BD`` is each row's last state.

        Where a prompt goes on from a past (:class:`medusa.requests.Past`), ``output`` covers what follows it alone.
        """
        ...

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Guess what follows ``root_B``, the tokens just chosen, at most ``room`` tokens deep (0: the root alone).

        ``chance`` says how each row is sampled and gives the random choices of this step; None, or a row at
        temperature 0, is drafted without any. Whether a node exists, and is valid, may depend on laws but not on which
        token was drawn. Slots that serve no row have a place in the batch still; ``chance`` tells them (:func:`free`).
        """
        ...

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Learn which path of ``tree`` was accepted, with the trunk's states of all of its nodes."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``, in that order."""
        ...

    def admit(self, slots: Sequence[int], other: Any) -> None:
        """Let the rows of ``other``, a session of the same drafter, take over ``slots``; beyond the end they append."""
        ...


def place(rows: Tensor, slots: Sequence[int], new: Tensor) -> Tensor:
    """A copy of ``rows`` [B, ..] with ``new`` in ``slots``; slots beyond the end append."""
    more = max(0, max(slots) + 1 - len(rows))
    placed = torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
    placed[list(slots)] = new
    return placed


def place_each(rows: list[Any], slots: Sequence[int], new: Sequence[Any]) -> None:
    """The same for a list of what a session knows of each row, which is changed."""
    for slot, row in zip(slots, new, strict=True):
        rows[slot : slot + 1] = [row]


def free(chance: Chance | None, row: int) -> bool:
    """Whether this slot of the batch serves no row: its text has length 0, so its root stands at position 0."""
    return chance is not None and chance.after[row] == 1


def roots(root_B: Tensor, chance: Chance | None) -> Sequence[int]:
    """The roots on the host: as the decoder knows them, else they are asked for. Those of free slots say nothing."""
    known = None if chance is None else chance.roots
    return root_B.tolist() if known is None else known


class Drafter(Protocol):
    """A way of drafting, bound to no request.

    One that reads more of the trunk than its last state says so by an attribute ``layers`` (:func:`layers_of`).
    """

    name: str

    def open(self, trunk: Trunk) -> DraftSession:
        """A fresh session for one batch."""
        ...


def layers_of(drafter: Drafter) -> tuple[int, ...]:
    """The trunk's states that a drafter's sessions read, in ``states`` of what they are given, beside the last one."""
    layers: tuple[int, ...] = getattr(drafter, "layers", ())
    return layers


def parts_of(drafter: Drafter) -> list[nn.Module]:
    """All modules of its own that a drafter computes with: its heads, or its EAGLE layer."""
    return [part for held in vars(drafter).values() if isinstance(held, Bound) for part in held.parts]
