"""The null drafter: guesses nothing, so that decoding is plain autoregression. The baseline, in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput


class NullDrafter:
    """Opens sessions whose trees are the root alone."""

    name = "none"

    def open(self, trunk: Trunk) -> NullSession:
        """A session; it remembers nothing."""
        return NullSession(Shape.static(Topology.root(), trunk.device))


class NullSession:
    """The tree of the root alone, step after step."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._valid_B1 = torch.ones(1, 1, dtype=torch.bool, device=shape.depths.device)

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Nothing to take in."""

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """The root alone."""
        rows = len(root_B)
        valid_B1 = self._valid_B1 if rows == 1 else self._valid_B1.expand(rows, -1)
        return DraftTree(self.shape, root_B.unsqueeze(1), valid_B1)

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Nothing to remember."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""

    def admit(self, slots: Sequence[int], other: NullSession) -> None:
        """Nothing to take over."""
