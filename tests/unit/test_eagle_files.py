"""EAGLE layers in folders: ours come back as they were, published ones compute what their authors' code does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.decoding import Request, generate_ids
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_files import (
    EAGLE,
    EAGLE_WEIGHTS,
    PLACE,
    eagle_place,
    eagle_tree,
    eagle_trunk,
    load_eagle,
    save_eagle,
)
from medusa.eagle_published import is_published_eagle, load_published_eagle
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.infer import Engine
from medusa.infer.drafters import make_drafter
from medusa.testing import plain_greedy, random_eagle, random_heads, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

CONFIGS = {
    "1": EagleConfig(1),
    "3": EagleConfig(3),
    "1 of 40": EagleConfig(1, 40),
    "3 of 40": EagleConfig(3, 40, layers=(2, 1)),
}
TEXT = [5, 5, 0, 8, 21, 33, 60, 2, 2, 1, 7]


@cache
def trunk() -> Trunk:
    return tiny_trunk("llama")


def saved(folder: Path, config: str = "3 of 40", name: str = "some/trunk") -> EagleLayer:
    layer = random_eagle(trunk(), CONFIGS[config])
    save_eagle(folder, layer, name)
    return layer


def states_of(layer: EagleLayer, text: list[int] = TEXT) -> list[Tensor]:
    ids = torch.tensor([text])
    with torch.no_grad():
        return layer.unroll(ids, layer.features(layer.trunk.forward(ids, layers=layer.layers)), 3)


# Ours.


@pytest.mark.parametrize("config", CONFIGS)
def test_a_layer_comes_back_as_it_was(config: str, tmp_path: Path) -> None:
    layer = saved(tmp_path / PLACE, config)
    again = load_eagle(tmp_path / PLACE, trunk())
    assert again.config == layer.config and again.sizes == layer.sizes and not again.training
    assert all(map(torch.equal, again.state_dict().values(), layer.state_dict().values()))
    for mine, theirs in zip(states_of(layer), states_of(again), strict=True):
        assert torch.equal(layer.logits(mine), again.logits(theirs))
    assert sorted(file.name for file in (tmp_path / PLACE).iterdir()) == [EAGLE, EAGLE_WEIGHTS]


def test_weights_are_written_in_the_trunks_precision_and_kept_in_any(tmp_path: Path) -> None:
    half = Trunk(tiny_model("llama").bfloat16())
    save_eagle(tmp_path, EagleLayer(EagleConfig(3, 9), half, torch.arange(9), dtype=torch.float32), "some/trunk")
    kinds = {name: value.dtype for name, value in load_file(tmp_path / EAGLE_WEIGHTS).items()}
    assert kinds.pop("draft_ids") == torch.long and set(kinds.values()) == {torch.bfloat16}
    assert {each.dtype for each in load_eagle(tmp_path, half, torch.float32).parameters()} == {torch.float32}


def test_a_trunk_in_a_folder_moves_with_the_layer(tmp_path: Path) -> None:
    (tmp_path / "run" / "trunk").mkdir(parents=True)
    saved(tmp_path / "run" / PLACE, name=str(tmp_path / "run" / "trunk"))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert eagle_trunk(tmp_path / "moved" / PLACE) == (str(tmp_path / "moved" / "trunk"), None)
    (tmp_path / "moved" / "trunk").rmdir()
    with pytest.raises(UserError, match=r"the trunk of the EAGLE layer .* is not at .*: move it back"):
        eagle_trunk(tmp_path / "moved" / PLACE)
    save_eagle(tmp_path / "hub", random_eagle(trunk(), EagleConfig(1)), "some/trunk", "v2")
    assert eagle_trunk(tmp_path / "hub") == ("some/trunk", "v2")


def test_where_a_folders_layer_and_tree_are(tmp_path: Path) -> None:
    assert eagle_place(tmp_path) is None and eagle_tree(tmp_path) == Topology.chain(4)
    saved(tmp_path / PLACE)
    save_tree(tmp_path / PLACE, Topology.full([2, 1]))
    assert eagle_place(tmp_path) == tmp_path / PLACE and eagle_place(tmp_path / PLACE) == tmp_path / PLACE
    assert eagle_tree(tmp_path / PLACE) == Topology.full([2, 1])


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / EAGLE).read_text())
        change(content)
        (folder / EAGLE).write_text(json.dumps(content))

    return apply


def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / EAGLE_WEIGHTS)
        change(held)
        save_file(held, folder / EAGLE_WEIGHTS)

    return apply


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "format": (manifest(lambda c: c.update(format=9)), "has format 9: this version reads format 1"),
    "no config": (manifest(lambda c: c.pop("config")), "eagle.json: 'config'; train the EAGLE layer anew"),
    "version": (manifest(lambda c: c["config"].update(version=2)), "eagle.version=2: choose 1"),
    "unknown field": (manifest(lambda c: c["sizes"].update(depth=2)), "unexpected keyword argument 'depth'"),
    "odd size": (manifest(lambda c: c["sizes"].update(head_size=7)), "heads of size 7"),
    "rope": (manifest(lambda c: c["sizes"].update(rope={"rope_type": "dynamic"})), "type 'dynamic' change with"),
    "layers": (manifest(lambda c: c["config"].update(layers=[1, 3])), r"eagle.layers=\[1, 3\]: the trunk has 2"),
    "trunk": (manifest(lambda c: c.update(trunk=3)), "trunk is 3, not a name"),
    "other trunk": (
        manifest(lambda c: c.update(fingerprint="0" * 16)),
        "holds the EAGLE layer of trunk 0000000000000000",
    ),
    "no json": (lambda folder: (folder / EAGLE).write_text("{"), "can't be read as JSON"),
    "no weights": (lambda folder: (folder / EAGLE_WEIGHTS).unlink(), "eagle.safetensors does not exist"),
    "half a file": (lambda folder: (folder / EAGLE_WEIGHTS).write_bytes(b"12345"), "can't be read"),
    "missing": (weights(lambda w: w.pop("norm.weight")), r"tensor norm.weight is missing, .* needs \(32,\)"),
    "left over": (weights(lambda w: w.update(more=torch.ones(2))), r"tensor more is \(2,\), .* none of that name"),
    "mis-shaped": (weights(lambda w: w.update({"norm.weight": torch.ones(2)})), r"norm.weight is \(2,\)"),
    "no ids": (weights(lambda w: w.pop("draft_ids")), r"tensor draft_ids is missing, .* needs \(40,\)"),
    "wrong ids": (weights(lambda w: w["draft_ids"].fill_(70)), "draft_ids do not ascend"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    saved(tmp_path)
    change, words = BROKEN[case]
    change(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        load_eagle(tmp_path, trunk())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"version": 2}, "eagle.version=2: choose 1"),
        ({"vocab": 0}, "eagle.vocab=0: give at least 1"),
        ({"version": 1, "layers": (1,)}, "version 1 reads the last state alone"),
        ({"layers": ()}, "give each layer once"),
        ({"layers": (1, 1)}, "give each layer once"),
        ({"layers": (0, 1)}, "give each layer once, 1 for the first"),
    ],
)
def test_configs_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        EagleConfig(**options)


# Published.


def published(folder: Path, of: Trunk, config: str, *, pickle: bool = False, **changes: Any) -> EagleLayer:
    """Write a random layer as its authors publish it."""
    version = 1 if config == "1" else 3
    layer = random_eagle(of, EagleConfig(version, 40 if config == "3 of 40" else None), seed=3)
    if version == 1:
        layer = EagleLayer(layer.config, of, sizes=bare(layer))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                )
                parameter.mul_(0.2)
    middle = "layers.0." if version == 1 else "midlayer."
    held = {
        name.replace("body.layer.", middle).replace("body.", ""): value.detach().float().contiguous()
        for name, value in layer.state_dict().items()
        if name != "draft_ids"
    }
    if layer.draft_ids is not None:
        held["d2t"] = layer.draft_ids - torch.arange(len(layer.draft_ids))
        held["t2d"] = torch.isin(torch.arange(of.vocab_size), layer.draft_ids)
    if version == 1:
        held["embed_tokens.weight"] = of.model.get_input_embeddings().weight.detach().half().float()
    said: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "rms_norm_eps": 1e-6}
    said |= {"hidden_act": "silu", "rope_theta": 10000.0, "vocab_size": of.vocab_size} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    if pickle:
        torch.save(held, folder / "pytorch_model.bin")
    else:
        save_file(held, folder / "model.safetensors")
    return layer


def bare(layer: EagleLayer) -> Any:
    from dataclasses import replace

    return replace(layer.sizes, bare=True, fc_bias=True)


@cache
def deep() -> Trunk:
    return tiny_trunk("llama", num_hidden_layers=8)


@pytest.mark.parametrize("pickle", [False, True])
@pytest.mark.parametrize("config", ["1", "3", "3 of 40"])
@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_a_published_layer_is_read(config: str, pickle: bool, tmp_path: Path) -> None:
    written = published(tmp_path, deep(), config, pickle=pickle)
    layer = load_published_eagle(tmp_path, deep())
    assert is_published_eagle(tmp_path) and layer.config.version == written.config.version
    assert layer.layers == ((2, 4, 5) if config != "1" else ()) and layer.sizes == written.sizes
    for mine, theirs in zip(states_of(layer), states_of(written), strict=True):
        torch.testing.assert_close(layer.logits(mine), written.logits(theirs), rtol=1e-4, atol=1e-4)


def test_a_layer_of_version_1_computes_what_the_authors_code_does(tmp_path: Path) -> None:
    # transformers' own decoder layer, without the first norm, behind the authors' fc
    published(tmp_path, deep(), "1")
    layer, held = load_published_eagle(tmp_path, deep()), load_file(tmp_path / "model.safetensors")
    config = deep().model.config
    theirs = LlamaDecoderLayer(config, 0).double()
    theirs.input_layernorm = torch.nn.Identity()
    own = {name.removeprefix("layers.0."): value for name, value in held.items() if name.startswith("layers.0.")}
    theirs.load_state_dict(own)
    hidden = deep().forward(torch.tensor([TEXT])).hidden[:, :-1]
    embedded = deep().embed(torch.tensor([TEXT[1:]]))
    x = linear(torch.cat([embedded, hidden], -1), held["fc.weight"].double(), held["fc.bias"].double())
    turn = LlamaRotaryEmbedding(config)(x, torch.arange(len(TEXT) - 1)[None])
    mask = torch.full((1, 1, len(TEXT) - 1, len(TEXT) - 1), -1e9, dtype=torch.float64).triu(1)
    with torch.no_grad():
        expected = theirs(x, attention_mask=mask, position_embeddings=turn)
    torch.testing.assert_close(states_of(layer)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_a_layer_of_version_3_computes_what_the_authors_code_does(tmp_path: Path) -> None:
    published(tmp_path, deep(), "3 of 40")
    layer = load_published_eagle(tmp_path, deep())
    held = {name: value.double() for name, value in load_file(tmp_path / "model.safetensors").items()}
    states = deep().forward(torch.tensor([TEXT]), layers=(2, 4, 5)).states
    hidden = linear(torch.cat(states, -1), held["fc.weight"])[:, :-1]
    read = torch.cat(
        [
            normed(deep().embed(torch.tensor([TEXT[1:]])), held["midlayer.input_layernorm.weight"]),
            normed(hidden, held["midlayer.hidden_norm.weight"]),
        ],
        -1,
    )
    turn = LlamaRotaryEmbedding(deep().model.config)(hidden, torch.arange(len(TEXT) - 1)[None])
    out = hidden + attention(read, held, turn)
    inner = normed(out, held["midlayer.post_attention_layernorm.weight"])
    gate, up = (linear(inner, held[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    out = out + linear(silu(gate) * up, held["midlayer.mlp.down_proj.weight"])
    torch.testing.assert_close(states_of(layer)[0], out, rtol=1e-5, atol=1e-5)
    logits = linear(normed(out, held["norm.weight"]), held["lm_head.weight"])
    torch.testing.assert_close(layer.logits(out), logits, rtol=1e-5, atol=1e-5)
    assert layer.draft_ids is not None
    assert torch.equal(layer.draft_ids, held["d2t"].long() + torch.arange(40))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def attention(read: Tensor, held: dict[str, Tensor], turn: tuple[Tensor, Tensor]) -> Tensor:
    """Four query heads of size 8 on two of keys, written out."""
    heads = {name: linear(read, held[f"midlayer.self_attn.{name}_proj.weight"])[0] for name in "qkv"}
    parts = []
    for head in range(4):
        q, k, v = (
            heads[name][:, 8 * at : 8 * at + 8] for name, at in (("q", head), ("k", head // 2), ("v", head // 2))
        )
        q, k = (x * turn[0][0] + torch.cat([-x[:, 4:], x[:, :4]], -1) * turn[1][0] for x in (q, k))
        scores = (q @ k.T / 8**0.5).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        parts.append(scores.softmax(-1) @ v)
    return linear(torch.cat(parts, -1), held["midlayer.self_attn.o_proj.weight"])[None]


@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_a_vocabulary_in_any_order_is_put_in_its_own(tmp_path: Path) -> None:
    written = published(tmp_path, deep(), "3 of 40")
    held = load_file(tmp_path / "model.safetensors")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert written.draft_ids is not None
    held["d2t"] = written.draft_ids[order] - torch.arange(40)
    held["lm_head.weight"] = held["lm_head.weight"][order].contiguous()
    save_file(held, tmp_path / "model.safetensors")
    layer, state = load_published_eagle(tmp_path, deep()), states_of(written)[0]
    assert layer.draft_ids is not None and torch.equal(layer.draft_ids, written.draft_ids)
    torch.testing.assert_close(layer.logits(state), written.logits(state), rtol=1e-4, atol=1e-4)


def test_that_nothing_tells_the_trunk_is_said(tmp_path: Path) -> None:
    published(tmp_path, deep(), "3")
    with pytest.warns(UserWarning, match="taken on trust"):
        load_published_eagle(tmp_path, deep())


@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_layers_that_the_config_names_are_fused(tmp_path: Path) -> None:
    # SGLang counts the layers that write the states, from 0; vLLM, and transformers, those that read them.
    published(tmp_path, deep(), "3", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 7]})
    assert load_published_eagle(tmp_path, deep()).layers == (1, 3, 8)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_config"]
    nested = {"transformer_layer_config": config, "norm_before_residual": False}
    for said in (
        config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]},
        nested | {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]},
    ):
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert load_published_eagle(tmp_path, deep()).layers == (1, 3, 8)
    for said in (nested | {"norm_before_residual": True}, {"transformer_layer_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        with pytest.raises(UserError, match="norm_before_residual"):
            load_published_eagle(tmp_path, deep())


@pytest.mark.parametrize(
    ("config", "other", "words"),
    [
        ("3", {"hidden_size": 64}, "of hidden size 32, and the trunk's is 64"),
        ("1", {"hidden_size": 64}, "of hidden size 32, and the trunk's is 64"),
        ("3", {"num_hidden_layers": 2}, "of fused size 96, and the trunk's is 64"),
        ("1", {"seed": 5}, "trained on a trunk with another embedding"),
    ],
)
@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_a_layer_of_another_trunk_is_refused(config: str, other: dict[str, int], words: str, tmp_path: Path) -> None:
    published(tmp_path, deep(), config)
    with pytest.raises(UserError, match=words) as caught:
        load_published_eagle(tmp_path, tiny_trunk("llama", **({"num_hidden_layers": 8} | other)))
    assert "\n" not in str(caught.value)


def change(**changes: Any) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        held = {name: value for name, value in held.items() if name not in changes}
        save_file(
            held | {name: value for name, value in changes.items() if value is not None}, folder / "model.safetensors"
        )

    return apply


UNREADABLE: dict[str, tuple[dict[str, Any], Callable[[Path], object], str]] = {
    "no heads": ({"num_attention_heads": None}, change(), "num_attention_heads is None"),
    "gelu": ({"hidden_act": "gelu"}, change(), "hidden_act 'gelu'"),
    "ntk": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, change(), "type 'dynamic' change with"),
    "no fc": ({}, change(**{"fc.weight": None}), "has no matrix fc.weight"),
    "no norm": ({}, change(**{"norm.weight": None}), "tensor norm.weight is missing"),
    "strange": ({}, change(**{"model.what": torch.ones(2)}), "model.what belongs to no published EAGLE layout"),
    "more": ({}, change(**{"layers.0.more": torch.ones(2)}), "tensor body.layer.more"),
    "config": ({}, lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
    "damaged": ({}, lambda folder: (folder / "model.safetensors").write_bytes(b"123"), "can't be read"),
    "nothing": ({}, lambda folder: (folder / "model.safetensors").unlink(), "holds no published EAGLE layer"),
}


@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_what_can_not_be_read_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    said, spoil, words = UNREADABLE[case]
    published(tmp_path, deep(), "3", **said)
    spoil(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        load_published_eagle(tmp_path, deep())
    assert "\n" not in str(caught.value)


# Names, engines and commands.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an EAGLE layer and no heads: the trunk inside of it."""
    folder: Path = tmp_path_factory.mktemp("runs") / "run"
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(folder / "trunk")
    tokenizer = char_tokenizer("".join(chr(32 + number) for number in range(65)))
    tokenizer.save_pretrained(folder / "trunk")
    layer = random_eagle(Trunk.load(folder / "trunk"), EagleConfig(3, 40))
    save_eagle(folder / PLACE, layer, str(folder / "trunk"))
    save_tree(folder / PLACE, Topology.full([3, 2]))
    return folder


