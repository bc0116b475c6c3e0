"""The plots: each shows its figures, within its frame and without overlaps."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path

import pytest

from medusa.checkpoint import CALIBRATION, LOG
from medusa.curveplots import curve, training
from medusa.curves import Panel, panels
from medusa.infer.bench.plots import figures, speed
from medusa.plots import (
    COLUMN,
    NODE,
    _columns,
    acceptance,
    cost_curve,
    depth_shares,
    pixels,
    png,
    tree,
)
from medusa.testing import random_topology
from medusa.tree import Topology

SIZES = (1, 2, 4, 8, 16, 64)
ROWS = [
    {
        "nodes": size,
        "depth": min(4, size - 1),
        "tokens_per_step": size**0.25,
        "step_ms": 2 + size / 10,
        "forward_ms": 1 + size / 11,
        "tokens_per_second": 1e3 * size**0.25 / (2 + size / 10),
    }
    for size in SIZES
]
EVENTS = [
    {"stage": "trunk", "step": 0, "loss": 4.0},
    {"stage": "trunk", "step": 10, "loss": 2.0, "heldout_loss": 2.2},
    {"stage": "heads", "step": 0, "head_loss": [3.0, 3.5, 4.0], "top1": [0.2, 0.1, 0.0]},
    {"stage": "heads", "step": 10, "head_loss": [1.0, 1.5, 2.0], "top1": [0.6, 0.5, 0.4], "tokens_per_step": 1.9},
]


def report_of(topology: Topology) -> dict:
    rng = random.Random(0)
    return {
        "contenders": {
            name: {"tokens_per_second": rate, "tokens_per_step": 1.5}
            for name, rate in (("generate", 100.0), ("none", 120.0), ("hydra", 213.0))
        },
        "speedups": [
            {"of": "none", "over": "generate", "median": 1.2},
            {"of": "hydra", "over": "generate", "median": 2.13},
            {"of": "hydra", "over": "none", "median": 1.8},
        ],
        "accepted": {"share": [0.4, 0.1], "conditional": [0.4, 0.25]},
        "drafter": {
            "name": "hydra",
            "tree": {
                "parents": list(topology.parents),
                "ranks": list(topology.ranks),
                "nodes": topology.size,
                "depth": topology.depth,
            },
            "node_share": [1.0, *(rng.random() for _ in range(topology.size - 1))],
        },
    }


REPORT = report_of(random_topology(random.Random(1), 20))


def tree_of(topology: Topology):
    return tree(topology, report_of(topology)["drafter"]["node_share"])


def texts(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(each.get_text() for each in figure.findobj(Text))


def panel(key: str, runs: int = 1, heads: int = 3) -> Panel:
    """The panel of a figure that every head has, unless ``heads`` is 0."""
    events = [{"stage": "heads", "step": step, key: [step / 10 + head for head in range(heads)]} for step in (1, 2, 3)]
    events = events if heads else [{"stage": "heads", "step": step, key: step % 3} for step in (1, 2, 3)]
    (found,) = panels({f"a run of some name, {run}": events for run in range(runs)})
    return found


FIGURES = {
    "speed": lambda: speed(REPORT),
    "acceptance": lambda: acceptance(REPORT["accepted"]["share"]),
    "acceptance, 8 deep": lambda: acceptance([0.9] * 8),
    "cost curve": lambda: cost_curve({"rows": ROWS, "chosen": ROWS[3]}),
    "training": lambda: training(panels({"run": EVENTS})),
    "training of heads alone": lambda: training(panels({"run": EVENTS[2:]})),
    "a curve": lambda: curve(panel("loss", heads=0)),
    "curves of heads": lambda: curve(panel("head_loss", heads=6)),
    "curves of an unknown figure": lambda: curve(panel("a_new_figure", heads=1)),
    "the best marked": lambda: curve(panel("tokens_per_step", heads=0)),
    "runs compared": lambda: curve(panel("tokens_per_step", 4, heads=0)),
    "heads of runs compared": lambda: curve(panel("head_loss", 3, heads=5)),
    "tree": lambda: tree_of(random_topology(random.Random(1), 20)),
    "tree of a chain": lambda: tree_of(Topology.chain(4)),
    "tree of 64": lambda: tree_of(random_topology(random.Random(2), 64)),
    "tree whose acceptance is not known": lambda: tree(random_topology(random.Random(3), 30)),
    "tree of the root alone": lambda: tree(Topology.root(), [1.0]),
}


def shown_ticks(axes) -> list:
    """The labels of the horizontal axis that lie in view: the others are not drawn."""
    low, high = axes.get_xlim()
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    return [label for place, label in ticks if low <= place <= high and label.get_text()]


@pytest.mark.parametrize("name", list(FIGURES))
def test_titles_legends_and_labels_stay_in_the_frame_and_apart(name: str) -> None:
    figure = FIGURES[name]()
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    frame = figure.bbox
    boxes = [("title", figure._suptitle.get_window_extent(renderer))]
    for axes in figure.axes:
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label, axes.get_legend(), *axes.texts):
            if part is not None and (not hasattr(part, "get_text") or part.get_text()):
                boxes.append((str(part), part.get_window_extent(renderer)))
        boxes += [(str(label), label.get_window_extent(renderer)) for label in shown_ticks(axes)]
    for what, box in boxes:
        assert frame.x0 - 1 <= box.x0 and box.x1 <= frame.x1 + 1, f"{what} is cut at a side"
        assert frame.y0 - 1 <= box.y0 and box.y1 <= frame.y1 + 1, f"{what} is cut at top or bottom"
    for (one, first), (other, second) in combinations(boxes, 2):
        assert not first.overlaps(second), f"{one} lies on {other}"


def test_speed_prints_each_rate_and_ratio() -> None:
    said = texts(speed(REPORT))
    assert "213  (2.13 x generate)" in said and "120  (1.20 x generate)" in said and "2.13 x generate" in said


def test_acceptance_stacks_to_the_tokens_per_step() -> None:
    figure = acceptance([0.4, 0.1], 1.5)
    tops = [bar.get_y() + bar.get_height() for bar in figure.axes[0].patches]
    assert max(tops) == pytest.approx(1.5)
    assert "+0.40" in texts(figure) and "25%" in texts(figure)


def test_cost_curve_marks_the_chosen_size() -> None:
    figure = cost_curve({"rows": ROWS, "chosen": ROWS[3]})
    star = next(line for line in figure.axes[2].lines if line.get_marker() == "*")
    assert star.get_xdata()[0] == 8 and star.get_ydata()[0] == ROWS[3]["tokens_per_second"]
    assert "8 nodes" in texts(figure)


def test_training_draws_what_the_log_holds() -> None:
    figure = training(panels({"run": EVENTS}))
    assert [axes.get_title() for axes in figure.axes] == [
        "trunk: loss",
        "heads: loss of each head",
        "heads: tokens per step, held out",
        "heads: first guess right, in training",
    ]
    assert list(figure.axes[0].lines[0].get_ydata()) == [4.0, 2.0]
    assert list(figure.axes[1].lines[2].get_ydata()) == [4.0, 2.0]
    assert "bring 1.90 tokens" in texts(figure)
    assert len(training(panels({"run": EVENTS[2:]})).axes) == 3  # a trunk trained elsewhere
    assert len(training(panels({"run": EVENTS[:2]})).axes) == 1


def test_the_best_is_marked_where_it_is() -> None:
    figure = curve(panel("tokens_per_step", 2, heads=0))
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert [(star.get_xdata()[0], star.get_ydata()[0]) for star in stars] == [(2, 2), (2, 2)]
    assert "best: 2.00 at 2, 2.00 at 2" in texts(figure)
    assert not [line for line in curve(panel("loss", heads=0)).axes[0].lines if line.get_marker() == "*"]


def test_heads_differ_in_colour_and_runs_in_style() -> None:
    lines = curve(panel("head_loss", 2, heads=3)).axes[0].lines
    looks = [(line.get_color(), line.get_linestyle()) for line in lines]
    assert (
        len(set(looks)) == 6 and len({colour for colour, _ in looks}) == 3 and len({style for _, style in looks}) == 2
    )
    alone = [line.get_color() for line in curve(panel("loss", 2, heads=0)).axes[0].lines]
    assert len(set(alone)) == 2  # one curve each: colours are free for the runs


def test_shares_of_depths_are_sums_over_their_nodes() -> None:
    topology = Topology.from_paths([[0], [1], [0, 0], [0, 1]])
    shares = dict(zip(topology.paths, [1.0, 0.5, 0.25, 0.2, 0.1], strict=True))
    assert depth_shares(topology, [shares[path] for path in topology.paths]) == pytest.approx([0.75, 0.3])


def test_a_figure_as_file_and_as_pixels() -> None:
    figure = acceptance([0.5])
    assert png(figure).startswith(b"\x89PNG")
    assert pixels(figure).shape == (440, 660, 3) and pixels(figure).dtype == "uint8"


@pytest.mark.parametrize("seed", range(5))
def test_nodes_of_a_level_never_touch(seed: int) -> None:
    topology = random_topology(random.Random(seed), 64)
    places = _columns(topology)
    assert COLUMN * 72 > NODE
    for one, other in combinations(range(topology.size), 2):
        if topology.depths[one] == topology.depths[other]:
            assert abs(places[one] - places[other]) >= 1


def test_better_ranks_stand_further_left() -> None:
    topology = Topology.from_paths([[2], [0], [1], [0, 3], [0, 1]])
    places = dict(zip(topology.paths, _columns(topology), strict=True))
    assert places[(0,)] < places[(1,)] < places[(2,)]
    assert places[(0, 1)] < places[(0, 3)] < places[(1,)]
    assert places[(0,)] == (places[(0, 1)] + places[(0, 3)]) / 2


def test_only_what_is_there_is_drawn(tmp_path: Path) -> None:
    assert list(figures(REPORT, tmp_path)) == ["speed", "acceptance", "tree"]
    (tmp_path / CALIBRATION).write_text(json.dumps({"rows": ROWS, "chosen": ROWS[3]}), encoding="utf-8")
    (tmp_path / LOG).write_text("".join(json.dumps(each) + "\n" for each in EVENTS), encoding="utf-8")
    assert list(figures(REPORT, tmp_path)) == ["speed", "acceptance", "tree", "cost_curve", "training"]
    root = report_of(Topology.root()) | {"accepted": {"share": [], "conditional": []}}
    assert list(figures(root, tmp_path)) == ["speed", "cost_curve", "training"]
