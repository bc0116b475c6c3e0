"""The one loop: exact counts, ends and limits; rows apart; the same draws whatever the drafter and the company."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from medusa.accept import Acceptance, AcceptRule, DeterministicRule
from medusa.decoding import Decoder, Request, Step, decode, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.children import Drafting
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.lawkit import chi_square
from medusa.rules import RecursiveRule
from medusa.sampling import TOKEN, Chance, HashDraws, Key, SamplingParams, draw, to_probs
from medusa.testing import ScriptedDrafter, memorising_heads, plain_greedy, random_heads, recompute, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput

from .drafting import UNTRAINED, untrained

PROMPTS = [[3], [0, 17, 0, 5], [64, 1, 2, 3, 0, 0, 9, 40], [5, 5, 0, 8, 21, 33], [11, 0, 52, 4, 4, 19, 27, 35, 0, 61]]
DEPTH = 6


class ChainOracle:
    """Drafts the next ``DEPTH`` tokens of a known continuation, all right: every step accepts the longest run."""

    name = "chain"

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        self.scripts = scripts

    def open(self, trunk: Trunk) -> ChainSession:
        return ChainSession([list(script) for script in self.scripts])


class ChainSession:
    def __init__(self, scripts: list[list[int]]) -> None:
        self.scripts, self.at = scripts, [0] * len(scripts)

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: torch.Tensor, output: TrunkOutput) -> None:
        pass

    def propose(self, root_B: torch.Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        rows = [script[at : at + DEPTH + 1] for script, at in zip(self.scripts, self.at, strict=True)]
        tokens_BN = torch.tensor([row + [0] * (DEPTH + 1 - len(row)) for row in rows])
        assert tokens_BN[:, 0].tolist() == root_B.tolist()
        valid_BN = torch.arange(DEPTH + 1) < torch.tensor([[len(row)] for row in rows])
        return DraftTree(Shape.static(Topology.chain(DEPTH), "cpu"), tokens_BN, valid_BN)

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        self.at = [at + count for at, count in zip(self.at, acceptance.length_B.tolist(), strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        self.scripts, self.at = [self.scripts[row] for row in rows], [self.at[row] for row in rows]

    def admit(self, slots: Sequence[int], other: ChainSession) -> None:
        raise AssertionError("no test admits rows to this one")


def trunk_of(family: str = "llama") -> Trunk:
    return made_trunk(family)  # one object, however the argument is given


@cache
def made_trunk(family: str) -> Trunk:
    return tiny_trunk(family)


@cache
def text_of(row: int, family: str = "llama") -> list[int]:
    return plain_greedy(trunk_of(family), PROMPTS[row], 40)


@cache
def heads_drafter(kind: str = "hydra", family: str = "llama") -> Drafter:
    known = [PROMPTS[row] + text_of(row, family) for row in (0, 1)]
    heads = memorising_heads(trunk_of(family), HeadsConfig(kind, num=4), known)
    return MedusaDrafter(heads, Topology.full([3, 2, 1, 1]))


def drafters(rows: Sequence[int], skip: int = 0) -> dict[str, Drafter]:
    scripts = [text_of(row)[skip:] for row in rows]
    return {
        "none": NullDrafter(),
        "heads": heads_drafter(),
        "adversary": ScriptedDrafter(scripts, honesty=0.6, size=12),
        "chain": ChainOracle(scripts),
        **untrained_drafters(),
    }


@cache
def untrained_drafters() -> dict[str, Drafter]:
    return {name: untrained(trunk_of(), name) for name in UNTRAINED}


NAMES = ("none", "heads", "adversary", "chain", *UNTRAINED)


def collect(steps: list[Step], rows: int) -> tuple[list[list[int]], dict[int, str]]:
    ids: list[list[int]] = [[] for _ in range(rows)]
    finished: dict[int, str] = {}
    for step in steps:
        for row, tokens in step.tokens.items():
            assert row not in finished and tokens
            ids[row] += tokens
        finished |= step.finished
    return ids, finished


def run(name: str, rows: Sequence[int], **options: object) -> tuple[list[list[int]], dict[int, str]]:
    requests = [Request(PROMPTS[row], **{"max_new_tokens": 20, **options}) for row in rows]  # type: ignore[arg-type]
    return collect(list(decode(trunk_of(), drafters(rows)[name], requests)), len(rows))


# Counts.


@pytest.mark.parametrize("name", NAMES)
def test_max_new_tokens_is_exact(name: str) -> None:
    for count in (*range(1, DEPTH + 3), 13, 20):  # every place of the first run, and later ones
        ids, finished = run(name, [1], max_new_tokens=count)
        assert ids == [text_of(1)[:count]] and finished == {0: "length"}


@pytest.mark.parametrize("name", NAMES)
def test_rows_ask_for_different_counts(name: str) -> None:
    counts = [1, 20, 3, 7, 12]
    requests = [Request(prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    steps = list(decode(trunk_of(), drafters(range(5))[name], requests))
    ids, finished = collect(steps, 5)
    assert ids == [text_of(row)[:count] for row, count in enumerate(counts)]
    assert finished == dict.fromkeys(range(5), "length")


def test_steps_say_what_they_did() -> None:
    steps = list(decode(trunk_of(), ChainOracle([text_of(0)]), [Request(PROMPTS[0], 1 + 2 * (DEPTH + 1) + 3)]))
    assert [step.nodes for step in steps] == [0, DEPTH + 1, DEPTH + 1, DEPTH + 1]
    assert [len(step.tokens[0]) for step in steps] == [1, DEPTH + 1, DEPTH + 1, 3]
    assert [step.accepted[0] for step in steps] == [0, DEPTH, DEPTH, DEPTH]  # before the limit cut the last
    assert [step.finished for step in steps] == [{}, {}, {}, {0: "length"}]
    plain = list(decode(trunk_of(), NullDrafter(), [Request(PROMPTS[0], 5)]))
    assert [(step.nodes, step.accepted[0]) for step in plain] == [(0, 0)] + [(1, 0)] * 4


def test_heads_are_told_how_much_room_is_left() -> None:
    # near its end a row needs no deep tree; the other row's room decides while it lives
    requests = [Request(PROMPTS[0], 3), Request(PROMPTS[1], 30)]
    steps = list(decode(trunk_of(), heads_drafter(), requests))
    assert steps[1].nodes == Topology.full([3, 2, 1, 1]).size
    assert steps[-1].nodes <= steps[1].nodes
    alone = list(decode(trunk_of(), heads_drafter(), [Request(PROMPTS[0], 3)]))
    assert max(step.nodes for step in alone) <= 1 + 3


def test_no_requests_give_no_tokens() -> None:
    assert generate_ids(trunk_of(), NullDrafter(), []) == []


# Ends.


@pytest.mark.parametrize("name", NAMES)
def test_eos_at_every_offset_of_a_run(name: str) -> None:
    offsets = set()
    for row, skip in itertools.product(range(5), (0, 4)):
        prompt, text = PROMPTS[row] + text_of(row)[:skip], text_of(row)[skip:]
        tokens = list(dict.fromkeys(text[: 2 * DEPTH + 3]))
        ends = [text.index(token) for token in tokens]  # the token's first place is where the row must end
        requests = [Request(prompt, 40, frozenset({token})) for token in tokens]
        drafter = drafters([row] * len(tokens), skip)[name]
        ids, finished = collect(list(decode(trunk_of(), drafter, requests)), len(tokens))
        assert ids == [text[: end + 1] for end in ends] and set(finished.values()) == {"eos"}
        offsets.update(ends)
    assert offsets >= set(range(DEPTH + 2))  # the prefill's token, and every place of the first run


@pytest.mark.parametrize("name", NAMES)
def test_the_first_of_several_eos_ends_the_row(name: str) -> None:
    text = text_of(0)
    order = list(dict.fromkeys(text))
    for first, later in itertools.pairwise(order):
        unused = next(token for token in range(65) if token not in text)
        ids, finished = run(name, [0], eos=frozenset({later, unused, first}), max_new_tokens=40)
        assert ids == [text[: text.index(first) + 1]] and finished == {0: "eos"}


def test_an_eos_beyond_the_limit_does_not_count() -> None:
    text = text_of(0)
    token = next(token for token in dict.fromkeys(text) if text.index(token) >= 4)
    at = text.index(token)
    for name in NAMES:
        assert run(name, [0], eos=frozenset({token}), max_new_tokens=at) == ([text[:at]], {0: "length"})
        assert run(name, [0], eos=frozenset({token}), max_new_tokens=at + 1) == ([text[: at + 1]], {0: "eos"})


def test_eos_is_an_ordinary_token_of_the_prompt() -> None:
    ids, _ = run("none", [1], eos=frozenset({17, 5}) - set(text_of(1)))
    assert ids == [text_of(1)[:20]]


def test_a_row_can_be_ended_from_outside() -> None:
    decoder = Decoder(trunk_of(), drafters(range(5))["adversary"])
    steps = [decoder.admit([Request(prompt, 20) for prompt in PROMPTS])]
    while decoder.live:
        if len(steps) == 2:
            decoder.finish(1)
            decoder.finish(3)
            decoder.finish(4)
        steps.append(decoder.step())
    ids, finished = collect(steps, 5)
    assert finished == {0: "length", 2: "length"}
    for row in range(5):
        assert ids[row] == text_of(row)[: len(ids[row])]
        assert (len(ids[row]) == 20) == (row in (0, 2))


# The context's end.


@cache
def short_trunk(family: str) -> Trunk:
    """A context of 24 tokens."""
    return tiny_trunk(family, **({"n_positions": 24} if family == "gpt2" else {"max_position_embeddings": 24}))


@pytest.mark.parametrize(
    ("family", "left"),  # gpt2's positions are learned and end there
    [("gpt2", 1), ("gpt2", 2), ("gpt2", 3), ("gpt2", 10), ("llama", 1), ("llama", 10), ("neox", 3)],
)
def test_the_context_ends_the_row(family: str, left: int) -> None:
    trunk = short_trunk(family)
    prompt = [index * 5 % 65 for index in range(24 - left)]
    truth = plain_greedy(trunk, prompt, left)
    heads = memorising_heads(trunk, HeadsConfig("root", num=6), [prompt + truth])
    for drafter in (
        NullDrafter(),
        ScriptedDrafter([truth], honesty=0.9, size=16),
        ScriptedDrafter([[*truth, 1, 2, 3, 4, 5, 6, 7]], honesty=1.0, size=16),  # drafts beyond the end
        MedusaDrafter(heads, Topology.full([2, 2, 1, 1, 1, 1])),
        MedusaDrafter(heads, Topology.chain(6)),
        *(untrained(trunk, name) for name in UNTRAINED),
    ):
        ids, finished = collect(list(decode(trunk, drafter, [Request(prompt, 50)])), 1)
        assert ids == [truth] and finished == {0: "length"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rows_near_the_contexts_end_and_far_from_it(family: str) -> None:
    # the short row's trees are deep while the long ones stand at the end
    trunk = short_trunk(family)
    prompts = [[index * 5 % 65 for index in range(size)] for size in (21, 4, 23, 12)]
    truths = [plain_greedy(trunk, prompt, 24 - len(prompt)) for prompt in prompts]
    heads = memorising_heads(trunk, HeadsConfig("root", num=6), [prompts[1] + truths[1]])
    for drafter in (
        NullDrafter(),
        MedusaDrafter(heads, Topology.chain(6)),
        ScriptedDrafter(truths, honesty=0.8, size=16),
        *(untrained(trunk, name) for name in UNTRAINED),
    ):
        assert generate_ids(trunk, drafter, [Request(prompt, 50) for prompt in prompts]) == truths


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 5), ["prompt 1", "no tokens"]),
        (Request([1, 65], 5), ["prompt 1", "65", "0..64"]),
        (Request([-1, 3], 5), ["prompt 1", "-1", "0..64"]),
        (Request([1], 0), ["max_new_tokens=0"]),
        (Request([1], -4), ["max_new_tokens=-4"]),
        (Request([1] * 24, 5), ["prompt 1", "24", "at most 23"]),
        (Request([1] * 99, 5), ["prompt 1", "99", "24"]),
    ],
)
def test_requests_that_can_not_be_served_are_named(request_: Request, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        next(decode(short_trunk("llama"), NullDrafter(), [Request([1], 1), request_]))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


# Rows and sessions apart.


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_finish_close_up(name: str) -> None:
    ends = [frozenset({text_of(row)[at]}) for row, at in enumerate((2, 9, 5, 14, 30))]
    expected = [text_of(row)[: text_of(row).index(*ends[row]) + 1] for row in range(5)]
    requests = [Request(prompt, 40, eos) for prompt, eos in zip(PROMPTS, ends, strict=True)]
    decoder = Decoder(trunk_of(), drafters(range(5))[name])
    steps, widths = [decoder.admit(requests)], []
    while decoder.live:
        widths.append(len(decoder.slots))
        assert set(decoder.slots) >= decoder.live and len(decoder.live) * 2 > len(decoder.slots)
        steps.append(decoder.step())
    ids, finished = collect(steps, 5)
    assert ids == expected and set(finished.values()) == {"eos"}
    assert widths == sorted(widths, reverse=True) and widths[-1] < 5


def test_interleaved_decoders_of_one_trunk() -> None:
    names = ("none", "heads", "adversary", *UNTRAINED)
    rows = [[[0], [1, 2], [4, 3, 0]][place % 3] for place in range(len(names))]
    made = [Decoder(trunk_of(), drafters(group)[name]) for group, name in zip(rows, names, strict=True)]
    steps = [
        [decoder.admit([Request(PROMPTS[row], 20) for row in group])] for decoder, group in zip(made, rows, strict=True)
    ]
    while any(decoder.live for decoder in made):
        for decoder, done in zip(made, steps, strict=True):
            if decoder.live:
                done.append(decoder.step())
    for group, done in zip(rows, steps, strict=True):
        assert collect(done, len(group))[0] == [text_of(row)[:20] for row in group]


@pytest.mark.parametrize("name", ["heads", *UNTRAINED])
def test_two_generations_of_one_drafter(name: str) -> None:
    drafter = drafters([0])[name]
    one = decode(trunk_of(), drafter, [Request(PROMPTS[0], 20)])
    other = decode(trunk_of(), drafter, [Request(PROMPTS[1], 20), Request(PROMPTS[2], 20)])
    steps: list[list[Step]] = [[], []]
    pending = [(one, steps[0]), (other, steps[1])]
    while pending:
        for pair in list(pending):
            step = next(pair[0], None)
            if step is None:
                pending.remove(pair)
            else:
                pair[1].append(step)
    assert collect(steps[0], 1)[0] == [text_of(0)[:20]]
    assert collect(steps[1], 2)[0] == [text_of(1)[:20], text_of(2)[:20]]


def test_a_long_generation_outgrows_the_first_block() -> None:
    trunk = tiny_trunk("llama", max_position_embeddings=400)
    prompts = [[7, 0, 3], [1] * 250]
    plain = generate_ids(trunk, NullDrafter(), [Request(prompt, 40) for prompt in prompts])
    assert plain == [plain_greedy(trunk, prompt, 40) for prompt in prompts]
    script = ScriptedDrafter(plain, honesty=0.8, size=16)
    assert generate_ids(trunk, script, [Request(prompt, 40) for prompt in prompts]) == plain


# Sampling.


def sampled(
    name: str, rows: Sequence[int], params: Sequence[SamplingParams], rule: AcceptRule | None = None
) -> list[list[int]]:
    requests = [Request(PROMPTS[row], 16, sampling=param) for row, param in zip(rows, params, strict=True)]
    scripts = drafters(rows)
    if name in ("adversary", "oracle"):  # one that knows what will be sampled, and lies now and then
        truth = [solo(row, param) for row, param in zip(rows, params, strict=True)]
        honesty = 0.7 if name == "adversary" else 1.0
        scripts[name] = ScriptedDrafter(truth, honesty=honesty, size=12)
    return collect(list(decode(trunk_of(), scripts[name], requests, rule)), len(rows))[0]


@cache
def solo(row: int, params: SamplingParams) -> list[int]:
    """Plain sampling, one row: the trunk's law at each position and the row's own draws."""
    return generate_ids(trunk_of(), NullDrafter(), [Request(PROMPTS[row], 16, sampling=params)])[0]


PARAMS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(),  # a greedy row among sampling ones
    SamplingParams(temperature=1.5, top_p=0.9, seed=2**40),
    SamplingParams(temperature=2.0, min_p=0.01, seed=1),
]


@pytest.mark.parametrize("name", ["none", "heads", "adversary", "oracle", *UNTRAINED])
def test_one_seed_one_text_whatever_the_drafter_and_the_company(name: str) -> None:
    rule = DeterministicRule()
    expected = [solo(row, params) for row, params in enumerate(PARAMS)]
    assert expected[2] == text_of(2)[:16] and expected[0] != text_of(0)[:16]
    assert sampled(name, range(5), PARAMS, rule) == expected
    assert sampled(name, [4, 0], [PARAMS[4], PARAMS[0]], rule) == [expected[4], expected[0]]
    for row in (1, 2):
        assert sampled(name, [row], [PARAMS[row]], rule) == [expected[row]]


@pytest.mark.parametrize("kind", ["medusa", "root", "hydra"])
@pytest.mark.parametrize("mode", ["sampled", "mixed"])
def test_with_drawn_children_a_row_of_a_batch_equals_its_solo_run(kind: str, mode: str) -> None:
    # rows ask for different counts: a tree deeper than a row's own room must not change its last tokens
    heads = random_heads(trunk_of(), HeadsConfig(kind, num=4), scale=0.1)  # laws without ties
    drafter = MedusaDrafter(heads, Topology.full([3, 2, 1, 1]), Drafting(mode, temperature=0.8))
    counts = [16, 3, 9, 7, 12]
    requests = [
        Request(PROMPTS[row], count, sampling=params)
        for row, (count, params) in enumerate(zip(counts, PARAMS, strict=True))
    ]
    together = generate_ids(trunk_of(), drafter, requests)
    assert together[2] == text_of(2)[: counts[2]]  # the greedy row
    assert together == [generate_ids(trunk_of(), drafter, [request])[0] for request in requests]
    assert together == generate_ids(trunk_of(), drafter, requests)


def test_the_rule_follows_the_tree() -> None:
    # children drawn at random are judged by the recursive rule: other tokens than plain decoding draws, in rows that
    # sample; with a rule of one's own, or children that are not drawn, they are the same
    params = SamplingParams(temperature=1.5, seed=4)
    heads = heads_drafter()
    assert isinstance(heads, MedusaDrafter)
    top = MedusaDrafter(heads.heads, heads.topology, Drafting("top"))
    assert sampled("heads", [0], [params]) != [solo(0, params)]
    assert sampled("heads", [0], [params]) == sampled("heads", [0], [params], RecursiveRule())
    assert sampled("heads", [0], [params], DeterministicRule()) == [solo(0, params)]
    assert generate_ids(trunk_of(), top, [Request(PROMPTS[0], 16, sampling=params)]) == [solo(0, params)]


def test_plain_sampling_follows_the_law_token_by_token() -> None:
    # every token is the inverse of the cumulative law at this position's own draw
    params, ids = PARAMS[0], list(PROMPTS[0])
    for _ in range(8):
        law = to_probs(recompute(trunk_of(), ids)[-1][None, None], [params])
        uniform = HashDraws().uniform(Key(torch.tensor([params.seed]), torch.tensor([[len(ids)]]), TOKEN))
        ids.append(int(draw(law, uniform)))
    assert ids[1:] == solo(0, params)[:8]


def test_other_seeds_give_other_texts_and_temperature_0_none() -> None:
    texts = {tuple(solo(0, SamplingParams(temperature=1.0, seed=seed))) for seed in range(10)}
    assert len(texts) == 10
    assert run("heads", [0]) == run("heads", [0])
    assert solo(0, SamplingParams(seed=5)) == solo(0, SamplingParams(seed=6)) == text_of(0)[:16]


@pytest.mark.parametrize("name", ["none", "heads", *UNTRAINED])
def test_first_tokens_have_the_trunks_law(name: str) -> None:
    # over many seeds; the second token too, which for the heads comes out of a tree
    params = [SamplingParams(temperature=1.5, seed=seed) for seed in range(1500)]
    requests = [Request(PROMPTS[1], 2, sampling=param) for param in params]
    drafter = drafters([1])[name]
    ids = generate_ids(trunk_of(), drafter, requests)
    firsts = Counter(first for first, _ in ids)
    assert len(firsts) > 8  # the root is not the argmax
    likeliest = firsts.most_common(1)[0][0]
    seconds = Counter(second for first, second in ids if first == likeliest)
    for counts, text in ((firsts, PROMPTS[1]), (seconds, [*PROMPTS[1], likeliest])):
        law = to_probs(recompute(trunk_of(), text)[-1][None, None], params[:1])[0, 0]
        assert all(law[token] > 0 for token in counts)
        assert chi_square(counts, law.tolist()) > 1e-4
