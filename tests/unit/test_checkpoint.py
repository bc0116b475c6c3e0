"""The checkpoint folder: what comes back is what went in, and whatever does not belong is named."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa.bound_files import DRAFT_IDS
from medusa.checkpoint import (
    MANIFEST,
    TREE,
    WEIGHTS,
    check_depth,
    load_heads,
    load_tree,
    read_manifest,
    save_heads,
    save_tree,
    trunk_source,
)
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.files import read_json, write_atomically, write_json
from medusa.heads import KINDS, PROJECTIONS, HeadsConfig, MedusaHeads
from medusa.testing import random_heads, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

HEADS = HeadsConfig("hydra", num=2)


@cache
def trunk_of(family: str = "llama", seed: int = 0) -> Trunk:
    return tiny_trunk(family, seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose trunk is a hub id."""
    save_heads(tmp_path / "run", random_heads(trunk_of(), HEADS), "someone/trunk", "main")
    save_tree(tmp_path / "run", Topology.full([2, 2]))
    return tmp_path / "run"


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def heads_of(family: str, kind: str, projection: str, vocab: int | None, markov: int | None = None) -> MedusaHeads:
    """Random heads; of a draft vocabulary, random ids."""
    config = HeadsConfig(kind, 3, 2, projection, vocab, 7 if projection == "low_rank" else None, markov)
    if vocab is None:
        return random_heads(trunk_of(family), config)
    generator = torch.Generator().manual_seed(4)
    heads = MedusaHeads(config, trunk_of(family), torch.randperm(65, generator=generator)[:vocab].sort().values)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


@pytest.mark.parametrize("vocab", [None, 20])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "phi"])  # phi's projection has a bias
def test_heads_come_back_as_they_were(
    family: str, kind: str, projection: str, vocab: int | None, tmp_path: Path
) -> None:
    trunk, heads = trunk_of(family), heads_of(family, kind, projection, vocab)
    config = heads.config
    save_heads(tmp_path, heads, "someone/trunk", "v1")
    back = load_heads(tmp_path, trunk)
    assert back.config == config and not back.training
    assert {name: value.dtype for name, value in back.state_dict().items()} == {
        name: value.dtype for name, value in heads.state_dict().items()
    }
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in heads.state_dict().items())
    hidden = torch.randn(2, 32, dtype=torch.float64)
    trees = []
    for each in (heads, back):
        for head in range(3):
            context = each.context(head, torch.ones(2, 3, 32, dtype=torch.float64))
            trees.append(each.logits(head, each.features(head, hidden, context)))
        session = MedusaDrafter(each, Topology.full([3, 2, 2])).open(trunk)
        session.start([[1], [2]], hidden, trunk.forward(torch.tensor([[1], [2]])))
        trees.append(session.propose(torch.tensor([5, 6]), 9).tokens_BN)
    assert all(torch.equal(before, after) for before, after in zip(trees[:4], trees[4:], strict=True))
    manifest = read_manifest(tmp_path)
    assert (manifest.trunk, manifest.revision, manifest.fingerprint) == ("someone/trunk", "v1", trunk.fingerprint())


@pytest.mark.parametrize("vocab", [None, 20])
def test_a_markov_bias_comes_back_as_it_was(vocab: int | None, tmp_path: Path) -> None:
    heads = heads_of("llama", "root", "shared", vocab, markov=4)
    save_heads(tmp_path, heads, "someone/trunk")
    assert json.loads((tmp_path / MANIFEST).read_text())["heads"]["markov"] == 4
    back = load_heads(tmp_path, trunk_of())
    assert back.config == heads.config
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in heads.state_dict().items())
    edited(tmp_path, lambda weights: weights.pop("heads.1.markov.after.weight"))
    with pytest.raises(UserError, match=rf"heads\.1\.markov\.after\.weight is missing.*\({vocab or 65}, 4\)"):
        load_heads(tmp_path, trunk_of())


def test_a_bias_that_the_manifest_does_not_tell_of_is_named(tmp_path: Path) -> None:
    save_heads(tmp_path, heads_of("llama", "root", "shared", None, markov=4), "someone/trunk")
    content = json.loads((tmp_path / MANIFEST).read_text())
    del content["heads"]["markov"]
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"heads\.0\.markov\..*none of that name"):
        load_heads(tmp_path, trunk_of())


