"""Drafting with Medusa, root or Hydra heads over a static tree.

Dimensions: B batch, D hidden, E embedding, K heads, N nodes, R ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.checkpoint import check_depth
from medusa.drafters.base import place
from medusa.drafters.children import Brood, Drafting, Picked, likeliest, pick, sampled_tree
from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput

SMALL_TABLE = 1 << 22  # values of an embedding: 16 MiB in fp32


class MedusaDrafter:
    """Heads, the tree they fill, and how they choose its tokens in rows that sample.

    Raises:
        UserError: the tree is deeper than there are heads, or takes a rank beyond the vocabulary.
    """

    def __init__(self, heads: MedusaHeads, topology: Topology, drafting: Drafting | None = None) -> None:
        check_depth(topology, heads.config)
        if max(topology.ranks) >= heads.choices:
            raise UserError(
                f"the tree takes rank {max(topology.ranks)} of {heads.choices} tokens: ranks count from 0 and end below"
                " the number of tokens that heads draft from"
            )
        self.heads = heads
        self.topology = topology
        self.drafting = drafting or Drafting()
        self.name = heads.config.kind
        self._table: Tensor | None = None
        if heads.trunk.embedding_values <= SMALL_TABLE:  # scaled once instead of at each use
            with torch.no_grad():
                self._table = heads.embed(torch.arange(heads.trunk.vocab_size, device=heads.trunk.device))

    def open(self, trunk: Trunk) -> MedusaSession:
        """A session of one batch. UserError for another trunk than the heads are bound to."""
        if trunk.model is not self.heads.trunk.model:
            raise UserError("these heads are bound to another trunk than the one that decodes: load heads for it")
        return MedusaSession(self)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [.., E] as the heads read them."""
        return self.heads.embed(ids) if self._table is None else torch.nn.functional.embedding(ids, self._table)


class _Level(Brood):
    """The nodes of one depth, with the way from the root to each of their parents.

    The topology is ordered by depth, so that a tree is the concatenation of its levels.
    """

    def __init__(self, topology: Topology, depth: int, device: torch.device) -> None:
        ways = sorted({topology.parents[node] for node in range(topology.size) if topology.depths[node] == depth})
        super().__init__(topology, ways, device)
        lineages = []
        for parent in ways:
            lineage = [parent]
            while lineage[-1] != 0:
                lineage.append(topology.parents[lineage[-1]])
            lineages.append(lineage[::-1])
        self.lineage_WC = torch.tensor(lineages, device=device)  # from the root to the parent


