"""Acceptance: by hand on small trees, and its exact law by enumerating every draw."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from medusa.accept import Acceptance, AcceptRule, DeterministicRule
from medusa.broken import BROKEN
from medusa.lawkit import Constant
from medusa.laws import Laws
from medusa.sampling import Chance, HashDraws, SamplingParams, draw
from medusa.testing import random_topology
from medusa.tree import DraftTree, Shape, Topology

V = 6


def tree_of(parents: list[list[int]], tokens: list[list[int]], valid: list[list[int]] | None = None) -> DraftTree:
    tokens_BN = torch.tensor(tokens)
    valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if valid is None else torch.tensor(valid).bool()
    return DraftTree(Shape.of(torch.tensor(parents)), tokens_BN, valid_BN)


def one_hot(choices: list[list[int]], size: int = V) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), size).double()


def accepted(acceptance: Acceptance, row: int = 0) -> tuple[list[int], int]:
    return acceptance.path_BA[row].tolist(), int(acceptance.next_token_B[row])


#        0 (token 9 stands for the root's own)
#      1   2        tokens 1 2
#     3 4   5       tokens 3 4  3
PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = [5, 1, 2, 3, 4, 3]


@pytest.mark.parametrize(
    ("choices", "path", "following"),
    [
        ([0, 0, 0, 0, 0, 0], [0, -1, -1], 0),  # nothing agrees
        ([1, 0, 0, 0, 0, 0], [0, 1, -1], 0),
        ([1, 4, 0, 0, 2, 0], [0, 1, 4], 2),  # the second child of the first
        ([2, 0, 3, 0, 0, 1], [0, 2, 5], 1),  # the path on the right, though node 3 has the same token
        ([2, 3, 0, 5, 0, 0], [0, 2, -1], 0),  # node 3 agrees with its parent, which was not chosen
        ([5, 0, 0, 0, 0, 0], [0, -1, -1], 5),  # the root's own token again: node 0 is no one's child
    ],
)
def test_greedy_walk(choices: list[int], path: list[int], following: int) -> None:
    acceptance = DeterministicRule()(tree_of([PARENTS], [TOKENS]), Laws.given(one_hot([choices])))
    got, token = accepted(acceptance)
    assert (got[:3], token) == (path, following)
    assert set(got[3:]) <= {-1}
    assert acceptance.length_B.tolist() == [sum(node >= 0 for node in path)]


def test_the_root_is_accepted_even_if_marked_a_filler() -> None:
    acceptance = DeterministicRule()(tree_of([[-1, 0]], [[5, 1]], [[0, 0]]), Laws.given(one_hot([[1, 2]])))
    assert accepted(acceptance) == ([0, -1], 1)


def test_a_filler_is_never_accepted_nor_what_hangs_below_it() -> None:
    choices = one_hot([[1, 3, 0, 0, 0, 0]])
    everything = DeterministicRule()(tree_of([PARENTS], [TOKENS]), Laws.given(choices))
    assert accepted(everything)[0][:3] == [0, 1, 3]
    leaf = DeterministicRule()(tree_of([PARENTS], [TOKENS], [[1, 1, 1, 0, 1, 1]]), Laws.given(choices))
    assert (accepted(leaf)[0][:3], accepted(leaf)[1]) == ([0, 1, -1], 3)
    inner = DeterministicRule()(tree_of([PARENTS], [TOKENS], [[1, 0, 1, 1, 1, 1]]), Laws.given(choices))
    assert (accepted(inner)[0][:3], accepted(inner)[1]) == ([0, -1, -1], 1)


def test_a_filler_twin_does_not_hide_the_valid_child() -> None:
    # two siblings hold the right token, one of them as a filler
    for valid, node in (([1, 0, 1], 2), ([1, 1, 0], 1)):
        acceptance = DeterministicRule()(tree_of([[-1, 0, 0]], [[5, 1, 1]], [valid]), Laws.given(one_hot([[1, 2, 2]])))
        assert accepted(acceptance)[0][:2] == [0, node]


def test_rows_have_their_own_trees_and_lengths() -> None:
    tree = tree_of([[-1, 0, 1], [-1, 0, 0], [-1, 0, 1]], [[5, 1, 2], [5, 1, 2], [5, 0, 0]])
    acceptance = DeterministicRule()(tree, Laws.given(one_hot([[1, 2, 3], [2, 2, 4], [1, 0, 0]])))
    assert acceptance.path_BA.tolist() == [[0, 1, 2], [0, 2, -1], [0, -1, -1]]
    assert acceptance.length_B.tolist() == [3, 2, 1]
    assert acceptance.next_token_B.tolist() == [3, 4, 1]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_host_is_told_what_the_device_knows(rows: int, seed: int) -> None:
    """Of a tree whose shape the host knows and of one that it doesn't; and by a rule that makes no walks itself."""
    rng = random.Random(seed)
    topology = random_topology(rng, 9, ranks=V)
    tokens = torch.tensor([[0, *topology.ranks[1:]]] * rows)  # siblings differ
    agree = torch.tensor([[rng.random() < 0.8 for _ in range(9)] for _ in range(rows)])
    choices = torch.randint(V, (rows, 9), generator=torch.Generator().manual_seed(seed))
    for node in range(1, 9):
        choices[:, topology.parents[node]] = torch.where(
            agree[:, node], tokens[:, node], choices[:, topology.parents[node]]
        )
    known, valid = Shape.static(topology, "cpu"), torch.ones_like(tokens).bool()
    of_rows = Shape.of(known.parents.clone().index_fill_(1, torch.tensor([0]), -1).expand(rows, -1), known.levels)
    made = [
        DeterministicRule()(DraftTree(shape, tokens, valid), Laws.given(one_hot(choices.tolist())))
        for shape in (known, replace(known, topology=None), of_rows)
    ]
    assert any(len(walk.path) > 1 for walk in made[0].on_host(DraftTree(known, tokens, valid)))
    for each in made:
        assert torch.equal(each.path_BA, made[0].path_BA) and torch.equal(each.last_B, made[0].last_B)
        assert torch.equal(each.next_token_B, made[0].next_token_B)
        assert each.last_B.tolist() == [walk.path[-1] for walk in each.walks or ()]
        told = each.on_host(DraftTree(known, tokens, valid))
        assert told == Acceptance(each.path_BA, each.last_B, each.next_token_B).on_host(DraftTree(known, tokens, valid))


