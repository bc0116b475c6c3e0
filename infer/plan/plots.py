"""What `medusa plan` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa.curveplots import MARKERS
from medusa.plots import BLUE, GREEN, GREY, LINES, RED, new_figure, say

from .picker import Assumed, Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def assumed(plan: Assumed) -> Figure:
    """Tokens per trunk forward, and speedup, against the number of drafted tokens; a star marks the best number."""
    figure, (tokens, speed) = new_figure(2, 11, 4.4)
    for place, chain in enumerate(plan.chains):
        look: dict[str, Any] = {
            "color": LINES[place % len(LINES)],
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 4,
        }
        counts = range(len(chain.tokens))
        tokens.plot(counts, chain.tokens, label=f"a = {chain.alpha:g}", **look)
        best = f"best N = {chain.best}" if chain.best else "off"
        speed.plot(counts, chain.speedups, label=f"a = {chain.alpha:g}: {best}", **look)
        for axes, values in ((tokens, chain.tokens), (speed, chain.speedups)):
            axes.plot(chain.best, values[chain.best], "*", color=RED, markersize=14, zorder=5)
    tokens.set_ylabel("tokens per trunk forward")
    speed.set_ylabel("times as fast as plain decoding")
    speed.axhline(1, color=GREY, linewidth=1.2, linestyle=":", zorder=1)
    for axes in (tokens, speed):
        axes.set_xlabel("drafted tokens N")
        axes.set_ylim(0, 1.45 * axes.dataLim.y1)  # the legend stands above the lines
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    say(figure, f"What a chain of N drafted tokens brings, each at {plan.cost:g} trunk forwards")
    return figure


def measured(plan: Plan) -> Figure:
    """Each candidate's tokens per step beside its step's time, and its speedup; a star marks what is recommended."""
    names = [each.candidate.label for each in plan.predictions]
    places = range(len(names))
    figure, (parts, speed) = new_figure(2, 11.5, 2.0 + 0.42 * len(names))
    tokens = [each.tokens_per_step for each in plan.predictions]
    parts.plot(tokens, places, "D", color=GREEN, label="tokens per step")
    parts.plot(
        [each.step_cost for each in plan.predictions], places, "o", color=BLUE, label="time of a step / plain step"
    )
    parts.set_xlabel("tokens, plain steps")
    parts.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, fontsize=9, ncols=2)
    for place, each in enumerate(plan.predictions):
        best = each is plan.chosen
        speed.plot(
            each.speedup,
            place,
            "*" if best else "o",
            color=RED if best else BLUE,
            markersize=15 if best else 7,
            markerfacecolor=None if each.fits else "white",
        )
    speed.axvline(1, color=GREY, linewidth=1.2, linestyle=":", zorder=1)
    speed.set_xlabel(f"times as fast as plain decoding, {plan.load.max_new_tokens} tokens")
    parts.set_yticks(places, names)
    speed.set_yticks(places, [""] * len(names))
    for axes in (parts, speed):
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, 1.15 * max(axes.dataLim.x1, 1.0))
    chosen = plan.chosen
    say(figure, f"Recommended: {chosen.candidate.label}, {chosen.speedup:.2f} x" if chosen else "Recommended: off")
    return figure
