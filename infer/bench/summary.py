"""What the benchmark's runs come to: totals, speedups with their intervals, acceptance by depth, repetition."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

from medusa.expected import milestones_of

from .measure import Run

T = TypeVar("T")
RESAMPLES = 2000  # of the bootstrap: the ends of a 95 % interval then rest on 50 samples each


def summary(rows: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Totals over all runs of one contender. Tokens per step = tokens after the first / forwards after the prefill."""
    runs = [run for row in rows for run in row]
    tokens, seconds = sum(len(run.ids) for run in runs), sum(run.seconds for run in runs)
    result: dict[str, Any] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1e3 * seconds / tokens,
        "tokens_per_step": (tokens - len(runs)) / sum(run.steps for run in runs),
        "prefill_ms": None,
        "decode_ms_per_token": None,
    }
    prefills = [run.prefill_seconds for run in runs if run.prefill_seconds is not None]
    if prefills:
        result["prefill_ms"] = 1e3 * median(prefills)
        result["decode_ms_per_token"] = 1e3 * (seconds - sum(prefills)) / (tokens - len(runs))
    return result


def speedup(runs: dict[str, list[list[Run]]], of: str, over: str, seed: int) -> dict[str, Any]:
    """How many times faster ``of`` is than ``over``: median over prompts, with a bootstrap 95 % interval over them.

    A prompt's own ratio is the median over repeats of the ratio of two runs that stood next to each other in time.
    """
    ratios = [
        median(slow.seconds / fast.seconds for slow, fast in zip(*pair, strict=True))
        for pair in zip(runs[over], runs[of], strict=True)
    ]
    low, high = interval(ratios, median, seed)
    return {"of": of, "over": over, "median": median(ratios), "low": low, "high": high}


def interval(values: Sequence[T], statistic: Callable[[Sequence[T]], float], seed: int) -> tuple[float, float]:
    """The 95 % interval of a statistic of ``values`` by the percentiles of a bootstrap (Efron 1979)."""
    rng = random.Random(seed)
    samples = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return samples[round(0.025 * RESAMPLES)], samples[round(0.975 * RESAMPLES) - 1]


def accepted_by_depth(rows: Sequence[Sequence[Run]]) -> dict[str, list[float]]:
    """``share[d-1]``: share of steps that accept d drafted tokens or more; ``conditional``: of those that accept d-1.

    Both end at the greatest depth that any step reached.
    """
    return by_depth([count for row in rows for run in row for count in run.accepted])


def by_depth(accepted: Sequence[int]) -> dict[str, list[float]]:
    """The same of what each step accepted."""
    at_least = [sum(count >= depth for count in accepted) for depth in range(max(accepted, default=0) + 1)]
    return {
        "share": [count / len(accepted) for count in at_least[1:]],
        "conditional": [count / before for before, count in pairwise(at_least)],
    }


def repeated(texts: Sequence[Sequence[int]], n: int) -> float:
    """Share of repeated n-grams, 1 - distinct / all, averaged over texts: text that loops is easy to draft."""
    shares = []
    for text in texts:
        grams = [tuple(text[start : start + n]) for start in range(len(text) - n + 1)]
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return sum(shares) / len(shares)


def paced(pace: Sequence[tuple[int, float]]) -> list[list[float]]:
    """A run's milestones as JSON holds them: tokens, steps until there, seconds of these."""
    return [[each.tokens, each.steps, each.time] for each in milestones_of(pace)] if pace else []
