"""The reference benchmark: any drafters and baselines on any prompt sets, at any temperatures and batch sizes.

Every combination of set, temperature and batch size is a cell; all contenders of a cell take turns batch by batch, and
each repeat goes through all cells, so that a machine that slows down for a while slows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa.accept import AcceptRule
from medusa.drafters.base import Drafter
from medusa.errors import UserError, reason
from medusa.rules import TypicalRule
from medusa.trunk import Trunk

from ..drafters import draft_model, has_drafts, make_drafter, split_name
from ..redraft import draws, redraft
from ..warmup import warm_up as compile_steps
from .contenders import LOOKUP, REFERENCE, Contender, Task, Trial, assistant, library_way, our_way
from .grid_tables import TYPICAL, WARMTH
from .prompt_sets import Prompt, PromptSet, check_set
from .run import describe_drafter

# What the library's own generate is asked for, by the name of the baseline; the others draft, with a model.
BASELINES = {"static": "", "prompt-lookup": "", "draft": "FOLDER", "cut": "LAYERS"}
SEEDS = 1 << 20  # apart: a repeat's seeds are not another's, whatever the batch


@dataclass(frozen=True)
class AxisOptions:
    """What is compared and on which axes; what is left out has one value.

    Args:
        prompt_set: sets by name, or files.
        categories: of the sets that have such; left out, all.
        drafters: names as :func:`medusa.infer.drafters.make_drafter` takes them, "+typical" behind them for the lossy
            rule; left out, the heads and tree of the folder where it has some, and no drafts.
        baselines: of the library, beside plain ``generate``: names of ``BASELINES``.
        temperatures: 0 is greedy.
        draft_temperatures: at which drafts are drawn in rows that sample, each times the row's own; of the drafters
            that draw, each is a contender of its own.
        batch_sizes: rows that are decoded at once.
        compile_baseline: whether the baseline with a static cache is compiled.
        ignore_eos: whether an EOS is a token like any other, so that all rows are equally long.

    Raises:
        UserError: an unknown set, drafter or baseline, a negative temperature, or a batch size below 1.
    """

    prompt_set: list[str] | None = None
    categories: list[str] | None = None
    drafters: list[str] | None = None
    baselines: list[str] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    draft_temperatures: list[float] = field(default_factory=lambda: [1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    compile_baseline: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in self.prompt_set or ():
            check_set(name)
        for name in self.drafters or ():
            split_name(name.removesuffix(TYPICAL))
        for name in self.baselines:
            split_name(name, BASELINES, "baseline")
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise UserError(f"temperatures={temperature}: give at least 0, which is greedy")
        for temperature in self.draft_temperatures:
            if not 0 < temperature < math.inf:
                raise UserError(f"draft_temperatures={temperature}: give numbers above 0 (1 is the row's own)")
        if self.draft_temperatures != [1.0] and not any(self.temperatures):
            raise UserError("draft_temperatures, and no row samples: add temperatures above 0, or leave them out")
        for size in self.batch_sizes:
            if size < 1:
                raise UserError(f"batch_sizes={size}: give at least 1")
        if self.compile_baseline and "static" not in self.baselines:
            raise UserError("compile_baseline compiles the baseline 'static': add it to --baselines")


@dataclass(frozen=True)
class Cell:
    """One combination. ``batches``: prompts of one category each, all of ``batch_size`` rows."""

    prompts: str
    temperature: float
    batch_size: int
    batches: list[list[Prompt]]
    contenders: list[Contender]


Cells = list[tuple[Cell, dict[str, list[list[Trial]]]]]  # trials[contender][batch][repeat]


def contenders(trunk: Trunk, folder: Path | None, axes: AxisOptions, compile: bool = False) -> list[Contender]:
    """Plain ``generate`` first, then the other baselines, then ours, whose steps ``compile`` compiles now.

    Raises:
        UserError: a drafter that can't be had.
    """
    made = [Contender(REFERENCE, library_way(trunk), ours=False)]
    made += [_baseline(name, trunk, axes.compile_baseline) for name in axes.baselines]
    names = axes.drafters or (["none", "auto"] if has_drafts(folder) else ["none"])
    drafters: dict[str, Drafter] = {}
    for name in dict.fromkeys(names):
        plain = name.removesuffix(TYPICAL)
        if plain not in drafters:
            drafters[plain] = make_drafter(plain, trunk, folder)
            if compile:
                compile_steps(trunk, drafters[plain], axes.batch_sizes)
        made += _at_temperatures(name, trunk, drafters[plain], TypicalRule() if name != plain else None, axes)
    if axes.draft_temperatures != [1.0] and not any(map(draws, drafters.values())):
        raise UserError("draft_temperatures: none of the drafters draws its drafts at random, leave them out")
    return made


def _at_temperatures(
    name: str, trunk: Trunk, drafter: Drafter, rule: AcceptRule | None, axes: AxisOptions
) -> list[Contender]:
    """One drafter at each draft temperature; the usual one, or else the first, stands for all in greedy cells."""
    warmths = list(dict.fromkeys(axes.draft_temperatures)) if draws(drafter) else [1.0]
    usual = 1.0 if 1.0 in warmths else warmths[0]
    found = []
    for warmth in warmths:
        each = drafter if warmth == 1 else redraft(drafter, temperature=warmth)
        facts = describe_drafter(each) | {"drafter": name, "draft_temperature": None if warmth == 1 else warmth}
        called = name if warmth == 1 else f"{name}{WARMTH}{warmth:g}"
        way, lossless = our_way(trunk, each, rule), rule is None
        found.append(Contender(called, way, lossless=lossless, drawn=warmth != usual, facts=facts))
    return found


def _baseline(name: str, trunk: Trunk, compiled: bool) -> Contender:
    word, about = split_name(name, BASELINES, "baseline")
    if word == "static":
        how: dict[str, Any] = {"cache_implementation": "static", "disable_compile": not compiled}
        if compiled:
            from transformers.generation import CompileConfig

            settings = CompileConfig()
            settings._compile_all_devices = True  # it leaves processors out otherwise
            how["compile_config"] = settings
        called = f"{REFERENCE} static{'+compile' if compiled else ''}"
        return Contender(called, library_way(trunk, **how), ours=False)
    how = LOOKUP if word == "prompt-lookup" else {"assistant_model": assistant(draft_model(word, about, trunk))}
    return Contender(f"{REFERENCE} {name}", library_way(trunk, **how), ours=False, alone=True)


def batches(prompts: PromptSet, size: int) -> list[list[Prompt]]:
    """Batches of exactly ``size`` prompts of one category; the last of a category begins again with its first."""
    made = []
    for each in prompts.categories.values():
        for start in range(0, len(each), size):
            made.append([each[place % len(each)] for place in range(start, start + size)])
    return made


def warm_up(cell: Cell, task: Task, advance: Callable[..., object]) -> tuple[Cell, list[dict[str, Any]]]:
    """Run each contender once; those of the library that can't be run are left out, with the reason."""
    kept, out = [], list[dict[str, Any]]()
    for each in cell.contenders:
        why = "takes one row at a time" if each.alone and cell.batch_size > 1 else ""
        if not why:
            try:
                each.run([prompt.ids for prompt in cell.batches[0]], task)
            except Exception as error:  # the library's models raise anything for what they were not made for
                if each.ours or each.name == REFERENCE:
                    raise
                why = reason(error)
        if why:
            about = {"prompt_set": cell.prompts, "temperature": cell.temperature, "batch_size": cell.batch_size}
            out.append({"contender": each.name, "why": why} | about)
        else:
            kept.append(each)
        advance()
    return replace(cell, contenders=kept), out


