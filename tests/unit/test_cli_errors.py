"""Wrong input at the command line: one line with the value, the rule and the way out; code 2; nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from medusa import __main__ as cli
from medusa.cli import explain, new_parser, parse, underscored
from medusa.errors import UserError
from medusa.train import TrainConfig, stages  # noqa: F401 - first of all: transformers' Trainer speaks when imported
from medusa.train.cli import read_config

RECIPE = "run: runs/x\ndata:\n  source: text.txt\n  tokenizer: char\ntrunk:\n  new:\n    layers: 1\n"

# What is typed after `medusa train`, and what the line must say.
WRONG = [
    ([], "name a recipe, "),
    (["tinyshakespear"], "no recipe named 'tinyshakespear' (did you mean tinyshakespeare?)"),
    (["recipes.yaml"], "no recipe recipes.yaml (did you mean recipe.yaml?)"),
    (["nowhere/recipe.yaml"], "no recipe nowhere/recipe.yaml"),
    (["recipe.yaml", "--heads.nmu", "4"], "unknown option 'heads.nmu' (did you mean heads.num?)"),
    (["recipe.yaml", "--heads.nmu=4"], "unknown option 'heads.nmu' (did you mean heads.num?)"),
    (["recipe.yaml", "--stepz", "4"], "unknown option 'stepz'"),
    (["recipe.yaml", "--trunk.new.layer", "4"], "unknown option 'trunk.new.layer' (did you mean trunk.new.layers?)"),
    (["recipe.yaml", "--head.num", "4"], "unknown option 'head.num' (did you mean heads.num?)"),
    (["recipe.yaml", "--threads", "many"], "threads=many is not valid: give 'auto' or int"),
    (["recipe.yaml", "--seed", "x"], "seed=x is not valid: give int"),
    (["recipe.yaml", "--trunk.new.layers", "x"], "trunk.new.layers=x is not valid: give int"),
    (["recipe.yaml", "--trunk.new.tied", "maybe"], "trunk.new.tied=maybe is not valid: give true or false"),
    (
        ["recipe.yaml", "--trunk.new", "3"],
        "trunk.new=3 is not valid: give options of its own (such as trunk.new.layers",
    ),
    (
        ["recipe.yaml", "--trunk", "3"],
        "trunk=3 is not valid: give a YAML file, or options of its own (such as trunk.name)",
    ),
    (["recipe.yaml", "--heads.markov", "x"], "heads.markov=x is not valid: give int or null"),
    (["recipe.yaml", "--eagle.layers", "[1,x]"], "eagle.layers=[1, 'x'] is not valid: give a list of int or null"),
    (["recipe.yaml", "--joint.modules", "3"], "joint.modules=3 is not valid: give 'all-linear' or a list of str"),
    (["recipe.yaml", "--calibration.sizes", "x"], "calibration.sizes=x is not valid: give a list such as [1, 2]"),
    (
        ["recipe.yaml", "--heads_training.cache_states", "maybe"],
        "heads_training.cache_states=maybe is not valid: give true, false or 'auto'",
    ),
    (["recipe.yaml", "--run"], "--run is given without a value: add one"),
    (["recipe.yaml", "--dry-run=maybe"], "--dry_run takes no value: leave 'maybe' out"),
    (["recipe.yaml", "--tracking.wandb", "on"], "tracking.wandb=on is not valid: give 'off', 'offline' or 'online'"),
    (
        ["recipe.yaml", "--heads.kind", "hydr"],
        "heads.kind='hydr': choose from medusa, root, hydra (did you mean",
    ),
    (["recipe.yaml", "--heads.num", "0"], "heads.num=0: give at least 1"),
    (["recipe.yaml", "--fresh", "head"], "medusa train: --fresh head: choose from trunk, text, heads, joint, eagle, c"),
    (["recipe.yaml", "--trunk_training.steps", "0"], "trunk_training.steps=0: give at least 1"),
    (["recipe.yaml", "stray"], "unexpected 'stray': options are given as --NAME VALUE"),
    (["recipe.yaml", "--run.x", "3"], "unknown option 'run.x'"),
    (["typo.yaml"], "unknown option 'heads.kinds' (did you mean heads.kind?)"),
    (["top.yaml"], "unknown option 'heds.kind' (did you mean heads.kind?)"),
    (["nested.yaml"], "unknown option 'trunk.new.hiden' (did you mean trunk.new.hidden?)"),
    (["broken.yaml"], "broken.yaml can't be read as YAML (while parsing a flow sequence at line 1, column 6"),
    (["list.yaml"], "list.yaml names no options: give lines such as `seed: 1`"),
    (["--config", "none.yaml"], "no file none.yaml: give one in YAML"),
    (["latin.yaml"], "medusa train: latin.yaml can't be read ('utf-8' codec can't decode byte 0xe9"),
    (["recipe.yaml", "--data=latin.yaml"], "latin.yaml can't be read"),
    (["recipe.yaml", "--heads-training.step", "4"], "(did you mean heads_training.steps?)"),
    (["recipe.yaml", "--kv-heads", "4"], "unknown option 'kv-heads' (did you mean trunk.new.kv_heads?)"),
    (["recipe.yaml", "--trunk.new.kv-heads", "x"], "trunk.new.kv_heads=x is not valid: give int"),
    (["recipe.yaml"], "text.txt can't be read (No such file or directory)"),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes, good and bad, to work in."""
    files = {
        "recipe.yaml": RECIPE,
        "typo.yaml": RECIPE + "heads:\n  kinds: root\n",
        "top.yaml": RECIPE + "heds:\n  kind: root\n",
        "nested.yaml": RECIPE + "    hiden: 8\n",
        "broken.yaml": "run: [runs/x\n",
        "list.yaml": "- run\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.yaml").write_bytes(RECIPE.encode() + b"# caf\xe9\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv) or "nothing" for argv, _ in WRONG])
def test_wrong_input(argv: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(workplace.rglob("*"))
    assert cli.main(["train", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("medusa: error: ") and err.count("\n") == 1
    assert message in err
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.parametrize("command", [*cli.COMMANDS, "data inspect"])
@pytest.mark.parametrize("words", [["a", "--no-such-option", "1"], ["a", "--no-such-option=1"]])
def test_every_command_ends_in_one_line(
    command: str, words: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("medusa: error: ") and err.count("\n") == 1
    assert "unknown option" in err or command == "train"  # which names the recipe first


@pytest.mark.parametrize("command", [*cli.COMMANDS, "data inspect"])
def test_every_command_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.startswith(f"usage: medusa {command} ") and "<class" not in out


def test_every_key_of_a_recipe_is_an_option_in_either_spelling() -> None:
    config, _ = read_config(
        ["--run=x", "--data.tokenizer=char", "--trunk.new.kv-heads=2", "--heads-training.eval-every", "7"]
    )
    assert isinstance(config, TrainConfig)
    assert (config.trunk.new.kv_heads, config.heads_training.eval_every) == (2, 7)


def test_help_shows_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for option in (
        "--run",
        "--trunk.name",
        "--trunk.new",
        "--heads.help",
        "--eagle.help",
        "--heads_training.decay",
        "--fresh",
        "--dry",
    ):
        assert option in out
    assert "head k weighs decay^k" in " ".join(out.split())
    with pytest.raises(SystemExit) as end:  # of a group that may be null the options are a page of their own
        cli.main(["train", "--heads.help"])
    assert end.value.code == 0 and "--heads.kind" in capsys.readouterr().out


def test_names_may_be_joined_by_either_sign() -> None:
    parser = new_parser("x", "y")
    parser.add_argument("--max_new_tokens", type=int)
    assert parse(parser, ["--max-new-tokens", "3"]).max_new_tokens == 3
    assert parse(parser, ["--max_new_tokens=3"]).max_new_tokens == 3
    assert "joined by - or by _" in parser.format_help()


def test_only_names_of_options_are_rewritten() -> None:
    known = {"max_new_tokens", "prompt"}
    assert underscored("--max-new-tokens=a-b", known) == "--max_new_tokens=a-b"
    for value in ("a-b", "-a-b", "--What, ho-la my-lord", "--prompt=--x-y", "max-new-tokens", "--no-such=a-b"):
        assert underscored(value, known) == value


@pytest.mark.parametrize("argv", [["--prompt", "--What, ho-la my-lord"], ["--prompt=--What, ho-la my-lord"]])
def test_a_value_arrives_as_it_was_typed(argv: list[str]) -> None:
    parser = new_parser("x", "y")
    parser.add_argument("--prompt", type=str)
    assert parse(parser, argv).prompt == "--What, ho-la my-lord"
    assert parse(parser, ["--prompt=--x-y"]).prompt == "--x-y"


def test_a_file_that_cannot_be_read_is_one_line() -> None:
    parser = new_parser("x", "y")

    def refuse(argv: list[str]) -> None:
        raise PermissionError(13, "Permission denied", "secret.yaml")

    parser.parse_args = refuse
    with pytest.raises(UserError, match=r"a configuration file can't be read \(.*Permission denied: 'secret.yaml'\)"):
        parse(parser, [])


# What one option of some type is given, and what the line must say.
TYPES = [
    (bool | None, "maybe", "true, false or null"),
    (bool, "1", "true or false"),
    (int, "1.5", "int"),
    (int | None, "x", "int or null"),
    (float, "x", "float"),
    (Literal["a", "b"] | int, "c", "'a', 'b' or int"),
    (Sequence[int] | None, "3", "a list of int or null"),
    (Sequence[Sequence[int]] | None, "[[1, x]]", "a list of lists of int or null"),
    (int | Sequence[int] | None, "[1, x]", "int, a list of int or null"),
    (tuple[int, float] | None, "[1]", "[int, float] or null"),
    (tuple[float, ...], "x", "a list such as [1, 2]"),
    (dict[str, int] | None, "x", "a mapping ('{name: value}') or null"),
]


@pytest.mark.parametrize(("kind", "given", "wanted"), TYPES, ids=[wanted for *_, wanted in TYPES])
def test_a_value_of_another_type_is_told_what_to_be(kind: Any, given: str, wanted: str) -> None:
    parser = new_parser("x", "y")
    parser.add_argument("--packed", type=kind)
    with pytest.raises(UserError) as caught:
        parse(parser, ["--packed", given])
    assert str(caught.value).startswith("medusa x: packed=")
    assert str(caught.value).endswith(f" is not valid: give {wanted}; see medusa x --help")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--out", "x"], "run is missing: give a folder"),
        (["a"], "--out is missing: give where to"),
        ([], "run and --out are missing"),
        (["a", "--out"], "--out is given without a value: add one"),
        (["a", "--out", "x", "--sizes"], "--sizes is given without a value: add one or more"),
        (["a", "--out", "x", "--way", "fats"], "--way fats: choose from fast, slow (did you mean fast?)"),
        (["a", "--out", "x", "b"], "unexpected 'b': options are given as --NAME VALUE"),
        (["a", "--out", "x", "--fast=1"], "--fast takes no value: leave '1' out"),
    ],
)
def test_words_that_are_missing_or_too_many_are_told(argv: list[str], said: str) -> None:
    parser = new_parser("x", "y")
    parser.add_argument("run", type=str, help="a folder")
    parser.add_argument("--out", type=str, required=True, help="where to")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--way", choices=["fast", "slow"])
    parser.add_argument("--fast", action="store_true")
    with pytest.raises(UserError) as caught:
        parse(parser, argv)
    assert str(caught.value) == f"medusa x: {said}; see medusa x --help"


def test_abbreviations_are_not_taken() -> None:
    parser = new_parser("x", "y")
    parser.add_argument("--tokens", type=int)
    with pytest.raises(
        UserError, match=r"medusa x: unknown option 'token' \(did you mean tokens\?\); see medusa x --help"
    ):
        parse(parser, ["--token", "3"])


def test_a_message_of_another_wording_keeps_its_words_on_one_line() -> None:
    assert explain("something\n  quite new", []) == "something quite new"
