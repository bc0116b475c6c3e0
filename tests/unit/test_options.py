"""Options: each does what generate of transformers does with it, alone and in pairs; others are refused by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Completion, Engine
from medusa.infer.options import NEW_TOKENS, Options
from medusa.sampling import SamplingParams
from medusa.testing import ScriptedDrafter, plain_greedy, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TREE = Topology.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
PROMPT = [38, 37, 15, 42, 26]  # what follows repeats tokens and pairs of them
NEW = 20


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    trunk = tiny_trunk("llama")
    trunk.tokenizer = char_tokenizer(ALPHABET)
    return trunk


@pytest.fixture(scope="module")
def greedy(trunk: Trunk) -> list[int]:
    """What follows the prompt without any option."""
    return plain_greedy(trunk, PROMPT, NEW)


@pytest.fixture
def configured(trunk: Trunk) -> Any:
    """The trunk's generation_config, empty, and put back afterwards."""
    model = trunk.model
    before, model.generation_config = model.generation_config, type(model.generation_config)()
    yield model.generation_config
    model.generation_config = before


def reference(trunk: Trunk, prompt: Sequence[int], **options: Any) -> list[int]:
    """The new ids that transformers' own generate gives."""
    ids_1T = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "tokenizer": trunk.tokenizer} | options
    out = trunk.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **options)
    return out[0, len(prompt) :].tolist()


def drafters(trunk: Trunk, expected: Sequence[int], greedy: Sequence[int]) -> dict[str, Drafter]:
    """Nothing, heads, what will be said, that with lies, and what would have been said without the option."""
    longer = [*expected, *[0] * NEW]
    return {
        "null": NullDrafter(),
        "heads": MedusaDrafter(MedusaHeads(HeadsConfig("root", num=3), trunk), TREE),
        "truth": ScriptedDrafter([longer], honesty=1.0, size=10, seed=1),
        "half": ScriptedDrafter([longer], honesty=0.6, size=10, seed=2),
        "stale": ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=10, seed=3),
    }


class Counter:
    """A processor with a state: dislikes what was said, more with every call, and checks that ids grow by one."""

    def __init__(self, start: Sequence[int]) -> None:
        self.seen = list(start)
        self.calls = 0

    def __call__(self, ids_1T: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        ids = ids_1T[0].tolist()
        assert ids[: len(self.seen)] == self.seen and len(ids) == len(self.seen) + (self.calls > 0)
        self.seen, self.calls = ids, self.calls + 1
        scores_1V[:, ids] -= 2.5 * self.calls  # in place, as many do
        return scores_1V


Make = Callable[[list[int]], dict[str, Any]]  # from the plain continuation to options that change it
CASES: dict[str, Make] = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.8},
    "repetition_bonus": lambda text: {"repetition_penalty": 0.4},
    "no_repeat_2": lambda text: {"no_repeat_ngram_size": 2},
    "no_repeat_1": lambda text: {"no_repeat_ngram_size": 1},
    "bad_word": lambda text: {"bad_words_ids": [[text[4]]]},
    "bad_words": lambda text: {"bad_words_ids": [[text[2], text[3]], [text[6], text[7], text[8]]]},
    "bias": lambda text: {"sequence_bias": {(text[3],): -50.0, (text[5], 9): 60.0}},
    "suppress": lambda text: {"suppress_tokens": [text[3], text[7]]},
    "begin_suppress": lambda text: {"begin_suppress_tokens": [text[0]]},
    "min_length": lambda text: {"min_length": len(PROMPT) + 9, "eos_token_id": [text[4], text[1]]},
    "min_new_tokens": lambda text: {"min_new_tokens": 8, "eos_token_id": text[4]},
    "forced_eos": lambda text: {"forced_eos_token_id": 11},
    "forced_eos_of_two": lambda text: {"forced_eos_token_id": [12, 13]},
    "decay": lambda text: {"exponential_decay_length_penalty": (4, 1.9), "eos_token_id": 17},
    "eos": lambda text: {"eos_token_id": text[7]},
    "several_eos": lambda text: {"eos_token_id": [text[9], text[6], 64]},
    "stop_string": lambda text: {"stop_strings": ALPHABET_OF(text[5:7])},
    "stop_strings": lambda text: {"stop_strings": [ALPHABET_OF(text[8:11]), ALPHABET_OF(text[7:9])]},
    "processor": lambda text: {"logits_processor": [Counter(PROMPT)]},
    "criterion": lambda text: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + 6)])},
}
VOCABULARY = char_tokenizer(ALPHABET)


