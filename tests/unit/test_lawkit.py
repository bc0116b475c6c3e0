"""The exact-law kit: every rule with every drafter has the trunk's law, every known mistake is caught."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.accept import AcceptRule, DeterministicRule
from medusa.broken import BROKEN
from medusa.decoding import Request, decode
from medusa.drafters.base import Drafter
from medusa.drafters.children import MODES, Drafting
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import KINDS, HeadsConfig
from medusa.lawkit import (
    LawFault,
    chi_square,
    decoder_run,
    distance,
    judge,
    ks_uniform,
    mean_accepted,
    output_law,
    trunk_law,
)
from medusa.lawtoys import ToyDrafter, ToyTrunk, examine, perturbed, random_laws
from medusa.processors import Processing
from medusa.rules import RecursiveRule, TypicalRule
from medusa.sampling import ACCEPT, TOKEN, Draws, Key, SamplingParams, to_probs
from medusa.testing import ScriptedDrafter, memorising_heads, random_heads, recompute, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

from .drafting import MODED, UNTRAINED, untrained

RULES: dict[str, AcceptRule | None] = {
    "default": None,
    "deterministic": DeterministicRule(),
    "recursive": RecursiveRule(),
}


def key(purpose: int, index: int = 0, seeds: Sequence[int] = (0,)) -> Key:
    return Key(torch.tensor(seeds), torch.zeros(len(seeds), 1, dtype=torch.long), purpose, index)


# The kit itself.


def test_an_engine_of_two_choices() -> None:
    def run(draws: Draws, seeds: list[int]) -> list[list[int]]:
        one = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).expand(len(seeds), 1, 3)
        token_B1 = draws.categorical(one, key(TOKEN, seeds=seeds))
        said_B1 = draws.bernoulli(token_B1 * 0.25, key(ACCEPT, seeds=seeds))
        return torch.cat([token_B1, said_B1.long()], 1).tolist()

    expected = {(0, 0): 0.5, (1, 0): 0.15, (1, 1): 0.05, (2, 0): 0.15, (2, 1): 0.15}
    assert distance(output_law(run), expected) < 1e-15
    assert judge(run, expected) is None
    assert judge(run, expected | {(0, 0): 0.51}) == "the law is off by 0.01"


def test_a_number_used_twice_is_the_same_number() -> None:
    def run(draws: Draws, seeds: list[int]) -> list[list[bool]]:
        half, third = (torch.full((len(seeds), 1), p, dtype=torch.float64) for p in (1 / 2, 1 / 3))
        first, again = draws.bernoulli(half, key(TOKEN, seeds=seeds)), draws.bernoulli(third, key(TOKEN, seeds=seeds))
        return torch.cat([first, again], 1).tolist()

    assert distance(output_law(run), {(True, True): 1 / 3, (True, False): 1 / 6, (False, False): 1 / 2}) < 1e-15


def test_what_is_no_probability_is_a_fault() -> None:
    def run(draws: Draws, seeds: list[int]) -> list[list[bool]]:
        return draws.bernoulli(torch.full((len(seeds), 1), torch.nan), key(TOKEN, seeds=seeds)).tolist()

    with pytest.raises(LawFault):
        output_law(run)
    assert judge(run, {(True,): 1.0}) == "a probability that is not a number"


def test_too_many_leaves_are_refused() -> None:
    trunk: Any = ToyTrunk(random_laws(5))
    with pytest.raises(UserError, match="more than 100 leaves"):
        output_law(decoder_run(trunk, NullDrafter(), [1], 4), limit=100, batch=50)


# Every rule with every drafter.


TREES = [
    (3, Topology.chain(3)),
    (3, Topology.full([2, 1])),
    (3, Topology.full([3])),  # all that there is
    (3, Topology.from_paths([[0], [1], [1, 0], [1, 1]])),
    (4, Topology.full([3])),
    (5, Topology.full([2])),
]


@pytest.mark.parametrize(
    ("mode", "vocab", "topology"),
    # an only child is drawn in both modes
    [(mode, *tree) for mode in MODES for tree in TREES if mode != "mixed" or max(tree[1].ranks) > 0],
    ids=lambda value: str(list(value.parents)) if isinstance(value, Topology) else str(value),
)
def test_drawn_children_are_lossless(mode: str, vocab: int, topology: Topology) -> None:
    for name, rule in RULES.items():
        # the deterministic rule draws at every node: too many leaves where trees are deep and drawn
        if name != "deterministic" or topology.depth == 1 or mode == "top":
            assert examine(rule, Drafting(mode, 1.4), topology=topology, vocab=vocab) == {}


@cache
def trunk_of(vocab: int) -> Trunk:
    return tiny_trunk("llama", vocab_size=vocab)


PROMPT = [1, 0]
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "filters": SamplingParams(temperature=1.7, top_k=3, top_p=0.95, min_p=0.05),
    "greedy": SamplingParams(),
}


@cache
def truth_of(trunk: Trunk, params: SamplingParams, tokens: int) -> dict[tuple[int, ...], float]:
    def next_law(text: tuple[int, ...]) -> list[float]:
        return to_probs(recompute(trunk, [*PROMPT, *text])[-1][None, None], [params])[0, 0].tolist()

    return trunk_law(next_law, tokens)


@pytest.mark.parametrize(
    ("kind", "mode", "name"),
    [
        *((kind, mode, "plain") for kind in KINDS for mode in MODES),
        *((kind, "sampled", name) for kind in KINDS for name in PARAMS if name != "plain"),
        *(("root", mode, name) for mode in MODES if mode != "sampled" for name in PARAMS if name != "plain"),
    ],
)
def test_heads_are_lossless(kind: str, mode: str, name: str) -> None:
    vocab = 4 if name == "filters" else 3
    trunk, params = trunk_of(vocab), PARAMS[name]
    heads = random_heads(trunk, HeadsConfig(kind, num=2), scale=0.2)
    truth = truth_of(trunk, params, 4)
    assert (len(truth) == 1) == (name == "greedy")
    drafter = MedusaDrafter(heads, Topology.full([2, 1]), Drafting(mode))
    for rule in (None, RecursiveRule()) if mode == "top" else (None,):
        assert judge(decoder_run(trunk, drafter, PROMPT, 4, rule, params), truth) is None
    short = truth_of(trunk, params, 3)
    assert judge(decoder_run(trunk, drafter, PROMPT, 3, DeterministicRule(), params), short) is None


def guesser(trunk: Trunk, name: str, mode: str = "sampled") -> Drafter:
    """A drafter of shallow trees, so that the leaves can be counted."""
    tree = Topology.full([2, 1])
    if name in UNTRAINED:
        return untrained(trunk, name, mode, tree)
    return MedusaDrafter(random_heads(trunk, HeadsConfig(name, num=2), scale=0.2), tree, Drafting(mode))


@pytest.mark.parametrize(
    ("name", "mode", "law"),
    [
        *((name, mode, "plain") for name, mode in MODED),
        *((name, "sampled", law) for name in UNTRAINED for law in PARAMS if law != "plain"),
    ],
)
def test_untrained_drafters_are_lossless(name: str, mode: str, law: str) -> None:
    # two steps behind the prefill: the second is drafted after any acceptance of the first
    trunk, params = trunk_of(3), PARAMS[law]
    drafter, truth = untrained(trunk, name, mode, Topology.full([2])), truth_of(trunk, params, 4)
    assert judge(decoder_run(trunk, drafter, PROMPT, 4, None, params), truth) is None


@pytest.mark.parametrize("rule", [None, RecursiveRule()], ids=["default", "recursive"])
@pytest.mark.parametrize("name", UNTRAINED)
def test_deeper_trees_of_rows_that_join_are_lossless(name: str, rule: AcceptRule | None) -> None:
    trunk, params = trunk_of(3), PARAMS["plain"]
    run = decoder_run(trunk, guesser(trunk, name, "sampled"), PROMPT, 3, rule, params, most=40)
    assert judge(run, truth_of(trunk, params, 3)) is None


PROCESSING = Processing(
    repetition_penalty=1.5, frequency_penalty=0.3, no_repeat_ngram_size=2, begin_suppress_tokens=(0,), min_new_tokens=2
)


def favours_odd_lengths(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
    return scores_1V + torch.arange(scores_1V.shape[1]) * (ids_1T.shape[1] % 2)


@cache
def processed_truth(trunk: Trunk, along: bool, eos: int, tokens: int) -> dict[tuple[int, ...], float]:
    """Plain decoding, token by token, with the penalties written out."""

    def next_law(text: tuple[int, ...]) -> list[float]:
        ids, ended = [*PROMPT, *text], eos in text
        scores = recompute(trunk, ids)[-1].clone()
        for token in range(len(scores)):
            if token in ids:
                scores[token] *= 1.5 if scores[token] < 0 else 1 / 1.5
            scores[token] -= 0.3 * text.count(token)
            seen = (ids[-1], token) in pairwise(ids)
            if seen or (token == 0 and not text) or (token == eos and len(text) < 2):
                scores[token] = -torch.inf
        if along:
            scores += torch.arange(len(scores)) * (len(ids) % 2)
        return [1.0] + [0.0] * (len(scores) - 1) if ended else scores.softmax(-1).tolist()

    law: Counter[tuple[int, ...]] = Counter()
    for text, weight in trunk_law(next_law, tokens).items():
        law[text[: text.index(eos) + 1] if eos in text else text] += weight
    return dict(law)


@pytest.mark.parametrize(
    ("kind", "mode", "along"),
    [
        (kind, mode, along)
        for mode, along in (("sampled", False), ("sampled", True), ("mixed", True), ("top", False))
        for kind in (*KINDS, *UNTRAINED)
        if kind in KINDS or (kind, mode) in MODED
    ],
)
def test_processors_inside_the_tree_are_lossless(kind: str, mode: str, along: bool) -> None:
    trunk, eos = trunk_of(4), 3
    asked = {
        "processing": PROCESSING,
        "processor": favours_odd_lengths if along else None,
        "eos": frozenset({eos}),
    }
    truth = processed_truth(trunk, along, eos, 3)
    assert len(truth) > 3 and distance(truth, processed_truth(trunk, not along, eos, 3)) > 1e-3
    drafter = guesser(trunk, kind, mode)
    for rule in (None, RecursiveRule()) if mode == "top" else (None,):
        assert judge(decoder_run(trunk, drafter, PROMPT, 3, rule, **asked), truth) is None


def test_rows_that_join_are_lossless() -> None:
    trunk, params = trunk_of(3), PARAMS["plain"]
    drafter = MedusaDrafter(random_heads(trunk, HeadsConfig("root", num=2), scale=0.2), Topology.full([2, 1]))
    assert judge(decoder_run(trunk, drafter, PROMPT, 3, None, params, most=40), truth_of(trunk, params, 3)) is None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_scripted_trees_are_lossless(seed: int, rule: str) -> None:
    # a tree of its own in every row and step, with fillers; a session draws trees from one stream: row by row
    trunk: Any = ToyTrunk(random_laws(3, seed=seed, zeros=0.2))
    drafter = ScriptedDrafter([[0, 2, 1, 0]], honesty=0.7, size=4, seed=seed)
    truth = trunk_law(lambda text: trunk.next_law((*PROMPT, *text)), 3)
    assert judge(decoder_run(trunk, drafter, PROMPT, 3, RULES[rule]), truth, batch=1, limit=2000) is None


@pytest.mark.parametrize("rule", RULES)
def test_plain_decoding_is_lossless_under_any_rule(rule: str) -> None:
    trunk, params = trunk_of(3), PARAMS["plain"]
    run = decoder_run(trunk, NullDrafter(), PROMPT, 4, RULES[rule], params)
    assert judge(run, truth_of(trunk, params, 4)) is None


def test_the_lossy_rule_is_lossy() -> None:
    assert examine(TypicalRule(), Drafting("top"))
    assert examine(TypicalRule(), Drafting("sampled"))


# Every mistake.


@pytest.mark.parametrize("name", BROKEN)
def test_every_mistake_is_caught(name: str) -> None:
    broken = BROKEN[name]
    assert examine(broken.rule, Drafting(broken.mode), broken.choose)


# Better drafts are accepted more.


@pytest.mark.parametrize(
    "topology",
    [Topology.chain(1), Topology.chain(2), Topology.full([2]), Topology.full([2, 1])],
    ids=lambda t: str(t.parents),
)
def test_acceptance_falls_as_the_draft_departs(topology: Topology) -> None:
    laws_SV = random_laws(4, seed=5)
    trunk: Any = ToyTrunk(laws_SV)
    divergence, accepted = [], []
    for strength in (0.0, 0.3, 0.6, 1.0, 1.5, 2.5):
        draft_SV = perturbed(laws_SV, strength)
        divergence.append(float((laws_SV * (laws_SV / draft_SV).log()).sum(-1).mean()))
        accepted.append(mean_accepted(trunk, ToyDrafter(draft_SV, topology), [1]))
    assert divergence == sorted(divergence) and accepted == sorted(accepted, reverse=True)
    assert len({round(value, 6) for value in accepted}) == 6
    assert divergence[0] < 1e-12 and accepted[0] == pytest.approx(topology.depth, abs=1e-12)


def test_a_single_draft_is_accepted_as_often_as_the_laws_overlap() -> None:
    laws_SV, draft_SV = random_laws(4, seed=5), random_laws(4, seed=6)
    trunk: Any = ToyTrunk(laws_SV)
    first = trunk.next_law([2])
    overlap = torch.minimum(laws_SV, draft_SV).sum(-1)
    expected = sum(p * float(overlap[2 * 4 + token]) for token, p in enumerate(first))
    assert mean_accepted(trunk, ToyDrafter(draft_SV, Topology.chain(1)), [2]) == pytest.approx(expected, abs=1e-12)


# Checks on samples.


def test_chi_square_against_known_values() -> None:
    # 5.991 and 9.210 are the 95th and 99th percentile of 2 degrees of freedom
    assert chi_square({0: 50, 1: 30, 2: 20}, [0.5, 0.3, 0.2]) == 1.0
    assert chi_square({0: 40, 1: 30, 2: 30}, [1 / 3] * 3) == pytest.approx(
        torch.exp(torch.tensor(-1.0)).item(), abs=1e-6
    )
    assert chi_square({0: 100}, [1.0, 0.0]) == 1.0
    assert chi_square({0: 99, 1: 1}, [1.0, 0.0]) == 0.0


def test_chi_square_takes_rare_tokens_together() -> None:
    law = [0.9, *[0.01] * 10]
    assert chi_square({0: 90, **dict.fromkeys(range(1, 11), 1)}, law) == 1.0
    assert chi_square({0: 100}, law) < 0.01
    few = [0.5, 0.48, 0.02]  # the rare one is due twice: counted with the rarest of the others
    assert chi_square({0: 50, 1: 48, 2: 2}, few) == 1.0


def test_p_values_of_a_right_law_are_uniform() -> None:
    rng, law = random.Random(3), [0.4, 0.3, 0.2, 0.1]
    values = [chi_square(Counter(rng.choices(range(4), law, k=400)), law) for _ in range(400)]
    assert ks_uniform(values) > 1e-3  # over 40 seeds these values are uniform themselves
    skewed = [chi_square(Counter(rng.choices(range(4), [0.46, 0.24, 0.2, 0.1], k=400)), law) for _ in range(400)]
    assert ks_uniform(skewed) < 1e-6


def test_ks_against_known_values() -> None:
    even = [(i + 0.5) / 100 for i in range(100)]
    assert ks_uniform(even) == 1.0
    assert ks_uniform([p**2 for p in even]) < 1e-4
    # Kolmogorov's law has its 95th percentile at 1.358
    count = 10_000
    shift = 1.358 / count**0.5
    assert ks_uniform([min(1.0, (i + 0.5) / count + shift) for i in range(count)]) == pytest.approx(0.05, abs=0.002)


SEEDS, EACH = 200, 250


def sampled_p_values(trunk: Trunk, drafter: Drafter, rule: AcceptRule | None) -> list[float]:
    """One p-value per seed of its 250 tokens, each turned into a uniform number by its own law, in ten cells."""
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(SEEDS)]
    texts: list[list[int]] = [[] for _ in params]
    for step in decode(trunk, drafter, [Request(PROMPT, EACH, sampling=param) for param in params], rule):
        for row, new in step.tokens.items():
            texts[row] += new
    ids_BT = torch.tensor([[*PROMPT, *text] for text in texts])
    laws_BTV = to_probs(trunk.forward(ids_BT).logits[:, len(PROMPT) - 1 : -1], params)
    tokens_BT1 = ids_BT[:, len(PROMPT) :, None]
    own_BT = laws_BTV.gather(-1, tokens_BT1)[..., 0]
    below_BT = laws_BTV.cumsum(-1).gather(-1, tokens_BT1)[..., 0] - own_BT
    within_BT = torch.rand(own_BT.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cells_BT = ((below_BT + within_BT * own_BT) * 10).long().clamp(0, 9)
    return [chi_square(Counter(cells), [0.1] * 10) for cells in cells_BT.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampled", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_thousand_tokens(kind: str, mode: str) -> None:
    trunk = tiny_trunk("llama", max_position_embeddings=512)
    text = [
        *PROMPT,
        *(token for step in decode(trunk, NullDrafter(), [Request(PROMPT, 60)]) for token in step.tokens[0]),
    ]
    heads = memorising_heads(trunk, HeadsConfig(kind, num=3), [text])
    drafter = MedusaDrafter(heads, Topology.full([3, 2, 1]), Drafting(mode))
    assert ks_uniform(sampled_p_values(trunk, drafter, None)) > 0.001
    if mode == "sampled":
        assert ks_uniform(sampled_p_values(trunk, drafter, BROKEN["no residual"].rule)) < 1e-4
