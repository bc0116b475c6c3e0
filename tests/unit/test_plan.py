"""`medusa plan`: its predictions against a recorded benchmark, what it recommends, and what it refuses.

golden/plan holds what plans read of a run of `make demo-short` (calibrated with 40 rounds; benchmarked alone with 8
prompts of 64 tokens, and with 4 of 48 on axes), timed by the processor's clock, as its machine was shared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa.__main__ import main
from medusa.expected import expected_steps, tree_tokens
from medusa.infer.plan.cells import read_cells, read_curve
from medusa.infer.plan.load import Load
from medusa.infer.plan.picker import Plan, assume, checks, choose, explain, plan, predict
from medusa.infer.plan.plots import assumed, measured
from medusa.infer.plan.sources import Candidate, from_curve, gather
from medusa.plots import png

RECORDED = Path(__file__).resolve().parents[1] / "golden" / "plan"
CLOSE = 0.15  # of a measured speedup
WAY = Candidate("auto", "way", [0.8, 0.5], 2.0, 1.0, 5.0, 5.0, 4, 10.0, "somewhere")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recorded run to change."""
    shutil.copytree(RECORDED, tmp_path / "run")
    return tmp_path / "run"


def without(folder: Path, *names: str) -> Path:
    for name in names:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    return folder


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("medusa: error: ")
    return err


def test_the_calibration_predicts_what_the_benchmarks_measured() -> None:
    found = checks(RECORDED)
    assert [each.source for each in found] == ["benchmark/report.json, heldout", "report/report.json, heldout"]
    for each in found:
        assert each.measured > 2 and each.predicted == pytest.approx(each.measured, rel=CLOSE)


def test_every_cell_is_predicted_from_its_steps_and_shares() -> None:
    # Steps and shares are medians and counts over all runs; the report's ratios come from pairs of whole runs.
    report = json.loads((RECORDED / "benchmark" / "report.json").read_text(encoding="utf-8"))
    told = 0
    for cell in report["cells"]:
        load = Load(cell["batch_size"], report["options"]["max_new_tokens"], cell["temperature"])
        rates = {name: figures["speedup"]["median"] for name, figures in cell["contenders"].items()}
        candidates, _, notes = gather(RECORDED, load)
        assert notes == []
        for each in candidates:
            if each.source.startswith("benchmark"):
                assert predict(each, load).speedup == pytest.approx(rates[each.method] / rates["none"], rel=CLOSE)
                told += 1
    assert told == 4 * 3


def test_the_arithmetic_of_a_prediction() -> None:
    load = Load(max_new_tokens=41)
    found = predict(WAY, load)
    assert found.tokens_per_step == tree_tokens(WAY.shares) == 2.3
    assert found.request_ms == pytest.approx(5 + 2 * expected_steps([0.8, 0.5], 40))
    assert found.plain_request_ms == 5 + 40
    assert found.speedup == pytest.approx(found.plain_request_ms / found.request_ms)
    shown = "\n".join(explain(found, load))
    assert "1 + 0.800 + 0.500 = 2.300" in shown and f"= {found.speedup:.3f}" in shown


def test_one_token_is_the_prompt_alone() -> None:
    assert predict(WAY, Load(max_new_tokens=1)).speedup == 1
    assert plan(RECORDED, Load(max_new_tokens=1)).chosen is None


def test_short_outputs_gain_less() -> None:
    gains = [predict(WAY, Load(max_new_tokens=tokens)).speedup for tokens in (2, 5, 20, 200, 2000)]
    assert gains == sorted(gains) and gains[0] < 1 < gains[-1] < 1.15
    assert any("48% of plain" in line for line in plan(RECORDED, Load(max_new_tokens=4)).why)


def test_the_fastest_is_chosen_but_for_a_measured_or_smaller_one_as_good() -> None:
    load = Load(max_new_tokens=10_000)
    slow, fast = (predict(replace(WAY, step_ms=ms, label=f"{ms}"), load) for ms in (1.3, 1.0))
    assert choose([slow, fast]) is fast
    near = predict(replace(WAY, step_ms=1.01, nodes=2), load)
    assert choose([fast, near]) is near
    assert choose([replace(fast, candidate=replace(fast.candidate, nodes=1, estimated="so")), near]) is near
    assert choose([slow, replace(fast, fits=False)]) is slow


@pytest.mark.parametrize(("step_ms", "worth"), [(2.2, True), (2.29, False), (2.5, False)])
def test_off_unless_the_gain_exceeds_what_timings_vary_by(step_ms: float, worth: bool) -> None:
    found = predict(replace(WAY, step_ms=step_ms), Load(max_new_tokens=10_000))
    assert (choose([found]) is found) == worth