def ALPHABET_OF(ids: Sequence[int]) -> str:
    return str(VOCABULARY.decode(ids))


def for_generate(options: dict[str, Any]) -> dict[str, Any]:
    """The library takes lists of its own classes alone."""
    if "logits_processor" in options:
        options = options | {"logits_processor": LogitsProcessorList(options["logits_processor"])}
    return options


@pytest.mark.parametrize("case", CASES)
def test_each_option_does_what_generate_does(trunk: Trunk, greedy: list[int], case: str) -> None:
    expected = reference(trunk, PROMPT, **for_generate(CASES[case](greedy)))
    assert expected != greedy, "an option without effect shows nothing"
    for name, drafter in drafters(trunk, expected, greedy).items():
        out = Engine(trunk, drafter).generate(PROMPT, max_new_tokens=NEW, **CASES[case](greedy))
        assert out.token_ids == expected, name
        assert name != "truth" or out.steps < len(expected) - 1 or len(expected) < 3  # runs were accepted


# One of each kind: the other says the same with one value in place of several, or another one.
PAIRED = [
    name
    for name in CASES
    if name not in ("repetition_bonus", "no_repeat_1", "bad_word", "forced_eos", "eos", "stop_string")
]


@pytest.mark.parametrize("quarter", range(4))
def test_pairs_of_options_do_what_generate_does(trunk: Trunk, greedy: list[int], quarter: int) -> None:
    wrong = []
    for first, second in list(itertools.combinations(PAIRED, 2))[quarter::4]:
        options = CASES[first](greedy) | CASES[second](greedy)
        if {"min_length", "min_new_tokens"} <= set(options):
            continue
        expected = reference(trunk, PROMPT, **for_generate(options))
        options = CASES[first](greedy) | CASES[second](greedy)  # processors with a fresh state
        drafter = ScriptedDrafter([[*expected, *[0] * NEW]], honesty=0.8, size=10, seed=len(wrong))
        found = Engine(trunk, drafter).generate(PROMPT, max_new_tokens=NEW, **options).token_ids
        if found != expected:
            wrong.append((first, second, found, expected))
    assert not wrong


@pytest.mark.parametrize("count", [*range(1, 9), 12, 13, 20])
def test_limits_are_exact(trunk: Trunk, greedy: list[int], count: int) -> None:
    engine = Engine(trunk, ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=10))
    out = engine.generate(PROMPT, max_new_tokens=count)
    assert (out.token_ids, out.finish_reason) == (greedy[:count], "length")
    assert engine.generate(PROMPT, max_length=len(PROMPT) + count).token_ids == greedy[:count]
    options = {"min_new_tokens": count, "eos_token_id": sorted(set(greedy))[:20]}
    expected = reference(trunk, PROMPT, **options)
    truthful = Engine(trunk, ScriptedDrafter([[*expected, *[0] * NEW]], honesty=1.0, size=10))
    assert truthful.generate(PROMPT, max_new_tokens=NEW, **options).token_ids == expected
    assert len(expected) >= min(count, NEW)


@pytest.mark.parametrize("at", range(12))
def test_an_eos_ends_the_text_at_every_offset(trunk: Trunk, greedy: list[int], at: int) -> None:
    ends = [greedy[at], greedy[-1], 64]
    expected = reference(trunk, PROMPT, eos_token_id=ends)
    for honesty in (1.0, 0.7):
        engine = Engine(trunk, ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=honesty, size=10, seed=at))
        out = engine.generate(PROMPT, max_new_tokens=NEW, eos_token_id=ends)
        assert (out.token_ids, out.finish_reason) == (expected, "eos")


