"""The EAGLE layer: its start, the cache of pairs, and that unrolling along a text is drafting along it."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa.eagle import EagleConfig, EagleLayer, fused_layers
from medusa.testing import random_eagle, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk, TrunkOutput

FAMILIES = ["llama", "gpt2", "mistral", "gemma3"]  # rotary, learned positions, windows, windows in some layers
CONFIGS = {"1": EagleConfig(1), "3": EagleConfig(3), "1 of 40": EagleConfig(1, 40), "3 of 40": EagleConfig(3, 40)}
TREES = {
    "chain": Topology.chain(4),
    "tree": Topology.full([3, 2, 1]),
    "odd": Topology.from_paths([[1], [0], [0, 2], [0, 0], [0, 0, 0], [1, 0], [0, 2, 1]]),
}
TEXTS = [[3], [0, 17, 0, 5], [64, 1, 2, 3, 0, 0, 9, 40], [5, 5, 0, 8, 21, 33, 60, 2, 2, 1, 7]]
CLOSE: Any = {"rtol": 1e-10, "atol": 1e-10}


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


@cache
def layer_of(family: str, config: str) -> EagleLayer:
    return random_eagle(trunk_of(family), CONFIGS[config])


def read(layer: EagleLayer, text: list[int]) -> TrunkOutput:
    return layer.trunk.forward(torch.tensor([text]), layers=layer.layers)


# The layer.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_layer_of_version_1_guesses_as_the_trunk_did_one_token_before(family: str) -> None:
    layer = EagleLayer(EagleConfig(1), trunk_of(family))
    output = read(layer, TEXTS[3])
    state = layer.unroll(torch.tensor([TEXTS[3]]), layer.features(output), 1)[0]
    assert torch.equal(layer.logits(state), output.logits[:, :-1])


def test_a_new_layer_of_version_3_starts_from_the_last_state_it_fuses_and_the_trunks_projection() -> None:
    trunk = trunk_of("llama")
    layer = EagleLayer(EagleConfig(3, layers=(1, 2)), trunk)
    output = read(layer, TEXTS[3])
    state = layer.unroll(torch.tensor([TEXTS[3]]), layer.features(output), 2)
    assert torch.equal(state[0], output.hidden[:, :-1])  # state 2 of 2 is the last one
    assert torch.equal(state[1][:, 1:], state[0][:, :-1])
    own = torch.nn.functional.rms_norm(state[0], state[0].shape[-1:], eps=1e-6)
    torch.testing.assert_close(layer.logits(state[0]), trunk.project(own), **CLOSE)


def test_it_starts_the_same_each_time_whatever_torch_drew_before() -> None:
    first = EagleLayer(EagleConfig(3), trunk_of("llama")).state_dict()
    torch.rand(7)
    again = EagleLayer(EagleConfig(3), trunk_of("llama")).state_dict()
    other = EagleLayer(EagleConfig(3), trunk_of("llama"), seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_trunk_is_neither_registered_nor_saved() -> None:
    layer = layer_of("llama", "1")
    mine = {id(parameter) for parameter in layer.parameters()}
    assert mine.isdisjoint(map(id, trunk_of("llama").model.parameters()))
    assert all(name.startswith("body.") for name in layer.state_dict())


@pytest.mark.parametrize(
    ("total", "layers"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 3, 6)), (7, (2, 3, 4)), (32, (2, 16, 29))]
)
def test_which_layers_are_fused(total: int, layers: tuple[int, ...]) -> None:
    assert fused_layers(EagleConfig(3), total) == layers
    assert fused_layers(EagleConfig(1), total) == ()


def test_features_are_the_states_in_their_order() -> None:
    layer = random_eagle(trunk_of("llama"), EagleConfig(3, layers=(2, 1)))
    output = read(layer, TEXTS[2])
    first, second = trunk_of("llama").forward(torch.tensor([TEXTS[2]]), layers=(1, 2)).states
    assert torch.equal(layer.features(output), torch.cat([second, first], -1))
    with pytest.raises(AssertionError, match="not asked"):
        layer.features(trunk_of("llama").forward(torch.tensor([TEXTS[2]])))


def test_columns_and_tokens_of_a_reduced_vocabulary() -> None:
    layer = layer_of("llama", "3 of 40")
    assert layer.draft_ids is not None and layer.choices == 40
    columns = torch.arange(40)
    assert torch.equal(layer.columns(layer.tokens(columns)), columns)
    outside = sorted(set(range(65)) - set(layer.draft_ids.tolist()))
    assert layer.columns(torch.tensor(outside)).tolist() == [-1] * 25
    whole = EagleLayer(EagleConfig(1), trunk_of("llama"))
    part = EagleLayer(EagleConfig(1, 40), trunk_of("llama"), layer.draft_ids)
    state = torch.randn(2, 32, dtype=torch.float64)
    torch.testing.assert_close(part.logits(state), whole.logits(state)[:, layer.draft_ids], **CLOSE)
    assert torch.equal(trunk_of("llama").project(state, *layer.trunk_rows()), part.logits(state))


def test_masters_of_another_precision_compute_in_the_trunks() -> None:
    trunk = Trunk(tiny_model("llama").bfloat16())
    layer = EagleLayer(EagleConfig(3), trunk, dtype=torch.float32)
    ids = torch.tensor([TEXTS[3]])
    state = layer.unroll(ids, layer.features(trunk.forward(ids, layers=layer.layers)), 2)
    assert {each.dtype for each in state} == {layer.logits(state[0]).dtype} == {torch.bfloat16}
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
    layer.logits(state[1]).float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


# Unrolling is drafting.


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(FAMILIES), st.sampled_from(list(CONFIGS)), st.integers(1, 4))
def test_unrolling_along_a_text_is_drafting_along_it(seed: int, family: str, config: str, depth: int) -> None:
    rng, layer = random.Random(seed), layer_of(family, config)
    text = [rng.randrange(65) for _ in range(rng.randrange(depth + 1, 14))]
    features = layer.features(read(layer, text))
    states = layer.unroll(torch.tensor([text]), features, depth)
    for root in range(1, len(text)):  # true pairs 0 .. root-1, then the text's own tokens as drafts
        along = drafted(layer, text, features, root, min(depth, len(text) - root))
        for level, state in enumerate(along):
            torch.testing.assert_close(states[level][0, root - 1 + level], state, **CLOSE)


def drafted(layer: EagleLayer, text: list[int], features: Tensor, root: int, depth: int) -> list[Tensor]:
    """States of a chain that is the text itself, level by level: one pair read at a time."""
    pairs, states = layer.new_cache(1), []
    pairs.reserve(root)
    hidden = layer.fuse(features[:, :root])
    state = layer.read(torch.tensor([text[1 : root + 1]]), hidden, torch.arange(root)[None], None, pairs)[:, -1:]
    for level in range(depth):
        states.append(state[0, 0])
        pairs.set_lengths([root + level])
        pairs.reserve(1)
        if level + 1 < depth:
            at = root + level
            state = layer.read(torch.tensor([[text[at + 1]]]), state, torch.tensor([[at]]), None, pairs)
    return states


@pytest.mark.parametrize("config", ["1", "3"])
def test_packed_rows_unroll_as_their_texts_alone(config: str) -> None:
    layer, texts = layer_of("llama", config), [TEXTS[3], TEXTS[2], TEXTS[3][2:]]
    alone = [layer.features(read(layer, text)) for text in texts]
    segments = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    packed = layer.unroll(torch.tensor([[*texts[0], *texts[1], *texts[2]]]), torch.cat(alone, 1), 3, segments)
    begin = 0
    for text, features in zip(texts, alone, strict=True):
        own = layer.unroll(torch.tensor([text]), features, 3)
        for level in range(3):
            mine = packed[level][0, begin + level : begin + len(text) - 1]
            # rotary positions are relative: equal but for rounding
            torch.testing.assert_close(mine, own[level][0, level:], rtol=1e-5, atol=1e-5)
        begin += len(text)


@pytest.mark.parametrize("config", ["1", "3"])
def test_no_pass_sees_what_follows(config: str) -> None:
    layer = layer_of("llama", config)
    ids = torch.tensor([TEXTS[3]])
    features = layer.features(read(layer, TEXTS[3])).requires_grad_()
    for level, state in enumerate(layer.unroll(ids, features, 4)):
        (grad,) = torch.autograd.grad(state[0, 7].sum(), features, retain_graph=True)
        seen = grad[0].abs().sum(-1) > 0
        assert seen.tolist() == [at <= 7 - level for at in range(len(TEXTS[3]))]
