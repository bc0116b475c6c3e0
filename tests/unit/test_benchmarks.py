"""The scripts in benchmarks/ at tiny sizes, and the given drafts and acceptance that they time steps with."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.data.tokenizers import char_tokenizer
from medusa.decoding import Decoder, Request
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.infer.bench.given import GivenDrafter, GivenRule, spread
from medusa.infer.bench.profile import DeviceClock
from medusa.machine import Rates
from medusa.testing import tiny_model, tiny_trunk
from medusa.tree import Topology

from .pretend import PretendedGPU, move

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> types.ModuleType:
    """benchmarks/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("medusa.machine.MEASURED_S", 0.0)


# Given drafts and acceptance.


@given(nodes=st.integers(1, 70), depth=st.integers(1, 6))
def test_a_spread_tree_has_its_size_and_its_chain(nodes: int, depth: int) -> None:
    tree = spread(nodes, depth)
    assert tree.size == nodes and tree.depth == min(depth, nodes - 1)
    assert (0,) * tree.depth in tree.paths
    widths = [tree.parents.count(node) for node in range(nodes)]
    wide = [widths[tree.paths.index((0,) * level)] for level in range(tree.depth)]
    assert not wide or max(wide) - min(wide) <= 1  # even along the chain


def test_a_spread_tree_of_nothing_is_refused() -> None:
    for nodes, depth in ((0, 1), (3, 0)):
        with pytest.raises(UserError, match="give at least 1 of each"):
            spread(nodes, depth)
    assert spread(1, 0) == Topology.root()


def test_drafts_are_accepted_as_often_as_is_given() -> None:
    trunk = tiny_trunk("llama")
    lengths = {}
    for chance in (0.0, 0.5, 1.0):
        decoder = Decoder(trunk, GivenDrafter(spread(6, 3)), GivenRule(chance, seed=1))
        decoder.admit([Request([1, 2, 3], 60), Request([4, 5], 60)])
        accepted = []
        while decoder.live:
            step = decoder.step()
            if step.nodes == 6:
                accepted.append(step.accepted[0])
                assert len(set(step.accepted.values())) == 1
        lengths[chance] = accepted
    assert set(lengths[0.0]) == {0} and set(lengths[1.0]) == {3}
    rng, drawn = random.Random(1), []
    for _ in lengths[0.5]:
        count = 0
        while count < 3 and rng.random() < 0.5:
            count += 1
        drawn.append(count)
    assert lengths[0.5] == drawn and {0, 1} < set(drawn)


def test_a_chance_beyond_one_is_refused() -> None:
    for chance in (-0.1, 1.1):
        with pytest.raises(UserError, match="give 0 to 1"):
            GivenRule(chance)


# The scripts.


def test_gpu_runs_small_on_a_processor_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = script("gpu")
    few = ["--context", "20", "--tokens", "6", "--nodes", "4", "--acceptance", "1", "--rounds", "2", "--repeats", "1"]
    gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.json"), *few])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "gpu.json").read_text())
    assert gpu.SMALL in said and found["note"] == gpu.SMALL and list(found["shapes"]) == ["small"]
    assert list(found["shapes"]["small"]["ways"]) == ["eager"]
    figures = found["shapes"]["small"]["ways"]["eager"]
    assert [row["nodes"] for row in figures["cost_curve"]] == list(gpu.NODES)
    for row in figures["cost_curve"]:
        assert row["ratio"] == pytest.approx(row["ms"] / row["least_ms"]) and row["ms"] > 0
    assert list(figures["steps"]) == ["none", "4 nodes"] and figures["steps"]["4 nodes"]["nodes"] == 4
    assert figures["steps"]["4 nodes"]["parts"]["heads"]["ms"] > 0
    ways = {row["way"]: row for row in figures["throughput"]}
    assert list(ways) == ["generate", "ours, no drafts", "4 nodes, 100% accepted"]
    assert ways["generate"]["speedup"] == 1 and ways["ours, no drafts"]["tokens_per_step"] == 1
    assert ways["4 nodes, 100% accepted"]["tokens_per_step"] == 2.5  # 5 after the first: 4 and 1


