"""Two processes train the EAGLE layer that one does: by torch alone, and by ZeRO-2 and 3."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa.eagle_files import PLACE
from medusa.train.cli import read_config
from medusa.train.config import TrainConfig
from medusa.train.stages import train

pytestmark = pytest.mark.slow
STEPS = {"steps": 6, "batch": 8, "warmup": 3, "log_every": 2, "eval_every": 3, "save_minutes": None}
BY_TORCH = ("", "float64", 1e-10)
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A layer on a trunk that is there, of documents so short that rows supervise unevenly."""
    folder = tmp_path_factory.mktemp("distributed")
    lines = [{"text": f"the cat of {n} sat on the mat " + "and sat " * (n % 7)} for n in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    new = "{layers: 2, hidden: 16, heads: 2, kv_heads: 1, intermediate: 24, context: 64}"
    common = (
        "threads: 1\nheads: null\neagle: {version: 3, vocab: 15}\n"
        f"eagle_training: {json.dumps(STEPS | {'lr': 0.01, 'passes': 2, 'depth': 2})}\n"
        "evaluation: {rows: 4, prompts: 4, prompt_tokens: 8, tokens: 12, nodes: 4}\n"
        "calibration: {sizes: [1], rounds: 1}\n"
    )
    data = f"data: {{source: {folder}/data.jsonl, tokenizer: %s, block: 32, heldout: 0.2}}\n"
    trunk = f"run: {folder}/first\ntrunk: {{new: {new}}}\ntrunk_training: {{steps: 2, batch: 2}}\n"
    (folder / "trunk.yaml").write_text(trunk + data % "char" + common)
    train(read_config([str(folder / "trunk.yaml")])[0], report=lambda line: None)
    named = f"run: {folder}/one\ntrunk: {{name: {folder}/first/trunk}}\n"
    (folder / "recipe.yaml").write_text(named + data % "trunk" + common)
    return read_config([str(folder / "recipe.yaml")])[0]


def logged(folder: Path) -> torch.Tensor:
    """The figures of the log that are not times."""
    values = []
    for line in (folder / "train_log.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if key in ("loss", "grad_norm", "depth_loss", "top1", "top5", "outside", "tokens_per_step"):
                values += value if isinstance(value, list) else [value]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("deepspeed", "dtype", "within"),
    [
        BY_TORCH,
        pytest.param("zero2", "float32", 1e-4, marks=needs_deepspeed),
        pytest.param("zero3", "float32", 1e-4, marks=needs_deepspeed),
    ],
)
def test_two_processes_are_one(recipe: TrainConfig, deepspeed: str, dtype: str, within: float) -> None:
    place = Path(recipe.run).parent
    one, two = place / f"one-{dtype}", place / f"two-{deepspeed}"
    options = ["--trunk.dtype", dtype]
    train(read_config([str(place / "recipe.yaml"), "--run", str(one), *options])[0], report=lambda line: None)
    options += ["--deepspeed", deepspeed] if deepspeed else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "--"]
    command += ["medusa", "train", str(place / "recipe.yaml"), "--run", str(two), *options]
    done = subprocess.run(command, cwd=place, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not re.search("exitcode", done.stderr), done.stderr
    assert done.stderr.count("eagle: a layer of version 3") == 1
    torch.testing.assert_close(logged(two), logged(one), rtol=0, atol=1e-4)
    found, wanted = (load_file(folder / PLACE / "eagle.safetensors") for folder in (two, one))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=within, msg=name)
