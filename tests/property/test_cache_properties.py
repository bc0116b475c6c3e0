"""The cache against a plain list per row, and against a fresh prefill of the text it should hold."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.cache import LayerShape, PlaneShape, SlotCache
from medusa.testing import tiny_trunk
from medusa.tree import DraftTree, Shape
from medusa.trunk import Trunk

FAST = settings(max_examples=40, deadline=None)
FAMILIES = ("llama", "gpt2", "neox", "mistral", "gemma3")


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


def line_of(parents: list[int], node: int) -> list[int]:
    """From the root to the node."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line[::-1]


def parents_of(draw: st.DrawFn, size: int) -> list[int]:
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def path_tensor(paths: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths])


@FAST
@given(st.data())
def test_any_run_of_steps_equals_a_list_per_row(data: st.DataObject) -> None:
    draw = data.draw
    planes = [PlaneShape(heads, size, torch.device("cpu"), torch.float64) for heads, size in ((2, 3), (1, 3), (2, 1))]
    layers = [LayerShape(planes[0], planes[1]), LayerShape(planes[0], planes[0]), LayerShape(planes[2], planes[1])]
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    slots = SlotCache(layers, len(lengths))
    rows: list[list[int]] = [[] for _ in lengths]
    fresh = iter(range(1, 10_000))

    def step(size: int) -> list[list[int]]:
        tokens = [[next(fresh) for _ in range(size)] for _ in rows]
        states = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None]
        total = slots.reserve(size)
        for index, layer in enumerate(layers):
            keys = (states + index / 8).expand(-1, layer.keys.heads, -1, layer.keys.size).clone()
            values = (-states - index / 8).expand(-1, layer.values.heads, -1, layer.values.size).clone()
            assert all(seen.shape[2] == total for seen in slots.update(keys, values, index))
        return tokens

    tokens = step(max(lengths))
    slots.set_lengths(lengths)
    rows = [line[:length] for line, length in zip(tokens, lengths, strict=True)]
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 7))
        tokens = step(size)
        paths = [[0, *sorted(draw(st.sets(st.integers(1, size), max_size=size)) - {size})] for _ in rows]
        paths = [path if draw(st.integers(0, 5)) else [] for path in paths]  # a row may be left as it is
        width = draw(st.integers(max(max(map(len, paths)), 1), size + 1))
        slots.commit(path_tensor(paths, width), [len(path) for path in paths])
        rows = [row + [line[node] for node in path] for row, line, path in zip(rows, tokens, paths, strict=True)]
        if draw(st.booleans()):
            kept = draw(st.permutations(range(len(rows))))[: draw(st.integers(1, len(rows)))]
            slots.select(kept)
            rows = [rows[row] for row in kept]
        assert slots.lengths == [len(row) for row in rows]
    for row, expected in enumerate(rows):
        for index in range(len(layers)):
            keys, values = slots.read(index, row)
            wanted = torch.tensor(expected, dtype=torch.float64)[None, :, None] + index / 8
            assert torch.equal(keys, wanted.expand_as(keys))
            assert torch.equal(values, -wanted.expand_as(values))


@FAST
@given(st.data())
def test_commit_equals_a_fresh_prefill(data: st.DataObject) -> None:
    draw = data.draw
    trunk = trunk_of(draw(st.sampled_from(FAMILIES)))
    ids = st.integers(0, trunk.vocab_size - 1)
    texts = draw(st.lists(st.lists(ids, min_size=1, max_size=11), min_size=1, max_size=3))
    longest = max(map(len, texts))
    slots = trunk.new_cache(len(texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    trunk.prefill(padded, [len(text) for text in texts], slots)
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 7))
        parents = [parents_of(draw, size) for _ in texts]
        tokens = [[draw(ids) for _ in range(size)] for _ in texts]
        tree = DraftTree(Shape.of(torch.tensor(parents)), torch.tensor(tokens), torch.ones(len(texts), size).bool())
        trunk.tree_forward(tree, slots)
        paths = [line_of(row, draw(st.integers(0, size - 1))) for row in parents]
        slots.commit(path_tensor(paths, size), [len(path) for path in paths])
        texts = [text + [line[node] for node in path] for text, line, path in zip(texts, tokens, paths, strict=True)]
    for row, text in enumerate(texts):
        alone = trunk.new_cache(1)
        trunk.prefill(torch.tensor([text]), [len(text)], alone)
        for layer in range(len(trunk.layers)):
            for now, then in zip(slots.read(layer, row), alone.read(layer, 0), strict=True):
                torch.testing.assert_close(now, then, rtol=1e-11, atol=1e-11)
