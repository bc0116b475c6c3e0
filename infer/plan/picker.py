"""The picker behind `medusa plan`: which way of decoding suits a load, or none, how much faster it is, and why.

A request of L tokens takes the reading of the prompt, which brings the first, and expected steps for the other L - 1
(:func:`medusa.expected.expected_steps`). Speedup = time of plain decoding / time of the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa.calibrate import GOOD_ENOUGH
from medusa.checkpoint import CALIBRATION
from medusa.errors import UserError
from medusa.expected import (
    best_chain,
    chain_shares,
    chain_speedup,
    chain_tokens,
    expected_steps,
    tree_tokens,
)

from .cells import HEADS, read_cells, read_curve
from .load import Load
from .sources import Candidate, from_curve, gather, plain_taken

OFF = "none"  # what --drafter calls decoding without drafts
SHORT = 5  # tokens of an output up to which the reading of the prompt is said to dominate
HOT = 1.0  # temperature from which the trunk's law is flat enough to say so
ALPHAS = (0.5, 0.7, 0.85)


@dataclass(frozen=True)
class Prediction:
    """What a candidate comes to at a load; times are those of the whole batch."""

    candidate: Candidate
    tokens_per_step: float
    steps: float
    step_ms: float
    plain_ms: float
    request_ms: float
    plain_request_ms: float
    fits: bool

    @property
    def speedup(self) -> float:
        """How many times faster than plain decoding, the reading of the prompts included."""
        return self.plain_request_ms / self.request_ms

    @property
    def step_cost(self) -> float:
        """A step's time in plain steps."""
        return self.step_ms / self.plain_ms

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        figures = {"speedup": self.speedup, "step_cost": self.step_cost}
        own = {key: value for key, value in asdict(self).items() if key != "candidate"}
        return asdict(self.candidate) | own | figures


@dataclass(frozen=True)
class Plan:
    """The recommendation: ``chosen`` is None for plain decoding; ``over_generate`` is None where that isn't known."""

    load: Load
    predictions: list[Prediction]
    chosen: Prediction | None
    over_generate: float | None
    why: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """For ``plan.json``."""
        chosen = self.chosen
        return {
            "load": asdict(self.load),
            "method": chosen.candidate.method if chosen else OFF,
            "nodes": chosen.candidate.nodes if chosen else None,
            "draft_temperature": chosen.candidate.draft_temperature if chosen else None,
            "speedup": chosen.speedup if chosen else 1.0,
            "speedup_over_generate": self.over_generate,
            "why": self.why,
            "notes": self.notes,
            "candidates": [each.as_json() for each in self.predictions],
        }


def predict(candidate: Candidate, load: Load) -> Prediction:
    """The arithmetic of one candidate."""
    later = load.max_new_tokens - 1
    mine, plain = candidate.taken(load.max_new_tokens), candidate.plain_taken(load.max_new_tokens)
    room, needs = load.free_memory_mb, candidate.memory_mb
    return Prediction(
        candidate,
        later / mine.steps if candidate.along and mine.steps else tree_tokens(candidate.shares),
        mine.steps,
        mine.time / mine.steps if mine.steps else candidate.step_ms,
        plain.time / plain.steps if plain.steps else candidate.plain_ms,
        candidate.first_ms + mine.time,
        candidate.plain_first_ms + plain.time,
        room is None or needs is None or needs <= room,
    )


def plan(folder: Path, load: Load, prompt_set: str | None = None) -> Plan:
    """What the measurements in ``folder`` recommend for ``load``.

    Raises:
        UserError: nothing was measured there, or nothing that says something of this load.
    """
    candidates, generate, notes = gather(folder, load, prompt_set)
    if not candidates:
        raise UserError(
            f"nothing in {folder} says what drafting does at batch size {load.batch_size}: measure it with"
            f" `medusa bench {folder} --batch-sizes {load.batch_size} --temperatures {load.temperature:g}`"
        )
    found = sorted((predict(each, load) for each in candidates), key=lambda each: -each.speedup)
    chosen = choose(found)
    over = None
    if generate is not None:
        slow = generate.first_ms + plain_taken(generate.along, generate.step_ms, load.max_new_tokens).time
        over = slow / (chosen.request_ms if chosen else found[0].plain_request_ms)
    return Plan(load, found, chosen, over, reasons(found, chosen, load), notes)


def choose(found: Sequence[Prediction]) -> Prediction | None:
    """The fastest that fits; of those about as fast the measured before the estimated, and the smaller; or None.

    Timings are good to some percent (``GOOD_ENOUGH``): what promises less than that is not worth its memory.
    """
    fits = [each for each in found if each.fits]
    fastest = max((each.speedup for each in fits), default=0.0)
    if fastest * GOOD_ENOUGH <= 1:
        return None
    close = [each for each in fits if each.speedup >= GOOD_ENOUGH * fastest]
    return min(close, key=lambda each: (bool(each.candidate.estimated), each.candidate.nodes or 0, -each.speedup))