def test_a_forced_beginning_after_a_prompt_of_one_token(trunk: Trunk) -> None:
    options = {"forced_bos_token_id": 44, "begin_suppress_tokens": list(range(30))}
    expected = reference(trunk, [7], **options)
    assert expected[0] == 44
    for drafter in (NullDrafter(), ScriptedDrafter([[*expected, *[0] * NEW]], honesty=1.0, size=10)):
        assert Engine(trunk, drafter).generate([7], max_new_tokens=NEW, **options).token_ids == expected


def test_frequency_and_presence_are_counted_in_the_new_tokens(trunk: Trunk, greedy: list[int]) -> None:
    frequency, presence = 1.5, 0.8
    ids: list[int] = []
    while len(ids) < NEW:
        with torch.no_grad():
            scores = trunk.model(input_ids=torch.tensor([[*PROMPT, *ids]])).logits[0, -1]
        for token in set(ids):
            scores[token] -= frequency * ids.count(token) + presence
        ids.append(int(scores.argmax()))
    assert ids != greedy
    for name, drafter in drafters(trunk, ids, greedy).items():
        options = {"frequency_penalty": frequency, "presence_penalty": presence}
        assert Engine(trunk, drafter).generate(PROMPT, max_new_tokens=NEW, **options).token_ids == ids, name


def test_a_processor_sees_one_text_grow_by_one_token_and_nothing_behind_its_end(
    trunk: Trunk, greedy: list[int]
) -> None:
    seen: list[list[int]] = []

    def watch(ids_1T: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        seen.append(ids_1T[0].tolist())
        return scores_1V

    eos = greedy[7]
    end = greedy.index(eos) + 1
    engine = Engine(trunk, ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=12))
    out = engine.generate(PROMPT, max_new_tokens=NEW, eos_token_id=eos, logits_processor=watch)
    assert out.token_ids == greedy[:end]
    assert seen == [[*PROMPT, *greedy[:count]] for count in range(end)]
    assert out.steps < end - 1


def test_every_row_of_a_batch_has_its_own_processor_and_one_prompt_has_the_very_object(trunk: Trunk) -> None:
    class State:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, ids_1T: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            scores_1V[:, self.calls] += 100.0
            return scores_1V

    state = State()
    rows = Engine(trunk).generate([PROMPT, [3, 4]], max_new_tokens=5, logits_processor=[state])
    assert [row.token_ids for row in rows] == [[1, 2, 3, 4, 5]] * 2 and state.calls == 0
    assert Engine(trunk).generate(PROMPT, max_new_tokens=5, logits_processor=state).token_ids == [1, 2, 3, 4, 5]
    assert state.calls == 5
    own = State()
    Engine(trunk).generate([PROMPT, [3]], max_new_tokens=2, each=[{"logits_processor": own}, {}])
    assert own.calls == 2

    class Stubborn(State):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot be copied")

    with pytest.raises(UserError, match="every row of a batch needs its own"):
        Engine(trunk).generate([PROMPT, PROMPT], logits_processor=Stubborn())


def test_a_processor_leaves_the_reported_logprobs_alone(trunk: Trunk, greedy: list[int]) -> None:
    plain = Engine(trunk).generate(PROMPT, max_new_tokens=1, logprobs=True, top_logprobs=2)
    out = Engine(trunk).generate(PROMPT, max_new_tokens=1, top_logprobs=2, logits_processor=Counter(PROMPT))
    assert out.top_logprobs == plain.top_logprobs


def test_a_processor_of_a_built_in_kind_takes_its_place(trunk: Trunk, greedy: list[int]) -> None:
    for own, options in (
        (RepetitionPenaltyLogitsProcessor(1.1), {"repetition_penalty": 1.9}),
        (SuppressTokensLogitsProcessor([greedy[0]]), {"suppress_tokens": [greedy[1]]}),
    ):
        expected = reference(trunk, PROMPT, logits_processor=LogitsProcessorList([own]), **options)
        assert expected != reference(trunk, PROMPT, **options)
        for processors in ([own], LogitsProcessorList([own])):
            out = Engine(trunk).generate(PROMPT, max_new_tokens=NEW, logits_processor=processors, **options)
            assert out.token_ids == expected


