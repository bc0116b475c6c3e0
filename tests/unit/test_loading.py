"""Ways to load a trunk: placed, quantised, from GGUF, adapted. The text is always the loaded model's own."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import medusa.loading
from medusa.checkpoint import load_heads, save_heads
from medusa.decoding import Request, generate_ids
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.fingerprint import fingerprint
from medusa.heads import HeadsConfig
from medusa.infer.source import load_trunk
from medusa.selfcheck import tree_error
from medusa.testing import VOCAB, ScriptedDrafter, plain_greedy, random_heads, recompute, tiny_model
from medusa.tree import Topology
from medusa.trunk import Trunk

PROMPTS = [[3, 1, 4, 1, 5], [0, 17], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]]
TOKENS = 12
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # quantised kernels work in blocks of 32 or 64


def save(model: Any, folder: Path) -> Path:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trunk."""
    return save(tiny_model("llama", dtype=torch.float32, **SIZES), tmp_path_factory.mktemp("trunk"))


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads made for that trunk."""
    folder = tmp_path_factory.mktemp("heads")
    save_heads(folder, random_heads(Trunk.load(source), HeadsConfig("hydra", 3)), str(source))
    return folder


def generated(model: Any) -> list[list[int]]:
    """What the library's own loop makes of the prompts."""
    outputs = [model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS) for prompt in PROMPTS]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


def check_text(trunk: Trunk, checkpoint: Path | None = None) -> list[list[int]]:
    """The prompts' text, which must be the loaded model's own, by drafts that know it and by heads."""
    texts, requests = generated(trunk.model), [Request(prompt, TOKENS, trunk.eos_ids) for prompt in PROMPTS]
    assert generate_ids(trunk, ScriptedDrafter(texts, honesty=0.8), requests) == texts
    if checkpoint is not None:
        drafter = MedusaDrafter(load_heads(checkpoint, trunk), Topology.full([3, 2]))
        assert generate_ids(trunk, drafter, requests) == texts
    return texts


def refusal(match: str, *args: Any, **options: Any) -> str:
    with pytest.raises(UserError, match=match) as caught:
        Trunk.load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Placed by a map.

SPLIT = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "model.layers.0": "cpu"}
OFFLOADED = {**SPLIT, "model.layers.1": "disk", "lm_head": "cpu"}


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu", "auto"])
def test_a_map_is_respected(source: Path, checkpoint: Path, device_map: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medusa.loading, "pick_device", lambda device: pytest.fail("the model is moved"))
    check_text(Trunk.load(source, device_map=device_map), checkpoint)


