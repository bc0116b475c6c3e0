"""Trees whose size goes by the rows: no text changes with them, and the size is the one that pays."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa import machine, sizing
from medusa.calibrate import GOOD_ENOUGH, grown
from medusa.checkpoint import CALIBRATION, save_heads, save_tree
from medusa.costs import Scratch
from medusa.decoding import Decoder, Request, Step, decode
from medusa.drafters.children import Drafting
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.sized import SizedDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer.drafters import make_drafter
from medusa.infer.redraft import draws, redraft
from medusa.infer.warmup import step_sizes
from medusa.machine import own_seconds
from medusa.sampling import SamplingParams
from medusa.sizing import Rung, Sizing, best, measure, rungs
from medusa.testing import memorising_heads, plain_greedy, random_heads, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

KINDS = ("medusa", "root", "hydra", "markov")
RNG = random.Random(7)
PROMPTS = [[RNG.randrange(65) for _ in range(size)] for size in (3, 9, 1, 14, 6, 2, 11, 5, 4)]
LIMITS = (24, 3, 31, 9, 14, 2, 26, 11, 5)
GROWTH = [(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (2,)]
TREES = [grown(GROWTH, size) for size in (1, 2, 3, 5, 8)]
INFINITE = float("inf")


@cache
def trunk_of() -> Trunk:
    return tiny_trunk("llama")


@cache
def text_of(row: int) -> list[int]:
    return plain_greedy(trunk_of(), PROMPTS[row], LIMITS[row])


@cache
def heads_of(kind: str = "root") -> MedusaHeads:
    """Heads that know half of the texts, so that rows accept different lengths."""
    config = HeadsConfig("root", num=3, markov=2) if kind == "markov" else HeadsConfig(kind, num=3)
    if kind == "markov":
        return random_heads(trunk_of(), config)
    return memorising_heads(
        trunk_of(), config, [prompt + plain_greedy(trunk_of(), prompt, 32) for prompt in PROMPTS[::2]]
    )


def by_rows(slots: int) -> int:
    """Smaller trees for more rows, down to none: five buckets, as a cost curve would have them."""
    return len(TREES) - 1 - min((slots - 1).bit_length(), len(TREES) - 1)


def sized(kind: str = "root", pick: Callable[[int], int] = by_rows, mode: str = "sampled") -> SizedDrafter:
    own = MedusaDrafter(heads_of(kind), Topology.full([2, 2]), Drafting(mode))
    return SizedDrafter(own, TREES, pick)


def run(drafter: Any, requests: Sequence[Request], most: int | None = None) -> tuple[list[list[int]], list[Step]]:
    steps = list(decode(trunk_of(), drafter, requests, most=most))
    texts: list[list[int]] = [[] for _ in requests]
    for step in steps:
        for row, tokens in step.tokens.items():
            texts[row] += tokens
    return texts, steps


# No text changes.


@pytest.mark.parametrize("most", [None, 1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_cross_the_buckets_are_what_they_are_alone(kind: str, most: int | None) -> None:
    requests = [Request(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    texts, steps = run(sized(kind), requests, most)
    assert texts == [text_of(row) for row in range(len(PROMPTS))]
    nodes = {step.nodes for step in steps if step.nodes}
    assert len(nodes) >= (4 if most is None else 1) and (most is not None or 1 in nodes)
    if kind != "markov":
        assert max(len(tokens) for step in steps for tokens in step.tokens.values()) > 1  # drafts were accepted


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(TREES) - 1), min_size=16, max_size=16), st.integers(0, 1000))
def test_whatever_is_picked_no_text_changes(picks: list[int], seed: int) -> None:
    # another tree in every step, and rows that join and leave
    turns = iter(picks * 100)
    rng, decoder, waiting = random.Random(seed), Decoder(trunk_of(), sized(pick=lambda _: next(turns))), [*range(9)]
    expected: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    while waiting or decoder.live:
        if waiting and (not decoder.live or rng.random() < 0.4):
            row = waiting.pop()
            expected[decoder.admitted] = row
            step = decoder.admit([Request(PROMPTS[row], LIMITS[row])])
        else:
            step = decoder.step()
        for number, tokens in step.tokens.items():
            texts.setdefault(number, []).extend(tokens)
    assert all(texts[number] == text_of(row) for number, row in expected.items())


def test_the_tree_goes_by_slots_and_not_by_rows_that_live() -> None:
    # a slot that serves nobody is computed all the same until it leaves
    decoder = Decoder(trunk_of(), sized(pick=lambda slots: min(slots, 4) - 1))
    decoder.admit([Request(prompt, 40) for prompt in PROMPTS[:3]])
    assert decoder.step().nodes == TREES[2].size
    decoder.finish(1)
    assert decoder.step().nodes == TREES[2].size
    decoder.finish(0)
    assert decoder.step().nodes == TREES[0].size == 1


@pytest.mark.parametrize("mode", ["sampled", "mixed", "top"])
@pytest.mark.parametrize("kind", ["root", "hydra"])
def test_what_is_sampled_depends_on_no_size(kind: str, mode: str) -> None:
    # a row's text for its seed: whatever is picked, whoever is in its batch, and that of the checkpoint's tree
    sampling = [SamplingParams(temperature=temperature, seed=row) for row, temperature in enumerate((1.0, 0, 0.7, 0))]
    requests = [Request(prompt, 20, sampling=each) for prompt, each in zip(PROMPTS, sampling, strict=False)]
    texts, steps = run(sized(kind, mode=mode), requests)
    assert [step.nodes for step in steps][1:6] == [7] * 5  # later there is less room
    own = MedusaDrafter(heads_of(kind), Topology.full([2, 2]), Drafting(mode))
    for row, request in enumerate(requests):
        for drafter in (sized(kind, lambda _: 0, mode), sized(kind, lambda _: 4, mode), own):
            assert run(drafter, [request])[0] == [texts[row]]
    assert texts[1] == plain_greedy(trunk_of(), PROMPTS[1], 20)


def test_greedy_rows_are_sized_again_once_nobody_samples() -> None:
    requests = [Request(PROMPTS[0], 4, sampling=SamplingParams(temperature=1.0, seed=1)), Request(PROMPTS[1], 30)]
    _, steps = run(sized(), requests)
    nodes = [step.nodes for step in steps if step.nodes]
    assert nodes[0] == 7 and nodes[-5:] != [7] * 5 and TREES[-1].size in nodes


def test_a_tree_that_heads_can_not_fill_is_refused() -> None:
    own = MedusaDrafter(heads_of(), Topology.root())
    with pytest.raises(UserError, match="deep"):
        SizedDrafter(own, [Topology.chain(4)], by_rows)
    with pytest.raises(UserError, match="bound to another trunk"):
        sized().open(tiny_trunk("gpt2"))


# Which size.


def rungs_of(gains: Sequence[float]) -> list[Rung]:
    return [Rung(Topology.chain(place), gain) for place, gain in enumerate(gains)]


def test_the_best_by_hand() -> None:
    ladder = rungs_of([1.0, 1.6, 2.4, 2.6])
    assert best(ladder, [1.0, 1.0, 1.0, 1.0]) == 3
    assert best(ladder, [1.0, 2.0, 3.0, 4.0]) == 0  # nothing pays
    assert best(ladder, [1.0, 1.1, 1.3, 1.5]) == 2
    assert best(ladder, [1.0, 1.1, 1.3, 1.4]) == 2  # 1.857 is no more than timings vary by above 1.846
    assert best(ladder, [1.0, 1.1, INFINITE, INFINITE]) == 1


def test_the_checkpoints_own_tree_is_left_for_a_clear_gain_only() -> None:
    ladder = rungs_of([1.0, 1.6, 2.4, 2.6])
    assert best(ladder, [1.0, 1.1, 1.3, 1.5], own=3) == 3
    assert best(ladder, [1.0, 1.1, 1.3, 1.6], own=3) == 2  # 1.846 against 1.625
    assert best(ladder, [1.0, 1.1, INFINITE, INFINITE], own=2) == 1


class Fake:
    """Steps that take what a table says, and each time some more; notes what was asked."""

    def __init__(self, seconds: Sequence[float], noise: Callable[[], float] = lambda: 0.0) -> None:
        self.seconds, self.noise = seconds, noise
        self.asked: list[int] = []

    def step(self, place: int) -> float:
        self.asked.append(place)
        return self.seconds[place] * (1 + self.noise())


costs = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(costs, st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.floats(1e-5, 0.5))
def test_what_is_not_tried_is_not_the_best(more: list[float], gains: list[float], one: float) -> None:
    seconds = [one * (1 + sum(more[:place])) for place in range(len(more))]
    ladder = rungs_of([1 + sum(gains[:place]) for place in range(len(more))])
    found = measure(Fake(seconds), ladder)  # type: ignore[arg-type]
    assert all(each in (true, INFINITE) for each, true in zip(found, seconds, strict=True))
    assert best(ladder, found) == best(ladder, seconds)


def test_large_trees_are_not_tried_once_they_can_not_pay() -> None:
    fake = Fake([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
    found = measure(fake, rungs_of([1.0, 1.5, 2.8, 3.0, 3.1, 3.1]))  # type: ignore[arg-type]
    # 3.1 / 10 is a third of the best; that of 2 nodes too bad to be timed again
    assert found == [1.0, 2.0, 3.0, 10.0, INFINITE, INFINITE]
    assert fake.asked == [0, 0, 1, 1, 2, 2, 3, 3, 0, 2]


def test_steps_are_timed_in_turns_and_their_least_counts() -> None:
    spikes = iter([5.0, 0.0, 0.0, 4.0, 0.0] * 100)
    fake = Fake([1e-3, 1.2e-3, 1.4e-3], lambda: next(spikes))
    assert measure(fake, rungs_of([1.0, 1.3, 1.6])) == [1e-3, 1.2e-3, 1.4e-3]  # type: ignore[arg-type]
    turns = fake.asked[6:]
    assert turns == [0, 1, 2] * (len(turns) // 3) and 1 < len(turns) // 3 <= sizing.ROUNDS


def test_a_step_costs_no_more_than_one_of_a_larger_tree() -> None:
    fake = Fake([1e-3, 1.9e-3, 1.4e-3, 2e-3])
    assert measure(fake, rungs_of([1.0, 1.5, 1.6, 1.9])) == [1e-3, 1.4e-3, 1.4e-3, 2e-3]  # type: ignore[arg-type]


def test_measuring_ends() -> None:
    quick, slow = Fake([1e-5, 1e-5]), Fake([0.1, 0.1])
    for fake in (quick, slow):
        measure(fake, rungs_of([1.0, 1.1]))  # type: ignore[arg-type]
    assert len(quick.asked) == 4 + 2 * sizing.ROUNDS and len(slow.asked) == 4 + 2


# Measured once.


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps cost by the table of a slow machine; the numbers of rows that were measured."""
    rows: list[int] = []

    class Table(Fake):
        def __init__(self, heads: MedusaHeads, trees: Sequence[Topology], count: int) -> None:
            rows.append(count)
            super().__init__([1.0 + (tree.size - 1) * count / 32 for tree in trees])

    monkeypatch.setattr(sizing, "Scratch", Table)
    return rows


