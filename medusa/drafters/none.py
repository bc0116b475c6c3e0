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

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Nothing to take in."""

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """The root alone."""
        tokens_BN = root_B[:, None]
        return DraftTree(self.shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Nothing to remember."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""

    def admit(self, slots: Sequence[int], other: NullSession) -> None:
        """Nothing to take over."""
