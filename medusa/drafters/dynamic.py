"""Drafting with heads over a tree of its own in every row and step: the likeliest of a number of nodes.

Where the heads are sure of themselves the tree is deep, elsewhere it is wide. Its shape is decided from the heads' laws
alone, before any token is drawn: which is what keeps sampling exact.

Dimensions: B batch, C tokens on the way, K heads, N nodes, n nodes below the root, R ranks, V vocabulary, W parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from medusa.drafters.base import roots
from medusa.drafters.best_first import Best, Candidates, Expand, best_first, possible_paths
from medusa.drafters.children import Brood, Drafting, Picked, pick
from medusa.drafters.grown import Growing
from medusa.drafters.heads import HeadsDrafter, HeadsSession
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.largest import ranked_laws
from medusa.sampling import Chance
from medusa.tree import DraftTree, Row, Shape, Topology
from medusa.trunk import Trunk
from medusa.uploads import whole_numbers

MANY = 1 << 12  # paths that are looked at in each step: some ten microseconds a row
RANKS = 16  # the most children of a node: they are drawn one after the other


class DynamicDrafter(HeadsDrafter):
    """Heads, and how large the trees are that they fill.

    Args:
        heads: of any kind. Where their laws depend on drafted tokens (Hydra's, and those with a Markov bias), shapes
            would depend on what was drawn: they always take the likeliest tokens, unless ``sampling`` says otherwise.
        nodes: of each tree, the root included.
        drafting: how children are chosen in rows that sample: all drawn, or none. Left out, they are drawn if they can.
        temperatures: of each head's probabilities (:func:`medusa.confidence.temperatures`); left out, they are taken
            as they are. They decide on shapes, not on what is drawn.
        sampling: a tree to draw the children of instead, in batches with a row that samples.

    Raises:
        UserError: fewer than 2 nodes or than ``sampling`` has, a way of choosing that does not go with the heads, or
            other temperatures than one above 0 per head.
    """

    name = "dynamic"

    def __init__(
        self,
        heads: MedusaHeads,
        nodes: int,
        drafting: Drafting | None = None,
        temperatures: Sequence[float] | None = None,
        sampling: Topology | None = None,
    ) -> None:
        stepwise = heads.config.stepwise
        drafting = drafting or Drafting("top" if stepwise else "sampled")
        if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 2:
            raise UserError(f"a dynamic tree of {nodes!r} nodes: give a whole number from 2, the root included")
        if drafting.mode == "mixed" or (stepwise and drafting.mode != "top"):
            ways = "top, for heads whose laws depend on drafted tokens" if stepwise else "sampled or top"
            raise UserError(f"drafting.mode={drafting.mode!r}: a dynamic tree takes {ways}")
        if temperatures is not None and (len(temperatures) != heads.config.num or not all(t > 0 for t in temperatures)):
            raise UserError(f"temperatures={list(temperatures)}: give one above 0 for each of {heads.config.num} heads")
        if sampling is not None and sampling.size > nodes:
            raise UserError(f"a tree of {sampling.size} nodes to sample from, and {nodes} in all: take a smaller one")
        super().__init__(heads, drafting)
        self.sampling = None if sampling is None else MedusaDrafter(heads, sampling)
        self.nodes = nodes
        self.ranks = min(nodes - 1, heads.choices, RANKS)
        self.temperatures = tuple(temperatures or [1.0] * heads.config.num)

    @cached_property
    def candidates(self) -> Candidates | None:
        """What trees are chosen from where no law depends on drafted tokens: made once for all sessions.

        None where they are so many that growing a tree level by level takes less.
        """
        depth, most = self.heads.config.num, self.nodes - 1
        if sum(1 for _ in islice(possible_paths(depth, self.ranks, most), MANY + 1)) > MANY:
            return None
        with torch.inference_mode(False):  # sessions use them in any mode
            return Candidates(depth, self.ranks, most, self.heads.trunk.device)

    def open(self, trunk: Trunk) -> DynamicSession:
        """A session of one batch. UserError for another trunk than the heads are bound to."""
        self.check(trunk)
        return DynamicSession(self)


class DynamicSession(HeadsSession):
    """Grows each row's tree from the state of its last accepted token."""

    def __init__(self, drafter: DynamicDrafter) -> None:
        super().__init__(drafter)
        self.most = drafter.nodes - 1
        self.depth = self.heads.config.num
        self.ranks = drafter.ranks
        self.candidates = drafter.candidates if self.at_once else None
        self._sampling = None if drafter.sampling is None else drafter.sampling.open(self.heads.trunk)
        self._root = Shape.static(Topology.root(), self.heads.trunk.device)
        self.temperatures = drafter.temperatures
        self._broods: dict[int, Brood] = {}
        self._growing: Growing | None = None

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """The likeliest tree; nodes deeper than ``room`` become fillers, or other rows' room would change the rest."""
        return self.grow(root_B, room, chance)

    def takes_given(self, chance: Chance | None) -> bool:
        """Whether the tree for rows that sample is taken."""
        return self._sampling is not None and chance is not None and not chance.greedy

    def grow(self, root_B: Tensor, room: int, chance: Chance | None, most_B1: Tensor | None = None) -> DraftTree:
        """The same of no more than ``most_B1`` nodes below the root; its nodes come in the order of their scores.

        A tree that is given for rows that sample is taken whole.
        """
        if self._sampling is not None and self.takes_given(chance):
            self._sampling.hidden_BD = self.hidden_BD
            return self._sampling.propose(root_B, room, chance)
        row = self.row(root_B, room, chance) if most_B1 is None else None
        if row is not None and self._growing is not None:
            tokens_1N = whole_numbers([row.tokens], 1, -1)
            return DraftTree(self._growing.shape(), tokens_1N, torch.ones_like(tokens_1N, dtype=torch.bool))
        root_B1, yes_B1 = root_B[:, None], torch.ones_like(root_B[:, None], dtype=torch.bool)
        if not room:
            return DraftTree(self._root, root_B1, yes_B1)
        if self.at_once:
            logits_BKV = self.logits_at_once(root_B1, self.depth)
            best = self._chosen(root_B1, *self._likeliest(logits_BKV, self.temperatures))
        else:
            best = best_first(self._behind(root_B1), root_B1, self.depth, self.most)
        if room < self.depth or most_B1 is not None:
            best, valid_Bn = best.keep(most_B1, room)
        else:
            valid_Bn = torch.ones_like(best.tokens, dtype=torch.bool)
        if self.at_once and chance is not None and self.drafting.draws(chance):
            picked = pick(logits_BKV, self._brood(best.ranks), chance, self.drafting)
            return _Drawn(picked, self.heads).tree(best.shape(), root_B1, best, valid_Bn)
        return DraftTree(best.shape(), torch.cat([root_B1, best.tokens], 1), torch.cat([yes_B1, valid_Bn], 1))

    def row(self, root_B: Tensor, room: int, chance: Chance | None) -> Row | None:
        """The tree of one row that has room as the host has it, where C++ grows it; else None."""
        table = self.table
        if table is None or room < self.depth or len(root_B) > 1:
            return None
        if self._growing is None:
            self._growing = Growing(self.most, self.ranks, self.temperatures, table, self.hidden_BD.shape[-1])
        root = roots(root_B, chance)[0]
        hidden_11D, read_11C = self.first_read_of(root_B, root)
        parents, columns = self._growing.grow(hidden_11D, read_11C, self.unrolled.law)
        return Row(parents, [root, *self.ids(columns)], [True] * len(parents))

    def _brood(self, rank_Bn: Tensor) -> Brood:
        """As many children of each head, in order, as the trees take; all there may be where the host must not look."""
        ranks = self.ranks if rank_Bn.device.type != "cpu" else 1 + int(rank_Bn.max())
        if ranks not in self._broods:
            paths = [(0,) * head + (rank,) for head in range(self.depth) for rank in range(ranks)]
            spine = Topology.from_paths(paths)
            self._broods[ranks] = Brood(spine, sorted(set(spine.parents[1:])), rank_Bn.device)
        return self._broods[ranks]

    def _chosen(self, root_B1: Tensor, log_BKR: Tensor, token_BKR: Tensor) -> Best:
        """The likeliest tree where each head's candidates are the same behind any way."""
        if self.candidates is not None:
            return self.candidates.best(log_BKR, token_BKR)

        def expand(head: int, way_BWC: Tensor, from_BW: Tensor) -> tuple[Tensor, Tensor]:
            wide = way_BWC.shape[1]
            return log_BKR[:, head, None].expand(-1, wide, -1), token_BKR[:, head, None].expand(-1, wide, -1)

        return best_first(expand, root_B1, self.depth, self.most)

    def _behind(self, root_B1: Tensor) -> Expand:
        """The candidates of heads whose laws depend on the tokens on the way."""
        behind = self.laws_behind(root_B1, self.depth)

        def expand(head: int, way_BWC: Tensor, from_BW: Tensor) -> tuple[Tensor, Tensor]:
            return self._likeliest(behind(head, way_BWC), self.temperatures[head : head + 1])

        return expand

    def _likeliest(self, logits: Tensor, temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids [.., R] of the likeliest tokens by logits [.., V'] at temperatures."""
        log, columns = ranked_laws(logits, self.ranks, temperatures)
        return log, self.heads.tokens(columns)


@dataclass(frozen=True)
class _Drawn:
    """Tokens drawn from each head's law without replacement: those of rank r are the r-th child's, behind any way."""

    picked: Picked
    heads: MedusaHeads

    def tree(self, shape: Shape, root_B1: Tensor, best: Best, valid_Bn: Tensor) -> DraftTree:
        """The tree of this shape with the tokens drawn."""
        picked, no_B1 = self.picked, torch.zeros_like(root_B1, dtype=torch.bool)
        heads = picked.q_BWV.shape[1]
        ranks = picked.tokens_Bn.shape[1] // heads
        child_Bn = (best.depths - 1) * ranks + best.ranks
        tokens_Bn = self.heads.tokens(picked.tokens_Bn.gather(1, child_Bn))
        valid_Bn = valid_Bn & picked.valid_Bn.gather(1, child_Bn)
        sampled_Bn = valid_Bn & picked.sampled_Bn.gather(1, child_Bn)
        q_BKV = picked.q_BWV.new_zeros(*picked.q_BWV.shape[:2], self.heads.trunk.vocab_size)
        ids = self.heads.tokens(torch.arange(picked.q_BWV.shape[2], device=root_B1.device))
        q_BKV[:, :, ids] = picked.q_BWV  # tokens that are never drawn keep 0
        rows_B1 = torch.arange(len(root_B1), device=root_B1.device)[:, None]
        q_BNV = q_BKV[rows_B1, shape.depths.clamp(max=heads - 1)]  # the deepest have no children
        tokens_BN, valid_BN = torch.cat([root_B1, tokens_Bn], 1), torch.cat([~no_B1, valid_Bn], 1)
        return DraftTree(shape, tokens_BN, valid_BN, torch.cat([no_B1, sampled_Bn], 1), q_BNV)
