"""The plots of a run, made with matplotlib's objects: no window, no global state.

Every function returns a figure; a title says what one sees in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from medusa.tree import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any kind of colour blindness.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY, PALE = "#555555", "#D9D9D9"
COLUMN, NODE = 0.34, 18  # of the drawn tree: inches per leaf, points per node; 18 points are 0.25 inches
LINES = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY]
DPI = 150  # pixels per inch of a file: sharp on a page, small enough to be many there
ROOT_ALONE = "The tree: the root alone, which is plain decoding"


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    return buffer.getvalue()


def pixels(figure: Figure) -> Any:
    """The figure as an array of bytes [height, width, 3]."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3]


def acceptance(shares: Sequence[float], total: float | None = None) -> Figure:
    """How each depth of the tree adds to the tokens per step.

    ``shares``: of the steps that accept a token of depth 1, 2, …; ``total``: tokens per step as measured, if they were.
    """
    given = [share / before if before else 0.0 for before, share in pairwise([1.0, *shares])]
    figure, (axes,) = new_figure(1, max(6.6, 2.2 + 0.9 * len(shares)), 4.4)
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
    total = 1 + sum(shares) if total is None else total
    say(figure, f"A step yields {total:.2f} tokens: what each depth adds")
    return figure


def depth_shares(topology: Topology, node_share: Sequence[float]) -> list[float]:
    """From the share of steps that accept each node to that of each depth below the root."""
    pairs = list(zip(topology.depths, node_share, strict=True))
    return [sum(share for at, share in pairs if at == depth) for depth in range(1, topology.depth + 1)]


def cost_curve(calibration: dict[str, Any]) -> Figure:
    """What a tree size costs, what it brings and what comes out; the chosen size is marked."""
    rows, chosen = calibration["rows"], calibration["chosen"]
    nodes = [row["nodes"] for row in rows]
    figure, (cost, gain, rate) = new_figure(3, 13, 4.2)
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
    say(figure, f"Chosen for this machine: a tree of {rated}")
    return figure


def tree(topology: Topology, shares: Sequence[float] | None = None) -> Figure:
    """The tree by depth; a node shows its rank, its colour the share of steps that accepted it, if that is known."""
    across, down = _columns(topology), topology.depths
    width = max(across) + 1
    figure, (axes,) = new_figure(1, max(7.0, 2.2 + COLUMN * width), 1.6 + 0.85 * (topology.depth + 1))
    known = shares is not None
    shares = [0.0] * topology.size if shares is None else shares
    top = max(shares[1:], default=0.0) or 1.0
    for node, parent in enumerate(topology.parents[1:], start=1):
        thickness = 0.6 + 3.5 * shares[node] / top
        ends = [across[parent], across[node]], [down[parent], down[node]]
        axes.plot(*ends, color=GREY, linewidth=thickness, alpha=0.6, zorder=1)
    inks = _dots(axes, across[1:], down[1:], shares[1:], top, known)
    axes.scatter(across[0], down[0], color=GREY, s=NODE**2, zorder=2)  # every step accepts the root: off the scale
    for node, place in enumerate(zip(across, down, strict=True)):
        text, points = ("root", 7) if node == 0 else (str(topology.ranks[node] + 1), 9)
        ink = ["white", *inks][node]
        axes.text(*place, text, ha="center", va="center_baseline", fontsize=points, color=ink, zorder=3)
    _depths_alone(axes, topology.depth, width)
    size, depth = topology.size, topology.depth
    say(figure, f"The tree: {size} nodes, {depth} deep (numbers: 1 is the head's best guess)" if depth else ROOT_ALONE)
    return figure


def _dots(
    axes: Axes, across: Sequence[float], down: Sequence[int], shares: Sequence[float], top: float, known: bool
) -> list[str]:
    """Draw the nodes below the root, with the scale of their colours; return the colours of what is written on them."""
    from matplotlib.colors import PowerNorm

    look: dict[str, Any] = {"s": NODE**2, "edgecolors": GREY, "linewidths": 0.8, "zorder": 2}
    if not known:
        axes.scatter(across, down, color=PALE, **look)
        return ["black"] * len(across)
    norm = PowerNorm(0.5, 0, top)  # most nodes are accepted rarely, and their differences are what built the tree
    dots = axes.scatter(across, down, c=shares, cmap="cividis_r", norm=norm, **look)
    bar = axes.figure.colorbar(dots, ax=axes, fraction=0.03, pad=0.02)
    bar.set_label("share of steps that accept it", labelpad=8)
    return ["white" if norm(share) > 0.55 else "black" for share in shares]


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


def say(figure: Figure, title: str) -> None:
    """Give the figure its title."""
    figure.suptitle(title, fontsize=13, fontweight="bold")


def new_figure(panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, two to a row from four on, and the look that all share; sizes are inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    columns = panels if panels < 4 else 2
    many = list(figure.subplots(ceil(panels / columns), columns, squeeze=False).flat)
    for axes in many[panels:]:
        axes.remove()
    for axes in many[:panels]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=10)
    return figure, many[:panels]
