"""The reference benchmark: equal work, one account for all, cells in turns, and what its report says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.compiled import CompiledSteps
from medusa.cut import cut
from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer.bench import grid_plots, grid_tables
from medusa.infer.bench.axes import AxisOptions, Cell, batches, contenders, make_cells, measure, warm_up
from medusa.infer.bench.cells import cell_report, figures
from medusa.infer.bench.contenders import LOOKUP, Contender, Task, Trial, assistant, library_way, our_way
from medusa.infer.bench.grid import bench_axes, run_axes
from medusa.infer.bench.prompt_sets import Prompt, PromptSet
from medusa.infer.bench.report import markdown
from medusa.infer.bench.run import BenchOptions
from medusa.infer.drafters import make_drafter
from medusa.testing import plain_greedy, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

PROMPTS = [[4, 0, 2, 3], [1, 3, 3]]
TEXT = "abc \n"
SET = PromptSet("some", [Prompt([4, 0, 2, 3], "one"), Prompt([1, 3, 3], "one"), Prompt([2, 2, 1], "two")])
QUICK = BenchOptions(prompts=3, max_new_tokens=8, repeats=2, threads=1)


def small_trunk(family: str = "llama", dtype: torch.dtype = torch.float64) -> Trunk:
    return tiny_trunk(family, dtype=dtype, vocab_size=len(TEXT), seed=6)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return small_trunk()


def a_trial(tokens: int, seconds: float = 1.0, first: float = 0.25, accepted: tuple[int, ...] = ()) -> Trial:
    return Trial([[0] * tokens], seconds, first, 1, accepted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("ended", [False, True])
def test_every_way_does_the_same_work_and_counts_it_alike(family: str, ended: bool) -> None:
    trunk = small_trunk(family)
    greedy = [plain_greedy(trunk, prompt, 12) for prompt in PROMPTS]
    eos = frozenset(greedy[0][4:5]) if ended else frozenset()
    expected = [row[: row.index(next(iter(eos))) + 1] if eos & set(row) else row for row in greedy]
    draft = cut(trunk, 1)
    ways = [
        (our_way(trunk, NullDrafter()), 2),
        (our_way(trunk, DraftModelDrafter(draft)), 2),
        (library_way(trunk), 2),
        (library_way(trunk, cache_implementation="static", disable_compile=True), 2),
        (library_way(trunk, **LOOKUP), 1),
        (library_way(trunk, assistant_model=assistant(draft)), 1),
    ]
    for way, rows in ways:
        found = way(PROMPTS[:rows], Task(12, eos=eos))
        assert found.rows == expected[:rows]
        steps = found.tokens - found.first_tokens  # each forward gives its own token and what it accepted
        assert len(found.accepted) + sum(found.accepted) >= steps  # ours counts what an end cut off
        if way in (ways[0][0], ways[2][0], ways[3][0]):
            assert found.accepted == (0,) * steps and found.first_tokens == rows
        assert 0 < found.first_seconds < found.seconds
        assert len(found.pace) <= 1 + len(found.accepted) and found.pace[0][1] == found.first_seconds
        assert found.pace[-1][0] == max(map(len, found.rows)) and found.pace[-1][1] <= found.seconds
        assert list(found.pace) == sorted(found.pace)
        if way in (ways[0][0], ways[2][0]) and not ended:
            assert [tokens for tokens, _ in found.pace] == list(range(1, 13))


def test_the_library_draws_from_the_whole_law_and_leaves_the_generator_alone(trunk: Trunk) -> None:
    trunk = small_trunk()
    trunk.model.generation_config.update(do_sample=True, top_k=1, top_p=0.01, min_p=0.9, typical_p=0.1)
    before = torch.random.get_rng_state()
    way = library_way(trunk)
    drawn = [way(PROMPTS[:1], Task(12, temperature=5.0, seed=seed)).rows[0] for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert len({tuple(row) for row in drawn} | {tuple(plain_greedy(trunk, PROMPTS[0], 12))}) == 3
    assert torch.equal(torch.random.get_rng_state(), before)
    assert way(PROMPTS[:1], Task(12)).rows[0] == plain_greedy(trunk, PROMPTS[0], 12)


def test_the_library_is_told_of_every_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = small_trunk()
    told: list[dict] = []
    generate = trunk.model.generate
    monkeypatch.setattr(trunk.model, "generate", lambda **call: told.append(call) or generate(**call))
    library_way(trunk)(PROMPTS[:1], Task(3, temperature=0.5))
    assert (told[0]["do_sample"], told[0]["temperature"], told[0]["top_k"], told[0]["top_p"]) == (True, 0.5, 0, 1.0)


def test_rows_of_ours_draw_with_seeds_of_their_own(trunk: Trunk) -> None:
    task = Task(12, temperature=2.0, seed=5)
    same = our_way(trunk, NullDrafter())([PROMPTS[0], PROMPTS[0]], task).rows
    assert same[0] != same[1]
    assert same == our_way(trunk, NullDrafter())([PROMPTS[0], PROMPTS[0]], task).rows
    assert same[1] == our_way(trunk, NullDrafter())(PROMPTS[:1], replace(task, seed=6)).rows[0]


def test_an_assistant_shares_weights_but_no_settings(trunk: Trunk) -> None:
    model = assistant(cut(trunk, 1))
    model.generation_config.num_assistant_tokens = 77
    assert trunk.model.generation_config.num_assistant_tokens != 77
    assert model.get_input_embeddings() is trunk.model.get_input_embeddings()


def test_batches_hold_one_category_and_are_full() -> None:
    found = [[(prompt.category, prompt.ids) for prompt in batch] for batch in batches(SET, 2)]
    assert found == [[("one", [4, 0, 2, 3]), ("one", [1, 3, 3])], [("two", [2, 2, 1]), ("two", [2, 2, 1])]]
    assert [len(batch) for batch in batches(SET, 1)] == [1, 1, 1]
    three = PromptSet("three", [Prompt([number]) for number in range(3)])
    assert [[prompt.ids[0] for prompt in batch] for batch in batches(three, 2)] == [[0, 1], [2, 0]]


def named(name: str, order: list[str], **about) -> Contender:
    def run(prompts, task) -> Trial:
        order.append(f"{name}{task.tokens}")
        return a_trial(3)

    return Contender(name, run, **about)


def test_every_repeat_goes_through_all_cells_and_who_begins_rotates() -> None:
    order: list[str] = []
    ways = [named(name, order) for name in "ab"]
    cells = [Cell("x", 0.0, 1, batches(SET, 1)[:2], ways), Cell("x", 1.0, 1, batches(SET, 1)[:1], ways)]
    seen: list[tuple[float, int]] = []

    def tasks(cell: Cell, number: int) -> Task:
        seen.append((cell.temperature, number))
        return Task(number)

    found = measure(cells, tasks, 2, lambda **_: None)
    assert " ".join(order) == "a0 b0 b1 a1 a0 b0 b2 a2 a3 b3 b1 a1"
    assert seen == [(0.0, 0), (0.0, 1), (1.0, 0), (0.0, 2), (0.0, 3), (1.0, 1)]
    assert [[len(each) for each in trials["a"]] for _, trials in found] == [[2, 2], [2]]


def test_a_baseline_that_cannot_run_is_left_out_with_its_reason() -> None:
    def refuse(prompts, task) -> Trial:
        raise NotImplementedError("no cache of this kind\nand more")

    order: list[str] = []
    kept = [named("generate", order, ours=False), named("none", order)]
    ways = [*kept, Contender("generate static", refuse, ours=False), named("generate x", order, ours=False, alone=True)]
    cell = Cell("x", 0.0, 2, batches(SET, 2), ways)
    warm, out = warm_up(cell, Task(4), lambda: None)
    assert warm.contenders == kept and order == ["generate4", "none4"]
    where = {"prompt_set": "x", "temperature": 0.0, "batch_size": 2}
    assert out == [
        {"contender": "generate static", "why": "no cache of this kind"} | where,
        {"contender": "generate x", "why": "takes one row at a time"} | where,
    ]
    with pytest.raises(NotImplementedError):  # a fault of ours is no reason to go on
        warm_up(replace(cell, contenders=[Contender("mine", refuse)]), Task(4), lambda: None)


def test_figures_count_per_token_and_keep_the_prompt_apart() -> None:
    fast = [[a_trial(9, 2.0, 1.0, (1, 3, 1, 0))], [a_trial(5, 1.0, 0.5, (1, 1))]]
    slow = [[a_trial(5, 5.0, 1.0, (0,) * 4)], [a_trial(5, 6.0, 1.0, (0,) * 4)]]  # sampled: of other lengths
    found = figures(Contender("fast", None), {"fast": fast, "generate": slow}, seed=0)  # type: ignore[arg-type]
    assert found["tokens_per_second"] == 14 / 3
    assert found["first_token_ms"] == 750
    assert found["decode_ms_per_token"] == pytest.approx(1e3 * 1.5 / 12)
    assert found["tokens_per_step"] == {"value": 12 / 6, "low": 8 / 4, "high": 4 / 2}
    assert found["speedup"]["median"] == pytest.approx(median([(5 / 5) / (2 / 9), (6 / 5) / (1 / 5)]))
    assert found["decode_speedup"]["median"] == pytest.approx(median([(4 / 4) / (1 / 8), (5 / 4) / (0.5 / 4)]))
    assert found["speedup"]["low"] <= found["speedup"]["median"] <= found["speedup"]["high"]
    assert found["accepted"]["share"] == [5 / 6, 1 / 6, 1 / 6]


def test_rows_that_end_with_their_first_token_have_no_step() -> None:
    one = [[a_trial(1)]]
    found = figures(Contender("it", None), {"it": one, "generate": one}, seed=0)  # type: ignore[arg-type]
    assert found["tokens_per_step"] is None and found["decode_ms_per_token"] is None
    assert found["decode_speedup"] is None and found["speedup"]["median"] == 1.0
    assert found["accepted"] == {"share": [], "conditional": []}


def heads_of(trunk: Trunk) -> MedusaHeads:
    return MedusaHeads(HeadsConfig("medusa", 2), trunk)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with trunk, heads and tree, and the text of its recipe."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    trunk = small_trunk(dtype=torch.float32)
    trunk.model.save_pretrained(folder / "trunk")
    char_tokenizer(TEXT).save_pretrained(folder / "trunk")
    trunk = Trunk.load(folder / "trunk")
    save_heads(folder, heads_of(trunk), str(folder / "trunk"))
    save_tree(folder, Topology.chain(2))
    (folder / "text.txt").write_text("abc ab\nc a" * 300, encoding="utf-8")
    (folder / "config.yaml").write_text(json.dumps({"data": {"source": str(folder / "text.txt")}}), encoding="utf-8")
    (folder / "q.jsonl").write_text('{"prompt": "abc", "category": "x"}\n{"turns": ["ab", "ba"], "category": "y"}\n')
    return folder


AXES = AxisOptions(
    drafters=["none", "auto", "auto+typical", "cut:1"],
    baselines=["static", "prompt-lookup", "cut:1"],
    temperatures=[0.0, 1.5],
    batch_sizes=[1, 2],
)


@pytest.fixture(scope="module")
def report(run_folder: Path) -> dict:
    trunk = Trunk.load(run_folder / "trunk", dtype="float64")
    ways = contenders(trunk, run_folder, AXES)
    return bench_axes(trunk, [SET], make_cells([SET], ways, AXES), QUICK, AXES)


def test_a_batch_is_as_far_as_its_slowest_row(trunk: Trunk) -> None:
    text, drafter = plain_greedy(trunk, PROMPTS[0], 12), DraftModelDrafter(cut(trunk, 1))
    alone = [our_way(trunk, drafter)([prompt], Task(12)) for prompt in PROMPTS]
    both = our_way(trunk, drafter)(PROMPTS, Task(12))
    assert len(both.pace) == max(len(each.pace) for each in alone)
    first, second = ([tokens for tokens, _ in each.pace] + [12] * 12 for each in alone)
    assert [tokens for tokens, _ in both.pace] == list(map(min, first, second))[: len(both.pace)]
    assert first[: len(both.pace)] != second[: len(both.pace)]
    eos = frozenset(text[:1])  # the first row ends with its first token: the other one says how far they are
    if not eos & set(both.rows[1][:-1]):
        ended = our_way(trunk, NullDrafter())(PROMPTS, Task(12, eos=eos))
        assert [tokens for tokens, _ in ended.pace] == list(range(1, 13))


def test_draft_temperatures_are_contenders_of_their_own_where_drafts_are_drawn(run_folder: Path) -> None:
    trunk = Trunk.load(run_folder / "trunk", dtype="float64")
    axes = AxisOptions(drafters=["none", "auto"], temperatures=[0.0, 1.5], draft_temperatures=[0.5, 1.0, 2.0])
    ways = contenders(trunk, run_folder, axes)
    assert [each.name for each in ways] == ["generate", "none", "auto@0.5", "auto", "auto@2"]
    cells = make_cells([SET], ways, axes)
    names = ["generate", "none", "auto"], [each.name for each in ways]
    assert [[each.name for each in cell.contenders] for cell in cells] == list(map(list, names))
    report = bench_axes(trunk, [SET], cells, QUICK, axes)
    facts = report["contenders"]["auto@2"]
    assert (facts["drafter"], facts["draft_temperature"], facts["tree"]["nodes"]) == ("auto", 2.0, 3)
    assert grid_tables.label(report, "auto@2") == "medusa, 3 nodes, drafts at 2 T"
    assert grid_tables.label(report, "auto") == "medusa, 3 nodes"
    found = report["cells"][1]["contenders"]
    steps = [[trial["steps"] for batch in found[name]["trials"] for trial in batch] for name in names[1][2:]]
    assert len({tuple(each) for each in steps}) == 3  # they do draw otherwise
    only = contenders(trunk, run_folder, replace(axes, draft_temperatures=[2.0]))
    assert [each.name for each in only] == ["generate", "none", "auto@2"] and not any(each.drawn for each in only)
    with pytest.raises(UserError, match="none of the drafters draws its drafts"):
        contenders(trunk, run_folder, replace(axes, drafters=["none", "prompt-lookup"]))


@pytest.mark.parametrize("wrong", ["0", "-1", "inf", "nan"])
def test_a_draft_temperature_that_is_none(run_folder: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    assert main(["bench", str(run_folder), "--draft-temperatures", wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"draft_temperatures={wrong}" in err.replace(".0", "")
    with pytest.raises(UserError, match="give numbers above 0"):
        AxisOptions(draft_temperatures=[1.0, float(wrong)])
    assert main(["generate", str(run_folder), "--prompt", "abc", "--draft-temperature", wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"draft_temperature={wrong}" in err.replace(".0", "")


def test_the_report_says_whether_our_loop_ran_compiled(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Trunk.load(run_folder / "trunk", dtype="float64")
    axes = AxisOptions(drafters=["auto"], batch_sizes=[1, 2])
    told = bench_axes(eager, [SET], make_cells([SET], contenders(eager, run_folder, axes), axes), QUICK, axes)
    assert told["compiled"] == [] and "none of its steps was compiled" in markdown(told)
    monkeypatch.setattr("medusa.infer.warmup.CompiledSteps", partial(CompiledSteps, backend="eager"))
    trunk = Trunk.load(run_folder / "trunk", dtype="float64")
    ways = contenders(trunk, run_folder, axes, compile=True)
    assert trunk.compiled is not None and sorted(trunk.compiled.compiled) == [(1, 1), (1, 3), (2, 1), (2, 3)]
    told = bench_axes(trunk, [SET], make_cells([SET], ways, axes), QUICK, axes)
    assert told["compiled"] == [[1, 1], [1, 3], [2, 1], [2, 3]]
    assert all(cell["identical"]["ok"] for cell in told["cells"])
    assert "compiled, for these rows and nodes: 1 row of 1, 3; 2 rows of 1, 3." in markdown(told)


def test_the_report_holds_all_cells_and_is_json(report: dict) -> None:
    assert json.loads(json.dumps(report)) == report
    cells = report["cells"]
    assert [(cell["temperature"], cell["batch_size"]) for cell in cells] == [(0.0, 1), (0.0, 2), (1.5, 1), (1.5, 2)]
    names = ["generate", "generate static", "generate prompt-lookup", "generate cut:1", *AXES.drafters]
    assert list(cells[0]["contenders"]) == names == list(report["contenders"])
    assert list(cells[1]["contenders"]) == [name for name in names if name not in names[2:4]]
    assert {(each["contender"], each["batch_size"]) for each in report["left_out"]} == {(n, 2) for n in names[2:4]}
    for cell in cells:
        for found in cell["contenders"].values():
            assert list(found["categories"]) == ["one", "two"]
            assert [len(batch) for batch in found["trials"]] == [2] * cell["batches"]
            assert found["tokens"] == sum(trial["tokens"] for batch in found["trials"] for trial in batch)
            for trial in (trial for batch in found["trials"] for trial in batch):
                assert [tokens for tokens, _, _ in trial["pace"]] == [1, 2, 3, 4, 5, 6, 7, 8] and trial["pace"][0][
                    1:
                ] == [
                    0,
                    0,
                ]
    assert cells[0]["contenders"]["none"]["tokens_per_step"]["value"] == 1.0
    assert cells[0]["contenders"]["cut:1"]["tokens_per_step"]["value"] > 1.0


def test_greedy_outputs_of_ours_are_equal_and_sampled_ones_are_not_asked(report: dict) -> None:
    for cell in report["cells"]:
        if cell["temperature"]:
            assert cell["identical"] is None
        else:
            found = cell["identical"]
            assert found["ok"] and found["equal"] == found["prompts"] == cell["batches"] * cell["batch_size"]


def test_only_what_is_lossless_and_ours_has_to_be_equal(trunk: Trunk) -> None:
    right = plain_greedy(trunk, PROMPTS[0], 6)
    wrong = [*right[:3], (right[3] + 1) % len(TEXT), *right[4:]]

    def report_of(**about) -> dict:
        ways = [Contender("generate", None, ours=False), Contender("it", None, **about)]  # type: ignore[arg-type]
        cell = Cell("x", 0.0, 1, [[Prompt(PROMPTS[0])]], ways)
        trials = {name: [[Trial([row], 1.0, 0.5, 1, (0,) * 5)]] for name, row in (("generate", right), ("it", wrong))}
        return cell_report(trunk, cell, trials, 0)["identical"]

    assert not report_of()["ok"]
    for about in ({"lossless": False}, {"ours": False}):
        found = report_of(**about)
        assert found["ok"] and found["others"]["mismatches"][0]["position"] == 3


def test_a_lossy_rule_is_marked_wherever_it_shows(report: dict) -> None:
    assert report["contenders"]["auto+typical"]["lossless"] is False
    assert grid_tables.label(report, "auto+typical") == "medusa, 3 nodes, typical (lossy)"
    for table in grid_tables.tables(report):
        shown = [*table.heads, *(row[0] for row in table.rows)]
        assert any("lossy" in each for each in shown), table.title
    assert any(line.startswith("Lossy, so its text is not the trunk's own") for line in grid_tables.notes(report))
    for name, figure in grid_plots.figures(report).items():
        labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        labels += [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
        assert any("lossy" in each for each in labels), name


def test_tables_and_markdown_hold_the_figures(report: dict) -> None:
    speed, *by_category, depth = grid_tables.tables(report)
    assert len(by_category) == 4 and [row[0] for row in by_category[0].rows] == ["one", "two"]
    assert all(len(row) == len(table.heads) for table in (speed, *by_category, depth) for row in table.rows)
    assert len(speed.rows) == (1 + 8) + (1 + 6) + (1 + 8) + (1 + 6)
    assert [speed.rows[place][0] for place in (0, 9)] == ["T 0, batch 1", "T 0, batch 2"]
    found = report["cells"][1]["contenders"]["cut:1"]
    row = next(row for row in speed.rows[9:] if row[0] == "cut:1")
    assert row[1:3] == [f"{found['tokens_per_second']:.1f}", f"{found['first_token_ms']:.1f}"]
    text = markdown(report)
    assert "some, temperature 0, batch 1: Outputs identical to generate: 3 of 3 prompts." in text
    assert "Left out of 2 of 4 cells (batch 2): generate cut:1: takes one row at a time." in text


def test_figures_are_drawn_for_the_axes_that_vary(report: dict) -> None:
    assert set(grid_plots.figures(report)) == {"speedup", "categories", "temperatures", "batch_sizes", "acceptance"}
    cells = [report["cells"][0]]
    one = {"some": report["prompt_sets"]["some"] | {"categories": {"one": 3}}}
    assert set(grid_plots.figures(report | {"cells": cells, "prompt_sets": one})) == {"speedup", "acceptance"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt_set": ["spek"]}, r"prompt set 'spek' \(did you mean spec\?\)"),
        ({"drafters": ["atuo"]}, r"drafter='atuo' \(did you mean auto\?\): choose from auto, none,"),
        ({"drafters": ["cut"]}, r"drafter='cut': give it as cut:LAYERS"),
        ({"drafters": ["none:4"]}, r"drafter='none:4': give it as none"),
        ({"baselines": ["statik"]}, r"baseline='statik' \(did you mean static\?\): choose from static,"),
        ({"temperatures": [0.5, -1.0]}, r"temperatures=-1.0: give at least 0"),
        ({"temperatures": [float("nan")]}, r"temperatures=nan: give at least 0"),
        ({"batch_sizes": [0]}, r"batch_sizes=0: give at least 1"),
        ({"compile_baseline": True}, r"compile_baseline compiles the baseline 'static': add it to --baselines"),
    ],
)
def test_axes_out_of_range_are_refused(given: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        AxisOptions(**given)


def test_drafters_by_name(run_folder: Path, trunk: Trunk) -> None:
    loaded = Trunk.load(run_folder / "trunk")
    assert isinstance(make_drafter("none", loaded, None), NullDrafter)
    assert isinstance(make_drafter("auto", loaded, run_folder), MedusaDrafter)
    made = make_drafter("cut:1", loaded, None)
    assert isinstance(made, DraftModelDrafter) and made.draft.config.num_hidden_layers == 1
    assert isinstance(make_drafter(f"draft:{run_folder / 'trunk'}", loaded, None), DraftModelDrafter)
    dynamic, mixed = make_drafter("dynamic:7", loaded, run_folder), make_drafter("mixed:8", loaded, run_folder)
    assert isinstance(dynamic, DynamicDrafter) and dynamic.nodes == 7 and set(dynamic.temperatures) == {1.0}
    assert isinstance(mixed, MixedDrafter) and mixed.dynamic.nodes == 8
    with pytest.raises(UserError, match="a dynamic tree of 1 nodes: give a whole number from 2"):
        make_drafter("mixed:1", loaded, run_folder)
    for name, says in (
        ("cut:two", "drafter='cut:two': give the number of layers"),
        ("cut:9", "a cut of 9 layers"),
        ("auto", "drafter='auto' takes the heads of a folder made by `medusa train`, and"),
        ("mixed:8", "drafter='mixed:8' takes the heads of a folder made by `medusa train`, and"),
        ("dynamic:x", "drafter='dynamic:x': give the number of nodes, such as dynamic:16"),
    ):
        with pytest.raises(UserError, match=says):
            make_drafter(name, loaded, run_folder / "trunk")


def test_the_command_measures_a_run_along_its_axes(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = BenchOptions(prompts=2, prompt_length=8, max_new_tokens=6, repeats=1, threads=1)
    axes = AxisOptions(prompt_set=["heldout", str(run_folder / "q.jsonl")], batch_sizes=[2])
    assert run_axes(str(run_folder), options, axes) == 0
    report = json.loads((run_folder / "benchmark" / "report.json").read_text(encoding="utf-8"))
    assert list(report["contenders"]) == ["generate", "none", "auto"]
    sets = report["prompt_sets"]
    assert sets["heldout"]["prompts"] == 2 and sets["heldout"]["longest"] == 8
    assert sets[str(run_folder / "q.jsonl")]["categories"] == {"x": 1, "y": 2}
    assert {"report.md", "speedup.png"} <= {path.name for path in (run_folder / "benchmark").iterdir()}
    printed = " ".join(capsys.readouterr().out.split())
    assert "heldout: 2 prompts" in printed and "medusa, 3 nodes" in printed


def test_a_plain_trunk_is_measured_where_the_user_stands(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = BenchOptions(prompts=1, max_new_tokens=4, repeats=1, threads=1)
    axes = AxisOptions(prompt_set=[str(run_folder / "q.jsonl")], drafters=["cut:1"])
    assert run_axes(str(run_folder / "trunk"), options, axes) == 0
    assert (tmp_path / "benchmark-trunk" / "report.json").is_file()
    with pytest.raises(UserError, match=r"prompt set 'spec': .*character .* is not among the 5 symbols"):
        run_axes(str(run_folder / "trunk"), options, AxisOptions())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt-set", "spek"], "prompt set 'spek' (did you mean spec?)"),
        (["--prompt-set", "heldout", "--drafters", "cut:9"], "a cut of 9 layers"),
        (["--batch-sizes", "0"], "batch_sizes=0: give at least 1"),
        (["--temperatures", "-0.5"], "temperatures=-0.5: give at least 0"),
        (["--categories", "qa"], "categories=['qa']: heldout has none; add a set of questions, such as spec"),
        (["--draft-temperatures", "0.5"], "draft_temperatures, and no row samples: add temperatures above 0"),
        (["--profile-clock", "cpu"], "--profile-clock cpu without --profile"),
        (["--profile", "--batch-sizes", "2"], "--profile takes no --batch-sizes: leave it out"),
        (["--profile", "--prompt-set", "spec", "heldout"], "--profile takes no second --prompt-set: leave it out"),
        (["--drafters", "none", "--max-new-tokens", "125"], "exceeds the trunk's context of 128"),
    ],
)
def test_the_command_ends_in_one_line(
    words: list[str], says: str, run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(run_folder), *words]) == 2
    error = capfd.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (run_folder / "report").exists()


def test_a_run_alone_is_measured_as_ever(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("medusa.infer.bench.run.run_bench", lambda *args, **options: asked.append("alone") or 0)
    monkeypatch.setattr("medusa.infer.bench.grid.run_axes", lambda *args, **options: asked.append(args[2]) or 0)
    assert main(["bench", str(run_folder), "--prompts", "3"]) == 0
    assert main(["bench", str(run_folder / "trunk")]) == 0
    assert main(["bench", str(run_folder), "--temperatures", "0", "0.7", "--ignore-eos"]) == 0
    assert asked == ["alone", AxisOptions(), AxisOptions(temperatures=[0.0, 0.7], ignore_eos=True)]
