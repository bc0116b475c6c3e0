"""The benchmark: what its figures mean, that it measures equal work, and that a mismatch can't pass."""

from __future__ import annotations

import importlib.util
import json
import random
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from medusa.checkpoint import save_heads, save_tree
from medusa.data import tinyshakespeare
from medusa.data.corpus import DataConfig
from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer.bench import run as benchmark
from medusa.infer.bench.measure import Run, compare, dissect, our_loop, plain_generate
from medusa.infer.bench.report import check_writable, markdown, print_report, write_report
from medusa.infer.bench.run import BenchOptions, bench, heldout_loss, identical, run_bench
from medusa.infer.bench.summary import accepted_by_depth, repeated, speedup, summary
from medusa.tables import tables
from medusa.testing import plain_greedy, recompute, tiny_trunk
from medusa.train.config import EvaluationConfig
from medusa.tree import Topology
from medusa.trunk import Trunk

TREE = Topology.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
PROMPTS = [[4, 0, 2, 3], [1, 3, 3, 0]]
FEW = 5  # symbols: so few that even untrained heads are often right
QUICK = BenchOptions(prompts=2, prompt_length=4, max_new_tokens=20, repeats=2)


def small_trunk(family: str = "llama", dtype: torch.dtype = torch.float64) -> Trunk:
    """A trunk whose text neither settles nor escapes the heads: they have 0, 1 or 2 tokens accepted."""
    return tiny_trunk(family, dtype=dtype, vocab_size=FEW, seed=6)


def heads_of(trunk: Trunk) -> MedusaHeads:
    """Untrained heads: they guess that the next token comes once more."""
    return MedusaHeads(HeadsConfig("medusa", 2), trunk)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return small_trunk()


@pytest.fixture(scope="module")
def report(trunk: Trunk) -> dict:
    return bench(trunk, MedusaDrafter(heads_of(trunk), TREE), PROMPTS, QUICK, heldout=PROMPTS)


