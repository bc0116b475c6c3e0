"""Published Medusa heads: three layouts, one set of drafts; what is missing, left over or unsafe is named."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa.checkpoint import load_heads, save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.dialects import (
    NODES,
    assumed_tree,
    is_published,
    load_published,
    published_names,
    published_tree,
    published_trunk,
)
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.testing import plain_greedy, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

HIDDEN, VOCAB, HEADS, LAYERS = 32, 65, 3, 2
TREE = Topology.full([3, 2, 2])
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
Weights = dict[str, Tensor]


@cache
def trunk_of(family: str = "llama") -> Trunk:
    return tiny_trunk(family)


class Residual(nn.Module):
    """The reference's block as its paper and names have it: zero weight, a bias of the usual random start."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def reference(trained: bool = True, heads: int = HEADS, layers: int = LAYERS) -> nn.ModuleList:
    """Heads as the reference builds them, each ending in its projection: here the trunk's own, as at the start."""
    output = trunk_of().model.get_output_embeddings()  # before the seed: making a model draws
    torch.manual_seed(7)
    made = nn.ModuleList()
    for _ in range(heads):
        projection = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
        projection.weight.data.copy_(output.weight)
        made.append(nn.Sequential(*(Residual() for _ in range(layers)), projection))
    if trained:
        for name, parameter in made.named_parameters():
            if "linear" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return made.requires_grad_(False)


def own(**sizes: Any) -> Weights:
    return {name: value.clone() for name, value in reference(**sizes).state_dict().items()}


def shared() -> Weights:
    return {name: value for name, value in own().items() if "linear" in name}


# Writing the layouts.


def write_apart(folder: Path, weights: Weights, file: str = "medusa_lm_head.safetensors", **config: Any) -> Path:
    """Heads in a file of their own, beside a config that names the trunk."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "someone/trunk"}
    (folder / "config.json").write_text(json.dumps(said | config))
    write(folder / file, weights)
    return folder


def write_inside(folder: Path, weights: Weights, file: str = "model.safetensors", shards: int = 1) -> Path:
    """Heads among a whole model's weights, with its own config."""
    model = tiny_model("llama")
    model.config.medusa_num_heads = HEADS
    model.save_pretrained(folder)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    whole |= {f"medusa_head.{name}": value for name, value in weights.items()}
    if shards == 1:
        write(folder / file, whole)
        return folder
    places = {}
    for shard in range(shards):
        stem, end = file.split(".")
        name = f"{stem}-{shard + 1:05}-of-{shards:05}.{end}"
        part = {key: whole[key] for key in sorted(whole)[shard::shards]}  # one head's tensors lie apart
        write(folder / name, part)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{file}.index.json").write_text(json.dumps(index))
    return folder


def write(path: Path, weights: Weights) -> None:
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in weights.items()}, path, {"format": "pt"})
    else:
        torch.save(weights, path)


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "own": lambda folder: write_apart(folder, own()),
    "own, pickled": lambda folder: write_apart(folder, own(), "medusa_lm_head.pt"),
    "inside": lambda folder: write_inside(folder, own()),
    "inside, sharded": lambda folder: write_inside(folder, own(), shards=3),
    "inside, pickled": lambda folder: write_inside(folder, own(), "pytorch_model.bin"),
    "inside, pickled and sharded": lambda folder: write_inside(folder, own(), "pytorch_model.bin", shards=2),
    "shared": lambda folder: write_apart(folder, shared()),
    "shared, pickled": lambda folder: write_apart(folder, shared(), "medusa_lm_head.pt"),
    "shared, inside": lambda folder: write_inside(folder, shared(), shards=2),
}


