"""The trunk's own text: what heads then learn is what it says, token for token, and a kill changes nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from medusa.data.corpus import DataConfig
from medusa.data.prompts import beginnings
from medusa.eagle import EagleConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.testing import plain_greedy
from medusa.train import own_text, stages
from medusa.train.cli import read_config, summary
from medusa.train.config import (
    CalibrationConfig,
    EagleTraining,
    EvaluationConfig,
    HeadsTraining,
    JointTraining,
    NewTrunk,
    OwnText,
    TrainConfig,
    Training,
    TrunkConfig,
)
from medusa.train.job import Job
from medusa.train.lines import Lines
from medusa.train.plan import plan
from medusa.train.record import OWN, difference
from medusa.train.stages import train
from medusa.trunk import Trunk

TEXT = "".join(f"{number} cats sat on mat {number * number % 97} and a dog ran far\n" for number in range(100))
ANSWERS = f"{OWN}/answers.jsonl"
OWNTEXT = OwnText(prompts=10, prompt_tokens=6, temperature=(0.0,), batch=4)


class Killed(BaseException):
    """Stands for SIGKILL where a process of its own would be too slow."""


def quiet(line: str) -> None:
    """Says nothing."""


def small(folder: Path, **changes: Any) -> TrainConfig:
    """A run of about a second, in fp64."""
    (folder / "text.txt").write_text(TEXT)
    config = TrainConfig(
        str(folder / "run"),
        threads=1,
        data=DataConfig(source=str(folder / "text.txt"), tokenizer="char", block=16),
        trunk=TrunkConfig(
            new=NewTrunk(layers=1, hidden=16, heads=2, kv_heads=1, intermediate=24, context=64), dtype="float64"
        ),
        trunk_training=Training(steps=12, batch=4, save_minutes=None),
        own_text=OWNTEXT,
        heads=HeadsConfig(num=2),
        heads_training=HeadsTraining(steps=4, batch=2, lr=1e-2, save_minutes=None),
        eagle_training=EagleTraining(steps=3, batch=2, passes=2, depth=2, save_minutes=None),
        evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=8, tokens=12, nodes=4),
        calibration=CalibrationConfig(sizes=(1, 3), rounds=1),
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run with heads and an EAGLE layer, which has met no interruption."""
    config = small(tmp_path_factory.mktemp("made"), eagle=EagleConfig(3))
    train(config, report=quiet)
    return config


@pytest.fixture
def copied(made: TrainConfig, tmp_path: Path) -> TrainConfig:
    shutil.copytree(made.run, tmp_path / "run")
    return replace(made, run=str(tmp_path / "run"))


def texts(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run) / ANSWERS).read_text().splitlines()]


def record(config: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.run) / "run.json").read_text())["stages"]
    return found


def encoded(config: TrainConfig) -> tuple[Trunk, list[int]]:
    trunk = Trunk.load(Path(config.run) / "trunk", dtype="float64")
    assert trunk.tokenizer is not None
    ids: list[int] = trunk.tokenizer(TEXT)["input_ids"]
    return trunk, ids


def test_the_continuations_are_what_the_trunk_says_token_for_token(made: TrainConfig) -> None:
    trunk, _ = encoded(made)
    found = texts(made)
    assert len(found) == 10 and len({tuple(line["answer_ids"]) for line in found}) > 1
    for line in found:
        assert line["answer_ids"] == plain_greedy(trunk, line["prompt_ids"], 10)[-10:]
        assert line["finish"] == "length" and line["temperature"] == 0


