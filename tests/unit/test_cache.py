"""The slot cache: what is written, kept, dropped and read, row by row."""

from __future__ import annotations

import pytest
import torch

from medusa.accept import DeterministicRule
from medusa.cache import BLOCK, FEW, LayerShape, PlaneShape, SlotCache
from medusa.laws import Laws
from medusa.sampling import SamplingParams, to_probs
from medusa.testing import plain_greedy, recompute, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

CPU, WIDE = torch.device("cpu"), torch.float64


def cache_of(rows: int, layers: int = 2) -> SlotCache:
    """Keys of 2 heads of 3, values of 1 head of 4: planes of two shapes, as in some families."""
    keys, values = PlaneShape(2, 3, CPU, WIDE), PlaneShape(1, 4, CPU, WIDE)
    return SlotCache([LayerShape(keys, values)] * layers, rows)


def write(cache: SlotCache, tokens_BN: list[list[int]]) -> None:
    """Write states that name their token and their layer: token + layer / 10, values negative."""
    tokens = torch.tensor(tokens_BN, dtype=WIDE)[:, None, :, None]
    cache.reserve(tokens.shape[2])
    for layer in range(len(cache.layers)):
        named = tokens + layer / 10
        keys, values = cache.update(named.expand(-1, 2, -1, 3).clone(), -named.expand(-1, 1, -1, 4).clone(), layer)
        assert keys.shape[2] == values.shape[2] == cache.longest + tokens.shape[2]


def held(cache: SlotCache, row: int) -> list[int]:
    """The tokens a row holds; every layer, head and coordinate must agree on them."""
    rows = set()
    for layer in range(len(cache.layers)):
        keys, values = cache.read(layer, row)
        assert keys.shape == (2, cache.lengths[row], 3) and values.shape == (1, cache.lengths[row], 4)
        for states in (keys, -values):
            rows |= {
                tuple(line) for line in (states - layer / 10).round(decimals=6).permute(0, 2, 1).flatten(0, 1).tolist()
            }
    assert len(rows) <= 1
    return [int(token) for token in next(iter(rows), ())]


def prefilled(prompts: list[list[int]], layers: int = 2) -> SlotCache:
    cache = cache_of(len(prompts), layers)
    longest = max(map(len, prompts))
    write(cache, [prompt + [99] * (longest - len(prompt)) for prompt in prompts])
    cache.set_lengths([len(prompt) for prompt in prompts])
    return cache


def test_a_new_cache_is_empty() -> None:
    cache = cache_of(3)
    assert cache.lengths == [0, 0, 0]
    assert cache.longest == cache.capacity == 0
    assert cache.get_seq_length() == 0


def test_pads_of_a_ragged_prefill_are_not_held() -> None:
    cache = prefilled([[1, 2, 3], [4], [5, 6]])
    assert [held(cache, row) for row in range(3)] == [[1, 2, 3], [4], [5, 6]]


def test_rollback_is_doing_nothing() -> None:
    cache = prefilled([[1, 2, 3], [4]])
    write(cache, [[10, 11], [20, 21]])
    assert [held(cache, row) for row in range(2)] == [[1, 2, 3], [4]]
    write(cache, [[30], [40]])  # the next step writes over what was rejected
    cache.commit([[0], [0]])
    assert [held(cache, row) for row in range(2)] == [[1, 2, 3, 30], [4, 40]]


def test_rows_keep_paths_of_their_own() -> None:
    cache = prefilled([[1, 2, 3], [4], [5, 6], [7]])
    write(cache, [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]])
    cache.commit([[0, 2, 3], [0, 3], [0, 1, 2, 3], []])
    expected = [[1, 2, 3, 10, 12, 13], [4, 20, 23], [5, 6, 30, 31, 32, 33], [7]]
    assert [held(cache, row) for row in range(4)] == expected
    assert cache.lengths == [6, 3, 6, 1]


def test_equal_lengths_take_the_same_way_as_ragged_ones() -> None:
    cache = prefilled([[1, 2], [3, 4]])
    write(cache, [[10, 11, 12], [20, 21, 22]])
    cache.commit([[0, 2], [0, 1]])
    assert [held(cache, row) for row in range(2)] == [[1, 2, 10, 12], [3, 4, 20, 21]]


@pytest.mark.parametrize(
    "path", [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 3, 5], [0, 1, 2, 3, 4], [0, *range(2, FEW + 4)]]
)
@pytest.mark.parametrize("beside", [None, [], [0, 2, 4], [0, 1, 2, 3]])
def test_nodes_that_lie_where_they_belong_are_not_moved(path: list[int], beside: list[int] | None) -> None:
    paths = [path] if beside is None else [path, beside]
    texts, tokens = [[1, 2, 3], [4]][: len(paths)], [[*range(10, 24)], [*range(30, 44)]][: len(paths)]
    cache = prefilled(texts)
    write(cache, tokens)
    moves: list[int] = []
    for name in ("_move_one", "_move_rows"):
        move = getattr(cache, name)
        setattr(cache, name, lambda *args, move=move: (moves.append(args[2]), move(*args)))
    cache.commit(paths)
    for row, each in enumerate(paths):
        assert held(cache, row) == texts[row] + [tokens[row][node] for node in each]
    if not beside:
        assert sum(moves) == sum(node != place for place, node in enumerate(path))


