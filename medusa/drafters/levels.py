"""A static tree, filled level by level by a drafter whose laws depend on all tokens on the way.

Dimensions: B batch, N nodes, n children, V vocabulary, W parents (nodes with children).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medusa.drafters.children import Brood, Drafting, Picked, likeliest, pick, sampled_tree
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology


class Level(Brood):
    """The children of one depth's nodes, which are ``start`` .. ``end`` - 1; ``beginning`` is the tree down to them."""

    def __init__(self, topology: Topology, depth: int, device: torch.device) -> None:
        parents = {parent for parent in topology.parents[1:] if topology.depths[parent] == depth}
        super().__init__(topology, sorted(parents), device)
        self.depth = depth
        self.start = topology.depths.index(depth)
        self.end = topology.depths.index(depth + 1)
        self.beginning = Shape.static(topology.trim(depth), device)


class Plan:
    """What a session needs of a topology, whose nodes are ordered by depth: a tree of fewer levels is a beginning."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.shape = Shape.static(topology, device)
        self.levels = [Level(topology, depth, device) for depth in range(topology.depth)]

    @property
    def inner(self) -> int:
        """How many nodes are above the deepest ones: those that have to be read."""
        return self.levels[-1].end if self.levels else 0


class Plans:
    """The plans of a topology trimmed to any depth, each made once."""

    def __init__(self, topology: Topology) -> None:
        self.topology = Topology.from_paths(topology.paths[1:]) if topology.size > 1 else topology  # ordered by depth
        self._made: dict[int, Plan] = {}

    def of(self, depth: int, device: torch.device) -> Plan:
        """That of the tree which is at most ``depth`` deep."""
        depth = min(depth, self.topology.depth)
        if depth not in self._made:
            self._made[depth] = Plan(self.topology.trim(depth), device)
        return self._made[depth]


# A level and the tokens [B, N] of the nodes down to its parents: logits [B, W, V'] of what may follow these.
Laws = Callable[[Level, Tensor], Tensor]


def fill(
    plan: Plan,
    root_B1: Tensor,
    laws: Laws,
    chance: Chance | None,
    drafting: Drafting,
    vocab: int,
    draft_ids: Tensor | None = None,
) -> DraftTree:
    """Fill a tree with the likeliest tokens, in rows that sample with tokens drawn without replacement.

    ``vocab``: columns of the laws of drawn children. ``draft_ids``: which tokens the columns of ``laws`` stand for.
    """
    tokens_BN, picks = root_B1, list[Picked]()
    for level in plan.levels:
        logits_BWV = laws(level, tokens_BN)
        if chance is not None and drafting.draws(chance):
            picks.append(pick(logits_BWV, level, chance, drafting))
        new_Bn = picks[-1].tokens_Bn if picks else likeliest(logits_BWV, level)
        tokens_BN = torch.cat([tokens_BN, new_Bn if draft_ids is None else draft_ids[new_Bn]], 1)
    if picks:
        return sampled_tree(plan.shape, root_B1, picks, vocab, draft_ids=draft_ids)
    return DraftTree(plan.shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))
