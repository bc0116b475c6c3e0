"""The trunk adapter: what it drives, what it refuses, and whose weights it says it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from medusa.decoding import Decoder, Request, generate_ids
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.fingerprint import fingerprint
from medusa.heads import HeadsConfig
from medusa.selfcheck import tree_error
from medusa.testing import FAMILIES, VOCAB, plain_greedy, random_heads, recompute, tiny_model, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save(model: Any, folder: Path, tokens: int = VOCAB) -> Path:
    """Save a model with a tokenizer of ``tokens`` words."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(tokens)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# What it drives.


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    trunk = tiny_trunk(family)
    exact = trunk.config._attn_implementation != "eager"  # eager attention takes its softmax in fp32
    assert tree_error(trunk) < (1e-12 if exact else 1e-6)
    assert trunk.vocab_size == VOCAB
    assert trunk.hidden_size == 32
    assert trunk.context == 128


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_and_other_types(family: str, dtype: torch.dtype) -> None:
    # eager attention adds the mask, sdpa may take a bool: an additive one is right for both
    trunk = Trunk(tiny_model(family, dtype=dtype, attn_implementation="eager"))
    assert trunk.model.config._attn_implementation == "eager"
    assert tree_error(trunk) < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("length", [6, 7, 8, 9, 30])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_tree_across_the_edge_of_the_window(family: str, length: int) -> None:
    trunk, text = tiny_trunk(family), [index * 7 % VOCAB for index in range(length)]
    cache = trunk.new_cache(1)
    trunk.prefill(torch.tensor([text]), [length], cache)
    topology = Topology.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]])
    tokens = torch.arange(topology.size)[None] + 20
    tree = DraftTree(Shape.static(topology, "cpu"), tokens, torch.ones_like(tokens).bool())
    logits = trunk.tree_forward(tree, cache).logits[0]
    for node in range(topology.size):
        path = tokens[0, tree.shape.ancestors[0, node]].tolist()
        torch.testing.assert_close(logits[node], recompute(trunk, text + path)[-1], rtol=1e-11, atol=1e-11)


def test_windows_are_found_per_layer_type() -> None:
    assert set(tiny_trunk("mistral").windows.values()) == {8}
    assert tiny_trunk("gemma3").windows == {"full_attention": None, "sliding_attention": 8}
    assert set(tiny_trunk("llama").windows.values()) == {None}


def test_the_model_is_frozen_and_left_as_it_was() -> None:
    model = tiny_model("llama").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trunk = Trunk(model)
    assert trunk.model is model and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    heads = random_heads(trunk, HeadsConfig("hydra", 2))
    generate_ids(trunk, MedusaDrafter(heads, Topology.full([2, 2])), [Request([1, 2, 3], 10)])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_logits_of_the_columns_asked_for_alone() -> None:
    trunk, ids = tiny_trunk("llama"), torch.tensor([[1, 2, 3, 4]])
    whole = trunk.forward(ids)
    assert whole.logits.shape == (1, 4, VOCAB) and whole.hidden.shape == (1, 4, 32)
    torch.testing.assert_close(trunk.forward(ids, keep=2).logits, whole.logits[:, 2:])
    torch.testing.assert_close(trunk.forward(ids, keep=torch.tensor([0, 2])).logits, whole.logits[:, [0, 2]])
    states = trunk.forward(ids, layers=(0, 2)).states
    torch.testing.assert_close(states[0], trunk.embed(ids))
    assert len(states) == 2


@pytest.mark.parametrize("family", ["llama", "gptj", "gemma2"])
def test_a_prefill_computes_few_logits(family: str) -> None:
    trunk = tiny_trunk(family)
    output = trunk.prefill(torch.zeros(3, 50, dtype=torch.long), [50, 7, 7], trunk.new_cache(3))[2]
    assert output.logits.shape == (3, 2, VOCAB)


# What it refuses, by name, in one line.

ALIEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {"alibi": True}),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 4}),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {"intermediate_size": 64, "num_hidden_layers": 3, "lru_width": 32},
    ),
    "bert": ("BertLMHeadModel", "BertConfig", {"intermediate_size": 64, "is_decoder": False}),
}


