"""Two processes that learn the trunk's own text: the first writes it, the others wait, and both learn the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa.train.cli import read_config
from medusa.train.record import OWN
from medusa.train.stages import train

pytestmark = pytest.mark.slow
STEPS = {"steps": 6, "batch": 8, "warmup": 3, "log_every": 2, "eval_every": 3, "save_minutes": None, "lr": 0.01}
RECIPE = f"""
run: %s/one
threads: 1
data: {{source: %s/text.txt, tokenizer: char, block: 32}}
trunk:
  new: {{layers: 1, hidden: 16, heads: 2, kv_heads: 1, intermediate: 24, context: 64}}
  dtype: float64
trunk_training: {{steps: 3, batch: 2, save_minutes: null}}
own_text: {{prompts: 12, prompt_tokens: 8, batch: 5}}
heads: {{num: 2}}
heads_training: {json.dumps(STEPS)}
evaluation: {{rows: 4, prompts: 4, prompt_tokens: 8, tokens: 12, nodes: 4}}
calibration: {{sizes: [1], rounds: 1}}
"""


def test_two_processes_are_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"the cat of {n} sat on {n * n % 97} mats\n" for n in range(200)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % (tmp_path, tmp_path))
    one, two = tmp_path / "one", tmp_path / "two"
    train(read_config([str(recipe)])[0], report=lambda line: None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "--"]
    command += ["medusa", "train", str(recipe), "--run", str(two)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("text: 12 answers, 288 tokens") == 1
    assert done.stdout.count("  text         12 of the trunk's own") == 1
    names = [sorted(path.name for path in (folder / OWN).iterdir()) for folder in (one, two)]
    assert names[0] == names[1] == ["answers.jsonl", "meta.json"]
    # the trunks differ by rounding, which changes no greedy choice here
    assert (two / OWN / "answers.jsonl").read_bytes() == (one / OWN / "answers.jsonl").read_bytes()
    found, wanted = (load_file(folder / "heads.safetensors") for folder in (two, one))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-8, msg=name)
