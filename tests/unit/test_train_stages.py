"""A whole training run in small: what it leaves, what it skips, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa.calibrate import continuations, head_ranks, tokens_per_step
from medusa.checkpoint import load_heads, load_tree, read_manifest, trunk_source
from medusa.data.corpus import DataConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.train import newtrunk
from medusa.train.config import (
    CalibrationConfig,
    EvaluationConfig,
    HeadsTraining,
    NewTrunk,
    TrainConfig,
    Training,
    TrunkConfig,
)
from medusa.train.stages import train
from medusa.trunk import Trunk

TEXT = "the cat sat on the mat and a dog ran to the far end of it\n" * 60
Lines = list[str]


def small(folder: Path) -> TrainConfig:
    """A run of about a second."""
    (folder / "text.txt").write_text(TEXT)
    return TrainConfig(
        str(folder / "run"),
        data=DataConfig(source=str(folder / "text.txt"), tokenizer="char", block=16),
        trunk=TrunkConfig(new=NewTrunk(layers=1, hidden=16, heads=2, kv_heads=1, intermediate=24, context=64)),
        trunk_training=Training(steps=4, batch=2, log_every=2, eval_every=2),
        heads=HeadsConfig(num=2),
        heads_training=HeadsTraining(steps=4, batch=2, log_every=2, eval_every=2, lr=1e-2),
        evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=8, tokens=12, nodes=4),
        calibration=CalibrationConfig(sizes=(1, 3), rounds=2),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run; tests that change it work on a copy."""
    config = small(tmp_path_factory.mktemp("made"))
    train(config, report=lambda line: None)
    return config


@pytest.fixture
def copied(made: TrainConfig, tmp_path: Path) -> TrainConfig:
    shutil.copytree(made.run, tmp_path / "run")
    return replace(made, run=str(tmp_path / "run"))


def events(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run) / "train_log.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_trunk_is_an_ordinary_checkpoint_with_its_tokenizer(made: TrainConfig) -> None:
    folder = Path(made.run) / "trunk"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "llama" and model.config.vocab_size == len(tokenizer) == len(set(TEXT))
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"
    assert model.generation_config.eos_token_id is None


def test_the_heads_load_and_bring_what_the_record_says(made: TrainConfig) -> None:
    folder = Path(made.run)
    manifest = read_manifest(folder)
    assert manifest.trunk == "trunk"
    trunk = Trunk.load(trunk_source(folder, manifest))
    heads = load_heads(folder, trunk)
    record = json.loads((folder / "run.json").read_text())["stages"]
    best = max(event["tokens_per_step"] for event in events(made) if "tokens_per_step" in event)
    assert record["heads"]["result"]["tokens_per_step"] == best
    tree = load_tree(folder, heads.config)
    assert tree.size == record["calibration"]["result"]["nodes"]
    text = (TEXT[len(TEXT) * 9 // 10 :],)
    ids = trunk.tokenizer(text[0])["input_ids"] if trunk.tokenizer else []
    ranks = head_ranks(heads, continuations(trunk, [ids[:8], ids[20:28]], 12))
    assert tokens_per_step(tree, ranks) >= 1


def test_the_log_has_every_event_by_stage_and_step(made: TrainConfig) -> None:
    log = events(made)
    assert [(event["stage"], event["step"]) for event in log] == [
        (stage, step) for stage in ("trunk", "heads") for step in (2, 2, 4, 4)
    ]
    assert all("heldout_loss" in event or "loss" in event for event in log[:4])
    measured = [event for event in log if "tokens_per_step" in event]
    assert all(len(event["heldout_top1"]) == len(event["heldout_top5"]) == 2 for event in measured) and measured


def test_run_json_says_what_made_it(made: TrainConfig) -> None:
    record = json.loads((Path(made.run) / "run.json").read_text())
    assert record["versions"]["medusa"] and record["machine"]["torch"] == torch.__version__
    assert set(record["git"] or {"commit": "", "dirty": ""}) == {"commit", "dirty"}
    assert record["config"]["heads"]["kind"] == "hydra"
    assert list(record["stages"]) == ["trunk", "heads", "calibration"]
    assert (Path(made.run) / "calibration.json").is_file() and (Path(made.run) / "config.yaml").is_file()


def test_a_finished_run_is_left_as_it_is(copied: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("the text was read")

    monkeypatch.setattr("medusa.train.text.load_texts", fail)
    before, lines = contents(Path(copied.run)), Lines()
    train(copied, report=lines.append)
    assert contents(Path(copied.run)) == before
    assert [line.partition(":")[0] for line in lines] == ["trunk", "heads", "calibration"]


def test_the_same_configuration_makes_the_same_weights(made: TrainConfig, tmp_path: Path) -> None:
    again = replace(made, run=str(tmp_path / "run"))
    train(again, report=lambda line: None)
    for name in ("trunk/model.safetensors", "heads.safetensors"):
        first, second = (load_file(Path(config.run) / name) for config in (made, again))
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_fresh_makes_a_stage_and_those_after_it_anew(copied: TrainConfig) -> None:
    changed = replace(copied, heads_training=replace(copied.heads_training, steps=2))
    trunk = (Path(copied.run) / "trunk" / "model.safetensors").stat().st_mtime_ns
    lines = Lines()
    train(changed, "heads", lines.append)
    assert lines[0].endswith("is there") and not any("there" in line for line in lines[1:])
    assert (Path(copied.run) / "trunk" / "model.safetensors").stat().st_mtime_ns == trunk
    assert [event["step"] for event in events(changed) if event["stage"] == "heads"] == [2, 2]
    assert [event["step"] for event in events(changed) if event["stage"] == "trunk"] == [2, 2, 4, 4]


@pytest.mark.parametrize("name", ["trunk/model.safetensors", "heads.safetensors", "calibration.json"])
def test_a_stage_whose_files_are_gone_is_made_again(copied: TrainConfig, name: str) -> None:
    (Path(copied.run) / name).unlink()
    train(copied, report=lambda line: None)
    assert (Path(copied.run) / name).is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, seed=1), "its trunk stage was made with seed=0, now it is 1: add `--fresh trunk`"),
        (
            lambda c: replace(c, heads=HeadsConfig("root", num=2)),
            "its heads stage was made with heads.kind=hydra, now it is root: add `--fresh heads`",
        ),
        (
            lambda c: replace(c, calibration=CalibrationConfig((1, 2), 2)),
            r"its calibration stage was made with calibration.sizes=\[1, 3\], now it is \[1, 2\]",
        ),
    ],
)
def test_results_made_with_other_settings_are_not_passed_off(
    copied: TrainConfig, change: Callable[[TrainConfig], TrainConfig], message: str
) -> None:
    before = contents(Path(copied.run))
    with pytest.raises(UserError, match=message):
        train(change(copied), report=lambda line: None)
    assert contents(Path(copied.run)) == before


