"""The profile of a step: where its time goes, by clocks that tests can wind, and how far the limits are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.cut import cut
from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.base import Drafter
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.prompt_lookup import PromptLookupDrafter
from medusa.eagle import EagleConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.infer.bench.profile import (
    ACCEPTANCE,
    COMMIT,
    CPU,
    DRAFTER,
    HEADS,
    LOOP,
    MASK,
    PARTS,
    TEXT,
    TREE,
    TRUNK,
    DeviceClock,
    HostClock,
    Parts,
    Recorder,
    Watch,
    clock_for,
    profile,
)
from medusa.infer.bench.profile_report import account, notes, tables, trunk_bytes, trunk_operations
from medusa.infer.bench.profile_run import profile_report, write_profile
from medusa.infer.bench.run import BenchOptions
from medusa.machine import Rates
from medusa.testing import plain_greedy, random_eagle, random_heads, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

PROMPT = [3, 0, 17, 5]
TREE_OF_5 = Topology.from_paths([[0], [1], [0, 0], [0, 0, 0]])
RATES = Rates(1e9, 1e10, 1 << 20, "float64", "2026-01-01")


class Ticks:
    """A clock on which every moment is one second after the one before."""

    def __init__(self) -> None:
        self.now = 0
        self.settled = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def settle(self) -> None:
        self.settled += 1

    def between(self, start: int, end: int) -> float:
        return end - start


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("llama")


def heads_drafter(trunk: Trunk, kind: str = "root") -> MedusaDrafter:
    return MedusaDrafter(random_heads(trunk, HeadsConfig(kind, 3)), TREE_OF_5)


# The recorder.


def test_a_moment_belongs_to_the_innermost_part() -> None:
    recorder = Recorder(Ticks())
    inner = recorder.timed("inner", lambda: "done")
    assert inner() == "done" and not recorder.spans()  # nothing was under way
    recorder.enter("outer")
    assert inner() == "done"
    recorder.leave()
    assert recorder.spans() == [{"outer": 2.0, "inner": 1.0}]


def test_what_is_called_within_heads_and_within_itself_is_theirs() -> None:
    recorder = Recorder(Ticks())
    trunk = recorder.timed(TRUNK, lambda: None)
    again = recorder.timed(TRUNK, trunk)
    heads = recorder.timed(HEADS, trunk)
    recorder.enter(LOOP)
    heads()
    again()
    recorder.leave()
    assert recorder.spans() == [{LOOP: 3.0, HEADS: 1.0, TRUNK: 1.0}]


def test_a_part_that_fails_has_ended() -> None:
    def fails() -> None:
        raise ValueError

    recorder = Recorder(Ticks())
    recorder.enter(LOOP)
    with pytest.raises(ValueError):
        recorder.timed(TRUNK, fails)()
    assert recorder.under_way == [LOOP]


class FakeEvent:
    """An event of a device whose queue is a list."""

    queue: list[FakeEvent] = []  # noqa: RUF012
    done = False

    def record(self) -> None:
        self.queue.append(self)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert FakeEvent.done, "asked before the device was waited for"
        return 5.0 * (self.queue.index(other) - self.queue.index(self))


def test_a_device_is_waited_for_once_at_the_end(trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "queue", [])
    monkeypatch.setattr(FakeEvent, "done", False)
    waits: list[int] = []

    def wait() -> None:
        waits.append(len(FakeEvent.queue))
        FakeEvent.done = True

    found = profile(trunk, {"none": NullDrafter()}, [PROMPT], 6, clock=lambda: DeviceClock(FakeEvent, wait))["none"]
    assert waits == [len(FakeEvent.queue)] and len(found) == 5
    for step in found:
        assert step.bare == 0.005
        assert {part: round(each / 0.005) for part, each in step.seconds.items()} == {
            LOOP: 7,  # before, between and after the six that follow one another
            TREE: 1,
            MASK: 2,  # before and after the forward
            TRUNK: 1,
            ACCEPTANCE: 1,
            DRAFTER: 1,
            COMMIT: 1,
            TEXT: 1,
        }


def test_a_gpus_work_is_not_told_by_processor_time() -> None:
    with pytest.raises(UserError, match="leave the clock out"):
        clock_for(torch.device("cuda"), CPU)
    assert isinstance(clock_for(torch.device("cuda")), DeviceClock)
    clock = clock_for(torch.device("cpu"), CPU)
    assert isinstance(clock, HostClock) and clock.between(clock.mark(), clock.mark()) < 1
    assert clock.between(2.0, 5.5) == 3.5


# Steps.


def drafters(trunk: Trunk) -> dict[str, Drafter]:
    dynamic = DynamicDrafter(random_heads(trunk, HeadsConfig("medusa", 3)), 6)
    return {
        "root": heads_drafter(trunk),
        "hydra": heads_drafter(trunk, "hydra"),
        "dynamic": dynamic,
        "mixed": MixedDrafter(dynamic),
        "cut": DraftModelDrafter(cut(trunk, 1)),
        "eagle": EagleDrafter(random_eagle(trunk, EagleConfig(1), scale=0.02), TREE_OF_5),
    }


def test_all_that_a_step_consists_of_is_found(trunk: Trunk) -> None:
    made = drafters(trunk)
    found = profile(trunk, made | {"lookup": PromptLookupDrafter()}, [PROMPT], 24, clock=Ticks)
    for name, steps in found.items():
        # a limit may cut the last step, which is counted as it was accepted
        assert sum(step.tokens for step in steps[:-1]) < 23 <= sum(step.tokens for step in steps)
        for step in steps:
            assert {TRUNK, TREE, MASK, ACCEPTANCE, COMMIT, LOOP} <= step.seconds.keys() <= PARTS.keys()
        assert any(step.seconds.get(HEADS, 0) for step in steps) == (name in made), name


def test_a_profile_changes_nothing(trunk: Trunk) -> None:
    expected = plain_greedy(trunk, PROMPT, 24)
    for drafter in drafters(trunk).values():
        before = {name: vars(each).copy() for name, each in (("trunk", trunk), ("drafter", drafter))}
        watch = Watch(trunk, drafter, PROMPT, 24, Recorder(Ticks()))
        while watch.decoder.live:
            watch.step()
        assert watch.tally.completion().token_ids == expected
        assert vars(trunk).keys() == before["trunk"].keys()
        assert all(vars(trunk)[key] is value for key, value in before["trunk"].items())
        assert all(vars(drafter)[key] is value for key, value in before["drafter"].items())
        heads = getattr(drafter, "heads", None)
        assert heads is None or "logits" not in vars(heads)


def test_the_bare_forward_has_the_shape_of_the_steps(trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    body, drafter = trunk._body, heads_drafter(trunk)

    def forward(**arguments: Any) -> Any:
        mask = arguments["attention_mask"]
        shapes.append((arguments["input_ids"].shape[1], 0 if mask is None else mask.shape[-1]))
        return body(**arguments)

    monkeypatch.setattr(trunk, "_body", forward)
    steps = profile(trunk, {"root": drafter}, [PROMPT], 20, clock=Ticks)["root"]
    pairs = shapes[1:]  # the first read the prompt
    assert pairs[::2] == pairs[1::2] == [(step.nodes, step.view if step.nodes > 1 else 0) for step in steps]


def test_drafters_take_turns(trunk: Trunk) -> None:
    class Counting(NullDrafter):
        def __init__(self, name: str) -> None:
            self.called = name

        def open(self, trunk: Trunk) -> Any:
            session: Any = super().open(trunk)
            propose = session.propose

            def noted(*arguments: Any) -> Any:
                order.append(self.called)
                return propose(*arguments)

            session.propose = noted
            return session

    order: list[str] = []
    profile(trunk, {name: Counting(name) for name in "ab"}, [PROMPT], 4, clock=Ticks)
    assert order == ["a", "b"] * 3


# Figures.


def steps(*each: tuple[int, float, float, float]) -> list[Parts]:
    """Of (nodes, trunk, heads, all else) steps that bring two tokens; bare forwards take 0.1 s."""
    return [
        Parts(nodes, 2, 10, {TRUNK: forward, HEADS: heads, LOOP: rest}, 0.1) for nodes, forward, heads, rest in each
    ]


def test_shares_and_overhead(trunk: Trunk) -> None:
    found = account(trunk, steps((4, 0.1, 0.06, 0.04), (4, 0.1, 0.06, 0.04), (1, 9.0, 9.0, 9.0)), RATES)
    assert (found["nodes"], found["steps"], found["tokens_per_step"]) == (4, 2, 2)
    assert found["step_ms"] == pytest.approx(200) and found["own_ms"] == pytest.approx(40)
    assert found["own_share"] == pytest.approx(0.2) and found["overhead"] == pytest.approx(1.4)
    assert found["parts"][HEADS] == {"ms": pytest.approx(60), "share": pytest.approx(0.3)}
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1)
    assert found["parts"].keys() == PARTS.keys()


def test_the_bound_is_the_larger_limit(trunk: Trunk) -> None:
    bytes_, operations = trunk_bytes(trunk, 10), trunk_operations(trunk, 4, 10)
    for rates, ms, read in (
        (Rates(bytes_, operations / 2, 1, "", ""), 2000, 1000),
        (Rates(bytes_ / 3, operations, 1, "", ""), 3000, 3000),
    ):
        bound = account(trunk, steps((4, 0.1, 0.0, 0.0)), rates)["bound"]
        assert bound["ms"] == pytest.approx(ms) and bound["read_ms"] == pytest.approx(read)
        assert bound["ratio"] == pytest.approx(100 / ms)
        assert rates.seconds(bytes_, operations) == pytest.approx(ms / 1e3)


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_forward_reads_and_does(tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    trunk, config = Trunk(model, check=False), model.config
    one = config.hidden_size * config.vocab_size
    body = sum(weight.numel() for weight in model.parameters()) - (one if tied else 2 * one)
    slot = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert trunk_bytes(trunk, 7) == 8 * (body + one + 7 * slot)
    attention = 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers * 7
    assert trunk_operations(trunk, 3, 7) == 2 * 3 * (body + one + attention)


# The command.


@pytest.fixture(scope="module")
def report(trunk: Trunk) -> dict[str, Any]:
    made: dict[str, Drafter] = {"none": NullDrafter(), "root": heads_drafter(trunk)}
    options = BenchOptions(prompts=1, max_new_tokens=12)
    return profile_report(trunk, made, [PROMPT], options, known=RATES) | {"source": "x", "prompt_set": "y"}


def test_tables_and_sentences_say_what_was_measured(report: dict[str, Any]) -> None:
    parts, limits = tables(report)
    assert parts.heads[1:] == limits.heads[1:] == ["no drafts, 1 node", "root, 5 nodes"]
    rows = {row[0]: row[1:] for row in parts.rows}
    assert rows["trunk forward"][0].endswith("%") and rows["the whole step"][1].endswith("100.0%")
    assert len({len(row) for table in (parts, limits) for row in table.rows}) == 1
    text = " ".join(notes(report))
    assert "1.0 GB/s over 1 MB" in text and "10 GFLOP/s" in text and "the clock on the wall" in text


def test_a_profile_is_written_whole(report: dict[str, Any], tmp_path: Path) -> None:
    write_profile(report, tmp_path)
    assert json.loads((tmp_path / "profile.json").read_text()) == report
    assert (tmp_path / "profile.md").read_text().startswith("# Profile of a step\n\n## Where a step's time goes")
    assert (tmp_path / "profile.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out"):
        write_profile(report, tmp_path / "file")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Path]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("medusa.machine.MEASURED_S", 0.0)
    tiny_model("llama").save_pretrained(tmp_path / "trunk")
    char_tokenizer("".join(map(chr, [10, *range(32, 96)]))).save_pretrained(tmp_path / "trunk")
    trunk = Trunk.load(tmp_path / "trunk")
    save_heads(tmp_path / "heads", random_heads(trunk, HeadsConfig("root", 3)), str(tmp_path / "trunk"))
    save_tree(tmp_path / "heads", TREE_OF_5)
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["HELLO"]}) + "\n")

    def call(folder: str, *more: str) -> tuple[int, Path]:
        out, few = str(tmp_path / "out"), ["--max-new-tokens", "8", "--prompts", "1", "--threads", "1"]
        asked = ["--prompt-set", str(tmp_path / "asked.jsonl")]
        return main(["bench", str(tmp_path / folder), "--profile", "--out", out, *asked, *few, *more]), Path(out)

    return call


def test_the_command_profiles_a_trunk(run: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run("trunk", "--drafters", "none", "prompt-lookup", "--profile-clock", "cpu")
    assert code == 0
    found = json.loads((out / "profile.json").read_text())
    assert list(found["drafters"]) == ["none", "prompt-lookup"] and found["clock"] == CPU
    said = capsys.readouterr().out
    assert "Where a step's time goes" in said and "our share of the step" in said and "processor time" in said


def test_the_command_profiles_a_runs_own_heads(run: Callable[..., tuple[int, Path]]) -> None:
    code, out = run("heads")
    found = json.loads((out / "profile.json").read_text())
    assert code == 0 and list(found["drafters"]) == ["none", "root"] and found["drafters"]["root"]["nodes"] == 5


def test_the_command_refuses_other_axes(
    run: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run("trunk", "--temperatures", "1.0")
    assert code == 2 and not out.exists()
    assert "--profile takes no --temperatures" in capsys.readouterr().err