LADDER = [Rung(tree, gain) for tree, gain in zip(TREES, (1.0, 1.5, 1.9, 2.5, 3.3), strict=True)]


def test_more_rows_have_smaller_trees_down_to_none(measured: list[int], tmp_path: Path) -> None:
    pick = Sizing(heads_of(), LADDER, tmp_path / "steps.json")
    assert [pick.trees[pick(rows)].size for rows in (1, 2, 4, 8, 16, 32)] == [8, 8, 8, 3, 1, 1]
    assert [pick(rows) for rows in range(1, 33)] == [pick(1 << (rows - 1).bit_length()) for rows in range(1, 33)]
    assert measured == [1, 2, 4, 8, 16, 32]
    keeps = Sizing(heads_of(), LADDER, tmp_path / "steps.json", own=TREES[3])
    assert [keeps.trees[keeps(rows)].size for rows in (1, 2, 4, 8, 16, 32)] == [8, 8, 5, 5, 1, 1]
    assert Sizing(heads_of(), LADDER, tmp_path / "steps.json", own=Topology.chain(9)).own is None


def test_the_next_process_measures_nothing(measured: list[int], tmp_path: Path) -> None:
    file = tmp_path / "cache" / "steps.json"
    first = [Sizing(heads_of(), LADDER, file).costs(rows) for rows in (1, 32)]
    again = Sizing(heads_of(), LADDER, file)
    assert [again.costs(rows) for rows in (1, 32)] == first and measured == [1, 32]
    assert INFINITE in first[1] and "Infinity" not in file.read_text(encoding="utf-8")


