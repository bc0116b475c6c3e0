"""Drafting with Medusa, root or Hydra heads over a static tree.

Dimensions: B batch, C what a head reads, D hidden, K heads, N nodes, n children, R ranks, V vocabulary, W parents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medusa.checkpoint import check_depth
from medusa.drafters.base import roots
from medusa.drafters.children import Brood, Drafting, Picked, Selection, likeliest, pick, sampled_tree
from medusa.drafters.filled import Filling
from medusa.drafters.heads import HeadsDrafter, HeadsSession
from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk
from medusa.uploads import whole_numbers


class MedusaDrafter(HeadsDrafter):
    """Heads, the tree they fill, and how they choose its tokens in rows that sample.

    Raises:
        UserError: the tree is deeper than there are heads, or takes a rank beyond the vocabulary.
    """

    def __init__(self, heads: MedusaHeads, topology: Topology, drafting: Drafting | None = None) -> None:
        super().__init__(heads, drafting or Drafting())
        self.check_tree(topology)
        self.topology = topology
        self.name = heads.config.kind

    def check_tree(self, topology: Topology) -> None:
        """UserError for a tree that the heads can't fill."""
        check_depth(topology, self.heads.config)
        if max(topology.ranks) >= self.heads.choices:
            raise UserError(
                f"the tree takes rank {max(topology.ranks)} of {self.heads.choices} tokens: ranks count from 0 and end"
                " below the number of tokens that heads draft from"
            )

    def open(self, trunk: Trunk) -> MedusaSession:
        """A session of one batch. UserError for another trunk than the heads are bound to."""
        self.check(trunk)
        return MedusaSession(self)


class _Level(Brood):
    """The nodes of one depth, and which of them are parents of the next one's: the topology is ordered by depth."""

    def __init__(self, topology: Topology, depth: int, device: torch.device) -> None:
        parents = [sorted({topology.parents[node] for node in _of(topology, each)}) for each in (depth, depth + 1)]
        super().__init__(topology, parents[0], device)
        nodes, inner = _of(topology, depth), parents[1]
        self.inner: Selection | None = None
        self.above: Selection | None = None
        if inner:
            self.inner = Selection([nodes.index(node) for node in inner], len(nodes), device)
            ways = [parents[0].index(topology.parents[node]) for node in inner]
            self.above = Selection(ways, len(parents[0]), device)  # whose children these are


def _of(topology: Topology, depth: int) -> list[int]:
    return [node for node in range(topology.size) if topology.depths[node] == depth]


class _Plan:
    """What a session needs of a topology, made once per depth that one is trimmed to."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology, self.shape = topology, Shape.static(topology, device)
        self.depth = topology.depth
        ordered, place = topology.by_depth()
        self.place = None if ordered == topology else place
        self._filling: Filling | None = None
        self.levels = [_Level(ordered, depth, device) for depth in range(1, topology.depth + 1)]
        self.place_N = None if self.place is None else torch.tensor(place, device=device)
        if self.levels:
            self.all = Brood(topology, sorted(set(topology.parents[1:])), device)
            self.head_W = self.all.depth_1W[0]  # whose candidates each parent's children are
            cells = [topology.depths[parent] * self.all.ranks + rank for parent, rank in _children(topology)]
            self.best = Selection(cells, self.depth * self.all.ranks, device)  # of all heads' likeliest tokens
        self._valid_BN = torch.empty(0, 0)

    def filling(self, table: Tensor, hidden: int) -> Filling:
        """What a row's tree is filled by on a processor: made once, since a session has one table."""
        if self._filling is None:
            self._filling = Filling(self.levels, table, hidden)
        return self._filling

    def valid(self, tokens_BN: Tensor) -> Tensor:
        """Bool [B, N]: there are no fillers. Not made anew while there are as many rows; nobody writes into it."""
        if self._valid_BN.shape != tokens_BN.shape:
            self._valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        return self._valid_BN


def _children(topology: Topology) -> list[tuple[int, int]]:
    """Parent and rank of each node below the root."""
    return list(zip(topology.parents[1:], topology.ranks[1:], strict=True))


