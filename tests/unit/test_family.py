"""What is read off a model's config alone: windows, limits, where frequencies turn, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from medusa.errors import UserError
from medusa.families import FAMILIES
from medusa.family import (
    FULL,
    SLIDING,
    context,
    other_parts,
    refuse_attention,
    refuse_by_config,
    turning_point,
    windows,
)

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 65}
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**(SMALL | changes))


def plain(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


# Windows: of the published configs too, whose thousands of tokens no short trial would reach.


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("Llama", {}, {FULL: None}),
        ("GPT2", {}, {FULL: None}),
        ("GPTNeoX", {}, {FULL: None}),
        ("Mistral", {}, {FULL: 4096}),
        ("Mistral", {"sliding_window": None}, {FULL: None}),
        ("Mixtral", {"sliding_window": 64}, {FULL: 64}),
        ("Phi3", {"sliding_window": 2047, "pad_token_id": None}, {FULL: 2047}),
        ("Starcoder2", {"sliding_window": 4096}, {FULL: 4096}),
        ("Gemma2", {}, {FULL: None, SLIDING: 4096}),
        ("Gemma3Text", {"sliding_window": 512, "num_hidden_layers": 6}, {FULL: None, SLIDING: 512}),
        ("Gemma3Text", {"sliding_window": 512, "layer_types": [SLIDING] * 4}, {SLIDING: 512}),
        ("Cohere2", {"sliding_window": 128}, {FULL: None, SLIDING: 128}),
        # a window in the config that is not in use
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": False}, {FULL: None}),
        (
            "Qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
            {FULL: None, SLIDING: 64},
        ),
        ("Qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, {SLIDING: 64}),
    ],
)
def test_windows_of_each_layer_type(name: str, changes: dict[str, Any], expected: dict[str, int | None]) -> None:
    assert windows(config_of(name, **changes)) == expected


def test_a_config_without_a_window() -> None:
    assert windows(plain()) == {FULL: None}
    assert windows(plain(layer_types=[FULL, FULL], sliding_window=8)) == {FULL: None}
    assert windows(plain(layer_types=[SLIDING, FULL], sliding_window=None)) == {FULL: None, SLIDING: None}


# Context.


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (plain(max_position_embeddings=128), 128),
        (plain(n_positions=64), 64),
        (plain(max_seq_len=32), 32),
        (plain(max_position_embeddings=None, n_positions=64), 64),
        (plain(max_position_embeddings=128, n_positions=64), 128),
        (plain(), None),
        (plain(max_position_embeddings=None), None),
        (plain(max_position_embeddings="2048"), None),
    ],
)
def test_context(config: Any, size: int | None) -> None:
    assert context(config) == size


@pytest.mark.parametrize(
    ("name", "size"), [("Llama", 2048), ("GPT2", 1024), ("GPTJ", 2048), ("Mpt", 2048), ("Bloom", None)]
)
def test_context_of_published_configs(name: str, size: int | None) -> None:
    assert context(getattr(transformers, f"{name}Config")()) == size


# Where rotary frequencies turn.


def test_frequencies_that_stay() -> None:
    for family, (prefix, infix, own) in FAMILIES.items():
        made = getattr(transformers, f"{prefix}{infix}Config")(**own)
        assert turning_point(made) == (None, False), family
    for kind, more in (("linear", {}), ("yarn", {}), ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0})):
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 512, **more}
        assert turning_point(config_of("Llama", rope_parameters=rope, max_position_embeddings=1024)) == (None, False)
    assert turning_point(plain(rope_parameters=None)) == (None, False)
    assert turning_point(plain(rope_parameters={})) == (None, False)


def test_longrope_turns_once_at_the_original_context() -> None:
    rope = {"rope_type": "longrope", "factor": 4.0, **FACTORS}
    inside = config_of("Llama", rope_parameters=rope | {"original_max_position_embeddings": 512})
    assert turning_point(inside) == (512, False)
    outside = config_of(
        "Phi3", rope_parameters=rope, original_max_position_embeddings=16, max_position_embeddings=64, pad_token_id=None
    )
    assert turning_point(outside) == (16, False)
    bare = plain(
        rope_parameters={"rope_type": "longrope"}, original_max_position_embeddings=16, max_position_embeddings=64
    )
    assert turning_point(bare) == (16, False)


def test_dynamic_scaling_turns_at_the_context_and_goes_on() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert turning_point(config_of("Llama", rope_parameters=rope, max_position_embeddings=96)) == (96, True)
    for original in (48, 192):  # the library reads no other size for this kind
        given = rope | {"original_max_position_embeddings": original}
        assert turning_point(config_of("Llama", rope_parameters=given, max_position_embeddings=96)) == (96, True)


@pytest.mark.parametrize("order", [(FULL, SLIDING), (SLIDING, FULL)])
def test_frequencies_per_layer_type(order: tuple[str, str]) -> None:
    kinds: dict[str, Any] = {
        FULL: {"rope_type": "longrope", "original_max_position_embeddings": 24},
        SLIDING: {"rope_type": "default"},
    }
    assert turning_point(plain(rope_parameters={kind: kinds[kind] for kind in order})) == (24, False)
    with_none = {order[0]: None, order[1]: kinds[FULL]}  # layers without rotary positions
    assert turning_point(plain(rope_parameters=with_none)) == (24, False)


# Refusals.


def refusal(config: Any, has_positions: bool = True, stateful: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        refuse_by_config("some_family", config, has_positions, stateful)
    message = str(caught.value)
    assert "'some_family'" in message and "use a trunk" in message and "\n" not in message
    return message


def test_no_explicit_positions() -> None:
    assert "positions" in refusal(plain(), has_positions=False)
    assert "ALiBi" in refusal(config_of("Falcon", alibi=True))
    local = transformers.GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]])
    assert "local" in refusal(local)
    assert "local" not in refusal(config_of("Falcon", alibi=True))


def test_a_running_state() -> None:
    assert "running state" in refusal(plain(), stateful=True)
    assert "running state" in refusal(transformers.Qwen3NextConfig(), stateful=True)


def test_an_encoder_decoder() -> None:
    assert "encoder-decoder" in refusal(plain(is_encoder_decoder=True))
    assert "encoder-decoder" in refusal(transformers.T5Config())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Gemma3", ["vision_config"]),
        ("Gemma3n", ["vision_config", "audio_config"]),
        ("Qwen2VL", ["vision_config"]),
        ("Llava", ["vision_config"]),
        ("Qwen2Audio", ["audio_config"]),
        ("Musicgen", ["audio_encoder"]),
        ("Git", ["vision_config"]),  # the language model's own config has it
        ("Fuyu", ["text_config"]),
        ("Qwen2_5Omni", ["thinker_config", "talker_config", "token2wav_config"]),
        ("Llama", []),
        ("Gemma3Text", []),
        ("Mpt", []),  # its attention has a config of its own
        ("Dbrx", []),
    ],
)
def test_more_than_a_language_model(name: str, parts: list[str]) -> None:
    config = getattr(transformers, f"{name}Config")()
    assert set(other_parts(config)) == set(parts)
    if parts and not config.is_encoder_decoder:
        with pytest.raises(UserError, match=f"'some_family' is more than .*{parts[0]}.*give its text model"):
            refuse_by_config("some_family", config)


def test_attentions_that_take_no_mask() -> None:
    for name in (None, "sdpa", "eager", {"text_config": "sdpa"}):
        refuse_attention(name)
        refuse_by_config("some_family", plain(_attn_implementation=name))
    for name in ("flash_attention_2", "flex_attention", "paged|sdpa"):
        with pytest.raises(UserError, match="give sdpa or eager"):
            refuse_by_config("some_family", plain(_attn_implementation=name))


@pytest.mark.parametrize(
    "config",
    [
        plain(),
        plain(alibi=False, attention_layers=None, layer_types=None),
        plain(attention_layers=["global", "global"]),
        plain(layer_types=[FULL, SLIDING]),
        config_of("Falcon", alibi=False),
        transformers.GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]]),
    ],
)
def test_what_is_not_refused(config: Any) -> None:
    refuse_by_config("some_family", config, True)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (plain(layer_types=["conv", FULL]), "conv"),
        (plain(layer_types=[FULL, "linear_attention", "conv", "conv"]), "conv, linear_attention"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (transformers.Llama4TextConfig(), "chunked_attention"),  # its chunks are thousands of tokens
    ],
)
def test_layers_that_can_not_roll_back_are_named(config: Any, kinds: str) -> None:
    assert f"layers of type {kinds}, which" in refusal(config)