def quietly(folder: Path, trunk: Trunk | None = None) -> MedusaHeads:
    """Load, and let nothing be warned of but the trunk."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*taken on trust")
        return load_published(folder, trunk or trunk_of())


def refused(folder: Path, *words: str, trunk: Trunk | None = None) -> str:
    with pytest.raises(UserError) as caught:
        quietly(folder, trunk)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and all(word in message for word in words), message
    return message


def drafts(heads: MedusaHeads) -> Tensor:
    torch.manual_seed(1)
    hidden = torch.randn(4, HIDDEN, dtype=torch.float64)
    session = MedusaDrafter(heads, TREE).open(heads.trunk)
    ids = torch.tensor([[1], [2], [3], [4]])
    session.start(ids.tolist(), hidden, heads.trunk.forward(ids))
    return session.propose(torch.tensor([5, 6, 7, 8]), 9).tokens_BN


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_drafts_the_same(layout: str, tmp_path: Path) -> None:
    folder = LAYOUTS[layout](tmp_path / "published")
    assert is_published(folder)
    heads = quietly(folder)
    projection = "shared" if "shared" in layout else "own"
    assert heads.config == HeadsConfig("medusa", HEADS, LAYERS, projection) and not heads.training
    torch.manual_seed(1)
    hidden = torch.randn(4, HIDDEN, dtype=torch.float64)
    expected = [head(hidden) for head in reference()]
    for index, logits in enumerate(expected):
        mine = heads.logits(index, heads.features(index, hidden, None))
        torch.testing.assert_close(mine, logits, rtol=0, atol=1e-12)
    best = [logits.topk(3).indices for logits in expected]
    nodes = [torch.tensor([5, 6, 7, 8])] + [best[len(path) - 1][:, path[-1]] for path in TREE.paths[1:]]
    assert torch.equal(drafts(heads), torch.stack(nodes, 1))


def test_a_projection_of_its_own_is_used(tmp_path: Path) -> None:
    weights = own()
    weights["1.2.weight"] = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    folders = [write_apart(tmp_path / "apart", weights), write_inside(tmp_path / "inside", weights)]
    first, second = (quietly(folder) for folder in folders)
    hidden = torch.randn(2, HIDDEN, dtype=torch.float64)
    features = first.features(1, hidden, None)
    torch.testing.assert_close(first.logits(1, features), features @ weights["1.2.weight"].T)
    assert torch.equal(drafts(first), drafts(second))
    assert not torch.equal(drafts(first), drafts(quietly(write_apart(tmp_path / "other", own()))))


def test_heads_at_the_reference_start_are_not_the_identity(tmp_path: Path) -> None:
    # its blocks start with W = 0 and b random, ours with both 0: what comes in the file counts
    heads = quietly(write_apart(tmp_path, own(trained=False)))
    assert not heads.state_dict()["heads.0.blocks.0.linear.weight"].any()
    hidden = torch.randn(2, HIDDEN, dtype=torch.float64)
    features = heads.features(0, hidden, None)
    assert not torch.allclose(features, hidden)
    expected = hidden
    for block in reference(trained=False)[0][:-1]:
        expected = block(expected)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-12)


def test_blocks_that_share_their_weights_are_loaded_each(tmp_path: Path) -> None:
    # the reference repeats one block: a pickled file then lists it under every layer's name
    weights = own()
    for head in range(HEADS):
        for part in ("weight", "bias"):
            weights[f"{head}.1.linear.{part}"] = weights[f"{head}.0.linear.{part}"]
    heads = quietly(write_apart(tmp_path, weights, "medusa_lm_head.pt"))
    state = heads.state_dict()
    first, second = (state[f"heads.2.blocks.{layer}.linear.weight"] for layer in (0, 1))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_weights_take_the_trunks_type(tmp_path: Path) -> None:
    halves = {name: value.half() for name, value in own().items()}
    heads = quietly(write_apart(tmp_path, halves))
    assert {value.dtype for value in heads.state_dict().values()} == {torch.float64}
    assert torch.equal(heads.state_dict()["heads.0.blocks.0.linear.bias"], halves["0.0.linear.bias"].double())


def test_a_trunk_with_a_bias_gives_none_to_published_projections(tmp_path: Path) -> None:
    heads = quietly(write_apart(tmp_path, own()), trunk_of("phi"))
    assert not any(heads.state_dict()[f"heads.{head}.projection.bias"].any() for head in range(HEADS))


def test_safetensors_are_read_first(tmp_path: Path) -> None:
    write_apart(tmp_path, own())
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"never read")
    quietly(tmp_path)


def test_the_names_are_those_of_the_reference() -> None:
    for projection, weights in (("own", own()), ("shared", shared())):
        config = HeadsConfig("medusa", HEADS, LAYERS, projection)
        names = published_names(config)
        assert names.keys() == weights.keys()
        assert set(names.values()) == MedusaHeads(config, trunk_of()).state_dict().keys()


def test_they_can_be_kept_as_a_checkpoint_of_ours(tmp_path: Path) -> None:
    heads = quietly(write_apart(tmp_path / "theirs", own()))
    save_heads(tmp_path / "ours", heads, "someone/trunk")
    assert not is_published(tmp_path / "ours")
    assert torch.equal(drafts(load_heads(tmp_path / "ours", trunk_of())), drafts(heads))


# Counts.


@pytest.mark.parametrize(
    ("key", "said"), [("medusa_num_heads", 2), ("medusa_num_layers", 1), ("medusa_num_heads", "3")]
)
def test_the_tensors_win_over_the_config(key: str, said: Any, tmp_path: Path) -> None:
    found = HEADS if key == "medusa_num_heads" else LAYERS
    with pytest.warns(UserWarning) as warned:
        heads = load_published(write_apart(tmp_path, own(), **{key: said}), trunk_of())
    first, second = (str(warning.message) for warning in warned)
    assert f"config.json has {key} {said!r}, the tensors are those of {found}" in first and "on trust" in second
    assert {warning.filename for warning in warned} == {__file__}
    assert (heads.config.num, heads.config.layers) == (HEADS, LAYERS)


def test_a_config_without_counts_or_none_at_all_is_enough(tmp_path: Path) -> None:
    folder = write_apart(tmp_path, own(heads=1, layers=1), medusa_num_heads=1, medusa_num_layers=1)
    (folder / "config.json").write_text("{}")
    assert quietly(folder).config == HeadsConfig("medusa", 1, 1, "own")
    (folder / "config.json").unlink()
    assert quietly(folder).config.num == 1


def test_the_trunk_is_said_to_be_unverified_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as warned:
        load_published(write_apart(tmp_path, own()), trunk_of())
    (warning,) = warned
    assert "taken on trust" in str(warning.message) and str(tmp_path) in str(warning.message)
    assert warning.filename == __file__


def test_heads_and_trunk_of_one_folder_belong_together(tmp_path: Path) -> None:
    folder = write_inside(tmp_path / "whole", own())
    trunk = Trunk(tiny_model("llama"))
    trunk.model.name_or_path = str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_published(folder, trunk)
    trunk.model.name_or_path = str(tmp_path)
    with pytest.warns(UserWarning, match="taken on trust"):
        load_published(folder, trunk)


# What does not belong.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("1.0.linear.bias"), ["1.0.linear.bias", "missing", "(32,)"]),
        (lambda weights: weights.pop("2.2.weight"), ["2.2.weight", "missing", "(65, 32)"]),
        (lambda weights: weights.update({"0.3.weight": torch.zeros(3)}), ["0.3.weight", "(3,)", "none of that name"]),
        (lambda weights: weights.update({"0.0.bias": torch.zeros(3)}), ["0.0.bias", "no published layout"]),
        (lambda weights: weights.update({"0.2.bias": torch.zeros(65)}), ["0.2.bias", "no published layout"]),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(3)}), ["lm_head.weight"]),
        (lambda weights: weights.update({"9" * 50 + ".0.weight": torch.zeros(3)}), ["9999.0.weight", "no published"]),
        (lambda weights: weights.update({"4.0.linear.bias": torch.zeros(32)}), ["missing", "4 heads"]),  # a gap: no 3
        (lambda weights: weights.update({"0.4.linear.bias": torch.zeros(32)}), ["missing", "3 layers"]),
        (lambda weights: weights.update({"00.0.linear.bias": torch.zeros(32)}), ["00.0.linear.bias"]),
        (lambda weights: weights.update({"0.0.linear.weight": torch.zeros(32, 64)}), ["0.0.linear.weight", "(32, 64)"]),
        (lambda weights: weights.update({"0.2.weight": torch.zeros(64, 32)}), ["0.2.weight", "(64, 32)", "(65, 32)"]),
        (lambda weights: weights.update({"0.2.weight": torch.zeros(())}), ["0.2.weight", "()"]),
        (lambda weights: weights.update({"0.2.weight": torch.zeros(65, 32, dtype=torch.int8)}), ["0.2.weight", "int8"]),
        (lambda weights: weights.clear(), ["no residual block"]),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if "linear" in name],
            ["no residual block", "1 layer or more"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "edit",
)
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_tensors_that_do_not_belong_are_named(file: str, change: Any, words: list[str], tmp_path: Path) -> None:
    weights = own()
    change(weights)
    with pytest.raises(UserError) as caught:
        quietly(write_apart(tmp_path, weights, file))
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in [file, *words]), message


def test_names_inside_a_model_are_given_whole(tmp_path: Path) -> None:
    weights = own()
    weights["0.0.lienar.bias"] = weights.pop("0.0.linear.bias")
    refused(write_inside(tmp_path / "typo", weights), "medusa_head.0.0.lienar.bias")
    weights = own()
    del weights["0.0.linear.bias"]
    refused(write_inside(tmp_path / "missing", weights), "medusa_head.0.0.linear.bias is missing")


def test_another_trunk_is_known_by_its_sizes(tmp_path: Path) -> None:
    folder = write_apart(tmp_path, own())
    for changes in ({"hidden_size": 48}, {"vocab_size": 70}):
        refused(folder, "hidden size", "vocabulary", str(*changes.values()), trunk=tiny_trunk("llama", **changes))


# Files that are not what they should be.


class Payload:
    """Leaves a file behind if unpickling runs it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["apart", "inside"])
