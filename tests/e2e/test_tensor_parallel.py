"""A trunk shared out over two processes writes what one process writes, and says so once; what can't be is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.eagle import EagleConfig
from medusa.eagle_files import save_eagle
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.testing import memorising_heads, plain_greedy, random_eagle, random_heads, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk
from medusa.vocabulary import draft_vocabulary

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PROMPTS = ["ROMEO:", "To be, or not", "A"]
TOKENS = 24
GREEDY, SAMPLED = {"max_new_tokens": TOKENS}, {"max_new_tokens": TOKENS, "temperature": 0.8, "seed": 7}

# Each process takes the jobs of a list in turn and writes what came of them.
WORKER = """
import json, os, sys
from pathlib import Path
from medusa.errors import UserError
from medusa.infer import Engine

rank = int(os.environ["RANK"])
engines, results = {}, []
for folder, drafter, prompts, options in json.loads(Path(sys.argv[1]).read_text()):
    key = folder, drafter
    try:
        if key not in engines:
            compiles = options.pop("compile", None)
            engines[key] = Engine.load(folder, drafter=drafter, dtype="float64", tp_plan="auto", compile=compiles)
        engine = engines[key]
        made = engine.generate(prompts[str(rank)] if isinstance(prompts, dict) else prompts, **options)
        results.append({"ids": [each.token_ids for each in made], "steps": [each.steps for each in made]})
        results[-1] |= {"seeds": [each.seed for each in made], "fingerprint": engine.trunk.fingerprint()}
        results[-1] |= {"heads": engine.trunk.layers[0].keys.heads, "attends": engine.trunk.config._attn_implementation}
    except UserError as error:
        results.append({"error": str(error)})
Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(results))
"""
# The command, in which the second process may be struck when it has loaded the trunk.
STRUCK = """
import os, signal, sys
from medusa.__main__ import main
from medusa.errors import UserError
from medusa.infer import engine

