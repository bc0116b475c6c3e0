"""Logits processors on trees against transformers' own, called per node on the node's written-out prefix."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    ExponentialDecayLengthPenalty,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from medusa.errors import UserError
from medusa.processors import Prefixes, Processing, Row, process
from medusa.tree import DraftTree, Shape

V = 9  # so few that texts repeat themselves
OWN = ("frequency_penalty", "presence_penalty")  # transformers has no such thing

TOKENS = st.integers(0, V - 1)
WORDS = st.lists(TOKENS, min_size=1, max_size=4).map(tuple)
# singles often, all lengths at times: sequences of one length share a comparison
SEQUENCES = st.lists(WORDS, min_size=1, max_size=8).map(tuple)
BIAS = st.sampled_from([-float("inf"), -2.5, -0.5, 0.1, 3.7])

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.5, 1.3, 10.0]),
    "frequency_penalty": st.sampled_from([-0.7, 0.3, 2.0]),
    "presence_penalty": st.sampled_from([-0.7, 0.3, 2.0]),
    "no_repeat_ngram_size": st.integers(1, 5),
    "bad_words_ids": SEQUENCES,
    "sequence_bias": st.lists(st.tuples(WORDS, BIAS), min_size=1, max_size=8).map(tuple),
    "suppress_tokens": st.lists(TOKENS, max_size=3).map(tuple),
    "begin_suppress_tokens": st.lists(TOKENS, max_size=3).map(tuple),
    "min_length": st.integers(0, 12),
    "min_new_tokens": st.integers(0, 6),
    "forced_bos_token_id": TOKENS,
    "forced_eos_token_id": st.lists(TOKENS, min_size=1, max_size=2).map(tuple),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.sampled_from([0.7, 1.0, 1.5])),
    "remove_invalid_values": st.just(True),
}


@dataclass(frozen=True)
class Case:
    texts: list[list[int]]
    parents: list[list[int]]
    tokens: list[list[int]]
    rows: list[Row]
    logits: Tensor

    @property
    def tree(self) -> DraftTree:
        tokens_BN = torch.tensor(self.tokens)
        return DraftTree(Shape.of(torch.tensor(self.parents)), tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))

    def prefix(self, row: int, node: int) -> list[int]:
        path: list[int] = []
        while node > 0:
            path.insert(0, self.tokens[row][node])
            node = self.parents[row][node]
        return self.texts[row] + path


@st.composite
def processings(draw: st.DrawFn, options: list[str] | None = None) -> Processing:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=6)) if options is None else options
    asked = {name: draw(OPTIONS[name]) for name in names}
    try:
        return Processing(**asked)
    except UserError:  # what is forced is suppressed
        return Processing(**{**asked, "suppress_tokens": ()})


@st.composite
def cases(draw: st.DrawFn, options: list[str] | None = None, rows: int | None = None) -> Case:
    count = rows or draw(st.integers(1, 4))
    nodes = draw(st.integers(1, 8))
    shared = draw(processings(options))  # rows that ask for the same are worked on together
    texts, parents, tokens, known = [], [], [], []
    for _ in range(count):
        # short texts: shorter than n-grams and words; few different tokens: runs repeat
        text = draw(st.lists(st.integers(0, draw(st.integers(0, V - 1))), min_size=1, max_size=9))
        prompt = draw(st.integers(1, len(text)))
        parents.append([-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))])
        tokens.append([text[-1], *draw(st.lists(TOKENS, min_size=nodes - 1, max_size=nodes - 1))])
        asked = draw(st.one_of(st.just(shared), processings(options)))
        eos = draw(st.frozensets(TOKENS, min_size=asked.exponential_decay_length_penalty is not None, max_size=3))
        texts.append(text)
        known.append(Row(asked, prompt, draw(st.integers(len(text) + 1, len(text) + 6)), eos))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(count, nodes, V, generator=generator, dtype=torch.float64) * 3
    if draw(st.booleans()):
        odd = torch.tensor([0.0, -float("inf"), float("inf"), float("nan")], dtype=torch.float64)
        which = torch.randint(len(odd), logits.shape, generator=generator)
        logits = torch.where(torch.rand(logits.shape, generator=generator) < 0.1, odd[which], logits)
    return Case(texts, parents, tokens, known, logits)


class Frequency:
    """OpenAI's two penalties by their definition, on the tokens behind the prompt."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt :].tolist()).items():
            scores[0, token] -= self.frequency * count + self.presence
        return scores


