"""The plot of a profile: what a step consists of, a bar for each drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa.plots import BLUE, GREEN, GREY, ORANGE, PALE, PURPLE, RED, SKY, new_figure, say

from .profile import ACCEPTANCE, COMMIT, DRAFTER, HEADS, LOOP, MASK, PARTS, TEXT, TREE, TRUNK
from .profile_report import called

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    TRUNK: PALE,
    HEADS: BLUE,
    TREE: ORANGE,
    MASK: GREEN,
    ACCEPTANCE: RED,
    COMMIT: PURPLE,
    DRAFTER: SKY,
    TEXT: "#F0E442",
    LOOP: GREY,
}


def step_parts(report: dict[str, Any]) -> Figure:
    """Stacked bars in milliseconds, with the least time of the trunk's forward by the machine's rates marked."""
    found = report["drafters"]
    figure, (axes,) = new_figure(1, 10, 1.9 + 0.75 * len(found))
    for place, figures in enumerate(found.values()):
        left = 0.0
        for part, says in PARTS.items():
            width = figures["step_ms"] * figures["parts"][part]["share"]
            label = says if not place else None
            axes.barh(place, width, left=left, height=0.6, color=COLOURS[part], label=label)
            left += width
        own = f"{figures['own_share']:.1%} ours"
        axes.text(left, place, f" {figures['step_ms']:.2f} ms, {own}", va="center", fontsize=10)
        limit = {} if place else {"label": "least time of the trunk's forward"}
        axes.vlines(figures["bound"]["ms"], place - 0.36, place + 0.36, color="black", linestyle=":", **limit)
    axes.set_yticks(range(len(found)), [called(*named) for named in found.items()])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(figures["step_ms"] for figures in found.values()))
    axes.set_xlabel("milliseconds of a step")
    axes.grid(False, axis="y")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    say(figure, "Where a step's time goes")
    return figure