def test_a_criterion_is_called_once_per_token_with_all_ids(trunk: Trunk, greedy: list[int]) -> None:
    calls: list[tuple[list[int], object]] = []

    def criterion(ids_1T: torch.Tensor, scores: object) -> torch.Tensor:
        calls.append((ids_1T[0].tolist(), scores))
        return torch.tensor([len(calls) == 9])

    def never(ids_1T: torch.Tensor, scores: object) -> bool:
        return False

    engine = Engine(trunk, ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=12))
    out = engine.generate(PROMPT, max_new_tokens=NEW, stopping_criteria=[criterion, never])
    assert (out.token_ids, out.finish_reason, out.stop) == (greedy[:9], "stop", None)
    assert calls == [([*PROMPT, *greedy[:count]], None) for count in range(1, 10)]
    calls.clear()
    assert engine.generate(PROMPT, max_new_tokens=4, stopping_criteria=criterion).token_ids == greedy[:4]


def test_all_criteria_are_asked_for_every_token(trunk: Trunk) -> None:
    counts = [0, 0]

    def make(place: int, last: int) -> Callable[[Any, Any], bool]:
        def criterion(ids: Any, scores: Any) -> bool:
            counts[place] += 1
            return counts[place] >= last

        return criterion

    Engine(trunk).generate(PROMPT, max_new_tokens=NEW, stopping_criteria=[make(0, 3), make(1, 99)])
    assert counts == [3, 3]


def test_time_ends_the_text_with_the_next_token(
    trunk: Trunk, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(trunk, ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=12))
    out = engine.generate(PROMPT, max_new_tokens=NEW, max_time=0)
    assert (out.token_ids, out.finish_reason) == (greedy[:1], "length")
    assert reference(trunk, PROMPT, max_time=0.0) == greedy[:1]
    assert engine.generate(PROMPT, max_new_tokens=NEW, max_time=1e6).token_ids == greedy
    ticks = itertools.count(10**7)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    out = Engine(trunk).generate(PROMPT, max_new_tokens=NEW, max_time=15)
    assert 1 < len(out.token_ids) < NEW and out.token_ids == greedy[: len(out.token_ids)]


def test_options_of_the_generation_config_count_as_in_generate(
    trunk: Trunk, greedy: list[int], configured: Any
) -> None:
    for case, make in CASES.items():
        options = make(greedy)
        if not set(options) <= set(vars(configured)):
            continue
        configured.update(**options)
        expected = reference(trunk, PROMPT)
        found = Engine(trunk).generate(PROMPT, max_new_tokens=NEW)
        assert found.token_ids == expected != greedy, case
        cleared = dict.fromkeys(options)  # None undoes what the config says
        assert reference(trunk, PROMPT, **cleared) == greedy
        assert Engine(trunk).generate(PROMPT, max_new_tokens=NEW, **cleared).token_ids == greedy, case
        configured.update(**cleared)
    configured.max_time = 0.0
    assert len(Engine(trunk).generate(PROMPT, max_new_tokens=NEW).token_ids) == 1


def test_a_generation_config_beside_the_prompt_counts_before_the_model_s_own(
    trunk: Trunk, greedy: list[int], configured: Any
) -> None:
    configured.repetition_penalty, configured.suppress_tokens = 1.8, [greedy[0]]
    given = GenerationConfig(repetition_penalty=1.2, max_new_tokens=7, pad_token_id=0)
    ids_1T = torch.tensor([PROMPT])
    expected = trunk.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=given)
    expected = expected[0, len(PROMPT) :].tolist()
    assert len(expected) == 7 and expected[0] != greedy[0]
    assert Engine(trunk).generate(PROMPT, generation_config=given).token_ids == expected
    assert len(Engine(trunk).generate(PROMPT, generation_config=given, max_new_tokens=3).token_ids) == 3
    with pytest.raises(UserError, match="give a transformers GenerationConfig"):
        Engine(trunk).generate(PROMPT, generation_config={"max_new_tokens": 3})