def test_pickled_objects_are_refused_and_never_run(where: str, zipped: bool, tmp_path: Path) -> None:
    mark, folder = tmp_path / "was_run", tmp_path / "published"
    path = folder / "medusa_lm_head.pt"
    if where == "apart":
        write_apart(folder, own(), path.name)
    else:
        path = write_inside(folder, own(), "pytorch_model.bin") / "pytorch_model.bin"
    torch.save({**own(), "extra": Payload(mark)}, path, _use_new_zipfile_serialization=zipped)
    message = refused(folder, str(path), "never run", "safetensors")
    assert not mark.exists() and "weights_only=False" not in message
    with pytest.raises(FileExistsError):  # the payload does work where pickles are run
        mark.mkdir()
        torch.load(path, weights_only=False)


def test_the_old_pickle_format_is_read(tmp_path: Path) -> None:
    write_apart(tmp_path, own(), "medusa_lm_head.pt")
    torch.save(own(), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert quietly(tmp_path).config.num == HEADS


@pytest.mark.parametrize(
    "content", [[torch.zeros(2)], {"0.0.linear.weight": 3}, {0: torch.zeros(2)}, torch.zeros(2)], ids=str
)
def test_a_pickle_without_named_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    write_apart(tmp_path, own(), "medusa_lm_head.pt")
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "medusa_lm_head.pt", "something else than tensors")


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"cut short", b"PK\x03\x04 a zip that ends"])
def test_damaged_files_are_named(file: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content)
    refused(tmp_path, str(tmp_path / file))


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_pickle_cut_short_is_named(keep: float, tmp_path: Path) -> None:
    write_apart(tmp_path, own(), "medusa_lm_head.pt")
    path = tmp_path / "medusa_lm_head.pt"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    refused(tmp_path, str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.pop("weight_map"), ["no weight_map"]),
        (lambda index: index.update(weight_map=["medusa_head.0.0.linear.weight"]), ["no weight_map"]),
        (lambda index: index["weight_map"].update({"medusa_head.0.0.linear.bias": 3}), ["no weight_map"]),
        (
            lambda index: index["weight_map"].update({"medusa_head.0.0.linear.bias": "model-9.safetensors"}),
            ["model-9.safetensors can't be read"],
        ),
        (
            lambda index: index["weight_map"].update({"medusa_head.0.0.linear.bias": "../outside.safetensors"}),
            ["medusa_head.0.0.linear.bias in ../outside.safetensors", "only files beside the index"],
        ),
        (
            lambda index: index["weight_map"].update(
                {"medusa_head.7.0.linear.bias": "model-00001-of-00002.safetensors"}
            ),
            ["model-00001-of-00002.safetensors", "lacks medusa_head.7.0.linear.bias"],
        ),
    ],
    ids=["no map", "a list", "no file", "lost shard", "outside", "lost tensor"],
)
def test_an_index_that_does_not_fit_is_named(change: Any, words: list[str], tmp_path: Path) -> None:
    folder = write_inside(tmp_path / "whole", own(), shards=2)
    write(tmp_path / "outside.safetensors", own())
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    refused(folder, *words)


