"""Drafting with an EAGLE layer (:mod:`medusa.eagle`), over a static tree or the likeliest one of each step.

What was accepted is read into the layer's own cache as pairs of the trunk's features, all that a step brought at once,
the last of them with the root. From its state the tree grows level by level: the pair of a drafted token takes its
parent's state as the feature. Drafted pairs lie behind the rows for as long as the tree grows, and are then forgotten:
once accepted they are read anew, with features that are the trunk's own.

* A static tree: EAGLE (Li et al. 2024), its children drawn without replacement in rows that sample.
* A tree of ``nodes`` nodes, the likeliest: EAGLE-2 (Li et al. 2024), where no row's children are drawn.

Dimensions: B batch, D hidden, F features, M pairs, N nodes, n nodes of one level, V' tokens drafted, W parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.accept import Acceptance
from medusa.drafters.base import DraftSession, free, place, place_each
from medusa.drafters.best_first import best_first
from medusa.drafters.children import Drafting
from medusa.drafters.levels import Level, Plan, Plans, fill
from medusa.drafters.none import NullDrafter
from medusa.eagle import EagleLayer
from medusa.errors import UserError
from medusa.largest import ranked_laws
from medusa.mask import attention_bias, bias_of, chain_shape
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput
from medusa.uploads import upload

# Of trees that are grown in each step: levels, and nodes of each that are expanded, with as many candidates each, as
# in EAGLE-2's own code.
DEPTH, WIDTH = 6, 10


class EagleDrafter:
    """A layer, the trees it fills, and how it chooses tokens in rows that sample.

    Args:
        layer: bound to the trunk that decodes.
        topology: the tree, filled with the layer's candidates: rank r is the r-th likeliest. Where ``nodes`` are given,
            that of batches with a row that samples; without one they take the likeliest tokens too.
        drafting: how children of ``topology`` are chosen in rows that sample.
        nodes: of a tree that is grown in every step from the layer's laws, the root included; None for ``topology``
            alone.
        depth: of such a tree, at most.
        width: how many nodes of each level of it are expanded, at most.
        temperatures: of the probabilities at each depth, by which such a tree is grown; left out, they are taken as
            they are.

    Raises:
        UserError: neither ``topology`` nor ``nodes``, fewer than 2 nodes or than ``topology`` has, a rank beyond the
            tokens that are drafted, children to draw without ``topology``, a depth or width below 1, or other
            temperatures than one above 0 per level.
    """

    name = "eagle"

    def __init__(
        self,
        layer: EagleLayer,
        topology: Topology | None = None,
        drafting: Drafting | None = None,
        *,
        nodes: int | None = None,
        depth: int = DEPTH,
        width: int = WIDTH,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        if nodes is None and topology is None:
            raise UserError("an EAGLE layer without a tree: give topology, or the nodes of a tree of each step")
        if nodes is not None:
            _check_nodes(nodes, topology, depth, width, temperatures)
        if topology is None and drafting is not None and drafting.mode != "top":
            raise UserError(
                f"drafting.mode={drafting.mode!r}: a tree of each step takes top; give topology to draw from"
            )
        if topology is not None and max(topology.ranks) >= layer.choices:
            raise UserError(
                f"the tree takes rank {max(topology.ranks)} of {layer.choices} tokens: ranks count from 0 and end below"
                " the number of tokens that the layer drafts from"
            )
        self.layer = layer
        self.layers = layer.layers
        self.topology = topology
        self.drafting = drafting or Drafting("sampled" if topology is not None else "top")
        self.nodes, self.depth, self.width = nodes, depth, width
        self.temperatures = tuple(temperatures or [1.0] * depth)

    def open(self, trunk: Trunk) -> DraftSession:
        """A session of one batch. UserError for another trunk than the layer is bound to."""
        if trunk.model is not self.layer.trunk.model:
            raise UserError("this EAGLE layer is bound to another trunk than the one that decodes: load one for it")
        if self.nodes is None and self.topology is not None and self.topology.size == 1:
            return NullDrafter().open(trunk)  # calibration found that drafting does not pay: nothing is read either
        return EagleSession(self)


def _check_nodes(
    nodes: int, topology: Topology | None, depth: int, width: int, temperatures: Sequence[float] | None
) -> None:
    """Refuse what no tree can be grown by."""
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 2:
        raise UserError(f"a tree of {nodes!r} nodes in every step: give a whole number from 2, the root included")
    if topology is not None and topology.size > nodes:
        raise UserError(f"a tree of {topology.size} nodes to sample from, and {nodes} in all: take a smaller one")
    if depth < 1 or width < 1:
        raise UserError(f"trees of depth {depth} with {width} nodes expanded per level: give at least 1 of both")
    if temperatures is not None and (len(temperatures) != depth or not all(t > 0 for t in temperatures)):
        raise UserError(f"temperatures={list(temperatures)}: give one above 0 for each of {depth} levels")


class EagleSession:
    """The layer's cache of pairs, and of each row the features and tokens of the pairs that it lacks.

    These are the nodes that the last step accepted: each one's feature goes with the token after it, the last one's
    with the next root. Of a text that goes on from a past, pairs begin where the trunk read on.
    """

    def __init__(self, drafter: EagleDrafter) -> None:
        self.layer = drafter.layer
        self.drafter = drafter
        self.plans = None if drafter.topology is None else Plans(drafter.topology)
        self.cache = self.layer.new_cache(0)
        self._chains: dict[int, Shape] = {}
        self.features_BMF = self.tokens_BM = torch.empty(0)
        self.counts: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Read the prompts, but for the feature that goes with the first root."""
        features_BTF = self.layer.features(output)
        size = features_BTF.shape[1]
        counts = [min(len(prompt), size) for prompt in prompts]  # a past's tokens have no features here
        ids_BT = torch.zeros(len(prompts), size, dtype=torch.long)
        for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            ids_BT[row, :count] = torch.as_tensor(prompt[len(prompt) - count :])
        ids_BT = ids_BT.to(features_BTF.device, non_blocking=True)
        self.cache = self.layer.new_cache(len(prompts))
        if size > 1:
            self._read(ids_BT[:, 1:], features_BTF[:, :-1], [count - 1 for count in counts])
        self.counts = [1] * len(prompts)
        self.features_BMF = _at(features_BTF, upload(counts, ids_BT.device)[:, None] - 1)
        self.tokens_BM = ids_BT[:, :1]

    def _read(self, ids_BM: Tensor, features_BMF: Tensor, counts: Sequence[int]) -> Tensor:
        """Read so many true pairs of each row behind what the cache holds; return the last one's states [B, 1, D]."""
        lengths, size, device = self.cache.lengths, ids_BM.shape[1], ids_BM.device
        total, bias = self.cache.reserve(size), None
        position_BM = upload(lengths, device)[:, None] + torch.arange(size, device=device)
        if self.cache.longest:
            bias = attention_bias(self._chain(size, device), lengths, total, features_BMF.dtype)
        state_BMD = self.layer.read(ids_BM, self.layer.fuse(features_BMF), position_BM, bias, self.cache)
        self.cache.set_lengths([length + count for length, count in zip(lengths, counts, strict=True)])
        return _at(state_BMD, upload([max(count, 1) - 1 for count in counts], device)[:, None])

    def _chain(self, size: int, device: torch.device) -> Shape:
        """The shape of so many pairs; steps bring few, so that they are kept."""
        if size not in self._chains:
            self._chains[size] = chain_shape(size, device)
        return self._chains[size]

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Read what is new, and grow a tree from its last state, at most ``room`` deep."""
        state_B1D = self._catch_up(root_B, chance)
        drawn = chance is not None and self.drafter.drafting.draws(chance)
        # the root's pair is text already, and node 0 of the tree: it stays where it is
        self.cache.set_lengths([length - 1 for length in self.cache.lengths])
        if self.plans is not None and (self.drafter.nodes is None or drawn):
            tree = self._static(self.plans.of(room, root_B.device), root_B[:, None], state_B1D, chance)
        else:
            tree = self._grown(root_B[:, None], state_B1D, room)
        self.cache.set_lengths([length + 1 for length in self.cache.lengths])
        return tree

    def _catch_up(self, root_B: Tensor, chance: Chance | None) -> Tensor:
        """Read the pairs that the last step brought; return the states [B, 1, D] of those with the roots."""
        idle = {row for row in range(len(self.counts)) if free(chance, row)}
        self.cache.release(list(idle))
        counts = [1 if row in idle else count for row, count in enumerate(self.counts)]
        last_B1 = upload([count - 1 for count in counts], root_B.device)[:, None]
        ids_BM = self.tokens_BM.scatter(1, last_B1, root_B[:, None])[:, : max(counts)]
        return self._read(ids_BM, self.features_BMF[:, : max(counts)], counts)

    def _static(self, plan: Plan, root_B1: Tensor, state_B1D: Tensor, chance: Chance | None) -> DraftTree:
        """The tree of a plan."""
        state_BND = state_B1D

        def laws(level: Level, tokens_BN: Tensor) -> Tensor:
            nonlocal state_BND
            if level.start:
                shape, known, total = level.beginning, level.start, self.cache.longest + tokens_BN.shape[1]
                hidden_BnD = state_BND[:, shape.parents[0, known:]]
                bias = attention_bias(shape, self.cache.lengths, total, hidden_BnD.dtype, known=known)
                new_BnD = self.read_level(tokens_BN[:, known:], hidden_BnD, level.depth, known, bias)
                state_BND = torch.cat([state_BND, new_BnD], 1)
            return self.layer.draftable(self.layer.logits(state_BND[:, level.parent_W]))

        layer = self.layer
        return fill(plan, root_B1, laws, chance, self.drafter.drafting, layer.trunk.vocab_size, layer.draft_ids)

    def _grown(self, root_B1: Tensor, state_B1D: Tensor, room: int) -> DraftTree:
        """The likeliest tree of so many nodes."""
        depth, nodes = min(room, self.drafter.depth), self.drafter.nodes
        assert nodes is not None
        if not depth:
            return DraftTree(self._chain(1, root_B1.device), root_B1, torch.ones_like(root_B1, dtype=torch.bool))
        best = best_first(_Expand(self, state_B1D), root_B1, depth, nodes - 1, self.drafter.width)
        tokens_BN = torch.cat([root_B1, best.tokens], 1)
        return DraftTree(best.shape(), tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))

    def read_level(self, ids_Bn: Tensor, hidden_BnD: Tensor, depth: int, known: int, bias: Tensor | None) -> Tensor:
        """States of a level's pairs, ``depth`` below the root, read behind the first ``known`` nodes; no row grows."""
        lengths = self.cache.lengths
        self.cache.set_lengths([length + known for length in lengths])
        self.cache.reserve(ids_Bn.shape[1])
        position_B1 = upload([length + depth for length in lengths], ids_Bn.device)[:, None]
        state_BnD = self.layer.read(ids_Bn, hidden_BnD, position_B1.expand_as(ids_Bn), bias, self.cache)
        self.cache.set_lengths(lengths)
        return state_BnD

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Keep the accepted nodes' features, and the tokens that go with them: each one's successor."""
        path_BA = acceptance.path_BA.clamp(min=0)
        hidden, states = _at(verified.hidden, path_BA), tuple(_at(state, path_BA) for state in verified.states)
        self.features_BMF = self.layer.features(replace(verified, hidden=hidden, states=states))
        self.tokens_BM = tree.tokens_BN.gather(1, path_BA).roll(-1, 1)
        self.counts = [len(walk.path) for walk in acceptance.on_host(tree)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        index = list(rows)
        self.cache.select(index)
        self.features_BMF, self.tokens_BM = self.features_BMF[index], self.tokens_BM[index]
        self.counts = [self.counts[row] for row in index]

    def admit(self, slots: Sequence[int], other: EagleSession) -> None:
        """Take over another session's rows, with what their cache holds."""
        self.cache.admit(slots, other.cache)
        size = max(self.tokens_BM.shape[1], other.tokens_BM.shape[1])
        self.features_BMF, self.tokens_BM = (
            place(_widened(mine, size), slots, _widened(theirs, size))
            for mine, theirs in (
                (self.features_BMF, other.features_BMF),
                (self.tokens_BM, other.tokens_BM),
            )
        )
        place_each(self.counts, slots, other.counts)


