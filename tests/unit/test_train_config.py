"""The configuration: what it refuses, and that it survives being written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa.data.corpus import DataConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.train.cli import read_config
from medusa.train.config import (
    CalibrationConfig,
    EvaluationConfig,
    HeadsTraining,
    NewTrunk,
    TrackingConfig,
    TrainConfig,
    Training,
    TrunkConfig,
    flatten,
    keys,
)
from medusa.train.record import to_yaml

NEW = TrunkConfig(new=NewTrunk())
CHAR = DataConfig(tokenizer="char")
NAMED = TrainConfig("runs/x", trunk=TrunkConfig(name="gpt2"))
VARIED = TrainConfig(
    "runs/y",
    seed=3,
    threads=2,
    data=DataConfig(source="a.jsonl", tokenizer="bpe", heldout=0.25, block=64),
    trunk=TrunkConfig(new=NewTrunk(layers=2, hidden=32, heads=4, kv_heads=2, tied=True), dtype="float64", device="cpu"),
    trunk_training=Training(steps=5, optimizer="adamw", schedule="linear", warmup=0),
    heads=HeadsConfig("root", num=3, layers=2, projection="shared"),
    heads_training=HeadsTraining(optimizer="muon", decay=0.5, targets="trunk", chunk=64, lr=1e-5),
    evaluation=EvaluationConfig(prompts=6),
    calibration=CalibrationConfig(sizes=(1, 5), rounds=2),
    tracking=TrackingConfig("offline", "p"),
)


@pytest.mark.parametrize("config", [NAMED, VARIED], ids=["named", "varied"])
def test_a_configuration_written_down_gives_itself_again(config: TrainConfig, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert read_config([str(file)])[0] == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trunk": TrunkConfig()}, "neither is given"),
        ({"trunk": TrunkConfig(name="gpt2", new=NewTrunk())}, "both are given"),
        ({"trunk": TrunkConfig(name="gpt2")}, "data.tokenizer='char': use trunk"),
        ({"data": DataConfig(tokenizer="trunk")}, "use char or bpe for a new trunk"),
        ({"threads": 0}, "threads=0: give at least 1, or auto"),
        ({"data": replace(CHAR, block=2000)}, "data.block=2000, the trunk's context is 1024"),
        ({"evaluation": EvaluationConfig(tokens=1000)}, "evaluation.prompt_tokens .* tokens=1064, .* context is 1024"),
        ({"data": replace(CHAR, block=5)}, "data.block=5 and heads.num=6.*at least 8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(TrainConfig("runs/x", data=CHAR, trunk=NEW), **changes)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Training, {"steps": 0}, "steps=0"),
        (Training, {"lr": 0.0}, "lr=0.0: give more than 0"),
        (Training, {"lr": float("nan")}, "lr=nan"),
        (Training, {"floor": 1.5}, "floor=1.5"),
        (Training, {"warmup": -1}, "warmup=-1"),
        (HeadsTraining, {"decay": 0.0}, "decay=0.0"),
        (HeadsTraining, {"batch": 0}, "batch=0"),
        (EvaluationConfig, {"prompts": 1}, "evaluation.prompts=1: give at least 2"),
        (CalibrationConfig, {"sizes": ()}, "calibration.sizes="),
        (CalibrationConfig, {"sizes": (0, 4)}, "calibration.sizes="),
    ],
)
def test_values_out_of_range_are_refused(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**values)


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"hidden": 12}, {"heads": 3}, {"kv_heads": 3}])
def test_sizes_that_make_no_trunk_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"trunk.new.*{next(iter(sizes))}"):
        TrunkConfig(new=NewTrunk(**sizes))


def test_keys_reach_into_optional_groups() -> None:
    known = set(keys())
    assert {"run", "trunk", "trunk.name", "trunk.new.layers", "heads_training.decay", "calibration.sizes"} <= known


def test_flatten_dots_the_keys() -> None:
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": [3]}}}) == {"a": 1, "b.c": 2, "b.d.e": [3]}