@pytest.mark.parametrize(
    "name", ["auto", "eagle", "eagle:7", "eagle:RUN", "eagle:RUN:7", "eagle:PLACE", "eagle:PLACE:2"]
)
def test_an_engine_takes_the_layer_by_any_of_its_names(name: str, run: Path) -> None:
    name = name.replace("RUN", str(run)).replace("PLACE", str(run / PLACE))
    engine = Engine.load(run, drafter=name)
    assert isinstance(engine.drafter, EagleDrafter) and engine.drafter.topology is not None
    nodes = engine.drafter.nodes
    assert nodes == ({"7": 7, "2": 2}.get(name[-1]) if name[-2] == ":" else None)
    assert engine.drafter.topology.size == min(10, nodes or 10)
    done = engine.generate("THE", max_new_tokens=12)
    assert done.token_ids == Engine.load(run, drafter="none").generate("THE", max_new_tokens=12).token_ids


def test_heads_come_first_where_a_run_has_both(run: Path, tmp_path: Path) -> None:
    trunk = Trunk.load(run / "trunk")
    save_heads(tmp_path, random_heads(trunk, HeadsConfig("root", 2)), str(run / "trunk"))
    save_tree(tmp_path, Topology.chain(2))
    save_eagle(tmp_path / PLACE, random_eagle(trunk, EagleConfig(1)), str(run / "trunk"))
    assert isinstance(Engine.load(tmp_path).drafter, MedusaDrafter)
    own = Engine.load(tmp_path, drafter="eagle").drafter
    assert isinstance(own, EagleDrafter) and own.topology == Topology.chain(4)