def test_gpu_goes_on_where_something_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, few = script("gpu"), ["--device", "cpu", "--out", str(tmp_path / "gpu.json"), "--context", "9"]

    def ways() -> dict[str, Any]:
        gpu.main([*few, "--tokens", "4", "--nodes", "4", "--rounds", "1", "--repeats", "1", "--compile"])
        found: dict[str, Any] = json.loads((tmp_path / "gpu.json").read_text())["shapes"]["small"]
        return found

    def none_left(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gpu, "CompiledSteps", lambda *_: none_left())
    found = ways()["ways"]
    assert "failed" not in found["eager"] and found["compiled"] == {"failed": "out of memory"}
    assert "failed: out of memory" in capsys.readouterr().out
    few += ["--limit", "-1"]
    assert "not begun" in ways()["failed"]
    few[-1] = "9"
    monkeypatch.setattr(gpu, "make_trunk", none_left)
    assert ways() == {"failed": "out of memory"}


class _Moment:
    """Stands for an event in a GPU's queue."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Moment) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.slow
def test_gpu_on_a_pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, recorded steps too: what it would do on a GPU, with stand-ins for what asks the driver."""
    gpu = script("gpu")
    few = ["--context", "20", "--tokens", "6", "--nodes", "4", "--acceptance", "1", "--rounds", "2", "--repeats", "1"]
    few += ["--device", "cuda", "--shapes", "small", "--dtype", "float32", "--out", str(tmp_path / "gpu.json")]

    def put(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            arguments = tuple(torch.device("cpu") if isinstance(each, torch.device) else each for each in arguments)
            thing = make(*arguments, **options)
            move(thing)
            return thing

        return made

    for name in ("make_trunk", "MedusaHeads"):
        monkeypatch.setattr(gpu, name, put(getattr(gpu, name)))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 10**6)
    monkeypatch.setattr(torch.cuda, "Event", _Moment)
    monkeypatch.setattr(DeviceClock.__init__, "__defaults__", (None, lambda: None))
    monkeypatch.setattr("medusa.graphs.CudaRecorder", lambda device: lambda work: work)
    rates = Rates(1e9, 1e12, 1 << 20, "float32", "2026-01-01")
    monkeypatch.setattr(gpu, "rates", lambda *_: rates)
    with PretendedGPU():
        gpu.main(few)
    ways = json.loads((tmp_path / "gpu.json").read_text())["shapes"]["small"]["ways"]
    assert list(ways) == ["eager", "graphs"]
    for figures in ways.values():
        assert [row["nodes"] for row in figures["cost_curve"]] == list(gpu.NODES)
        assert figures["throughput"][-1]["tokens_per_step"] == 2.5
        assert figures["peak_memory_mb"] == 1


def test_gpus_shapes_are_those_that_they_are_named_for() -> None:
    import transformers

    gpu = script("gpu")
    for name, millions in (("1B", 1236), ("7B", 6738)):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**gpu.SHAPES[name]))
        assert round(model.num_parameters() / 1e6) == millions


@pytest.mark.slow
def test_gpu_needs_torch_and_transformers_alone() -> None:
    absent = ["datasets", "jsonargparse", "matplotlib", "peft", "rich", "wandb", "accelerate"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import runpy, medusa.machine; medusa.machine.MEASURED_S = 0.0\n"
        "sys.argv = ['gpu.py', '--device', 'cpu', '--context', '9', '--tokens', '4', '--nodes', '4',"
        " '--acceptance', '1', '--rounds', '1', '--repeats', '1']\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'gpu.py')!r}, run_name='__main__')"
    )
    bare = os.environ | {"CXX": "none"}  # seconds that C++ of our own would take to compile
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=bare)
    assert done.returncode == 0 and "There is no GPU here" in done.stdout, done.stderr


def test_scaling_measures_and_fits_every_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts", "8", "40", "--outputs", "4", "9", "--batches", "1", "2", "--nodes", "1", "6"]
    out = str(tmp_path / "scaling.json")
    script("scaling").main([*sizes, "--tree", "4", "--prompt", "5", "--rounds", "2", "--clock", "cpu", "--out", out])
    found, said = json.loads(Path(out).read_text()), capsys.readouterr().out
    assert [(row["axis"], row["line"], row["sizes"]) for row in found["lines"]] == [
        ("context", "no drafts", [8, 40]),
        ("context", "tree", [8, 40]),
        ("output", "no drafts", [4, 9]),
        ("output", "tree", [4, 9]),
        ("batch", "no drafts", [1, 2]),
        ("batch", "tree", [1, 2]),
        ("nodes", "tree", [1, 6]),
    ]
    for row in found["lines"]:
        assert all(cost > 0 for cost in row["costs"])
        assert row["fixed"] + row["slope"] * row["sizes"][1] == pytest.approx(row["costs"][1])
    assert said.count("grows with exponent") == 7 and "from 8 to 40 tokens of context" in said


