"""Drawing the curves of a training log, of one run or of several."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from medusa.curves import Curve, Panel
from medusa.plots import GREY, LINES, RED, new_figure, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP"  # a second sign beside the colour
STYLES = ["-", "--", ":", "-."]  # of the runs that are compared
FROM_ZERO = ("tokens_per_second", "peak_memory_mb", "trunk_share")  # figures whose noise is not to look large
ROW = 15  # points that a row of the legend takes
SPARSE = 30  # points up to which each has its marker


def training(panels: Sequence[Panel]) -> Figure:
    """Several panels of a training log in one figure, four of them two by two."""
    wide = len(panels) if len(panels) < 4 else 2
    rows = ceil(len(panels) / wide)
    figure, many = new_figure(len(panels), 4.4 * wide if rows == 1 else 10, 3.8 if rows == 1 else 3.7 * rows)
    for axes, panel in zip(many, panels, strict=True):
        rows = draw(axes, panel)
        axes.set_title(f"{panel.stage}: {panel.title}", pad=9 + ROW * rows)  # above the legend
    best = [curve.best[1] for panel in panels for curve in panel.curves if curve.best]
    say(figure, f"Training: the best heads bring {max(best):.2f} tokens per step" if best else "Training")
    return figure


def curve(panel: Panel) -> Figure:
    """One panel of a training log, of one run or of several."""
    figure, (axes,) = new_figure(1, 6.4, 4.0)
    draw(axes, panel)
    say(figure, f"{panel.stage}: {panel.title}")
    return figure


def draw(axes: Axes, panel: Panel) -> int:
    """Draw a panel, and return how many rows its legend has.

    Colours tell heads apart, or runs where each has one curve; line styles tell runs apart.
    """
    runs = list(dict.fromkeys(each.run for each in panel.curves))
    names = list(dict.fromkeys(each.name for each in panel.curves))
    for each in panel.curves:
        run = runs.index(each.run)
        colour = (run if len(names) == 1 else names.index(each.name)) % 6
        steps, values = zip(*each.points, strict=True)
        marker = MARKERS[colour] if len(steps) <= SPARSE else None
        style = STYLES[run % len(STYLES)]
        axes.plot(steps, values, color=LINES[colour], linestyle=style, marker=marker, markersize=4)
        if each.best is not None:
            axes.plot(*each.best, "*", color=RED, markersize=14, zorder=5)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel(panel.unit)
    axes.margins(y=0.08)
    if panel.key in FROM_ZERO:
        axes.set_ylim(0, 1.08 * max(value for each in panel.curves for _, value in each.points) or 1)
    return _legend(axes, panel.curves, runs, names)


def _legend(axes: Axes, curves: Sequence[Curve], runs: list[str], names: list[str]) -> int:
    """A line per head and a line per run, above the axes: no place inside them is free for sure."""
    from matplotlib.lines import Line2D

    lines = []
    if len(names) > 1:
        colours = [place % 6 for place in range(len(names))]
        lines = [Line2D([], [], color=LINES[colour], marker=MARKERS[colour], markersize=4) for colour in colours]
    labels = list(names) if lines else []
    if len(runs) > 1:
        for place, run in enumerate(runs):
            colour = GREY if len(names) > 1 else LINES[place % 6]
            lines.append(Line2D([], [], color=colour, linestyle=STYLES[place % len(STYLES)]))
            labels.append(run)
    best = [each for each in curves if each.best is not None]
    if best:
        lines.append(Line2D([], [], color=RED, marker="*", linestyle="", markersize=11))
        labels.append("best: " + ", ".join(f"{each.best[1]:.2f} at {each.best[0]}" for each in best if each.best))
    columns = 1
    if lines:
        columns = 1 if max(map(len, labels)) > 24 else min(len(lines), 3)
        look: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(lines, labels, ncols=columns, frameon=False, fontsize=9, **look)
    return ceil(len(lines) / columns)
