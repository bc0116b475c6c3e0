"""Heads and prompt lookup in one tree: nothing twice, nothing lost that there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from medusa.drafters.branches import Branches
from medusa.drafters.children import Drafting
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.mixed import MixedDrafter, MixedSession
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
        found = other.lookup.branches(root_B, 9)
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
