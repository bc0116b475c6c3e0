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
from medusa.checkpoint import CALIBRATION, LOG, RUN, TREE, read_tree
from medusa.curveplots import curve
from medusa.curves import BEST, Panel, is_number, panels, read_log, stages
from medusa.errors import UserError
from medusa.files import read_json
from medusa.progress import clock_time
from medusa.tables import Table
from medusa.tree import Topology

from .config import flatten
from .record import MEDUSA_1, STAGES
from .report_bench import OURS, read_pictures, read_words

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

    @cached_property
    def calibration(self) -> dict[str, Any] | None:
        """The trees that were tried, if they were."""
        return read_json(self.folder / CALIBRATION) if (self.folder / CALIBRATION).is_file() else None

    @cached_property
    def tree(self) -> Topology | None:
        """The tree that the heads draft with, or were judged by last."""
        places = [self.folder, self.folder / MEDUSA_1]
        return next((read_tree(place) for place in places if (place / TREE).is_file()), None)

    @property
    def made(self) -> dict[str, Any]:
        """The record of the stages that are made."""
        found: dict[str, Any] = self.record.get("stages", {})
        return found

    @cached_property
    def shares(self) -> list[float] | None:
        """The share of steps that accept each node of the tree, where calibration has counted them."""
        shares = (self.calibration or {}).get("node_share")
        return shares if shares and self.tree is not None and len(shares) == self.tree.size else None

    @cached_property
    def best(self) -> dict[str, Any] | None:
        """The evaluation that the heads were kept by: of the last stage that has any, the one with the most tokens."""
        found = [event for event in self.events if is_number(event.get(BEST))]
        found = [event for event in found if event["stage"] == found[-1]["stage"]]
        kept = self.made.get(found[-1]["stage"], {}).get("result", {}).get("step") if found else None
        of_kept = [event for event in found if event["step"] == kept]
        return max(of_kept or found, key=lambda event: event[BEST], default=None)

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
    if run.best is not None:
        found.append(
            (f"{run.best[BEST]:.2f}", f"tokens per step, after step {run.best['step']} of {run.best['stage']}")
        )
    if run.calibration is not None:
        chosen = run.calibration["chosen"]
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
        yield tree_section(run, _title(runs, run, "Tree"), prefix)
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


def tree_section(run: Run, title: str, prefix: str) -> Section:
    """The tree, what its depths add, and what sizes were tried."""
    pictures, found, lines = [], [], []
    if run.tree is not None:
        pictures.append(Picture.of(f"{prefix}calibration-tree", plots.tree(run.tree, run.shares)))
    if run.tree is not None and run.shares is not None:
        depths = plots.depth_shares(run.tree, run.shares)
        lines.append("Acceptance is that of calibration: on the half of the held-out continuations that judges trees.")
    else:
        depths = list(accumulate((run.best or {}).get("acceptance", []), mul))
        if depths:
            lines.append(
                f"Acceptance is that of the best evaluation in training, after step {(run.best or {})['step']}."
            )
    if depths:
        pictures.append(Picture.of(f"{prefix}calibration-acceptance", plots.acceptance(depths)))
    if run.calibration is not None:
        pictures.append(Picture.of(f"{prefix}calibration-cost", plots.cost_curve(run.calibration)))
        rows = run.calibration["rows"]
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
