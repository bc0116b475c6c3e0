"""``medusa data inspect``: figures that add up, and a first batch that shows what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.data import cli
from medusa.data.inspect import preview, spread
from medusa.errors import UserError

from .chats import CHATML, chat_tokenizer, lines, messages

CHATS = [messages(f"hello {word}", "hi there", "and?", f"it is {word}") for word in "abcdefghij"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    chat_tokenizer(CHATML).save_pretrained(folder / "trunk")
    lines(folder / "chat.jsonl", *({"messages": chat} for chat in CHATS))
    (folder / "recipe.yaml").write_text(
        f"seed: 3\nrun: x\ndata:\n  source: {folder / 'chat.jsonl'}\n  heldout: 0.2\n  block: 64\n"
        f"trunk:\n  name: {folder / 'trunk'}\nheads:\n  num: 2\n"
    )
    return folder


def inspected(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert cli.run("data", ["inspect", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_source_in_figures_and_its_first_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspected(capsys, folder / "chat.jsonl", "--trunk", folder / "trunk", "--data.block", 64, "--rows", 1)
    assert "messages, 9 train and 1 held out" in out and "rows of 64 tokens" in out
    assert "<|im_start|>assistant\n[[hi there<|im_end|>]]\n<|im_start|>user\nand?<|im_end|>" in out
    assert "--- row 0, segment 0" in out and "warning" not in out and "\x1b" not in out
    again = inspected(capsys, folder / "recipe.yaml", "--rows", 1, "--data.heldout=0.1", "--seed", 0)
    assert again == out  # the recipe names the rest


def test_the_figures_add_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(inspected(capsys, folder / "recipe.yaml", "--json", "--data.block", 30))
    tokenizer = chat_tokenizer(CHATML)
    lengths = [len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in CHATS[:8]]
    learnt = [len(tokenizer.encode(f"hi there<|im_end|>it is {word}<|im_end|>")) for word in "abcdefgh"]
    assert found["rows"] == {"train": 8, "held out": 2} and found["examples"] == 8
    assert found["tokens"] == sum(lengths) and found["length"]["max"] == max(lengths)
    assert found["supervised"] == pytest.approx(sum(learnt) / sum(lengths))
    assert found["too_long"] == 8 and "8 examples are longer than data.block=30 and split" in found["warnings"][0]
    assert len(found["first_batch"]) == 8
    for parts in found["first_batch"]:
        assert any(part["supervised"] for part in parts) and sum(part["tokens"] for part in parts) <= 30


def test_a_text_is_learnt_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("hello there " * 30)
    out = inspected(capsys, tmp_path / "a.txt", "--data.tokenizer=char", "--data.block=16", "--rows=2", "--width=6")
    assert "text, 1 train and 1 held out" in out and "324 to train on, vocabulary 7" in out
    assert "100.0% of the tokens" in out and out.count("[[") == out.count(" … ") == 2


def test_colours_on_a_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = inspected(capsys, folder / "recipe.yaml", "--rows", 1)
    assert "[[" not in out and "\x1b[1;32mhi there<|im_end|>\x1b[0m" in out


def test_a_preview_leaves_out_the_filler_and_keeps_first_spaces() -> None:
    tokenizer = chat_tokenizer(None, words=True)
    ids = tokenizer.encode("the cat sat")
    cut = len(tokenizer.encode("the cat"))
    row = {
        "input_ids": torch.tensor([*ids, *ids, 0, 0]),
        "segments": torch.tensor([0] * len(ids) + [1] * len(ids) + [2, 2]),
        "labels": torch.tensor([*[-100] * cut, *ids[cut:], *ids, -100, -100]),
    }
    parts = [(part.segment, part.supervised, part.text) for part in preview(row, tokenizer)]
    assert parts == [(0, False, "the cat"), (0, True, " sat"), (1, True, "the cat sat")]


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [([3], (3, 3, 3, 3)), (range(1, 11), (1, 5.5, 9, 10)), (range(1, 12), (1, 6, 10, 11))],
)
def test_spread(numbers: Any, wanted: tuple[float, ...]) -> None:
    assert tuple(spread(list(numbers)).values()) == wanted


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "medusa data inspect: what is missing: give a recipe"),
        (["a.jsonl", "--data.blok=3"], r"unknown option 'data\.blok' \(did you mean data\.block\?\)"),
        (["a.jsonl", "--data.block=x"], r"data\.block=x is not valid"),
        (["a.jsonl", "--rows=-1"], "rows=-1: give at least 0"),
        (["a.jsonl"], "a.jsonl does not exist"),
        (["nowhere.yaml"], "nowhere.yaml can't be read"),
        (["chat.jsonl"], "data.tokenizer='trunk' and no trunk: name one"),
        (["chat.jsonl", "--data.tokenizer=trunkk"], "no tokenizer can be loaded from 'trunkk'"),
        (["broken.yaml"], "broken.yaml: data and trunk are groups"),
        (["unknown.yaml"], r"unknown option 'data\.sourc' \(did you mean data\.source\?\)"),
    ],
)
def test_what_is_wrong_is_one_line(
    argv: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.yaml").write_text("data: 3")
    (folder / "unknown.yaml").write_text("data: {sourc: x}")
    with pytest.raises(UserError, match=message) as caught:
        cli.run("data", ["inspect", *argv])
    assert "\n" not in str(caught.value)


def test_a_shipped_recipe_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa.data.inspect import read_arguments

    args, config = read_arguments(["tinyshakespeare", "--rows", "2"])
    assert config.source == "tinyshakespeare" and config.tokenizer == "char" and config.block == 256
    assert (args.seed, args.trunk, args.rows) == (0, None, 2)
