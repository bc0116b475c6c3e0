"""The plots of the reference benchmark: one for each axis that has something to show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.curveplots import MARKERS
from medusa.data.promptsets import CATEGORIES
from medusa.plots import GREY, LINES, PALE, new_figure, say

from .contenders import REFERENCE
from .grid_tables import label, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = list[dict[str, Any]]


def figures(report: dict[str, Any]) -> dict[str, Figure]:
    """All figures by file name."""
    cells = report["cells"]
    first = [next(cell for cell in cells if cell["prompt_set"] == name) for name in report["prompt_sets"]]
    made = {"speedup": speedups(report, first)}
    for cell in first:
        if len(report["prompt_sets"][cell["prompt_set"]]["categories"]) > 1:
            made["categories" if len(first) == 1 else f"categories-{stem(cell)}"] = categories(report, cell)
    for axis, name in (("temperature", "temperatures"), ("batch_size", "batch_sizes")):
        if len({cell[axis] for cell in cells}) > 1:
            made[name] = along(report, first, axis)
    if any(figures["accepted"]["share"] for figures in first[0]["contenders"].values()):
        made["acceptance"] = acceptance(report, first[0])
    return made


def stem(cell: dict[str, Any]) -> str:
    """The name of a prompt set, or that of its file, for the name of another file."""
    return Path(cell["prompt_set"]).stem


def look(report: dict[str, Any], name: str) -> dict[str, Any]:
    """A contender's colour and marker, the same in all figures; the baselines are hollow."""
    names = [each for each in report["contenders"] if each != REFERENCE]
    if name == REFERENCE:
        return {"color": GREY, "marker": "x"}
    place = names.index(name)
    hollow = {} if report["contenders"][name]["ours"] else {"markerfacecolor": "white", "linestyle": "--"}
    return {"color": LINES[place % len(LINES)], "marker": MARKERS[place % len(MARKERS)]} | hollow


