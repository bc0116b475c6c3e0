"""Two processes train what one does, trunk, heads and an EAGLE layer: by torch alone, where they learn the trunk's own
text, and by ZeRO-2 and 3; killed and gone on with; one that fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa import configs
from medusa.calibrate import continuations
from medusa.checkpoint import load_heads
from medusa.eagle_files import PLACE
from medusa.errors import UserError
from medusa.train.cli import read_config
from medusa.train.config import TrainConfig, TrunkConfig
from medusa.train.heldout import judge
from medusa.train.record import OWN
from medusa.train.stages import train
from medusa.train.text import Corpus
from medusa.train.training import OwnText
from medusa.trunk import Trunk

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

# A process is struck by a signal after a step of a stage, or finds no trunk.
WORKER = """
import os, signal, sys
from medusa.__main__ import main
from medusa.errors import UserError
from medusa.train import follow, stages

stage, step, number, rank = os.environ.get("STRIKE", "none:0:0:all").split(":")
mine = rank in ("all", os.environ["RANK"])
before = follow.Watch.on_step_end

def on_step_end(self, args, state, control, **more):
    before(self, args, state, control, **more)
    trains = "heads" if hasattr(self.trainer.model, "heads") else "trunk"
    if mine and (trains, str(state.global_step)) == (stage, step):
        os.kill(os.getpid(), int(number))

def load_trunk(*args):
    raise UserError("the trunk is not on this machine: copy it here too")

follow.Watch.on_step_end = on_step_end
if mine and stage == "refuse":
    stages.load_trunk = load_trunk
sys.exit(main())
"""
STEPS = {"steps": 8, "batch": 8, "warmup": 3, "log_every": 2, "eval_every": 4, "save_every": 3, "save_minutes": None}
TRAINED = ("trunk", "heads", "eagle")
FIGURES = {"loss", "grad_norm", "head_loss", "depth_loss", "top1", "top5", "outside", "heldout_loss", "tokens_per_step"}
WEIGHTS = ("trunk/model.safetensors", "heads.safetensors", f"{PLACE}/eagle.safetensors")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of a second or two, of documents so short that rows have more or fewer seams and supervise unevenly."""
    folder = tmp_path_factory.mktemp("distributed")
    lines = [{"text": f"the cat of {n} sat on the mat " + "and sat " * (n % 7)} for n in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "worker.py").write_text(WORKER)
    new = "{layers: 2, hidden: 16, heads: 2, kv_heads: 1, intermediate: 24, context: 64}"
    (folder / "recipe.yaml").write_text(
        f"run: {folder}/one\n"
        "threads: 1\n"
        f"data: {{source: {folder}/data.jsonl, tokenizer: char, block: 32, heldout: 0.2}}\n"
        f"trunk: {{new: {new}, dtype: float32}}\n"
        f"trunk_training: {json.dumps(STEPS | {'optimizer': 'adamw'})}\n"
        "heads: {num: 2}\n"
        f"heads_training: {json.dumps(STEPS | {'lr': 0.01})}\n"
        "eagle: {version: 3, vocab: 15}\n"
        f"eagle_training: {json.dumps(STEPS | {'lr': 0.01, 'passes': 2, 'depth': 2})}\n"
        "evaluation: {rows: 4, prompts: 4, prompt_tokens: 8, tokens: 12, nodes: 4}\n"
        "calibration: {sizes: [1], rounds: 1}\n"
    )
    return read_config([str(folder / "recipe.yaml")])[0]


def folder_of(recipe: TrainConfig, name: str) -> Path:
    return Path(recipe.run).parent / name


def launch(recipe: TrainConfig, name: str, *options: str, strike: str = "") -> tuple[str, set[int]]:
    """Train into the folder ``name`` by two processes; what they said, and the exit codes of those that failed."""
    folder = folder_of(recipe, name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--"]
    command += ["worker.py", "train", "recipe.yaml", "--run", str(folder), *options]
    environment = os.environ | ({"STRIKE": strike} if strike else {})
    done = subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True, errors="replace", timeout=300
    )
    codes = {int(code) for code in re.findall(r"exitcode  : (-?\d+)", done.stderr)}
    assert (done.returncode == 0) == (not codes), done.stderr
    return done.stdout + done.stderr, codes


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def curves(folder: Path) -> tuple[list[tuple[str, int, str]], torch.Tensor]:
    """All figures of the log that are not times, and where they stand."""
    places, values = [], []
    for event in events(folder):
        for key, value in event.items():
            if key in FIGURES:
                for part in value if isinstance(value, list) else [value]:
                    places.append((event["stage"], event["step"], key))
                    values.append(part)
    return places, torch.tensor(values, dtype=torch.float64)


def assert_same_curves(found: Path, wanted: Path, within: float) -> None:
    (places, values), (expected_places, expected) = curves(found), curves(wanted)
    assert places == expected_places and {stage for stage, _, _ in places} == {*TRAINED}
    torch.testing.assert_close(values, expected, rtol=0, atol=within)


def assert_whole(folder: Path, one: Path, config: TrainConfig, within: float) -> None:
    """One process loads trunk and heads, finds in them what the log says of them, and what it would have trained, the
    EAGLE layer too."""
    trunk = Trunk.load(str(folder / "trunk"), dtype=config.trunk.dtype)
    heads = load_heads(folder, trunk)
    corpus = Corpus(config, lambda line: None)
    corpus.take_tokenizer(trunk)
    held = continuations(trunk, corpus.heldout_prompts(config.evaluation), config.evaluation.tokens)
    figures = judge(heads, held, config.evaluation.nodes)[1]
    best = json.loads((folder / "run.json").read_text())["stages"]["heads"]["result"]["step"]
    judged = [event for event in events(folder) if event["stage"] == "heads" and "heldout_top1" in event]
    (logged,) = [event for event in judged if event["step"] == best]
    assert logged == {"stage": "heads", "step": best, **figures}
    for name in WEIGHTS:
        found, wanted = load_file(folder / name), load_file(one / name)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=within)


