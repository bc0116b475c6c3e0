"""Best-first trees: the best closed subtree there is, in every row its own; how far probabilities are trusted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa.confidence import GRID, temperatures
from medusa.drafters import dynamic
from medusa.drafters.best_first import (
    Best,
    Candidates,
    Expand,
    best_first,
    grown_by_host,
    grown_on_device,
    possible_paths,
)
from medusa.drafters.children import Drafting
from medusa.drafters.dynamic import DynamicDrafter, DynamicSession
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import plain_greedy, random_heads, tiny_trunk
from medusa.tree import Shape, Topology
from medusa.trunk import TrunkOutput

ROWS = 3
Grow = Callable[[Expand, Tensor, int, int, int], Best]
Laws = Callable[[int, tuple[int, ...]], list[float]]  # of a row, behind a way: falling log-probabilities; ids are ranks


def by_level(log_BKR: Tensor, most: int, grow: Grow) -> Best:
    """The tree of heads that read no drafted token, level by level; a token's id is its rank."""

    def expand(level: int, way_BWC: Tensor, from_BW: Tensor) -> tuple[Tensor, Tensor]:
        assert way_BWC.shape[2] == level + 1
        log_BWR = log_BKR[:, level, None].expand(-1, way_BWC.shape[1], -1)
        return log_BWR, torch.arange(log_BKR.shape[2]).expand_as(log_BWR)

    return grow(expand, torch.zeros(len(log_BKR), 1, dtype=torch.long), log_BKR.shape[1], most, most)


def at_once(log_BKR: Tensor, most: int) -> Best:
    _, depth, ranks = log_BKR.shape
    return Candidates(depth, ranks, most, log_BKR.device).best(log_BKR, torch.arange(ranks).expand_as(log_BKR))


WAYS: dict[str, Callable[[Tensor, int], Best]] = {
    "host": lambda log_BKR, most: by_level(log_BKR, most, grown_by_host),
    "device": lambda log_BKR, most: by_level(log_BKR, most, grown_on_device),
    "at once": at_once,
}
GROWS: dict[str, Grow] = {"host": grown_by_host, "device": grown_on_device}


def grown(log_BKR: Tensor, most: int) -> Best:
    return at_once(log_BKR, most)


