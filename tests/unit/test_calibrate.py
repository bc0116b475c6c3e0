"""Calibration: what the heads guess, which tree that is worth, and the figures held against the decode loop itself."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.calibrate import (
    GOOD_ENOUGH,
    Calibration,
    Continuations,
    SizeRow,
    accuracy,
    calibrate,
    continuations,
    grow,
    grown,
    growth,
    head_ranks,
    node_shares,
    recalibrate,
    tokens_per_step,
)
from medusa.checkpoint import CALIBRATION, TREE, load_tree
from medusa.confidence import temperatures
from medusa.costs import step_costs
from medusa.decoding import Decoder, Request, decode
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.files import read_json
from medusa.heads import KINDS, HeadsConfig, MedusaHeads
from medusa.testing import memorising_heads, plain_greedy, random_heads, random_topology, recompute, tiny_model
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk

PROMPTS = [[3], [0, 17, 0, 5], [64, 1, 2, 3, 0, 0, 9, 40], [5, 5, 0, 8, 21, 33], [11, 0, 52, 4, 4, 19, 27, 35, 0, 61]]
TOKENS = 16
NUM = 4
EOS = 0  # a frequent answer: of the prompts' texts some end early, one at once, one not at all


@cache
def trunk_of(family: str = "llama", eos: int | None = None, **changes: int) -> Trunk:
    model = tiny_model(family, **changes)
    model.generation_config.eos_token_id = eos
    return Trunk(model)


@cache
def held_of(family: str = "llama", eos: int | None = None) -> Continuations:
    return continuations(trunk_of(family, eos), PROMPTS, TOKENS)


@cache
def heads_of(kind: str, family: str = "llama") -> MedusaHeads:
    """Heads that know two of the texts, and guess the others.

    Tokens that are in neither text would tie to the bit, and no list could say which of them comes first: a little
    noise tells them apart.
    """
    heads = memorising_heads(trunk_of(family), HeadsConfig(kind, NUM), held_of(family).ids[1:3])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for head in range(NUM):
            weight = heads.head(head).projection.weight  # type: ignore[union-attr]
            weight += torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 1e-4
    return heads


def rank_rows(rng: random.Random, rows: int, heads: int, ranks: int) -> list[Tensor]:
    """Texts of a few positions that end: small ranks, and -1 beyond the end."""
    texts = []
    for _ in range(rows):
        length = rng.randrange(1, 6)
        texts.append(
            torch.tensor(
                [[rng.randrange(ranks) if t + k < length else -1 for k in range(heads)] for t in range(length)]
            )
        )
    return texts


# Continuations.


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])  # learned positions; a window of 8
def test_continuations_are_the_trunks_own(family: str, batch: int) -> None:
    held = continuations(trunk_of(family), PROMPTS, TOKENS, batch)
    assert held.starts == [len(prompt) for prompt in PROMPTS]
    for prompt, ids, hidden in zip(PROMPTS, held.ids, held.hidden, strict=True):
        assert ids == prompt + plain_greedy(trunk_of(family), prompt, TOKENS)
        plain = trunk_of(family).forward(torch.tensor([ids])).hidden[0]
        torch.testing.assert_close(hidden, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_continuations_stop_at_eos(batch: int) -> None:
    held = continuations(trunk_of(eos=EOS), PROMPTS, TOKENS, batch)
    whole, lengths = held_of(), []
    for ids, start, hidden, text in zip(held.ids, held.starts, held.hidden, whole.ids, strict=True):
        new = text[start:]
        assert ids[start:] == (new[: new.index(EOS) + 1] if EOS in new else new)
        assert hidden.shape == (len(ids), 32)
        torch.testing.assert_close(hidden, recomputed(trunk_of(eos=EOS), ids), rtol=1e-11, atol=1e-11)
        lengths.append(len(ids) - start)
    assert len(set(lengths)) > 2  # so that rows of one batch were cut at different places


def recomputed(trunk: Trunk, ids: list[int]) -> Tensor:
    return trunk.forward(torch.tensor([ids])).hidden[0]


def test_continuations_end_where_the_context_does() -> None:
    trunk = trunk_of(max_position_embeddings=24)
    prompts = [[index * 5 % 65 for index in range(size)] for size in (23, 21, 4)]
    held = continuations(trunk, prompts, 10)
    assert [len(ids) for ids in held.ids] == [24, 24, 14]
    assert [len(row) for row in head_ranks(random_heads(trunk, HeadsConfig("hydra", 2)), held)][2] >= 9


def test_continuations_report_prompts_done() -> None:
    seen: list[tuple[int, int]] = []
    continuations(trunk_of(), PROMPTS, 3, 2, lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_halves_share_no_text_and_lose_none() -> None:
    held = held_of()
    one, other = held.halves()
    assert one.ids == held.ids[::2] and other.ids == held.ids[1::2]
    for half in (one, other):
        for ids, start, hidden in zip(half.ids, half.starts, half.hidden, strict=True):
            row = held.ids.index(ids)
            assert start == held.starts[row] and hidden is held.hidden[row]


# Ranks.


def naive_ranks(heads: MedusaHeads, ids: list[int], start: int, rows: int) -> list[list[int]]:
    """One position and one head at a time, off a plain forward of the text that decoding would have read by then."""
    answer = []
    for row in range(rows):
        state = start - 1 + row
        line = []
        for head in range(heads.config.num):
            if state + 2 + head >= len(ids):
                line.append(-1)
                continue
            hidden = recomputed(heads.trunk, ids[: state + 1])[-1]
            embedded = heads.embed(torch.tensor(ids[state + 1 : state + 2 + head]))
            context = {"medusa": None, "root": embedded[0], "hydra": embedded.flatten()}[heads.config.kind]
            logits = heads.logits(head, heads.features(head, hidden, context))
            order = logits.sort(descending=True, stable=True).indices.tolist()
            line.append(order.index(ids[state + 2 + head]))
        answer.append(line)
    return answer


@pytest.mark.parametrize(("kind", "eos"), [("medusa", None), ("root", EOS), ("hydra", None), ("hydra", EOS)])
def test_ranks_equal_those_of_one_position_at_a_time(kind: str, eos: int | None) -> None:
    held = held_of(eos=eos)
    assert {len(ids) - start for ids, start in zip(held.ids, held.starts, strict=True)} >= (
        {TOKENS} if eos is None else {2, 3}
    )
    for heads in (heads_of(kind), random_heads(trunk_of(), HeadsConfig(kind, 3, layers=2, projection="shared"))):
        ranks = head_ranks(heads, held)
        assert len(ranks) == len(PROMPTS)
        for row, ids, start in zip(ranks, held.ids, held.starts, strict=True):
            assert row.dtype == torch.int64 and row.shape[1] == heads.config.num
            assert len(row) >= len(ids) - start - 1  # every state with an answer
            assert row.tolist() == naive_ranks(heads, ids, start, len(row))


@pytest.mark.parametrize("eos", [None, EOS])
def test_ranks_are_minus_1_exactly_where_the_text_has_ended(eos: int | None) -> None:
    held = held_of(eos=eos)
    for row, ids, start in zip(head_ranks(heads_of("hydra"), held), held.ids, held.starts, strict=True):
        for place, head in itertools.product(range(len(row)), range(NUM)):
            assert (int(row[place, head]) == -1) == (start + 1 + place + head >= len(ids))


def test_ranks_have_a_row_per_state_that_decoding_stands_at() -> None:
    # a row that has emitted its last token proposes nothing more
    held = held_of(eos=EOS)
    rows = [len(row) for row in head_ranks(heads_of("root"), held)]
    assert rows == [len(ids) - start - 1 for ids, start in zip(held.ids, held.starts, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_memorising_heads_have_rank_0_on_what_they_know(kind: str) -> None:
    heads = memorising_heads(trunk_of(), HeadsConfig(kind, NUM), held_of().ids[1:2])
    assert set(head_ranks(heads, held_of())[1].flatten().tolist()) <= {0, -1}


def test_a_head_that_can_not_tell_tokens_apart_is_not_counted_as_right() -> None:
    # equal logits are frequent in 8 bits of mantissa: of two tokens that tie, one alone can stand first in the list
    heads = random_heads(trunk_of(), HeadsConfig("root", 2))
    with torch.no_grad():
        for head in range(2):
            heads.head(head).projection.weight.zero_()  # type: ignore[union-attr]
    ranks = head_ranks(heads, held_of())
    assert max(accuracy(ranks, 1)) < 0.5
    assert tokens_per_step(Topology.chain(2), ranks) < 2


def test_a_token_that_the_tokenizer_lacks_is_never_guessed() -> None:
    # the trunk may say an id that only pads its vocabulary; heads never draft it
    class Words:
        def __len__(self) -> int:
            return 50

    trunk = Trunk(tiny_model("llama"), Words())  # type: ignore[arg-type]
    heads = random_heads(trunk, HeadsConfig("root", 2))
    held = continuations(trunk, PROMPTS, TOKENS)
    assert any(max(ids[start + 1 :]) >= 50 for ids, start in zip(held.ids, held.starts, strict=True))
    ranks = head_ranks(heads, held)
    for row, ids, start in zip(ranks, held.ids, held.starts, strict=True):
        for place, head in itertools.product(range(len(row)), range(2)):
            target = start + 1 + place + head
            assert target >= len(ids) or (0 <= int(row[place, head]) < 50) == (ids[target] < 50)
    MedusaDrafter(heads, grow(ranks, 500))  # the tree takes no rank that heads don't have


# Accuracy.


def test_every_head_is_divided_by_its_own_count() -> None:
    ranks = [torch.tensor([[0, 3, -1], [1, -1, -1], [-1, -1, -1]]), torch.tensor([[0, 5, -1], [6, 0, -1], [2, -1, -1]])]
    assert accuracy(ranks, 1) == pytest.approx([2 / 5, 1 / 3, 0.0])
    assert accuracy(ranks, 5) == pytest.approx([4 / 5, 2 / 3, 0.0])
    assert accuracy(ranks, 7) == pytest.approx([1.0, 1.0, 0.0])


def test_accuracy_of_texts_that_ended_at_once() -> None:
    assert accuracy([torch.full((1, 2), -1), torch.full((0, 2), -1)], 1) == [0.0, 0.0]


# Growth.


def gain(paths: Sequence[tuple[int, ...]], ranks: Sequence[Tensor]) -> int:
    """Drafted tokens accepted, over all positions: one walk per position."""
    total = 0
    for line in (tuple(line) for row in ranks for line in row.tolist()):
        depth = 0
        while depth < len(line) and line[: depth + 1] in paths:
            depth += 1
        total += depth
    return total


def is_closed(paths: Sequence[tuple[int, ...]]) -> bool:
    return all(path[:-1] in paths or len(path) == 1 for path in paths)


@pytest.mark.parametrize("seed", range(8))
def test_every_beginning_of_the_growth_is_the_best_tree_of_its_size(seed: int) -> None:
    ranks = rank_rows(random.Random(seed), rows=4, heads=2, ranks=3)
    every = [(a,) for a in range(3)] + list(itertools.product(range(3), repeat=2))
    order = growth(ranks, 64)
    assert len(set(order)) == len(order)
    for size in range(1, 6):
        best = max(gain(some, ranks) for some in itertools.combinations(every, size) if is_closed(some))
        assert gain(order[:size], ranks) == best, (size, order)


@pytest.mark.parametrize("seed", range(20))
def test_growth_is_closed_and_gains_less_and_less(seed: int) -> None:
    ranks = rank_rows(random.Random(seed), rows=12, heads=4, ranks=3)
    order = growth(ranks, 1000)
    gains = [gain(order[:size], ranks) - gain(order[: size - 1], ranks) for size in range(1, len(order) + 1)]
    assert all(is_closed(order[:size]) for size in range(len(order) + 1))
    assert gains == sorted(gains, reverse=True) and gains[-1] >= 1
    assert [growth(ranks, size) for size in range(1, 30)] == [order[: size - 1] for size in range(1, 30)]


def test_growth_counts_paths_jointly() -> None:
    # each head alone is right half of the time at rank 0; never both of them
    ranks = [torch.tensor([[0, 1], [1, 0]] * 5)]
    assert growth(ranks, 5) == [(0,), (1,), (0, 1), (1, 0)]


def test_scarce_data_give_fewer_nodes() -> None:
    ranks = [torch.tensor([[0, 7], [0, -1], [-1, -1]])]
    assert grow(ranks, 64) == Topology.from_paths([[0], [0, 7]])
    assert [grow(ranks, size).size for size in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert grow([torch.full((1, 2), -1)], 64) == Topology.root()
    assert grow([torch.full((0, 2), -1)], 64) == Topology.root()
    assert grow(ranks, 1) == Topology.root()


# Tokens per step.


def decoded(heads: MedusaHeads, topology: Topology, tokens: int, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens after the prefill's and steps of the real loop, each prompt on its own."""
    emitted = steps = 0
    for prompt in prompts:
        request = Request(prompt, tokens, heads.trunk.eos_ids)
        done = list(decode(heads.trunk, MedusaDrafter(heads, topology), [request]))
        emitted += sum(len(step.tokens[0]) for step in done) - 1
        steps += len(done) - 1
    return emitted, steps