@pytest.mark.parametrize("text", ["{half", "[]", "\udcff"])
def test_a_broken_config_is_named(text: str, tmp_path: Path) -> None:
    folder = write_apart(tmp_path, own())
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(folder, str(folder / "config.json"), "JSON")


def test_folders_without_published_heads(tmp_path: Path) -> None:
    trunk = tmp_path / "trunk"
    tiny_model("llama").save_pretrained(trunk)
    for folder in (trunk, tmp_path, tmp_path / "nowhere"):
        assert not is_published(folder)
        refused(folder, str(folder), "medusa_lm_head.safetensors", "medusa_head.")


# The trunk's name.


def test_heads_apart_name_their_trunk(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    for file in ("medusa_lm_head.safetensors", "medusa_lm_head.pt"):
        assert published_trunk(write_apart(folder, own(), file)) == "someone/trunk"
    assert published_trunk(write_apart(folder, own(), base_model_name_or_path="../trunk")) == str(tmp_path / "trunk")
    for nothing in ("", None, 3):
        with pytest.raises(UserError, match="base_model_name_or_path is"):
            published_trunk(write_apart(folder, own(), base_model_name_or_path=nothing))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "inside" in layout])
def test_a_full_model_is_its_own_trunk(layout: str, tmp_path: Path) -> None:
    folder = LAYOUTS[layout](tmp_path / "whole")
    assert published_trunk(folder) == str(folder)


