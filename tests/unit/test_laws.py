"""Processors inside the tree: each node's law is that of plain decoding, whichever rule reads it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from medusa.accept import AcceptRule
from medusa.decoding import Request, decode, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.laws import Processor
from medusa.processors import Processing
from medusa.rules import TypicalRule
from medusa.sampling import SamplingParams
from medusa.testing import ScriptedDrafter, memorising_heads, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

from .drafting import UNTRAINED, untrained

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(65) for _ in range(size)] for size in (4, 9, 1, 12)]
SOFT = SamplingParams(temperature=0.8, top_k=20, seed=11)
PROCESSING = Processing(repetition_penalty=1.7, no_repeat_ngram_size=2, frequency_penalty=0.4)


@cache
def trunk() -> Trunk:
    return tiny_trunk("llama")


class Grammar:
    """Keeps a state: it insists that each call's text is the last one's with one token more."""

    def __init__(self, prompt: Sequence[int], ends: frozenset[int] = frozenset()) -> None:
        self.text = list(prompt)
        self.prompt = len(self.text)
        self.ends = ends
        self.calls = 0

    def __call__(self, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        text = ids_1T[0].tolist()
        assert ids_1T.shape[0] == scores_1V.shape[0] == 1 and scores_1V.dtype == torch.float64
        assert text[: len(self.text)] == self.text and len(text) == self.prompt + self.calls
        assert self.ends.isdisjoint(text[self.prompt :]), "called behind an EOS"
        self.text, self.calls = text, self.calls + 1
        allowed = torch.arange(scores_1V.shape[1]) % 3 == self.calls % 3  # depends on how often it was called
        allowed[list(self.ends)] = True
        return scores_1V.masked_fill(~allowed, -torch.inf)


def plain(prompt: Sequence[int], tokens: int, processor: Processor, processing: Processing | None = None) -> list[int]:
    """Greedy decoding without a tree or a cache."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            scores_1V = trunk().model(input_ids=torch.tensor([ids])).logits[:, -1]
        ids.append(int(processor(torch.tensor([ids]), scores_1V).argmax()))
    return ids[len(prompt) :]


def drafters(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> dict[str, Drafter]:
    scripts = {tuple(prompt): list(text) for prompt, text in zip(prompts, texts, strict=True)}
    heads = heads_of(tuple((*prompt, *text) for prompt, text in scripts.items()))
    return {
        "none": NullDrafter(),
        "oracle": ScriptedDrafter(scripts, honesty=1.0, size=8),
        "adversary": ScriptedDrafter(scripts, honesty=0.6, size=10),
        "heads": MedusaDrafter(heads, Topology.full([3, 2, 1, 1])),
        **untrained_drafters(),
    }


@cache
def heads_of(known: tuple[tuple[int, ...], ...]) -> MedusaHeads:
    return memorising_heads(trunk(), HeadsConfig("root", num=4), known)


@cache
def grammatical(row: int) -> list[int]:
    """What plain decoding makes of a prompt under the grammar."""
    return plain(PROMPTS[row], 24, Grammar(PROMPTS[row]))


@cache
def untrained_drafters() -> dict[str, Drafter]:
    return {name: untrained(trunk(), name) for name in UNTRAINED}


NAMES = ("none", "oracle", "adversary", "heads", *UNTRAINED)
# Whose children are never drawn at random.
CHOSEN = ("none", "oracle", "adversary", "prompt lookup", "lookahead", "eagle 3 grown")


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_with_a_state_is_called_as_plain_decoding_calls_it(name: str) -> None:
    texts = [grammatical(row) for row in range(4)]
    for limit in (1, 2, 7, 24):
        grammars = [Grammar(prompt) for prompt in PROMPTS]
        requests = [Request(prompt, limit, processor=each) for prompt, each in zip(PROMPTS, grammars, strict=True)]
        assert generate_ids(trunk(), drafters(PROMPTS, texts)[name], requests) == [text[:limit] for text in texts]
        assert [each.calls for each in grammars] == [limit] * 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [SamplingParams(), SOFT])
