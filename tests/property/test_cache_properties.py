"""The cache against a plain list per row, and against a fresh prefill of the text it should hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.cache import LayerShape, PlaneShape, SlotCache
from medusa.testing import recompute
from medusa.trunk import Trunk

from .helpers import FAMILIES, line_of, padded, parents_of, tree_of, trunk_of

BLOCK = 4  # in place of the cache's own: every sequence of operations crosses the border of a block
CPU = torch.device("cpu")
KINDS = [(2, 1, torch.float64), (1, 2, torch.float64), (1, 1, torch.float64), (2, 2, torch.float32)]
PLANES = [PlaneShape(heads, size, CPU, dtype) for heads, size, dtype in KINDS]
MOST_ROWS = 6


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.cache.BLOCK", BLOCK)
        yield


class Model:
    """A cache beside the plain lists that say what it should hold.

    Every number written is a fresh token's plus a code in 64ths of its layer, plane, head and coordinate: no two places
    ever agree by chance.
    """

    def __init__(self, rng: random.Random, layers: list[LayerShape], rows: int, fresh: Iterator[int]) -> None:
        self.rng, self.fresh = rng, fresh
        self.cache = SlotCache(layers, rows)
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.need = 0  # most slots ever asked for
        codes = count()
        self.codes = [(self._code(layer.keys, codes), self._code(layer.values, codes)) for layer in layers]

    @staticmethod
    def _code(plane: PlaneShape, codes: Iterator[int]) -> torch.Tensor:
        numbers = [next(codes) / 64 for _ in range(plane.heads * plane.size)]
        return torch.tensor(numbers, dtype=plane.dtype).view(plane.heads, 1, plane.size)

    def reserve(self, size: int) -> None:
        longest = max(map(len, self.rows))
        self.need = max(self.need, longest + size)
        assert self.cache.reserve(size) == longest + size

    def write(self, size: int) -> list[list[int]]:
        """Write fresh tokens behind every row, as a forward does; each layer must see them behind what it held."""
        self.reserve(size)
        tokens = [[next(self.fresh) for _ in range(size)] for _ in self.rows]
        new = torch.tensor(tokens)[:, None, :, None]
        lines = [row + line for row, line in zip(self.rows, tokens, strict=True)]
        expected = padded(lines, -1)
        real = (expected >= 0)[:, None, :, None]
        for index, codes in enumerate(self.codes):
            for seen, code in zip(self.cache.update(*(new + code for code in codes), index), codes, strict=True):
                assert seen.shape[2] == expected.shape[1] and seen.dtype == code.dtype
                assert not ((seen != expected[:, None, :, None] + code) & real).any()
        return tokens

    def commit(self) -> None:
        """A step whose rows accept paths of their own, or nothing."""
        size = self.rng.randint(1, 5)
        tokens = self.write(size)
        paths = [[0, *sorted(self.rng.sample(range(1, size), self.rng.randint(0, size - 1)))] for _ in self.rows]
        keeps = [bool(row) and self.rng.random() < 0.8 for row in self.rows]
        paths = [path if keep else [] for path, keep in zip(paths, keeps, strict=True)]
        self.cache.commit(paths)
        for row, line, path in zip(self.rows, tokens, paths, strict=True):
            row += [line[node] for node in path]

    def rollback(self) -> None:
        self.write(self.rng.randint(1, 6))

    def grow(self) -> None:
        self.reserve(self.rng.randint(1, 3 * BLOCK))

    def read_on(self, equal: bool = False) -> None:
        """Right-padded tokens behind every row; a row without any stays as it is."""
        size = self.rng.randint(1, 6)
        tokens = self.write(size)
        new = [size if equal else self.rng.randint(0, size) for _ in self.rows]
        self.cache.set_lengths([len(row) + more for row, more in zip(self.rows, new, strict=True)])
        for row, line, more in zip(self.rows, tokens, new, strict=True):
            row += line[:more]

    def select(self) -> None:
        kept = self.rng.sample(range(len(self.rows)), self.rng.randint(1, len(self.rows)))
        self.cache.select(kept)
        self.rows = [self.rows[row] for row in kept]

    def release(self) -> None:
        slots = self.rng.sample(range(len(self.rows)), self.rng.randint(1, len(self.rows)))
        self.cache.release(slots)
        for slot in slots:
            self.rows[slot] = []

    def admit(self) -> Model:
        """Rows of another cache, over any of this one's and behind them; returns the other, to be looked at later."""
        present = len(self.rows)
        added = self.rng.randint(0, min(MOST_ROWS - present, 3))
        slots = self.rng.sample(range(present), self.rng.randint(0 if added else 1, present))
        slots += range(present, present + added)
        self.rng.shuffle(slots)
        other = Model(self.rng, list(self.cache.shapes), len(slots), self.fresh)
        other.read_on(equal=self.rng.random() < 0.5)
        if self.rng.random() < 0.3:
            other.commit()
        self.cache.admit(slots, other.cache)
        self.need = max(self.need, max(map(len, other.rows)))
        self.rows += [[] for _ in range(added)]
        for slot, row in zip(slots, other.rows, strict=True):
            self.rows[slot] = list(row)
        if self.rng.random() < 0.5:
            other.read_on()  # what either does from now on is its own affair
        return other

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        assert self.cache.longest == self.cache.get_seq_length() == max(map(len, self.rows))
        assert self.cache.capacity == -(-self.need // BLOCK) * BLOCK
        for row, line in enumerate(self.rows):
            tokens = torch.tensor(line)[None, :, None]
            for index, codes in enumerate(self.codes):
                for held, code in zip(self.cache.read(index, row), codes, strict=True):
                    assert torch.equal(held, tokens + code)


def play(rng: random.Random) -> None:
    """A random sequence of operations."""
    layers = [LayerShape(rng.choice(PLANES), rng.choice(PLANES)) for _ in range(rng.randint(1, 3))]
    models = [Model(rng, layers, rng.randint(1, MOST_ROWS), count(1))]
    main = models[0]
    main.read_on(equal=rng.random() < 0.5)
    moves = [main.commit, main.commit, main.rollback, main.select, main.grow, main.admit, main.release, main.read_on]
    for _ in range(rng.randint(1, 8)):
        other = rng.choice(moves)()
        if other is not None:
            models.append(other)
        if rng.random() < 0.3:
            main.check()
    for model in models:
        model.check()


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_sequence_of_operations_equals_a_list_per_row(rng: random.Random) -> None:
    play(rng)


@pytest.mark.slow
def test_20000_sequences_of_operations_equal_a_list_per_row() -> None:
    for seed in range(20_000):
        try:
            play(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"the sequence of seed {seed} fails") from error


class Talk:
    """A trunk's batch under way beside the plain texts that its rows should hold; no text at all in a free slot."""

    def __init__(self, draw: st.DrawFn, trunk: Trunk) -> None:
        self.draw, self.trunk = draw, trunk
        self.ids = st.integers(0, trunk.vocab_size - 1)
        self.texts = self._texts(3)
        self.cache = trunk.new_cache(len(self.texts))
        self._prefill(self.cache, self.texts, [[]] * len(self.texts))

    def _texts(self, most: int) -> list[list[int]]:
        return self.draw(st.lists(st.lists(self.ids, min_size=1, max_size=12), min_size=1, max_size=most))

    def _prefill(self, cache: SlotCache, new: list[list[int]], held: list[list[int]]) -> None:
        logits, states, _ = self.trunk.prefill(padded(new), [len(line) for line in new], cache)
        for row, (text, line) in enumerate(zip(held, new, strict=True)):
            close(logits[row], recompute(self.trunk, text + line)[-1])
            close(states[row], self.trunk.forward(torch.tensor([text + line])).hidden[0, -1])

    def step(self) -> None:
        """A tree step; slots that are free take part in the forward and keep nothing."""
        size = self.draw(st.integers(1, 6))
        parents = [parents_of(self.draw, size) for _ in self.texts]
        tokens = [[self.draw(self.ids) for _ in range(size)] for _ in self.texts]
        lasts = [self.draw(st.integers(0, size - 1)) for _ in self.texts]
        logits = self.trunk.tree_forward(tree_of(parents, tokens), self.cache).logits
        assert logits.isfinite().all()
        paths = [line_of(row, last) if text else [] for row, last, text in zip(parents, lasts, self.texts, strict=True)]
        for row, (path, last) in enumerate(zip(paths, lasts, strict=True)):
            if path:
                self.texts[row] += [tokens[row][node] for node in path]
                close(logits[row, last], recompute(self.trunk, self.texts[row])[-1])
        self.cache.commit(paths)

    def release(self) -> None:
        slots = self.draw(st.lists(st.integers(0, len(self.texts) - 1), min_size=1, unique=True))
        self.cache.release(slots)
        for slot in slots:
            self.texts[slot] = []

    def admit(self) -> None:
        """New rows into free slots, and behind the others."""
        new = self._texts(2)
        free = [slot for slot, text in enumerate(self.texts) if not text]
        slots = [*free, len(self.texts), len(self.texts) + 1][: len(new)]
        other = self.trunk.new_cache(len(new))
        self._prefill(other, new, [[]] * len(new))
        self.cache.admit(slots, other)
        self.texts += [[] for _ in range(slots[-1] + 1 - len(self.texts))]
        for slot, text in zip(slots, new, strict=True):
            self.texts[slot] = text

    def select(self) -> None:
        kept = self.draw(st.lists(st.integers(0, len(self.texts) - 1), min_size=1, unique=True))
        self.cache.select(kept)
        self.texts = [self.texts[slot] for slot in kept]

    def read_on(self) -> None:
        """Conversations that go on are read apart, and admitted."""
        rows = [row for row, text in enumerate(self.texts) if text]
        if not rows:
            return
        apart = self.trunk.new_cache(0)
        apart.admit(range(len(self.texts)), self.cache)
        apart.select(rows)
        new = [self.draw(st.lists(self.ids, min_size=1, max_size=9)) for _ in rows]
        self._prefill(apart, new, [self.texts[row] for row in rows])
        self.cache.admit(rows, apart)
        for row, line in zip(rows, new, strict=True):
            self.texts[row] = self.texts[row] + line

    def check(self) -> None:
        assert self.cache.lengths == [len(text) for text in self.texts]
        for row, text in enumerate(self.texts):
            if text:
                holds_as_alone(self.trunk, self.cache, row, text)


def close(now: torch.Tensor, then: torch.Tensor) -> None:
    torch.testing.assert_close(now, then, rtol=1e-10, atol=1e-10)


def holds_as_alone(trunk: Trunk, cache: SlotCache, row: int, text: list[int]) -> None:
    """The row's keys and values are those of a prefill of its text alone."""
    alone = trunk.new_cache(1)
    trunk.prefill(torch.tensor([text]), [len(text)], alone)
    for layer in range(len(trunk.layers)):
        for now, then in zip(cache.read(layer, row), alone.read(layer, 0), strict=True):
            close(now, then)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_rows_that_come_and_go_hold_what_they_would_alone(family: str, data: st.DataObject) -> None:
    talk = Talk(data.draw, trunk_of(family))
    moves = ("step", "step", "release", "admit", "select", "read_on")
    for move in data.draw(st.lists(st.sampled_from(moves), min_size=1, max_size=6)):
        getattr(talk, move)()
    talk.check()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_reading_on_equals_a_prefill_of_the_whole_text(family: str, data: st.DataObject) -> None:
    draw, trunk = data.draw, trunk_of(family)
    ids = st.integers(0, trunk.vocab_size - 1)
    rows = draw(st.integers(1, 4))
    held = [draw(st.lists(ids, min_size=0 if row else 1, max_size=12)) for row in range(rows)]
    new = [draw(st.lists(ids, min_size=1, max_size=14)) for _ in range(rows)]
    cache = trunk.new_cache(rows)
    lengths = [len(line) for line in held]
    trunk.prefill(padded(held), [max(length, 1) for length in lengths], cache)
    cache.release([row for row, length in enumerate(lengths) if not length])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.prefill.CHUNK", draw(st.integers(1, 16)))
        ids_BT = padded(new, draw(ids), draw(st.integers(0, 16)))
        logits, states, output = trunk.prefill(ids_BT, [len(line) for line in new], cache)
    assert cache.lengths == [len(text) + len(line) for text, line in zip(held, new, strict=True)]
    assert output.hidden.shape == (*ids_BT.shape, trunk.hidden_size)
    for row, (text, line) in enumerate(zip(held, new, strict=True)):
        plain = trunk.forward(torch.tensor([text + line]))
        close(logits[row], plain.logits[0, -1])
        close(states[row], plain.hidden[0, -1])
        close(output.hidden[row, : len(line)], plain.hidden[0, len(text) :])
        holds_as_alone(trunk, cache, row, text + line)