def strike(self, *args, **options):
    if os.environ["STRIKE"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise UserError("the text is not on this machine: copy it here too")

if os.environ["RANK"] == "1":
    engine.Engine.generate = strike
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs on one trunk of two heads of keys and values, whose vocabulary of 65 two can't halve."""
    folder = tmp_path_factory.mktemp("parallel")
    tiny_trunk("llama").model.save_pretrained(folder / "trunk")
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.save_pretrained(folder / "trunk")
    trunk = Trunk.load(folder / "trunk", dtype="float64")
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    texts = [prompt + plain_greedy(trunk, prompt, 12) for prompt in prompts[:2]]
    counts = torch.bincount(torch.tensor([token for text in texts for token in text]), minlength=65)
    few = HeadsConfig("medusa", num=3, projection="shared", vocab=20)
    made = {
        "root": memorising_heads(trunk, HeadsConfig("root", num=3), texts),
        "hydra": random_heads(trunk, HeadsConfig("hydra", num=2), scale=0.05),
        "shared": MedusaHeads(few, trunk, draft_vocabulary(trunk, counts, 20)),
    }
    for name, heads in made.items():
        save_heads(folder / name, heads, str(folder / "trunk"))
        save_tree(folder / name, Topology.full([2] * heads.config.num))
    layer = random_eagle(trunk, EagleConfig(1, vocab=20), scale=0.02)
    save_eagle(folder / "eagle", layer, str(folder / "trunk"))
    return folder


def launch(folder: Path, *words: object, **environment: str) -> tuple[str, str, set[int]]:
    """Two processes of ``words``, on the processor; what they printed and said, and the exit codes of failed ones."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *map(str, words)],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
    )
    codes = {int(code) for code in re.findall(r"exitcode  : (-?\d+)", done.stderr)}
    assert (done.returncode == 0) == (not codes), done.stderr
    return done.stdout, done.stderr, codes


def run_jobs(folder: Path, jobs: list[tuple[str, str, Any, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """What came of the jobs on either process."""
    (folder / "worker.py").write_text(WORKER)
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    _, said, codes = launch(folder, folder / "worker.py", file)
    assert not codes, said
    return [json.loads(Path(f"{file}.{rank}").read_text()) for rank in (0, 1)]


DRAFTERS = [
    ("root", "auto"),
    ("root", "dynamic:6"),
    ("root", "mixed:6"),
    ("root", "none"),
    ("hydra", "auto"),
    ("shared", "auto"),
    ("root", "prompt-lookup"),
    ("root", "cut:1"),
    ("root", "draft:trunk"),
    ("root", "eagle:eagle:6"),
]


@pytest.mark.slow
def test_two_processes_write_what_one_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    asked = [(run, drafter, options) for run, drafter in DRAFTERS for options in (GREEDY, SAMPLED)]
    jobs: list[Any] = [(run, drafter, PROMPTS, options) for run, drafter, options in asked]
    unseeded = {"max_new_tokens": TOKENS, "temperature": 1.0}
    jobs += [
        ("root", "auto", PROMPTS, unseeded),
        ("root", "auto", {"0": PROMPTS[:1], "1": ["Romeo"]}, GREEDY),
        ("root", "auto", PROMPTS[:1], {**GREEDY, "max_time": 5.0}),
        ("hydra", "none", PROMPTS[:1], {"compile": True}),
    ]
    first, second = run_jobs(folder, jobs)
    assert first == second
    *equal, drawn, apart, timed, compiling = first
    fewer = 0
    load = cache(partial(Engine.load, dtype="float64"))
    for (run, drafter, options), found in zip(asked, equal, strict=True):
        engine = load(folder / run, drafter=drafter)
        wanted = engine.generate(PROMPTS, **options)
        assert found["ids"] == [each.token_ids for each in wanted], (run, drafter, options)
        assert found["steps"] == [each.steps for each in wanted]
        assert found["fingerprint"] == engine.trunk.fingerprint()
        assert engine.trunk.layers[0].keys.heads == 2 and found["heads"] == 1
        fewer += sum(found["steps"]) < len(PROMPTS) * (TOKENS - 1)
    assert fewer > len(asked) / 2  # or nothing that was drafted would have been accepted
    again = [
        load(folder / "root", drafter="auto").generate(prompt, **unseeded, seed=seed)
        for prompt, seed in zip(PROMPTS, drawn["seeds"], strict=True)
    ]
    assert drawn["ids"] == [each.token_ids for each in again]
    assert "the processes have come to different tokens" in apart["error"]
    assert timed["error"].startswith("max_time=5.0 with tp_plan")
    assert compiling["error"].startswith("compile with tp_plan")


@pytest.mark.slow
def test_the_command_speaks_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(folder / "root"), "--prompt", "ROMEO:", "--max-new-tokens", "20", "--dtype", "float64"]
    assert main(words) == 0
    alone = capfd.readouterr()
    out, said, codes = launch(folder, "-m", "--", "medusa", *words, "--stream", "--tp-plan", "auto")
    assert not codes and out == alone.out
    assert said.count("20 tokens in") == 1
    assert re.findall(r"\d+ steps", said) == re.findall(r"\d+ steps", alone.err)


@pytest.mark.slow
def test_a_wrong_input_is_told_once(folder: Path) -> None:
    out, said, codes = launch(folder, "-m", "--", "medusa", "generate", folder / "root", "--prompt", "A")
    assert codes <= {2, -15} and 2 in codes, said
    line = "processes=2 without --tp-plan would all do the same: add --tp-plan auto"
    assert said.count("medusa: error: ") == 1 and line in said and not out
    assert said.count("Traceback") == 1  # torchrun's own


@pytest.mark.slow
@pytest.mark.parametrize(("strike", "code"), [("refuse", 2), ("kill", -9)])
def test_one_that_fails_ends_both(folder: Path, strike: str, code: int) -> None:
    (folder / "struck.py").write_text(STRUCK)
    words = ["generate", folder / "root", "--prompt", "ROMEO:", "--tp-plan", "auto"]
    out, said, codes = launch(folder, "--", folder / "struck.py", *words, STRIKE=strike)
    assert code in codes and not out, said
    line = {"refuse": "the text is not on this machine: copy it here too", "kill": "another process has gone"}[strike]
    assert said.count("medusa: error: ") == 1 and line in said
    assert said.count("Traceback") == 1  # torchrun's own


def refused(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as caught:
        Trunk.load(folder, **({"tp_plan": "auto"} | options))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_shared_out_is_refused_before_it_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = folder / "trunk"
    refused(trunk, "one process alone: start several by torchrun, such as `torchrun --nproc-per-node 2")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    refused(trunk, r"num_key_value_heads=2 can't be shared out evenly over processes=4: start 2$")
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused(trunk, r"num_attention_heads=4 can't be shared out evenly over processes=3: start 2$")
    refused(trunk, "tp_plan='auto' and device_map: leave the second out", device_map="auto")
    refused(trunk, "tp_plan='auto' and device='cpu': leave", device="cpu")
    refused(trunk, "tp_plan='auto' and tp_size: leave", tp_size=2)
    refused(trunk, "tp_plan='best': give 'auto'", tp_plan="best")
    tiny_trunk("gpt2").model.save_pretrained(tmp_path)
    char_tokenizer(ALPHABET).save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(tmp_path, "model type 'gpt2' has no plan for tensor parallelism in transformers: use device_map='auto'")


def test_of_one_process_it_is_a_plain_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    engine = Engine.load(folder / "root", tp_plan="auto", dtype="float64")
    wanted = Engine.load(folder / "root", dtype="float64").generate(PROMPTS, **GREEDY)
    assert [each.token_ids for each in engine.generate(PROMPTS, **GREEDY)] == [each.token_ids for each in wanted]