def paths_of(best: Best, row: int) -> list[tuple[int, ...]]:
    """Each node's tokens from the root down."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(best.parents[row].tolist(), best.tokens[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def laws_of(seed: int, depth: int, ranks: int, ties: bool) -> Tensor:
    logits = torch.randn(ROWS, depth, ranks + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    if ties:
        logits = logits.round() / 100 * 100 * (logits > 0)
    return logits.log_softmax(-1).sort(-1, descending=True).values[..., :ranks]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4), st.integers(1, 14), st.booleans())
def test_it_is_the_best_closed_subtree(way: str, seed: int, depth: int, ranks: int, most: int, ties: bool) -> None:
    log_BKR = laws_of(seed, depth, ranks, ties)
    best = WAYS[way](log_BKR, most)
    every = [path for length in range(1, depth + 1) for path in product(range(ranks), repeat=length)]
    for row in range(ROWS):
        score = {path: sum(float(log_BKR[row, d, rank]) for d, rank in enumerate(path)) for path in every}
        found = paths_of(best, row)
        assert len(set(found)) == len(found) == min(most, len(every))
        place = {path: number for number, path in enumerate([(), *found])}
        for path in found:  # closed, and in an order in which a tree can be numbered and its children tried
            assert place[path[:-1]] < place[path]
            assert path[-1] == 0 or place[(*path[:-1], path[-1] - 1)] < place[path]
        # no closed set has a larger sum than the largest scores at all
        largest = sorted((math.exp(each) for each in score.values()), reverse=True)[:most]
        assert sum(math.exp(score[path]) for path in found) == pytest.approx(sum(largest), rel=1e-9)
        assert best.depths[row].tolist() == [len(path) for path in found]
        assert best.ranks[row].tolist() == [path[-1] for path in found]
        falling = [score[path] for path in found]
        assert all(a >= b - 1e-6 for a, b in pairwise(falling))
        if not ties:
            assert found == sorted(every, key=lambda path: -score[path])[:most]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [1, 2, 7, 15])
def test_its_shape_is_that_of_its_parents(way: str, most: int) -> None:
    best = WAYS[way](laws_of(most, 3, 4, ties=False), most)
    kept, _ = best.keep(torch.tensor([[most], [most // 2], [0]]), 2)
    assert kept.deepest == min(2, best.deepest)
    for each in (best, kept):
        shape, parents_BN = each.shape(), torch.nn.functional.pad(each.parents, (1, 0), value=-1)
        expected = Shape.of(parents_BN, each.deepest + 1)
        for part in ("ancestors", "depths", "parents", "paths"):
            assert torch.equal(getattr(shape, part), getattr(expected, part)), part


def random_law(seed: int, ranks: int, peak: float) -> Laws:
    """Another law behind every way of every row."""

    def law(row: int, way: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {row} {way}")
        weights = sorted((math.exp(peak * rng.gauss(0, 1)) for _ in range(ranks + 1)), reverse=True)
        return [math.log(each / sum(weights)) for each in weights[:ranks]]

    return law


def expanding(law: Laws, seen: list[list[set[tuple[int, ...]]]]) -> Expand:
    """What the law says, behind ways that begin with the row's root, its number; ``seen``: of each level and row."""

    def expand(level: int, way_BWC: Tensor, from_BW: Tensor) -> tuple[Tensor, Tensor]:
        ways = [[tuple(way[1:]) for way in row] for row in way_BWC.tolist()]
        seen.append([set(row) for row in ways])
        log_BWR = torch.tensor([[law(row, way) for way in each] for row, each in enumerate(ways)], dtype=torch.float64)
        return log_BWR, torch.arange(log_BWR.shape[2]).expand_as(log_BWR)

    return expand


@pytest.mark.parametrize("grow", GROWS)
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 9),
    st.floats(0.5, 4),
)
def test_laws_that_depend_on_the_way(
    grow: str, seed: int, depth: int, ranks: int, most: int, width: int, peak: float
) -> None:
    """The slow way: all of a level's likeliest ``width`` nodes are expanded, and the likeliest of all are taken."""
    law, seen = random_law(seed, ranks, peak), list[list[set[tuple[int, ...]]]]()
    root_B1 = torch.arange(ROWS)[:, None]
    best = GROWS[grow](expanding(law, seen), root_B1, depth, most, width)
    for row in range(ROWS):
        score: dict[tuple[int, ...], float] = {(): 0.0}
        level: list[tuple[int, ...]] = [()]
        for _ in range(depth):
            found = {(*way, rank): score[way] + log for way in level for rank, log in enumerate(law(row, way))}
            score |= found
            level = sorted(found, key=lambda way: -found[way])[:width]
        del score[()]
        assert paths_of(best, row) == sorted(score, key=lambda way: -score[way])[:most]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 12), st.floats(0.5, 4))
def test_no_node_is_expanded_on_a_cpu_that_can_have_no_child_in_the_tree(
    seed: int, most: int, width: int, peak: float
) -> None:
    law, seen = random_law(seed, 4, peak), list[list[set[tuple[int, ...]]]]()
    best_first(expanding(law, seen), torch.zeros(1, 1, dtype=torch.long), 4, most, width)
    score: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for at in range(4):
        assert at >= len(seen) or seen[at][0] == set(level)
        found = {(*way, rank): score[way] + log for way in level for rank, log in enumerate(law(0, way))}
        score |= found
        likelier = set(sorted(score, key=lambda way: -score[way])[1:most])  # these, and a child behind them
        level = [way for way in sorted(found, key=lambda way: -found[way])[:width] if way in likelier]
        assert level or len(seen) == at + 1
        if not level:
            break