def speedups(report: dict[str, Any], cells: Cells) -> Figure:
    """A panel for each prompt set: how many times faster than ``generate`` each contender is, with its interval."""
    rows = max(len(cell["contenders"]) for cell in cells)
    wide = len(cells) if len(cells) < 4 else 2
    deep = -(-len(cells) // wide)
    figure, panels = new_figure(len(cells), 3.2 + 4.2 * wide, (1.6 + 0.42 * rows) * deep)
    for axes, cell in zip(panels, cells, strict=True):
        names = [name for name in cell["contenders"] if name != REFERENCE]
        for place, name in enumerate(names):
            found = cell["contenders"][name]["speedup"]
            _dot(axes, report, name, place, found, "median")
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.text(
                found["high"], place, f"  {found['median']:.2f}", va="center", fontsize=10, bbox=behind, zorder=1.5
            )
        axes.set_yticks(range(len(names)), [label(report, name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        highest = max(cell["contenders"][name]["speedup"]["high"] for name in names) if names else 1.0
        axes.set_xlim(0, 1.2 * max(highest, 1.0))
        axes.axvline(1, color=GREY, linewidth=1.2, linestyle=":", zorder=1)
        axes.set_xlabel("times as fast as generate")
        axes.set_title(f"{cell['prompt_set']}, {where(cell)}")
    say(figure, "\n".join(_best(report, cell) for cell in cells))
    return figure


def _best(report: dict[str, Any], cell: dict[str, Any]) -> str:
    lossless = [name for name in cell["contenders"] if report["contenders"][name]["lossless"]]
    best = max(lossless, key=lambda name: cell["contenders"][name]["speedup"]["median"])
    rate = cell["contenders"][best]["speedup"]["median"]
    if best == REFERENCE:
        return f"On {cell['prompt_set']} nothing is faster than generate"
    return f"On {cell['prompt_set']} {label(report, best)} is fastest: {rate:.2f} x generate"


def _dot(axes: Axes, report: dict[str, Any], name: str, place: float, found: dict[str, float], key: str) -> None:
    style = {key: value for key, value in look(report, name).items() if key != "linestyle"}
    axes.plot([found["low"], found["high"]], [place, place], color=style["color"], linewidth=2.2)
    axes.plot(found[key], place, markersize=7, linestyle="none", **style)


def categories(report: dict[str, Any], cell: dict[str, Any]) -> Figure:
    """Speedup and tokens per step by category, the contenders side by side."""
    names = [name for name in cell["contenders"] if name != REFERENCE]
    own = list(cell["contenders"][REFERENCE]["categories"])
    figure, (speed, steps) = new_figure(2, 12.5, 1.9 + (0.3 + 0.16 * len(names)) * len(own))
    for axes, key, value in ((speed, "speedup", "median"), (steps, "tokens_per_step", "value")):
        for number, name in enumerate(names):
            for place, category in enumerate(own):
                found = cell["contenders"][name]["categories"][category][key]
                if found is not None:
                    _dot(axes, report, name, place + _shift(number, len(names)), found, value)
        for edge in range(1, len(own)):
            axes.axhline(edge - 0.5, color=PALE, linewidth=1)
        axes.set_ylim(len(own) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlim(left=0)
    speed.axvline(1, color=GREY, linewidth=1.2, linestyle=":")
    speed.set_yticks(range(len(own)), [CATEGORIES.get(each, each) for each in own])
    steps.set_yticks(range(len(own)), [""] * len(own))
    speed.set_xlabel("times as fast as generate")
    steps.set_xlabel("tokens per step")
    _legend(figure, report, names)
    say(figure, f"{cell['prompt_set']} by category, {where(cell)}")
    return figure


def _shift(number: int, count: int) -> float:
    return 0.7 * ((number + 0.5) / count - 0.5)


def along(report: dict[str, Any], cells: Cells, axis: str) -> Figure:
    """Speedup and tokens per step (or, over batch sizes, tokens per second) along an axis, a row for each prompt set.

    The other axis stays at its first value.
    """
    other = "batch_size" if axis == "temperature" else "temperature"
    figure, panels = new_figure(2 * len(cells), 11.5, 3.9 * len(cells))
    names = [name for name in report["contenders"] if any(name in cell["contenders"] for cell in report["cells"])]
    for row, first in enumerate(cells):
        line = [
            cell
            for cell in report["cells"]
            if cell["prompt_set"] == first["prompt_set"] and cell[other] == first[other]
        ]
        left, right = panels[2 * row : 2 * row + 2]
        for name in names:
            _line(left, report, line, axis, name, "speedup")
            _line(right, report, line, axis, name, "tokens_per_step" if axis == "temperature" else "tokens_per_second")
        left.set_ylabel("times as fast as generate")
        right.set_ylabel("tokens per step" if axis == "temperature" else "tokens per second, all rows")
        for axes in (left, right):
            axes.set_title(f"{first['prompt_set']}, {other.replace('_', ' ')} {first[other]:g}")
            axes.set_xlabel("temperature" if axis == "temperature" else "rows decoded at once")
            axes.set_ylim(bottom=0)
            if axis == "batch_size":
                axes.set_xscale("log", base=2)
            ticks = sorted({cell[axis] for cell in line})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
    _legend(figure, report, names)
    say(figure, "What temperature does" if axis == "temperature" else "What the batch size does")
    return figure


def _line(axes: Axes, report: dict[str, Any], cells: Cells, axis: str, name: str, key: str) -> None:
    """One contender's figure along an axis, with its interval where it has one."""
    points = []
    for cell in sorted(cells, key=lambda cell: cell[axis]):
        found = cell["contenders"].get(name, {}).get(key)
        if found is not None:
            whole = found if isinstance(found, dict) else {"value": found}
            points.append((cell[axis], whole.get("value", whole.get("median")), whole.get("low"), whole.get("high")))
    if not points:
        return
    at, values, lows, highs = zip(*points, strict=True)
    style = look(report, name)
    axes.plot(at, values, markersize=6, **style)
    if None not in lows and name != REFERENCE:
        axes.vlines(at, lows, highs, color=style["color"], linewidth=1.0, alpha=0.6)


def acceptance(report: dict[str, Any], cell: dict[str, Any]) -> Figure:
    """Share of steps that accept so many drafted tokens or more, a line for each way of drafting."""
    figure, (axes,) = new_figure(1, 7.2, 4.4)
    names = [name for name, found in cell["contenders"].items() if found["accepted"]["share"]]
    for name in names:
        shares = [1.0, *cell["contenders"][name]["accepted"]["share"]]
        axes.plot(range(len(shares)), shares, markersize=6, **look(report, name))
    depth = max(len(cell["contenders"][name]["accepted"]["share"]) for name in names)
    axes.set_xticks(range(depth + 1))
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("drafted tokens accepted in a step, or more")
    axes.set_ylabel("share of steps")
    _legend(figure, report, names, columns=3)
    say(figure, f"{cell['prompt_set']}, {where(cell)}: how deep drafts are accepted")
    return figure


def _legend(figure: Figure, report: dict[str, Any], names: list[str], columns: int = 4) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label(report, name), **look(report, name)) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), frameon=False)
