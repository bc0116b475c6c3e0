"""`medusa plan` for outputs of another length than benchmarked, and for draft temperatures: by what a report measured.

golden/plan-lengths holds what plans read of a benchmark of a demo run (6 prompts of 64 tokens, continued by 200, twice;
by the processor's clock), and in measured.json how many times faster than no drafts the same drafters were where each
length was benchmarked by itself.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa.__main__ import main
from medusa.infer.plan.cells import read_cells
from medusa.infer.plan.load import Load
from medusa.infer.plan.picker import explain, plan, predict
from medusa.infer.plan.sources import gather

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RECORDED, RUN = GOLDEN / "plan-lengths", GOLDEN / "plan"
MEASURED = {int(tokens): found for tokens, found in json.loads((RECORDED / "measured.json").read_text()).items()}
CLOSE = 0.15  # of a measured speedup


def written(folder: Path, report: dict[str, Any]) -> Path:
    (folder / "benchmark").mkdir(parents=True, exist_ok=True)
    (folder / "benchmark" / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return folder


@pytest.fixture
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / "benchmark" / "report.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("tokens", MEASURED)
def test_every_length_is_predicted_as_it_was_measured_by_itself(tokens: int) -> None:
    load = Load(max_new_tokens=tokens)
    candidates, _, notes = gather(RECORDED, load)
    assert notes == [] and {each.method for each in candidates} == set(MEASURED[tokens])
    for each in candidates:
        assert predict(each, load).speedup == pytest.approx(MEASURED[tokens][each.method], rel=CLOSE), each.method
        assert not each.estimated


def test_the_shares_of_the_whole_texts_would_not_do() -> None:
    """Greedy text comes to repeat itself: of its beginning lookup accepts half as much as of the whole."""
    load = Load(max_new_tokens=24)
    lookup = next(each for each in gather(RECORDED, load)[0] if each.method == "prompt-lookup")
    whole = predict(replace(lookup, along=(), plain_along=()), load)
    assert whole.speedup > 1.4 * MEASURED[24]["prompt-lookup"] and whole.tokens_per_step > 1.7 * 2.1
    assert predict(lookup, load).tokens_per_step == pytest.approx(23 / predict(lookup, load).steps)
    best = {tokens: plan(RECORDED, Load(max_new_tokens=tokens)).chosen for tokens in (24, 200)}
    assert best[24].candidate.method != "prompt-lookup" and best[200].candidate.method == "prompt-lookup"


def test_the_length_that_was_benchmarked_is_what_its_runs_took(report: dict[str, Any]) -> None:
    for each in gather(RECORDED, Load(max_new_tokens=200))[0]:
        found = predict(each, Load(max_new_tokens=200))
        trials = report["cells"][0]["contenders"][each.method]["trials"]
        seconds, steps = (
            sorted(sorted(trial[key] for trial in batch)[1] for batch in trials) for key in ("seconds", "steps")
        )
        assert 1e-3 * found.request_ms == pytest.approx((seconds[2] + seconds[3]) / 2, rel=0.08)
        assert steps[2] - 3 <= found.steps <= steps[3]
        shown = "\n".join(explain(found, Load(max_new_tokens=200)))
        assert "as measured along the texts" in shown and "over the whole texts" in shown


def test_much_longer_outputs_are_estimates_and_shorter_ones_are_not() -> None:
    for tokens, estimated in ((2, ""), (400, ""), (401, "from shorter outputs")):
        candidates, _, notes = gather(RECORDED, Load(max_new_tokens=tokens))
        assert {each.estimated for each in candidates} == {estimated} and len(notes) == bool(estimated)
    assert "--max-new-tokens 401`, which then serves for shorter ones as well" in notes[0]


def test_times_along_the_text_scale_with_the_cost_of_a_step() -> None:
    way = next(each for each in gather(RECORDED, Load(max_new_tokens=100))[0] if each.method == "auto")
    one, two = (
        predict(way, Load(max_new_tokens=100)),
        predict(replace(way, step_ms=2 * way.step_ms), Load(max_new_tokens=100)),
    )
    assert two.request_ms - way.first_ms == pytest.approx(2 * (one.request_ms - way.first_ms))
    assert two.plain_request_ms == one.plain_request_ms and two.steps == one.steps


def test_generate_is_followed_along_its_texts_too(tmp_path: Path, report: dict[str, Any]) -> None:
    for batch in report["cells"][0]["contenders"]["generate"]["trials"]:
        for trial in batch:  # a call that takes a second before its second token
            trial["pace"] = [[n, s, at + (1.0 if n > 1 else 0.0)] for n, s, at in trial["pace"]]
    slow = plan(written(tmp_path, report), Load(max_new_tokens=2)).over_generate
    assert slow > 20 * plan(RECORDED, Load(max_new_tokens=2)).over_generate


def test_a_report_without_milestones_goes_by_shares(tmp_path: Path, report: dict[str, Any]) -> None:
    for figures in report["cells"][0]["contenders"].values():
        for trial in (trial for batch in figures["trials"] for trial in batch):
            del trial["pace"]
    candidates, _, notes = gather(written(tmp_path, report), Load(max_new_tokens=24))
    assert all(not each.along and not each.plain_along for each in candidates)
    assert "of 24 another share" in notes[0] and {each.estimated for each in candidates} == {"from longer outputs"}


def test_a_runs_other_trees_fare_along_the_text_as_its_own_did(tmp_path: Path, report: dict[str, Any]) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "report")
    report["contenders"]["auto"]["tree"] = {"nodes": 4}  # the calibration's chosen tree
    folder = written(tmp_path / "run", report)
    trees = {
        each.nodes: each for each in gather(folder, Load(max_new_tokens=24))[0] if each.source == "calibration.json"
    }
    own = read_cells(folder)[0].ways["auto"].along
    assert 4 not in trees and own
    rows = {row["nodes"]: row for row in json.loads((folder / "calibration.json").read_text())["rows"]}
    shares = sum(json.loads((folder / "calibration.json").read_text())["node_share"])
    for nodes, each in trees.items():
        ratio = shares / rows[nodes]["tokens_per_step"]
        assert [mark.tokens for mark in each.along] == [mark.tokens for mark in own]
        for mark, mine in zip(own, each.along, strict=True):
            assert mine.steps == pytest.approx(max(min(mark.steps * ratio, mark.tokens - 1), min(mark.steps, 1)))
            assert mine.time * mark.steps == pytest.approx(mark.time * mine.steps)
        if nodes > 4:
            assert each.along[-1].steps == pytest.approx(own[-1].steps * ratio)


def test_the_report_of_a_run_alone_has_milestones_too(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    path = tmp_path / "run" / "report" / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    shutil.rmtree(tmp_path / "run" / "benchmark")
    report["pace"] = {
        "generate": [[[]]],
        "hydra": [[[[1, 0, 0.0], [9, 4, 0.04]]]],
        "none": [[[[1, 0, 0.0], [9, 8, 0.08]]]],
    }
    path.write_text(json.dumps(report), encoding="utf-8")
    (cell,) = read_cells(tmp_path / "run")
    assert cell.ways["generate"].along == ()
    assert [(each.tokens, each.steps) for each in cell.ways["auto"].along] == [(1, 0), (9, 4)]
    auto = next(
        each for each in gather(tmp_path / "run", Load(max_new_tokens=9))[0] if each.source.startswith("report")
    )
    found = predict(auto, Load(max_new_tokens=9))
    assert (found.request_ms - auto.first_ms, found.plain_request_ms - auto.plain_first_ms) == pytest.approx((40, 80))


def at_temperatures(report: dict[str, Any], **speeds: float) -> dict[str, Any]:
    """A sampled cell whose heads were measured at several draft temperatures, each so many times as fast."""
    (cell,) = report["cells"]
    cell["temperature"] = 1.0
    for name in ("dynamic:16", "mixed:16", "prompt-lookup", "cut:2"):
        del cell["contenders"][name], report["contenders"][name]
    slow = cell["contenders"].pop("auto")
    about = report["contenders"].pop("auto")
    for name, speed in speeds.items():
        warmth = None if name == "usual" else float(name.removeprefix("at").replace("_", "."))
        key = "auto" if warmth is None else f"auto@{warmth:g}"
        report["contenders"][key] = about | {"drafter": "auto", "draft_temperature": warmth}
        mine = json.loads(json.dumps(slow))
        for trial in (trial for batch in mine["trials"] for trial in batch):
            trial["seconds"] = trial["first_seconds"] + (trial["seconds"] - trial["first_seconds"]) / speed
            trial["pace"] = [[n, s, taken / speed] for n, s, taken in trial["pace"]]
        cell["contenders"][key] = mine
    return report


def test_the_best_draft_temperature_is_recommended(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, at_temperatures(report, usual=1.0, at0_7=1.5, at1_4=1.2))
    found = plan(folder, Load(temperature=1.0))
    assert (found.chosen.candidate.method, found.chosen.candidate.draft_temperature) == ("auto", 0.7)
    assert (found.as_json()["method"], found.as_json()["draft_temperature"]) == ("auto", 0.7)
    assert main(["plan", str(folder), "--temperature", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Decode with --drafter auto --draft-temperature 0.7." in out and "nodes, drafts at 0.7 T" in out
    assert "Of the draft temperatures 0.7, 1, 1.4 that were measured" in out


def test_the_usual_draft_temperature_needs_no_option(tmp_path: Path, report: dict[str, Any]) -> None:
    folder = written(tmp_path, at_temperatures(report, at0_7=0.9, usual=1.3))
    found = plan(folder, Load(temperature=1.0))
    assert (found.chosen.candidate.method, found.as_json()["draft_temperature"]) == ("auto", None)
    assert any("Of the draft temperatures 0.7, 1 that were measured, 1 is" in line for line in found.why)
