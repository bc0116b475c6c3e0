"""Masks and trees against definitions written out in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.mask import attention_bias
from medusa.tree import Shape, Topology, ancestor_matrix

FAST = settings(max_examples=60, deadline=None)


@st.composite
def parents_lists(draw: st.DrawFn, most: int = 24) -> list[int]:
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@st.composite
def path_sets(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """The nodes of a random tree."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 14))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 4)))
        if path not in paths:
            paths.append(path)
    return paths[1:]


def walk(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, by following parents."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


@FAST
@given(parents_lists())
def test_mask_is_the_ancestor_relation(parents: list[int]) -> None:
    seen = ancestor_matrix(torch.tensor(parents))
    expected = [[other in walk(parents, node) for other in range(len(parents))] for node in range(len(parents))]
    assert seen.tolist() == expected


@FAST
@given(parents_lists(), parents_lists())
def test_batched_mask_is_each_rows_own(one: list[int], other: list[int]) -> None:
    size = min(len(one), len(other))
    rows = [one[:size], other[:size]]
    shape = Shape.of(torch.tensor(rows))
    for row, parents in enumerate(rows):
        assert torch.equal(shape.ancestors[row], ancestor_matrix(torch.tensor(parents)))
        assert shape.depths[row].tolist() == [len(walk(parents, node)) - 1 for node in range(size)]


@FAST
@given(
    trees=st.lists(parents_lists(9), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    spare=st.integers(0, 3),
    window=st.none() | st.integers(1, 14),
    shared=st.booleans(),
)
def test_attention_bias_by_its_definition(
    trees: list[list[int]], lengths: list[int], spare: int, window: int | None, shared: bool
) -> None:
    size = min(len(tree) for tree in trees)
    rows = [trees[row % len(trees)][:size] for row in range(len(lengths))]
    if shared:  # a static tree: one shape for all rows
        rows = [rows[0]] * len(lengths)
    shape = Shape.of(torch.tensor(rows[:1] if shared else rows))
    total = max(lengths) + size + spare
    bias = attention_bias(shape, lengths, total, torch.float64, window)
    seen = torch.ones(len(lengths), 1, size, total) if bias is None else bias.expand(len(lengths), -1, -1, -1) == 0
    for row, (parents, length) in enumerate(zip(rows, lengths, strict=True)):
        for node in range(size):
            position = length + len(walk(parents, node)) - 1
            for slot in range(total):
                if slot < length:
                    at, visible = slot, True
                elif slot < length + size:
                    other = slot - length
                    at, visible = length + len(walk(parents, other)) - 1, other in walk(parents, node)
                else:
                    at, visible = 0, False
                if window is not None:
                    visible = visible and at > position - window
                assert bool(seen[row, 0, node, slot]) == visible, (row, node, slot)


@FAST
@given(path_sets(), st.randoms(use_true_random=False))
def test_nodes_leaves_and_any_order_give_one_tree(paths: list[tuple[int, ...]], rng: object) -> None:
    leaves = [path for path in paths if not any(other[: len(path)] == path and other != path for other in paths)]
    shuffled = list(paths)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    tree = Topology.from_paths(paths)
    assert tree == Topology.from_paths(leaves) == Topology.from_choices([list(path) for path in shuffled])
    assert set(tree.paths) == {(), *paths}
    assert list(tree.depths) == sorted(tree.depths)
    assert len(set(tree.paths)) == tree.size


@FAST
@given(path_sets(), st.integers(0, 5))
def test_trim_keeps_exactly_the_shallow_nodes(paths: list[tuple[int, ...]], depth: int) -> None:
    trimmed = Topology.from_paths(paths).trim(depth)
    assert set(trimmed.paths) == {(), *(path for path in paths if len(path) <= depth)}


@FAST
@given(path_sets(), st.data())
def test_a_forgotten_node_is_named(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    inner = [path for path in paths if any(other[: len(path)] == path and other != path for other in paths)]
    if len(inner) < 2:
        return
    gap = data.draw(st.sampled_from(inner))
    rest = [path for path in paths if path != gap]
    if not any(other[: len(path)] == path and other != path for path in rest for other in rest):
        return  # what is left reads as a list of leaves
    with pytest.raises(ValueError, match=str(list(gap)).replace("[", r"\[").replace("]", r"\]")):
        Topology.from_paths(rest)


@FAST
@given(st.lists(st.integers(1, 3), max_size=4))
def test_widths_multiply(widths: list[int]) -> None:
    tree = Topology.full(widths)
    for depth in range(len(widths) + 1):
        count = 1
        for width in widths[:depth]:
            count *= width
        assert tree.depths.count(depth) == count