@pytest.mark.parametrize(("depth", "ranks", "most"), [(3, 4, 9), (2, 8, 12), (4, 2, 15), (2, 16, 5)])
def test_every_candidate_can_be_in_a_tree_and_no_other(depth: int, ranks: int, most: int) -> None:
    listed = set(possible_paths(depth, ranks, most))
    assert all(max(map(len, listed)) <= depth and max(path) < ranks for path in listed)
    for path in product(range(ranks), repeat=depth):
        for length in range(1, depth + 1):
            log_1KR = torch.full((1, depth, ranks), -90.0)  # but where the path goes, and what comes before it
            for head, rank in enumerate(path[:length]):
                log_1KR[0, head, : rank + 1] = -1e-3
            best = by_level(log_1KR, most, grown_on_device)
            assert (path[:length] in paths_of(best, 0)) == (path[:length] in listed)


@pytest.mark.parametrize("grow", ["by level", "at once"])
def test_nothing_asks_the_host_where_it_must_not(grow: str) -> None:
    """The meta device has no numbers to give."""
    if grow == "at once":
        log_BKR = torch.empty(ROWS, 3, 4, device="meta")
        best = Candidates(3, 4, 7, log_BKR.device).best(log_BKR, torch.empty(ROWS, 3, 4, device="meta").long())
    else:

        def expand(level: int, way_BWC: Tensor, from_BW: Tensor) -> tuple[Tensor, Tensor]:
            log_BWR = torch.empty(*way_BWC.shape[:2], 4, device="meta")
            return log_BWR, log_BWR.long()

        best = best_first(expand, torch.empty(ROWS, 1, dtype=torch.long, device="meta"), 3, 7)
    assert best.tokens.shape == (ROWS, 7) and best.shape().paths.shape == (ROWS, 8, 4)