def topologies(ranks: Sequence[Tensor]) -> list[Topology]:
    rng = random.Random(0)
    return [
        Topology.root(),
        Topology.chain(1),
        Topology.chain(NUM),
        Topology.full([3, 2, 1, 1]),
        grow(ranks, 5),
        grow(ranks, 40),
        random_topology(rng, 12, ranks=3, depth=NUM),
    ]


@pytest.mark.parametrize(("kind", "eos"), [("medusa", EOS), ("root", None), ("hydra", None), ("hydra", EOS)])
def test_tokens_per_step_are_those_of_the_real_loop(kind: str, eos: int | None) -> None:
    """To the token: the same prompts, the same limit, the same end."""
    heads = memorised(kind, eos)
    ranks = head_ranks(heads, held_of(eos=eos))
    figures = []
    for topology in topologies(ranks):
        emitted, steps = decoded(heads, topology, TOKENS, PROMPTS)
        figures.append((tokens_per_step(topology, ranks), emitted / steps))
    assert [found for found, _ in figures] == [true for _, true in figures]
    assert len({true for _, true in figures}) >= 4


@cache
def memorised(kind: str, eos: int | None) -> MedusaHeads:
    """The same heads on a trunk with or without EOS."""
    if eos is None:
        return heads_of(kind)
    heads = MedusaHeads(HeadsConfig(kind, NUM), trunk_of(eos=eos))
    heads.load_state_dict(heads_of(kind).state_dict())
    return heads


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_per_step_follow_the_real_loop_step_by_step(kind: str) -> None:
    # texts in which the end plays no part: the loop may go on for as many tokens as there are heads
    heads = heads_of(kind)
    ranks = head_ranks(heads, held_of())
    for topology in topologies(ranks):
        for prompt, row in zip(PROMPTS, ranks, strict=True):
            request = Request(prompt, TOKENS + NUM)
            steps = list(decode(heads.trunk, MedusaDrafter(heads, topology), [request]))[1:]
            at = 0
            for step in steps:
                if at + NUM >= TOKENS:
                    break
                line = tuple(row[at].tolist())
                expected = next(d for d in range(NUM, -1, -1) if line[:d] in topology.paths)
                assert step.accepted[0] == expected
                at += expected + 1


