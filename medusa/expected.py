"""What speculation is expected to bring, by arithmetic alone: tokens per step, steps, time, speedup.

A *share* of depth d is the share of steps that accept d drafted tokens or more. Of a tree it is the sum of the shares
of its nodes at that depth, counted jointly; of a chain whose every token is accepted with probability a, independently
of the others, it is a^d (Leviathan et al. 2023, definition 3.1 and its assumption).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from medusa.errors import UserError

BISECTIONS = 60  # an interval of 1 halved so often is below what a float tells apart
SETTLED = 4096  # tokens after which each further one takes 1 / tokens per step, to many digits


def check_alpha(alpha: float) -> None:
    """Refuse an acceptance rate that is none. Raises UserError outside of 0..1, and for 1 itself."""
    if not 0 <= alpha < 1:
        raise UserError(
            f"alpha={alpha}: the share of drafted tokens that are accepted is at least 0 and below 1 (at 1 the draft"
            " would be the trunk)"
        )


def check_cost(cost: float) -> None:
    """Refuse a cost ratio of 0 or less, or none. Raises UserError."""
    if not 0 < cost < float("inf"):
        raise UserError(f"cost={cost}: give what drafting a token costs, as a share of a trunk forward, above 0")


def chain_shares(alpha: float, drafted: int) -> list[float]:
    """The shares of depths 1 to ``drafted`` of a chain. Raises UserError as :func:`check_alpha`."""
    check_alpha(alpha)
    return [alpha**depth for depth in range(1, drafted + 1)]


def chain_tokens(alpha: float, drafted: int) -> float:
    """Expected tokens per step of a chain of ``drafted`` tokens: (1 - a^(N+1)) / (1 - a).

    Leviathan et al. 2023, equation 1. Raises UserError as :func:`check_alpha`.
    """
    check_alpha(alpha)
    return (1 - alpha ** (drafted + 1)) / (1 - alpha)


def chain_speedup(alpha: float, cost: float, drafted: int) -> float:
    """How many times faster than plain decoding such a chain is: (1 - a^(N+1)) / ((1 - a) (N c + 1)).

    Leviathan et al. 2023, theorem 3.8: the trunk scores all N + 1 positions in the time of one forward. Raises
    UserError as :func:`check_alpha` and :func:`check_cost`.
    """
    check_cost(cost)
    return chain_tokens(alpha, drafted) / (drafted * cost + 1)


def best_chain(alpha: float, cost: float, most: int) -> int:
    """The number of drafted tokens, up to ``most``, with the highest speedup; 0 where drafting does not pay."""
    return max(range(most + 1), key=lambda drafted: chain_speedup(alpha, cost, drafted))


def tree_tokens(shares: Sequence[float]) -> float:
    """Expected tokens per step from the shares of depths 1, 2, …: the trunk's own token, and what is accepted."""
    return 1 + sum(shares)


def equal_chain(tokens: float, depth: int) -> float:
    """The alpha at which a chain of ``depth`` brings so many tokens per step: equation 1 solved for it.

    At most ``depth`` + 1 tokens come of a step; a measurement of (nearly) that many gives an alpha just below 1.
    """
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tokens(middle, depth) < tokens else (low, middle)
    return low


def expected_steps(shares: Sequence[float], tokens: int) -> float:
    """Steps until ``tokens`` tokens are there, the last step's surplus being cut off.

    Steps are taken to be independent, so this is a renewal equation: E(n) = 1 + the sum over k of
    P(a step emits k) E(n - k). For many tokens it is about tokens / tokens per step; for a few it is more, since the
    last step wastes a part.
    """
    reached = [1.0, *shares, 0.0]
    emits = [here - deeper for here, deeper in pairwise(reached)]  # of 1, 2, … tokens
    steps = [0.0]
    for wanted in range(1, min(tokens, SETTLED) + 1):
        steps.append(1 + sum(chance * steps[wanted - k] for k, chance in enumerate(emits[: wanted - 1], start=1)))
    return steps[-1] + max(tokens - SETTLED, 0) / tree_tokens(shares)


def milestones(most: int) -> list[int]:
    """Numbers of tokens up to ``most``, four to each doubling: 1, 2, …, 8, 10, 12, 14, 16, …, and ``most`` itself."""
    found, power = {1, 2, 3, most}, 4
    while power <= most:
        found |= {power * quarters // 4 for quarters in (4, 5, 6, 7)}
        power *= 2
    return sorted(each for each in found if each <= most)


@dataclass(frozen=True)
class Milestone:
    """What it took until a text had so many tokens: steps after the prompt's reading, and the time of these."""

    tokens: int
    steps: float
    time: float


def milestones_of(pace: Sequence[tuple[int, float]]) -> list[Milestone]:
    """Of one text from the tokens that it had, and when, after its prompt's reading and after each step since.

    A number that a step went beyond was reached with that step: what a limit there would have cut off is paid for.
    """
    _, first = pace[0]
    found, step = [], 0
    for tokens in milestones(pace[-1][0]):
        while pace[step][0] < tokens:
            step += 1
        found.append(Milestone(tokens, step, pace[step][1] - first))
    return found


def typical(texts: Sequence[Sequence[Milestone]]) -> list[Milestone]:
    """Medians over texts at each number of tokens. A text that ended before has taken what it took until there."""
    marks = sorted({each.tokens for text in texts for each in text})
    rows = [[at(text, mark, ended=True) for text in texts] for mark in marks]
    return [
        Milestone(mark, median(each.steps for each in row), median(each.time for each in row))
        for mark, row in zip(marks, rows, strict=True)
    ]


def at(text: Sequence[Milestone], tokens: int, ended: bool = False) -> Milestone:
    """What ``tokens`` tokens take: on straight lines between milestones.

    Acceptance changes along a text (greedy ones come to repeat themselves), and so does a step's time, so neither the
    whole text's shares nor its mean step serve for a beginning of it. Beyond its last milestone a text that was not
    ``ended`` goes on as in its second half, which is the best there is to know of what follows.
    """
    last = text[-1]
    if tokens >= last.tokens:
        middle = next(each for each in text if each.tokens > last.tokens // 2)  # no part of the first half counts
        if ended or middle == last:
            return last
        more = (tokens - last.tokens) / (last.tokens - middle.tokens)
        return Milestone(
            tokens, last.steps + more * (last.steps - middle.steps), last.time + more * (last.time - middle.time)
        )
    steps = interpolate([(each.tokens, each.steps) for each in text], tokens)
    return Milestone(tokens, steps, interpolate([(each.tokens, each.time) for each in text], tokens))


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at ``at`` on straight lines between ``points``, of which two or more; outside, on the nearest line.

    Outside a falling line counts as level: of what is measured here, nothing becomes cheaper by being more.
    """
    points = sorted(points)
    pairs = list(pairwise(points))
    (left, low), (right, high) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    slope = (high - low) / (right - left)
    if at >= right:  # exact where it was measured
        return high + max(slope, 0.0) * (at - right)
    if at < left:
        return low - max(slope, 0.0) * (left - at)
    return low + slope * (at - left)