def test_what_steps_cost_is_kept_for_what_it_was_measured_on(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.json"
    Sizing(heads_of(), LADDER, file).costs(4)
    Sizing(heads_of("hydra"), LADDER, file).costs(4)
    Sizing(heads_of(), LADDER[:3], file).costs(4)
    Sizing(heads_of(), [*LADDER[:4], Rung(Topology.full([7]), 2.9)], file).costs(4)
    other = random_heads(tiny_trunk("llama", seed=5), HeadsConfig("root", num=3))
    Sizing(other, LADDER, file).costs(4)
    own = machine.describe()
    for change in ({"processor": "another"}, {"threads": 3}, {"accelerator": "a"}):
        monkeypatch.setattr(machine, "describe", lambda more=change: own | more)
        Sizing(heads_of(), LADDER, file).costs(4)
    assert measured == [4] * 8
    monkeypatch.setattr(machine, "describe", lambda: own)
    for heads in (heads_of(), heads_of("hydra"), other):
        Sizing(heads, LADDER, file).costs(4)
    assert measured == [4] * 8


def test_another_number_of_threads_is_picked_for_anew(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = Sizing(heads_of(), LADDER, tmp_path / "steps.json")
    pick(1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    pick(1)
    assert measured == [1, 1]


BROKEN = ("", "[]", "{}", '{"entries": [1]}', '{"entries": [{"setting": 1}]}')


@pytest.mark.parametrize("content", [*BROKEN, "null", "negative", "words", "short", "number"])
def test_a_file_of_others_is_not_believed(measured: list[int], tmp_path: Path, content: str) -> None:
    file = tmp_path / "steps.json"
    found = Sizing(heads_of(), LADDER, file).costs(2)
    entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
    wrong = {"null": [None] * 5, "negative": [-1.0] * 5, "words": ["1"] * 5, "short": [1.0], "number": 1.0}
    if content in wrong:
        content = json.dumps({"entries": [entries[0] | {"seconds": wrong[content]}]})
    file.write_text(content, encoding="utf-8")
    assert Sizing(heads_of(), LADDER, file).costs(2) == found and measured == [2, 2]
    assert Sizing(heads_of(), LADDER, file).costs(2) == found and measured == [2, 2]  # and mended


def test_where_nothing_can_be_written_each_process_measures(measured: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pick = Sizing(heads_of(), LADDER, tmp_path / "file" / "steps.json")
    assert pick(1) == pick(1) == 4 and measured == [1]


def test_the_default_place_is_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Sizing(heads_of(), LADDER)(1)  # really measured
    entry = json.loads((tmp_path / "medusa" / "steps.json").read_text(encoding="utf-8"))["entries"][0]
    assert entry["setting"]["rows"] == 1 and entry["setting"]["trunk"] == trunk_of().fingerprint()
    assert entry["seconds"][0] > 0 and len(entry["seconds"]) == len(TREES)


# Really measured.


@pytest.mark.parametrize(("rows", "context"), [(1, 2048), (3, 2048), (2, 24), (3, 12)])
def test_a_scratch_step_is_one_of_the_whole_tree_and_batch(
    rows: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = tiny_trunk("llama", max_position_embeddings=context)
    seen: list[tuple[int, ...]] = []
    inner = Trunk.tree_forward

    def forward(self: Trunk, tree: Any, *rest: Any, **options: Any) -> Any:
        seen.append(tuple(tree.tokens_BN.shape))
        return inner(self, tree, *rest, **options)

    monkeypatch.setattr(Trunk, "tree_forward", forward)
    scratch = Scratch(random_heads(trunk, HeadsConfig("root", num=3)), TREES, rows)
    places = [place for _ in range(12) for place in (0, 4, 3)]  # two of one depth
    assert all(scratch.step(place) > 0 for place in places)
    assert [shape for shape in seen if shape[1] > 0] == [(rows, TREES[place].size) for place in places]
    lengths = scratch._decoder.cache.lengths
    assert len(set(lengths)) == rows or rows == 2
    assert max(lengths) <= context and min(lengths) >= min(context // 4, 100)


def test_time_spent_waiting_is_not_a_steps_own() -> None:
    assert torch.get_num_threads() == 1
    assert own_seconds(lambda: time.sleep(0.05), torch.device("cpu")) < 0.02
    assert own_seconds(lambda: sum(range(300_000)), torch.device("cpu")) > 1e-4


def test_on_several_threads_the_wall_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert own_seconds(lambda: time.sleep(0.02), torch.device("cpu")) >= 0.02


# From a checkpoint.


def put(folder: Path, **changes: Any) -> Path:
    """A calibration of trees of 1, 3 and 5 nodes."""
    content = {
        "rows": [{"nodes": nodes, "tokens_per_step": gain} for nodes, gain in ((1, 1.0), (3, 1.9), (5, 2.5))],
        "growth": [list(path) for path in GROWTH],
    }
    kept = {name: value for name, value in (content | changes).items() if value is not None}
    (folder / CALIBRATION).write_text(json.dumps(kept), encoding="utf-8")
    return folder


def test_the_rungs_are_the_beginnings_of_the_growth(tmp_path: Path) -> None:
    found = rungs(put(tmp_path), Topology.chain(2))
    assert found == [Rung(Topology.root(), 1.0), Rung(TREES[2], 1.9), Rung(TREES[3], 2.5)]
    without = rungs(put(tmp_path, rows=[{"nodes": 3, "tokens_per_step": 1.9}]), Topology.root())
    assert without == [Rung(Topology.root(), 1.0), Rung(TREES[2], 1.9)]


def test_an_older_calibration_has_its_tree_or_none(tmp_path: Path) -> None:
    folder = put(tmp_path, growth=None)
    assert rungs(folder, Topology.chain(2)) == [Rung(Topology.root(), 1.0), Rung(Topology.chain(2), 1.9)]
    assert rungs(folder, Topology.root()) == [Rung(Topology.root(), 1.0)]


FAULTS: dict[str, dict[str, Any]] = {
    "no rows": {"rows": None},
    "rows": {"rows": 3},
    "a row": {"rows": [{"nodes": 1}]},
    "words": {"rows": [{"nodes": "x", "tokens_per_step": 1.0}]},
    "no such tree": {"growth": None, "rows": [{"nodes": 2, "tokens_per_step": 1.0}]},
    "short": {"growth": [[0]]},
    "orphan": {"growth": [[0, 0], [1]]},
    "numbers": {"growth": [1, 2, 3, 4]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_calibration_that_says_too_little_is_refused(tmp_path: Path, fault: str) -> None:
    folder = put(tmp_path, **FAULTS[fault])
    with pytest.raises(UserError, match=f"{CALIBRATION} does not say what trees of each size bring .*medusa calibrate"):
        rungs(folder, Topology.chain(2))


def test_without_a_calibration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has no {CALIBRATION}, which says .*: make it with `medusa calibrate"):
        rungs(tmp_path, Topology.chain(2))


def test_by_its_name(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_heads(tmp_path, heads_of(), "here")
    save_tree(tmp_path, Topology.chain(2))
    drafter = make_drafter("sized", trunk_of(), put(tmp_path))
    assert isinstance(drafter, SizedDrafter) and measured == []
    texts, _ = run(drafter, [Request(prompt, 12) for prompt in PROMPTS[:5]])
    assert texts == [plain_greedy(trunk_of(), prompt, 12) for prompt in PROMPTS[:5]] and measured[0] == 8
    assert [size.nodes for size in step_sizes(drafter, [1])] == [1, 3, 5]
    warm = redraft(drafter, temperature=0.5)
    assert draws(drafter) and isinstance(warm, SizedDrafter) and warm.sampling.drafting.temperature == 0.5
    assert warm.pick is drafter.pick and drafter.sampling.drafting.temperature == 1
    with pytest.raises(UserError, match="takes the heads of a folder"):
        make_drafter("sized", trunk_of(), None)
    with pytest.raises(UserError, match="drafter='sized:4': give it as sized"):
        make_drafter("sized:4", trunk_of(), tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1.0, 9.0), min_size=1, max_size=9), st.lists(st.floats(0.1, 9.0), min_size=9, max_size=9))
def test_the_smallest_of_the_best_is_taken(gains: list[float], seconds: list[float]) -> None:
    ladder, seconds = rungs_of(gains), seconds[: len(gains)]
    paces = [gain / each for gain, each in zip(gains, seconds, strict=True)]
    found = best(ladder, seconds)
    assert paces[found] >= GOOD_ENOUGH * max(paces) and all(each < GOOD_ENOUGH * max(paces) for each in paces[:found])
