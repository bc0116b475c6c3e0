"""How the children of a tree's nodes are chosen from a drafter's laws: the likeliest, drawn at random, or both.

Dimensions: B batch, C children of one node, N nodes, R ranks, V vocabulary, W parents (nodes with children).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.errors import UserError, nearest
from medusa.largest import largest, ranked
from medusa.sampling import DRAFT, Chance, to_probs
from medusa.tree import DraftTree, Shape, Topology
from medusa.uploads import upload

MODES = ("sampled", "mixed", "top")


@dataclass(frozen=True)
class Drafting:
    """How children are chosen in rows that sample; rows at temperature 0 always take the likeliest tokens.

    Args:
        mode: ``sampled`` draws all children of a node without replacement, ``mixed`` draws the last one and takes the
            likeliest tokens for those before it, ``top`` draws none.
        temperature: the draft's temperature is this times the row's own; above 1 the draft spreads more.

    Raises:
        UserError: an unknown mode, or a temperature that is not above 0.
    """

    mode: str = "sampled"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"drafting.mode={self.mode!r}: choose from {', '.join(MODES)}{nearest(self.mode, MODES)}")
        if not self.temperature > 0:
            raise UserError(f"drafting.temperature={self.temperature}: it must be above 0 (1 is the row's own)")

    def draws(self, chance: Chance | None) -> bool:
        """Whether any row's children are drawn at random."""
        return self.mode != "top" and chance is not None and not chance.greedy

    def law(self, logits_BWV: Tensor, chance: Chance) -> Tensor:
        """The law that children are drawn from: the drafter's own after the row's temperature and filters."""
        params = chance.params
        if self.temperature != 1:
            params = [replace(param, temperature=param.temperature * self.temperature) for param in params]
        return to_probs(logits_BWV, params)


class Selection:
    """Entries of the second dimension that are known beforehand, taken by the least work: all, a run, or one by one."""

    def __init__(self, indices: Sequence[int], size: int, device: torch.device) -> None:
        self.indices = list(indices)
        self._start = indices[0]
        self._count = len(indices)
        self._all = list(indices) == list(range(size))
        self._run = list(indices) == list(range(self._start, self._start + self._count))
        self._index = upload(indices, device)

    def __call__(self, values: Tensor) -> Tensor:
        """Of ``values`` [B, size, ..] those entries."""
        if self._all:
            return values
        return values.narrow(1, self._start, self._count) if self._run else values.index_select(1, self._index)


class Brood:
    """The children of some parents of a topology: what of them does not depend on the step.

    Children stand in the order of their node numbers; ``way_n`` and ``place_n`` say of each whose it is (an index
    into ``parents``) and the how many-th among its siblings.
    """

    def __init__(self, topology: Topology, parents: Sequence[int], device: torch.device) -> None:
        ways = {parent: way for way, parent in enumerate(parents)}
        children = [node for node in range(1, topology.size) if topology.parents[node] in ways]
        places: dict[int, list[int]] = {parent: [] for parent in parents}
        for node in children:
            places[topology.parents[node]].append(node)
        mates = [places[topology.parents[node]] for node in children]
        self.size = max(map(len, mates))
        self.ranks = max(topology.ranks[node] for node in children) + 1
        self.parent_W = upload(parents, device)
        self.depth_1W = upload([[topology.depths[parent] for parent in parents]], device)
        self.way_n = upload([ways[topology.parents[node]] for node in children], device)
        self.place_n = upload([all_.index(node) for all_, node in zip(mates, children, strict=True)], device)
        self.last_n = upload([all_[-1] == node for all_, node in zip(mates, children, strict=True)], device)
        self.every_n = torch.ones_like(self.last_n)
        cells = [ways[topology.parents[node]] * self.ranks + topology.ranks[node] for node in children]
        self.best = Selection(cells, len(parents) * self.ranks, device)  # of all parents' likeliest tokens


@dataclass(frozen=True)
class Picked:
    """The children of one brood, in its order: tokens, which can be accepted, which were drawn, and their laws."""

    brood: Brood
    tokens_Bn: Tensor
    valid_Bn: Tensor
    sampled_Bn: Tensor
    q_BWV: Tensor


