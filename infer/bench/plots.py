"""The benchmark's plots: that of the speeds, and those of the run that stand beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa import plots
from medusa.checkpoint import CALIBRATION, LOG
from medusa.curveplots import training
from medusa.curves import Panel, panels, read_log
from medusa.files import read_json
from medusa.plots import BLUE, LINES, PALE, SKY, new_figure, say
from medusa.tables import label
from medusa.tree import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERVIEW = ("head_loss", "top1", "tokens_per_step")  # of a stage that trains heads; of any other its loss


def figures(report: dict[str, Any], run: Path) -> dict[str, Figure]:
    """All figures by file name; those of records that ``run`` does not hold are left out."""
    made = {"speed": speed(report)}
    drafter, shares = report["drafter"], report["accepted"]["share"]
    if shares:
        made["acceptance"] = plots.acceptance(shares, report["contenders"][drafter["name"]]["tokens_per_step"])
    if drafter.get("tree", {"nodes": 1})["nodes"] > 1:
        topology = Topology(tuple(drafter["tree"]["parents"]), tuple(drafter["tree"]["ranks"]))
        made["tree"] = plots.tree(topology, drafter["node_share"])
    if (run / CALIBRATION).is_file():
        made["cost_curve"] = plots.cost_curve(read_json(run / CALIBRATION))
    if (run / LOG).is_file():
        events, _ = read_log(run / LOG)
        if overview := _overview(panels({run.name: events})):
            made["training"] = training(overview)
    return made


def _overview(made: Sequence[Panel]) -> list[Panel]:
    """What the benchmark shows of training."""
    with_heads = {panel.stage for panel in made if panel.key in OVERVIEW}
    return [panel for panel in made if panel.key in OVERVIEW or (panel.key == "loss" and panel.stage not in with_heads)]


def speed(report: dict[str, Any]) -> Figure:
    """Bars of a benchmark's tokens per second, each with its speedup over ``generate``."""
    names = list(report["contenders"])
    rates = [report["contenders"][name]["tokens_per_second"] for name in names]
    over = {each["of"]: each for each in report["speedups"] if each["over"] == "generate"}
    figure, (axes,) = new_figure(1, 7.5, 1.2 + 0.65 * len(names))
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
    say(
        figure,
        f"On held-out prompts the {report['drafter']['name']} drafter decodes at {best['median']:.2f} x generate",
    )
    return figure
