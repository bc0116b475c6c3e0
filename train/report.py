"""What `medusa report` says of a run: pictures and tables, read from the files in its folder.

A run that is under way, or was killed, has some of them: what is there is shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa import plots
from medusa.checkpoint import LOG, RUN
from medusa.curveplots import curve
from medusa.curves import BEST, Panel, is_number, panels, read_log, stages
from medusa.errors import UserError
from medusa.files import read_json
from medusa.progress import clock_time
from medusa.tables import Table

from .config import flatten
from .record import STAGES
from .report_bench import OURS, read_pictures, read_words
from .report_tree import Drafts, drafts_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 10.0  # inches from which a picture takes a whole line


@dataclass(frozen=True)
class Picture:
    """A PNG file: its name without the end, its content, what it says; ``wide`` if it takes a whole line."""

    name: str
    content: bytes
    says: str
    wide: bool = False

    @classmethod
    def of(cls, name: str, figure: Figure) -> Picture:
        """A picture of our own."""
        return cls(f"{OURS}{name}", plots.png(figure), figure.get_suptitle(), figure.get_figwidth() >= WIDE)

    @classmethod
    def made(cls, name: str, content: bytes) -> Picture:
        """The benchmark's, as it lies there; the header of a PNG tells its width in pixels."""
        return cls(name, content, name, int.from_bytes(content[16:20], "big") >= WIDE * plots.DPI)


@dataclass(frozen=True)
class Section:
    """A part of the page. ``open`` says whether its tables are seen at once."""

    title: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    open: bool = True


@dataclass(frozen=True)
class Run:
    """A run folder. ``name`` tells it from the others of the report; ``broken`` counts lines of the log left out."""

    folder: Path
    name: str
    events: list[dict[str, Any]]
    broken: int
    record: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> Run:
        """Read the log and the record.

        Raises:
            UserError: the folder is none of a run, or its log is still empty.
        """
        if not (folder / RUN).is_file() and not (folder / LOG).is_file():
            raise UserError(f"{folder} holds neither {RUN} nor {LOG}: give a folder made by `medusa train`")
        events, broken = read_log(folder / LOG) if (folder / LOG).is_file() else ([], 0)
        if not events:
            raise UserError(
                f"{folder} has logged nothing yet: a first line comes after log_every steps of a stage, so wait, or go"
                " on with the command that began the run"
            )
        return cls(folder, name, events, broken, read_json(folder / RUN) if (folder / RUN).is_file() else {})

    @property
    def made(self) -> dict[str, Any]:
        """The record of the stages that are made."""
        found: dict[str, Any] = self.record.get("stages", {})
        return found

    @cached_property
    def drafts(self) -> list[Drafts]:
        """What it drafts with."""
        return drafts_of(self.folder, self.events, self.made)

    def steps(self, stage: str) -> int | None:
        """How many steps a stage is to take, if the record says so."""
        config = self.record.get("config", {})
        settings = config.get(f"{stage}_training") or config.get(stage) or {}
        found = settings.get("steps")
        return found if isinstance(found, int) else None

    def status(self) -> str:
        """How far it is."""
        last = self.events[-1]
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime((self.folder / LOG).stat().st_mtime))
        if list(STAGES)[-1] in self.made:
            return f"finished, last line of the log {written}"
        of = self.steps(last["stage"])
        return (
            f"not finished: stage {last['stage']}, step {last['step']}{f' of {of}' if of else ''}, last line of the log"
            f" {written}"
        )