LAWS = [
    ({}, {}, {"temperature": 0}),
    ({}, {"temperature": 0.7}, {"temperature": 0.7}),
    ({}, {"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
    ({}, {"do_sample": True, "top_k": None}, {"temperature": 1.0}),
    ({}, {"do_sample": True, "top_k": 7, "temperature": 0.5}, {"temperature": 0.5, "top_k": 7}),
    ({"temperature": 0.6, "top_p": 0.9}, {}, {"temperature": 0}),
    ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True}, {"temperature": 0.6, "top_p": 0.9, "top_k": 50}),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.7}, {"temperature": 0.7}),
    ({"do_sample": True, "top_k": 9}, {}, {"temperature": 1.0, "top_k": 9}),
    ({"do_sample": True, "temperature": 0.6}, {"temperature": None}, {"temperature": 1.0, "top_k": 50}),
    ({"do_sample": True, "top_p": 0.9}, {"temperature": 0.3, "top_p": None}, {"temperature": 0.3, "top_k": 50}),
    ({"do_sample": True, "top_p": 0.9}, {"do_sample": False}, {"temperature": 0}),
    ({"do_sample": True, "top_p": 0.9}, {"temperature": 0}, {"temperature": 0}),
    ({"do_sample": True, "top_p": 0.9}, {"do_sample": None}, {"temperature": 0}),
    ({"do_sample": True}, {"do_sample": False, "temperature": 1.0}, {"temperature": 0}),
]


@pytest.mark.parametrize(("config", "given", "expected"), LAWS)
def test_the_law_that_is_drawn_from(trunk: Trunk, configured: Any, config: Any, given: Any, expected: Any) -> None:
    configured.update(**config)
    law = Options.of(given, trunk).sampling
    assert law == SamplingParams(**expected)
    merged, _ = trunk.model._prepare_generation_config(None, **given)  # by transformers itself
    if merged.do_sample and merged.temperature != 0:
        assert law.temperature == (1.0 if merged.temperature is None else merged.temperature)
        assert law.top_k == (merged.top_k or 0)
        assert law.top_p == (1.0 if merged.top_p is None else merged.top_p)
    else:
        assert law.temperature == 0 or "do_sample" not in given  # a temperature alone samples here


def test_limits_given_count_before_those_of_the_config(trunk: Trunk, configured: Any) -> None:
    def limit(**given: Any) -> int:
        return Options.of(given, trunk).limit(5)

    assert limit() == NEW_TOKENS
    configured.max_length = 11
    assert (limit(), limit(max_new_tokens=9), limit(max_length=8), limit(max_length=None)) == (6, 9, 3, NEW_TOKENS)
    configured.max_new_tokens = 4
    assert (limit(), limit(max_new_tokens=9), limit(max_length=8)) == (4, 9, 3)
    configured.min_length, configured.min_new_tokens = 30, 2
    merged = Options.of({}, trunk).processing
    assert (merged.min_length, merged.min_new_tokens) == (0, 2)  # the count of new tokens counts
    merged = Options.of({"min_length": 7}, trunk).processing
    assert (merged.min_length, merged.min_new_tokens) == (7, 0)


def test_several_continuations_have_seeds_of_their_own(trunk: Trunk) -> None:
    engine = Engine(trunk, max_rows=2)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5}
    rows = engine.generate([PROMPT, [3, 4]], num_return_sequences=3, seed=5, **options)
    assert [row.prompt_ids for row in rows] == [PROMPT] * 3 + [[3, 4]] * 3
    assert [row.seed for row in rows] == [5, 6, 7] * 2
    for row in rows:
        assert engine.generate(row.prompt_ids, seed=row.seed, **options).token_ids == row.token_ids
    assert len({tuple(row.token_ids) for row in rows}) == 6
    free = engine.generate(PROMPT, num_return_sequences=2, do_sample=True, max_new_tokens=4)
    assert isinstance(free, list) and free[0].seed != free[1].seed
    assert isinstance(engine.generate(PROMPT, num_return_sequences=1, max_new_tokens=4), Completion)