def test_prefixed_heads_alone_are_no_full_model(tmp_path: Path) -> None:
    weights = {f"medusa_head.{name}": value for name, value in own().items()}
    folder = write_apart(tmp_path, weights, "model.safetensors")
    assert published_trunk(folder) == "someone/trunk" and quietly(folder).config.num == HEADS


# Trees.


def test_a_tree_beside_the_heads_comes_first(tmp_path: Path) -> None:
    folder = write_apart(tmp_path, own(), medusa_choices=[[0]])
    assert published_tree(folder, HeadsConfig("medusa", HEADS)) == Topology.chain(1)
    save_tree(folder, TREE)
    assert published_tree(folder, HeadsConfig("medusa", HEADS)) == TREE


@pytest.mark.parametrize("choices", [[[0], [1], [0, 0], [0, 1]], [[1], [0, 0], [0, 1]], []])
def test_choices_of_the_config(choices: list[Any], tmp_path: Path) -> None:
    folder = write_apart(tmp_path, own(), medusa_choices=choices)
    expected = Topology.from_paths([[0], [1], [0, 0], [0, 1]]) if choices else Topology.root()
    assert published_tree(folder, HeadsConfig("medusa", HEADS)) == expected


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ("mc_sim_7b_63", "give a list of paths"),
        ({"a": 1}, "give a list of paths"),
        ([[0], [0, 0, 0]], r"not that node"),
        ([[0], 1], "mixes"),
        ([[0, 0, 0, 0]], r"4 deep and there are 3 heads"),
    ],
)
def test_choices_that_can_not_be_used(choices: Any, words: str, tmp_path: Path) -> None:
    folder = write_apart(tmp_path, own(), medusa_choices=choices)
    with pytest.raises(UserError, match=words) as caught:
        published_tree(folder, HeadsConfig("medusa", HEADS))
    assert str(folder / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_tree_an_assumed_one_is_used_and_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"recalibrate.*tree\.json") as warned:
        tree = published_tree(write_apart(tmp_path, own()), HeadsConfig("medusa", HEADS))
    assert tree == assumed_tree(HEADS) and len(warned) == 1


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_the_assumed_tree_is_the_best_of_its_size(heads: int) -> None:
    tree = assumed_tree(heads)
    assert tree.size == NODES and tree.depth <= heads

    def chance(path: tuple[int, ...]) -> float:
        product = 1.0
        for head, rank in enumerate(path):
            product *= 0.6 * 0.8**head * 0.25**rank
        return product

    inside = set(tree.paths[1:])
    worst = min(chance(path) for path in inside)
    beside = [(*path[:-1], path[-1] + 1) for path in inside]
    below = [(*path, 0) for path in tree.paths if len(path) < heads]
    assert all(chance(path) <= worst for path in [*beside, *below] if path not in inside)


