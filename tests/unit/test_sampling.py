"""Laws and draws: equal to the library's own warpers, uniform, keyed by what they are for, never of probability 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from medusa.errors import UserError
from medusa.lawkit import Constant
from medusa.laws import Laws
from medusa.sampling import (
    ACCEPT,
    DRAFT,
    TOKEN,
    Chance,
    HashDraws,
    Key,
    SamplingParams,
    draw,
    to_probs,
)

V = 33
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
LAST = 1 - 2**-53  # the largest number that HashDraws can give


def logits_of(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def library_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What `generate(do_sample=True)` samples from."""
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_h:
        warpers.append(TopHLogitsWarper(params.top_h))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    if params.epsilon_cutoff:
        warpers.append(EpsilonLogitsWarper(params.epsilon_cutoff))
    if params.eta_cutoff:
        warpers.append(EtaLogitsWarper(params.eta_cutoff))
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, V, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.99])
def test_laws_equal_the_librarys(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(1, 4, V)
    expected = library_law(logits[0], params)
    torch.testing.assert_close(to_probs(logits, [params])[0], expected, rtol=1e-12, atol=0)


def is_the_librarys(logits: torch.Tensor, params: SamplingParams) -> None:
    law, expected = to_probs(logits[None], [params])[0], library_law(logits, params)
    torch.testing.assert_close(law, expected, rtol=1e-12, atol=0)
    assert torch.equal(law > 0, expected > 0)  # what is filtered out has probability 0, and nothing else has


FILTERS: dict[str, list[float]] = {
    "top_h": [0.01, 0.3, 0.8, 0.95],
    "top_k": [1, 4, V],
    "top_p": [0.2, 0.9],
    "min_p": [0.05, 0.5],
    "typical_p": [1e-6, 0.2, 0.9, 0.999],
    "epsilon_cutoff": [1e-4, 0.03, 0.2, 0.99],
    "eta_cutoff": [1e-4, 0.03, 0.2, 0.99],
}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FILTERS for value in FILTERS[name]])
def test_each_filter_equals_the_librarys(name: str, value: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **{name: value})
    for vocabulary in (2, V, 150):  # top-h looks at 100 tokens
        for scale in (0.05, 2.0, 10.0):  # near uniform: high entropy; near one-hot: low
            is_the_librarys(logits_of(4, vocabulary, scale=scale), params)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_filters_together_act_in_the_librarys_order(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FILTERS)), unique=True, min_size=2))
    chosen = {name: data.draw(st.sampled_from(FILTERS[name])) for name in names}
    logits = logits_of(3, V, seed=data.draw(st.integers(0, 999)))
    forbidden = torch.rand(3, V, generator=torch.Generator().manual_seed(0)) < data.draw(st.sampled_from([0, 0.5]))
    logits[..., 1:] = logits[..., 1:].masked_fill(forbidden[..., 1:], -torch.inf)  # by a processor, before
    is_the_librarys(logits, SamplingParams(temperature=data.draw(st.sampled_from([0.7, 1.0])), **chosen))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FILTERS for value in FILTERS[name]])
def test_ties_are_resolved_as_the_library_resolves_them(name: str, value: float, temperature: float) -> None:
    # whole numbers: their differences are exact, so that both see the very same ties
    params = SamplingParams(temperature=temperature, **{name: value})
    is_the_librarys(torch.zeros(1, V).double(), params)
    is_the_librarys(logits_of(6, V, scale=1.5).round(), params)
    is_the_librarys(logits_of(2, 150, scale=1.5).round(), params)