def for_trunk(made: TrainConfig, trunk: str, run: Path) -> TrainConfig:
    return replace(
        made, run=str(run), data=replace(made.data, tokenizer="trunk"), trunk=TrunkConfig(name=trunk), heads=made.heads
    )


def test_another_run_reuses_the_trunk(made: TrainConfig, tmp_path: Path) -> None:
    other = for_trunk(made, f"{made.run}/trunk", tmp_path / "other")
    train(replace(other, heads=HeadsConfig("medusa", num=2)), report=lambda line: None)
    assert not (tmp_path / "other" / "trunk").exists()
    manifest = read_manifest(tmp_path / "other")
    assert manifest.fingerprint == read_manifest(Path(made.run)).fingerprint
    assert trunk_source(tmp_path / "other", manifest) == str((Path(made.run) / "trunk").resolve())


def test_heads_of_another_trunk_are_not_trained_over(copied: TrainConfig, made: TrainConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(Path(made.run) / "trunk")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    model.save_pretrained(tmp_path / "trunk2")
    AutoTokenizer.from_pretrained(Path(made.run) / "trunk").save_pretrained(tmp_path / "trunk2")
    first = for_trunk(made, f"{made.run}/trunk", tmp_path / "other")
    train(first, report=lambda line: None)
    before = contents(tmp_path / "other")
    with pytest.raises(UserError, match=r"heads stage was made with trunk=\w{16}, now it is \w{16}: add"):
        train(for_trunk(made, str(tmp_path / "trunk2"), tmp_path / "other"), report=lambda line: None)
    assert contents(tmp_path / "other") == before


def test_heads_that_no_record_describes_are_not_trained_over(copied: TrainConfig) -> None:
    (Path(copied.run) / "run.json").unlink()
    before = contents(Path(copied.run))
    with pytest.raises(UserError, match=r"holds heads for trunk trunk that no run\.json .* `--fresh heads`"):
        train(copied, report=lambda line: None)
    assert contents(Path(copied.run)) == before


def test_a_trunk_that_changes_under_the_heads_is_a_fault(copied: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter(["before", "after"])
    monkeypatch.setattr(newtrunk, "digest", lambda trunk: next(marks))
    with pytest.raises(RuntimeError, match="trunk's weights changed"):
        train(copied, "heads", lambda line: None)


def test_digest_sees_one_weight(made: TrainConfig) -> None:
    trunk = Trunk.load(Path(made.run) / "trunk")
    before = newtrunk.digest(trunk)
    assert newtrunk.digest(trunk) == before
    with torch.no_grad():
        trunk.model.model.layers[0].mlp.up_proj.weight[-1, -1] += 1e-6
    assert newtrunk.digest(trunk) != before


def test_a_run_broken_off_leaves_no_half_trunk_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path)
    with monkeypatch.context() as patch:

        def fail(self: Any, folder: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
        with pytest.raises(KeyboardInterrupt):
            train(config, report=lambda line: None)
    assert {path.name for path in Path(config.run).iterdir()} == {"run.json", "config.yaml", "train_log.jsonl"}
    train(config, report=lambda line: None)
    assert [event["step"] for event in events(config) if event["stage"] == "trunk"] == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, data=replace(c.data, source="nowhere.txt")), "nowhere.txt can't be read"),
        (lambda c: replace(c, data=replace(c.data, block=60, heldout=0.01)), r"has \d+ tokens, a block 60: give more"),
        (
            lambda c: replace(
                c, data=replace(c.data, heldout=0.01), evaluation=replace(c.evaluation, prompt_tokens=40)
            ),
            r"\d+ places for prompts of 40 tokens and \d+ are asked for",
        ),
        (lambda c: replace(c, trunk=replace(c.trunk, device="warp")), "device='warp' is not there"),
        (lambda c: replace(c, run=f"{c.data.source}/run"), "the run folder .* can't be written"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    tmp_path: Path, change: Callable[[TrainConfig], TrainConfig], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(change(small(tmp_path)), report=lambda line: None)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_missing_trunk_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig("runs/x", trunk=TrunkConfig(name="runs/tinyshakespeare/trunk"))
    with pytest.raises(UserError, match="there is no such folder; `medusa train tinyshakespeare` makes it"):
        train(config, report=lambda line: None)
    assert list(tmp_path.iterdir()) == []