def test_tokens_per_step_by_hand() -> None:
    topology = Topology.from_paths([[0], [1], [0, 0]])
    ranks = torch.tensor([[0, 0], [5, 5], [5, 5], [1, 0], [9, 9], [0, 2], [4, 4]])  # accepts 2, then 1, then 1
    assert tokens_per_step(topology, [ranks]) == pytest.approx(7 / 3)
    assert tokens_per_step(topology, [ranks, torch.tensor([[3, 0]])]) == pytest.approx(8 / 4)
    assert tokens_per_step(Topology.root(), [ranks]) == 1
    assert tokens_per_step(topology, [ranks[:0]]) == 1  # nothing was decoded


# Costs.


def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and nodes of every tree that is verified within timed work."""
    trees: list[tuple[int, int]] = []
    inner = Trunk.tree_forward
    timed: list[bool] = []

    def forward(self: Trunk, tree: DraftTree, cache: Any, **options: Any) -> Any:
        if timed:
            trees.append(tuple(tree.tokens_BN.shape))  # type: ignore[arg-type]
        return inner(self, tree, cache, **options)

    def seconds(work: Callable[[], object], device: torch.device) -> float:
        timed.append(True)
        work()
        timed.pop()
        return 1e-3 * len(trees)

    monkeypatch.setattr(Trunk, "tree_forward", forward)
    monkeypatch.setattr("medusa.costs.own_seconds", seconds)
    return trees


TREES = [Topology.root(), Topology.chain(3), Topology.full([3, 2])]


def test_step_costs_give_a_positive_pair_per_tree() -> None:
    seen: list[tuple[int, int]] = []
    costs = step_costs(heads_of("hydra"), TREES, PROMPTS[:1], 3, lambda done, total: seen.append((done, total)))
    assert len(costs) == 3 and all(step > 0 and forward > 0 for step, forward in costs)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_costs_are_medians_in_milliseconds_of_steps_and_forwards_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = served(monkeypatch)
    costs = step_costs(heads_of("root"), TREES, PROMPTS[:1], 3)
    sizes = [topology.size for topology in TREES]
    assert trees == [(1, size) for size in sizes for _ in "fs"] * 3
    # the clock's n-th reading is n ms: tree i's forwards are read at 2i+1, 2i+7, 2i+13 and its steps one later
    assert costs == [pytest.approx((2 * index + 8, 2 * index + 7)) for index in range(3)]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_costs_are_those_of_the_whole_batch_also_when_decoders_finish(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    trunk = trunk_of(max_position_embeddings=24)
    heads = random_heads(trunk, HeadsConfig("medusa", 3))
    trees = served(monkeypatch)
    made: list[Decoder] = []
    inner = Decoder.__init__
    monkeypatch.setattr(Decoder, "__init__", lambda self, *args: (made.append(self), inner(self, *args))[1])
    step_costs(heads, TREES, prompts, 40)
    assert len(made) > len(TREES)  # some were made anew
    assert {rows for rows, _ in trees} == {len(prompts)}


def test_costs_are_those_of_the_whole_tree_also_near_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # a row with little room left is served a smaller tree: cheaper, and not what is being measured
    trunk = trunk_of(max_position_embeddings=24)
    heads = random_heads(trunk, HeadsConfig("medusa", 3))
    trees = served(monkeypatch)
    step_costs(heads, TREES, PROMPTS[:1], 40)
    assert [size for _, size in trees] == [topology.size for topology in TREES for _ in "fs"] * 40


@pytest.mark.parametrize("left", [1, 2, 3])
def test_prompts_that_leave_no_room_to_measure(left: int) -> None:
    # measured, or refused in one line
    trunk = trunk_of(max_position_embeddings=24)
    heads = random_heads(trunk, HeadsConfig("medusa", 3))
    prompts = [[index * 5 % 65 for index in range(24 - left)]] * 2
    try:
        found = calibrate(heads, continuations(trunk, prompts, 4), sizes=(1, 3), rounds=2)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert all(row.step_ms > 0 for row in found.rows)


# The whole.


def fixed_costs(
    monkeypatch: pytest.MonkeyPatch, milliseconds: Callable[[Topology], float] = lambda topology: 1 + topology.size / 16
) -> list[Sequence[Sequence[int]]]:
    """Let a tree cost what a formula says; returns the prompts that costs were asked for."""
    asked: list[Sequence[Sequence[int]]] = []

    def costs(
        heads: MedusaHeads, topologies: Sequence[Topology], prompts: Sequence[Sequence[int]], *rest: object
    ) -> list[tuple[float, float]]:
        asked.append(prompts)
        return [(milliseconds(topology), milliseconds(topology) / 2) for topology in topologies]

    monkeypatch.setattr("medusa.calibrate.step_costs", costs)
    return asked


def calibrated(**options: Any) -> Calibration:
    return calibrate(heads_of("hydra"), held_of(), **{"rounds": 2} | options)


def test_calibration_with_real_costs() -> None:
    found = calibrated(sizes=(1, 2, 4, 8))
    assert [row.nodes for row in found.rows] == [1, 2, 4, 8]
    assert found.chosen in found.rows and found.topology.size == found.chosen.nodes
    for row in found.rows:
        assert row.step_ms > 0 and row.forward_ms > 0
        assert row.tokens_per_second == pytest.approx(1e3 * row.tokens_per_step / row.step_ms)


def test_trees_are_grown_on_one_half_and_judged_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_costs(monkeypatch)
    found = calibrated(sizes=(1, 4, 16))
    grown_on, judged_on = (head_ranks(heads_of("hydra"), half) for half in held_of().halves())
    for row, size in zip(found.rows, (1, 4, 16), strict=True):
        tree = grow(grown_on, size)
        assert (row.nodes, row.depth) == (tree.size, tree.depth)
        assert row.tokens_per_step == tokens_per_step(tree, judged_on)
        assert found.topology == tree or found.chosen != row
    assert found.accuracy == {"top1": accuracy(judged_on, 1), "top5": accuracy(judged_on, 5)}


def test_the_most_tokens_per_second_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_costs(monkeypatch)
    found = calibrated(sizes=(1, 2, 4, 8, 16))
    best = max(row.tokens_per_second for row in found.rows)
    assert found.chosen.nodes > 1 and found.chosen.tokens_per_second >= GOOD_ENOUGH * best
    slower = [row for row in found.rows if row.nodes < found.chosen.nodes]
    assert slower and all(row.tokens_per_second < GOOD_ENOUGH * best for row in slower)


def test_plain_decoding_is_chosen_where_nodes_are_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_costs(monkeypatch, lambda topology: 5.0 * topology.size)
    found = calibrated(sizes=(1, 2, 4, 8))
    assert found.topology == Topology.root() and found.chosen.tokens_per_step == 1


@pytest.mark.parametrize("sizes", list(itertools.permutations((2, 4, 8))))
def test_of_trees_equally_fast_the_smallest_is_chosen(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    # in whatever order the sizes are asked for
    judged_on = head_ranks(heads_of("hydra"), held_of().halves()[1])
    fixed_costs(monkeypatch, lambda topology: tokens_per_step(topology, judged_on))
    assert calibrated(sizes=sizes).topology.size == 2


def test_a_tree_clearly_faster_is_chosen_though_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    judged_on = head_ranks(heads_of("hydra"), held_of().halves()[1])
    fixed_costs(
        monkeypatch, lambda topology: tokens_per_step(topology, judged_on) * (0.97 if topology.size == 4 else 1)
    )
    assert calibrated(sizes=(2, 4, 8)).topology.size == 4
    fixed_costs(
        monkeypatch, lambda topology: tokens_per_step(topology, judged_on) * (0.99 if topology.size == 4 else 1)
    )
    assert calibrated(sizes=(2, 4, 8)).topology.size == 2


def test_sizes_beyond_the_data_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_costs(monkeypatch)
    found = calibrate(heads_of("root"), continuations(trunk_of(), PROMPTS[:2], 3), sizes=(1, 2, 2, 100, 200, 300))
    sizes = [row.nodes for row in found.rows]
    assert sizes == sorted(set(sizes)) and sizes[:2] == [1, 2] and len(sizes) == 3 and sizes[2] < 100


def test_costs_are_asked_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fixed_costs(monkeypatch)
    calibrated(sizes=(1, 2))
    assert asked == [PROMPTS[:1]]


@pytest.mark.parametrize("prompts", [[], PROMPTS[:1]])
def test_fewer_than_two_prompts_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(UserError, match=rf"^{len(prompts)} held-out prompts.*2 or more") as caught:
        calibrate(heads_of("root"), continuations(trunk_of(), prompts, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_heads_that_say_nothing_promise_nothing(value: float) -> None:
    # all tokens tie: the true one stands at one and the same rank, always, and no tree may be grown on that
    heads = random_heads(trunk_of(), HeadsConfig("medusa", 3))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(value)
    ranks = head_ranks(heads, held_of())
    assert tokens_per_step(grow(ranks, 16), ranks) == 1.0


def test_a_few_that_tie_count_as_the_last_of_them() -> None:
    heads = random_heads(trunk_of(), HeadsConfig("medusa", 1))
    projection = heads.head(0).projection
    assert projection is not None
    with torch.no_grad():
        projection.weight[1::2] = projection.weight[:-1:2]  # tokens 2n and 2n+1 tie
        if projection.bias is not None:
            projection.bias[1::2] = projection.bias[:-1:2]
    held = held_of()
    for row, ids, start, hidden_TD in zip(head_ranks(heads, held), held.ids, held.starts, held.hidden, strict=True):
        for place, rank in enumerate(row[:, 0].tolist()):
            state = start - 1 + place
            logits_V = heads.logits(0, heads.features(0, hidden_TD[state], None))
            assert rank == int((logits_V >= logits_V[ids[state + 2]]).sum()) - 1


def test_texts_that_end_at_once_leave_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plain_greedy(trunk_of(), PROMPTS[1], 1)[0]
    trunk = trunk_of(eos=first)
    fixed_costs(monkeypatch)
    held = continuations(trunk, [PROMPTS[1], PROMPTS[1]], TOKENS)
    found = calibrate(random_heads(trunk, HeadsConfig("root", 2)), held)
    assert found.topology == Topology.root() and [row.tokens_per_step for row in found.rows] == [1.0]
    assert found.accuracy == {"top1": [0.0, 0.0], "top5": [0.0, 0.0]}


def test_a_calibration_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_costs(monkeypatch)
    found = calibrated(sizes=(1, 2, 4))
    content = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert content == found.as_json()
    assert SizeRow(**content["chosen"]) == found.chosen and [SizeRow(**row) for row in content["rows"]] == found.rows
    assert content["accuracy"].keys() == {"top1", "top5"} and content["machine"]["threads"] >= 1
    judged_on = head_ranks(heads_of("hydra"), held_of().halves()[1])
    assert content["node_share"] == node_shares(found.topology, judged_on)
    grown_on = held_of().halves()[0]
    trees = [grown(content["growth"], row["nodes"]) for row in content["rows"]]
    assert trees == [grow(head_ranks(heads_of("hydra"), grown_on), size) for size in (1, 2, 4)]
    trusted = temperatures(heads_of("hydra"), grown_on.ids, grown_on.starts, grown_on.hidden)
    assert content["temperatures"] == trusted and len(trusted) == NUM


@cache
def strangers() -> tuple[Continuations, Continuations, list[list[int]]]:
    """Texts to fit heads to, others to calibrate trees on, and prompts of others again."""
    rng = random.Random(5)
    prompts = [[rng.randrange(65) for _ in range(rng.randrange(2, 7))] for _ in range(60)]
    trunk = trunk_of(hidden_size=64)
    return continuations(trunk, prompts[:16], 40), continuations(trunk, prompts[16:40], 40), prompts[40:]


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_tokens_per_step_hold_on_other_prompts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    # heads fitted to some texts, trees calibrated on others, decoding measured on others again
    known, seen, unseen = strangers()
    heads = memorising_heads(trunk_of(hidden_size=64), HeadsConfig(kind, 3), known.ids)
    fixed_costs(monkeypatch)
    found = calibrate(heads, seen, sizes=(1, 4, 16))
    emitted, steps = decoded(heads, found.topology, 40, unseen)
    assert found.topology.size > 1 and found.chosen.tokens_per_step > 1.2
    assert found.chosen.tokens_per_step == pytest.approx(emitted / steps, rel=0.1)


def test_a_recalibration_is_written_into_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fixed_costs(monkeypatch)
    found = recalibrate(tmp_path, heads_of("hydra"), held_of(), sizes=(1, 4), rounds=2)
    assert {entry.name for entry in tmp_path.iterdir()} == {TREE, CALIBRATION}
    assert read_json(tmp_path / CALIBRATION) == found.as_json()
    assert load_tree(tmp_path, HeadsConfig("hydra", NUM)) == found.topology


def test_ranks_of_a_text_read_the_laws_that_decoding_reads() -> None:
    # not the corpus: what follows a prompt is the trunk's own argmax at every position
    for ids, start in zip(held_of().ids, held_of().starts, strict=True):
        assert recompute(trunk_of(), ids)[start - 1 : -1].argmax(-1).tolist() == ids[start:]
