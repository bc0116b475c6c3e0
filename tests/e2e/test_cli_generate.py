"""``medusa generate`` and ``medusa calibrate`` on a tiny checkpoint, through the command's own entrance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.files import read_json, write_json
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.machine import describe
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
    (folder / "text.txt").write_text(ALPHABET * 20)
    config = {"run": str(folder), "data": {"source": str(folder / "text.txt"), "tokenizer": "char"}}
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "O", "--max-new-token", "5"], "did you mean max_new_tokens?"),
        (["--prompt", "O", "--num-beams", "5"], "num_beams"),
        (["--prompt", "O", "--temperature", "-1"], "temperature=-1"),
        (["--prompt", "O", "--max-new-tokens", "many"], "max_new_tokens"),
        (["--prompt", "O", "--threads", "0"], "threads=0"),
        (["--prompt", "O", "--stream", "--json"], "give one of the two"),
        (["--prompt", "100%"], "character '1'"),
        (["--prompt", "O" * 128], "context is 128"),
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
    sizes = {"--prompts": 4, "--prompt-length": 10, "--tokens": 12, "--rounds": 2, "--threads": 1}
    argv = [word for pair in sizes.items() for word in pair] + ["--sizes", 1, 3, 5]
    code, out, err = medusa("calibrate", run, *argv)
    assert code == 0, err
    found = read_json(run / "calibration.json")
    assert [row["nodes"] for row in found["rows"]] == [1, 3, 5]
    assert out.count("\n") == 4 and out.count("<- chosen") == 1
    assert len(read_json(run / "tree.json")["paths"]) == found["chosen"]["nodes"] - 1
    assert medusa("generate", run, "--prompt", "O", "--max-new-tokens", 5)[0] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--sizes", "0"], "sizes=[0]"), (["--tokens", "0"], "tokens=0"), (["--prompt-length", "5000"], "ask for fewer")],
)
def test_calibrate_refuses_in_one_line(checkpoint: Path, medusa: Run, argv: list[str], message: str) -> None:
    before = (checkpoint / "tree.json").read_bytes()
    code, _, err = medusa("calibrate", checkpoint, *argv)
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert (checkpoint / "tree.json").read_bytes() == before
    assert not (checkpoint / "calibration.json").exists()


def test_threads_are_those_of_the_calibration_on_such_a_machine(
    checkpoint: Path, medusa: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
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
    assert chosen == [7, 3]


@pytest.mark.parametrize("command", ["generate", "calibrate", "bench"])
def test_help_comes_from_the_signatures(command: str, medusa: Run) -> None:
    with pytest.raises(SystemExit) as end:
        medusa(command, "--help")
    assert end.value.code == 0
