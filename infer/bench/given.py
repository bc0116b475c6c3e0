"""Drafts and acceptance that are given and not earned: for timing steps where no trained heads are at hand.

What is decoded with them is no text of the trunk's; each step costs what a step of that shape costs.

Dimensions: B batch, N nodes, A accepted nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.accept import Acceptance, DeterministicRule, accept_up_to
from medusa.errors import UserError
from medusa.laws import Laws
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput


def spread(nodes: int, depth: int) -> Topology:
    """A tree of so many nodes with a chain of ``depth`` drafts along its first children, the others beside them.

    Raises:
        UserError: fewer than one node, or a depth below 1 where there is more than the root.
    """
    if nodes < 1 or (nodes > 1 and depth < 1):
        raise UserError(f"a tree of {nodes} nodes, {depth} deep: give at least 1 of each")
    depth = min(depth, nodes - 1)
    paths = [(0,) * level for level in range(1, depth + 1)]
    rank = 1
    while len(paths) < nodes - 1:
        paths += [(0,) * level + (rank,) for level in range(depth)][: nodes - 1 - len(paths)]
        rank += 1
    return Topology.from_paths(paths) if paths else Topology.root()


class GivenDrafter:
    """Drafts the token that was chosen last, over and over, in a static tree: proposing it costs next to nothing."""

    name = "given"

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def open(self, trunk: Trunk) -> GivenSession:
        """A session that remembers the shapes it made."""
        return GivenSession(self.topology)


class GivenSession:
    """The tree, trimmed to the room there is."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._shapes: dict[int, Shape] = {}

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Nothing to take in."""

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """The same token at every node."""
        depth = min(room, self.topology.depth)
        if depth not in self._shapes:
            self._shapes[depth] = Shape.static(self.topology.trim(depth), root_B.device)
        shape = self._shapes[depth]
        tokens_BN = root_B[:, None].expand(-1, shape.depths.shape[-1])
        return DraftTree(shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Nothing to remember."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""

    def admit(self, slots: Sequence[int], other: GivenSession) -> None:
        """Nothing to take over."""


class GivenRule:
    """Accepts along each node's first child, every draft with probability ``chance``, whatever the trunk says.

    The lossless rule is run too, so that a step costs what it costs with it. Rows of a batch accept alike.

    Raises:
        UserError: a probability outside 0..1.
    """

    lossless = False

    def __init__(self, chance: float, seed: int = 0) -> None:
        if not 0 <= chance <= 1:
            raise UserError(f"acceptance={chance}: give 0 to 1")
        self.chance = chance
        self._rng = random.Random(seed)
        self._chains: dict[int, list[int]] = {}  # of each shape met: the nodes along first children
        self._shapes: list[Shape] = []  # held, so that ids stay theirs

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        DeterministicRule()(tree, laws)
        chain = self._chain(tree.shape)
        steps = 0
        while steps + 1 < len(chain) and self._rng.random() < self.chance:
            steps += 1
        last_B = torch.full_like(tree.tokens_BN[:, 0], chain[steps])
        return accept_up_to(tree, last_B, laws.choice_BN)

    def _chain(self, shape: Shape) -> list[int]:
        """Asked of the device once per shape, and a static tree has one."""
        if id(shape) not in self._chains:
            parents, chain = shape.parents[0].tolist(), [0]
            while (child := next((n for n, p in enumerate(parents) if n and p == chain[-1]), None)) is not None:
                chain.append(child)
            self._chains[id(shape)] = chain
            self._shapes.append(shape)
        return self._chains[id(shape)]