@pytest.mark.parametrize(
    ("law", "params", "kept"),
    [
        ([0.25, 0.25, 0.25, 0.25], {"top_h": 0.5}, 2),  # two terms of four are half of the entropy
        ([0.5, 0.25, 0.125, 0.125], {"typical_p": 0.25}, 1),  # entropy 1.75 bits: the second is the most typical
        ([0.5, 0.25, 0.125, 0.125], {"typical_p": 0.25 + 1e-9}, 2),
        ([0.5, 0.25, 0.25], {"epsilon_cutoff": 0.25}, 3),
        ([0.5, 0.25, 0.25], {"epsilon_cutoff": 0.25 + 1e-9}, 1),
        ([0.8 - 1e-9, 0.2 + 1e-9], {"eta_cutoff": 0.2}, 1),  # 0.2 in fp32 is 0.2 + 3e-9
        ([0.8 - 5e-9, 0.2 + 5e-9], {"eta_cutoff": 0.2}, 2),
    ],
)
def test_filters_at_their_edges(law: list[float], params: dict[str, float], kept: int) -> None:
    logits = torch.tensor([law], dtype=torch.float64).log()
    logits -= logits.amax()
    is_the_librarys(logits, SamplingParams(temperature=1.0, **params))
    assert (to_probs(logits[None], [SamplingParams(temperature=1.0, **params)]) > 0).sum() == kept