def test_temperatures_of_calibration_decide_on_trees_of_each_step(run: Path, tmp_path: Path) -> None:
    trunk = Trunk.load(run / "trunk")
    save_eagle(tmp_path / PLACE, random_eagle(trunk, EagleConfig(1)), str(run / "trunk"))
    (tmp_path / PLACE / "calibration.json").write_text(json.dumps({"temperatures": [1.5, 2.0]}))
    drafter = make_drafter("eagle:8", trunk, tmp_path)
    assert isinstance(drafter, EagleDrafter) and drafter.temperatures == (1.5, 2.0) and drafter.depth == 2


@pytest.mark.filterwarnings("ignore:the EAGLE layer")
def test_a_published_layer_drafts_for_a_plain_trunk(tmp_path: Path) -> None:
    published(tmp_path, deep(), "3 of 40")
    for name in (f"eagle:{tmp_path}", f"eagle:{tmp_path}:9"):
        drafter = make_drafter(name, deep(), None)
        assert generate_ids(deep(), drafter, [Request(TEXT, 12)]) == [plain_greedy(deep(), TEXT, 12)]


BAD_NAMES = {
    "eagle": "takes an EAGLE layer, and a plain trunk has no drafters/eagle/eagle.json",
    "eagle:16": "takes an EAGLE layer, and a plain trunk has no",
    "eagle:/nowhere": "takes an EAGLE layer, and /nowhere has no drafters/eagle/eagle.json",
    "eagle:": r"give it as eagle\[:FOLDER\]\[:NODES\]",
    "eagles": r"did you mean eagle\?",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_without_a_layer_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=BAD_NAMES[name]) as caught:
        make_drafter(name, trunk(), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("nodes", [0, 1])
def test_a_budget_of_fewer_than_two_nodes_is_refused(nodes: int, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(run), "--prompt", "THE", "--drafter", f"eagle:{nodes}"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert f"a tree of {nodes} nodes in every step: give a whole number from 2" in error and "Traceback" not in error


def test_generate_drafts_with_the_layer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(run), "--prompt", "THE", "--max-new-tokens", "8"]
    assert main(arguments) == 0
    drafted = capsys.readouterr().out
    assert main([*arguments, "--baseline"]) == 0
    assert drafted.splitlines()[0] == capsys.readouterr().out.splitlines()[0]
