"""The curves in a training log: which figures it holds, by stage, as panels to draw or to compare.

A log has a line per event: its stage, its step, and figures, each a number or a list of one per head or depth. Any
stage and any figure is taken, known here or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.errors import UserError, reason

Event = Mapping[str, Any]
Points = list[tuple[int, float]]  # step, value

# Figures in the order in which they are shown, with title and unit; others follow under their own names.
FIGURES = {
    "loss": ("loss", "nats per token"),
    "head_loss": ("loss of each head", "nats per token"),
    "depth_loss": ("loss at each depth", "nats per token"),
    "feature_loss": ("distance of states at each depth", "smooth L1"),
    "tokens_per_step": ("tokens per step, held out", "tokens per step"),
    "acceptance": ("acceptance by depth, held out", "of steps that accepted the depth before"),
    "top1": ("first guess right, in training", "share of tokens"),
    "top5": ("among the first five, in training", "share of tokens"),
    "heldout_top1": ("first guess right, held out", "share of positions"),
    "heldout_top5": ("among the first five, held out", "share of positions"),
    "repeated": ("repeated 4-grams of the continuations", "share of 4-grams"),
    "outside": ("targets outside the draft vocabulary", "share of tokens"),
    "learning_rate": ("learning rate", "learning rate"),
    "grad_norm": ("norm of the gradients", "before clipping"),
    "tokens_per_second": ("speed of training", "tokens per second"),
    "trunk_share": ("the trunk's part of a step", "share of the time"),
    "peak_memory_mb": ("peak memory", "MB"),
}
WITH = {
    "heldout_loss": ("loss", "held out"),
    "heldout_loss_before": ("loss", "held out, before the stage"),
}  # drawn into the panel of another figure, under this name
ALONE = {"loss": "training"}  # what the other one is called then
NO_FIGURES = ("stage", "step", "threads")
# What the entries of a list are, and the number of the first: of a figure, or of all figures of a stage.
PARTS = {"acceptance": ("depth", 1), "eagle": ("depth", 1)}
BEST = "tokens_per_step"  # what drafts is kept by it


@dataclass(frozen=True)
class Curve:
    """One figure of one run, over the steps of its stage. ``name`` tells it from others of the same panel and run."""

    run: str
    name: str
    points: Points
    best: tuple[int, float] | None = None  # which of the points was kept, if this is what heads are kept by


@dataclass(frozen=True)
class Panel:
    """Curves that belong together: a figure of a stage."""

    stage: str
    key: str
    title: str
    unit: str
    curves: list[Curve]


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a log, and how many lines are none (see :func:`parse_log`).

    Raises:
        UserError: the file can't be read.
    """
    try:
        return parse_log(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read ({reason(error)}): give a folder made by `medusa train`") from error


def parse_log(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The events of a log, and how many lines are none: a process that is killed may leave half a line."""
    events, broken = [], 0
    for line in filter(None, content.split(b"\n")):
        try:
            event = json.loads(line)
        except ValueError:  # UnicodeDecodeError too
            event = None
        if isinstance(event, dict) and isinstance(event.get("stage"), str) and isinstance(event.get("step"), int):
            events.append(event)
        else:
            broken += 1
    return events, broken


def stages(events: Sequence[Event]) -> list[str]:
    """The stages of a log, in the order of their first lines."""
    return list(dict.fromkeys(event["stage"] for event in events))


def panels(logs: Mapping[str, Sequence[Event]], kept: Mapping[tuple[str, str], int] | None = None) -> list[Panel]:
    """The panels of one run or more, by stage.

    Args:
        logs: the runs' events, by the name of the run.
        kept: after which step of a stage, by run and stage, its result was taken; where it is not told, the highest
            point so far counts as the best.
    """
    kept = kept or {}
    made: dict[tuple[str, str], list[Curve]] = {}
    for stage in dict.fromkeys(stage for events in logs.values() for stage in stages(events)):
        found: dict[str, list[Curve]] = {}
        for run, events in logs.items():
            own = [event for event in events if event["stage"] == stage]
            for key in dict.fromkeys(key for event in own for key in event if key not in NO_FIGURES):
                panel, name = WITH.get(key, (key, ALONE.get(key, "")))
                found.setdefault(panel, []).extend(_curves(run, key, name, own, kept.get((run, stage))))
        order = [*FIGURES, *found]
        made |= {(stage, key): found[key] for key in sorted(found, key=order.index)}
    return [
        Panel(stage, key, *FIGURES.get(key, (key.replace("_", " "), "")), curves)
        for (stage, key), curves in made.items()
        if curves
    ]


def _curves(run: str, key: str, name: str, events: Sequence[Event], kept: int | None) -> list[Curve]:
    """The curve of a figure, or those of its parts if it is a list; values that are no numbers are left out."""
    stage = events[0]["stage"] if events else ""
    word, first = PARTS.get(key) or PARTS.get(stage, ("head", 0))
    found: dict[str, Points] = {}
    for event in events:
        value: Any = event.get(key)
        parts: Iterable[tuple[int | None, Any]] = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, part in parts:
            if is_number(part):
                found.setdefault(name if index is None else f"{word} {index + first}", []).append((event["step"], part))
    return [Curve(run, each, points, _best(points, kept) if key == BEST else None) for each, points in found.items()]


def _best(points: Points, kept: int | None) -> tuple[int, float]:
    of_kept = [point for point in points if point[0] == kept]
    return max(of_kept or points, key=lambda point: point[1])


def is_number(value: Any) -> bool:
    """Whether a curve can go through it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_json(made: Sequence[Panel]) -> dict[str, Any]:
    """Run -> stage -> figure -> name of the curve ("" where there is but one) -> steps, values and the best."""
    runs: dict[str, Any] = {}
    for panel in made:
        for curve in panel.curves:
            figures = runs.setdefault(curve.run, {}).setdefault(panel.stage, {})
            steps, values = zip(*curve.points, strict=True)
            entry: dict[str, Any] = {"steps": list(steps), "values": list(values)}
            if curve.best is not None:
                entry["best"] = {"step": curve.best[0], "value": curve.best[1]}
            figures.setdefault(panel.key, {})[curve.name] = entry
    return runs
