"""Rows that join a batch under way, pasts that are not read again, watchers, log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.decoding import Decoder, Request, Step, decode, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.sampling import SamplingParams
from medusa.testing import ScriptedDrafter, memorising_heads, plain_greedy, random_heads, recompute, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk, TrunkOutput

from .drafting import UNTRAINED, untrained

FAMILIES = ["llama", "gpt2", "gemma3"]  # rotary, learned positions, sliding windows
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(65) for _ in range(size)] for size in (3, 9, 1, 14, 6, 2, 11, 5)]
LIMITS = (20, 3, 31, 7, 12, 1, 25, 9)
DRAFTERS = ("none", "heads", "adversary", *UNTRAINED)


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


@cache
def text_of(family: str, row: int) -> list[int]:
    return plain_greedy(trunk_of(family), PROMPTS[row], 32)


@cache
def drafter_of(family: str, name: str) -> Drafter:
    if name == "none":
        return NullDrafter()
    if name in UNTRAINED:
        return untrained(trunk_of(family), name)
    if name == "adversary":
        scripts = {tuple(prompt): text_of(family, row) for row, prompt in enumerate(PROMPTS)}
        return ScriptedDrafter(scripts, honesty=0.7, size=10)
    known = [PROMPTS[row] + text_of(family, row) for row in (0, 2, 6)]
    return MedusaDrafter(
        memorising_heads(trunk_of(family), HeadsConfig("hydra", num=4), known), Topology.full([3, 2, 1])
    )


def collect(steps: Sequence[Step], rows: int) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(rows)]
    for step in steps:
        for row, tokens in step.tokens.items():
            ids[row] += tokens
    return ids


# Admission.


@pytest.mark.parametrize(
    ("family", "name", "most"),  # every pair of two of them
    [
        (FAMILIES[(place + shift) % 3], name, most)
        for place, name in enumerate(DRAFTERS)
        for shift, most in enumerate((1, 3, 8))
    ],
)
def test_waiting_requests_are_admitted_as_rows_end(family: str, name: str, most: int) -> None:
    requests = [Request(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    steps = list(decode(trunk_of(family), drafter_of(family, name), requests, most=most))
    assert collect(steps, 8) == [text_of(family, row)[:limit] for row, limit in enumerate(LIMITS)]
    assert max(len(step.tokens) for step in steps) <= most


@pytest.mark.parametrize("name", DRAFTERS)
def test_requests_join_at_random_moments(name: str) -> None:
    """Slots are reused, appended, closed up; rows leave from outside; every row equals its solo run."""
    for seed in range(4):
        rng = random.Random(f"{name} {seed}")
        decoder, expected = Decoder(trunk_of("llama"), drafter_of("llama", name)), {}
        steps, waiting, ended = [], list(range(8)), set()
        while waiting or decoder.live:
            if waiting and (not decoder.live or rng.random() < 0.5):
                joining = [waiting.pop() for _ in range(rng.randint(1, min(3, len(waiting))))]
                for place, row in enumerate(joining):
                    expected[decoder.admitted + place] = row
                steps.append(decoder.admit([Request(PROMPTS[row], LIMITS[row]) for row in joining]))
            elif decoder.live and rng.random() < 0.1:
                ended.add(rng.choice(sorted(decoder.live)))
                decoder.finish(max(ended & decoder.live, default=-1))
            else:
                steps.append(decoder.step())
        for number, ids in enumerate(collect(steps, 8)):
            text = text_of("llama", expected[number])[: LIMITS[expected[number]]]
            assert ids == (text[: len(ids)] if number in ended else text)


def test_a_free_slot_is_taken_before_the_batch_grows() -> None:
    decoder = Decoder(trunk_of("llama"), NullDrafter())
    decoder.admit([Request(PROMPTS[row], 30) for row in (0, 1, 3)])
    decoder.finish(1)
    assert decoder.slots == [0, None, 2] and decoder.cache.lengths[1] == 0
    decoder.admit([Request(PROMPTS[4], 30), Request(PROMPTS[6], 30)])
    assert decoder.slots == [0, 3, 2, 4]
    decoder.finish(99)
    assert decoder.live == {0, 2, 3, 4}


def test_a_free_slot_holds_nobody_back() -> None:
    """What a row left behind neither grows nor stretches the others' view."""
    decoder = Decoder(trunk_of("llama"), NullDrafter())
    decoder.admit([Request(PROMPTS[3], 60), Request(PROMPTS[2], 60), Request(PROMPTS[5], 60)])
    decoder.finish(0)
    for _ in range(5):
        decoder.step()
    assert decoder.cache.lengths == [0, len(PROMPTS[2]) + 5, len(PROMPTS[5]) + 5]


@pytest.mark.parametrize("name", ["heads", *UNTRAINED])
def test_sampled_rows_that_join_equal_their_solo_runs(name: str) -> None:
    params = [SamplingParams(temperature=0.5 + row / 4, top_k=20 * (row % 2), seed=row) for row in range(6)]
    requests = [Request(PROMPTS[row], LIMITS[row], sampling=params[row]) for row in range(6)]
    if name == "heads":  # those that know texts by heart have laws with ties, which top_k cuts by their last bit
        heads = random_heads(trunk_of("llama"), HeadsConfig("hydra", num=4), scale=0.1)
        drafter: Drafter = MedusaDrafter(heads, Topology.full([3, 2, 1]))
    else:
        drafter = drafter_of("llama", name)
    alone = [generate_ids(trunk_of("llama"), drafter, [request])[0] for request in requests]
    for most in (3, 6):
        assert generate_ids(trunk_of("llama"), drafter, requests, most=most) == alone


