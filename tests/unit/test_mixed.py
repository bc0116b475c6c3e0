"""Heads and prompt lookup in one tree: nothing twice, nothing lost that there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.drafters.branches import Branches
from medusa.drafters.children import Drafting
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.mixed import MixedDrafter, MixedSession, Record
from medusa.drafters.prompt_lookup import Lookup
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import random_heads, tiny_trunk
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk, TrunkOutput

# The last token occurred before in the first two, which repeat themselves; the third says nothing.
TEXTS = [[5, 6, 7, 8, 9, 5, 6, 1, 2, 5], [3, 4, 3, 4, 3, 4, 3], [0, 1, 2, 3]]
ROOTS = [6, 4, 10]
LOOKUP = Lookup(least=1, tokens=4, branches=2, nodes=5)


def trunk_of() -> Trunk:
    return tiny_trunk("llama", vocab_size=11)


def session_of(nodes: int, mode: str = "sampled", kind: str = "root") -> tuple[MixedSession, Tensor]:
    trunk = trunk_of()
    heads = random_heads(trunk, HeadsConfig(kind, num=3), scale=0.2)
    dynamic = DynamicDrafter(heads, nodes, Drafting(mode) if kind == "root" else None)
    session = MixedDrafter(dynamic, Lookup(least=1, tokens=4, branches=2, nodes=min(5, nodes - 1))).open(trunk)
    hidden_BD = torch.randn(3, trunk.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    session.start(TEXTS, hidden_BD, TrunkOutput(hidden_BD[:, None], hidden_BD[:, None]))
    return session, torch.tensor(ROOTS)


def paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens on the way to each node that can be accepted, in the order of their numbers."""
    shape, found = tree.shape, []
    ways = shape.paths.expand(tree.tokens_BN.shape[0], -1, -1)[row].tolist()
    for node in range(1, tree.size):
        way = [each for each in ways[node][1:] if each >= 0]
        if all(tree.valid_BN[row, each] for each in way):
            found.append(tuple(int(tree.tokens_BN[row, each]) for each in way))
    return found