def test_each_prompt_may_have_options_of_its_own(trunk: Trunk, greedy: list[int]) -> None:
    engine = Engine(trunk)
    shared: dict[str, Any] = {"max_new_tokens": 9, "repetition_penalty": 1.8}
    each: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 3},
        {"repetition_penalty": None},
        {"stop_strings": ALPHABET_OF(greedy[2:4]), "repetition_penalty": 1.0, "include_stop": False},
        {"max_new_tokens": 4, "logprobs": True},
    ]
    rows = engine.generate([PROMPT] * 4, each=each, **shared)
    alone = [engine.generate(PROMPT, **{**shared, **own}) for own in each]
    assert [(row.token_ids, row.finish_reason, row.text) for row in rows] == [
        (row.token_ids, row.finish_reason, row.text) for row in alone
    ]
    assert [row.logprobs is not None for row in rows] == [False, False, False, True]
    assert rows[3].logprobs == pytest.approx(alone[3].logprobs)
    assert len({tuple(row.token_ids) for row in rows}) == 4
    assert engine.generate(PROMPT, each=[{"max_new_tokens": 2}]).token_ids == greedy[:2]
    drawn: dict[str, Any] = {"top_p": 0.9, "num_return_sequences": 2, "max_new_tokens": 3}  # alone they say nothing
    rows = engine.generate([PROMPT, [3]], each=[{"temperature": 0.7, "seed": 1}, {"do_sample": True}], **drawn)
    assert [row.seed is None for row in rows] == [False] * 4 and [row.seed for row in rows[:2]] == [1, 2]


DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 1.2, "top_h": 0.4},
    {"temperature": 1.1, "typical_p": 0.6, "repetition_penalty": 1.3},
    {"do_sample": True, "epsilon_cutoff": 0.02, "logits_processor": [Counter(PROMPT)]},
    {"do_sample": True, "eta_cutoff": 0.02, "no_repeat_ngram_size": 1},
    {},
]


@pytest.mark.parametrize("kind", ["null", "heads"])
def test_a_seed_gives_the_same_text_in_a_batch_and_alone(trunk: Trunk, greedy: list[int], kind: str) -> None:
    engine = Engine(trunk, drafters(trunk, greedy, greedy)[kind], max_rows=3)
    each = [options | {"seed": number % 3, "max_new_tokens": 6 + number} for number, options in enumerate(DRAWN)]
    together = engine.generate([PROMPT] * len(each), each=copy.deepcopy(each))
    alone = [engine.generate(PROMPT, **options) for options in copy.deepcopy(each)]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert len({tuple(row.token_ids[:6]) for row in alone}) > 5


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ([{}], r"each has 1 dicts of options for 2 prompts"),
        ([{}, {"temprature": 1}], r"each\[1\]: unknown option 'temprature' \(did you mean temperature\?\)"),
        ([{}, {"max_length": 9}], r"each\[1\]: max_new_tokens=5 and max_length=9"),
        ([{}, {"acceptance": "typical"}], r"each\[1\] has 'acceptance', which is one for all"),
        ([{"baseline": True}, {}], "one for all prompts"),
        ([{}, 7], "give a list of dicts"),
        ({"a": 1}, "give a list of dicts"),
    ],
)
def test_refuses_options_of_prompts(trunk: Trunk, each: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Engine(trunk).generate([PROMPT, PROMPT], each=each, max_new_tokens=5)


def test_logprobs_are_the_trunks_own(trunk: Trunk, greedy: list[int]) -> None:
    with torch.no_grad():
        logits_TV = trunk.model(input_ids=torch.tensor([[*PROMPT, *greedy]])).logits[0, len(PROMPT) - 1 : -1]
    log_TV = logits_TV.log_softmax(-1)
    engine = Engine(trunk, ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=12))
    out = engine.generate(PROMPT, max_new_tokens=13, logprobs=True, top_logprobs=3)
    assert out.logprobs == pytest.approx([float(log_TV[t, greedy[t]]) for t in range(13)])
    assert out.top_logprobs is not None and len(out.top_logprobs) == 13
    for t, top in enumerate(out.top_logprobs):
        assert list(top) == log_TV[t].topk(3).indices.tolist()
        assert list(top.values()) == pytest.approx(log_TV[t].topk(3).values.tolist())
    assert engine.generate(PROMPT, max_new_tokens=5, logprobs=True).top_logprobs is None
    assert engine.generate(PROMPT, max_new_tokens=5, top_logprobs=1).logprobs == pytest.approx(out.logprobs[:5])
    assert engine.generate(PROMPT, max_new_tokens=5, top_logprobs=0).logprobs is None
    cut = engine.generate(
        PROMPT, max_new_tokens=13, top_logprobs=1, stop_strings=ALPHABET_OF(greedy[6:9]), include_stop=False
    )
    assert cut.logprobs is not None and cut.top_logprobs is not None
    assert len(cut.logprobs) == len(cut.top_logprobs) == len(cut.token_ids) < 9