def test_memory_rules_out_what_has_weights(folder: Path) -> None:
    (folder / "heads.safetensors").write_bytes(bytes(3_000_000))
    assert plan(folder, Load(max_new_tokens=4000, temperature=1.0)).chosen.candidate.method == "auto"
    tight = plan(folder, Load(temperature=1.0, free_memory_mb=2.9))
    assert [each.candidate.method for each in tight.predictions if not each.fits] == ["auto"]
    assert tight.chosen is None or tight.chosen.candidate.method != "auto"
    assert any(line.startswith("2.9 MB are free, too little for the weights of hydra") for line in tight.why)
    assert all(each.fits for each in plan(folder, Load(temperature=1.0, free_memory_mb=3.0)).predictions)


def test_the_load_decides() -> None:
    greedy, hot = plan(RECORDED, Load()), plan(RECORDED, Load(temperature=1.0))
    many = plan(RECORDED, Load(batch_size=4, temperature=1.0))
    assert (greedy.chosen.candidate.method, hot.chosen.candidate.method) == ("prompt-lookup", "auto")
    assert greedy.chosen.speedup > hot.chosen.speedup > max(each.speedup for each in many.predictions)
    assert any("law is flat" in line for line in hot.why) and any("verifies 4 trees" in line for line in many.why)
    assert {each.candidate.estimated for each in many.predictions} == {"from shorter outputs"}


def test_costs_between_batch_sizes_lie_on_a_line() -> None:
    one, two, four = ({each.method: each for each in gather(RECORDED, Load(size, 48, 1.0))[0]} for size in (1, 2, 4))
    for name in one:
        assert two[name].step_ms == pytest.approx(one[name].step_ms + (four[name].step_ms - one[name].step_ms) / 3)
        assert two[name].estimated and not one[name].estimated
    notes = gather(RECORDED, Load(2, 48, 1.0))[2]
    assert len(notes) == 1 and "with 1, 4 rows" in notes[0]


def test_the_nearest_temperature_stands_in_and_is_named() -> None:
    found, _, notes = gather(RECORDED, Load(temperature=0.8))
    assert {each.method: each.shares for each in found} == {
        each.method: each.shares for each in gather(RECORDED, Load(temperature=1.0))[0]
    }
    assert all(each.estimated for each in found) and "at temperature 1, not 0.8" in notes[0]


@pytest.mark.parametrize(("tokens", "said"), [(23, True), (24, False), (96, False), (97, True)])
def test_outputs_of_another_length_than_benchmarked_are_named(tokens: int, said: bool) -> None:
    notes = gather(RECORDED, Load(max_new_tokens=tokens))[2]
    assert [f"of {tokens} another share" in note for note in notes] == [True] * said


def test_a_calibration_alone_reads_many_rows_off_its_curve(folder: Path) -> None:
    without(folder, "benchmark", "report")
    curve = read_curve(folder)
    costs = dict(curve.points)
    found, generate, notes = gather(folder, Load(batch_size=4))
    assert generate is None and [each.nodes for each in found] == [2, 4, 8, 16]
    assert found[1].step_ms == costs[16] and found[1].plain_ms == costs[4]
    assert found[3].step_ms > costs[16] * 1.5 and all(each.estimated for each in found)
    assert [each.made for each in found] == [False, True, False, False]
    assert len(notes) == 1 and "--batch-sizes 4" in notes[0]
    assert "--temperatures 0.7" in gather(folder, Load(temperature=0.7))[2][0]


def test_a_tree_brings_what_was_measured(folder: Path) -> None:
    rows = json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    shares = dict(read_curve(folder).trees)
    for row in rows["rows"][1:]:
        expected = sum(rows["node_share"]) if row["nodes"] == 4 else row["tokens_per_step"]
        assert tree_tokens(shares[row["nodes"]]) == pytest.approx(expected)
    (folder / "tree.json").write_text('{"paths": [[0]]}', encoding="utf-8")  # not the tree of these figures
    assert tree_tokens(dict(read_curve(folder).trees)[4]) == pytest.approx(rows["chosen"]["tokens_per_step"])


