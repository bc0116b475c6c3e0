"""Rules for sampled trees: by hand, against an independent speculative sampling, at temperature 0; the lossy one."""

from __future__ import annotations

import math
import random

import pytest
import torch

from medusa.accept import DeterministicRule
from medusa.errors import UserError
from medusa.lawkit import Constant
from medusa.laws import Laws
from medusa.rules import RecursiveRule, TypicalRule
from medusa.sampling import ACCEPT, TOKEN, Chance, HashDraws, Key, SamplingParams, draw
from medusa.testing import random_topology
from medusa.tree import DraftTree, Shape, Topology

V = 4


def laws_of(p_BNV: torch.Tensor, tree: DraftTree, number: float | None = None, seeds: list[int] | None = None) -> Laws:
    rows = len(p_BNV)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds or range(rows)]
    draws = HashDraws() if number is None else Constant(number)
    return Laws.given(p_BNV, tree.shape.depths, Chance(params, [3] * rows, draws, "cpu"))


def tree_of(
    parents: list[int], tokens: list[int], q: list[list[float]] | None = None, sampled: list[int] | None = None
) -> DraftTree:
    """One row; ``q`` is the root's law."""
    count = len(parents)
    q_BNV = None if q is None else torch.tensor([q + [[0.0] * V] * (count - len(q))]).double()
    sampled_BN = None if sampled is None else torch.tensor([sampled]).bool()
    shape = Shape.of(torch.tensor([parents]))
    return DraftTree(shape, torch.tensor([tokens]), torch.ones(1, count).bool(), sampled_BN, q_BNV)


def outcome(rule: RecursiveRule, tree: DraftTree, p: list[float], number: float) -> tuple[int, int]:
    """The child accepted (0 for none) and the next token, when every node has law ``p``."""
    p_BNV = torch.tensor(p).double().expand(1, tree.size, V)
    acceptance = rule(tree, laws_of(p_BNV, tree, number))
    return int(acceptance.last_B[0]), int(acceptance.next_token_B[0])


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.49, (1, 1)),  # below p(0) / q(0) = 0.5: accepted, then a draw of p
        (0.51, (2, 1)),  # p becomes (0, .375, .25, 0) / .625, q (0, .5, .5, 0): .6 / .5 is accepted for sure
        (0.99, (2, 3)),
    ],
)
def test_two_sampled_children_by_hand(number: float, expected: tuple[int, int]) -> None:
    tree = tree_of([-1, 0, 0], [2, 0, 1], [[0.5, 0.25, 0.25, 0.0]], [0, 1, 1])
    assert outcome(RecursiveRule(), tree, [0.25, 0.5, 0.125, 0.125], number) == expected


def test_a_deterministic_child_is_accepted_with_its_own_probability() -> None:
    tree = tree_of([-1, 0, 0], [2, 0, 1])
    law = [0.25, 0.25, 0.5, 0.0]
    assert outcome(RecursiveRule(), tree, law, 0.24)[0] == 1
    assert outcome(RecursiveRule(), tree, law, 0.3)[0] == 2  # of what is left it has a third
    assert outcome(RecursiveRule(), tree, law, 0.34) == (0, 2)  # neither: both are gone


def test_a_residual_of_nothing_keeps_the_law() -> None:
    # a number at the top of its range, a law that equals the draft's
    law = [0.1, 0.2, 0.3, 0.4]
    for token in range(V):
        tree = tree_of([-1, 0], [2, token], [law], [0, 1])
        child, following = outcome(RecursiveRule(), tree, law, 1 - 2**-53)
        assert child == 1 and following == 3


def test_a_draft_of_probability_0_is_passed_over() -> None:
    # whatever a drafter claims: q(x) = 0 can't have been drawn
    tree = tree_of([-1, 0], [2, 3], [[0.5, 0.5, 0.0, 0.0]], [0, 1])
    assert outcome(RecursiveRule(), tree, [0.0, 0.0, 0.5, 0.5], 0.0) == (0, 2)


def test_fillers_are_passed_over() -> None:
    tree = tree_of([-1, 0, 0], [2, 0, 1], [[0.5, 0.25, 0.25, 0.0]], [0, 1, 1])
    tree.valid_BN[0, 1] = False
    p_BNV = torch.tensor([0.25, 0.5, 0.125, 0.125]).double().expand(1, 3, V)
    assert RecursiveRule()(tree, laws_of(p_BNV, tree, 0.0)).last_B.tolist() == [2]


def speculative_sampling(
    drafts: list[int], q: list[list[float]], p: list[list[float]], accepts: list[float], final: list[float]
) -> tuple[int, int]:
    """Leviathan et al. 2023, algorithm 1, in plain Python: how many drafts are kept, and the token after them."""
    for n, token in enumerate(drafts):
        if not accepts[n] < p[n][token] / q[n][token]:
            rest = [max(0.0, a - b) for a, b in zip(p[n], q[n], strict=True)]
            return n, invert(rest, final[n])
    return len(drafts), invert(p[len(drafts)], final[len(drafts)])


def invert(weights: list[float], number: float) -> int:
    below = 0.0
    for token, weight in enumerate(weights):
        below += weight
        if number * sum(weights) < below:
            return token
    raise AssertionError


