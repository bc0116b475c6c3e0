"""The exact-law kit: the law of what an engine emits, by enumerating every random choice, against the trunk's own.

It works on any engine that takes its random choices from :class:`medusa.sampling.Draws`: write a :data:`Run` for it.
Every choice of the default draws is a comparison with a uniform number of its key. The kit hands out intervals instead
of numbers, and halves them where a choice depends on where in the interval the number lies: the leaves are boxes that
tile the unit cube, and a box's volume is the probability of the text it leads to. So a number that is used twice, or
shared where it should not be, is seen too.

Sampled checks for larger vocabularies: :func:`chi_square`, :func:`ks_uniform`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from medusa.accept import AcceptRule
from medusa.decoding import Decoder, Request, decode
from medusa.drafters.base import Drafter
from medusa.errors import UserError
from medusa.sampling import Draws, HashDraws, Key, SamplingParams
from medusa.trunk import Trunk

# An engine under test: what comes out for each seed, when its random choices come from these draws. A key's seed_B
# must hold these seeds; the rows may stand in any order, and some may have left.
Run = Callable[[Draws, list[int]], Sequence[Sequence[Hashable]]]
Law = dict[tuple[Any, ...], float]
Box = dict[tuple[int, int, int], tuple[float, float]]  # (position, purpose, index) -> the interval of its number

NOTHING = 1e-14  # an interval so short comes of rounding
LARGEST = 1 - 2.0**-53  # the largest number that the default draws can give


class LawFault(ArithmeticError):
    """A choice was asked for with a probability that is not a number."""


class Boxes:
    """Draws that follow one box of the unit cube per seed, and split it where the choice is still open."""

    def __init__(self, boxes: list[Box]) -> None:
        self.boxes = boxes
        self.others: list[Box] = []  # the halves not followed

    def categorical(self, p_BNV: Tensor, key: Key) -> Tensor:
        """Invert the cumulative law."""
        edges_BNV = p_BNV.double().cumsum(-1)
        edges_BNV = torch.where(edges_BNV[..., -1:] == 0, 1.0, edges_BNV / edges_BNV[..., -1:])
        return self._choose(edges_BNV, key)

    def bernoulli(self, prob_BN: Tensor, key: Key) -> Tensor:
        """True where the number lies below the probability."""
        prob_BN = prob_BN.double().clamp(0, 1)
        return self._choose(torch.stack([prob_BN, torch.ones_like(prob_BN)], -1), key) == 0

    def _choose(self, edges_BNV: Tensor, key: Key) -> Tensor:
        if edges_BNV.isnan().any():
            raise LawFault("a probability that is not a number")
        seeds, positions = key.seed_B.tolist(), key.position_BN.expand(edges_BNV.shape[:2]).tolist()
        chosen = [
            [self._split(seed, (at, key.purpose, key.index), edges) for at, edges in zip(row, laws, strict=True)]
            for seed, row, laws in zip(seeds, positions, edges_BNV.tolist(), strict=True)
        ]
        return torch.tensor(chosen, device=edges_BNV.device)

    def _split(self, seed: int, name: tuple[int, int, int], edges: list[float]) -> int:
        box = self.boxes[seed]
        low, high = box.get(name, (0.0, 1.0))
        choice = bisect_right(edges, low + NOTHING)
        if edges[choice] < high - NOTHING:
            self.others.append({**box, name: (edges[choice], high)})
            high = edges[choice]
        box[name] = (low, high)
        return choice


def output_law(run: Run, *, batch: int = 256, limit: int = 100_000) -> Law:
    """The exact law of what ``run`` gives.

    Args:
        batch: how many leaves are followed at once; 1 for an engine whose rows depend on each other.
        limit: the most leaves to follow.

    Raises:
        UserError: there are more leaves than that.
        LawFault: a probability was not a number.
    """
    law: Law = defaultdict(float)
    pending: list[Box] = [{}]
    leaves = 0
    while pending:
        draws = Boxes([pending.pop() for _ in range(min(batch, len(pending)))])
        for box, outcome in zip(draws.boxes, run(draws, list(range(len(draws.boxes)))), strict=True):
            law[tuple(outcome)] += math.prod(high - low for low, high in box.values())
        pending += draws.others
        leaves += len(draws.boxes)
        if leaves > limit:
            raise UserError(f"more than {limit} leaves: take a smaller vocabulary, tree or horizon")
    return dict(law)


def trunk_law(next_law: Callable[[tuple[int, ...]], Sequence[float]], tokens: int) -> Law:
    """The law of the next ``tokens`` tokens, by multiplying the laws that ``next_law`` gives after each beginning."""
    law: Law = {(): 1.0}
    for _ in range(tokens):
        law = {
            (*text, token): weight * p
            for text, weight in law.items()
            for token, p in enumerate(next_law(text))
            if p > 0
        }
    return law


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """The largest difference of two laws' probabilities."""
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other})


