"""Heads and prompt lookup in one tree: what followed before in the text, and the heads' likeliest tokens beside it.

Branches that begin alike share their nodes, so that no two siblings hold one token. A token that was looked up is a
deterministic child; where a head's children were drawn it comes behind them, and is left out if one of them holds it.

Dimensions: B batch, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.biases import Biases
from medusa.drafters.base import place_each
from medusa.drafters.branches import Branches, as_tree
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.prompt_lookup import Lookup, PromptLookupDrafter
from medusa.errors import UserError
from medusa.sampling import Chance
from medusa.tree import DraftTree, Row
from medusa.trunk import Trunk, TrunkOutput
from medusa.uploads import upload

LEAST = 4  # tokens of an end of the text that says more about what follows than heads do
# Of a text drawn at temperature 1 one in three tokens is what was looked up (a character trunk, ends of 4 or more).
HITS, TRIES = 1, 3
WORTH = 0.1  # the chance of acceptance below which a looked-up node is worth less than the heads' last ones


class MixedDrafter:
    """Two drafters, and one number of nodes for both: what is looked up comes first, heads fill the rest.

    Args:
        heads: how the heads draft; its nodes are those of the whole tree.
        lookup: what is looked for; left out, one continuation of a long enough end, for half of the tree.

    Raises:
        UserError: a lookup that leaves the heads no node.
    """

    name = "mixed"

    def __init__(self, heads: DynamicDrafter, lookup: Lookup | None = None) -> None:
        lookup = lookup or Lookup(least=LEAST, branches=1, nodes=max(1, heads.nodes // 2))
        if lookup.nodes >= heads.nodes:
            raise UserError(
                f"a mixed tree of {heads.nodes} nodes with {lookup.nodes} to look up: leave the root and a node for the"
                " heads, or make the tree larger"
            )
        self.dynamic = heads
        self.heads = heads.heads
        self.lookup = PromptLookupDrafter(lookup)

    def open(self, trunk: Trunk) -> MixedSession:
        """A session of one batch. UserError for another trunk than the heads are bound to."""
        return MixedSession(self, trunk)


class MixedSession:
    """The sessions of both, which learn from the same trees."""

    def __init__(self, drafter: MixedDrafter, trunk: Trunk) -> None:
        self.nodes = drafter.dynamic.nodes
        self.drafting = drafter.dynamic.drafting
        sampling = drafter.dynamic.sampling
        self.given = 0 if sampling is None else sampling.topology.size
        self.heads = drafter.dynamic.open(trunk)
        self.lookup = drafter.lookup.open(trunk)
        self.records: list[Record] = []
        self._biases = Biases()

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Take in the prompts."""
        self.heads.start(prompts, hidden_BD, output)
        self.lookup.start(prompts, hidden_BD, output)
        self.records = [Record() for _ in prompts]

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Both trees of each row as one of at most so many nodes.

        Where tokens are drawn, neither a row's room nor the tokens decide how many nodes each of the two gets: what is
        looked up counts as nodes of its own there, also where the heads have drawn it. It takes the places of heads'
        nodes then, so it goes only as deep as the row's text so far makes it likely.
        """
        given = self.heads.takes_given(chance)
        drawn = given or (chance is not None and self.drafting.draws(chance))
        found = self.lookup.branches(root_B, self.lookup.lookup.tokens if drawn else room, chance)
        most = self.nodes - (self.given if given else 0)
        most_B1 = None
        if drawn and not given:
            found = [record.weigh(row) for record, row in zip(self.records, found, strict=True)]
            left = [self.nodes - len(row.parents) for row in found]
            most_B1 = upload(left, root_B.device)[:, None]
        alone = not most or all(len(row.parents) == 1 for row in found)  # nothing was looked up
        own = None if drawn or alone else self.heads.row(root_B, room, chance)
        if own is not None:
            return self._merged([own], found, drawn, most, room, root_B.device)
        tree = self.heads.grow(root_B, room, chance, most_B1)
        if alone:
            return tree
        return marked(self._merged(read_off(tree), found, drawn, most, room, root_B.device), tree)

    def _merged(
        self, own: Sequence[Row], found: Sequence[Branches], drawn: bool, most: int, room: int, device: torch.device
    ) -> DraftTree:
        """The heads' trees and what was looked up, of which at most ``most`` nodes are taken."""
        rows = []
        for (parents, tokens, valid), looked_up in zip(own, found, strict=True):
            size = len(tokens)
            while not valid[size - 1]:
                size -= 1  # fillers at the end are left out
            row = Branches(tokens[0], self.nodes)
            for node in range(1, size if drawn else fitting(parents, tokens, size, looked_up, self.nodes)):
                hang = row.child if valid[node] else row.unacceptable  # in the heads' own order, so numbers stay
                hang(parents[node], tokens[node])
            hang_behind(row, looked_up, most, room)
            rows.append(row)
        return as_tree(rows, device, len(own[0].tokens), self._biases)

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Learn which path was accepted."""
        self.heads.commit(tree, verified, acceptance)
        self.lookup.commit(tree, verified, acceptance)
        if any(record.guess is not None for record in self.records):
            for record, walk in zip(self.records, acceptance.on_host(tree), strict=True):
                record.count(walk.tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.heads.select(rows)
        self.lookup.select(rows)
        self.records = [self.records[row] for row in rows]

    def admit(self, slots: Sequence[int], other: MixedSession) -> None:
        """Take over another session's rows."""
        self.heads.admit(slots, other.heads)
        self.lookup.admit(slots, other.lookup)
        place_each(self.records, slots, other.records)