def test_a_model_spread_over_places(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    # a layer that is fetched for each forward: as near to several devices as one processor comes
    trunk = Trunk.load(source, device_map=OFFLOADED, offload_folder=tmp_path)
    assert trunk.model.hf_device_map == OFFLOADED
    assert check_text(trunk, checkpoint) == generated(Trunk.load(source).model)
    assert trunk.fingerprint() == Trunk.load(source).fingerprint()


def test_an_embedding_and_a_projection_elsewhere(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    elsewhere = OFFLOADED | {"model.embed_tokens": "disk", "lm_head": "disk"}
    trunk = Trunk.load(source, device_map=elsewhere, offload_folder=tmp_path)
    assert trunk.device == torch.device("cpu")
    check_text(trunk)
    with pytest.raises(UserError, match="offloaded, so heads"):
        load_heads(checkpoint, trunk)


def test_a_map_and_a_device_contradict_each_other(source: Path) -> None:
    assert "give one of them" in refusal("device='cpu' and device_map='auto'", source, device="cpu", device_map="auto")
    refusal("nowhere", source, device_map={"": "nowhere"})


# Options of the library.


def test_attention_by_name(source: Path, checkpoint: Path) -> None:
    for name in ("sdpa", "eager"):
        trunk = Trunk.load(source, attn_implementation=name)
        assert trunk.config._attn_implementation == name
        check_text(trunk, checkpoint)
    for name in ("flash_attention_2", "flex_attention"):
        assert "sdpa or eager" in refusal(name, source, attn_implementation=name)
    model = tiny_model("llama", attn_implementation="eager")
    model.config._attn_implementation = "flash_attention_3"
    with pytest.raises(UserError, match="flash_attention_3"):
        Trunk(model)


def test_a_subfolder_and_a_token(source: Path, checkpoint: Path) -> None:
    check_text(Trunk.load(source.parent, subfolder=source.name, token="secret"), checkpoint)
    refusal("can't be loaded", source.parent, subfolder="nowhere")


def test_an_option_that_does_not_exist(source: Path) -> None:
    refusal("attn_implementatio'", source, attn_implementatio="eager")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_the_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save(tiny_model("llama", dtype=torch.float32, **SIZES), tmp_path / "own")
    (folder / "own.py").write_text(CODE, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    trunk = Trunk.load(folder, trust_remote_code=True)
    assert (trunk.family, type(trunk.model).__name__) == ("own_llama", "OwnForCausalLM")
    assert check_text(trunk) == generated(Trunk.load(source).model)
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question at the terminal"))
    refusal("give trust_remote_code=True", folder)


def test_a_checkpoint_hands_options_on(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    options = {"attn_implementation": "eager", "adapter": adapted(source, tmp_path, "lora")}
    trunk = load_trunk(checkpoint, dtype="auto", device="auto", **options)
    assert trunk.config._attn_implementation == "eager"
    assert check_text(trunk, checkpoint) != generated(Trunk.load(source).model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(source: Path, checkpoint: Path, dtype: str) -> None:
    trunk = Trunk.load(source, dtype=dtype)
    assert trunk.dtype == getattr(torch, dtype)
    assert tree_error(trunk) < 0.05  # trees attend with sums in fp32, and round otherwise than a plain forward
    drafter = MedusaDrafter(load_heads(checkpoint, trunk), Topology.full([3, 2]))
    found = generate_ids(trunk, drafter, [Request(prompt, TOKENS) for prompt in PROMPTS])
    for prompt, text, own in zip(PROMPTS, found, generated(trunk.model), strict=True):
        apart = next((at for at in range(TOKENS) if text[at] != own[at]), None)
        if apart is not None:  # only where the two best logits are within rounding
            best = recompute(trunk, prompt + own[:apart])[-1].float().topk(2).values
            assert best[0] - best[1] < 0.02 * best[0].abs()


def test_no_compiler_is_needed(source: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PATH": "", "CC": "/nonexistent", "CXX": "/nonexistent"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda *args, **options: pytest.fail("compiles"))
    check_text(Trunk.load(source), checkpoint)


# Adapted.

KINDS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    "dora": peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=True),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "saved modules": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "projection": peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
    "embedding": peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
}


def adapted(source: Path, folder: Path, kind: str) -> Path:
    """The folder of a random adapter for the trunk in ``source``, made by peft alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.name_or_path = str(source)
    peft.inject_adapter_in_model(KINDS[kind], model, "default")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(noise + 1 if "ia3" in name or "magnitude" in name else noise)
    weights = peft.get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    folder.mkdir(exist_ok=True)
    named = {f"base_model.model.{key}": value.contiguous() for key, value in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    KINDS[kind].base_model_name_or_path = str(source)
    KINDS[kind].save_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(generated(model)))
    return folder


def digest(*folders: Path) -> dict[Path, str]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_trunk(source: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    folder = adapted(source, tmp_path / "adapter", kind)
    expected, before = json.loads((folder / "expected.json").read_text()), digest(source, folder)
    base = Trunk.load(source)
    assert expected != generated(base.model)
    for trunk in (Trunk.load(source, adapter=folder), Trunk.load(str(folder))):
        assert check_text(trunk, checkpoint) == expected  # with heads made for the base
        assert trunk.fingerprint() == base.fingerprint()
    assert digest(source, folder) == before


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_whole_model_that_brings_its_adapter(source: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    folder = save(tiny_model("llama", dtype=torch.float32, **SIZES), adapted(source, tmp_path / "both", kind))
    break_config(folder, base_model_name_or_path="/where/it/was/made")
    trunk = Trunk.load(folder)
    assert check_text(trunk, checkpoint) == json.loads((folder / "expected.json").read_text())


def test_an_adapter_may_bring_its_tokenizer(source: Path, tmp_path: Path) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    assert Trunk.load(source, adapter=folder).tokenizer.chat_template == tokenizer.chat_template  # type: ignore[union-attr]
    assert Trunk.load(source).tokenizer.chat_template is None  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_adapter_in_another_type(source: Path, checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    trunk = Trunk.load(folder, dtype=dtype)
    assert trunk.dtype == getattr(torch, dtype)
    assert tree_error(trunk) < (0.05 if dtype == "bfloat16" else 1e-5)
    if dtype == "float64":
        assert check_text(trunk, checkpoint) == json.loads((folder / "expected.json").read_text())


def break_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_weights(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BREAKS: dict[str, tuple[Any, str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "can't be loaded"),
    "no kind": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "can't be loaded"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "can't be loaded"),
    "cut": (lambda folder: os.truncate(folder / "adapter_model.safetensors", 500), "can't be loaded"),
    "a weight missing": (lambda folder: break_weights(folder, lambda all: all.pop(FIRST)), "q_proj.lora_A"),
    "a weight too many": (
        lambda folder: break_weights(folder, lambda all: all.update(odd=all[FIRST] + 1)),
        "holds odd",
    ),
    "other sizes": (lambda folder: break_config(folder, r=8), "can't be loaded"),
    "other layers": (lambda folder: break_config(folder, target_modules=["w_pack"]), "can't be loaded"),
    "prompt tuning": (
        lambda folder: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM").save_pretrained(folder),
        "puts tokens before the text",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_adapter(source: Path, tmp_path: Path, fault: str) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    change, said = BREAKS[fault]
    change(folder)
    assert str(folder) in refusal(said, source, adapter=folder)


def test_an_adapter_without_its_base(source: Path, tmp_path: Path) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    break_config(folder, base_model_name_or_path=None)
    assert f"adapter='{folder}'" in refusal("does not name its base", folder)
    break_config(folder, base_model_name_or_path="/nowhere/at/all")
    assert f"adapter='{folder}'" in refusal("no base of adapter .* at /nowhere", folder)
    (folder / "adapter_config.json").write_text("{")
    refusal("can't be loaded", folder)
    refusal("no adapter at /nowhere", source, adapter="/nowhere")


def test_an_adapter_on_offloaded_layers(source: Path, tmp_path: Path) -> None:
    options = {"device_map": OFFLOADED, "offload_folder": tmp_path / "layers"}
    refusal("layers that are offloaded", source, adapter=adapted(source, tmp_path / "adapter", "lora"), **options)


def test_an_adapter_placed_by_a_map(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    trunk = Trunk.load(source, adapter=folder, device_map="auto")
    assert check_text(trunk, checkpoint) == json.loads((folder / "expected.json").read_text())


def test_an_adapter_without_peft(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    monkeypatch.setitem(sys.modules, "peft", None)
    refusal("pip install peft", source, adapter=folder)


# Quantised at load.


def torchao_int8() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def torchao_all() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig(), include_input_output_embeddings=True)


def bitsandbytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**options)


QUANTISED: dict[str, Any] = {
    "torchao int8": torchao_int8,
    "bitsandbytes fp4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "bitsandbytes nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes int8": lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_trunk(source: Path, checkpoint: Path, kind: str) -> None:
    trunk, full = Trunk.load(source, quantization_config=QUANTISED[kind]()), Trunk.load(source)
    layer = trunk.model.model.layers[0].mlp.up_proj
    own = full.model.model.layers[0].mlp.up_proj
    assert type(layer) is not type(own) or type(layer.weight.data) is not torch.Tensor  # it is quantised
    check_text(trunk, checkpoint)
    assert trunk.fingerprint() == full.fingerprint()


def test_an_adapter_on_a_quantised_trunk(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = adapted(source, tmp_path / "adapter", "lora")
    trunk = Trunk.load(source, adapter=folder, quantization_config=QUANTISED["bitsandbytes nf4"]())
    check_text(trunk, checkpoint)
    assert trunk.fingerprint() == Trunk.load(source).fingerprint()


def test_outliers_that_depend_on_the_other_tokens(source: Path) -> None:
    # which columns are kept in 16 bits is decided over all tokens of a forward: not the same in a tree
    found = refusal("as quantised", source, quantization_config=bitsandbytes(load_in_8bit=True))
    assert "llm_int8_threshold=0" in found


def test_heads_need_a_projection_in_full(source: Path, checkpoint: Path) -> None:
    trunk = Trunk.load(source, quantization_config=torchao_all())
    check_text(trunk)
    with pytest.raises(UserError, match="projection quantised"):
        load_heads(checkpoint, trunk)


def test_a_quantised_trunk_is_packed_where_it_works() -> None:
    plain, packed = SimpleNamespace(), SimpleNamespace(quantization_config={"quant_method": "fp8"})
    here = {"device_map": {"": torch.device("cpu")}}
    assert medusa.loading._placement(plain, "cpu", {"quantization_config": object()}) == here
    assert medusa.loading._placement(packed, "cpu", {}) == here  # saved quantised
    assert medusa.loading._placement(plain, "cpu", {}) == {}
    assert medusa.loading._placement(packed, "auto", {"device_map": "auto"}) == {}


def test_a_quantiser_that_is_not_installed(source: Path) -> None:
    refusal("can't be loaded", source, quantization_config={"quant_method": "gptq", "bits": 4})


def pretend_quantised(model: Any) -> Any:
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="any"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= -1  # what is in memory says nothing
    return model


def test_the_fingerprint_of_a_quantised_load_is_read_off_the_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Trunk.load(source).fingerprint()
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert fingerprint(pretend_quantised(load(source))) == expected
    commit = "0" * 40
    repo = tmp_path / "models--someone--tiny"  # the layout that a download leaves behind
    save(tiny_model("llama", dtype=torch.float32, **SIZES), repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    model = pretend_quantised(load("someone/tiny", cache_dir=tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint(model) == expected
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="someone/tiny is quantised or offloaded"):
        fingerprint(model)


# From a GGUF file.

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Any, path: Path, kind: str) -> None:
    """The model as the format has it: query and key rows in its own order, a tokenizer of letters."""
    import gguf

    config, file = model.config, gguf.GGUFWriter(path, "llama")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(10000.0)
    file.add_rope_dimension_count(config.head_dim)
    file.add_vocab_size(VOCAB)
    tokens = [*(chr(65 + index) for index in range(VOCAB - 1)), "AB"]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("default")
    file.add_token_list(tokens)
    file.add_token_types([1] * VOCAB)
    file.add_token_merges(["A B"])
    for key, value in model.state_dict().items():
        name, values = key.removesuffix(".weight"), value.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-1])
        if heads is not None:
            rows = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = rows.swapaxes(1, 2).reshape(values.shape)
        if name not in OUTER:
            _, _, layer, inner = name.split(".", 3)
            name = f"blk.{layer}.{NAMES[inner]}"
        packed = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
        file.add_tensor(f"{OUTER.get(name, name)}.weight", gguf.quants.quantize(values, packed), raw_dtype=packed)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_a_gguf_file(source: Path, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    full = Trunk.load(source)
    write_gguf(full.model, tmp_path / "tiny.gguf", kind)
    trunk = Trunk.load(tmp_path, gguf_file="tiny.gguf")
    assert trunk.tokenizer is not None and trunk.tokenizer("CAD").input_ids == [2, 0, 3]
    whole = kind in ("F32", "F16")
    check_text(trunk, checkpoint if whole else None)
    assert (trunk.fingerprint() == full.fingerprint()) == whole  # few bits: weights are rounded to zero
    if kind == "F32":
        assert plain_greedy(trunk, PROMPTS[0], TOKENS) == plain_greedy(full, PROMPTS[0], TOKENS)


def test_a_gguf_file_that_is_not_there(source: Path) -> None:
    pytest.importorskip("gguf")
    refusal("none.gguf", source, gguf_file="none.gguf")