def named(folders: Sequence[Path]) -> list[Run]:
    """Read several runs, each with a name of its own: that of the folder, or its whole path where two are alike."""
    names = [folder.resolve().name for folder in folders]
    return [
        Run.read(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def curves_of(runs: Sequence[Run]) -> list[Panel]:
    """The panels of all runs' logs."""
    kept = {
        (run.name, stage): done["result"]["step"]
        for run in runs
        for stage, done in run.made.items()
        if "step" in done["result"]
    }
    return panels({run.name: run.events for run in runs}, kept)


def facts(run: Run) -> list[tuple[str, str]]:
    """The few figures that one looks for first: a value and what it is."""
    found = []
    for drafts in run.drafts:
        if (best := drafts.best) is not None:
            found.append((f"{best[BEST]:.2f}", f"tokens per step, after step {best['step']} of {best['stage']}"))
        if drafts.calibration is not None:
            chosen = drafts.calibration["chosen"]
            found.append((f"{chosen['nodes']}", f"nodes in the tree, {chosen['depth']} deep"))
            found.append((f"{chosen['tokens_per_second']:.0f}", "tokens/s expected on the machine calibrated for"))
    losses = [event["heldout_loss"] for event in run.events if is_number(event.get("heldout_loss"))]
    if losses:
        found.append((f"{losses[-1]:.3f}", "trunk's held-out loss, nats per token"))
    return found


def sections(runs: Sequence[Run], drawn: Sequence[Panel]) -> Iterator[Section]:
    """All sections: of one run with every detail, of several with what tells them apart."""
    for run in runs:
        lines = [f"Lines of the log that can't be read, and are left out: {run.broken}."] if run.broken else []
        yield Section(_title(runs, run, "Stages"), tables=[stage_table(run)], lines=lines)
    for stage in dict.fromkeys(panel.stage for panel in drawn):
        own = [panel for panel in drawn if panel.stage == stage]
        yield Section(f"Training: {stage}", [Picture.of(f"{stage}-{panel.key}", curve(panel)) for panel in own])
    for place, run in enumerate(runs):
        prefix = "" if len(runs) == 1 else f"{place + 1}-"
        for drafts in run.drafts:
            yield tree_section(drafts, _title(runs, run, drafts.title), f"{prefix}{drafts.mark}")
        if (words := read_words(run.folder)) is not None:
            found = [Picture.made(name, content) for name, content in read_pictures(run.folder).items()]
            yield Section(_title(runs, run, "Benchmark"), found, *words)
    yield settings_section(runs)


def _title(runs: Sequence[Run], run: Run, title: str) -> str:
    return title if len(runs) == 1 else f"{title}: {run.name}"


def stage_table(run: Run) -> Table:
    """A row per stage: how far it is, how long it took, what came out."""
    rows = []
    logged = stages(run.events)
    for stage in dict.fromkeys([*logged, *run.made]):
        done = run.made.get(stage)
        last = max((event["step"] for event in run.events if event["stage"] == stage), default=None)
        of = run.steps(stage)
        steps = "" if last is None else f"{last} of {of}" if of else str(last)
        result = ", ".join(f"{key} {show(value)}" for key, value in flatten(done["result"]).items()) if done else ""
        seconds = clock_time(done["seconds"]) if done else ""
        finished = done["finished"][:16].replace("T", " ") if done else ""
        rows.append([stage, "made" if done else "not made", steps, seconds, finished, result])
    return Table("", ["stage", "state", "steps", "time", "finished", "result"], rows)


def tree_section(drafts: Drafts, title: str, prefix: str) -> Section:
    """The tree, what its depths add, and what sizes were tried."""
    pictures, found, lines, best = [], [], [], drafts.best or {}
    if drafts.tree is not None:
        pictures.append(Picture.of(f"{prefix}-tree", plots.tree(drafts.tree, drafts.shares)))
    if drafts.tree is not None and drafts.shares is not None:
        depths = plots.depth_shares(drafts.tree, drafts.shares)
        lines.append("Acceptance is that of calibration: on the half of the held-out continuations that judges trees.")
    else:
        depths = list(accumulate(best.get("acceptance", []), mul))
        if depths:
            lines.append(f"Acceptance is that of the best evaluation in training, after step {best['step']}.")
    if depths:
        pictures.append(Picture.of(f"{prefix}-acceptance", plots.acceptance(depths)))
    if drafts.calibration is not None:
        pictures.append(Picture.of(f"{prefix}-cost", plots.cost_curve(drafts.calibration)))
        rows = drafts.calibration["rows"]
        found.append(Table("Sizes tried", [key.replace("_", " ") for key in rows[0]], [_row(row) for row in rows]))
    if not pictures:
        lines.append("No heads have been evaluated yet.")
    return Section(title, pictures, found, lines)


def _row(row: Mapping[str, Any]) -> list[str]:
    return [show(value) for value in row.values()]


def settings_section(runs: Sequence[Run]) -> Section:
    """Configuration, machine, versions and git state; of several runs what differs, and no more."""
    parts = {}
    for title, keys in (("Configuration", ["config"]), ("Made by", ["versions", "machine", "git", "tracking"])):
        columns = [_settings(run, keys) for run in runs]
        every = dict.fromkeys(key for column in columns for key in column)
        rows = [[key, *(show(column.get(key)) for column in columns)] for key in every]
        if len(runs) > 1:
            rows = [row for row in rows if len(set(row[1:])) > 1]
        parts[title] = rows
    heads = ["setting", *(run.name if len(runs) > 1 else "value" for run in runs)]
    title = "Settings" if len(runs) == 1 else "Settings that differ"
    return Section(title, tables=[Table(part, heads, rows) for part, rows in parts.items() if rows], open=False)


def _settings(run: Run, keys: Sequence[str]) -> dict[str, Any]:
    return {
        name if keys == ["config"] else f"{key} {name}": value
        for key in keys
        for name, value in flatten(run.record.get(key) or {}).items()
    }


def show(value: Any) -> str:
    """A value as text: numbers to four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(show, value))
    return "" if value is None else str(value)