def run(ids: list[int], seconds: float = 1.0, **more) -> Run:
    return Run(ids, seconds, len(ids) - 1, **more)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompts": 0}, "prompts=0: give at least 1"),
        ({"max_new_tokens": 1}, "max_new_tokens=1: give at least 2"),
        ({"repeats": -1}, "repeats=-1: give at least 1"),
        ({"threads": 0}, "threads=0: give at least 1"),
    ],
)
def test_options_out_of_range_are_refused(change: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        BenchOptions(**change)


def test_more_tokens_than_the_context_holds_are_refused(trunk: Trunk) -> None:
    with pytest.raises(
        UserError, match=r"prompts of 4 tokens and max_new_tokens=125 exceed the trunk's context of 128"
    ):
        bench(trunk, NullDrafter(), PROMPTS, BenchOptions(max_new_tokens=125))


@pytest.mark.parametrize("setting", [{"no_repeat_ngram_size": 2}, {"min_new_tokens": 3}, {"suppress_tokens": [1]}])
def test_a_generation_config_that_our_loop_does_not_follow_is_refused_before_any_run(
    setting: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = small_trunk()
    trunk.model.generation_config.update(**setting)
    monkeypatch.setattr(benchmark, "compare", lambda *args: pytest.fail("measured"))
    with pytest.raises(UserError, match=f"the trunk's generation_config sets {next(iter(setting))}="):
        bench(trunk, NullDrafter(), PROMPTS, QUICK)


def test_what_plain_generate_is_told_to_leave_out_is_no_hindrance() -> None:
    trunk = small_trunk()
    trunk.model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, typical_p=0.5)
    trunk.model.generation_config.update(repetition_penalty=1.3)
    found = bench(trunk, MedusaDrafter(heads_of(trunk), TREE), PROMPTS, QUICK)
    assert found["identical"]["equal"] == 2


def test_contenders_take_turns_and_who_begins_rotates() -> None:
    order: list[str] = []

    def contender(name: str):
        return lambda prompt, tokens: order.append(name) or run([0] * tokens)

    runs = compare({name: contender(name) for name in "abc"}, [[1], [2]], 3, repeats=2)
    assert "".join(order) == "abc" + "abc" + "bca" + "bca" + "cab"  # the first round warms up
    assert all(len(row) == 2 for rows in runs.values() for row in rows)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_contender_does_the_same_work(family: str) -> None:
    trunk = small_trunk(family=family)
    drafter = MedusaDrafter(heads_of(trunk), TREE)
    expected = plain_greedy(trunk, PROMPTS[0], 9)
    for contender in (plain_generate(trunk), our_loop(trunk, NullDrafter()), our_loop(trunk, drafter)):
        assert contender(PROMPTS[0], 9).ids == expected


def test_eos_does_not_end_a_timed_run() -> None:
    trunk = small_trunk()
    expected = plain_greedy(trunk, PROMPTS[0], 9)
    trunk.model.generation_config.eos_token_id = expected[3]
    assert plain_generate(trunk)(PROMPTS[0], 9).ids == expected
    assert our_loop(trunk, NullDrafter())(PROMPTS[0], 9).ids == expected


def test_the_prefill_and_its_token_are_no_step(trunk: Trunk) -> None:
    found = our_loop(trunk, NullDrafter())(PROMPTS[0], 9)
    assert found.steps == 8 and found.accepted == (0,) * 8
    assert 0 < found.prefill_seconds < found.seconds
    assert summary([[found]])["tokens_per_step"] == 1.0


def test_summary_counts_tokens_over_seconds() -> None:
    rows = [[Run([1] * 11, 2.0, 5, 0.5), Run([1] * 11, 4.0, 5, 0.5)]]
    found = summary(rows)
    assert found["tokens_per_second"] == 22 / 6
    assert found["ms_per_token"] == pytest.approx(1e3 * 6 / 22)
    assert found["tokens_per_step"] == 2.0
    assert found["prefill_ms"] == 500
    assert found["decode_ms_per_token"] == 1e3 * 5 / 20


def test_a_speedup_is_the_median_ratio_of_neighbours_in_time() -> None:
    # Prompt 0: the machine was ten times slower during the second repeat, for both.
    slow = [[run([1], 2.0), run([1], 20.0)], [run([1], 3.0), run([1], 3.0)], [run([1], 4.0), run([1], 4.0)]]
    fast = [[run([1], 1.0), run([1], 10.0)], [run([1], 1.0), run([1], 1.0)], [run([1], 1.0), run([1], 1.0)]]
    found = speedup({"fast": fast, "slow": slow}, "fast", "slow", seed=0)
    assert found == {"of": "fast", "over": "slow", "median": 3.0, "low": 2.0, "high": 4.0}
    assert found == speedup({"fast": fast, "slow": slow}, "fast", "slow", seed=0)


def test_the_interval_narrows_with_the_prompts() -> None:
    rng = random.Random(0)

    def width(prompts: int) -> float:
        ratios = [rng.gauss(2, 0.3) for _ in range(prompts)]
        runs = {"a": [[run([1])] for _ in ratios], "b": [[run([1], ratio)] for ratio in ratios]}
        found = speedup(runs, "a", "b", seed=1)
        assert found["low"] <= found["median"] <= found["high"]
        return found["high"] - found["low"]

    assert width(400) < width(16) / 2


def test_progress_covers_the_timed_runs_and_the_dissection(trunk: Trunk) -> None:
    calls: list[int] = []
    prompts = [*PROMPTS, *PROMPTS, *PROMPTS]
    options = BenchOptions(max_new_tokens=3, repeats=1, threads=1)
    bench(trunk, MedusaDrafter(heads_of(trunk), TREE), prompts, options, advance=lambda tokens: calls.append(tokens))
    assert calls == [3] * (3 * 6) + [2 * 3] * benchmark.DISSECTED


def test_acceptance_by_depth_counts_steps() -> None:
    rows = [[run([1] * 8, accepted=(0, 2, 1, 0)), run([1] * 8, accepted=(2, 2, 0, 1))]]
    found = accepted_by_depth(rows)
    assert found == {"share": [5 / 8, 3 / 8], "conditional": [5 / 8, 3 / 5]}


def test_repeated_ngrams() -> None:
    assert repeated([[1, 2, 3, 4, 5, 6]], 4) == 0
    assert repeated([[1] * 8], 4) == 1 - 1 / 5
    assert repeated([[1] * 8, list(range(8))], 4) == (1 - 1 / 5) / 2
    assert repeated([[1, 2]], 4) == 0


def test_heldout_loss_is_in_nats_per_predicted_token(trunk: Trunk) -> None:
    expected = []
    for row in PROMPTS:
        log_p = recompute(trunk, row).log_softmax(-1)
        expected += [-log_p[at, token].item() for at, token in enumerate(row[1:])]
    assert heldout_loss(trunk, PROMPTS, batch=1) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def same_runs(trunk: Trunk) -> tuple[list[int], dict[str, list[list[Run]]]]:
    ids = plain_greedy(trunk, PROMPTS[0], 6)
    return ids, {"generate": [[run(ids)]], "none": [[run(ids)]]}


def test_equal_outputs_are_identical(trunk: Trunk) -> None:
    _, runs = same_runs(trunk)
    found = identical(trunk, PROMPTS[:1], runs)
    assert found == {"ok": True, "prompts": 1, "equal": 1, "near_ties": [], "mismatches": []}


def test_a_wrong_token_in_any_repeat_is_a_mismatch() -> None:
    trunk = small_trunk(dtype=torch.float32)
    ids, runs = same_runs(trunk)
    wrong = [*ids[:3], (ids[3] + 1) % FEW, *ids[4:]]
    runs["none"][0].append(run(wrong))
    found = identical(trunk, PROMPTS[:1], runs)
    assert not found["ok"] and found["equal"] == 0
    (mismatch,) = found["mismatches"]
    best, second = recompute(trunk, [*PROMPTS[0], *ids[:3]])[-1].topk(2).values.tolist()
    assert (mismatch["contender"], mismatch["prompt"], mismatch["position"]) == ("none", 0, 3)
    assert mismatch["gap"] == pytest.approx(best - second, rel=1e-3)


@pytest.mark.parametrize(("dtype", "ok"), [(torch.float32, True), (torch.float64, False)])
def test_a_tie_is_excused_in_fp32_alone(dtype: torch.dtype, ok: bool) -> None:
    trunk = small_trunk(dtype=dtype)
    ids, runs = same_runs(trunk)
    head = trunk.model.get_output_embeddings().weight
    with torch.no_grad():
        head[:] = head[ids[2]]  # all tokens tie
    runs["none"] = [[run([*ids[:2], (ids[2] + 1) % FEW, *ids[3:]])]]
    found = identical(trunk, PROMPTS[:1], runs)
    assert found["ok"] is ok
    assert len(found["near_ties"]) == ok and len(found["mismatches"]) == (not ok)


def test_an_output_that_ends_early_is_a_mismatch(trunk: Trunk) -> None:
    ids, runs = same_runs(trunk)
    runs["none"] = [[run(ids[:4])]]
    found = identical(trunk, PROMPTS[:1], runs)
    assert not found["ok"] and found["mismatches"][0]["position"] is None


def test_a_step_is_taken_apart_at_its_own_shape(trunk: Trunk) -> None:
    heads = heads_of(trunk)
    calls: list[tuple[int, int]] = []

    def note(module, args, kwargs) -> None:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        if kwargs.get("position_ids") is not None and kwargs["input_ids"].shape[1] == TREE.size:
            calls.append((cache.get_seq_length(), kwargs["position_ids"].min().item()))

    handle = trunk.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    found = dissect(trunk, {"it": MedusaDrafter(heads, TREE)}, PROMPTS[:1], 12)["it"]
    handle.remove()
    assert found.cost.nodes == TREE.size
    # each step's forward is repeated twice, with the same cache length
    assert len(calls) % 3 == 0 and len(calls) >= 3 * found.cost.steps
    for start in range(0, len(calls), 3):
        (length, position), *bare = calls[start : start + 3]
        assert length == position and bare == [(length, position)] * 2
    cost = found.cost
    assert cost.bare_ms == min(cost.bare_slot_cache_ms, cost.bare_library_cache_ms)
    assert cost.step_ms > cost.heads_ms > 0 and cost.step_ms > cost.forward_ms


def test_a_node_is_accepted_no_more_often_than_its_parent(trunk: Trunk) -> None:
    drafter = MedusaDrafter(heads_of(trunk), TREE)
    shares = dissect(trunk, {"it": drafter}, PROMPTS, 40)["it"].node_share
    assert 0.2 < sum(shares[1:4]) < 1 and shares[0] == 1.0 and all(0 <= share <= 1 for share in shares)
    for node, parent in enumerate(TREE.parents[1:], start=1):
        assert shares[node] <= shares[parent]


def test_measuring_leaves_model_and_drafter_as_they_were(trunk: Trunk) -> None:
    drafter = MedusaDrafter(heads_of(trunk), TREE)
    model, before = trunk.model, dict(vars(drafter))
    dissect(trunk, {"none": NullDrafter(), "medusa": drafter}, PROMPTS[:1], 8)
    assert trunk.model is model and type(model).__name__ == "LlamaForCausalLM"
    assert not model._forward_pre_hooks and vars(drafter) == before


def test_the_report_is_json_and_complete(report: dict) -> None:
    assert json.loads(json.dumps(report)) == report
    assert report["identical"] == {"ok": True, "prompts": 2, "equal": 2, "near_ties": [], "mismatches": []}
    assert list(report["contenders"]) == ["generate", "none", "medusa"]
    assert all(each["tokens"] == 2 * 2 * 20 for each in report["contenders"].values())
    assert [(each["of"], each["over"]) for each in report["speedups"]] == [
        ("none", "generate"),
        ("medusa", "generate"),
        ("medusa", "none"),
    ]
    assert report["drafter"]["tree"]["parents"] == list(TREE.parents)
    assert len(report["drafter"]["node_share"]) == TREE.size
    assert report["trunk"]["heldout_loss"] > 0
    assert report["machine"]["threads"] >= 1


def test_tokens_per_step_is_one_plus_the_shares(trunk: Trunk) -> None:
    # The last tree of a run is trimmed to what may still be emitted, so nothing accepted is cut off.
    found = bench(trunk, MedusaDrafter(heads_of(trunk), TREE), PROMPTS, QUICK)
    assert 0.2 < found["accepted"]["share"][0] < 1
    assert found["contenders"]["medusa"]["tokens_per_step"] == pytest.approx(1 + sum(found["accepted"]["share"]))


def test_tables_and_markdown_hold_the_figures(report: dict) -> None:
    speed, acceptance, step = tables(report)
    assert [row[0] for row in speed.rows] == ["generate", "no drafts", "medusa, 7 nodes"]
    assert speed.rows[0][4] == "1" and speed.rows[1][5] == "1"
    assert len(acceptance.rows) == len(report["accepted"]["share"])
    assert [row[1] for row in step.rows] == ["1", "7"]
    assert all(len(row) == len(table.heads) for table in (speed, acceptance, step) for row in table.rows)
    text = markdown(report)
    assert f"| {report['contenders']['medusa']['tokens_per_second']:.1f} |" in text
    assert "identical to generate: 2 of 2 prompts" in text
    assert "Repeated 4-grams" in text
    assert f"held-out loss {report['trunk']['heldout_loss']:.3f} nats per token." in text


def test_a_loss_that_could_not_be_measured_is_said(report: dict) -> None:
    unmeasured = report | {"trunk": report["trunk"] | {"heldout_loss": None}}
    assert "float64, held-out loss not measured: text too short." in markdown(unmeasured)


def test_a_tree_of_the_root_alone_is_reported_too(trunk: Trunk) -> None:
    found = bench(trunk, MedusaDrafter(heads_of(trunk), Topology.root()), PROMPTS, QUICK)
    assert found["accepted"] == {"share": [], "conditional": []}
    assert [table.title for table in tables(found)][1:] == ["One step"]
    assert "medusa, root alone" in markdown(found)


def test_a_mismatch_is_said_aloud(report: dict) -> None:
    found = {"contender": "medusa", "prompt": 1, "position": 7, "gap": 0.25}
    broken = report | {"identical": {"ok": False, "prompts": 2, "equal": 1, "near_ties": [], "mismatches": [found]}}
    assert "1 of 2 prompts. MISMATCH: medusa, prompt 1, token 7: top-2 logit gap 0.25." in markdown(broken)


def test_the_report_is_written_whole(report: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    write_report(report, tmp_path, folder)
    written = sorted(path.name for path in folder.iterdir())
    assert {"report.json", "report.md", "speed.png", "tree.png"} <= set(written)
    assert not [name for name in written if name.startswith(".")]
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == report
    print_report(report, folder)
    printed = capsys.readouterr().out
    assert "medusa, 7 nodes" in printed and str(folder) in printed.replace("\n", "")


def test_a_report_that_cannot_be_written_is_one_line(report: dict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the report can't be written \(.*\): name another folder with --out"):
        write_report(report, tmp_path, tmp_path / "file")


def test_whether_a_folder_can_be_written_is_found_out_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "new" / "report", Path("relative/report")):
        check_writable(folder, "way out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "report"):
        with pytest.raises(UserError, match=r"file.* can't be written \(Not a directory\): way out"):
            check_writable(folder, "way out")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run as training leaves it: trunk, heads, tree and the config that names the text."""
    text = "".join(random.Random(0).choices("abc \n", k=8000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(
        json.dumps({"data": {"source": str(tmp_path / "text.txt")}}), encoding="utf-8"
    )  # JSON is YAML
    trunk = small_trunk(dtype=torch.float32)
    trunk.model.save_pretrained(tmp_path / "trunk")
    char_tokenizer(text).save_pretrained(tmp_path / "trunk")
    trunk = Trunk.load(tmp_path / "trunk")
    save_heads(tmp_path, heads_of(trunk), str(tmp_path / "trunk"))
    save_tree(tmp_path, Topology.chain(2))
    return tmp_path


def test_the_command_writes_its_report_and_answers_with_its_verdict(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BenchOptions(prompts=2, prompt_length=8, max_new_tokens=6, repeats=1, threads=1)
    assert run_bench(str(run_folder), options) == 0
    report = json.loads((run_folder / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["identical"]["ok"] and report["trunk"]["heldout_loss"] is not None
    assert "Outputs identical" in capsys.readouterr().out

    def wrong(*args):
        return {"ok": False, "prompts": 2, "equal": 0, "near_ties": [], "mismatches": []}

    monkeypatch.setattr(benchmark, "identical", wrong)
    assert run_bench(str(run_folder), options, out=str(run_folder / "elsewhere")) == 1
    assert (run_folder / "elsewhere" / "report.md").is_file()  # written although it fails


def test_the_command_looks_before_it_measures(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "bench", lambda *args, **options: pytest.fail("measured"))
    (run_folder / "report").write_text("a file where the folder belongs")
    with pytest.raises(UserError, match=r"report can't be written \(Not a directory\): name another folder with --out"):
        run_bench(str(run_folder), QUICK)
    with pytest.raises(UserError, match="device='nowhere'"):
        run_bench(str(run_folder), QUICK, str(run_folder / "elsewhere"), device="nowhere")


def test_the_command_takes_a_dtype_and_says_when_the_text_is_too_short_for_a_loss(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    monkeypatch.setattr("medusa.progress.progress", lambda total, label: totals.append(total) or nullcontext(advance))
    done: list[int] = []

    def advance(steps: int = 1, *, tokens: int = 0) -> None:
        done.append(steps)

    options = BenchOptions(prompts=5, prompt_length=4, max_new_tokens=4, repeats=2, threads=1)
    monkeypatch.setattr(benchmark, "LOSS_ROWS", (1000, 256))
    assert run_bench(str(run_folder), options, dtype="float64") == 0
    assert "float64, held-out loss not measured: text too short." in " ".join(capsys.readouterr().out.split())
    assert totals == [sum(done)]


@pytest.fixture
def heads_script() -> types.ModuleType:
    """The script benchmarks/heads.py."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "heads.py"
    spec = importlib.util.spec_from_file_location("heads_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_heads_are_compared_at_their_best_rates(
    heads_script: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bests = {0.1: 1.5, 0.2: 2.5, 0.3: 2.0}  # the rate in the middle, though its loss is the highest
    given: list[tuple] = []

    def train(config, fresh):
        given.append((config.heads.num, fresh))
        rate, loss = config.heads_training.lr, [bests[config.heads_training.lr]] * config.heads.num
        events = [{"step": 5, "head_loss": loss}, {"step": 7, "heldout_top1": loss, "tokens_per_step": bests[rate]}]
        (tmp_path / "log").mkdir(exist_ok=True)
        (tmp_path / "log" / "train_log.jsonl").write_text("\n".join(json.dumps(event) for event in events))
        return types.SimpleNamespace(
            folder=tmp_path / "log", result=lambda stage: {"parameters": 9, "tokens_per_step": bests[rate]}
        )

    monkeypatch.setattr(heads_script, "train", train)
    drawn: list[dict] = []
    draw = heads_script.draw
    monkeypatch.setattr(heads_script, "draw", lambda best, path: drawn.extend(best) or draw(best, path))
    heads_script.main(["--out", str(tmp_path), "--num", "1", "--fresh", "--rates", "0.1", "0.2", "0.3"])
    assert given == [(1, "heads")] * 9
    assert [(row["kind"], row["lr"]) for row in drawn] == [("medusa", 0.2), ("root", 0.2), ("hydra", 0.2)]
    assert drawn[0]["tokens"] == [7 * 8 * 256]  # steps of 8 rows of 256 tokens
    out = capsys.readouterr().out
    assert out.startswith("* best rate by held-out tokens per step, with a tree of 16 nodes")
    assert [line[:2] for line in out.splitlines()[2:]] == ["  ", "* ", "  "] * 3
    assert (tmp_path / "heads.png").is_file()
    assert len(json.loads((tmp_path / "heads.json").read_text())["rows"]) == 9


def test_the_script_of_heads_trains(
    heads_script: types.ModuleType, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyshakespeare, "obtain", lambda **_: run_folder / "text.txt")
    monkeypatch.setattr(heads_script, "KINDS", ("root",))
    monkeypatch.setattr(heads_script, "DataConfig", lambda **given: DataConfig(**given | {"block": 16}))
    monkeypatch.setattr(heads_script, "EvaluationConfig", lambda **_: EvaluationConfig(4, 4, 8, 8, 3))
    argv = ["--trunk", str(run_folder / "trunk"), "--out", str(tmp_path / "heads"), "--steps", "2", "--num", "1"]
    heads_script.main([*argv, "--rates", "0.01"])
    (row,) = json.loads((tmp_path / "heads" / "heads.json").read_text())["rows"]
    assert (row["nodes"], row["tokens"][-1], len(row["loss"])) == (3, 2 * 8 * 16, 1)
    assert row["best"] == max(row["tokens_per_step"])