def test_fits() -> None:
    scaling = script("scaling")
    line = scaling.least_squares([1, 2, 4], [5.0, 7.0, 11.0])
    assert (line["fixed"], line["slope"], line["fit"]) == (pytest.approx(3), pytest.approx(2), pytest.approx(1))
    assert line["exponent"] == pytest.approx(math.log(11 / 5) / math.log(4))
    assert scaling.least_squares([1, 2, 3], [1.0, 0.0, 1.0])["fit"] == pytest.approx(0)
    assert scaling.least_squares([3], [1.0])["slope"] is None
    rows: list[dict[str, Any]] = [
        {"axis": "context", "line": "no drafts", "costs": [1.0, 2.0]},
        {"axis": "context", "line": "tree", "costs": [2.0, 6.0]},
    ]
    assert scaling.growth(rows) == 1.5 and scaling.growth(rows[:1]) is None


def test_steps_are_of_the_sizes_asked_for() -> None:
    scaling: Any = script("scaling")
    seen: list[tuple[int, int, int]] = []

    class Noting(scaling.Bench):
        def steps(self, decoders: Any) -> Any:
            for (_, size), decoder in decoders.items():
                step = decoder.step()
                seen.append((size, decoder.cache.longest, len(step.tokens) * step.nodes))
            return {}

    args = types.SimpleNamespace(tree=4, prompt=5, rounds=1, contexts=[9, 20], batches=[1, 3], nodes=[1, 7], clock="")
    bench = Noting(tiny_trunk("llama"), args)
    bench.context(), bench.batch(), bench.nodes()
    assert seen == [
        *[(9, 10, 1), (9, 10, 4), (20, 21, 1), (20, 21, 4)],
        *[(1, 6, 1), (1, 6, 4), (3, 6, 3), (3, 6, 12)],
        *[(1, 6, 1), (7, 6, 7)],
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--contexts", "0"], "scaling: sizes and rounds are counted from 1: give larger ones\n"),
        (["--trunk", "/nowhere"], "scaling: no trunk at /nowhere: "),
    ],
)
def test_scaling_says_in_one_line_what_it_can_t_do(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script("scaling").main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith(said) and told.count("\n") == 1


def trunk_folder(folder: Path) -> Path:
    tiny_model("llama").save_pretrained(folder)
    char_tokenizer("".join(map(chr, [10, *range(32, 96)]))).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_peers_compares_with_each_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, asked = trunk_folder(tmp_path / "trunk"), tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"category": "a", "turns": [text]}) + "\n" for text in ("HELLO", "WHO?")))
    few = ["--max-new-tokens", "6", "--prompts", "2", "--repeats", "1", "--threads", "1", "--cut", "1"]
    ours = ["--drafters", "none", "prompt-lookup", "--prompt-set", str(asked), "--out", str(tmp_path / "out")]
    assert script("peers").main([str(source), *few, *ours]) == 0
    rows = json.loads((tmp_path / "out" / "peers.json").read_text())["ratios"]
    peers = ["generate", "generate static", "generate prompt-lookup", "generate cut:1"]
    assert [(row["ours"], row["peer"]) for row in rows] == [
        *[("none", peer) for peer in peers],
        *[("prompt-lookup", peer) for peer in [*peers, "none"]],
    ]
    assert all(row["low"] <= row["median"] <= row["high"] and row["prompts"] == 2 for row in rows)
    assert "95 % interval" in capsys.readouterr().out


def test_a_ratio_is_of_seconds_per_token_of_runs_side_by_side() -> None:
    def runs(*pairs: tuple[float, int]) -> list[dict[str, float]]:
        return [{"seconds": seconds, "tokens": tokens} for seconds, tokens in pairs]

    cell = {"contenders": {"a": {"trials": [runs((1.0, 10))] * 3}, "b": {"trials": [runs((4.0, 20))] * 3}}}
    found = script("peers").ratios(cell, "a", "b", 0)
    assert found == {"ours": "a", "peer": "b", "median": 2.0, "low": 2.0, "high": 2.0, "prompts": 3}


def test_peers_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("peers").main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert NullDrafter.name == "none"  # by which the script finds our own plain decoding