def judge(run: Run, truth: Law, *, tolerance: float = 1e-9, batch: int = 256, limit: int = 100_000) -> str | None:
    """What is wrong with an engine's output law, in a line; None if nothing is.

    Beside the exact law, the smallest and the largest numbers that can be drawn must give a possible text: such a
    number has no volume, and yet it comes.
    """
    try:
        law = output_law(run, batch=batch, limit=limit)
        for number in (0.0, LARGEST):
            text = tuple(run(Constant(number), [0])[0])
            if truth.get(text, 0.0) <= 0:
                return f"uniform number {number}: emits {text}, which has probability 0"
    except LawFault as error:
        return str(error)
    off = distance(law, truth)
    return None if off <= tolerance else f"the law is off by {off:.3g}"


class Constant(HashDraws):
    """Draws whose numbers are given, whatever they are for: one for all, or one per node [B, N]."""

    def __init__(self, number: float | Tensor) -> None:
        self.number = torch.as_tensor(number, dtype=torch.float64)

    def uniform(self, key: Key) -> Tensor:
        """The number."""
        return self.number.to(key.position_BN.device).expand(key.position_BN.shape)


def decoder_run(
    trunk: Trunk,
    drafter: Drafter,
    prompt: Sequence[int],
    tokens: int,
    rule: AcceptRule | None = None,
    sampling: SamplingParams | None = None,
    most: int | None = None,
    **asked: Any,
) -> Run:
    """Our own engine under test: the next ``tokens`` tokens of ``prompt``, at ``most`` so many rows at once.

    ``asked`` are further fields of :class:`medusa.decoding.Request`, such as ``processing``.
    """

    request = _requests(prompt, tokens, sampling, asked)

    def run(draws: Draws, seeds: list[int]) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in seeds]
        for step in decode(trunk, drafter, list(map(request, seeds)), rule, draws, most):
            for row, new in step.tokens.items():
                texts[row] += new
        return texts

    return run


def mean_accepted(
    trunk: Trunk,
    drafter: Drafter,
    prompt: Sequence[int],
    rule: AcceptRule | None = None,
    sampling: SamplingParams | None = None,
) -> float:
    """The exact mean of drafted tokens accepted in the first tree after ``prompt`` and the token that follows it."""

    request = _requests(prompt, 1 << 10, sampling, {})

    def run(draws: Draws, seeds: list[int]) -> list[list[int]]:
        decoder = Decoder(trunk, drafter, rule, draws)
        decoder.admit(list(map(request, seeds)))
        accepted = decoder.step().accepted
        return [[accepted[row]] for row in range(len(seeds))]

    return sum(count * p for (count,), p in output_law(run).items())


def _requests(
    prompt: Sequence[int], tokens: int, sampling: SamplingParams | None, asked: Mapping[str, Any]
) -> Callable[[int], Request]:
    """The request of each seed, made once: checking it and finding its law costs more than a step of a toy."""
    first = Request(prompt, tokens, sampling=sampling or SamplingParams(temperature=1.0), **asked)

    @cache
    def request(seed: int) -> Request:
        return replace(first, sampling=replace(first.sampling, seed=seed))

    return request


def chi_square(observed: Mapping[int, int], law: Sequence[float], *, least: float = 5.0) -> float:
    """The p-value of counts ``observed`` of tokens under ``law`` (Pearson's test).

    Tokens expected less than ``least`` times are taken together. A token of probability 0 that was seen gives 0; a law
    with a single cell gives 1.
    """
    total = sum(observed.values())
    cells: list[tuple[float, float]] = []  # seen, due
    rare = (0.0, 0.0)
    for token, p in enumerate(law):
        seen, due = float(observed.get(token, 0)), p * total
        if due == 0 and seen:
            return 0.0
        if due >= least:
            cells.append((seen, due))
        else:
            rare = (rare[0] + seen, rare[1] + due)
    if rare[1] >= least:
        cells.append(rare)
    elif cells:  # too little for a cell of its own: with the rarest of the others
        place = min(range(len(cells)), key=lambda cell: cells[cell][1])
        cells[place] = (cells[place][0] + rare[0], cells[place][1] + rare[1])
    if len(cells) < 2:
        return 1.0
    statistic = sum((seen - due) ** 2 / due for seen, due in cells)
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def ks_uniform(p_values: Sequence[float]) -> float:
    """The p-value of numbers in [0, 1] under the uniform law (Kolmogorov-Smirnov, with Stephens' correction, 1970)."""
    count = len(p_values)
    ordered = sorted(p_values)
    gap = max(max((i + 1) / count - p, p - i / count) for i, p in enumerate(ordered))
    scaled = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * gap
    if scaled < 0.2:  # the series below converges slowly here, towards 1
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))