def measure(
    cells: Sequence[Cell], tasks: Callable[[Cell, int], Task], repeats: int, advance: Callable[..., object]
) -> Cells:
    """Time every contender of every cell on every batch ``repeats`` times; who begins rotates.

    ``tasks(cell, number)``: what is to be done with the ``number``-th batch, counted over repeats.
    """
    found: Cells = [(cell, {each.name: [[] for _ in cell.batches] for each in cell.contenders}) for cell in cells]
    for repeat in range(repeats):
        for cell, trials in found:
            for place, batch in enumerate(cell.batches):
                task = tasks(cell, repeat * len(cell.batches) + place)
                first = (repeat + place) % len(cell.contenders)
                for each in cell.contenders[first:] + cell.contenders[:first]:
                    trials[each.name][place].append(each.run([prompt.ids for prompt in batch], task))
                    advance(tokens=trials[each.name][place][-1].tokens)
    return found


def make_cells(sets: Sequence[PromptSet], ways: list[Contender], axes: AxisOptions) -> list[Cell]:
    """All combinations, the axes named last changing fastest."""
    return [
        Cell(each.name, temperature, size, batches(each, size), [way for way in ways if temperature or not way.drawn])
        for each in sets
        for temperature in dict.fromkeys(axes.temperatures)
        for size in dict.fromkeys(axes.batch_sizes)
    ]