def librarys(row: Row) -> LogitsProcessorList:
    """The very list that `generate` builds for this row alone, with the penalties it lacks behind its own."""
    asked = row.processing
    bad_words = [list(words) for words in asked.bad_words_ids]
    if all(len(words) == 1 and words[0] in row.eos for words in bad_words):
        bad_words = []  # nothing is left to forbid: the library breaks on that
    config = GenerationConfig(
        repetition_penalty=asked.repetition_penalty,
        no_repeat_ngram_size=asked.no_repeat_ngram_size,
        bad_words_ids=bad_words or None,
        sequence_bias=[[list(words), bias] for words, bias in asked.sequence_bias] or None,
        suppress_tokens=list(asked.suppress_tokens) or None,
        begin_suppress_tokens=list(asked.begin_suppress_tokens) or None,
        min_length=asked.min_new_tokens + row.prompt if asked.min_new_tokens else asked.min_length,  # as generate does
        min_new_tokens=asked.min_new_tokens,
        forced_bos_token_id=asked.forced_bos_token_id,
        forced_eos_token_id=list(asked.forced_eos_token_id) or None,
        exponential_decay_length_penalty=asked.exponential_decay_length_penalty,
        remove_invalid_values=asked.remove_invalid_values,
        max_length=row.longest,
    )
    config._eos_token_tensor = torch.tensor(sorted(row.eos)) if row.eos else None
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, custom: default,
    )
    mask = torch.ones(1, row.prompt, dtype=torch.long)
    made = GenerationMixin._get_logits_processor(
        model, config, row.prompt, device="cpu", model_kwargs={"attention_mask": mask}
    )
    if asked.frequency_penalty or asked.presence_penalty:
        before = (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor)
        place = sum(type(each) in before for each in made)
        made.insert(place, Frequency(row.prompt, asked.frequency_penalty, asked.presence_penalty))
    return made


def expected(case: Case) -> Tensor:
    scores = case.logits.clone()
    limit = torch.finfo(scores.dtype).max
    for row, known in enumerate(case.rows):
        made = librarys(known)
        for node in range(scores.shape[1]):
            ids = torch.tensor([case.prefix(row, node)])
            score = scores[row, node][None]
            for each in made:
                before, score = score, each(ids, score)
                if isinstance(each, ExponentialDecayLengthPenalty):  # it overflows to infinity: a law of NaN
                    score = torch.where(before.isfinite(), score.clamp(-limit, limit), score)
            scores[row, node] = score[0]
    return scores


def agrees(case: Case) -> None:
    logits = case.logits.clone()
    scores = process(case.logits, Prefixes.of(case.texts, case.tree), case.rows)
    torch.testing.assert_close(scores, expected(case), rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(case.logits, logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("option", sorted(OPTIONS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_option_does_what_the_librarys_does(option: str, data: st.DataObject) -> None:
    agrees(data.draw(cases([option])))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_any_options_together_act_in_the_librarys_order(case: Case) -> None:
    agrees(case)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_row_gets_in_a_batch_what_it_gets_alone(case: Case) -> None:
    together = process(case.logits, Prefixes.of(case.texts, case.tree), case.rows)
    for row, known in enumerate(case.rows):
        one = slice(row, row + 1)
        alone = replace(
            case, texts=case.texts[one], parents=case.parents[one], tokens=case.tokens[one], logits=case.logits[one]
        )
        scores = process(alone.logits, Prefixes.of(alone.texts, alone.tree), [known])
        torch.testing.assert_close(together[one], scores, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_prefixes_written_out_are_text_and_path(case: Case) -> None:
    prefixes = Prefixes.of(case.texts, case.tree)
    for row, text in enumerate(case.texts):
        for node in range(len(case.tokens[row])):
            prefix = case.prefix(row, node)
            ids = prefixes.ids_BNL[row, node].tolist()
            assert prefixes.length_BN[row, node] == len(prefix)
            assert ids == [-1] * (len(ids) - len(prefix)) + prefix
            assert prefixes.tail(3)[row, node].tolist() == [*(-1,) * 3, *prefix][-3:]
        assert prefixes.ids_BNL[row, 0].tolist()[-len(text) :] == text


@settings(max_examples=20, deadline=None)
@given(cases())
def test_what_was_made_for_one_step_serves_the_next(case: Case) -> None:
    # tensors of ids are kept with what was asked: they must not depend on a step's texts
    fresh = replace(case, rows=copy.deepcopy(case.rows))
    shorter = replace(case, texts=[text[:1] for text in case.texts], rows=[replace(r, prompt=1) for r in case.rows])
    tokens = [[text[0], *row[1:]] for text, row in zip(case.texts, case.tokens, strict=True)]
    agrees(replace(shorter, tokens=tokens))
    agrees(case)
    agrees(fresh)
