"""The curves of a log: every figure of every stage, whatever their names, and what a killed process leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa.curves import as_json, panels, read_log
from medusa.errors import UserError

HEADS = [
    {"stage": "heads", "step": 5, "loss": 4.0, "top1": [0.1, 0.2], "threads": 1},
    {"stage": "heads", "step": 5, "tokens_per_step": 1.5, "acceptance": [0.5]},
    {"stage": "heads", "step": 10, "loss": 3.0, "top1": [0.3, 0.4], "a_new_one": 7},
    {"stage": "heads", "step": 10, "tokens_per_step": 1.25, "acceptance": [0.25, 0.5]},
]


def points(found) -> dict[tuple[str, str], dict[str, list]]:
    return {(panel.stage, panel.key): {curve.name: curve.points for curve in panel.curves} for panel in found}


def test_each_figure_has_its_panel_in_a_fixed_order() -> None:
    assert points(panels({"run": HEADS})) == {
        ("heads", "loss"): {"training": [(5, 4.0), (10, 3.0)]},
        ("heads", "tokens_per_step"): {"": [(5, 1.5), (10, 1.25)]},
        ("heads", "acceptance"): {"depth 1": [(5, 0.5), (10, 0.25)], "depth 2": [(10, 0.5)]},
        ("heads", "top1"): {"head 0": [(5, 0.1), (10, 0.3)], "head 1": [(5, 0.2), (10, 0.4)]},
        ("heads", "a_new_one"): {"": [(10, 7)]},
    }
    keys = [panel.key for panel in panels({"run": HEADS})]
    assert keys == ["loss", "tokens_per_step", "acceptance", "top1", "a_new_one"]
    assert panels({"run": HEADS})[-1].title == "a new one"


def test_held_out_loss_is_drawn_with_that_of_training() -> None:
    events = [{"stage": "any name", "step": 1, "heldout_loss": 2.0}, {"stage": "any name", "step": 2, "loss": 1.0}]
    assert points(panels({"run": events})) == {("any name", "loss"): {"held out": [(1, 2.0)], "training": [(2, 1.0)]}}


def test_the_best_is_what_was_kept_or_else_the_highest_so_far() -> None:
    def best(**options):
        (found,) = (panel for panel in panels({"run": HEADS}, **options) if panel.key == "tokens_per_step")
        return found.curves[0].best

    assert best() == (5, 1.5)
    assert best(kept={("run", "heads"): 10}) == (10, 1.25)  # others were better, and too dear
    assert best(kept={("run", "joint"): 10, ("other", "heads"): 10}) == (5, 1.5)


def test_runs_share_panels_and_keep_their_own_curves() -> None:
    other = [{"stage": "trunk", "step": 1, "loss": 9.0}, *HEADS[:1]]
    found = panels({"one": HEADS, "two": other})
    assert [(panel.stage, panel.key) for panel in found][:2] == [("heads", "loss"), ("heads", "tokens_per_step")]
    loss = next(panel for panel in found if panel.key == "loss" and panel.stage == "heads")
    assert [(curve.run, curve.points) for curve in loss.curves] == [("one", [(5, 4.0), (10, 3.0)]), ("two", [(5, 4.0)])]
    assert found[-1].stage == "trunk" and [curve.run for curve in found[-1].curves] == ["two"]


def test_what_is_no_number_is_left_out() -> None:
    values = [None, "text", True, float("nan"), float("inf"), {"a": 1}, [], [None, 2.0]]
    events = [{"stage": "s", "step": step, "x": value} for step, value in enumerate(values)]
    assert points(panels({"run": events})) == {("s", "x"): {"head 1": [(7, 2.0)]}}
    assert panels({"run": events[:7]}) == []


@given(
    st.lists(
        st.fixed_dictionaries(
            {"stage": st.sampled_from(["trunk", "heads", "joint"]), "step": st.integers(0, 9)},
            optional={
                "loss": st.floats(allow_nan=True),
                "tokens_per_step": st.floats(1, 9),
                "top1": st.lists(st.floats(0, 1), max_size=3),
                "else": st.integers(),
            },
        )
    )
)
def test_every_finite_value_is_in_the_json_once(events: list) -> None:
    content = json.loads(json.dumps(as_json(panels({"run": events})), allow_nan=False))
    held = [
        (stage, step, value)
        for stage, figures in content.get("run", {}).items()
        for curves in figures.values()
        for curve in curves.values()
        for step, value in zip(curve["steps"], curve["values"], strict=True)
    ]
    logged = []
    for event in events:
        for key in set(event) - {"stage", "step"}:
            values = event[key] if isinstance(event[key], list) else [event[key]]
            logged += [(event["stage"], event["step"], value) for value in values if abs(value) < float("inf")]
    assert sorted(held) == sorted(logged)


def test_a_torn_last_line_and_foreign_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    log = tmp_path / "train_log.jsonl"
    whole = "".join(json.dumps(event) + "\n" for event in HEADS)
    log.write_text(whole + '{"stage": "heads", "step": 1')
    assert read_log(log) == (HEADS, 1)
    log.write_bytes(b'[1]\n{"a": 1}\n{"stage": "x", "step": "1"}\n\n\xff\n' + whole.encode())
    assert read_log(log) == (HEADS, 4)
    for cut in range(len(whole)):
        log.write_text(whole[:cut])
        events, broken = read_log(log)
        assert events == HEADS[: len(events)] and broken <= 1


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train_log.jsonl can't be read .*: give a folder made by `medusa train`"):
        read_log(tmp_path / "train_log.jsonl")
