"""Expected tokens, steps and speedups: the formulas against sums, simulations and the paper's own statements."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa.errors import UserError
from medusa.expected import (
    SETTLED,
    Milestone,
    at,
    best_chain,
    chain_shares,
    chain_speedup,
    chain_tokens,
    equal_chain,
    expected_steps,
    interpolate,
    milestones,
    milestones_of,
    tree_tokens,
    typical,
)

ALPHA = st.floats(0, 0.99)
DRAFTED = st.integers(0, 20)
COST = st.floats(0.001, 2)
SHARES = st.lists(st.floats(0, 1), max_size=6).map(lambda values: sorted(values, reverse=True))


@given(ALPHA, DRAFTED)
def test_a_chain_is_a_tree_whose_shares_are_powers(alpha: float, drafted: int) -> None:
    assert chain_tokens(alpha, drafted) == pytest.approx(tree_tokens(chain_shares(alpha, drafted)))


def test_figures_of_the_paper() -> None:
    # Leviathan et al. 2023, table 1: alpha, gamma -> operations and speed at c = 0.
    for alpha, drafted, speed in ((0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71)):
        assert chain_speedup(alpha, 1e-12, drafted) == pytest.approx(speed, abs=0.006)


@given(ALPHA, COST, DRAFTED)
def test_speedup_is_tokens_over_the_time_of_a_step(alpha: float, cost: float, drafted: int) -> None:
    expected = (1 - alpha ** (drafted + 1)) / ((1 - alpha) * (drafted * cost + 1))  # theorem 3.8 as printed
    assert chain_speedup(alpha, cost, drafted) == pytest.approx(expected)


@given(ALPHA, COST)
def test_drafting_pays_where_alpha_exceeds_the_cost_and_only_there(alpha: float, cost: float) -> None:
    best = best_chain(alpha, cost, 16)
    assert chain_speedup(alpha, cost, best) == max(chain_speedup(alpha, cost, drafted) for drafted in range(17))
    if abs(alpha - cost) > 1e-9:
        assert (best > 0) == (alpha > cost)  # corollary 3.9
    if best:
        assert chain_speedup(alpha, cost, best) >= (1 + alpha) / (1 + cost) - 1e-12  # the same corollary's bound


def test_best_numbers_of_the_usual_alphas() -> None:
    assert [best_chain(alpha, 0.1, 16) for alpha in (0.5, 0.7, 0.85)] == [2, 4, 7]


@given(ALPHA, st.integers(1, 12))
def test_the_equal_chain_brings_the_same_tokens(alpha: float, depth: int) -> None:
    tokens = chain_tokens(alpha, depth)
    assert chain_tokens(equal_chain(tokens, depth), depth) == pytest.approx(tokens)


def test_the_equal_chain_of_more_than_a_chain_can_bring_stays_an_alpha() -> None:
    assert 0.999 < equal_chain(4.0, 3) < 1
    assert equal_chain(1.0, 3) == pytest.approx(0)


@given(SHARES, st.integers(0, 12))
def test_steps_are_those_of_a_simulation_in_full(shares: list[float], tokens: int) -> None:
    reached = [1.0, *shares, 0.0]

    def steps(left: int) -> float:
        if left <= 0:
            return 0.0
        chances = [reached[k] - reached[k + 1] for k in range(len(shares) + 1)]
        # steps that emit as much as is left, or more, are the last
        return 1 + sum(chance * steps(left - k) for k, chance in enumerate(chances, start=1) if k < left and chance)

    tokens = min(tokens, 7)
    assert expected_steps(shares, tokens) == pytest.approx(steps(tokens))


def test_steps_of_drawn_runs() -> None:
    shares, tokens, draw, runs = [0.7, 0.4, 0.2], 23, random.Random(0), 20_000
    taken = 0
    for _ in range(runs):
        left = tokens
        while left > 0:
            at = draw.random()
            left -= 1 + sum(at < share for share in shares)
            taken += 1
    assert expected_steps(shares, tokens) == pytest.approx(taken / runs, rel=0.01)


def test_a_short_output_takes_whole_steps() -> None:
    assert expected_steps([1.0, 1.0], 1) == 1
    assert expected_steps([1.0, 1.0], 4) == 2
    assert expected_steps([0.5], 0) == 0
    assert expected_steps([], 7) == 7


def test_long_outputs_go_on_as_they_went() -> None:
    shares = [0.8, 0.5, 0.1]
    before, after = expected_steps(shares, SETTLED), expected_steps(shares, SETTLED + 2400)
    assert after - before == pytest.approx(1000)
    assert before - expected_steps(shares, SETTLED - 2400) == pytest.approx(1000)
    assert expected_steps(shares, 10**9) == pytest.approx(10**9 / 2.4, rel=1e-6)


def test_interpolation_goes_through_points_and_on_along_the_last_line() -> None:
    points = [(4.0, 14.0), (1.0, 11.0), (2.0, 11.5)]
    assert [interpolate(points, at) for at in (1, 2, 3, 4)] == [11, 11.5, 12.75, 14]
    assert interpolate(points, 8) == 19
    assert interpolate(points, 0) == 10.5


def test_a_falling_line_is_level_outside() -> None:
    points = [(1.0, 3.0), (2.0, 2.0)]
    assert [interpolate(points, at) for at in (0, 1.5, 4)] == [3, 2.5, 2]


def test_milestones_are_four_to_a_doubling_and_the_end() -> None:
    assert milestones(1) == [1]
    assert milestones(2) == [1, 2]
    assert milestones(25) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 25]


PACE = [(1, 0.5), (4, 1.5), (5, 3.5), (11, 4.0)]  # tokens, seconds since the start


def test_a_milestone_is_reached_with_the_step_that_goes_beyond_it() -> None:
    found = {each.tokens: (each.steps, each.time) for each in milestones_of(PACE)}
    assert found == {
        **{1: (0, 0), 2: (1, 1.0), 3: (1, 1.0), 4: (1, 1.0), 5: (2, 3.0)},
        **{6: (3, 3.5), 7: (3, 3.5), 8: (3, 3.5), 10: (3, 3.5), 11: (3, 3.5)},
    }


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 3)), min_size=1, max_size=40), st.integers(1, 250))
def test_a_text_takes_what_was_measured_and_never_less_for_more(steps: list[tuple[int, float]], tokens: int) -> None:
    pace = [(1, 0.0)]
    for more, taken in steps:
        pace.append((pace[-1][0] + more, pace[-1][1] + taken))
    text = milestones_of(pace)
    for each in text:
        assert at(text, each.tokens) == each
        assert (each.steps, each.time) == next(
            (step, when) for step, (reached, when) in enumerate(pace) if reached >= each.tokens
        )
    here, next_ = at(text, tokens), at(text, tokens + 1)
    assert next_.steps >= here.steps and next_.time >= here.time - 1e-9
    if tokens >= pace[-1][0]:
        assert at(text, tokens, ended=True) == text[-1]


def test_a_text_goes_on_as_in_its_second_half() -> None:
    # 100 steps of a token and 2 ms, then 20 steps of 5 tokens and 3 ms: it has come to repeat itself.
    pace = [(1 + step, 2.0 * step) for step in range(101)]
    pace += [(101 + 5 * step, 200 + 3.0 * step) for step in range(1, 21)]
    text = milestones_of(pace)
    assert at(text, 48).steps == pytest.approx(47) and at(text, 48).time == pytest.approx(94)
    longer = at(text, 501)
    assert longer.steps == pytest.approx(180, rel=0.02) and longer.time == pytest.approx(440, rel=0.02)
    assert expected_steps([0.4] * 4, 47) < 20  # what the shares of the whole text would say of its beginning


def test_what_is_typical_is_the_median_of_texts_also_of_those_that_ended() -> None:
    texts = [[Milestone(1, 0, 0.0), Milestone(9, steps, 2.0 * steps)] for steps in (8, 4, 3)]
    ended = [Milestone(1, 0, 0.0), Milestone(5, 2, 4.0)]
    assert typical(texts) == [Milestone(1, 0, 0.0), Milestone(9, 4, 8.0)]
    assert typical([*texts[:2], ended]) == [Milestone(1, 0, 0.0), Milestone(5, 2, 4.0), Milestone(9, 4, 8.0)]
    assert at(typical([ended[:1]]), 7) == Milestone(1, 0, 0.0)


@pytest.mark.parametrize("alpha", [-0.1, 1.0, 1.2, float("nan")])
def test_no_acceptance_rate(alpha: float) -> None:
    with pytest.raises(UserError, match="alpha="):
        chain_tokens(alpha, 3)


@pytest.mark.parametrize("cost", [0.0, -0.1, float("inf"), float("nan")])
def test_no_cost(cost: float) -> None:
    with pytest.raises(UserError, match="cost="):
        chain_speedup(0.5, cost, 3)
