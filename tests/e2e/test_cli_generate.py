"""``medusa generate`` and ``medusa calibrate`` on a tiny checkpoint, through the command's own entrance."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.files import read_json, write_json
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.infer.prompts import heldout_prompts
from medusa.machine import describe
from medusa.progress import Advance
from medusa.testing import tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tiny_trunk("llama").model.save_pretrained(folder / "trunk")
    char_tokenizer(ALPHABET).save_pretrained(folder / "trunk")
    save_heads(folder, MedusaHeads(HeadsConfig("medusa", num=2), Trunk.load(folder / "trunk")), str(folder / "trunk"))
    save_tree(folder, Topology.from_paths([[0], [1], [0, 0]]))
    (folder / "text.txt").write_text("".join(random.Random(0).choices(ALPHABET, k=1500)))
    config = {
        "run": str(folder),
        "data": {"source": str(folder / "text.txt"), "tokenizer": "char"},
        "evaluation": {"prompts": 4, "prompt_tokens": 10, "tokens": 12},
        "calibration": {"sizes": [1, 2, 6], "rounds": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def medusa(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command; return exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(word) for word in argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_prints_the_text_and_one_line_of_figures(checkpoint: Path, medusa: Run) -> None:
    expected = Engine.load(checkpoint).generate("ROMEO:", max_new_tokens=25)
    code, out, err = medusa("generate", checkpoint, "--prompt", "ROMEO:", "--max-new-tokens", 25)
    assert (code, out) == (0, f"ROMEO:{expected.text}\n")
    (line,) = err.splitlines()
    assert line.startswith("25 tokens in ")
    assert f"{expected.steps} steps, {expected.tokens_per_step:.2f} tokens per step" in line


def test_a_prompt_that_looks_like_options_arrives_unchanged(checkpoint: Path, medusa: Run) -> None:
    prompt = "--What, ho-la my-lord"
    for argv in (["--prompt", prompt], [f"--prompt={prompt}"], ["--prompt=--x-y"]):
        code, out, err = medusa("generate", checkpoint, *argv, "--max-new-tokens=2")
        assert code == 0, err
        assert out.startswith(argv[-1].removeprefix("--prompt="))


def test_the_seed_of_a_sampled_text_is_told(checkpoint: Path, medusa: Run) -> None:
    argv = ("generate", checkpoint, "--prompt", "O", "--max-new-tokens", 20)
    _, out, err = medusa(*argv, "--temperature", 1)
    seed = int(err.strip().rpartition(", seed ")[2])
    assert medusa(*argv, "--temperature", 1, "--seed", seed)[1] == out
    assert "seed" not in medusa(*argv, "--seed", 5)[2]
    assert json.loads(medusa(*argv, "--temperature", 1, "--seed", 5, "--json")[1])["seed"] == 5


def test_a_run_that_was_not_made_and_a_trunk_without_heads(
    checkpoint: Path, medusa: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = medusa("generate", "runs/x", "--prompt", "O")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("medusa: error: no folder runs/x here (make it with `medusa train`)")
    code, _, err = medusa("generate", checkpoint / "trunk", "--prompt", "O")
    assert (code, err.count("\n")) == (2, 1) and "--baseline" in err
    argv = ("generate", checkpoint / "trunk", "--prompt", "O", "--max-new-tokens=9")
    code, text, _ = medusa(*argv, "--baseline")
    assert code == 0
    for drafter in ("none", "prompt-lookup", "lookahead", "cut:1"):
        assert medusa(*argv, "--drafter", drafter)[:2] == (0, text)
    code, _, err = medusa(*argv, "--baseline", "--drafter", "lookahead")
    assert (code, err.count("\n")) == (2, 1) and "--baseline and --drafter lookahead" in err


@pytest.mark.parametrize("more", [["--stream"], ["--baseline"], ["--stream", "--baseline"], ["--threads", "1"]])
def test_streamed_or_plain_the_text_is_the_same(checkpoint: Path, medusa: Run, more: list[str]) -> None:
    _, expected, figures = medusa("generate", checkpoint, "--prompt", "O", "--max_new_tokens=25")
    code, out, other = medusa("generate", checkpoint, "--prompt", "O", "--max-new-tokens=25", *more)
    assert (code, out) == (0, expected)
    assert ("24 steps, 1.00 tokens per step" in other) == ("--baseline" in more)
    assert "24 steps" not in figures


def test_json_holds_the_completion(checkpoint: Path, medusa: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("What\nnow")
    argv = ("--prompt-file", tmp_path / "prompt.txt", "--json", "--temperature", 0.7, "--seed", 5, "--max-length", 20)
    code, out, _ = medusa("generate", checkpoint, *argv)
    found = json.loads(out)
    expected = Engine.load(checkpoint).generate("What\nnow", temperature=0.7, seed=5, max_length=20)
    assert code == 0
    assert found["prompt"] == "What\nnow"
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert found["tokens_per_step"] == expected.tokens_per_step
    assert (found["finish_reason"], sum(found["accepted"])) == ("length", found["steps"])


def test_eos_ids_end_the_text(checkpoint: Path, medusa: Run) -> None:
    _, out, _ = medusa("generate", checkpoint, "--prompt", "O", "--max-new-tokens", 25, "--json")
    ids = json.loads(out)["token_ids"]
    argv = ("--prompt", "O", "--max-new-tokens", 25, "--json", "--eos-token-id", f"[{ids[4]}]")
    found = json.loads(medusa("generate", checkpoint, *argv)[1])
    assert (found["token_ids"], found["finish_reason"]) == (ids[: ids.index(ids[4]) + 1], "eos")


def test_options_of_the_engine_have_the_same_names(checkpoint: Path, medusa: Run) -> None:
    engine = Engine.load(checkpoint)
    plain = engine.generate("O", max_new_tokens=25)
    stop = plain.text[6:8]
    cases: list[tuple[list[object], dict]] = [
        (["--repetition-penalty", 1.7], {"repetition_penalty": 1.7}),
        (["--no_repeat_ngram_size", 2, "--frequency-penalty", 3], {"no_repeat_ngram_size": 2, "frequency_penalty": 3}),
        (["--bad-words-ids", "[[3], [5, 6]]"], {"bad_words_ids": [[3], [5, 6]]}),
        (["--suppress-tokens", f"[{plain.token_ids[0]}]"], {"suppress_tokens": plain.token_ids[:1]}),
        (["--stop-strings", stop, "[x", "--include-stop", "false"], {"stop_strings": [stop], "include_stop": False}),
        (["--stop-strings", stop], {"stop_strings": stop}),
        (["--do-sample", "true", "--seed", 3, "--top-h", 0.5], {"do_sample": True, "seed": 3, "top_h": 0.5}),
        (["--temperature", 1, "--seed", 3, "--drafting", "top"], {"temperature": 1, "seed": 3, "drafting": "top"}),
        (["--min-new-tokens", 3, "--eos-token-id", plain.token_ids[1]], {"eos_token_id": plain.token_ids[1]}),
        (["--exponential-decay-length-penalty", "[2, 1.5]", "--eos-token-id", 3], {}),
    ]
    cases[-2][1]["min_new_tokens"] = 3
    cases[-1][1].update(exponential_decay_length_penalty=(2, 1.5), eos_token_id=3)
    for argv, options in cases:
        expected = engine.generate("O", max_new_tokens=25, **options)
        code, out, err = medusa("generate", checkpoint, "--prompt", "O", "--max-new-tokens", 25, *argv)
        assert (code, out) == (0, f"O{expected.text}\n"), err
        assert f"finish reason {expected.finish_reason}" in err
        assert (f"stop {stop!r}" in err) == (expected.stop is not None)


def test_logprobs_are_in_the_json(checkpoint: Path, medusa: Run) -> None:
    expected = Engine.load(checkpoint).generate("O", max_new_tokens=4, top_logprobs=2)
    argv = ("generate", checkpoint, "--prompt", "O", "--max-new-tokens", 4, "--json")
    found = json.loads(medusa(*argv, "--top-logprobs", 2)[1])
    assert found["logprobs"] == expected.logprobs
    assert [{int(key): value for key, value in top.items()} for top in found["top_logprobs"]] == expected.top_logprobs
    found = json.loads(medusa(*argv, "--logprobs")[1])
    assert (found["logprobs"], found["top_logprobs"]) == (expected.logprobs, None)
    assert json.loads(medusa(*argv)[1])["logprobs"] is None


def test_lossy_acceptance_is_named(checkpoint: Path, medusa: Run) -> None:
    argv = ("generate", checkpoint, "--prompt", "O", "--max-new-tokens", 4, "--temperature", 1)
    _, out, err = medusa(*argv, "--acceptance", "typical", "--json")
    assert json.loads(out)["lossless"] is False and err.rstrip().endswith(", lossy")
    _, out, err = medusa(*argv, "--json")
    assert json.loads(out)["lossless"] is True and "lossy" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "O", "--logprobs"], "without --json"),
        (["--prompt", "O", "--top-logprobs", "2", "--stream"], "without --json"),
        (["--prompt", "O", "--acceptance", "tipical"], "did you mean typical?"),
        (["--prompt", "O", "--do-sample", "true", "--temperature", "0"], "do_sample=True and temperature=0"),
        (["--prompt", "O", "--stop-strings", ""], "none empty"),
        (["--prompt", "O", "--logits-processor", "x"], "unknown option"),
        (["--prompt", "O", "--max-new-token", "5"], "did you mean max_new_tokens?"),
        (["--prompt", "O", "--num-beams", "5"], "unknown option 'num-beams'"),
        (["--prompt", "O", "--temperature", "-1"], "temperature=-1"),
        (["--prompt", "O", "--max-new-tokens", "many"], "max_new_tokens"),
        (["--prompt", "O", "--threads", "0"], "threads=0"),
        (["--prompt", "O", "--stream", "--json"], "give one of the two"),
        (["--prompt", "100%"], "character '1'"),
        (["--prompt", "O" * 128], "may reach 128"),
        (["--prompt", "O", "--prompt-file", "x.txt"], "one of the two"),
        (["--prompt-file", "/nowhere/x.txt"], "/nowhere/x.txt"),
        ([], "give the prompt"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(checkpoint: Path, medusa: Run, argv: list[str], message: str) -> None:
    code, out, err = medusa("generate", checkpoint, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("medusa: error: ") and err.count("\n") == 1
    assert message in err


def test_a_folder_that_is_no_run(tmp_path: Path, medusa: Run) -> None:
    for argv in (["generate", tmp_path, "--prompt", "O"], ["calibrate", tmp_path]):
        code, _, err = medusa(*argv)
        assert (code, err.count("\n")) == (2, 1)
        assert "medusa.json" in err


def test_calibrate_saves_the_tree_it_chose(checkpoint: Path, medusa: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    (run / "tree.json").unlink()  # the tree there is not needed to choose another
    sizes = {"--prompts": 4, "--prompt-tokens": 10, "--tokens": 12, "--rounds": 2, "--threads": 1}
    argv = [word for pair in sizes.items() for word in pair] + ["--sizes", 1, 3, 5]
    code, out, err = medusa("calibrate", run, *argv)
    assert code == 0, err
    found = read_json(run / "calibration.json")
    assert [row["nodes"] for row in found["rows"]] == [1, 3, 5]
    assert out.startswith("trees of the heads\n") and out.count("\n") == 5 and out.count("<- chosen") == 1
    assert len(read_json(run / "tree.json")["paths"]) == found["chosen"]["nodes"] - 1
    assert medusa("generate", run, "--prompt", "O", "--max-new-tokens", 5)[0] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes", "0"], "sizes=[0]"),
        (["--tokens", "0"], "tokens=0"),
        (["--prompts", "1"], "prompts=1"),
        (["--threads", "0"], "threads=0"),
        (["--prompt-tokens", "5000"], "ask for fewer"),
        (["--device", "nowhere"], "device='nowhere'"),
    ],
)
def test_calibrate_refuses_in_one_line(checkpoint: Path, medusa: Run, argv: list[str], message: str) -> None:
    before = (checkpoint / "tree.json").read_bytes()
    code, _, err = medusa("calibrate", checkpoint, *argv)
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert (checkpoint / "tree.json").read_bytes() == before
    assert not (checkpoint / "calibration.json").exists()


def test_calibrate_measures_as_the_recipe_says(
    checkpoint: Path, medusa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa import calibrate

    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    found = {}

    def continuations(trunk, prompts, tokens, progress):
        found.update(prompts=prompts, tokens=tokens)
        return original(trunk, prompts, tokens, progress=progress)

    original = calibrate.continuations
    monkeypatch.setattr(calibrate, "continuations", continuations)
    bars: list[tuple[str, int, int]] = []

    @contextmanager
    def progress(total: int, label: str) -> Iterator[Advance]:
        advance = Advance(total, lambda advance: None)
        yield advance
        bars.append((label, total, advance.done))

    monkeypatch.setattr("medusa.progress.progress", progress)
    code, _, err = medusa("calibrate", run, "--tokens", 9)
    assert code == 0, err
    assert found == {"prompts": heldout_prompts(run, 4, 10, "judging"), "tokens": 9}
    rows = read_json(run / "calibration.json")["rows"]
    assert [row["nodes"] for row in rows] == [1, 2, 6]
    assert bars == [("held-out continuations", 4, 4), ("calibration of the heads", 1, 1)]


def test_calibrate_and_bench_end_in_one_line_where_nothing_can_be_written(
    checkpoint: Path, medusa: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("medusa.calibrate.recalibrate", refuse)
    code, _, err = medusa("calibrate", run)
    assert (code, err.count("\n")) == (2, 1) and "can't be written" in err and "Permission denied" in err
    monkeypatch.setattr("medusa.infer.bench.report.TemporaryFile", refuse)
    monkeypatch.setattr("medusa.infer.source.load_trunk", lambda *args, **options: pytest.fail("loaded"))
    for command in ("calibrate", "bench"):
        code, _, err = medusa(command, run)
        assert (code, err.count("\n")) == (2, 1) and "can't be written (Permission denied)" in err


def test_bench_takes_dtype_and_device(checkpoint: Path, medusa: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict] = []
    monkeypatch.setattr("medusa.infer.bench.run.run_bench", lambda *args, **options: asked.append(options) or 0)
    assert medusa("bench", checkpoint, "--dtype", "float64", "--device", "cpu")[0] == 0
    assert medusa("bench", checkpoint, "--packed", "false")[0] == 0
    assert asked == [
        {"dtype": "float64", "device": "cpu", "packed": None, "compile": False},
        {"dtype": "auto", "device": "auto", "packed": False, "compile": False},
    ]


def test_threads_are_those_of_the_calibration_on_such_a_machine(
    checkpoint: Path, medusa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setattr("medusa.machine.pick_threads", lambda work: work() is None or 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    argv = ("generate", checkpoint, "--prompt", "O", "--max-new-tokens", 1)
    try:
        write_json(checkpoint / "calibration.json", {"machine": describe() | {"threads": 7}})
        assert medusa(*argv)[0] == 0
        assert medusa(*argv, "--threads", 3)[0] == 0
        write_json(checkpoint / "calibration.json", {"machine": describe() | {"threads": 7, "processor": "another"}})
        assert medusa(*argv)[0] == 0
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the user's own choice
        write_json(checkpoint / "calibration.json", {"machine": describe() | {"threads": 7}})
        assert medusa(*argv)[0] == 0
    finally:
        (checkpoint / "calibration.json").unlink()
    assert chosen == [7, 3, 5]  # on another machine a trial decides


@pytest.mark.parametrize("command", ["generate", "calibrate", "bench"])
def test_help_comes_from_the_signatures(command: str, medusa: Run, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        medusa(command, "--help")
    assert end.value.code == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "``" not in text and "None" not in text
    assert text.count("joined by - or by _") == 1
    assert "a GPU where there is one (type: str, default: auto)" in text
    assert ("measured anew" in text) == (command == "calibrate")