def alien(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model, config, own = ALIEN[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**(SIZES | own)))
    return widened(made, dtype)


def widened(model: Any, dtype: torch.dtype) -> Any:
    """Weights large enough that a wrong mask shows in the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ALIEN)
def test_families_that_can_not_be_driven_are_refused(family: str, dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"'{family}'") as caught:
        Trunk(alien(family, dtype))
    assert "use a" in one_line(caught)  # the way out


def test_a_running_state_is_named() -> None:
    with pytest.raises(UserError, match="'mamba' keeps a running state"):
        Trunk(alien("mamba"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [4, 256])  # 256 is the published models' own: no short trial sees it
def test_gpt_neo_with_local_layers_is_refused(window: int, dtype: torch.dtype) -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
    )
    with pytest.raises(UserError, match="'gpt_neo'") as caught:
        Trunk(widened(transformers.GPTNeoForCausalLM(config), dtype))
    one_line(caught)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UserError, match=r"'t5'.*encoder-decoder") as caught:
        Trunk(model)
    one_line(caught)
    with pytest.raises(UserError, match=r"'t5'.*encoder-decoder") as caught:
        Trunk.load(save(model, tmp_path))
    assert str(tmp_path) in one_line(caught)


def small(name: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return getattr(transformers, f"{name}Config")(**(sizes | changes))


def test_a_model_that_sees_is_refused() -> None:
    sight = small("CLIPVision", image_size=28, patch_size=14, projection_dim=32)
    config = transformers.LlavaConfig(text_config=small("Llama", vocab_size=VOCAB), vision_config=sight)
    model = transformers.LlavaForConditionalGeneration(config)
    with pytest.raises(UserError, match=r"'llava'.*vision_config.*give its text model") as caught:
        Trunk(model)
    one_line(caught)


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_a_model_without_a_language_modelling_head_is_refused(kind: str) -> None:
    model = getattr(transformers, kind)(small("Llama", vocab_size=VOCAB))
    with pytest.raises(UserError, match="'llama' has no language-modelling head") as caught:
        Trunk(model)
    one_line(caught)


@pytest.mark.parametrize("fault", ["deaf", "shifted"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_goes_wrong_in_silence_fails_the_self_check(fault: str, dtype: torch.dtype) -> None:
    # one that does not heed its mask, one that does not heed its positions
    model = tiny_model("llama", dtype=dtype)
    forward = model.base_model.forward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("attention_mask"), torch.Tensor):
            if fault == "deaf":
                kwargs["attention_mask"] = kwargs["attention_mask"] * 0
            else:
                kwargs["position_ids"] = kwargs["position_ids"].clamp(max=int(kwargs["position_ids"].min()) + 1)
        return forward(*args, **kwargs)

    model.base_model.forward = wrong
    with pytest.raises(UserError, match=r"'llama'.*off by") as caught:
        Trunk(model)
    one_line(caught)
    assert tree_error(Trunk(model, check=False)) > 1e-3


def longrope() -> Any:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    config = transformers.Phi3Config(
        **(SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}),
        original_max_position_embeddings=16,
        rope_parameters={**rope, "original_max_position_embeddings": 16, "factor": 4.0},
    )
    torch.manual_seed(0)
    return widened(transformers.Phi3ForCausalLM(config), torch.float64)


def test_frequencies_that_change_with_length() -> None:
    # longrope takes other frequencies once a forward reaches beyond the original context, for what is cached too:
    # the text may end there, but must not go wrong, nor depend on a longer row in the batch
    trunk = Trunk(longrope())
    prompts = [[3, 0, 9], [5] * 14]
    alone = [generate_ids(trunk, NullDrafter(), [Request(prompt, 20)])[0] for prompt in prompts]
    for prompt, ids in zip(prompts, alone, strict=True):
        assert ids == plain_greedy(trunk, prompt, len(ids))
    assert generate_ids(trunk, NullDrafter(), [Request(prompt, 20) for prompt in prompts]) == alone


def test_prompts_on_both_sides_of_the_change_are_decoded_one_side_after_the_other() -> None:
    trunk = Trunk(longrope())
    prompts = [[3, 0, 9], [7] * 30, [5] * 14, [8, 1] * 12, [2] * 20]
    requests = [Request(prompt, 6) for prompt in prompts]
    alone = [generate_ids(trunk, NullDrafter(), [request])[0] for request in requests]
    assert generate_ids(trunk, NullDrafter(), requests) == alone == generate_ids(trunk, NullDrafter(), requests, 2)
    decoder = Decoder(trunk, NullDrafter())
    decoder.admit(requests[:1])
    assert not decoder.takes(requests[1]) and decoder.takes(requests[2])
    with pytest.raises(UserError, match="both sides of position 16"):
        decoder.admit(requests[1:2])


def test_a_past_before_the_change_is_read_again_beyond_it() -> None:
    trunk = Trunk(longrope())
    decoder = Decoder(trunk, NullDrafter())
    decoder.admit([Request([5, 8, 1] * 4, 3)])
    while decoder.live:
        decoder.step()
    prompt = [5, 8, 1] * 7
    ids = generate_ids(trunk, NullDrafter(), [Request(prompt, 5, past=decoder.past())])
    assert ids == [plain_greedy(trunk, prompt, 5)]


@pytest.mark.parametrize("common", [3, 15, 16, 17, 20])
def test_a_common_beginning_before_the_change_is_read_again_too(common: int) -> None:
    trunk, first = Trunk(longrope()), [5, 8, 1, 40] * 7
    decoder = Decoder(trunk, NullDrafter())
    decoder.admit([Request(first, 3)])
    while decoder.live:
        decoder.step()
    prompt = [*first[:common], *[9] * 10, *first[common:]]
    ids = generate_ids(trunk, NullDrafter(), [Request(prompt, 5, past=decoder.past())])
    assert ids == [plain_greedy(trunk, prompt, 5)]


@pytest.mark.parametrize("length", [14, 15, 17, 18, 30])  # they change beyond 16 tokens
def test_texts_that_begin_near_or_beyond_the_change(length: int) -> None:
    trunk, prompt = Trunk(longrope()), [index * 5 % VOCAB for index in range(length)]
    ids = generate_ids(trunk, NullDrafter(), [Request(prompt, 10)])[0]
    assert ids == plain_greedy(trunk, prompt, 10)[: len(ids)]
    heads = random_heads(trunk, HeadsConfig("root", num=3))
    assert generate_ids(trunk, MedusaDrafter(heads, Topology.chain(3)), [Request(prompt, 10)]) == [ids]
    assert len(ids) == (10 if length > 16 else 16 - length)


def test_a_text_that_ends_at_the_change_leaves_no_room() -> None:
    # it is read with the frequencies before the change, and its next token with those after
    with pytest.raises(UserError, match="16 tokens"):
        generate_ids(Trunk(longrope()), NullDrafter(), [Request([5] * 16, 10)])


# Loading.


def test_load_brings_model_and_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    trunk = Trunk.load(save(model, tmp_path))
    assert trunk.dtype == torch.float32 and trunk.family == "llama"
    assert trunk.tokenizer is not None and trunk.tokenizer("w3 w5").input_ids[-2:] == [3, 5]
    torch.testing.assert_close(recompute(trunk, [1, 2, 3]), recompute(Trunk(model), [1, 2, 3]))
    assert Trunk.load(tmp_path, dtype=torch.float64).dtype == torch.float64
    assert Trunk.load(str(tmp_path), dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_rows_that_only_pad_the_vocabulary_are_never_drafted(tmp_path: Path) -> None:
    trunk = Trunk.load(save(tiny_model("llama"), tmp_path, tokens=50))
    assert (trunk.vocab_size, trunk.draftable) == (VOCAB, 50)
    for kind in ("medusa", "root", "hydra"):
        heads = random_heads(trunk, HeadsConfig(kind, 2), scale=2.0)
        drafter = MedusaDrafter(heads, Topology.from_paths([[rank] for rank in range(50)] + [[0, 49]]))
        session = drafter.open(trunk)
        session.start([[1]], torch.randn(3, 32, dtype=torch.float64), trunk.forward(torch.tensor([[1]])))
        tokens = session.propose(torch.tensor([1, 2, 3]), 9).tokens_BN
        assert tokens[:, 1:51].sort(-1).values.tolist() == [list(range(50))] * 3
        assert tokens.max() < 50
        with pytest.raises(UserError, match="rank 50 of 50"):
            MedusaDrafter(heads, Topology.from_paths([[50]]))


def broken(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "config",
    [
        None,  # no config at all
        "{not json",
        "{}",
        json.dumps({"model_type": "no_such_model"}),
        json.dumps({"model_type": "vit"}),  # an encoder of images
        json.dumps(
            {"model_type": "llama", "vocab_size": 65, "hidden_size": 32, "num_attention_heads": 4}
        ),  # no weights
    ],
)
def test_folders_that_hold_no_trunk(tmp_path: Path, config: str | None) -> None:
    folder = broken(tmp_path / "trunk", **({} if config is None else {"config": config}))
    with pytest.raises(UserError, match=str(folder)) as caught:
        Trunk.load(folder)
    one_line(caught)


def test_a_trunk_without_a_tokenizer_is_a_one_line_error(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=str(tmp_path)) as caught:
        Trunk.load(tmp_path)
    one_line(caught)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    # the library fills them with random numbers and a line in the log
    save(tiny_model("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight") as caught:
        Trunk.load(tmp_path)
    assert str(tmp_path) in one_line(caught)


@pytest.mark.parametrize("fault", ["cut", "misshaped"])
def test_weights_that_do_not_fit_are_a_one_line_error(tmp_path: Path, fault: str) -> None:
    save(tiny_model("llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    if fault == "cut":  # an interrupted download
        file.write_bytes(file.read_bytes()[:5000])
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(UserError, match=str(tmp_path)) as caught:
        Trunk.load(tmp_path)
    one_line(caught)


@pytest.mark.parametrize("options", [{"dtype": "bf61"}, {"device": "nowhere"}])
def test_types_and_devices_that_do_not_exist(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"bf61|nowhere") as caught:
        Trunk.load(save(tiny_model("llama"), tmp_path), **options)
    one_line(caught)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cuda") as caught:
        Trunk.load(save(tiny_model("llama"), tmp_path), device="cuda")
    one_line(caught)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nobody/no-such-model"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(UserError, match=name) as caught:
        Trunk.load(name)
    one_line(caught)


# Fingerprints.


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "gemma3"])
def test_one_fingerprint_for_any_type_a_trunk_is_loaded_in(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    names = {
        fingerprint(loaded(tmp_path, dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    assert names == {fingerprint(model)}  # as it was before it was saved


def test_fingerprints_tell_trunks_apart(tmp_path: Path) -> None:
    made = [tiny_model("llama", seed=seed) for seed in (0, 1)]
    made += [tiny_model("llama", num_hidden_layers=3), tiny_model("neox"), tiny_model("llama", dtype=torch.float32)]
    for index, model in enumerate(made):
        model.save_pretrained(tmp_path / str(index))
    assert len({fingerprint(model) for model in made[:4]}) == 4
    assert len({fingerprint(loaded(tmp_path / str(index))) for index in range(4)}) == 4


def test_pickled_weights_have_fingerprints_too(tmp_path: Path) -> None:
    names = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        model = tiny_model("llama", dtype=torch.float32, seed=seed)
        model.save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        names.append(fingerprint(loaded(folder)))
    assert len(set(names)) == 2


def test_a_trunk_of_the_hub_has_one_fingerprint_too(tmp_path: Path) -> None:
    # the same layout that a download leaves behind
    commit = "0" * 40
    repo = tmp_path / "models--someone--tiny"
    tiny_model("llama", dtype=torch.float32).save_pretrained(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    names = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = transformers.AutoModelForCausalLM.from_pretrained("someone/tiny", dtype=dtype, cache_dir=tmp_path)
        assert model.dtype == dtype
        names.add(fingerprint(model))
    assert len(names) == 1


def test_a_trunk_that_was_trained_on_has_another_fingerprint(tmp_path: Path) -> None:
    # "frozen" is proven by equal fingerprints before and after: one read off the files again would prove nothing
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    before = fingerprint(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5
    assert fingerprint(model) != before