def test_a_shared_shape_serves_all_rows() -> None:
    tree = DraftTree(
        Shape.static(Topology.chain(2), "cpu"), torch.tensor([[5, 1, 2], [5, 1, 2]]), torch.ones(2, 3).bool()
    )
    acceptance = DeterministicRule()(tree, Laws.given(one_hot([[1, 2, 3], [1, 0, 0]])))
    assert acceptance.path_BA.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_the_tree_of_the_root_alone() -> None:
    acceptance = DeterministicRule()(tree_of([[-1]], [[5]]), Laws.given(one_hot([[3]])))
    assert accepted(acceptance) == ([0], 3)
    assert DeterministicRule.lossless


def test_nodes_in_any_order() -> None:
    # parents come before children; that siblings or levels stand together is not required
    acceptance = DeterministicRule()(
        tree_of([[-1, 0, 1, 0, 3]], [[5, 1, 2, 3, 4]]), Laws.given(one_hot([[3, 0, 0, 4, 1]]))
    )
    assert (accepted(acceptance)[0][:3], accepted(acceptance)[1]) == ([0, 3, 4], 1)


# The exact law: a toy trunk with rational probabilities, every draw enumerated on a grid that resolves them exactly.

SYMBOLS, GRID, HORIZON = 3, 6, 3