def test_few_nodes_of_an_assumed_tree_are_a_chain() -> None:
    assert assumed_tree(4, 3) == Topology.chain(2)
    assert assumed_tree(4, 1) == Topology.root()


# Engines.


@pytest.fixture
def trunk_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "trunk"
    tiny_model("llama").save_pretrained(folder)
    char_tokenizer(ALPHABET).save_pretrained(folder)
    return folder


def load_quietly(source: Path | str, **options: Any) -> Engine:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(taken on trust|without a tree)")
        return Engine.load(source, check=False, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_loads_every_layout(layout: str, trunk_folder: Path, tmp_path: Path) -> None:
    folder = LAYOUTS[layout](tmp_path / "published")
    if "inside" in layout:
        char_tokenizer(ALPHABET).save_pretrained(folder)
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../trunk"}))
    engine = load_quietly(folder)
    assert engine.drafter.name == "medusa" and isinstance(engine.drafter, MedusaDrafter)
    assert engine.drafter.topology == assumed_tree(HEADS)
    out = engine.generate("ROMEO:", max_new_tokens=20)
    assert out.token_ids == plain_greedy(trunk_of(), out.prompt_ids, 20)
    plainest = load_quietly(write_apart(tmp_path / "own", own(), base_model_name_or_path="../trunk"))
    assert plainest.generate("ROMEO:", max_new_tokens=20).accepted == out.accepted
    assert load_quietly(folder, drafter="none").generate("ROMEO:", max_new_tokens=20).token_ids == out.token_ids


def test_an_engine_takes_the_tree_beside_the_heads(trunk_folder: Path) -> None:
    folder = write_apart(
        trunk_folder.parent / "heads", own(), base_model_name_or_path="../trunk", medusa_choices=[1, 2]
    )
    engine = load_quietly(folder)
    assert isinstance(engine.drafter, MedusaDrafter) and engine.drafter.topology == Topology.full([2])


def test_an_engine_of_heads_whose_trunk_is_gone(tmp_path: Path) -> None:
    folder = write_apart(tmp_path / "heads", own(), base_model_name_or_path="../trunk")
    with pytest.raises(UserError, match=str(tmp_path / "trunk")):
        Engine.load(folder)


@pytest.mark.parametrize("layout", ["own", "inside, sharded"])
def test_heads_from_the_hub(layout: str, trunk_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    remote = LAYOUTS[layout](tmp_path / "remote")
    if "inside" in layout:
        char_tokenizer(ALPHABET).save_pretrained(remote)
    else:
        write_apart(remote, own(), base_model_name_or_path="../trunk")
    local = tmp_path / "snapshot"
    local.mkdir()
    fetched = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        for file in remote.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (local / file.name).write_bytes(file.read_bytes())
        fetched.append(sorted(file.name for file in local.iterdir()))
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load_quietly("some/heads").drafter.name == "medusa"
    if layout == "own":
        assert fetched == [["config.json", "medusa_lm_head.safetensors"]]
    else:  # the config tells that the model has heads: only then is all of it fetched
        assert fetched[0] == ["config.json"] and len(fetched) == 2
