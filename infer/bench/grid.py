"""``medusa bench`` with axes: load, measure cell by cell, write and show the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from medusa.machine import describe
from medusa.trunk import Trunk

from .axes import SEEDS, AxisOptions, Cell, contenders, make_cells, measure, warm_up
from .cells import cell_report
from .contenders import Task
from .prompt_sets import PromptSet, check_categories, prompt_set
from .run import BenchOptions, check_config, compiled_sizes, describe_trunk, set_threads
from .subject import TRIAL, Subject

FORMAT = 2  # of the report; that of a run without axes has format 1


def run_axes(
    source: str,
    options: BenchOptions,
    axes: AxisOptions,
    out: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    compile: bool = False,
    packed: bool | None = None,
) -> int:
    """Benchmark all combinations on ``source``, a run, shipped heads or a plain trunk; print and write the report.

    ``compile`` compiles the steps of our own loop before anything is measured; ``packed`` goes to ``Trunk.load``.
    The report goes to ``out``; left out, to the folder benchmark in a run, else to benchmark-NAME here. Returns the
    exit code: 1 if a greedy output of ours differs from plain ``generate`` by more than a near-tie, else 0.
    """
    from medusa.progress import progress

    from .report import print_report, write_report

    subject = Subject.of(source, out, inside="benchmark", beside="benchmark")
    names = dict.fromkeys(axes.prompt_set or [subject.prompt_set])
    check_categories(names, axes.categories)
    trunk = subject.load(dtype=dtype, device=device, packed=packed)
    check_config(trunk)
    set_threads(trunk, TRIAL, options.threads)
    ways = contenders(trunk, subject.folder, axes, compile)
    much = {"count": options.prompts, "length": options.prompt_length, "tokens": options.max_new_tokens}
    sets = [prompt_set(name, trunk, subject.folder, **much, categories=axes.categories) for name in names]
    cells = make_cells(sets, ways, axes)
    runs = sum(len(cell.contenders) * (1 + options.repeats * len(cell.batches)) for cell in cells)
    with progress(runs, "benchmark") as advance:
        report = bench_axes(trunk, sets, cells, options, axes, advance) | {"source": source}
    write_report(report, subject.folder or subject.target, subject.target)
    print_report(report, subject.target)
    return 0 if all(cell["identical"] is None or cell["identical"]["ok"] for cell in report["cells"]) else 1


def bench_axes(
    trunk: Trunk,
    sets: list[PromptSet],
    cells: list[Cell],
    options: BenchOptions,
    axes: AxisOptions,
    advance: Callable[..., object] = lambda *_, **__: None,
) -> dict[str, Any]:
    """Measure ``cells`` and return the report. ``advance(tokens=n)`` is called after each run."""
    eos = frozenset() if axes.ignore_eos else trunk.eos_ids

    def task(cell: Cell, number: int) -> Task:
        return Task(options.max_new_tokens, cell.temperature, options.seed + (number + 1) * SEEDS, eos)

    kept, left_out = [], list[dict[str, Any]]()
    for cell in cells:
        warm, out = warm_up(cell, task(cell, -1), advance)
        kept.append(warm)
        left_out += out
    advance(
        sum(
            options.repeats * len(cell.batches) * (len(cell.contenders) - len(warm.contenders))
            for cell, warm in zip(cells, kept, strict=True)
        )
    )
    found = measure(kept, task, options.repeats, advance)
    return {
        "format": FORMAT,
        "options": asdict(options) | asdict(axes),
        "machine": describe(),
        "trunk": describe_trunk(trunk),
        "compiled": compiled_sizes(trunk),
        "prompt_sets": {each.name: _describe(each) for each in sets},
        "contenders": {
            each.name: {"ours": each.ours, "lossless": each.lossless, **each.facts}
            for each in {way.name: way for cell in cells for way in cell.contenders}.values()
        },
        "left_out": left_out,
        "cells": [cell_report(trunk, cell, trials, options.seed) for cell, trials in found],
    }


def _describe(prompts: PromptSet) -> dict[str, Any]:
    lengths = [len(prompt.ids) for prompt in prompts.prompts]
    return {
        "prompts": len(lengths),
        "categories": Counter(prompt.category for prompt in prompts.prompts),
        "later_turns": sum(prompt.turn > 0 for prompt in prompts.prompts),
        "chat_template": prompts.chat,
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": sum(lengths) / len(lengths),
    }
