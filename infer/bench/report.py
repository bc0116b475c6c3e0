"""The benchmark's report, for people: tables on the terminal, the same in Markdown, JSON, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from medusa.errors import UserError, reason
from medusa.files import write_atomically, write_json, write_text
from medusa.tables import Table, notes, tables

from . import grid_tables

WIDTH = 110  # columns of the tables where no terminal says how many there are


def print_report(report: dict[str, Any], folder: Path) -> None:
    """Print the tables to stdout, and where the rest lies."""
    print_tables(*_in_words(report))
    print_tables([], [f"Report and plots: {folder}"], soft_wrap=True)


def print_tables(tables: Sequence[Table], lines: Sequence[str], soft_wrap: bool = False) -> None:
    """Print tables to stdout, then lines of text; ``soft_wrap`` leaves it to the terminal to break them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Grid

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for table in tables:
        grid = Grid(title=escape(table.title), title_justify="left", title_style="bold")
        for index, head in enumerate(table.heads):
            grid.add_column(escape(head), justify="right" if index else "left")
        for row in table.rows:
            grid.add_row(*map(escape, row))
        console.print(grid)
    for line in lines:
        console.print(line, markup=False, soft_wrap=soft_wrap)


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    return markdown_of("Benchmark", *_in_words(report))


def markdown_of(title: str, shown: Sequence[Table], sentences: Sequence[str]) -> str:
    """Tables and sentences as Markdown, under a title."""
    parts = [f"# {title}"]
    for table in shown:
        lines = [table.heads, ["---"] + ["---:"] * (len(table.heads) - 1), *table.rows]
        parts.append(f"## {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, "\n".join(f"* {line}" for line in sentences)]) + "\n"


def _in_words(report: dict[str, Any]) -> tuple[list[Table], list[str]]:
    """Tables and sentences of either kind of report: that of one cell with its steps taken apart, or of many cells."""
    if "cells" in report:
        return grid_tables.tables(report), grid_tables.notes(report)
    return tables(report), notes(report)


def write_report(report: dict[str, Any], run: Path, folder: Path) -> None:
    """Write report.json, report.md and the plots to ``folder``; ``run`` is the checkpoint whose records are drawn.

    Raises:
        UserError: a file can't be written.
    """
    from . import grid_plots, plots

    made = grid_plots.figures(report) if "cells" in report else plots.figures(report, run)
    try:
        write_json(folder / "report.json", report)
        write_text(folder / "report.md", markdown(report))
        for name, figure in made.items():
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