@pytest.mark.parametrize(("most", "room"), [(None, 1), (None, 2), ([0, 3, 9], 3), ([5, 1, 2], 1)])
def test_what_is_not_kept_goes_behind_the_rest(most: list[int] | None, room: int) -> None:
    log_BKR = torch.randn(ROWS, 3, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    best = grown(log_BKR.sort(-1, descending=True).values, 9)
    most_B1 = None if most is None else torch.tensor(most)[:, None]
    kept, valid_Bn = best.keep(most_B1, room)
    for row in range(ROWS):
        wanted = [path for path in paths_of(best, row)[: None if most is None else most[row]] if len(path) <= room]
        count = int(valid_Bn[row].sum())
        assert valid_Bn[row].tolist() == [True] * count + [False] * (9 - count)
        assert paths_of(kept, row)[:count] == wanted
        assert not kept.parents[row, count:].any()  # fillers below the root, whatever the room


# The drafter.


def session_of(kind: str, nodes: int, mode: str | None = None, rows: int = 2, **options: Any) -> DynamicSession:
    trunk = tiny_trunk("llama", vocab_size=11)
    heads = random_heads(trunk, HeadsConfig(kind, num=3), scale=0.2)
    session = DynamicDrafter(heads, nodes, Drafting(mode) if mode else None, **options).open(trunk)
    generator = torch.Generator().manual_seed(1)
    hidden_BD = torch.randn(rows, trunk.hidden_size, generator=generator, dtype=torch.float64)
    session.start([[1]] * rows, hidden_BD, TrunkOutput(hidden_BD[:, None], hidden_BD[:, None]))
    return session


def chance_of(rows: int, temperature: float = 1.0) -> Chance:
    return Chance(
        [SamplingParams(temperature=temperature, seed=row) for row in range(rows)], [7] * rows, HashDraws(), "cpu"
    )


@pytest.mark.parametrize("kind", ["medusa", "root", "hydra"])
@pytest.mark.parametrize("nodes", [2, 5, 16])
def test_every_row_has_its_own_tree_of_so_many_nodes(kind: str, nodes: int) -> None:
    session, root_B = session_of(kind, nodes, rows=6), torch.arange(6)
    trees = [session.propose(root_B, 9)]
    trees += [session.propose(root_B, 9, chance_of(6))] if kind != "hydra" else []
    for tree in trees:
        assert tree.size == nodes and tree.valid_BN.all() and torch.equal(tree.tokens_BN[:, 0], root_B)
        children = [
            list(zip(*each, strict=True))
            for each in zip(tree.shape.parents.tolist(), tree.tokens_BN.tolist(), strict=True)
        ]
        assert all(len(set(row[1:])) == nodes - 1 for row in children)  # no two siblings hold one token
    if nodes == 16:
        assert len({tuple(row) for row in trees[0].shape.parents.tolist()}) > 1


@pytest.mark.parametrize("kind", ["root", "hydra"])
def test_a_node_is_scored_by_the_laws_on_its_way(kind: str) -> None:
    """Hydra's by what its heads say behind the drafted tokens."""
    session, root_B = session_of(kind, 12, "top", temperatures=[0.5, 1.0, 2.0]), torch.tensor([3, 4])
    tree, shape = session.propose(root_B, 9), session.propose(root_B, 9).shape
    heads = session.heads
    for row in range(2):
        score = [0.0]
        for node in range(1, tree.size):
            way = [int(tree.tokens_BN[row, each]) for each in shape.paths[row, node] if each >= 0]
            head = len(way) - 2
            embedded = heads.embed(torch.tensor(way[:-1]))
            hidden_D = session.hidden_BD[row]
            logits_V = heads.logits(head, heads.features(head, hidden_D, heads.context(head, embedded)))
            log_V = (logits_V / (0.5, 1.0, 2.0)[head]).log_softmax(-1)
            score.append(score[int(shape.parents[row, node])] + log_V[way[-1]].item())
        assert score == pytest.approx(sorted(score, reverse=True))


@pytest.mark.parametrize("kind", ["medusa", "root"])
def test_children_that_no_tree_takes_need_not_be_drawn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, root_B = session_of(kind, 12), torch.tensor([3, 4])
    tree = session.propose(root_B, 9, chance_of(2))
    ranks = int(tree.shape.children.shape[-1])
    assert list(session._broods) == [ranks] and ranks < session.ranks
    every = session._brood(torch.tensor([session.ranks - 1]))
    monkeypatch.setattr(session, "_brood", lambda rank_Bn: every)
    whole = session.propose(root_B, 9, chance_of(2))
    for part in ("tokens_BN", "valid_BN", "sampled_BN", "q_BNV"):
        assert torch.equal(getattr(tree, part), getattr(whole, part))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_paths_are_too_many_trees_are_grown_level_by_level(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trees() -> list[Tensor]:
        session = session_of("root", 9)
        assert (session.candidates is None) is (dynamic.MANY == 3)
        tree = session.propose(torch.tensor([3, 7]), 8, chance_of(2, temperature))
        return [tree.tokens_BN, tree.shape.parents]

    chosen = trees()
    monkeypatch.setattr(dynamic, "MANY", 3)
    assert all(map(torch.equal, trees(), chosen))


def test_shapes_do_not_depend_on_what_is_drawn() -> None:
    session, root_B = session_of("root", 12), torch.tensor([3, 4])
    plain = session.propose(root_B, 9)
    drawn = [
        session.propose(root_B, 9, Chance([SamplingParams(temperature=t, seed=s)] * 2, [7, 7], HashDraws(), "cpu"))
        for t in (0.7, 1.5)
        for s in range(5)
    ]
    for tree in drawn:
        assert torch.equal(tree.shape.parents, plain.shape.parents) and tree.valid_BN.all()
        assert tree.sampled_BN is not None and tree.sampled_BN[:, 1:].all() and not tree.sampled_BN[:, 0].any()
    assert len({tuple(tree.tokens_BN.flatten().tolist()) for tree in drawn}) > 5


@pytest.mark.parametrize("kind", ["root", "hydra"])
def test_a_tree_given_for_sampling_is_that_of_batches_that_sample(kind: str) -> None:
    given = Topology.full([2, 1])
    session, root_B = session_of(kind, 8, sampling=given), torch.tensor([3, 4])
    static = MedusaDrafter(session.heads, given).open(session.heads.trunk)
    static.hidden_BD = session.hidden_BD
    drawn, same = session.propose(root_B, 9, chance_of(2)), static.propose(root_B, 9, chance_of(2))
    assert torch.equal(drawn.tokens_BN, same.tokens_BN) and torch.equal(drawn.shape.parents, same.shape.parents)
    assert drawn.sampled_BN is not None and drawn.sampled_BN[:, 1:].all()
    assert session.propose(root_B, 9, chance_of(2, 0.0)).size == session.propose(root_B, 9).size == 8


@pytest.mark.parametrize("room", [0, 1, 2])
def test_no_node_is_deeper_than_there_is_room(room: int) -> None:
    session, root_B = session_of("root", 12), torch.tensor([3, 4])
    whole = session.propose(root_B, 3, chance_of(2))
    tree = session.propose(root_B, room, chance_of(2))
    assert tree.size == (12 if room else 1) and int(tree.shape.depths.max()) == min(room, 1) * max(room, 1)
    for row in range(2):  # what is left is what it was
        shallow = [t for t, d in zip(whole.tokens_BN[row], whole.shape.depths[row], strict=True) if d <= room]
        assert tree.tokens_BN[row, : len(shallow)].tolist() == [int(t) for t in shallow]
        assert int(tree.valid_BN[row].sum()) == len(shallow)


@pytest.mark.parametrize(
    ("kind", "nodes", "options", "word"),
    [
        ("root", 1, {}, "from 2"),
        ("root", True, {}, "from 2"),
        ("root", 4, {"drafting": Drafting("mixed")}, "sampled or top"),
        ("hydra", 4, {"drafting": Drafting("sampled")}, "takes top"),
        ("root", 4, {"sampling": Topology.full([2, 1])}, "a tree of 5 nodes to sample from, and 4 in all"),
        ("root", 4, {"temperatures": [1.0]}, "each of 3 heads"),
        ("root", 4, {"temperatures": [1.0, 0.0, 1.0]}, "above 0"),
    ],
)
def test_bad_options_are_named(kind: str, nodes: int, options: dict[str, Any], word: str) -> None:
    heads = random_heads(tiny_trunk("llama"), HeadsConfig(kind, num=3))
    with pytest.raises(UserError, match=word):
        DynamicDrafter(heads, nodes, **options)


# Temperatures.


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_a_temperature_undoes_what_heads_exaggerate(scale: float) -> None:
    """Heads whose logits are so many times the right ones are to be cooled by as much."""
    trunk = tiny_trunk("llama", vocab_size=11, seed=3)  # whose heads' own temperatures lie within the grid
    heads = random_heads(trunk, HeadsConfig("medusa", num=2), scale=0.05)
    ids = [1, 2, *plain_greedy(trunk, [1, 2], 60)]
    hidden = trunk.forward(torch.tensor([ids])).hidden[0]
    first = temperatures(heads, [ids], [2], [hidden])
    with torch.no_grad():
        for head in range(2):
            projection = heads.head(head).projection
            assert projection is not None
            projection.weight *= scale
    then = temperatures(heads, [ids], [2], [hidden])
    assert then == pytest.approx([before * scale for before in first])
    assert GRID[0] < min(first + then) and max(first + then) < GRID[-1]


def test_heads_that_nothing_tells_of_keep_their_probabilities() -> None:
    trunk = tiny_trunk("llama", vocab_size=11)
    heads = random_heads(trunk, HeadsConfig("hydra", num=3), scale=0.05)
    ids = [1, 2, 5, 6]
    hidden = trunk.forward(torch.tensor([ids])).hidden[0]
    assert temperatures(heads, [ids], [2], [hidden])[1:] == [1.0, 1.0]
