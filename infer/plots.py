"""The report's plots, made with matplotlib's objects: no window, no global state.

Every function returns a figure; a title says what one sees in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.checkpoint import CALIBRATION, LOG
from medusa.files import read_json
from medusa.tree import Topology

from .report import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any kind of colour blindness.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY, PALE = "#555555", "#D9D9D9"
COLUMN, NODE = 0.34, 18  # of the drawn tree: inches per leaf, points per node; 18 points are 0.25 inches
LINES = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY]
MARKERS = "osD^vP"  # a second sign beside the colour


def figures(report: dict[str, Any], run: Path) -> dict[str, Figure]:
    """All figures by file name; those of records that ``run`` does not hold are left out."""
    made = {"speed": speed(report)}
    if report["accepted"]["share"]:
        made["acceptance"] = acceptance(report)
    if report["drafter"].get("tree", {"nodes": 1})["nodes"] > 1:
        made["tree"] = tree(report)
    if (run / CALIBRATION).is_file():
        made["cost_curve"] = cost_curve(read_json(run / CALIBRATION))
    if (run / LOG).is_file():
        events = [json.loads(line) for line in (run / LOG).read_text(encoding="utf-8").splitlines()]
        if any("stage" in event and "step" in event for event in events):
            made["training"] = training(events)
    return made


def speed(report: dict[str, Any]) -> Figure:
    """Bars of tokens per second, each with its speedup over ``generate``."""
    names = list(report["contenders"])
    rates = [report["contenders"][name]["tokens_per_second"] for name in names]
    over = {each["of"]: each for each in report["speedups"] if each["over"] == "generate"}
    figure, (axes,) = _figure(1, 7.5, 1.2 + 0.65 * len(names))
    places = range(len(names))
    axes.barh(places, rates, color=[PALE, SKY, BLUE, *LINES][: len(names)], height=0.6)
    for place, (name, rate) in enumerate(zip(names, rates, strict=True)):
        times = f"  ({over[name]['median']:.2f} x generate)" if name in over else ""
        axes.text(rate, place, f" {rate:.0f}{times}", va="center", fontsize=10)
    axes.set_yticks(places, [label(report, name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(rates))  # room for the words behind the longest bar
    axes.set_xlabel("tokens per second")
    axes.grid(False)  # the numbers stand beside the bars
    best = over[report["drafter"]["name"]]
    _say(
        figure,
        f"On held-out prompts the {report['drafter']['name']} drafter decodes at {best['median']:.2f} x generate",
    )
    return figure


def acceptance(report: dict[str, Any]) -> Figure:
    """How each depth of the tree adds to the tokens per step."""
    shares, given = report["accepted"]["share"], report["accepted"]["conditional"]
    total = report["contenders"][report["drafter"]["name"]]["tokens_per_step"]
    figure, (axes,) = _figure(1, max(6.6, 2.2 + 0.9 * len(shares)), 4.4)
    below = [1 + sum(shares[:depth]) for depth in range(len(shares))]
    axes.bar(0, 1, color=GREY, width=0.7, label="the trunk's own token")
    depths = range(1, len(shares) + 1)
    axes.bar(depths, below, color=PALE, width=0.7, label="tokens of smaller depths")
    axes.bar(depths, shares, bottom=below, color=BLUE, width=0.7, label="added by this depth")
    for depth, share, base in zip(depths, shares, below, strict=True):
        axes.text(depth, base + share, f"+{share:.2f}", ha="center", va="bottom", color=BLUE, fontsize=10)
    chances = [f"{depth}\n{chance:.0%}" for depth, chance in enumerate(given, start=1)]
    axes.set_xticks([0, *depths], ["0\n(root)", *chances])
    axes.set_xlabel("depth in the tree; below it, accepted where the depth before was")
    axes.set_ylabel("tokens per step, up to this depth")
    axes.set_ylim(0, (1 + sum(shares)) * 1.35)  # the legend stands above the bars
    axes.legend(loc="upper left", frameon=False)
    axes.grid(False, axis="x")
    _say(figure, f"A step yields {total:.2f} tokens: what each depth adds")
    return figure


def cost_curve(calibration: dict[str, Any]) -> Figure:
    """What a tree size costs, what it brings and what comes out; the chosen size is marked."""
    rows, chosen = calibration["rows"], calibration["chosen"]
    nodes = [row["nodes"] for row in rows]
    figure, (cost, gain, rate) = _figure(3, 13, 4.2)
    for key, says, colour, marker in (
        ("step_ms", "whole step", BLUE, "o"),
        ("forward_ms", "trunk forward", ORANGE, "s"),
    ):
        cost.plot(nodes, [row[key] for row in rows], color=colour, marker=marker, label=says)
    cost.set_ylabel("milliseconds")
    cost.set_ylim(bottom=0)
    cost.set_title("cost of a step")
    cost.legend(loc="upper left", frameon=False)
    gain.plot(nodes, [row["tokens_per_step"] for row in rows], color=GREEN, marker="D")
    gain.set_ylabel("tokens per step")
    gain.set_title("tokens per step")
    rate.plot(nodes, [row["tokens_per_second"] for row in rows], color=BLUE, marker="o")
    rate.set_ylabel("tokens per second")
    rate.set_ylim(0, 1.2 * max(row["tokens_per_second"] for row in rows))
    rate.set_title("tokens per second")
    rate.plot(
        chosen["nodes"], chosen["tokens_per_second"], "*", color=RED, markersize=17, label=f"chosen: {chosen['nodes']}"
    )
    rate.legend(loc="lower right", frameon=False)
    for axes in (cost, gain, rate):
        axes.axvline(chosen["nodes"], color=RED, linestyle=":", linewidth=1.2, zorder=0)
        axes.set_xscale("log", base=2)
        ticks = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= max(nodes)]
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
        axes.set_xlabel("nodes in the tree, the root included")
    rated = f"{chosen['nodes']} nodes, {chosen['tokens_per_second']:.0f} tokens/s expected"
    _say(figure, f"Chosen for this machine: a tree of {rated}")
    return figure


def training(events: list[dict[str, Any]]) -> Figure:
    """The trunk's loss; the heads' loss, accuracy and tokens per step. Panels without data are left out."""
    trunk = [event for event in events if event.get("stage") == "trunk"]
    heads = [event for event in events if event.get("stage") == "heads"]
    panels = [
        ("trunk: loss", "nats per token", _curves(trunk, {"loss": "training", "heldout_loss": "held out"})),
        ("heads: loss", "nats per token", _per_head(heads, "head_loss")),
        ("heads: first guess right, in training", "share of tokens", _per_head(heads, "top1")),
        ("heads: tokens per step, held out", "tokens per step", _curves(heads, {"tokens_per_step": ""})),
    ]
    panels = [panel for panel in panels if panel[2]]
    figure, many = _figure(len(panels), 4.4 * len(panels) if len(panels) < 4 else 10, 3.8 if len(panels) < 4 else 7.4)
    for axes, (title, unit, curves) in zip(many, panels, strict=True):
        for index, (name, points) in enumerate(curves.items()):
            steps, values = zip(*points, strict=True)
            sparse = len(points) <= 30
            axes.plot(
                steps,
                values,
                color=LINES[index % 6],
                marker=MARKERS[index % 6] if sparse else None,
                markersize=4,
                label=name,
            )
        axes.set_title(title)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(unit)
        if len(curves) > 1:
            axes.legend(frameon=False, ncols=2 if len(curves) > 3 else 1)
    last = next((event["tokens_per_step"] for event in reversed(heads) if event.get("tokens_per_step")), None)
    _say(figure, "Training" if last is None else f"Training: the heads end at {last:.2f} tokens per step")
    return figure


def _curves(events: list[dict[str, Any]], keys: dict[str, str]) -> dict[str, list[tuple[float, float]]]:
    """Points (step, value) of each key that events hold, by its name in the legend."""
    found = {}
    for key, name in keys.items():
        points = [(event["step"], event[key]) for event in events if event.get(key) is not None]
        if points:
            found[name] = points
    return found


def _per_head(events: list[dict[str, Any]], key: str) -> dict[str, list[tuple[float, float]]]:
    rows = [(event["step"], event[key]) for event in events if event.get(key)]
    heads = max((len(values) for _, values in rows), default=0)
    return {f"head {head}": [(step, values[head]) for step, values in rows] for head in range(heads)}


def tree(report: dict[str, Any]) -> Figure:
    """The tree by depth; a node shows its rank, its colour the share of steps that accepted it."""
    from matplotlib.colors import PowerNorm

    drafter = report["drafter"]
    topology = Topology(tuple(drafter["tree"]["parents"]), tuple(drafter["tree"]["ranks"]))
    shares = drafter["node_share"]
    across, down = _columns(topology), topology.depths
    width = max(across) + 1
    figure, (axes,) = _figure(1, max(7.0, 2.2 + COLUMN * width), 1.6 + 0.85 * (topology.depth + 1))
    top = max(shares[1:]) or 1.0
    norm = PowerNorm(0.5, 0, top)  # most nodes are accepted rarely, and their differences are what built the tree
    for node, parent in enumerate(topology.parents[1:], start=1):
        thickness = 0.6 + 3.5 * shares[node] / top
        ends = [across[parent], across[node]], [down[parent], down[node]]
        axes.plot(*ends, color=GREY, linewidth=thickness, alpha=0.6, zorder=1)
    look: dict[str, Any] = {"cmap": "cividis_r", "norm": norm, "edgecolors": GREY, "linewidths": 0.8, "zorder": 2}
    dots = axes.scatter(across[1:], down[1:], c=shares[1:], s=NODE**2, **look)
    axes.scatter(across[0], down[0], color=GREY, s=NODE**2, zorder=2)  # every step accepts the root: off the scale
    for node, place in enumerate(zip(across, down, strict=True)):
        text, points = ("root", 7) if node == 0 else (str(topology.ranks[node] + 1), 9)
        ink = "white" if node == 0 or norm(shares[node]) > 0.55 else "black"
        axes.text(*place, text, ha="center", va="center_baseline", fontsize=points, color=ink, zorder=3)
    bar = figure.colorbar(dots, ax=axes, fraction=0.03, pad=0.02)
    bar.set_label("share of steps that accept it", labelpad=8)
    _depths_alone(axes, topology.depth, width)
    _say(figure, f"The tree: {topology.size} nodes, {topology.depth} deep (numbers: 1 is the head's best guess)")
    return figure


def _columns(topology: Topology) -> list[float]:
    """Horizontal place of each node: leaves side by side, a parent above the middle of its children."""
    children: list[list[int]] = [[] for _ in topology.parents]
    for node, parent in enumerate(topology.parents[1:], start=1):
        children[parent].append(node)
    places = [0.0] * topology.size
    order, stack, leaves = [], [0], 0
    while stack:
        node = stack.pop()
        order.append(node)
        stack += sorted(children[node], key=lambda child: -topology.ranks[child])  # the best is popped first: leftmost
        if not children[node]:
            places[node] = leaves
            leaves += 1
    for node in reversed(order):
        if children[node]:
            places[node] = sum(places[child] for child in children[node]) / len(children[node])
    return places


def _depths_alone(axes: Axes, depth: int, width: float) -> None:
    """Axes without lines, marked with depths only."""
    axes.set_ylim(depth + 0.5, -0.5)
    axes.set_xlim(-0.8, width - 0.2)
    axes.set_yticks(range(depth + 1))
    axes.set_ylabel("depth")
    axes.set_xticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _say(figure: Figure, title: str) -> None:
    figure.suptitle(title, fontsize=13, fontweight="bold")


def _figure(panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, four of them two by two, and the look that all share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    rows, columns = (2, 2) if panels == 4 else (1, panels)
    many = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in many:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=10)
    return figure, many