def test_beginnings_are_of_the_training_text_alone_and_spread_over_it(made: TrainConfig) -> None:
    _, ids = encoded(made)
    train_ids = ids[: len(ids) * 9 // 10]
    places = len(train_ids) - 6 + 1
    wanted = [train_ids[index * places // 10 :][:6] for index in range(10)]
    assert [line["prompt_ids"] for line in sorted(texts(made), key=lambda line: line["id"])] == wanted


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_beginnings_cross_no_seam_and_differ_in_place(sizes: list[int], length: int, count: int) -> None:
    documents = [100 * number + torch.arange(size) for number, size in enumerate(sizes)]
    places = sum(max(size - length + 1, 0) for size in sizes)
    if places < count:
        with pytest.raises(UserError, match=f"the training text has {places} places for prompts of {length} tokens"):
            beginnings(documents, count, length)
        return
    found = beginnings(documents, count, length)
    assert len({prompt[0] for prompt in found}) == len(found) == count
    for prompt in found:
        assert prompt == list(range(prompt[0], prompt[0] + length)) and prompt[-1] % 100 < sizes[prompt[0] // 100]
    if count == places:
        assert [prompt[0] for prompt in found] == [
            100 * number + start for number, size in enumerate(sizes) for start in range(max(size - length + 1, 0))
        ]


class Seen:
    """The batches that each stage's trainer takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, list[dict[str, Tensor]]] = {}
        before = Job.rows

        def rows(job: Job, stage: str, training: Training) -> Any:
            found = before(job, stage, training)
            self.rows[stage] = [found[index] for index in range(len(found))]
            return found

        patch.setattr(Job, "rows", rows)


def test_heads_and_layer_learn_the_continuations_alone(
    copied: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = Seen(monkeypatch)
    train(copied, "heads", report=quiet)
    train(copied, "eagle", report=quiet)
    said = {tuple(line["prompt_ids"] + line["answer_ids"]) for line in texts(copied)}
    assert set(seen.rows) == {"heads", "eagle"} and len(seen.rows["heads"]) == 8
    for row in (row for rows in seen.rows.values() for row in rows):
        assert tuple(row["input_ids"].tolist()) in said
        assert not row["segments"].any()
        assert row["labels"][:6].eq(-100).all() and row["labels"][6:].equal(row["input_ids"][6:])


def test_a_trunk_learns_the_text_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path)
    seen = Seen(monkeypatch)
    train(config, report=quiet)
    _, ids = encoded(config)
    windows = {tuple(ids[start : start + 16]) for start in range(len(ids) * 9 // 10 - 15)}
    assert all(tuple(row["input_ids"].tolist()) in windows and "labels" not in row for row in seen.rows["trunk"])


def test_what_is_written_down(made: TrainConfig) -> None:
    found = record(made)
    assert list(found) == ["trunk", "text", "heads", "eagle", "calibration"]
    assert found["text"]["result"]["texts"] == 10 and found["text"]["result"]["tokens"] == 100
    assert found["text"]["result"]["cut"] == 10 and 0 < found["text"]["result"]["repeated"] < 1
    for stage in ("text", "heads", "eagle"):
        settings = found[stage]["settings"]
        assert settings["own_text"] == {"prompts": 10, "prompt_tokens": 6, "tokens": None, "temperature": [0.0]}
    assert found["text"]["settings"]["trunk"] == found["heads"]["settings"]["trunk"] and "seed" in settings
    assert "  text         10 of the trunk's own, 100 tokens, in own-text" in summary(train(made, report=quiet))
    assert "text         the trunk's own, 10 beginnings of 6 tokens" in plan(made)
    assert "             10 tokens each, 100 in all" in plan(made)


def test_a_made_run_reads_and_writes_nothing(copied: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("the text was asked for")

    monkeypatch.setattr("medusa.train.text.load_texts", fail)
    monkeypatch.setattr(own_text, "read_texts", fail)
    before = {path: path.stat().st_mtime_ns for path in Path(copied.run).rglob("*")}
    lines: list[str] = []
    train(copied, report=lines.append)
    assert before == {path: path.stat().st_mtime_ns for path in Path(copied.run).rglob("*")}
    assert f"text: {Path(copied.run) / OWN} is there" in lines


@pytest.mark.parametrize("temperature", [(0.0,), (0.0, 1.0)], ids=str)
def test_killed_after_any_line_and_resumed_is_never_stopped(
    temperature: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(OWNTEXT, temperature=temperature)
    (tmp_path / "whole").mkdir()
    (tmp_path / "torn").mkdir()
    whole, torn = small(tmp_path / "whole", own_text=own), small(tmp_path / "torn", own_text=own)
    torn = replace(torn, data=whole.data)
    train(whole, report=quiet)
    append, written = Lines.append, 0

    def append_or_die(lines: Lines, content: dict[str, Any]) -> None:
        nonlocal written
        if written == 3:  # after it the next line has been begun
            with open(lines.path, "ab") as file:
                file.write(b'{"id":"0000')
            written = 0
            raise Killed
        written += 1
        append(lines, content)

    monkeypatch.setattr(Lines, "append", append_or_die)
    for _ in range(3):
        with pytest.raises(Killed):
            train(torn, report=quiet)
    train(torn, report=quiet)
    assert (Path(torn.run) / ANSWERS).read_bytes() == (Path(whole.run) / ANSWERS).read_bytes()
    assert {line["temperature"] for line in texts(whole)} == set(temperature)
    weights, wanted = (load_file(Path(config.run) / "heads.safetensors") for config in (torn, whole))
    assert all(value.equal(wanted[name]) for name, value in weights.items())
    results = [record(config)["text"]["result"] for config in (torn, whole)]
    assert results[0] == results[1]


def left_unfinished(config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_text, "to_disk", lambda path: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            train(config, "text", report=quiet)


def test_a_text_that_was_begun_with_other_settings_is_refused_or_made_anew(copied: TrainConfig) -> None:
    left_unfinished(copied)
    assert "text" not in record(copied) and "heads" not in record(copied)
    longer = replace(copied, own_text=replace(OWNTEXT, prompts=11))
    with pytest.raises(
        UserError, match=r"its text stage was left with own_text.prompts=10, now it is 11: .*--fresh text"
    ):
        train(longer, report=quiet)
    assert len(texts(copied)) == 10
    train(longer, "text", report=quiet)
    assert len(texts(copied)) == 11 and record(copied)["heads"]["settings"]["own_text"]["prompts"] == 11


def test_a_text_of_another_trunk_is_not_gone_on_with(copied: TrainConfig) -> None:
    left_unfinished(copied)
    other = replace(copied, seed=1, trunk_training=replace(copied.trunk_training, steps=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "make_text", lambda *args: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            train(other, "trunk", report=quiet)
    assert not (Path(copied.run) / OWN).exists()
    train(other, report=quiet)
    trunk, _ = encoded(other)
    assert all(line["answer_ids"] == plain_greedy(trunk, line["prompt_ids"], 10)[-10:] for line in texts(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"own_text": replace(OWNTEXT, temperature=(0.0, 1.0))}, r"text stage was made with own_text.temperature=\[0"),
        ({"own_text": None}, "heads stage was made with own_text.prompts=10, now it is None: add `--fresh heads`"),
    ],
)
def test_a_change_is_refused_until_it_is_asked_for(copied: TrainConfig, changes: dict[str, Any], message: str) -> None:
    changed = replace(copied, **changes)
    before = (Path(copied.run) / "heads.safetensors").read_bytes()
    with pytest.raises(UserError, match=message):
        train(changed, report=quiet)
    if changed.own_text is None:  # a layer does not rest on heads
        with pytest.raises(UserError, match="eagle stage was made with own_text"):
            train(changed, "heads", report=quiet)
    train(changed, "text" if changed.own_text else "eagle", report=quiet)
    assert (Path(copied.run) / "heads.safetensors").read_bytes() != before


def test_how_many_are_continued_at_once_is_no_change(copied: TrainConfig) -> None:
    lines: list[str] = []
    train(replace(copied, own_text=replace(OWNTEXT, batch=3)), report=lines.append)
    assert all(line.endswith("is there") for line in lines)


def test_heads_of_the_datas_text_are_replaced_on_demand_alone(tmp_path: Path) -> None:
    config = small(tmp_path, own_text=None)
    train(config, report=quiet)
    assert "text" not in record(config) and not (Path(config.run) / OWN).exists()
    before, own = (Path(config.run) / "heads.safetensors").read_bytes(), replace(config, own_text=OWNTEXT)
    with pytest.raises(UserError, match=r"heads stage was made with own_text.prompts=None, now it is 10: .*fresh text"):
        train(own, report=quiet)
    assert (Path(config.run) / "heads.safetensors").read_bytes() == before and "heads" in record(config)
    lines: list[str] = []
    train(own, "text", report=lines.append)
    assert any(line.startswith("text: 10 answers, 100 tokens") for line in lines)
    assert "trunk: " + str(Path(config.run) / "trunk") + " is there" in lines
    assert (Path(config.run) / "heads.safetensors").read_bytes() != before
    with pytest.raises(
        UserError, match=r"`--fresh text`: this recipe has no text stage: give one by --own_text.prompts"
    ):
        train(config, "text", report=quiet)


def test_an_old_record_without_the_setting_is_one_of_the_datas_text() -> None:
    assert not difference({"seed": 0}, {"seed": 0, "own_text": None})
    assert difference({"seed": 0}, {"seed": 0, "own_text": {"prompts": 5}})


def test_an_end_is_learnt_and_shorter_texts_share_a_row(tmp_path: Path) -> None:
    lines = [
        {"id": "1", "prompt_ids": [5, 6], "answer_ids": [7, 8, 1]},
        {"id": "0", "prompt_ids": [3, 4], "answer_ids": [9]},
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = own_text.read_texts(tmp_path / "answers.jsonl")
    assert first.labels().tolist() == [-100, -100, 9] and second.labels().tolist() == [-100, -100, 7, 8, 1]
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="can't be read as the trunk's own text: make it anew with `--fresh text`"):
        own_text.read_texts(tmp_path / "answers.jsonl")


def named(made: TrainConfig, folder: Path) -> TrainConfig:
    """A run on the trunk of ``made``, which is there."""
    return replace(
        made,
        run=str(folder / "run"),
        trunk=TrunkConfig(name=str(Path(made.run) / "trunk"), dtype="float64"),
        data=replace(made.data, tokenizer="trunk"),
        eagle=None,
    )


def test_a_trunk_that_is_there_writes_the_same(made: TrainConfig, tmp_path: Path) -> None:
    config = named(made, tmp_path)
    train(config, report=quiet)
    assert list(record(config)) == ["text", "heads", "calibration"]
    assert (Path(config.run) / ANSWERS).read_bytes() == (Path(made.run) / ANSWERS).read_bytes()


def test_chats_are_refused_with_the_way_out(made: TrainConfig, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(20)))
    config = named(made, tmp_path)
    config = replace(config, data=replace(config.data, source=str(tmp_path / "chat.jsonl")))
    with pytest.raises(UserError) as caught:
        train(config, report=quiet)
    assert "own_text with messages data" in str(caught.value) and "medusa distill" in str(caught.value)
    assert "\n" not in str(caught.value) and not (Path(config.run) / "run.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "own_text.prompts=0: give at least 1"),
        ({"batch": 0}, "own_text.batch=0: give at least 1"),
        ({"tokens": 0}, "own_text.tokens=0: give at least 1, or null"),
        ({"temperature": ()}, r"own_text.temperature=\[\]: give at least one"),
        ({"temperature": (0.0, -1.0)}, "none of them negative"),
        ({"prompt_tokens": 16}, "own_text.prompt_tokens=16 and tokens=None: a row of data.block=16 does not hold both"),
        ({"tokens": 11}, "own_text.prompt_tokens=6 and tokens=11: a row of data.block=16"),
        ({"prompts": 99999}, "the training text has .* places for prompts of 6 tokens and 99999 are asked for"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(small(tmp_path, own_text=replace(OWNTEXT, **changes)), report=quiet)
    assert not (tmp_path / "run" / "trunk").exists()


def test_a_joint_stage_does_not_teach_the_trunk_its_own_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"own_text with joint.trunk_loss=text"):
        small(tmp_path, joint=JointTraining())
    assert small(tmp_path, joint=JointTraining(trunk_loss="teacher")).own_text is not None


def test_on_the_command_line() -> None:
    config = read_config(["tinyshakespeare", "--own_text.prompts", "7", "--own_text.temperature=[0,1]"])[0]
    assert config.own_text == OwnText(prompts=7, temperature=(0.0, 1.0)) and config.own_text.new_tokens(256) == 208
    assert read_config(["tinyshakespeare"])[0].own_text is None or config.own_text is not None
    with pytest.raises(UserError, match=r"own_text\.promts.*own_text\.prompts"):
        read_config(["tinyshakespeare", "--own_text.promts", "7"])
