"""The benchmark's report, for people: tables on the terminal, the same in Markdown, JSON, and plots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from medusa.errors import UserError, reason
from medusa.files import write_atomically, write_json, write_text

WIDTH = 110  # columns of the tables where no terminal says how many there are


@dataclass(frozen=True)
class Table:
    """A title, column heads and rows of text; the first column is text, the others numbers."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def label(report: dict[str, Any], name: str) -> str:
    """What a contender is called in tables and plots."""
    if name == "none":
        return "no drafts"
    tree = report["drafter"].get("tree")
    if not tree or name != report["drafter"]["name"]:
        return name
    return f"{name}, {tree['nodes']} nodes" if tree["nodes"] > 1 else f"{name}, root alone"


def tables(report: dict[str, Any]) -> list[Table]:
    """The report's tables: speed, acceptance by depth (if anything was accepted), a step and its parts."""
    return [table for table in (_speed(report), _acceptance(report), _step(report)) if table.rows]


def _speed(report: dict[str, Any]) -> Table:
    names = list(report["contenders"])
    found = {(each["of"], each["over"]): each for each in report["speedups"]}
    rows = []
    for name in names:
        figures = report["contenders"][name]
        row = [
            label(report, name),
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['ms_per_token']:.2f}",
            f"{figures['tokens_per_step']:.2f}",
        ]
        rows.append([*row, *(_ratio(found.get((name, over)), name == over) for over in names[:2])])
    heads = ["", "tokens/s", "ms/token", "tokens/step", "x generate", "x no drafts"]
    return Table("Speed (ratios: median over prompts, 95 % interval)", heads, rows)


def _ratio(found: dict[str, Any] | None, same: bool) -> str:
    if found is None:
        return "1" if same else ""
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _acceptance(report: dict[str, Any]) -> Table:
    pairs = zip(report["accepted"]["share"], report["accepted"]["conditional"], strict=True)
    rows = [[str(depth), f"{share:.1%}", f"{given:.1%}"] for depth, (share, given) in enumerate(pairs, start=1)]
    return Table("Accepted by depth", ["depth", "steps that accept it", "of those that accept the one before"], rows)


def _step(report: dict[str, Any]) -> Table:
    rows = [
        [
            label(report, name),
            str(cost["nodes"]),
            *(f"{cost[key]:.3f}" for key in ("step_ms", "heads_ms", "forward_ms", "bare_ms")),
            f"{cost['overhead']:.2f}",
            f"{cost['own_share']:.1%}",
        ]
        for name, cost in report["steps"].items()
    ]
    heads = ["", "nodes", "step ms", "heads ms", "forward ms", "bare ms", "step overhead", "our share"]
    return Table("One step", heads, rows)


def notes(report: dict[str, Any]) -> list[str]:
    """What stands below the tables, a sentence each."""
    trunk, options, null = report["trunk"], report["options"], report["steps"]["none"]
    found = trunk["heldout_loss"]
    loss = "not measured: text too short" if found is None else f"{found:.3f} nats per token"
    nulls_ms = report["contenders"]["none"]["decode_ms_per_token"]
    lines = [
        _verdict(report["identical"]),
        f"Trunk: {trunk['family']}, {trunk['parameters'] / 1e6:.2f} M parameters, {trunk['dtype']},"
        f" held-out loss {loss}.",
        f"Timed: {report['identical']['prompts']} held-out prompts of {options['prompt_length']} tokens, continued by"
        f" {options['max_new_tokens']}, {options['repeats']} times each, contenders in turns."
        f" Repeated 4-grams in the text: {report['repeated_4grams']:.1%}.",
        f"Our loop without drafts takes {nulls_ms:.3f} ms per token after the prefill in the timed runs. Taken apart,"
        f" its step takes {null['step_ms']:.3f} ms and a bare trunk forward of one token {null['bare_ms']:.3f} ms.",
        "Forward: the trunk's, inside the step; bare: the same call by itself. Step overhead = (step - heads) / bare."
        " Our share = (step - heads - forward) / step.",
    ]
    machine = report["machine"]
    accelerator = "" if machine["accelerator"] == "none" else f", {machine['accelerator']}"
    lines.append(
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads used{accelerator};"
        f" torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}."
    )
    return lines


def _verdict(found: dict[str, Any]) -> str:
    lines = [f"Outputs identical to generate: {found['equal']} of {found['prompts']} prompts."]
    for kind, which in (("near-tie", "near_ties"), ("MISMATCH", "mismatches")):
        for each in found[which]:
            gap = "one output ends early" if each["gap"] is None else f"top-2 logit gap {each['gap']:.2g}"
            lines.append(f"{kind}: {each['contender']}, prompt {each['prompt']}, token {each['position']}: {gap}.")
    return " ".join(lines)


def print_report(report: dict[str, Any], folder: Path) -> None:
    """Print the tables to stdout, and where the rest lies."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for table in tables(report):
        grid = Grid(title=table.title, title_justify="left", title_style="bold")
        for index, head in enumerate(table.heads):
            grid.add_column(head, justify="right" if index else "left")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
    for line in notes(report):
        console.print(line, markup=False)
    console.print(f"Report and plots: {folder}", markup=False, soft_wrap=True)


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    parts = ["# Benchmark"]
    for table in tables(report):
        lines = [table.heads, ["---"] + ["---:"] * (len(table.heads) - 1), *table.rows]
        parts.append(f"## {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, "\n".join(f"* {line}" for line in notes(report))]) + "\n"


def write_report(report: dict[str, Any], run: Path, folder: Path) -> None:
    """Write report.json, report.md and the plots to ``folder``; ``run`` is the checkpoint whose records are drawn.

    Raises:
        UserError: a file can't be written.
    """
    from .plots import figures

    try:
        write_json(folder / "report.json", report)
        write_text(folder / "report.md", markdown(report))
        for name, figure in figures(report, run).items():
            write_atomically(folder / f"{name}.png", partial(figure.savefig, dpi=150, format="png"))
    except OSError as error:
        raise UserError(f"the report can't be written ({reason(error)}): name another folder with --out") from error


def check_writable(folder: Path, way_out: str) -> None:
    """Find out whether files can be written to ``folder``, which may have to be made; leave nothing.

    Raises:
        UserError: they can't; ``way_out`` is what to do then.
    """
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"{folder} can't be written ({error.strerror}): {way_out}") from error