def test_rows_leave_and_close_up() -> None:
    cache = prefilled([[1, 2, 3], [4], [5, 6]])
    cache.select([2, 1])
    assert [held(cache, row) for row in range(2)] == [[5, 6], [4]]
    assert cache.longest == 2
    write(cache, [[10, 11], [20, 21]])
    cache.commit([[0, 1], [0]])
    assert [held(cache, row) for row in range(2)] == [[5, 6, 10, 11], [4, 20]]


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_growing_keeps_what_is_held(length: int) -> None:
    rows = [list(range(1, length + 1)), list(range(1, 4))]
    cache = prefilled(rows, layers=1)
    for _ in range(3):
        write(cache, [[10, 11], [20, 21]])
        cache.commit([[0, 1], [0, 1]])
        rows = [rows[0] + [10, 11], rows[1] + [20, 21]]
        assert [held(cache, row) for row in range(2)] == rows
    assert cache.capacity % BLOCK == 0 and cache.capacity >= length + 6


def test_a_cache_is_sized_by_need_not_by_the_first_call() -> None:
    cache = prefilled([[1]])
    for step in range(5):
        write(cache, [list(range(100 * step, 100 * step + 100))])
        cache.commit([range(100)])
    assert held(cache, 0) == [1, *range(500)]


def test_a_released_slot_is_empty_and_holds_nobody_up() -> None:
    cache = prefilled([[1, 2, 3, 4, 5], [6, 7], [8]])
    before = cache.lengths
    cache.release([0])
    assert cache.lengths == [0, 2, 1] and cache.longest == 2 and before == [5, 2, 1]
    assert cache.reserve(3) == 5
    write(cache, [[10, 11, 12], [20, 21, 22], [30, 31, 32]])  # the free slot takes part in the forward
    cache.commit([[], [0, 2], [0]])
    assert [held(cache, row) for row in range(3)] == [[], [6, 7, 20, 22], [8, 30]]


def test_a_row_that_keeps_nothing_stays_as_it_is() -> None:
    cache = prefilled([[1, 2, 3], [4]])
    write(cache, [[10, 11, 12], [20, 21, 22]])
    cache.commit([[], [0, 2]])
    assert [held(cache, row) for row in range(2)] == [[1, 2, 3], [4, 20, 22]]
    cache.commit([[], []])
    assert [held(cache, row) for row in range(2)] == [[1, 2, 3], [4, 20, 22]]


def test_rows_are_admitted_into_free_slots_and_behind_the_others() -> None:
    cache = prefilled([[1, 2, 3], [4], [5, 6]])
    cache.release([1])
    cache.admit([4, 1, 3], prefilled([[10], [11, 12, 13, 14], [15, 16]]))
    assert [held(cache, row) for row in range(5)] == [[1, 2, 3], [11, 12, 13, 14], [5, 6], [15, 16], [10]]
    write(cache, [[20], [21], [22], [23], [24]])
    cache.commit([[0]] * 5)
    assert [held(cache, row)[-1] for row in range(5)] == [20, 21, 22, 23, 24]


def test_what_is_admitted_is_a_copy() -> None:
    cache, other = prefilled([[1, 2]]), prefilled([[3], [4, 5]])
    cache.admit([0, 1], other)
    write(other, [[6], [7]])
    other.select([1])
    other.release([0])
    write(cache, [[8], [9]])
    cache.commit([[0], [0]])
    assert [held(cache, row) for row in range(2)] == [[3, 8], [4, 5, 9]]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_longer_row_is_admitted(length: int) -> None:
    cache, long = prefilled([[1, 2], [3]], layers=1), list(range(1, length + 1))
    cache.admit([1], prefilled([long], layers=1))
    assert [held(cache, row) for row in range(2)] == [[1, 2], long]
    assert cache.capacity == (BLOCK if length <= BLOCK else 2 * BLOCK)


def test_a_batch_may_run_empty_and_fill_again() -> None:
    cache = prefilled([[1, 2]])
    cache.select([])
    assert cache.lengths == [] and cache.longest == 0
    cache.admit([1, 0], prefilled([[3], [4, 5]]))
    assert [held(cache, row) for row in range(2)] == [[4, 5], [3]]


def test_only_whole_rows_of_the_same_layers_are_admitted() -> None:
    cache, other = prefilled([[1], [2]]), prefilled([[3], [4]])
    for slots in ([0, 0], [0], [0, 1, 2], [0, 3], [3, 4]):
        with pytest.raises(AssertionError):
            cache.admit(slots, other)
    for stranger in (cache, cache_of(2, layers=3)):
        with pytest.raises(AssertionError):
            cache.admit([0, 1], stranger)
    assert [held(cache, row) for row in range(2)] == [[1], [2]]