def ways(branches: Branches) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for parent, token in zip(branches.parents[1:], branches.tokens[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def chance_of(seed: int = 0, temperature: float = 1.0) -> Chance:
    params = [SamplingParams(temperature=temperature, seed=seed + row) for row in range(3)]
    return Chance(params, [9, 9, 9], HashDraws(), "cpu")


@pytest.mark.parametrize("kind", ["root", "hydra"])
@pytest.mark.parametrize("nodes", [3, 6, 8, 12])
def test_both_parts_share_one_budget(nodes: int, kind: str) -> None:
    """What was looked up is there, and the heads' likeliest nodes fill what is left to the last."""
    session, root_B = session_of(nodes, kind=kind)
    alone = session.heads.propose(root_B, 9)
    (other, _) = session_of(nodes, kind=kind)
    found = other.lookup.branches(root_B, 9)
    tree = session.propose(root_B, 9)
    assert tree.size == nodes and tree.sampled_BN is None and torch.equal(tree.tokens_BN[:, 0], root_B)
    for row in range(3):
        merged, heads, looked_up = paths(tree, row), paths(alone, row), ways(found[row])
        assert len(set(merged)) == len(merged) == nodes - 1  # no node twice, and no place left empty
        assert set(looked_up) <= set(merged) <= {*looked_up, *heads}
        first = next((place for place, path in enumerate(heads) if path not in merged), len(heads))
        assert not set(merged) & set(heads[first:]) - set(looked_up)
    assert [len(ways(each)) > 0 for each in found] == [True, True, False]


def test_what_is_drawn_keeps_its_place_and_what_is_looked_up_comes_behind() -> None:
    shared = 0
    for seed in range(40):
        session, root_B = session_of(12)
        (other, _) = session_of(12)
        looked_up = other.lookup.branches(root_B, 9)
        found = [record.weigh(each) for record, each in zip(other.records, looked_up, strict=True)]
        assert [max(map(len, ways(each)), default=0) for each in found] == [2, 2, 0]  # of 4: one in three is likely
        most_B1 = torch.tensor([[12 - len(each.parents)] for each in found])
        alone = other.heads.grow(root_B, 9, chance_of(seed), most_B1)
        tree = session.propose(root_B, 9, chance_of(seed))
        assert tree.size <= 12 and tree.sampled_BN is not None and tree.q_BNV is not None and alone.q_BNV is not None
        for row in range(3):
            count = 1 + int(most_B1[row])
            assert tree.tokens_BN[row, :count].tolist() == alone.tokens_BN[row, :count].tolist()
            assert tree.shape.parents[row, :count].tolist() == alone.shape.parents[row, :count].tolist()
            assert tree.sampled_BN[row].tolist() == [False] + [True] * (count - 1) + [False] * (tree.size - count)
            assert torch.equal(tree.q_BNV[row, :count], alone.q_BNV[row, :count])
            merged = paths(tree, row)
            assert len(set(merged)) == len(merged) and set(ways(found[row])) <= set(merged)
            shared += len(merged) < count - 1 + len(ways(found[row]))
    assert shared > 5  # tokens that were drawn and looked up have one node


@pytest.mark.parametrize("chance", [None, chance_of()], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["root", "hydra"])
def test_where_nothing_is_looked_up_the_tree_is_the_heads_own(kind: str, chance: Chance | None) -> None:
    trunk = trunk_of()
    heads = random_heads(trunk, HeadsConfig(kind, num=3), scale=0.2)
    for given in (None, Topology.full([2, 1])):
        dynamic = DynamicDrafter(heads, 8, sampling=given)
        session, alone = MixedDrafter(dynamic, LOOKUP).open(trunk), dynamic.open(trunk)
        hidden_BD = torch.randn(1, trunk.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for each in (session, alone):
            each.start(TEXTS[2:], hidden_BD, TrunkOutput(hidden_BD[:, None], hidden_BD[:, None]))
        law = None if chance is None else Chance(chance.params[:1], [9], HashDraws(), "cpu")
        tree, own = (each.propose(torch.tensor(ROOTS[2:]), 9, law) for each in (session, alone))
        assert torch.equal(tree.tokens_BN, own.tokens_BN) and torch.equal(tree.shape.parents, own.shape.parents)
        assert torch.equal(tree.valid_BN, own.valid_BN) and tree.size == own.size > 1
        assert (tree.sampled_BN is None) == (own.sampled_BN is None)


def branches_of(*runs: list[int]) -> Branches:
    made = Branches(0, 16)
    for run in runs:
        made.add(run)
    return made


def test_how_deep_lookup_goes_where_tokens_are_drawn_is_learnt_from_the_row() -> None:
    record, guess = Record(), branches_of([1, 2, 3, 4, 5, 6, 7, 8], [4, 4])

    def deep() -> int:
        return max(map(len, ways(record.weigh(guess))), default=0)

    record.count([9])  # nothing was looked up: nothing is learnt
    assert (record.hits, record.tries, deep()) == (1, 3, 2)
    record.count([1, 2, 9, 4])
    assert (record.hits, record.tries, deep()) == (3, 6, 3)
    record.count([4])  # along another branch, as far as the text goes
    assert (record.hits, record.tries) == (4, 7)
    record.count([1])  # a guess counts once
    assert (record.hits, record.tries) == (4, 7)
    deep()
    record.count([4, 4, 1])  # beyond the branch's end nothing was said
    assert (record.hits, record.tries) == (6, 9)
    for _ in range(40):
        deep()
        record.count([1, 2, 3])
    assert deep() == 8  # a text that is a copy
    for _ in range(2000):
        deep()
        record.count([7])
    assert deep() == 0 or record.hits / record.tries < 0.1


def test_what_became_of_a_guess_is_counted_by_row_also_of_rows_that_move() -> None:
    session, root_B = session_of(12)
    tree = session.propose(root_B, 9, chance_of())
    hidden_BND = torch.zeros(3, tree.size, session.heads.hidden_BD.shape[1], dtype=torch.float64)
    output = TrunkOutput(hidden_BND, hidden_BND)
    looked_up = ways(session.records[1].guess)[0]
    nothing_B = torch.zeros(3, dtype=torch.long)
    acceptance = Acceptance(nothing_B[:, None], nothing_B, torch.tensor([0, looked_up[0], 0]))
    session.commit(tree, output, acceptance)
    assert [(each.hits, each.tries) for each in session.records] == [(1, 4), (2, 4), (1, 3)]
    session.select([1, 2])
    (other, _) = session_of(12)
    other.records[0].tries = 7
    session.admit([1, 2, 3], other)
    assert [(each.hits, each.tries) for each in session.records] == [(2, 4), (1, 7), (1, 3), (1, 3)]
    greedy, _ = session_of(12)
    greedy.propose(root_B, 9)
    greedy.commit(tree, output, acceptance)
    assert [(each.hits, each.tries) for each in greedy.records] == [(1, 3)] * 3


def test_beside_a_tree_that_is_given_for_sampling_there_is_room_for_the_rest() -> None:
    given, heads = Topology.full([2, 1]), random_heads(trunk_of(), HeadsConfig("hydra", num=3), scale=0.2)
    for nodes, room in ((6, 1), (8, 3), (12, 4)):
        plain, root_B = session_of(12)
        session = MixedDrafter(DynamicDrafter(heads, nodes, sampling=given), replace(LOOKUP, nodes=4)).open(heads.trunk)
        hidden_BD = plain.heads.hidden_BD
        session.start(TEXTS, hidden_BD, TrunkOutput(hidden_BD[:, None], hidden_BD[:, None]))
        tree = session.propose(root_B, 9, chance_of())
        assert tree.size <= nodes and tree.sampled_BN is not None
        for row, looked_up in enumerate(plain.lookup.branches(root_B, 9)):
            merged = paths(tree, row)
            assert len(set(merged)) == len(merged) and set(ways(looked_up)[: min(room, 4)]) <= set(merged)
            assert tree.sampled_BN[row].tolist() == [False, *[True] * 4, *[False] * (tree.size - 5)]


@pytest.mark.parametrize("drawn", [False, True])
def test_no_node_is_deeper_than_there_is_room(drawn: bool) -> None:
    for room in (0, 1, 2, 3):
        session, root_B = session_of(12)
        tree = session.propose(root_B, room, chance_of() if drawn else None)
        assert int(tree.shape.depths.max()) <= room
        (other, _) = session_of(12)
        whole = other.propose(root_B, 9, chance_of() if drawn else None)
        if drawn:  # another row's room changes nothing that is left
            for row in range(3):
                assert paths(tree, row) == [path for path in paths(whole, row) if len(path) <= room]


def test_lookup_leaves_the_heads_a_node() -> None:
    heads = random_heads(trunk_of(), HeadsConfig("root", num=3))
    with pytest.raises(UserError, match="with 5 to look up"):
        MixedDrafter(DynamicDrafter(heads, 5), LOOKUP)
    assert MixedDrafter(DynamicDrafter(heads, 2)).lookup.lookup.nodes == 1