def test_no_processor_is_called_behind_an_eos(name: str, sampling: SamplingParams) -> None:
    text = grammatical(0)
    ends = [frozenset({text[at]}) for at in (0, 1, 4, 9)]
    grammars = [Grammar(PROMPTS[0], each) for each in ends]
    requests = [Request(PROMPTS[0], 24, each, sampling, processor=p) for each, p in zip(ends, grammars, strict=True)]
    found = generate_ids(trunk(), drafters(PROMPTS[:1], [text])[name], requests)
    for each, grammar, ids in zip(ends, grammars, found, strict=True):
        assert grammar.calls == len(ids)
        assert each.isdisjoint(ids[:-1])


def various(sampling: SamplingParams) -> list[Request]:
    """Rows with a processor, with built-in ones, with none, with both."""
    return [
        Request(PROMPTS[0], 12, sampling=sampling, processor=Grammar(PROMPTS[0])),
        Request(PROMPTS[1], 16, sampling=sampling, processing=PROCESSING),
        Request(PROMPTS[2], 7, sampling=sampling),
        Request(PROMPTS[3], 14, sampling=sampling, processing=PROCESSING, processor=Grammar(PROMPTS[3])),
    ]


@cache
def plain_various(sampling: SamplingParams) -> list[list[int]]:
    return [generate_ids(trunk(), NullDrafter(), [request])[0] for request in various(sampling)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [SamplingParams(), SOFT])
def test_rows_with_and_without_processors_side_by_side(name: str, sampling: SamplingParams) -> None:
    alone = plain_various(sampling)
    drafter = drafters(PROMPTS, alone)[name]
    together = generate_ids(trunk(), drafter, various(sampling))
    assert together == generate_ids(trunk(), drafter, various(sampling), most=2)
    if name in CHOSEN or sampling.temperature == 0:  # deterministic children: plain decoding's own tokens
        assert together == alone
    else:
        assert together == [generate_ids(trunk(), drafter, [request])[0] for request in various(sampling)]


@pytest.mark.parametrize("sampling", [SamplingParams(), SOFT])
def test_a_builtin_processor_and_the_same_called_along_the_walk(sampling: SamplingParams) -> None:
    """Vectorised over nodes or lazily along the walk: one law. (The penalty of transformers' own class.)"""
    from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    def along() -> Processor:
        return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)])

    at_once = Processing(repetition_penalty=1.7, no_repeat_ngram_size=2)
    texts = generate_ids(trunk(), NullDrafter(), [Request(prompt, 14, processing=at_once) for prompt in PROMPTS])
    for name in NAMES:
        drafter = drafters(PROMPTS, texts)[name]
        one = [Request(prompt, 14, sampling=sampling, processing=at_once) for prompt in PROMPTS]
        other = [Request(prompt, 14, sampling=sampling, processor=along()) for prompt in PROMPTS]
        assert generate_ids(trunk(), drafter, one) == generate_ids(trunk(), drafter, other)


def test_the_walk_accepts_what_processors_allow() -> None:
    """The drafts help under processors too: an oracle's runs are accepted whole."""
    text = grammatical(0)
    request = Request(PROMPTS[0], 24, processor=Grammar(PROMPTS[0]))
    steps = list(decode(trunk(), drafters(PROMPTS[:1], [text])["oracle"], [request]))
    assert sum(step.accepted[0] for step in steps) > 8


def test_typical_acceptance_and_a_processor_along_the_walk_contradict() -> None:
    rule: AcceptRule = TypicalRule()
    request = Request(PROMPTS[0], 5, sampling=SOFT, processor=Grammar(PROMPTS[0]))
    steps = decode(trunk(), drafters(PROMPTS[:1], [[1, 2, 3, 4, 5]])["oracle"], [request], rule)
    with pytest.raises(UserError, match="logits_processor"):
        list(steps)


def test_a_processor_may_write_into_the_scores_it_gets() -> None:
    def in_place(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        scores_1V[:, ::2] = -torch.inf
        return scores_1V

    def apart(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        return in_place(ids_1T, scores_1V.clone())

    drafter = drafters(PROMPTS[:1], [plain(PROMPTS[0], 12, in_place)])["oracle"]
    found = [
        [(step.tokens, step.logprobs) for step in decode(trunk(), drafter, [request])]
        for request in (Request(PROMPTS[0], 12, processor=each, logprobs=2) for each in (in_place, apart))
    ]
    assert found[0] == found[1]