@pytest.fixture(scope="module")
def one(recipe: TrainConfig) -> Path:
    """The run of one process."""
    train(recipe, report=lambda line: None)
    return Path(recipe.run)


def test_two_processes_in_parts_are_one_process(recipe: TrainConfig) -> None:
    four, twos = folder_of(recipe, "four"), folder_of(recipe, "twos")
    parts = {f"{stage}_training": replace(getattr(recipe, f"{stage}_training"), accumulate=4) for stage in TRAINED}
    text = {"prompts": 12, "prompt_tokens": 8, "batch": 5}
    in_fp64 = replace(recipe.trunk, dtype="float64")
    config = replace(recipe, run=str(four), trunk=in_fp64, own_text=OwnText(**text), **parts)
    train(config, report=lambda line: None)
    halves = [word for stage in TRAINED for word in (f"--{stage}_training.accumulate", "2")]
    said, codes = launch(recipe, "twos", "--trunk.dtype", "float64", "--own_text", json.dumps(text), *halves)
    assert not codes and "Warning" not in said
    for line in ("heads: 2 of kind hydra", "eagle: a layer of version 3", "text: 12 answers, 288 tokens"):
        assert said.count(line) == 1
    assert said.count("  text         12 of the trunk's own") == 1
    assert_same_curves(twos, four, 1e-5)  # a trunk is trained in fp32
    assert_whole(twos, four, config, 1e-5)
    # All but the trunk again, on the very same trunk, in fp64.
    named = TrunkConfig(name=str(twos / "trunk"), dtype="float64")
    again = replace(config, run=str(four) + "-again", trunk=named, data=replace(config.data, tokenizer="trunk"))
    train(again, report=lambda line: None)
    assert sorted(path.name for path in (twos / OWN).iterdir()) == ["answers.jsonl", "meta.json"]
    assert (twos / OWN / "answers.jsonl").read_bytes() == (Path(again.run) / OWN / "answers.jsonl").read_bytes()
    wanted = [event["head_loss"] for event in events(Path(again.run)) if "head_loss" in event]
    assert len(wanted) == 4
    found = [event["head_loss"] for event in events(twos) if "head_loss" in event]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    for file, within in zip(WEIGHTS[1:], (1e-12, 1e-10), strict=True):
        mine, theirs = (load_file(folder / file) for folder in (twos, Path(again.run)))
        assert all((value - theirs[name]).abs().max() < within for name, value in mine.items())


@needs_deepspeed
def test_zero_2_is_one_process_also_when_all_are_killed(recipe: TrainConfig, one: Path) -> None:
    said, codes = launch(recipe, "zero2", "--deepspeed", "zero2", strike="heads:5:9:all")
    assert codes == {-9}, said
    folder = folder_of(recipe, "zero2")
    assert [path.name for path in (folder / "checkpoints" / "heads").iterdir()] == ["checkpoint-3"]
    said, codes = launch(recipe, "zero2", "--deepspeed", "zero2")
    assert not codes and "heads: goes on from step 3" in said and not (folder / "checkpoints").exists()
    assert_same_curves(folder, one, 1e-5)
    assert_whole(folder, one, recipe, 1e-5)
    # An error of one process, the second, ends both with one line.
    said, codes = launch(recipe, "zero2", "--deepspeed", "zero2", strike="refuse:0:0:1")
    assert codes <= {2, -15} and 2 in codes, said
    assert said.count("medusa: error: the trunk is not on this machine") == 1 and "RuntimeError" not in said


@needs_deepspeed
def test_zero_3_is_one_process_also_when_one_is_told_to_stop(recipe: TrainConfig, one: Path) -> None:
    settings = json.loads(configs.deepspeed("zero3").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = (
        0  # or it would leave matrices this small whole
    )
    (Path(recipe.run).parent / "parts.json").write_text(json.dumps(settings))
    said, codes = launch(recipe, "zero3", "--deepspeed", "parts.json", strike="trunk:4:15:1")
    assert codes <= {143, -15} and 143 in codes, said
    assert said.count("interrupted in stage trunk, saved at step 5") == 1
    other = ("without DeepSpeed", "with ZeRO-3 and processes=2")
    with pytest.raises(UserError, match=f"was made {other[1]}, now it goes on {other[0]}"):
        train(replace(recipe, run=str(folder_of(recipe, "zero3"))), report=lambda line: None)
    said, codes = launch(recipe, "zero3", "--deepspeed", "parts.json")
    assert not codes, said
    assert "trunk: goes on from step 5" in said
    assert_same_curves(folder_of(recipe, "zero3"), one, 1e-5)
    assert_whole(folder_of(recipe, "zero3"), one, recipe, 1e-5)


@needs_deepspeed
def test_what_is_trained_in_bf16_is_evaluated_and_saved_in_fp32(recipe: TrainConfig) -> None:
    """One process, which needs no launcher."""
    settings = json.loads(configs.deepspeed("zero2").read_text()) | {"bf16": {"enabled": True}}
    folder = folder_of(recipe, "rounded")
    (folder.parent / "rounded.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "medusa", "train", "recipe.yaml", "--run", str(folder), "--deepspeed"]
    done = subprocess.run([*command, "rounded.json"], cwd=folder.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_whole(folder, folder, recipe, 0)
    for name in ("trunk/model.safetensors", "heads.safetensors"):
        for value in load_file(folder / name).values():
            assert value.dtype == torch.float32 and not value.equal(value.bfloat16().float())