def test_one_batch_size_measured_is_scaled_by_the_curve(folder: Path) -> None:
    change(folder / "benchmark" / "report.json", lambda report: report.update(cells=report["cells"][:1]))
    one = {each.method: each for each in gather(folder, Load())[0] if not each.source.startswith("calib")}
    found, _, notes = gather(folder, Load(batch_size=4))
    heads = next(each for each in found if each.method == "auto" and each.source.startswith("bench"))
    curve = read_curve(folder)
    assert heads.step_ms == pytest.approx(one["auto"].step_ms * curve.step_ms(4, 4) / curve.step_ms(4, 1))
    assert heads.plain_ms == pytest.approx(one["auto"].plain_ms * curve.step_ms(1, 4) / curve.step_ms(1, 1))
    assert "left out: prompt-lookup" in notes[0] and "prompt-lookup" not in {each.method for each in found}


def test_a_report_alone_will_do(folder: Path) -> None:
    found = plan(folder / "benchmark", Load())
    assert {each.candidate.method for each in found.predictions} == {"auto", "prompt-lookup", "cut:1"}
    assert found.over_generate > found.chosen.speedup > 2
    assert checks(folder / "benchmark") == []


def test_the_report_of_a_run_alone_is_a_cell(folder: Path) -> None:
    def edit(report: dict[str, Any]) -> None:
        report["options"].update(max_new_tokens=11)
        report["seconds"]["none"] = [[0.02, 0.5], [0.025]]  # the median is 25 ms
        report["contenders"]["none"].update(prefill_ms=5.0)
        report["seconds"]["hydra"] = [[0.013], [0.014, 9.0]]
        report["contenders"]["hydra"].update(prefill_ms=4.0, tokens_per_step=2.5)

    change(folder / "report" / "report.json", edit)
    (cell,) = read_cells(without(folder, "benchmark"))
    assert (cell.prompt_set, cell.temperature, cell.batch_size, cell.max_new_tokens) == ("heldout", 0.0, 1, 11)
    assert (cell.plain.step_ms, cell.plain.first_ms) == pytest.approx((2.0, 5.0))
    assert (cell.ways["auto"].step_ms, cell.ways["auto"].first_ms) == pytest.approx((2.5, 4.0))
    assert cell.ways["auto"].nodes == 4 and len(cell.ways["auto"].shares) == 3
    assert cell.heads_speedup == pytest.approx(2.32, abs=0.005)


def test_lossy_rules_and_the_librarys_own_are_not_recommended(folder: Path) -> None:
    change(
        folder / "benchmark" / "report.json",
        lambda report: (
            report["contenders"]["cut:1"].update(lossless=False),
            report["contenders"]["prompt-lookup"].update(ours=False),
        ),
    )
    assert {each.candidate.method for each in plan(folder, Load(temperature=1.0)).predictions} == {"auto"}


def test_a_report_without_drafts_of_ours_goes_by_generate(folder: Path) -> None:
    change(
        folder / "benchmark" / "report.json",
        lambda report: [cell["contenders"].pop("none") for cell in report["cells"]],
    )
    cell = read_cells(folder)[0]
    assert cell.plain is cell.ways["generate"] and cell.heads_speedup is None
    assert plan(folder, Load(temperature=1.0)).over_generate == pytest.approx(
        plan(folder, Load(temperature=1.0)).chosen.speedup
    )


def test_first_tokens_without_a_benchmark_take_a_plain_step(folder: Path) -> None:
    curve = read_curve(folder)
    assert {each.first_ms for each in from_curve(folder, curve, Load(), None)} == {curve.step_ms(1, 1)}
    assert {each.first_ms for each in from_curve(folder, curve, Load(), 9.0)} == {9.0}


def test_assumed_numbers() -> None:
    found = assume([0.5, 0.7, 0.85], 0.1, Load(), 16)
    assert [chain.best for chain in found.chains] == [2, 4, 7]
    assert found.chains[1].speedups[4] == pytest.approx((1 - 0.7**5) / (0.3 * 1.4))
    for chain in found.chains:
        assert len(chain.tokens) == 17 and chain.tokens[0] == chain.speedups[0] == 1
        assert 1 < chain.request_speedup < chain.speedups[chain.best]
    long = assume([0.7], 0.1, Load(max_new_tokens=100_000), 16).chains[0]
    assert long.request_speedup == pytest.approx(long.speedups[long.best], rel=1e-3)
    off = assume([0.1], 0.2, Load(), 16).chains[0]
    assert (off.best, off.request_speedup) == (0, 1)