def test_a_chain_is_speculative_sampling() -> None:
    rows, depth = 400, 3
    generator = torch.Generator().manual_seed(0)
    p_BNV = torch.randn(rows, depth + 1, V, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    q_BNV = torch.randn(rows, depth + 1, V, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    drafts_BN = draw(q_BNV[:, :depth], torch.rand(rows, depth, generator=generator, dtype=torch.float64))
    tokens_BN = torch.cat([torch.zeros(rows, 1, dtype=torch.long), drafts_BN], 1)
    sampled_BN = torch.ones(rows, depth + 1).bool()
    tree = DraftTree(Shape.static(Topology.chain(depth), "cpu"), tokens_BN, sampled_BN, sampled_BN, q_BNV)
    acceptance = RecursiveRule()(tree, laws_of(p_BNV, tree))
    places = torch.tensor([[3, 4, 5, 6]] * rows)
    accepts = HashDraws().uniform(Key(torch.arange(rows), places, ACCEPT)).tolist()
    finals = HashDraws().uniform(Key(torch.arange(rows), places, TOKEN)).tolist()
    kept = set()
    for row in range(rows):
        expected = speculative_sampling(
            drafts_BN[row].tolist(), q_BNV[row].tolist(), p_BNV[row].tolist(), accepts[row], finals[row]
        )
        assert (int(acceptance.last_B[row]), int(acceptance.next_token_B[row])) == expected
        kept.add(expected[0])
    assert kept == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", range(8))
def test_at_temperature_0_it_is_the_greedy_walk(seed: int) -> None:
    # rows of any topology, deterministic and sampled children, fillers
    rng, generator, rows, size = random.Random(seed), torch.Generator().manual_seed(seed), 16, 9
    shape = Shape.of(torch.tensor([random_topology(rng, size, ranks=3).parents for _ in range(rows)]))
    tokens_BN = torch.zeros(rows, size, dtype=torch.long)
    for row in range(rows):  # siblings hold distinct tokens
        for node in range(size):
            brood = [child for child in shape.children[row, node].tolist() if child >= 0]
            tokens_BN[row, brood] = torch.tensor(rng.sample(range(V), len(brood)), dtype=torch.long)
    valid_BN = torch.rand(rows, size, generator=generator) < 0.8
    sampled_BN = torch.rand(rows, size, generator=generator) < 0.5
    q_BNV = torch.rand(rows, size, V, generator=generator, dtype=torch.float64)
    choice_BN = torch.randint(V, (rows, size), generator=generator)
    p_BNV = torch.nn.functional.one_hot(choice_BN, V).double()
    for tree in (DraftTree(shape, tokens_BN, valid_BN), DraftTree(shape, tokens_BN, valid_BN, sampled_BN, q_BNV)):
        got, expected = RecursiveRule()(tree, laws_of(p_BNV, tree)), DeterministicRule()(tree, Laws.given(p_BNV))
        assert torch.equal(got.path_BA, expected.path_BA)
        assert torch.equal(got.next_token_B, expected.next_token_B)
        typical = TypicalRule()(tree, Laws.given(p_BNV))
        assert torch.equal(typical.path_BA, expected.path_BA)
        assert torch.equal(typical.next_token_B, expected.next_token_B)


def test_children_of_a_shape() -> None:
    shape = Shape.of(torch.tensor([[-1, 0, 0, 1, 0, 1, 3], [-1, 0, 1, 2, 3, 4, 5]]))
    assert shape.children[0, :4].tolist() == [[1, 2, 4], [3, 5, -1], [-1, -1, -1], [6, -1, -1]]
    assert shape.children[1].tolist() == [[child, -1, -1] for child in (1, 2, 3, 4, 5, 6, -1)]
    assert shape.widths == (3, 2, 1, 1, 1, 1)
    alone = Shape.static(Topology.root(), "cpu")
    assert alone.widths == () and (alone.children == -1).all()


def test_typical_acceptance_by_its_threshold() -> None:
    # threshold min(epsilon, delta * exp(-entropy)) of the node's own law, exceeded strictly
    law = [0.7, 0.2, 0.06, 0.04]
    entropy = -sum(p * math.log(p) for p in law)
    p_BNV = torch.tensor(law).double().expand(1, 2, V)
    for token in range(V):
        tree = tree_of([-1, 0], [2, token])
        for epsilon, delta in ((0.09, 0.3), (0.05, 1.0), (1.0, 0.3), (1.0, 0.05)):
            accepted = TypicalRule(epsilon, delta)(tree, laws_of(p_BNV, tree)).last_B.item() == 1
            assert accepted == (law[token] > min(epsilon, delta * math.exp(-entropy)))


def test_typical_acceptance_takes_the_longest_path_then_the_likeliest() -> None:
    law = torch.tensor([0.4, 0.35, 0.15, 0.1]).double()
    tree = tree_of([-1, 0, 0, 0, 1, 2], [2, 1, 0, 3, 1, 0])
    rule, p_BNV = TypicalRule(), law.expand(1, 6, V)
    assert rule(tree, laws_of(p_BNV, tree)).last_B.tolist() == [5]  # .4 * .4 over .35 * .35
    tree.valid_BN[0, 5] = False
    assert rule(tree, laws_of(p_BNV, tree)).last_B.tolist() == [4]  # the longer one
    tree.valid_BN[0, 4] = False
    assert rule(tree, laws_of(p_BNV, tree)).last_B.tolist() == [2]


def test_rules_say_whether_they_are_lossless() -> None:
    assert RecursiveRule.lossless and not TypicalRule.lossless


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"delta": 1.5}, {"epsilon": float("nan")}])
def test_typical_options_out_of_range_are_named(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        TypicalRule(**options)
