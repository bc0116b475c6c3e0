"""What the runs of a cell of the reference benchmark come to: the same account for every contender.

Tokens per second and the speedup over ``generate`` count everything from the prompt's ids on; time to the first token
and time per token after it are given apart. Intervals are bootstrapped over batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from medusa.trunk import Trunk

from .axes import Cell
from .contenders import REFERENCE, Contender, Trial
from .measure import Run
from .run import identical
from .summary import by_depth, interval, paced, repeated

Trials = Sequence[Sequence[Trial]]  # [batch][repeat]
All = dict[str, list[list[Trial]]]  # by contender


def cell_report(trunk: Trunk, cell: Cell, trials: All, seed: int) -> dict[str, Any]:
    """All figures of a cell, as JSON can hold them."""
    own = [batch[0].category for batch in cell.batches]
    parts = {name: [place for place, each in enumerate(own) if each == name] for name in dict.fromkeys(own)}
    found = {}
    for each in cell.contenders:
        whole = figures(each, trials, seed)
        some = {name: figures(each, _of(trials, places), seed) for name, places in parts.items() if len(parts) > 1}
        whole["categories"] = {
            name: {key: value for key, value in part.items() if key != "accepted"} for name, part in some.items()
        }
        whole["trials"] = [[_raw(trial) for trial in batch] for batch in trials[each.name]]
        found[each.name] = whole
    return {
        "prompt_set": cell.prompts,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "batches": len(cell.batches),
        "contenders": found,
        "repeated_4grams": repeated([row for batch in trials[REFERENCE] for row in batch[0].rows], 4),
        "identical": None if cell.temperature else _identical(trunk, cell, trials),
    }


def figures(contender: Contender, trials: All, seed: int) -> dict[str, Any]:
    """One contender's figures on some of the batches."""
    mine = trials[contender.name]
    runs = [trial for batch in mine for trial in batch]
    tokens, seconds = sum(trial.tokens for trial in runs), sum(trial.seconds for trial in runs)
    later = tokens - sum(trial.first_tokens for trial in runs)
    decoding = seconds - sum(trial.first_seconds for trial in runs)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_ms": 1e3 * median(trial.first_seconds for trial in runs),
        "decode_ms_per_token": 1e3 * decoding / later if later else None,
        "tokens_per_step": _tokens_per_step(mine, seed),
        "speedup": _speedup(mine, trials[REFERENCE], seed, first=True),
        "decode_speedup": _speedup(mine, trials[REFERENCE], seed, first=False),
        "accepted": by_depth([count for trial in runs for count in trial.accepted]),
    }


def _of(trials: All, places: Sequence[int]) -> All:
    return {name: [batches[place] for place in places] for name, batches in trials.items()}


def _raw(trial: Trial) -> dict[str, Any]:
    """What figures can be computed from anew."""
    return {
        "tokens": trial.tokens,
        "seconds": trial.seconds,
        "first_tokens": trial.first_tokens,
        "first_seconds": trial.first_seconds,
        "steps": len(trial.accepted),
        "pace": paced(trial.pace),
    }


def _tokens_per_step(trials: Trials, seed: int) -> dict[str, float] | None:
    """Tokens after the first / forwards after the prefill, a forward counting for each row; None without a step."""
    counts = []
    for batch in trials:
        steps = sum(len(trial.accepted) for trial in batch)
        if steps:
            counts.append((sum(trial.tokens - trial.first_tokens for trial in batch), steps))
    if not counts:
        return None

    def ratio(pairs: Sequence[tuple[int, int]]) -> float:
        return sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs)

    low, high = interval(counts, ratio, seed)
    return {"value": ratio(counts), "low": low, "high": high}


def _speedup(trials: Trials, over: Trials, seed: int, first: bool) -> dict[str, float] | None:
    """How many times less time a token takes than with ``over``: median over batches; ``first``: the prompt included.

    A batch's own ratio is the median over repeats of the ratio of two runs that stood next to each other in time.
    """
    ratios = []
    for mine, other in zip(trials, over, strict=True):
        pairs = [(_per_token(a, first), _per_token(b, first)) for a, b in zip(mine, other, strict=True)]
        known = [slow / fast for fast, slow in pairs if fast and slow]
        if known:
            ratios.append(median(known))
    if not ratios:
        return None
    low, high = interval(ratios, median, seed)
    return {"median": median(ratios), "low": low, "high": high}


def _per_token(trial: Trial, first: bool) -> float | None:
    """Seconds per token; None where none came after the first."""
    if first:
        return trial.seconds / trial.tokens
    later = trial.tokens - trial.first_tokens
    return (trial.seconds - trial.first_seconds) / later if later else None


def _identical(trunk: Trunk, cell: Cell, trials: All) -> dict[str, Any]:
    """Greedy outputs against plain ``generate``: those of ours that must be equal, and what the others give."""
    prompts = [prompt.ids for batch in cell.batches for prompt in batch]
    must = {each.name for each in cell.contenders if each.ours and each.lossless} | {REFERENCE}
    runs = {name: _by_prompt(batches) for name, batches in trials.items()}
    ours = identical(trunk, prompts, {name: rows for name, rows in runs.items() if name in must})
    others = {name: rows for name, rows in runs.items() if name not in must or name == REFERENCE}
    return ours | {"others": identical(trunk, prompts, others)}


def _by_prompt(trials: Trials) -> list[list[Run]]:
    """Each row's runs: [prompt][repeat]."""
    found = []
    for batch in trials:
        for row in range(len(batch[0].rows)):
            found.append([Run(trial.rows[row], trial.seconds, len(trial.accepted)) for trial in batch])
    return found