def test_what_transformers_asks_of_it() -> None:
    cache = prefilled([[1, 2, 3], [4]])
    assert cache.get_seq_length() == 3
    assert cache.get_mask_sizes(5, 0) == (8, 0)
    assert not any(cache.is_sliding)


# The rollback exercise: a prefix of 10 tokens, 5 drafts, rejection at the third.


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("llama")


def test_rollback_exercise(trunk: Trunk) -> None:
    prefix = [5, 0, 9, 33, 2, 0, 17, 64, 8, 21]
    truth = plain_greedy(trunk, prefix, 5)
    drafts = truth.copy()
    drafts[2] = (truth[2] + 1) % trunk.vocab_size  # the third is wrong, and so is all that hangs below it
    cache = trunk.new_cache(1)
    trunk.prefill(torch.tensor([prefix[:-1]]), [9], cache)
    tokens = torch.tensor([[prefix[-1], *drafts]])  # the root is the prefix's last token
    tree = DraftTree(Shape.static(Topology.chain(5), "cpu"), tokens, torch.ones_like(tokens).bool())
    verified = trunk.tree_forward(tree, cache)
    acceptance = DeterministicRule()(tree, Laws.given(to_probs(verified.logits, [SamplingParams()])))
    assert acceptance.path_BA.tolist() == [[0, 1, 2, -1, -1, -1]]
    assert acceptance.next_token_B.tolist() == [truth[2]]
    cache.commit([[0, 1, 2]])
    assert cache.lengths == [12]
    kept = prefix + drafts[:2]
    fresh = trunk.new_cache(1)
    trunk.prefill(torch.tensor([kept]), [12], fresh)
    for layer in range(len(trunk.layers)):
        for now, then in zip(cache.read(layer, 0), fresh.read(layer, 0), strict=True):
            assert now.shape[1] == 12
            torch.testing.assert_close(now, then, rtol=1e-12, atol=1e-12)


# Where positions end, or change their meaning.


def next_logits(trunk: Trunk, cache: SlotCache) -> torch.Tensor:
    """Logits [B, V] after one more token, 7, on every row."""
    tokens = torch.full((len(cache.lengths), 1), 7)
    tree = DraftTree(Shape.static(Topology.root(), "cpu"), tokens, torch.ones_like(tokens).bool())
    return trunk.tree_forward(tree, cache).logits[:, 0]


def text_of(length: int, seed: int = 0) -> list[int]:
    return [(seed + 5 * index) % 65 for index in range(length)]


def test_pads_beside_a_row_that_fills_the_context_do_no_harm() -> None:
    trunk = tiny_trunk("gpt2")  # learned positions: there are 128
    held_rows, new = [text_of(120), text_of(3, 1)], [text_of(8, 2), text_of(30, 3)]
    cache = trunk.new_cache(2)
    for texts in (held_rows, new):
        ids_BT = torch.tensor([text + [0] * (max(map(len, texts)) - len(text)) for text in texts])
        logits, _, _ = trunk.prefill(ids_BT, [len(text) for text in texts], cache)
    assert cache.lengths == [128, 33]
    for row, (text, more) in enumerate(zip(held_rows, new, strict=True)):
        torch.testing.assert_close(logits[row], recompute(trunk, text + more)[-1], rtol=1e-10, atol=1e-10)


def longrope() -> Trunk:
    """Rotary frequencies change once a forward goes beyond 16 positions."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 16, "factor": 4.0}
    return tiny_trunk("llama", rope_parameters=rope, max_position_embeddings=64)


@pytest.mark.parametrize("length", [10, 20])
def test_a_free_slot_decides_no_frequencies(length: int) -> None:
    trunk, text = longrope(), text_of(length)
    cache = trunk.new_cache(2)
    trunk.prefill(torch.tensor([text_of(length, 1), text]), [length, length], cache)
    cache.release([0])
    logits = next_logits(trunk, cache)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[1], recompute(trunk, [*text, 7])[-1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("length", "more"), [(5, 11), (10, 3), (17, 9), (30, 34)])
def test_reading_on_on_either_side_of_the_change(length: int, more: int) -> None:
    trunk, text = longrope(), text_of(length + more)
    cache = trunk.new_cache(1)
    trunk.prefill(torch.tensor([text[:length]]), [length], cache)
    logits, _, _ = trunk.prefill(torch.tensor([text[length:]]), [more], cache)
    torch.testing.assert_close(logits[0], recompute(trunk, text)[-1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("length", "more"), [(10, 7), (16, 1), (30, 35), (5, 0)])
def test_reading_on_goes_no_further_than_what_is_held_allows(length: int, more: int) -> None:
    trunk = longrope()
    cache = trunk.new_cache(1)
    trunk.prefill(torch.tensor([text_of(length)]), [length], cache)
    with pytest.raises(AssertionError):
        trunk.prefill(torch.tensor([text_of(max(more, 1))]), [more], cache)