def test_typical_p_of_a_mass_that_rounding_never_reaches() -> None:
    logits = logits_of(20, V)
    law = to_probs(logits[None], [SamplingParams(temperature=1.0, typical_p=1 - 2**-53)])[0]
    torch.testing.assert_close(law, logits.softmax(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("vocabulary", [2, V, 150])
def test_top_h_1_keeps_the_hundred_most_likely(vocabulary: int) -> None:
    logits = logits_of(4, vocabulary)
    law = to_probs(logits[None], [SamplingParams(temperature=1.0, top_h=1.0)])[0]
    torch.testing.assert_close(law, library_law(logits, SamplingParams(temperature=1.0, top_k=100)))
    assert ((law > 0).sum(-1) == min(vocabulary, 100)).all()


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_each_filter_stands_near_one_hot_laws(name: str) -> None:
    # every probability but one underflows: entropy 0, logarithms of 0
    for logits in (torch.tensor([[[1e4, 0.0, -1e4]]]), torch.tensor([[[-torch.inf, 3.0, -torch.inf]]])):
        for value in FILTERS[name]:
            law = to_probs(logits, [SamplingParams(temperature=1.0, **{name: value})])
            assert torch.equal(law, torch.nn.functional.one_hot(logits.argmax(-1), 3).float())


def test_rows_that_differ_in_any_filter_keep_their_own_laws() -> None:
    params = [SamplingParams(temperature=1.0, seed=5)]
    params += [SamplingParams(temperature=1.0, seed=6, **{name: values[1]}) for name, values in FILTERS.items()]
    logits = logits_of(1, 1, V).expand(len(params), -1, -1)
    laws = to_probs(logits, params)
    for row, param in enumerate(params):
        for other in params[:row]:  # in pairs: two rows alike in all but one filter are not alike
            pair = to_probs(logits[:2], [param, other])
            assert torch.equal(pair[0], laws[row]) and not torch.equal(pair[0], pair[1])


def test_top_p_at_its_edges() -> None:
    # the smallest set whose mass reaches p: of four equal tokens, two reach a half exactly, three more than that
    for top_p, kept in ((0.5, 2), (0.5 + 1e-9, 3), (1e-17, 1), (1 - 1e-17, 4)):
        law = to_probs(torch.zeros(1, 1, 4).double(), [SamplingParams(temperature=1.0, top_p=top_p)])
        assert (law > 0).sum() == kept and law.sum() == 1


def test_temperature_0_is_one_hot() -> None:
    logits = logits_of(2, 3, V)
    laws = to_probs(logits, [SamplingParams(), SamplingParams(top_k=5, top_p=0.5, min_p=0.2)])
    assert torch.equal(laws, torch.nn.functional.one_hot(logits.argmax(-1), V).double())


def test_temperature_0_is_the_limit() -> None:
    # 1e-310 overflows any logit it divides: the limit, not a NaN
    logits = logits_of(1, 3, V)
    for temperature in (1e-3, 1e-30, 1e-310):
        law = to_probs(logits, [SamplingParams(temperature=temperature)])
        torch.testing.assert_close(law, to_probs(logits, [SamplingParams()]))


def test_every_row_has_its_own_params() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=1.5, top_k=3)]
    logits = logits_of(3, 2, V)
    together = to_probs(logits, params)
    for row, param in enumerate(params):
        assert torch.equal(together[row], to_probs(logits[row : row + 1], [param])[0])
    assert (together[2] > 0).sum(-1).tolist() == [3, 3]


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(2, 2, V)
    before = logits.clone()
    to_probs(logits, [SamplingParams(), SamplingParams(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_trunk_is_sampled_as_the_library_samples_it(dtype: torch.dtype) -> None:
    # generate casts its logits to fp32 first; a law in bf16 is off by up to 1/256, its cumulative sums by more
    params = SamplingParams(temperature=0.9, top_p=0.97)
    logits = logits_of(1, 4, 4096, scale=1.0).to(dtype)
    law = to_probs(logits, [params])[0]
    torch.testing.assert_close(law.float(), library_law(logits[0].float(), params), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("top_h", -0.1),
        ("top_h", 1.1),
        ("typical_p", 0.0),
        ("typical_p", 1.1),
        ("epsilon_cutoff", -0.1),
        ("epsilon_cutoff", 1.0),
        ("eta_cutoff", -0.1),
        ("eta_cutoff", 1.0),
        ("eta_cutoff", float("nan")),
    ],
)
def test_params_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"{name}={value}"):
        SamplingParams(**{name: value})


def uniforms(seeds: list[int], positions: list[list[int]], purpose: int = TOKEN, index: int = 0) -> torch.Tensor:
    return HashDraws().uniform(Key(torch.tensor(seeds), torch.tensor(positions), purpose, index))


def test_draws_depend_on_seed_position_purpose_and_index_alone() -> None:
    together = uniforms([3, 4, 3], [[0, 1, 2], [0, 1, 2], [2, 1, 0]])
    assert together.dtype == torch.float64
    assert torch.equal(together[0], uniforms([3], [[0, 1, 2]])[0])
    assert torch.equal(together[2], together[0].flip(0))
    assert len(set(together[:2].flatten().tolist())) == 6
    every = [
        uniforms([3], [list(range(50))], purpose, index) for purpose in (TOKEN, DRAFT, ACCEPT) for index in range(60)
    ]
    assert torch.stack(every).unique().numel() == 3 * 60 * 50


def test_few_numbers_are_the_same_as_many() -> None:
    seeds = [0, 1, 2**63 - 1, -(2**63), -5]
    positions = [[0, 1, 7, 7, 2**40]] * len(seeds)
    for purpose, index in ((TOKEN, 0), (DRAFT, 3), (ACCEPT, 1000)):
        many = uniforms(seeds, [row * 20 for row in positions], purpose, index)  # over FEW: in tensors
        assert torch.equal(uniforms(seeds, positions, purpose, index), many[:, :5])


def test_purposes_and_indices_are_independent() -> None:
    seeds, positions = list(range(200)), [list(range(100))] * 200
    one = uniforms(seeds, positions, DRAFT, 0).flatten()
    for purpose, index in ((DRAFT, 1), (ACCEPT, 0), (TOKEN, 0)):
        other = uniforms(seeds, positions, purpose, index).flatten()
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 0.025  # 3.5 standard errors


def chance_of(params: list[SamplingParams], number: float | torch.Tensor | None = None) -> Chance:
    draws = HashDraws() if number is None else Constant(number)
    return Chance(params, [5] * len(params), draws, "cpu")


def test_chance_keys_by_the_position_after_the_node() -> None:
    chance = Chance([SamplingParams(temperature=1.0, seed=7)], [5], HashDraws(), "cpu")
    law, depths = torch.full((1, 3, 50), 0.02).double(), torch.tensor([[0, 1, 1]])
    token = chance.categorical(law, depths, DRAFT, 2)
    assert torch.equal(token, draw(law, uniforms([7], [[5, 6, 6]], DRAFT, 2)))
    assert token[0, 1] == token[0, 2]  # nodes of one position share their number
    said = chance.bernoulli(torch.tensor([[0.5, 0.5, 1.0]]).double(), depths, ACCEPT)
    assert said.tolist() == [[*(uniforms([7], [[5, 6]], ACCEPT)[0] < 0.5).tolist(), True]]


def test_bernoulli_is_strict_at_its_ends() -> None:
    probs, depths = torch.tensor([[0.0, 1.0]]).double(), torch.zeros(1, 2, dtype=torch.long)
    for number in (0.0, LAST):
        chance = chance_of([SamplingParams(temperature=1.0)], number)
        assert chance.bernoulli(probs, depths, ACCEPT).tolist() == [[False, True]]


def test_a_law_of_zeros_gives_some_token() -> None:
    for number in (0.0, LAST):
        assert 0 <= draw(torch.zeros(1, 1, 4), torch.full((1, 1), number).double()).item() < 4


def splitmix(z: int) -> int:
    """The finaliser of splitmix64, in whole numbers."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, -3])
def test_draws_are_the_same_for_ever(seed: int) -> None:
    # a noted seed must give the same text tomorrow, and on any device
    for position in (0, 5, 70_000):
        state = splitmix((seed & MASK) * GOLDEN + TOKEN & MASK)
        bits = splitmix(state + (position + 1) * GOLDEN & MASK)
        assert uniforms([seed], [[position]]).item() == (bits >> 11) / 2**53


@pytest.mark.parametrize("seeds", [range(200), range(-100, 100), range(0, 200 << 32, 1 << 32)])
def test_draws_are_uniform_and_independent(seeds: range) -> None:
    u = uniforms(list(seeds), [list(range(200))] * len(seeds))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.005  # 3.5 standard errors of 40,000 numbers
    counts = torch.histc(u, bins=50, min=0, max=1)
    assert ((counts - 800) ** 2 / 800).sum() < 95  # chi-square of 49 degrees: 1 in 10,000
    for shifted in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):  # neighbouring positions, neighbouring seeds
        pair = torch.stack([each.flatten() for each in shifted])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.02


def test_largest_and_smallest_seeds() -> None:
    u = uniforms([2**63 - 1, -(2**63)], [[0, 1], [0, 1]])
    assert u.unique().numel() == 4


def test_a_seed_beyond_64_bits_is_named() -> None:
    with pytest.raises(UserError, match=str(2**63)):
        SamplingParams(temperature=1.0, seed=2**63)


def test_draw_inverts_the_cumulative_law() -> None:
    law = torch.tensor([[[0.25, 0.0, 0.5, 0.25]]]).double()
    for u, token in ((0.0, 0), (0.249, 0), (0.25, 2), (0.5, 2), (0.749, 2), (0.75, 3), (LAST, 3)):
        assert draw(law, torch.tensor([[u]]).double()).item() == token


def test_probability_0_is_never_drawn() -> None:
    laws = torch.tensor([[0, 0, 1.0, 0], [0, 0.5, 0, 0.5], [0.3, 0.7, 0, 0], [0, 0.1, 0.2, 0]])[None]
    for dtype in (torch.float32, torch.float64):
        law = laws.to(dtype)
        for u in (0.0, 1e-300, 2**-53, 0.5, 1 - 2**-52, LAST):
            token = draw(law, torch.full((1, 4), u, dtype=torch.float64))
            assert (law.gather(-1, token[..., None]) > 0).all(), (u, token)


def test_a_law_that_rounding_left_short_is_drawn_from_to_its_end() -> None:
    law = torch.full((1, 1, 10), 0.1).double() * 0.999
    assert draw(law, torch.tensor([[LAST]]).double()).item() == 9


def test_choose_without_uniforms_is_greedy() -> None:
    laws = to_probs(logits_of(2, 3, V), [SamplingParams()] * 2)
    assert torch.equal(Laws.given(laws).choice_BN, laws.argmax(-1))
    greedy_row = Laws.given(laws, None, chance_of([SamplingParams(), SamplingParams(temperature=1.0)]))
    assert torch.equal(greedy_row.choice_BN, laws.argmax(-1))
    u = uniforms([0, 1], [[0, 1, 2]] * 2)
    assert torch.equal(draw(laws, u), laws.argmax(-1))  # whatever the draw: a greedy row in a sampling batch
