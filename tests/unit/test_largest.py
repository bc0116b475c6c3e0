"""Where the largest values stand: by our own C++, and by torch where there is no compiler."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa import largest as module
from medusa.accept import DeterministicRule
from medusa.largest import SOME, largest, ranked, ranked_laws, walk
from medusa.laws import Laws
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import random_topology
from medusa.tree import DraftTree, Shape

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a compiler and without."""
    if request.param == "torch":
        monkeypatch.setattr(module, "native", lambda: None)
    elif module.native() is None:
        pytest.skip("no compiler")
    way: str = request.param
    return way


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, SOME + 7])  # looked at, or handed to numpy
def test_the_largest_is_the_first_of_equals(columns: int, dtype: torch.dtype, way: str) -> None:
    values = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 1] = 0.25
    values[0, 2, columns // 2] = values[0, 2, columns - 1] = 9
    values[1, 1, columns // 2] = torch.nan  # as torch has it, the largest
    values[1, 2] = -torch.inf
    expected = values.max(-1).indices
    assert torch.equal(largest(values), expected)
    assert largest(values[0, 2]) == expected[0, 2]
    assert torch.equal(largest(values[..., ::2]), values[..., ::2].max(-1).indices)
    assert torch.equal(largest(values[..., : columns // 2 + 1]), values[..., : columns // 2 + 1].max(-1).indices)
    assert torch.equal(largest(values.transpose(0, 1)), expected.T)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Rows of distinct values, many of which share a block's largest place, and how many are asked for."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 400))
    dtype = draw(st.sampled_from(DTYPES[:3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    order = torch.stack([torch.randperm(columns, generator=generator) for _ in range(rows)])
    values = (order.double() / 8 if dtype is not torch.bfloat16 else order.double() % 256).to(dtype)
    return values, draw(st.integers(1, min(columns, 20)))


@settings(deadline=None, max_examples=60)
@given(matrices())
def test_ranks_are_those_of_a_stable_sort(given_: tuple[Tensor, int]) -> None:
    values, ranks = given_
    if module.native() is None:
        pytest.skip("no compiler")
    assert torch.equal(ranked(values, ranks), values.sort(dim=-1, descending=True, stable=True).indices[:, :ranks])


def test_ranks_count_nan_first_and_reach_minus_infinity(way: str) -> None:
    values = torch.full((1, 300), -torch.inf)
    values[0, 200], values[0, 250] = 1.0, torch.nan
    assert ranked(values, 3)[0, :2].tolist() == [250, 200]
    assert len(set(ranked(values, 300)[0].tolist())) == 300


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperatures", [(1.0,), (0.5, 1.0, 3.0)])
def test_laws_are_those_of_the_softmax(temperatures: tuple[float, ...], dtype: torch.dtype, way: str) -> None:
    logits = (20 * torch.randn(2, 3, 701, generator=torch.Generator().manual_seed(1), dtype=torch.double)).to(dtype)
    logits[1, 0, 5] = -torch.inf
    warm = torch.tensor(temperatures, dtype=torch.double)[:, None]
    bound = 1e-12 if dtype is torch.float64 else 1e-5
    for some in (logits, logits[..., :700], logits[1:, :, :700]):  # whole, and slices: of two rows, of one
        found, at = ranked_laws(some, 4, temperatures)
        expected = (some.double() / warm).log_softmax(-1).gather(-1, at)
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)
        assert torch.equal(some.gather(-1, at), some.topk(4).values)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 3), st.booleans(), st.sampled_from(DTYPES[:3]), st.integers(0, 999))
def test_walks_are_those_that_look_at_every_node(
    size: int, rows: int, shared: bool, dtype: torch.dtype, seed: int
) -> None:
    if module.native() is None:
        pytest.skip("no compiler")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [random_topology(rng, size, ranks=4).parents for _ in range(1 if shared else rows)]
    shape, logits_BNV = Shape.of(torch.tensor(shapes)), torch.randn(rows, size, 4, generator=generator).to(dtype)
    tokens_BN = torch.randint(4, (rows, size), generator=generator)
    valid_BN = torch.rand(rows, size, generator=generator) < 0.8
    tree = DraftTree(shape, tokens_BN, valid_BN)
    chance = Chance([SamplingParams()] * rows, [1] * rows, HashDraws(), "cpu")
    found = DeterministicRule()(tree, Laws(logits_BNV, shape.depths, chance))
    assert found.walks is not None and walk(logits_BNV, shape.parents, tokens_BN, valid_BN) == list(found.walks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "native", lambda: None)
        expected = DeterministicRule()(tree, Laws(logits_BNV, shape.depths, chance))
    assert list(found.walks) == list(expected.walks or ())
    for part in ("path_BA", "last_B", "next_token_B", "length_B"):
        assert torch.equal(getattr(found, part), getattr(expected, part)), part


@pytest.mark.parametrize("ranks", [-1, 6])
def test_more_ranks_than_values_are_refused(ranks: int, way: str) -> None:
    for ask in (lambda: ranked(torch.zeros(2, 5), ranks), lambda: ranked_laws(torch.zeros(1, 2, 5), ranks, [1.0])):
        with pytest.raises(RuntimeError):
            ask()


def test_parents_may_lie_anyhow() -> None:
    if module.native() is None:
        pytest.skip("no compiler")
    parents = torch.tensor([[0, 0, 1], [0, 0, 0]])
    given = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2]] * 2), torch.ones(2, 3).bool()
    given[0].zero_()[:, 0, 1] = given[0][:, 1, 2] = 1.0  # down to node 1, and on only where node 2 hangs below it
    expected = [([0, 1, 2], [1, 2, 0]), ([0, 1], [1, 2])]
    apart = parents.T.contiguous().T
    assert walk(given[0], parents, *given[1:]) == walk(given[0], apart, *given[1:]) == expected
    shared = parents[:1].expand(2, -1)
    assert walk(given[0], shared, *given[1:]) == [expected[0]] * 2


def test_a_law_of_one_token_is_certain(way: str) -> None:
    logits = torch.full((1, 1, 40), -torch.inf)
    logits[0, 0, 7] = 3.0
    found, at = ranked_laws(logits, 1, [1.0])
    assert at.tolist() == [[[7]]] and found.item() == pytest.approx(0.0, abs=1e-12)