class MedusaSession(HeadsSession):
    """Fills one tree in every step, trimmed to the room there is."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        super().__init__(drafter)
        self.topology = drafter.topology
        self._plans: dict[int, tuple[Topology, dict[int, _Plan]]] = {}

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Fill the tree, trimmed to ``room``, with the heads' candidates: drawn at random in rows that sample."""
        plan = self._plan(room, root_B.device)
        if self.table is not None and plan.levels and len(root_B) == 1 and (chance is None or chance.greedy):
            return self._filled(plan, root_B, chance, self.table)
        root_B1 = root_B[:, None]
        place_N = None if self.at_once else plan.place_N
        if plan.levels and chance is not None and self.drafting.draws(chance):
            draw = self._draw_at_once if self.at_once else self._draw_by_level
            picks = draw(plan, root_B1, chance)
            vocab, draft_ids = self.heads.trunk.vocab_size, self.heads.draft_ids
            return sampled_tree(plan.shape, root_B1, picks, vocab, place_N, draft_ids)
        tokens_BN = root_B1
        if plan.levels and self.at_once:
            logits_BKV = self.logits_at_once(root_B1, plan.depth)  # once per head, not per parent
            best_BKR = logits_BKV.topk(plan.all.ranks).indices
            tokens_BN = torch.cat([root_B1, self.heads.tokens(plan.best(best_BKR.flatten(1)))], 1)
        elif plan.levels:
            tokens_BN = self._fill_by_level(plan, root_B1, likeliest)
        tokens_BN = tokens_BN if place_N is None else tokens_BN[:, place_N]
        return DraftTree(plan.shape, tokens_BN, plan.valid(tokens_BN))

    def _plan(self, room: int, device: torch.device) -> _Plan:
        """That of the tree with so much room."""
        found = self._plans.get(id(self.topology))  # to hash a tree takes long
        if found is None:
            found = self._plans[id(self.topology)] = self.topology, {}  # which keeps it: nobody else gets its id
        plans = found[1]
        depth = min(room, self.topology.depth)
        plan = plans.get(depth)
        if plan is None:
            plan = plans[depth] = _Plan(self.topology.trim(depth), device)
        return plan

    def _filled(self, plan: _Plan, root_B: Tensor, chance: Chance | None, table: Tensor) -> DraftTree:
        """The tree of one row, on a processor."""
        root = roots(root_B, chance)[0]
        hidden_11D, read_11C = self.first_read_of(root_B, root)
        columns = plan.filling(table, hidden_11D.shape[-1]).columns(hidden_11D, read_11C, self.unrolled.law)
        tokens = [root, *self.ids(columns)]
        if plan.place is not None:
            tokens = [tokens[place] for place in plan.place]
        tokens_1N = whole_numbers([tokens], 1, -1)
        return DraftTree(plan.shape, tokens_1N, plan.valid(tokens_1N))

    def _draw_at_once(self, plan: _Plan, root_B1: Tensor, chance: Chance) -> list[Picked]:
        logits_BWV = self.logits_at_once(root_B1, plan.depth)[:, plan.head_W]
        return [pick(logits_BWV, plan.all, chance, self.drafting)]

    def _draw_by_level(self, plan: _Plan, root_B1: Tensor, chance: Chance) -> list[Picked]:
        picks: list[Picked] = []

        def choose(logits_BWV: Tensor, level: Brood) -> Tensor:
            picks.append(pick(logits_BWV, level, chance, self.drafting))
            return picks[-1].tokens_Bn

        self._fill_by_level(plan, root_B1, choose)
        return picks

    def _fill_by_level(self, plan: _Plan, root_B1: Tensor, choose: Callable[[Tensor, Brood], Tensor]) -> Tensor:
        """Each level's laws depend on the tokens drafted on the way to it. Nodes come out ordered by depth."""
        hydra = self.heads.config.kind == "hydra"
        ways = _HydraWays(self, root_B1) if hydra else _MarkovWays(self, root_B1, plan.depth)
        columns: list[Tensor] = []
        for head, level in enumerate(plan.levels):
            columns.append(choose(ways.laws(head), level))
            if level.inner is not None:
                ways.descend(level, level.inner(columns[-1]))
        if self.heads.draft_ids is not None:
            columns = [self.heads.tokens(torch.cat(columns, 1))]
        return torch.cat([root_B1, *columns], 1)


class _HydraWays:
    """What Hydra's heads read behind each way: the state, and the embeddings of its tokens, each looked up once."""

    def __init__(self, session: MedusaSession, root_B1: Tensor) -> None:
        self._unrolled, self._embed = session.unrolled, session.embed_drafted
        self._hidden_B1D, self._read_BWC = session.first_read(root_B1)

    def laws(self, head: int) -> Tensor:
        """Logits [B, W, V'] behind the ways."""
        return self._unrolled.law(head, self._hidden_B1D, self._read_BWC)

    def descend(self, level: _Level, columns_BW: Tensor) -> None:
        """Go on to those of a level's nodes that are parents, which hold the tokens of these columns."""
        assert level.above is not None
        self._read_BWC = torch.cat([level.above(self._read_BWC), self._embed(columns_BW)], -1)


class _MarkovWays:
    """Heads whose laws depend on the last token of each way."""

    def __init__(self, session: MedusaSession, root_B1: Tensor, heads: int) -> None:
        self._behind, self._tokens = session.laws_behind(root_B1, heads), session.heads.tokens
        self._last_BW = root_B1

    def laws(self, head: int) -> Tensor:
        """Logits [B, W, V'] behind the ways."""
        return self._behind(head, self._last_BW[..., None])

    def descend(self, level: _Level, columns_BW: Tensor) -> None:
        """Go on to those of a level's nodes that are parents, which hold the tokens of these columns."""
        self._last_BW = self._tokens(columns_BW)
