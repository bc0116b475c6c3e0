"""Drafting with heads over one of several trees: how large it is goes by the number of rows in the batch.

A step's time grows with rows times nodes, the tokens that it brings per row with nodes alone: what pays for one row may
not pay for many. In rows that sample, text depends on the shape of the tree whose children are drawn; so in a batch
with such a row the tree is always the same one, and a row's text for a seed depends neither on the machine nor on who
is in its batch.

Dimensions: B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from medusa.drafters.medusa import MedusaDrafter, MedusaSession
from medusa.sampling import Chance
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk


class SizedDrafter:
    """Heads, trees of several sizes, and which of them a batch takes.

    Args:
        sampling: the heads, with the tree for batches with a row that samples.
        trees: for all others. The root alone may be one of them: no drafts.
        pick: the place in ``trees`` of the tree for so many slots, those that serve no row now included: they cost as
            much. It may be asked in every step.

    Raises:
        UserError: a tree that does not go with the heads.
    """

    name = "sized"

    def __init__(self, sampling: MedusaDrafter, trees: Sequence[Topology], pick: Callable[[int], int]) -> None:
        for tree in trees:
            sampling.check_tree(tree)
        self.sampling = sampling
        self.heads = sampling.heads
        self.trees = tuple(trees)
        self.pick = pick

    def open(self, trunk: Trunk) -> SizedSession:
        """A session of one batch. UserError for another trunk than the heads are bound to."""
        self.sampling.check(trunk)
        return SizedSession(self)


class SizedSession(MedusaSession):
    """Fills the tree that suits the batch as it is now; what it remembers of its rows is the same for all trees."""

    def __init__(self, drafter: SizedDrafter) -> None:
        super().__init__(drafter.sampling)
        self._sized = drafter

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Fill the tree for this number of slots, trimmed to ``room``; where a row samples, the one given for that."""
        draws = chance is not None and not chance.greedy
        self.topology = self._sized.sampling.topology if draws else self._sized.trees[self._sized.pick(len(root_B))]
        return super().propose(root_B, room, chance)