def likeliest(logits_BWV: Tensor, brood: Brood) -> Tensor:
    """Each child's token by its rank in its parent's law: int64 [B, n]."""
    return brood.best(largest(logits_BWV) if brood.ranks == 1 else ranked(logits_BWV, brood.ranks).flatten(1))


def pick(logits_BWV: Tensor, brood: Brood, chance: Chance, drafting: Drafting) -> Picked:
    """Choose the children of each parent from its logits, in rows that sample by chance."""
    mixed = drafting.mode == "mixed"
    q_BWV = drafting.law(logits_BWV, chance)
    top_Bn = likeliest(logits_BWV, brood) if mixed or chance.some_greedy else None
    drawn_n, turn_n, turns = brood.every_n, brood.place_n, brood.size
    if mixed and top_Bn is not None:
        drawn_n, turn_n, turns = brood.last_n, torch.zeros_like(brood.place_n), 1
        q_BWV = _apart(q_BWV, brood, top_Bn)
    left_BWV, draws_BW = q_BWV.double(), []
    for turn in range(turns):
        draws_BW.append(chance.categorical(left_BWV, brood.depth_1W, DRAFT, turn))
        if turn + 1 < turns:
            left_BWV = left_BWV.scatter(-1, draws_BW[-1][..., None], 0.0)
    tokens_Bn = torch.stack(draws_BW, -1)[:, brood.way_n, turn_n]
    valid_Bn = (q_BWV > 0).sum(-1)[:, brood.way_n] > turn_n  # else the law was exhausted before
    sampled_Bn = drawn_n.expand_as(tokens_Bn)
    if top_Bn is not None:
        sampled_Bn = drawn_n & ~chance.greedy_B[:, None]
        tokens_Bn, valid_Bn = torch.where(sampled_Bn, tokens_Bn, top_Bn), valid_Bn | ~sampled_Bn
    return Picked(brood, tokens_Bn, valid_Bn, sampled_Bn, q_BWV)


def _apart(q_BWV: Tensor, brood: Brood, top_Bn: Tensor) -> Tensor:
    """The laws without the tokens that each parent's deterministic children, all but its last, hold."""
    keeps_Bn = brood.last_n.to(q_BWV).expand_as(top_Bn)
    flat_Bn = brood.way_n * q_BWV.shape[-1] + top_Bn
    kept = torch.ones_like(q_BWV).flatten(1).scatter_reduce(1, flat_Bn, keeps_Bn, "amin")
    return q_BWV * kept.view_as(q_BWV)


def sampled_tree(
    shape: Shape,
    root_B1: Tensor,
    picks: Sequence[Picked],
    vocab: int,
    place_N: Tensor | None = None,
    draft_ids: Tensor | None = None,
) -> DraftTree:
    """The tree of broods that follow each other, its nodes moved to ``place_N`` where they were numbered otherwise.

    ``draft_ids``: the ids of the tokens that the picks and their laws are of, ascending; None if they are of all.
    """
    yes_B1 = torch.ones_like(root_B1, dtype=torch.bool)
    drawn = [pick.tokens_Bn if draft_ids is None else draft_ids[pick.tokens_Bn] for pick in picks]
    tokens_BN = torch.cat([root_B1, *drawn], 1)
    valid_BN = torch.cat([yes_B1, *(pick.valid_Bn for pick in picks)], 1)
    sampled_BN = torch.cat([~yes_B1, *(pick.sampled_Bn for pick in picks)], 1)
    q_BNV = picks[0].q_BWV.new_zeros(*tokens_BN.shape, vocab)
    for pick in picks:  # ids that the tokenizer or the draft vocabulary lacks keep 0: they are never drawn
        if draft_ids is None:
            q_BNV[:, pick.brood.parent_W, : pick.q_BWV.shape[-1]] = pick.q_BWV
        else:
            q_BNV[:, pick.brood.parent_W[:, None], draft_ids] = pick.q_BWV
    if place_N is None:
        return DraftTree(shape, tokens_BN, valid_BN, sampled_BN, q_BNV)
    tokens_BN, valid_BN, sampled_BN = (part[:, place_N] for part in (tokens_BN, valid_BN, sampled_BN))
    return DraftTree(shape, tokens_BN, valid_BN, sampled_BN, q_BNV[:, place_N])
