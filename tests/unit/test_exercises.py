"""The exercises of docs/exercises.md run on a small run, and what each claims holds there."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from medusa.data.corpus import DataConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.lawkit import ks_uniform
from medusa.train import TrainConfig, train
from medusa.train.config import CalibrationConfig, EvaluationConfig, HeadsTraining, NewTrunk, Training, TrunkConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exercises() -> ModuleType:
    return script("exercises")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exercises")
    chance = random.Random(0)
    lines = ["".join(chance.choice("abcdefgh ") for _ in range(40)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    train(
        TrainConfig(
            run=str(folder / "run"),
            data=DataConfig(source=str(folder / "text.txt"), tokenizer="char", block=32),
            trunk=TrunkConfig(new=NewTrunk(layers=3, hidden=16, heads=2, kv_heads=2, intermediate=32, context=256)),
            trunk_training=Training(steps=4, batch=2),
            heads=HeadsConfig(num=2),
            heads_training=HeadsTraining(steps=4, batch=2),
            evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=8, tokens=8, nodes=4),
            calibration=CalibrationConfig(sizes=(1, 3), rounds=1),
        ),
        report=lambda line: None,
    )
    return folder / "run"


def found(exercises: ModuleType, run: Path, name: str, *options: str) -> Any:
    exercises.main([name, str(run), "--prompts", "4", "--tokens", "24", "--rounds", "1", *options])
    return json.loads((run / "exercises" / f"{name}.json").read_text(encoding="utf-8"))["found"]


def test_the_cache_after_rejections_is_that_of_the_text(exercises: ModuleType, run: Path) -> None:
    result = found(exercises, run, "rollback")
    assert result["rejected"] > 0 and result["largest_difference"] < 1e-12 < 1e-3 < result["one_slot_astray"]


def test_acceptance_is_not_below_its_bound(exercises: ModuleType, run: Path) -> None:
    result = found(exercises, run, "kl")
    assert {"first 1 of 3 layers", "first 2 of 3 layers, temperature 2", "head 0", "head 1"} <= set(result)
    for row in result.values():
        assert row["least"] <= row["acceptance"] <= 1 and row["kl"] >= 0
    assert (run / "exercises" / "kl.png").stat().st_size > 1000


def test_depth_begins_with_plain_decoding(exercises: ModuleType, run: Path) -> None:
    rows = found(exercises, run, "depth")["rows"]
    assert [row["drafted"] for row in rows] == [0, 1, 2]
    assert rows[0]["tokens_per_step"] == rows[0]["cost"] == rows[0]["speedup"] == 1
    assert rows[1]["tokens_per_step"] == pytest.approx(rows[1]["formula"])


def test_law_judges_every_way_on_every_token(exercises: ModuleType, run: Path) -> None:
    result = found(exercises, run, "law")
    assert {row["tokens"] for row in result.values()} == {4 * 24}
    exact = [row for name, row in result.items() if not name.startswith(("wrong", "lossy"))]
    assert len(exact) == 4 and all(row["chi_square"] > 1e-4 and row["kolmogorov_smirnov"] > 1e-4 for row in exact)


def test_numbers_are_uniform_for_the_law_alone(exercises: ModuleType, run: Path) -> None:
    trunk = exercises.load_trunk(run, dtype="float64", device="cpu")
    prompts = [[seed % trunk.vocab_size] * 3 for seed in range(60)]
    rows = exercises.texts(trunk, exercises.NullDrafter(), prompts, 30)
    numbers = [n for seed, row in enumerate(rows) for n in exercises.transformed(trunk, row, 3, seed)]
    assert len(numbers) == 1800 and ks_uniform(numbers) > 1e-3
    greedy = [[*prompt, *[0] * 30] for prompt in prompts]
    others = [n for seed, row in enumerate(greedy) for n in exercises.transformed(trunk, row, 3, seed)]
    assert ks_uniform(others) < 1e-6


def test_curves_of_what_was_trained(run: Path, tmp_path: Path) -> None:
    module = script("curves")
    ((name, seen, gained),) = module.curves(run)
    assert name == "hydra heads" and seen[-1] == pytest.approx(4 * 2 * 32 / 1e6) and min(gained) >= 1
    module.main([str(run), "--out", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").stat().st_size > 1000
    with pytest.raises(UserError, match=r"has no train_log\.jsonl and config\.yaml: give a folder made by"):
        module.curves(tmp_path)