def test_typical_acceptance_is_named_lossy(trunk: Trunk) -> None:
    engine = Engine(trunk, MedusaDrafter(MedusaHeads(HeadsConfig("root", num=3), trunk), TREE))
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.2, "seed": 1}
    plain = engine.generate(PROMPT, **options)
    lossy = engine.generate(PROMPT, acceptance="typical", typical_epsilon=1e-9, **options)
    strict = engine.generate(PROMPT, acceptance="typical", typical_epsilon=1.0, typical_delta=1.0, **options)
    assert (plain.lossless, lossy.lossless, strict.lossless) == (True, False, False)
    assert lossy.steps < strict.steps  # the thresholds arrive
    assert engine.generate(PROMPT, acceptance="lossless", **options).token_ids == plain.token_ids


def test_drafting_changes_how_guesses_are_made_for_one_call(trunk: Trunk) -> None:
    drafter = MedusaDrafter(MedusaHeads(HeadsConfig("root", num=3), trunk), TREE)
    engine = Engine(trunk, drafter)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 1}
    before = copy.copy(drafter.drafting)
    outs = [
        engine.generate(PROMPT, **extra, **options)
        for extra in ({}, {"drafting": "sampled"}, {"drafting": "top"}, {"draft_temperature": 3.0})
    ]
    assert outs[0].token_ids == outs[1].token_ids and outs[0].accepted == outs[1].accepted
    assert outs[2].accepted != outs[0].accepted and outs[3].accepted != outs[0].accepted
    assert drafter.drafting == before
    assert outs[2].token_ids == engine.generate(PROMPT, baseline=True, **options).token_ids  # one draw per position


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": [""]}, "none empty"),
        ({"stop_strings": ["x", 7]}, "give a text or a list of texts"),
        ({"include_stop": "no"}, "give True or False"),
        ({"max_time": -1}, "max_time=-1: it must be at least 0"),
        ({"max_time": "long"}, "give a number"),
        ({"num_return_sequences": 2}, "greedy decoding has one answer"),
        ({"num_return_sequences": 0, "do_sample": True}, "at least 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"bad_words_ids": [[65]]}, r"ids lie in 0\.\.64"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"min_new_tokens": 2, "min_length": 20}, "give one of the two"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is above max_new_tokens=8"),
        ({"min_length": 9, "max_length": 8}, "min_length=9 is above max_length=8"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True and temperature=0"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample=False and temperature=0.5"),
        ({"do_sample": 1}, "give True or False"),
        ({"min_p": 0.1}, "min_p=0.1 has no effect on greedy"),
        ({"logprobs": 5}, "give True or False"),
        ({"logprobs": False, "top_logprobs": 2}, "leave one of them out"),
        ({"top_logprobs": -1}, "top_logprobs=-1"),
        ({"acceptance": "tipical"}, r"did you mean typical\?"),
        ({"typical_epsilon": 0.1}, "has no effect on lossless acceptance"),
        ({"acceptance": "typical", "typical_delta": 0}, r"typical_delta=0: it must be in \(0, 1\]"),
        ({"acceptance": "typical", "logits_processor": [lambda i, s: s]}, "leave one of the two out"),
        ({"acceptance": "typical", "baseline": True}, "drafts nothing"),
        ({"drafting": "tops"}, r"did you mean top\?"),
        ({"drafting": "top"}, "'none' draws nothing"),
        ({"draft_temperature": 2.0}, "'none' draws nothing"),
        ({"draft_temperature": 0.0}, "above 0"),
        ({"draft_temperature": 2.0, "drafting": "top"}, "which draws none"),
        ({"logits_processor": 7}, "give a function of ids and scores"),
        ({"stopping_criteria": ["x"]}, "give a function of ids and scores"),
        ({"forced_eos_token_id": 3, "suppress_tokens": [3, 4]}, "suppress_tokens forbids what it forces"),
        ({"exponential_decay_length_penalty": (3, 1.1)}, "without an EOS"),
        ({"guidance_scale": 2.0}, r"guidance_scale=2\.0 is not supported"),
        ({"penalty_alpha": 0.6}, "not supported"),
        ({"num_beams": 4}, "num_beams=4 is not supported: one text is followed, not several beams, leave it out"),
        ({"output_scores": True}, "give logprobs=True"),
        ({"assistant_model": object()}, "own drafter guesses ahead"),
        ({"prefix_allowed_tokens_fn": print}, "PrefixConstrainedLogitsProcessor"),
    ],
)
def test_refuses_options(trunk: Trunk, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Engine(trunk).generate(PROMPT, **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        Engine(trunk).stream(PROMPT, **options)


def test_numbers_of_other_libraries_are_numbers(trunk: Trunk, greedy: list[int]) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": np.int64(4),
        "temperature": np.float32(0),
        "eos_token_id": np.int64(64),
    }
    assert Engine(trunk).generate(PROMPT, **options).token_ids == greedy[:4]
    drawn = Engine(trunk).generate(
        PROMPT, max_new_tokens=4, temperature=np.float64(1), seed=np.int64(9), top_k=np.int32(3)
    )
    assert type(drawn.seed) is int and drawn.seed == 9
    ends = torch.tensor([64, greedy[2]])
    assert Engine(trunk).generate(PROMPT, max_new_tokens=9, eos_token_id=ends).token_ids == greedy[:3]


@pytest.mark.parametrize(
    "late", [{"bad_words_ids": [[65]]}, {"exponential_decay_length_penalty": (3, 1.1)}, {"max_length": 3}]
)
def test_a_row_that_can_not_be_decoded_is_refused_before_any_is(trunk: Trunk, late: dict[str, Any]) -> None:
    asked: list[object] = []
    with pytest.raises(UserError):
        Engine(trunk, max_rows=1).generate(
            [PROMPT, PROMPT], each=[{}, late], stopping_criteria=lambda ids, scores: asked.append(ids)
        )
    assert asked == []


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="the trunk has no tokenizer"):
        Engine(tiny_trunk("llama")).generate(PROMPT, stop_strings="x")