def test_a_checkpoint_is_these_files_and_readable_by_all(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {MANIFEST, WEIGHTS, TREE}
    assert {file.stat().st_mode & 0o444 for file in folder.iterdir()} == {0o444}
    assert json.loads((folder / MANIFEST).read_text())["format"] == 1


def test_heads_without_a_draft_vocabulary_are_written_as_ever(folder: Path) -> None:
    written = json.loads((folder / MANIFEST).read_text())["heads"]
    assert written == {"kind": "hydra", "num": 2, "layers": 1, "projection": "own"}
    assert DRAFT_IDS not in load_file(folder / WEIGHTS)
    assert read_manifest(folder).heads == HEADS


def test_the_manifest_tells_the_size_of_the_draft_vocabulary(tmp_path: Path) -> None:
    save_heads(tmp_path, heads_of("llama", "root", "low_rank", 20), "someone/trunk")
    written = json.loads((tmp_path / MANIFEST).read_text())["heads"]
    assert written == {"kind": "root", "num": 3, "layers": 2, "projection": "low_rank", "vocab": 20, "rank": 7}
    assert load_file(tmp_path / WEIGHTS)[DRAFT_IDS].shape == (20,)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(DRAFT_IDS), ["missing", "(20,)"]),
        (lambda weights: weights.update({DRAFT_IDS: torch.arange(19)}), ["(19,)", "(20,)"]),
        (lambda weights: weights.update({DRAFT_IDS: torch.arange(20).int()}), ["int32", "int64"]),
        (lambda weights: weights.update({DRAFT_IDS: torch.arange(20).float()}), ["float32", "int64"]),
        (lambda weights: weights.update({DRAFT_IDS: torch.arange(20).flip(0)}), ["do not ascend"]),
        (lambda weights: weights.update({DRAFT_IDS: torch.arange(46, 66)}), ["from 46 to 65", "0..64"]),
        (lambda weights: weights.update({DRAFT_IDS: torch.arange(-1, 19)}), ["from -1 to 18"]),
    ],
    ids=["missing", "short", "int32", "float", "descending", "beyond", "negative"],
)
def test_draft_ids_that_do_not_belong_are_named(projection: str, change: Any, words: list[str], tmp_path: Path) -> None:
    save_heads(tmp_path, heads_of("llama", "medusa", projection, 20), "someone/trunk")
    edited(tmp_path, change)
    with pytest.raises(UserError) as caught:
        load_heads(tmp_path, trunk_of())
    assert all(word in one_line(caught) for word in [str(tmp_path), DRAFT_IDS, *words]), str(caught.value)


def test_loading_computes_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of a large projection the decomposition takes longer than the loading
    save_heads(tmp_path, heads_of("llama", "medusa", "low_rank", 20), "someone/trunk")
    monkeypatch.setattr(torch.linalg, "eigh", None)
    load_heads(tmp_path, trunk_of())


def test_draft_ids_that_no_manifest_tells_of(folder: Path) -> None:
    edited(folder, lambda weights: weights.update({DRAFT_IDS: torch.arange(20)}))
    with pytest.raises(UserError, match=f"{DRAFT_IDS} is \\(20,\\).*none of that name"):
        load_heads(folder, trunk_of())


@pytest.mark.parametrize(
    ("name", "value"), [("vocab", "20"), ("vocab", 2.5), ("rank", [7]), ("rank", None), ("vocab", 0)]
)
def test_sizes_that_are_none_are_named(name: str, value: object, tmp_path: Path) -> None:
    save_heads(tmp_path, heads_of("llama", "medusa", "low_rank", 20), "someone/trunk")
    content = json.loads((tmp_path / MANIFEST).read_text())
    content["heads"][name] = value
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        read_manifest(tmp_path)
    assert name in one_line(caught) and str(tmp_path) in one_line(caught)


def test_saving_again_replaces(folder: Path) -> None:
    heads = random_heads(trunk_of(), HeadsConfig("medusa", num=3), seed=9)
    save_heads(folder, heads, "someone/trunk")
    back = load_heads(folder, trunk_of())
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in heads.state_dict().items())


def test_heads_of_another_trunk_are_refused(folder: Path) -> None:
    for other in (trunk_of(seed=1), trunk_of("neox")):
        with pytest.raises(UserError) as caught:
            load_heads(folder, other)
        message = one_line(caught)
        assert trunk_of().fingerprint() in message and other.fingerprint() in message and "someone/trunk" in message


def edited(folder: Path, change: Any) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


NAME = "heads.1.blocks.0.linear.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(NAME), [NAME, "missing", "(32, 96)"]),
        (
            lambda weights: weights.update({"heads.2.extra": torch.zeros(3)}),
            ["heads.2.extra", "(3,)", "none of that name"],
        ),
        (lambda weights: weights.update({NAME: torch.zeros(32, 64)}), [NAME, "(32, 64)", "(32, 96)"]),
        (lambda weights: weights.update({NAME: torch.zeros(())}), [NAME, "()", "(32, 96)"]),
        (lambda weights: weights.update({NAME: weights[NAME].T.contiguous()}), [NAME, "(96, 32)", "(32, 96)"]),
    ],
    ids=["missing", "extra", "misshaped", "scalar", "transposed"],
)
def test_tensors_that_do_not_belong_are_named(folder: Path, change: Any, words: list[str]) -> None:
    edited(folder, change)
    with pytest.raises(UserError) as caught:
        load_heads(folder, trunk_of())
    assert all(word in one_line(caught) for word in words), str(caught.value)