def test_the_command_on_a_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--explain", "--out", str(tmp_path / "out")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Recommended: prompt-lookup, 3.19 x as fast" in out and "Decode with --drafter prompt-lookup." in out
    assert "tokens per step = 1 + " in out and out.count("Check: by calibration hydra, 4 nodes") == 2
    written = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert written["method"] == "prompt-lookup" and len(written["candidates"]) == 6
    assert (tmp_path / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written


def test_the_command_says_off_and_how_a_tree_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--max-new-tokens", "1"]) == 0
    assert "Recommended: off. Decode with --drafter none." in capsys.readouterr().out
    without(folder, "benchmark", "report")
    change(folder / "calibration.json", lambda found: found["rows"][3].update(step_ms=1.0))
    assert main(["plan", str(folder)]) == 0
    assert "--sizes 1 8`" in capsys.readouterr().out


def test_the_command_on_assumed_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--alpha", "0.7", "--cost", "0.1", "--explain", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "(1 - 0.7^5) / (1 - 0.7) = 2.773; 2.773 / (4 x 0.1 + 1) = 1.981" in out
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert [chain["alpha"] for chain in written["chains"]] == [0.7] and (tmp_path / "plan.png").is_file()
    assert main(["plan", "--cost", "0.1", "--json"]) == 0
    assert [chain["best"] for chain in json.loads(capsys.readouterr().out)["chains"]] == [2, 4, 7]
    assert main(["plan", "--alpha", "0.05", "--cost", "0.1", "--batch-size", "8", "--max-new-tokens", "3"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "Off at alpha 0.05" in out
        and "Batch size, temperature and memory change alpha" in out
        and "as short as 3" in out
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give a folder made by `medusa train`, or --alpha and --cost"),
        (["--alpha", "0.7"], "--alpha without --cost"),
        (["--alpha", "1", "--cost", "0.1"], "alpha=1.0"),
        (["--alpha", "0.5", "-0.1", "--cost", "0.1"], "alpha=-0.1"),
        (["--alpha", "0.7", "--cost", "0"], "cost=0.0"),
        (["--cost", "-1"], "cost=-1.0"),
        (["--cost", "0.1", "--max-drafted", "0"], "max_drafted=0: give at least 1"),
        (["--cost", "0.1", "--batch-size", "0"], "batch_size=0: give at least 1"),
        (["--cost", "0.1", "--max-new-tokens", "0"], "max_new_tokens=0: give at least 1"),
        (["--cost", "0.1", "--temperature", "-1"], "temperature=-1.0: give at least 0"),
        (["--cost", "0.1", "--free-memory-mb", "-1"], "free_memory_mb=-1.0: give at least 0"),
        (["--cost", "0.1", "--prompt-set", "spec"], "--prompt-set spec belongs to a run"),
        (["nowhere"], "no folder nowhere here"),
        ([str(RECORDED), "--cost", "0.1"], "give one of the two"),
        ([str(RECORDED), "--prompt-set", "heldoud"], "was not benchmarked (did you mean heldout?)"),
        (["--cost", "0.1", "--aplha", "0.7"], "did you mean alpha?"),
    ],
)
def test_wrong_input_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(argv, capsys)


def test_folders_that_lack_something(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds neither a run nor a benchmark's report" in refused([str(tmp_path)], capsys)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "can't be written" in refused(["--cost", "0.1", "--out", str(tmp_path / "file")], capsys)
    size = ["--batch-size", "8"]
    change(folder / "benchmark" / "report.json", lambda report: report.update(cells=report["cells"][:1]))
    assert "medusa bench" in refused([str(folder / "benchmark"), *size], capsys)
    change(folder / "benchmark" / "report.json", lambda report: report.pop("options"))
    assert "lacks what a plan needs (KeyError('options'))" in refused([str(folder)], capsys)
    change(folder / "calibration.json", lambda found: found["rows"].pop(0))
    assert "--sizes 1 2 4 8 16`" in refused([str(without(folder, "benchmark"))], capsys)
    (folder / "calibration.json").unlink()
    assert f"has no calibration.json: make it with `medusa calibrate {folder}`" in refused([str(folder)], capsys)


def test_plots_show_every_candidate_and_mark_the_best() -> None:
    found: Plan = plan(RECORDED, Load())
    figure = measured(found)
    png(figure)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        each.candidate.label for each in found.predictions
    ]
    stars = [line for line in figure.axes[1].get_lines() if line.get_marker() == "*"]
    assert [line.get_xdata()[0] for line in stars] == [found.chosen.speedup]
    figure = assumed(assume([0.5, 0.05], 0.1, Load(), 8))
    stars = [line for line in figure.axes[1].get_lines() if line.get_marker() == "*"]
    assert [line.get_xdata()[0] for line in stars] == [2, 0]
    assert "best N = 2" in figure.axes[1].get_legend().get_texts()[0].get_text()
    assert "off" in figure.axes[1].get_legend().get_texts()[1].get_text()