class _Expand:
    """Candidates behind the ways of a tree that grows: the states of the level above, and what its nodes see."""

    def __init__(self, session: EagleSession, state_B1D: Tensor) -> None:
        self.session, self.state_BWD = session, state_B1D
        self.seen_BWN = torch.ones(*state_B1D.shape[:2], 1, dtype=torch.bool, device=state_B1D.device)

    def __call__(self, level: int, way_BWC: Tensor, from_BW: Tensor) -> tuple[Tensor, Tensor]:
        """By the protocol of :func:`medusa.drafters.best_first.best_first`."""
        session, layer = self.session, self.session.layer
        if level:
            self._read(level, way_BWC[..., -1], from_BW)
        logits = layer.draftable(layer.logits(self.state_BWD))
        ranks = min(session.drafter.width, layer.choices)
        log_BWR, columns_BWR = ranked_laws(logits, ranks, session.drafter.temperatures[level : level + 1])
        return log_BWR, layer.tokens(columns_BWR)

    def _read(self, level: int, ids_BW: Tensor, from_BW: Tensor) -> None:
        """Read a level's nodes, each of which sees what its parent sees, and itself."""
        known = self.seen_BWN.shape[-1]
        itself = torch.eye(ids_BW.shape[1], dtype=torch.bool, device=ids_BW.device).expand(len(ids_BW), -1, -1)
        self.seen_BWN = torch.cat([_at(self.seen_BWN, from_BW), itself], -1)
        hidden_BWD, cache = _at(self.state_BWD, from_BW), self.session.cache
        total = cache.longest + self.seen_BWN.shape[-1]
        bias = bias_of(self.seen_BWN, cache.lengths, total, hidden_BWD.dtype)
        self.state_BWD = self.session.read_level(ids_BW, hidden_BWD, level, known, bias)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Of x [B, N, ..] what stands at ``places`` [B, n]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def _widened(x: Tensor, size: int) -> Tensor:
    """[B, M, ..] with zeros behind up to ``size``."""
    return pad(x, (0,) * (2 * x.ndim - 4) + (0, size - x.shape[1]))