def test_more_heads_in_the_config_than_in_the_file(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    content["heads"]["num"] = 3
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"heads\.2\."):
        load_heads(folder, trunk_of())


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (MANIFEST, None, ["does not exist"]),
        (MANIFEST, "{half", ["JSON"]),
        (MANIFEST, "[]", [MANIFEST]),
        (MANIFEST, '{"format": 99}', ["99", "format 1"]),
        (MANIFEST, '{"format": 1}', [MANIFEST]),
        (MANIFEST, '{"format": 1, "heads": {"kind": "hydra", "nmu": 2}, "trunk": "x", "fingerprint": "y"}', ["nmu"]),
        (WEIGHTS, None, ["does not exist"]),
        (WEIGHTS, "cut short", [WEIGHTS]),
    ],
)
def test_broken_files_are_named(folder: Path, file: str, text: str | None, words: list[str]) -> None:
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_heads(folder, trunk_of())
    assert all(word in one_line(caught) for word in [str(folder), *words]), str(caught.value)


def test_weights_that_the_system_does_not_give_out_are_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(UserError, match=rf"{WEIGHTS} can't be read \(.*\): train the heads anew with `medusa train`"):
        load_heads(folder, trunk_of())


# The trunk's name.


def test_a_trunk_made_here_moves_with_its_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny_model("llama").save_pretrained(run / "trunk")
    save_heads(run, random_heads(trunk_of(), HEADS), str(run / "trunk"))
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(run, moved)
    assert read_manifest(moved).trunk == "trunk"
    assert Path(trunk_source(moved, read_manifest(moved))) == (moved / "trunk").resolve()


def test_recipes_may_share_a_trunk_beside_them(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "a" / "trunk")
    save_heads(tmp_path / "b", random_heads(trunk_of(), HEADS), str(tmp_path / "a" / "trunk"))
    source = trunk_source(tmp_path / "b", read_manifest(tmp_path / "b"))
    assert Path(source) == (tmp_path / "a" / "trunk").resolve()


@pytest.mark.parametrize("place", ["run/trunk", "other/trunk"])
def test_a_trunk_that_is_gone_is_named_by_its_place(tmp_path: Path, place: str) -> None:
    # not taken for a hub id "trunk"
    tiny_model("llama").save_pretrained(tmp_path / place)
    save_heads(tmp_path / "run", random_heads(trunk_of(), HEADS), str(tmp_path / place))
    shutil.rmtree(tmp_path / place)
    with pytest.raises(UserError, match=str(tmp_path / place)) as caught:
        trunk_source(tmp_path / "run", read_manifest(tmp_path / "run"))
    one_line(caught)


def test_a_hub_id_stays_one(folder: Path) -> None:
    assert trunk_source(folder, read_manifest(folder)) == "someone/trunk"


# Trees.


@pytest.mark.parametrize("topology", [Topology.root(), Topology.chain(2), Topology.from_paths([[0], [4], [4, 1]])])
def test_trees_come_back_as_they_were(tmp_path: Path, topology: Topology) -> None:
    save_tree(tmp_path, topology, {"tokens_per_step": 1.5})
    assert load_tree(tmp_path, HEADS) == topology
    assert read_json(tmp_path / TREE)["tokens_per_step"] == 1.5


def test_a_tree_deeper_than_the_heads_names_both_numbers(tmp_path: Path) -> None:
    save_tree(tmp_path, Topology.chain(5))
    with pytest.raises(UserError, match=r"5 deep.* 2 heads") as caught:
        load_tree(tmp_path, HEADS)
    one_line(caught)
    check_depth(Topology.chain(2), HEADS)


@pytest.mark.parametrize("text", ["{}", '{"paths": [[0], [0, 0], [1, 0]]}', '{"paths": 3}', "[]"])
def test_broken_trees_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / TREE).write_text(text)
    with pytest.raises(UserError) as caught:
        load_tree(tmp_path, HEADS)
    one_line(caught)


# Writing.


def test_a_failed_write_leaves_nothing_and_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.json"

    def fails(temporary: Path) -> None:
        temporary.write_text("half of it")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(target, fails)
    assert list(target.parent.iterdir()) == []
    write_json(target, {"a": 1})
    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(target, fails)
    assert list(target.parent.iterdir()) == [target] and read_json(target) == {"a": 1}


def test_a_file_is_seen_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")

    def looks(temporary: Path) -> None:
        temporary.write_text("new")
        assert target.read_text() == "old" and temporary.parent == target.parent

    write_atomically(target, looks)
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


def test_json_that_can_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "file.json", {"a": object()})
    assert list(tmp_path.iterdir()) == []
