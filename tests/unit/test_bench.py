"""The benchmark: what its figures mean, that it measures equal work, and that a mismatch can't pass."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import bench as benchmark
from medusa.infer.bench import (
    BenchOptions,
    accepted_by_depth,
    bench,
    heldout_loss,
    identical,
    repeated,
    run_bench,
    speedup,
    summary,
)
from medusa.infer.measure import Run, compare, dissect, our_loop, plain_generate
from medusa.infer.report import markdown, print_report, tables, write_report
from medusa.testing import plain_greedy, recompute, tiny_trunk
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
    assert "Repeated 4-grams" in text and "held-out loss" in text


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


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run as training leaves it: trunk, heads, tree and the config that names the text."""
    text = "".join(random.Random(0).choices("abc \n", k=4000))
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