def test_what_does_nothing_here_is_let_pass(trunk: Trunk, greedy: list[int]) -> None:
    idle: dict[str, Any] = {"pad_token_id": 3, "use_cache": True, "tokenizer": trunk.tokenizer, "early_stopping": True}
    idle |= {"num_beams": 1, "guidance_scale": None, "force_words_ids": [], "renormalize_logits": True}
    assert Engine(trunk).generate(PROMPT, max_new_tokens=NEW, **idle).token_ids == greedy


def test_a_config_that_cannot_be_followed_is_refused(trunk: Trunk, greedy: list[int], configured: Any) -> None:
    configured.num_beams = 3
    with pytest.raises(UserError, match=r"generation_config sets num_beams=3, .* or give num_beams=1 to Engine"):
        Engine(trunk).generate(PROMPT)
    assert Engine(trunk).generate(PROMPT, num_beams=1, max_new_tokens=3).token_ids == greedy[:3]
    configured.num_beams, configured.output_scores = None, True
    assert Engine(trunk).generate(PROMPT, max_new_tokens=3).token_ids == greedy[:3]
    configured.no_repeat_ngram_size = -1
    with pytest.raises(UserError, match=r"the trunk's generation_config: no_repeat_ngram_size=-1"):
        Engine(trunk).generate(PROMPT)