def reasons(found: Sequence[Prediction], chosen: Prediction | None, load: Load) -> list[str]:
    """Why, a sentence each."""
    best = chosen or next((each for each in found if each.fits), found[0])
    name = best.candidate.label
    lines = [
        f"{name}: {best.tokens_per_step:.2f} tokens per step at {best.step_cost:.2f} times the time of a plain step, so"
        f" {best.tokens_per_step / best.step_cost:.2f} x after the prompt, and {best.speedup:.2f} x with it for outputs"
        f" of {load.max_new_tokens}{'' if chosen else ': no gain beyond what timings vary by'}."
    ]
    reading = best.candidate.plain_first_ms / best.plain_request_ms
    if load.max_new_tokens <= SHORT:
        lines.append(
            f"With outputs as short as {load.max_new_tokens} the reading of the prompt is {reading:.0%} of plain"
            " decoding, and drafts don't shorten it."
        )
    if load.temperature >= HOT:
        lines.append(
            f"At temperature {load.temperature:g} the trunk's law is flat: guesses are accepted with the probability"
            " that it gives them, which falls."
        )
    warmths = {each.candidate.warmth for each in found if each.candidate.method == best.candidate.method}
    if len(warmths) > 1:
        lines.append(
            f"Of the draft temperatures {', '.join(f'{each:g}' for each in sorted(warmths))} that were measured,"
            f" {best.candidate.warmth:g} is the best here."
        )
    if load.batch_size > 1:
        lines.append(
            f"With {load.batch_size} rows a step verifies {load.batch_size} trees: it takes"
            f" {best.step_ms:.2f} ms where a plain one takes {best.plain_ms:.2f} ms."
        )
    tight = [f"{each.candidate.label} ({each.candidate.memory_mb:.1f} MB)" for each in found if not each.fits]
    if tight:
        lines.append(f"{load.free_memory_mb:g} MB are free, too little for the weights of {'; '.join(tight)}.")
    return lines


def explain(each: Prediction, load: Load) -> list[str]:
    """The arithmetic of a prediction, line by line."""
    way, later = each.candidate, load.max_new_tokens - 1
    shares = " + ".join(["1", *(f"{share:.3f}" for share in way.shares)])
    needs = "unknown" if way.memory_mb is None else f"{way.memory_mb:.1f} MB"
    measured = f", {each.tokens_per_step:.3f} tokens each, as measured along the texts" if way.along else ""
    return [
        f"{way.label} ({way.source}{'; ' + way.estimated if way.estimated else ''}; weights {needs})",
        f"  tokens per step = {shares} = {tree_tokens(way.shares):.3f}{' over the whole texts' if way.along else ''}",
        f"  steps for {later} tokens after the first = {each.steps:.2f}{measured}",
        f"  time = {way.first_ms:.2f} + {each.steps:.2f} x {each.step_ms:.3f} = {each.request_ms:.1f} ms",
        f"  plain = {way.plain_first_ms:.2f} + {later} x {each.plain_ms:.3f} = {each.plain_request_ms:.1f} ms",
        f"  speedup = {each.plain_request_ms:.1f} / {each.request_ms:.1f} = {each.speedup:.3f}",
    ]


@dataclass(frozen=True)
class Check:
    """How many times faster heads are than no drafts: by the calibration's figures, and as a benchmark measured it."""

    label: str
    source: str
    predicted: float
    measured: float


def checks(folder: Path) -> list[Check]:
    """How well the calibration predicts what was benchmarked greedily on one row; empty where one of the two lacks."""
    if not (folder / CALIBRATION).is_file():
        return []
    cells = [cell for cell in read_cells(folder) if (cell.temperature, cell.batch_size) == (0, 1)]
    curve = read_curve(folder) if any(cell.heads_speedup is not None for cell in cells) else None
    found = []
    for cell in cells:
        load, measured = Load(max_new_tokens=cell.max_new_tokens), cell.heads_speedup
        for each in from_curve(folder, curve, load, cell.plain.first_ms) if curve else ():
            if measured is not None and each.nodes == cell.ways[HEADS].nodes:
                source = f"{cell.source}, {cell.prompt_set}"
                found.append(Check(each.label, source, predict(each, load).speedup, measured))
    return found


@dataclass(frozen=True)
class Chain:
    """What is expected of chains at one alpha; ``tokens`` and ``speedups`` are of 0, 1, … drafted tokens."""

    alpha: float
    best: int
    tokens: list[float]
    speedups: list[float]
    request_speedup: float


@dataclass(frozen=True)
class Assumed:
    """What follows from assumed numbers: a chain for each alpha, at one cost ratio."""

    cost: float
    load: Load
    chains: list[Chain]

    def as_json(self) -> dict[str, Any]:
        """For ``plan.json``."""
        return asdict(self)


def assume(alphas: Sequence[float], cost: float, load: Load, most: int) -> Assumed:
    """The best chain of up to ``most`` drafted tokens for each alpha, where drafting one costs ``cost`` trunk forwards.

    Over the load's output the reading of the prompt is counted as one forward, the least that it takes.

    Raises:
        UserError: an alpha outside of 0..1, or 1 itself; a cost of 0 or less; ``most`` below 1.
    """
    if most < 1:
        raise UserError(f"max_drafted={most}: give at least 1")
    chains = []
    for alpha in alphas:
        best = best_chain(alpha, cost, most)
        counts = range(most + 1)
        tokens = [chain_tokens(alpha, drafted) for drafted in counts]
        speedups = [chain_speedup(alpha, cost, drafted) for drafted in counts]
        steps = expected_steps(chain_shares(alpha, best), load.max_new_tokens - 1)
        request = load.max_new_tokens / (1 + steps * (1 + best * cost))
        chains.append(Chain(alpha, best, tokens, speedups, request))
    return Assumed(cost, load, chains)