# Pasts.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_past_is_not_read_again_and_changes_nothing(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, forward = trunk_of(family), trunk_of(family).forward
    read: list[int] = []

    def counted(ids_BT: Tensor, *args: Any, **options: Any) -> TrunkOutput:
        read.append(ids_BT.shape[1])
        return forward(ids_BT, *args, **options)

    monkeypatch.setattr(trunk, "forward", counted)
    text, past = list(PROMPTS[0]), None
    for turn in (PROMPTS[1], PROMPTS[3][:5], PROMPTS[4]):
        # the script knows what follows the first prompt alone
        decoder = Decoder(trunk, NullDrafter() if past and name == "adversary" else drafter_of(family, name))
        read.clear()
        steps = [decoder.admit([Request(text, 7, past=past)])]
        assert read == [len(text) - (0 if past is None else len(past.ids))]
        while decoder.live:
            steps.append(decoder.step())
        new = collect(steps, 1)[0]
        assert new == plain_greedy(trunk, text, 7)
        past = decoder.past()
        assert list(past.ids) == [*text, *new][: len(past.ids)] and len(past.ids) >= len(text) + 6
        text = [*text, *new, *turn]


@pytest.mark.parametrize(
    ("prompt", "known"),
    [([*PROMPTS[3][:6], 1, 2], 6), (PROMPTS[3][:4], 3), ([64], 0), (PROMPTS[3], 13), ([*PROMPTS[3], 5], 14)],
)
def test_a_past_that_differs_is_cut_where_it_does(prompt: list[int], known: int) -> None:
    trunk = trunk_of("gemma3")
    first = Decoder(trunk, NullDrafter())
    first.admit([Request(PROMPTS[3], 5)])
    while first.live:
        first.step()
    past = first.past()
    assert past.known(prompt, trunk) == known
    ids = generate_ids(trunk, NullDrafter(), [Request(prompt, 6, past=past)])
    assert ids == [plain_greedy(trunk, prompt, 6)]


# Watchers.


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_watcher_sees_every_emitted_token_once_and_ends_the_row(name: str) -> None:
    text = text_of("llama", 0)
    for stop in (1, 2, 5, 11):
        seen: list[int] = []

        def watch(token: int, seen: list[int] = seen, stop: int = stop) -> bool:
            seen.append(token)
            return len(seen) == stop

        steps = list(decode(trunk_of("llama"), drafter_of("llama", name), [Request(PROMPTS[0], 20, watch=watch)]))
        assert collect(steps, 1) == [seen] == [text[:stop]]
        assert steps[-1].finished == {0: "stop"}


def test_eos_comes_before_a_watcher_and_that_before_the_limit() -> None:
    text = text_of("llama", 0)
    request = Request(PROMPTS[0], 1, watch=lambda token: True)
    assert list(decode(trunk_of("llama"), NullDrafter(), [request]))[-1].finished == {0: "stop"}
    request = Request(PROMPTS[0], 1, frozenset({text[0]}), watch=lambda token: True)
    assert list(decode(trunk_of("llama"), NullDrafter(), [request]))[-1].finished == {0: "eos"}


# Log-probabilities.


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_trunks_own(name: str, temperature: float) -> None:
    trunk = trunk_of("llama")
    sampling = SamplingParams(temperature=temperature, top_k=5, seed=1)
    requests = [
        Request(PROMPTS[0], 13, sampling=sampling, logprobs=3),
        Request(PROMPTS[1], 9, sampling=sampling),
        Request(PROMPTS[4], 17, sampling=sampling, logprobs=0),
        Request(PROMPTS[6], 6, sampling=sampling, logprobs=99),
    ]
    steps = list(decode(trunk, drafter_of("llama", name), requests, most=3))
    assert not any(1 in step.logprobs for step in steps)
    for row in (0, 2, 3):
        ids = collect(steps, 4)[row]
        found = [each for step in steps for each in step.logprobs.get(row, [])]
        prompt = PROMPTS[(0, 1, 4, 6)[row]]
        laws = recompute(trunk, prompt + ids)[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(found) == len(ids) == (13, 9, 17, 6)[row]
        for each, law, token in zip(found, laws, ids, strict=True):
            assert each.logprob == pytest.approx(float(law[token]), abs=1e-9)
            best = law.topk(min((3, 0, 0, 65)[row], 65))
            assert list(each.top) == best.indices.tolist()
            assert list(each.top.values()) == pytest.approx(best.values.tolist(), abs=1e-9)


def test_a_request_that_can_not_be_served_changes_nothing() -> None:
    decoder = Decoder(trunk_of("llama"), NullDrafter())
    decoder.admit([Request(PROMPTS[0], 8)])
    with pytest.raises(UserError):
        decoder.admit([Request(PROMPTS[1], 8), Request([65], 8)])
    steps = []
    while decoder.live:
        steps.append(decoder.step())
    assert collect(steps, 1)[0] == text_of("llama", 0)[1:8] and decoder.admitted == 1
    assert torch.is_inference_mode_enabled() is False