def toy_law(prefix: tuple[int, ...], seed: int) -> list[Fraction]:
    """The trunk's law after ``prefix``, in sixths; some probabilities are 0."""
    rng = random.Random(f"{seed} {prefix}")
    cuts = sorted(rng.choices(range(GRID + 1), k=SYMBOLS - 1))
    return [Fraction(b - a, GRID) for a, b in itertools.pairwise([0, *cuts, GRID])]


def toy_tree(rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens (distinct among siblings), valid: at most two deep."""
    parents, tokens, valid = [-1], [0], [1]
    for parent in (0, 0, 1, 1, 2):
        if parent >= len(parents) or parents[parent] > 0 or rng.random() < 0.3:
            continue
        taken = {tokens[node] for node in range(len(parents)) if parents[node] == parent}
        parents.append(parent)
        tokens.append(rng.choice([token for token in range(SYMBOLS) if token not in taken]))
        valid.append(int(rng.random() < 0.85))
    return parents, tokens, valid


def emitted_law(rule: AcceptRule, seed: int) -> Counter[tuple[int, ...]]:
    """How many of the GRID^3 draws give each text of HORIZON tokens: one tree step, then plain decoding."""
    parents, tokens, valid = toy_tree(random.Random(seed))
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    grid = torch.tensor(list(itertools.product(range(GRID), repeat=HORIZON)))
    uniform_BH = (grid.double() + 0.5) / GRID
    rows = len(grid)
    tree = tree_of([parents], [tokens] * rows, [valid] * rows)
    p_NV = torch.tensor([[float(p) for p in toy_law(path, seed)] for path in paths]).double()
    depth_N = torch.tensor([len(path) for path in paths])
    chance = Chance([SamplingParams(temperature=1.0)] * rows, [0] * rows, Constant(uniform_BH[:, depth_N]), "cpu")
    acceptance = rule(tree, Laws.given(p_NV.expand(rows, -1, -1), None, chance))
    texts: Counter[tuple[int, ...]] = Counter()
    for row in range(rows):
        count = int(acceptance.length_B[row])
        text = paths[int(acceptance.path_BA[row, count - 1])] + (int(acceptance.next_token_B[row]),)
        while len(text) < HORIZON:
            law = torch.tensor([[[float(p) for p in toy_law(text, seed)]]]).double()
            text += (int(draw(law, uniform_BH[row, len(text)].reshape(1, 1))),)
        texts[text[:HORIZON]] += 1
    return texts


def trunk_law(seed: int) -> Counter[tuple[int, ...]]:
    """The same by multiplying the trunk's laws."""
    texts: Counter[tuple[int, ...]] = Counter()
    for text in itertools.product(range(SYMBOLS), repeat=HORIZON):
        probability = Fraction(GRID**HORIZON)
        for at, token in enumerate(text):
            probability *= toy_law(text[:at], seed)[token]
        assert probability.denominator == 1
        if probability:
            texts[text] = int(probability)
    return texts


@pytest.mark.parametrize("seed", range(12))
def test_deterministic_rule_is_lossless_to_the_last_draw(seed: int) -> None:
    assert emitted_law(DeterministicRule(), seed) == trunk_law(seed)


def test_the_enumeration_finds_a_broken_rule() -> None:
    wrong = [seed for seed in range(12) if emitted_law(BROKEN["argmax root"].rule, seed) != trunk_law(seed)]
    assert len(wrong) > 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_of_equal_logits_the_first_is_chosen_as_generate_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (7, 65, 5000):
        logits_BNV = torch.randint(0, 4, (3, 5, size), generator=generator).to(dtype)
        chance = Chance([SamplingParams()] * 3, [1] * 3, HashDraws(), "cpu")
        found_BN = Laws(logits_BNV, torch.zeros(1, 5, dtype=torch.long), chance).choice_BN
        first = [[row.tolist().index(row.max().item()) for row in rows] for rows in logits_BNV]
        assert found_BN.tolist() == first == logits_BNV.argmax(-1).tolist()