class Record:
    """How often a row's text went on as what was looked up said, and how deep it is worth to look from that.

    It rests on what earlier steps decided, not on what this one draws.
    """

    def __init__(self) -> None:
        self.hits, self.tries = HITS, TRIES
        self.guess: Branches | None = None  # of a step under way

    def count(self, tokens: Sequence[int]) -> None:
        """Learn how the text went on."""
        guess, node = self.guess, 0
        self.guess = None
        for token in tokens:
            if guess is None or node not in guess.parents:
                break
            child = guess.find(node, token)
            self.tries += 1
            if child is None:
                break
            self.hits, node = self.hits + 1, child

    def weigh(self, found: Branches) -> Branches:
        """As much of ``found`` as is worth its nodes."""
        self.guess = found
        depth = math.floor(math.log(WORTH) / math.log(self.hits / self.tries))
        row = Branches(found.tokens[0], found.most)
        hang_behind(row, found, found.most, depth)
        return row


def read_off(tree: DraftTree) -> list[Row]:
    """The nodes of a tree, which the device made: one transfer."""
    parts = (tree.shape.parents.expand_as(tree.tokens_BN), tree.tokens_BN, tree.valid_BN.long())
    return [Row(*each) for each in torch.stack(parts, 1).tolist()]


def fitting(parents: Sequence[int], tokens: Sequence[int], size: int, looked_up: Branches, nodes: int) -> int:
    """How many of a tree's first ``size`` nodes make a tree of at most ``nodes`` with what was looked up."""
    left = len(looked_up.parents) - 1  # of what was looked up, what the tree's nodes so far don't hold
    same: dict[int, int | None] = {0: 0}
    for node in range(1, size):
        same[node] = looked_up.find(same[parents[node]], tokens[node])
        left -= same[node] is not None
        if node + 1 + left > nodes:
            return node
    return size


def hang_behind(row: Branches, looked_up: Branches, most: int, room: int) -> None:
    """Add what was looked up to a row's tree, its first ``most`` nodes down to ``room``; none is added twice."""
    at, depth = {0: 0}, {0: 0}
    for node in range(1, min(len(looked_up.parents), most + 1)):
        parent = looked_up.parents[node]
        depth[node] = depth[parent] + 1
        if depth[node] <= room:
            at[node] = row.child(at[parent], looked_up.tokens[node])


def marked(merged: DraftTree, heads: DraftTree) -> DraftTree:
    """The merged tree with the heads' marks of what was drawn; their nodes have the same numbers in both.

    Numbers that have become others' were fillers, whose marks mean nothing.
    """
    if heads.sampled_BN is None or heads.q_BNV is None:
        return merged
    more = merged.size - heads.size
    sampled_BN = torch.nn.functional.pad(heads.sampled_BN & heads.valid_BN, (0, more))
    return replace(merged, sampled_BN=sampled_BN, q_BNV=torch.nn.functional.pad(heads.q_BNV, (0, 0, 0, more)))