class _Plan:
    """What a session needs of a topology, made once per depth it is trimmed to."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.shape = Shape.static(topology, device)
        self.depth = topology.depth
        ordered, place = topology.by_depth()
        self.levels = [_Level(ordered, depth, device) for depth in range(1, topology.depth + 1)]
        self.place_N = None if ordered == topology else torch.tensor(place, device=device)
        if self.levels:
            self.all = Brood(topology, sorted(set(topology.parents[1:])), device)
            self.head_W = self.all.depth_1W[0]  # whose candidates each parent's children are
            self.head_n = self.head_W[self.all.way_n]


class MedusaSession:
    """Remembers each row's state of the last *accepted* token, which is what the heads read."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        self.drafter = drafter
        self.heads = drafter.heads
        self.topology = drafter.topology
        self.hidden_BD = torch.empty(0)
        self._plans: dict[int, _Plan] = {}

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Keep the last state of the prompts."""
        self.hidden_BD = hidden_BD

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Fill the tree, trimmed to ``room``, with the heads' candidates: drawn at random in rows that sample."""
        depth = min(room, self.topology.depth)
        if depth not in self._plans:
            self._plans[depth] = _Plan(self.topology.trim(depth), root_B.device)
        plan, root_B1 = self._plans[depth], root_B[:, None]
        at_once = self.heads.config.kind != "hydra"
        place_N = None if at_once else plan.place_N
        if plan.levels and chance is not None and self.drafter.drafting.draws(chance):
            picks = self._draw_at_once(plan, root_B1, chance) if at_once else self._draw_by_level(plan, root_B1, chance)
            vocab, draft_ids = self.heads.trunk.vocab_size, self.heads.draft_ids
            return sampled_tree(plan.shape, root_B1, picks, vocab, place_N, draft_ids)
        tokens_BN = root_B1
        if plan.levels and at_once:
            best_BKR = self._logits_at_once(plan, root_B1).topk(plan.all.ranks).indices  # once per head, not per parent
            tokens_BN = torch.cat([root_B1, self.heads.tokens(best_BKR[:, plan.head_n, plan.all.rank_n])], 1)
        elif plan.levels:
            tokens_BN = self._fill_by_level(plan, root_B1, likeliest)
        tokens_BN = tokens_BN if place_N is None else tokens_BN[:, place_N]
        return DraftTree(plan.shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))

    def _draw_at_once(self, plan: _Plan, root_B1: Tensor, chance: Chance) -> list[Picked]:
        logits_BWV = self._logits_at_once(plan, root_B1)[:, plan.head_W]
        return [pick(logits_BWV, plan.all, chance, self.drafter.drafting)]

    def _draw_by_level(self, plan: _Plan, root_B1: Tensor, chance: Chance) -> list[Picked]:
        picks: list[Picked] = []

        def choose(logits_BWV: Tensor, level: Brood) -> Tensor:
            picks.append(pick(logits_BWV, level, chance, self.drafter.drafting))
            return picks[-1].tokens_Bn

        self._fill_by_level(plan, root_B1, choose)
        return picks

    def _logits_at_once(self, plan: _Plan, root_B1: Tensor) -> Tensor:
        """Logits [B, K, V'] of the heads that the tree needs, which read no drafted token."""
        heads = self.heads
        embedded_B1E = self.drafter.embed(root_B1)
        features = [
            heads.features(head, self.hidden_BD, heads.context(head, embedded_B1E)) for head in range(plan.depth)
        ]
        if heads.config.projection == "shared":  # which is read once for all heads
            return heads.draftable(heads.logits(0, torch.stack(features, 1)))
        logits = [heads.draftable(heads.logits(head, features_BD)) for head, features_BD in enumerate(features)]
        return torch.stack(logits, 1)

    def _fill_by_level(self, plan: _Plan, tokens_BN: Tensor, choose: Callable[[Tensor, Brood], Tensor]) -> Tensor:
        """Hydra: each level reads the tokens drafted on the way to it. Nodes come out ordered by depth."""
        heads = self.heads
        embedded_BNE = self.drafter.embed(tokens_BN)
        for head, level in enumerate(plan.levels):
            lineage = level.lineage_WC
            context_BW = heads.context(head, embedded_BNE[:, lineage])
            hidden_BWD = self.hidden_BD[:, None].expand(-1, lineage.shape[0], -1)
            logits_BWV = heads.draftable(heads.logits(head, heads.features(head, hidden_BWD, context_BW)))
            new_Bn = heads.tokens(choose(logits_BWV, level))
            tokens_BN = torch.cat([tokens_BN, new_Bn], 1)
            if head + 1 < len(plan.levels):
                embedded_BNE = torch.cat([embedded_BNE, self.drafter.embed(new_Bn)], 1)
        return tokens_BN

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Keep the state of the last accepted node."""
        last_B11 = acceptance.last_B[:, None, None]
        self.hidden_BD = verified.hidden.gather(1, last_B11.expand(-1, 1, verified.hidden.shape[-1]))[:, 0]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.hidden_BD = self.hidden_BD[list(rows)]

    def admit(self, slots: Sequence[int], other: MedusaSession) -> None:
        """Take over the states of another session's rows."""
        self.hidden_BD = place(self.hidden_BD, slots, other.hidden_BD)
