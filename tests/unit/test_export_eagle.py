"""EAGLE-3 layers for SGLang and vLLM: their own names, layers counted their way, logits; what they can't express."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa import eagle_exports
from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_engines import read_eagle
from medusa.eagle_exports import EAGLE_LAYOUTS
from medusa.eagle_files import PLACE, save_eagle
from medusa.eagle_published import load_published_eagle
from medusa.errors import UserError
from medusa.exports import Export
from medusa.files import write_json
from medusa.heads import HeadsConfig
from medusa.infer.export import eagle as exporting
from medusa.infer.export.write import export_run
from medusa.testing import random_heads, tiny_model
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
D, V, LAYERS = 32, 65, 5
STATES = (1, 3, 4)

# What the engines' own models hold, of a layer of 4 heads, 2 of keys and values, of size 8, and 64 inner numbers.
LAYER = {
    "hidden_norm.weight": (D,),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
    "self_attn.q_proj.weight": (32, 2 * D),
    "self_attn.k_proj.weight": (16, 2 * D),
    "self_attn.v_proj.weight": (16, 2 * D),
    "self_attn.o_proj.weight": (D, 32),
    "mlp.gate_proj.weight": (64, D),
    "mlp.up_proj.weight": (64, D),
    "mlp.down_proj.weight": (D, 64),
}
AROUND = {"fc.weight": (D, 3 * D), "norm.weight": (D,)}
NAMES = {"sglang": "midlayer", "speculators": "layers.0"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def trunk_of(place: Path, family: str = "llama", dtype: torch.dtype = torch.float64, layers: int = LAYERS) -> Trunk:
    folder = place / f"{family}-{dtype}-{layers}"
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    tiny_model(family, dtype=dtype, **changes).save_pretrained(folder)
    char_tokenizer(ALPHABET).save_pretrained(folder)
    return Trunk.load(folder, check=False)


def make_layer(trunk: Trunk, vocab: int | None = None, version: int = 3, **given: Any) -> EagleLayer:
    """A layer with every weight moved off its start; of a draft vocabulary, random ids."""
    generator = torch.Generator().manual_seed(4)
    ids = None if vocab is None else torch.randperm(V, generator=generator)[:vocab].sort().values
    states = given.get("layers", STATES if version == 3 else None)
    layer = EagleLayer(EagleConfig(version, vocab, states), trunk, ids)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return layer.eval()


def make_run(folder: Path, trunk: Trunk, **layer: Any) -> EagleLayer:
    """A run with a layer alone."""
    made = make_layer(trunk, **layer)
    save_eagle(folder / PLACE, made, str(trunk.model.name_or_path))
    save_tree(folder / PLACE, Topology.full([2, 1, 1]))
    return made


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


@torch.no_grad()
def drafted(layer: EagleLayer) -> list[Tensor]:
    """Logits of three tokens drafted one behind the other, at every position of a text."""
    ids = torch.randint(V, (1, 20), generator=torch.Generator().manual_seed(7))
    features = layer.features(layer.trunk.forward(ids, layers=layer.layers))
    return [layer.logits(states[0, depth:]) for depth, states in enumerate(layer.unroll(ids, features, 3))]


def refused(run: Path, to: str, out: Path, *words: str, **options: Any) -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(UserError) as caught:
        export_run(str(run), to, out, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert sorted(out.parent.iterdir()) == before
    return message


@pytest.mark.parametrize("vocab", [None, 20, V])
@pytest.mark.parametrize("to", EAGLE_LAYOUTS)
def test_the_engines_own_names_and_logits(to: str, vocab: int | None, models: Path, tmp_path: Path) -> None:
    layer = make_run(tmp_path / "run", trunk_of(models), vocab=vocab)
    made = export_run(str(tmp_path / "run"), to, tmp_path / "out")
    rows = vocab or V
    named = {f"{NAMES[to]}.{name}": shape for name, shape in LAYER.items()}
    drafts = {"d2t": (rows,), "t2d": (V,)} if rows < V else {}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == named | AROUND | drafts | {
        "lm_head.weight": (rows, D)
    }
    assert made.agreement.error < 1e-9 and made.agreement.same == made.agreement.positions == 24
    if vocab == 20:
        assert layer.draft_ids is not None
        assert torch.equal(found["d2t"] + torch.arange(20), layer.draft_ids)
        assert torch.equal(found["t2d"].nonzero()[:, 0], layer.draft_ids) and found["t2d"].dtype == torch.bool


def test_layers_are_counted_as_each_engine_does(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", trunk_of(models))
    export_run(str(tmp_path / "run"), "sglang", tmp_path / "sglang", base="someone/trunk")
    export_run(str(tmp_path / "run"), "speculators", tmp_path / "speculators", base="someone/trunk")
    sglang, speculators = config_of(tmp_path / "sglang"), config_of(tmp_path / "speculators")
    # SGLang: set_eagle3_layers_to_capture adds 1 and takes what the layer of that number reads; vLLM takes it as it is.
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert speculators["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert sglang["architectures"] == ["LlamaForCausalLMEagle3"] and sglang["draft_vocab_size"] == V
    assert sglang["num_attention_heads"] == 4 and sglang["tie_word_embeddings"] is False
    assert speculators["speculators_model_type"] == "eagle3" and speculators["norm_before_residual"] is False
    nested = speculators["transformer_layer_config"]
    assert (nested["model_type"], nested["num_hidden_layers"], nested["hidden_size"]) == ("llama", 1, D)
    about = speculators["speculators_config"]
    assert about["verifier"] == {"name_or_path": "someone/trunk", "architectures": ["LlamaForCausalLM"]}
    assert about["proposal_methods"][0]["speculative_tokens"] == 3  # the depth of its tree


def test_a_tree_of_the_root_alone_becomes_the_usual_chain(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", trunk_of(models))
    save_tree(tmp_path / "run" / PLACE, Topology.root())
    export_run(str(tmp_path / "run"), "speculators", tmp_path / "out")
    assert config_of(tmp_path / "out")["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


@pytest.mark.filterwarnings("ignore:the EAGLE layer in .* does not say")
@pytest.mark.parametrize("vocab", [None, 20])
@pytest.mark.parametrize("to", EAGLE_LAYOUTS)
def test_what_is_exported_comes_back_as_published(to: str, vocab: int | None, models: Path, tmp_path: Path) -> None:
    layer = make_run(tmp_path / "run", trunk_of(models), vocab=vocab)
    export_run(str(tmp_path / "run"), to, tmp_path / "out")
    back = load_published_eagle(tmp_path / "out", layer.trunk)
    assert back.layers == layer.layers
    for mine, theirs in zip(drafted(layer), drafted(back), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e3,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
@pytest.mark.parametrize("to", EAGLE_LAYOUTS)
def test_rotary_frequencies_are_the_layers_own(to: str, rope: dict[str, Any], models: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    trunk = trunk_of(models)
    sizes = replace(make_layer(trunk).sizes, rope=rope)
    layer = EagleLayer(EagleConfig(3, None, STATES), trunk, sizes=sizes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    save_eagle(tmp_path / "run" / PLACE, layer, str(trunk.model.name_or_path))
    assert export_run(str(tmp_path / "run"), to, tmp_path / "out").agreement.error < 1e-9


@pytest.mark.parametrize("family", ["cohere", "granite", "mistral"])
@pytest.mark.parametrize("to", EAGLE_LAYOUTS)
def test_of_other_trunks(to: str, family: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", trunk_of(models, family))
    assert export_run(str(tmp_path / "run"), to, tmp_path / "out").agreement.error < 1e-9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_rounded_as_asked(dtype: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", trunk_of(models, dtype=torch.float32), vocab=20)
    made = export_run(str(tmp_path / "run"), "sglang", tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {getattr(torch, dtype), torch.int64, torch.bool}
    assert config_of(tmp_path / "out")["torch_dtype"] == dtype and made.agreement.error < 1e-4


# What can't be expressed.


@pytest.mark.parametrize(
    ("family", "layer", "words"),
    [
        ("llama", {"version": 1}, "eagle.version=1"),
        ("llama", {"layers": (1, 3, 5)}, "all before the last, 5"),
        ("llama", {"layers": (1, 3)}, "[1, 3] of the trunk"),
        ("phi", {}, "bias"),
        ("gemma2", {}, "scales its embeddings"),
    ],
)
@pytest.mark.parametrize("to", EAGLE_LAYOUTS)
def test_what_the_engines_can_not_do_is_refused(
    to: str, family: str, layer: dict[str, Any], words: str, models: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", trunk_of(models, family), **layer)
    refused(tmp_path / "run", to, tmp_path / "out", words, "medusa train")


def test_heads_and_layers_go_their_own_ways(models: Path, tmp_path: Path) -> None:
    trunk = trunk_of(models)
    make_run(tmp_path / "run", trunk)
    refused(tmp_path / "run", "vllm", tmp_path / "out", "no heads", "sglang or speculators")
    save_heads(tmp_path / "heads", random_heads(trunk, HeadsConfig("medusa", 2)), str(trunk.model.name_or_path))
    refused(tmp_path / "heads", "sglang", tmp_path / "out", "no EAGLE layer", "vllm or tgi")
    refused(Path(str(trunk.model.name_or_path)), "sglang", tmp_path / "out", "no EAGLE layer")
    save_heads(tmp_path / "run", random_heads(trunk, HeadsConfig("medusa", 2)), str(trunk.model.name_or_path))
    for to in ("vllm", "sglang"):
        export_run(str(tmp_path / "run"), to, tmp_path / to)


def test_the_way_out_is_this_runs_recipe_with_other_layers(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", trunk_of(models), layers=(1, 3, 5))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"trunk": {"name": "x"}, "data": {}}))
    refused(tmp_path / "run", "sglang", tmp_path / "out", str(tmp_path / "run" / "config.yaml"), "--eagle.layers")


# The proof finds what is wrong.


def other_layers(made: Export) -> Export:
    if "eagle_config" in made.config:
        made.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    else:
        made.config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    return made


def other_theta(made: Export) -> Export:
    made.config.get("transformer_layer_config", made.config)["rope_theta"] = 100.0
    return made


def swapped(made: Export) -> Export:
    first, second = (name for name in made.weights if name.endswith(("hidden_norm.weight", "input_layernorm.weight")))
    made.weights[first], made.weights[second] = made.weights[second], made.weights[first]
    return made


def misnamed(made: Export) -> Export:
    made.weights["model.fc.weight"] = made.weights.pop("fc.weight")
    return made


def shifted(made: Export) -> Export:
    made.weights["d2t"] = made.weights["d2t"] + 1
    return made


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (other_layers, "does not read back"),
        (other_theta, "does not read back"),
        (swapped, "does not read back"),
        (misnamed, "fc.weight is missing"),
        (shifted, "d2t and t2d"),
    ],
)
@pytest.mark.parametrize("to", EAGLE_LAYOUTS)
def test_a_fault_in_what_is_written_is_found(
    to: str, fault: Any, words: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", trunk_of(models), vocab=20)
    whole = eagle_exports.export_eagle
    monkeypatch.setattr(exporting, "export_eagle", lambda *given, **options: fault(whole(*given, **options)))
    refused(tmp_path / "run", to, tmp_path / "out", words)


@pytest.mark.parametrize(
    ("to", "change", "words"),
    [
        ("sglang", {"architectures": ["LlamaForCausalLM"]}, "SGLang does not take"),
        ("sglang", {"tie_word_embeddings": True}, "SGLang does not take"),
        ("sglang", {"eagle_config": {}}, "3 of 1 to 4"),
        ("sglang", {"draft_vocab_size": 20}, "d2t is missing"),
        ("sglang", {"num_key_value_heads": 4}, "k_proj"),
        ("sglang", {"num_hidden_layers": 2}, "one layer"),
        ("speculators", {"norm_before_residual": True}, "norm_before_residual"),
        ("speculators", {"speculators_model_type": "eagle"}, "vLLM does not take"),
        ("speculators", {"transformer_layer_config": None}, "none of speculators"),
        ("speculators", {"speculators_config": {"proposal_methods": []}}, "none of speculators"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "3 of 1 to 4"),
    ],
)
def test_a_config_that_the_engine_would_misread_is_found(
    to: str, change: dict[str, Any], words: str, models: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", trunk_of(models))
    export_run(str(tmp_path / "run"), to, tmp_path / "out")
    write_json(tmp_path / "out" / "config.json", config_of(tmp_path / "out") | change)
    with pytest.raises(UserError, match=words):
        read_eagle(tmp_path / "out", to, D, V, LAYERS)


def test_missing_columns_are_found(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", trunk_of(models), vocab=20)
    export_run(str(tmp_path / "run"), "sglang", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    del weights["t2d"]
    save_file(weights, file)
    with pytest.raises(UserError, match="t2d is missing"):
        read_eagle(tmp_path / "out", "sglang", D, V, LAYERS)


# The command.


@pytest.mark.parametrize(("to", "line"), [("sglang", "--speculative-algorithm EAGLE3"), ("speculators", "vllm serve")])
def test_the_command_and_its_card(
    to: str, line: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", trunk_of(models), vocab=20)
    training = {"data": {"source": "tinyshakespeare", "block": 256}, "eagle_training": {"steps": 600, "batch": 8}}
    stages = {"eagle": {"result": {"tokens_per_step": 2.5}}}
    write_json(tmp_path / "run" / "run.json", {"config": training, "stages": stages, "versions": {"medusa": "9.9"}})
    assert main(["export", str(tmp_path / "run"), "--to", to, "--out", str(tmp_path / "out"), "--base", "me/x"]) == 0
    assert "15 tensors" in capsys.readouterr().out
    text = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert front["base_model"] == "me/x" and "eagle3" in front["tags"] and "None" not in text
    for words in (line, "600 steps", "20 of 65 tokens", "layers 1, 3 and 4 of it (of 5)", "Tokens per step: 2.5"):
        assert words in text, words
