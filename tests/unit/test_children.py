"""Children chosen from a drafter's laws: distinct, from the law recorded, in rows that sample alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from medusa.drafters.children import Brood, Drafting, Picked, likeliest, pick, sampled_tree
from medusa.errors import UserError
from medusa.lawkit import chi_square
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.tree import Shape, Topology

V = 7
TREE = Topology.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0]])


def chance_of(rows: int, temperature: float = 1.0, start: int = 0) -> Chance:
    params = [SamplingParams(temperature=temperature, seed=start + seed) for seed in range(rows)]
    return Chance(params, [9] * rows, HashDraws(), "cpu")


def brood_of(topology: Topology = TREE) -> Brood:
    return Brood(topology, sorted(set(topology.parents[1:])), torch.device("cpu"))


def logits_of(rows: int, ways: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, ways, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def siblings(brood: Brood, picked: Picked, row: int) -> dict[int, list[int]]:
    """Tokens of each parent's children, in order."""
    found: dict[int, list[int]] = {}
    for way, token in zip(brood.way_n.tolist(), picked.tokens_Bn[row].tolist(), strict=True):
        found.setdefault(way, []).append(token)
    return found


@pytest.mark.parametrize("mode", ["sampled", "mixed"])
def test_siblings_are_distinct_and_of_their_law(mode: str) -> None:
    brood, logits = brood_of(), logits_of(50, 5)
    picked = pick(logits, brood, chance_of(50), Drafting(mode))
    assert picked.valid_Bn.all()
    for row in range(50):
        for tokens in siblings(brood, picked, row).values():
            assert len(set(tokens)) == len(tokens)
    if mode == "sampled":
        assert picked.sampled_Bn.all()
        torch.testing.assert_close(picked.q_BWV, logits.softmax(-1))
        return
    # the likeliest ones first, the last drawn from what they leave
    top = logits.argsort(-1, descending=True)
    assert picked.sampled_Bn[0].tolist() == brood.last_n.tolist()
    assert torch.equal(picked.tokens_Bn[:, :2], top[:, 0, :2])
    assert (picked.q_BWV[:, 0].gather(-1, top[:, 0, :2]) == 0).all()
    torch.testing.assert_close(
        picked.q_BWV[:, 0].gather(-1, top[:, 0, 2:]), logits[:, 0].softmax(-1).gather(-1, top[:, 0, 2:])
    )


def test_children_are_drawn_without_replacement() -> None:
    # the law of ordered pairs: q(x) q(y) / (1 - q(x))
    rows, topology = 6000, Topology.full([2])
    logits = logits_of(1, 1).expand(rows, -1, -1)
    picked = pick(logits, brood_of(topology), chance_of(rows), Drafting())
    q = logits[0, 0].softmax(-1).tolist()
    pairs = Counter(a * V + b for a, b in picked.tokens_Bn.tolist())
    law = [0.0 if a == b else q[a] * q[b] / (1 - q[a]) for a in range(V) for b in range(V)]
    assert chi_square(pairs, law) > 1e-3


def test_the_draft_temperature_scales_the_rows_own() -> None:
    logits = logits_of(2, 5)
    params = [SamplingParams(temperature=0.5, seed=1), SamplingParams(temperature=2.0, seed=1)]
    chance = Chance(params, [9, 9], HashDraws(), "cpu")
    q_BWV = pick(logits, brood_of(), chance, Drafting(temperature=1.5)).q_BWV
    torch.testing.assert_close(q_BWV[0], (logits[0] / 0.75).softmax(-1))
    torch.testing.assert_close(q_BWV[1], (logits[1] / 3.0).softmax(-1))


def test_greedy_rows_take_the_likeliest() -> None:
    brood, logits = brood_of(), logits_of(3, 5)
    params = [SamplingParams(temperature=1.0, seed=5), SamplingParams(), SamplingParams(temperature=1.0, seed=6)]
    picked = pick(logits, brood, Chance(params, [9] * 3, HashDraws(), "cpu"), Drafting())
    assert torch.equal(picked.tokens_Bn[1], likeliest(logits, brood)[1])
    assert not picked.sampled_Bn[1].any() and picked.valid_Bn[1].all()
    assert picked.sampled_Bn[[0, 2]].all()


@pytest.mark.parametrize("mode", ["sampled", "mixed"])
def test_a_law_that_is_exhausted_leaves_fillers(mode: str) -> None:
    logits = torch.full((1, 1, V), -torch.inf).double()
    logits[..., 2], logits[..., 5] = 1.0, 0.0
    picked = pick(logits, brood_of(Topology.full([4])), chance_of(1), Drafting(mode))
    if mode == "sampled":
        assert picked.valid_Bn.tolist() == [[True, True, False, False]]
        assert set(picked.tokens_Bn[0, :2].tolist()) == {2, 5}
    else:
        assert picked.valid_Bn.tolist() == [[True, True, True, False]]
    assert ((picked.tokens_Bn >= 0) & (picked.tokens_Bn < V)).all()


def test_a_tree_carries_each_parents_law() -> None:
    brood = brood_of()
    picked = pick(logits_of(2, 5), brood, chance_of(2), Drafting())
    tree = sampled_tree(Shape.static(TREE, "cpu"), torch.tensor([[3], [4]]), [picked], V + 2)
    assert tree.q_BNV is not None and tree.sampled_BN is not None
    assert tree.tokens_BN[:, 0].tolist() == [3, 4] and not tree.sampled_BN[:, 0].any() and tree.valid_BN.all()
    assert torch.equal(tree.q_BNV[:, brood.parent_W, :V], picked.q_BWV)  # the very numbers
    assert not tree.q_BNV[..., V:].any()  # ids that can't be drafted


@pytest.mark.parametrize(("options", "word"), [({"mode": "sample"}, "sampled"), ({"temperature": 0.0}, "above 0")])
def test_bad_options_are_named(options: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        Drafting(**options)  # type: ignore[arg-type]
