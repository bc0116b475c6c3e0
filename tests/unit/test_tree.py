"""Topologies: what is accepted, what is refused and how, and the small facts the rest relies on."""

from __future__ import annotations

import pytest
import torch

from medusa.errors import UserError
from medusa.mask import attention_bias
from medusa.tree import DraftTree, Shape, Topology, ancestor_matrix

FULL = [[0], [0, 0], [0, 1], [1], [1, 0], [1, 1]]  # widths 2, 2


def test_three_spellings_are_equal() -> None:
    leaves = [[0, 0], [0, 1], [1, 0], [1, 1]]
    trees = [Topology.from_choices(each) for each in ([1, 2, 2], FULL, FULL[::-1], leaves, leaves[::-1])]
    assert set(trees) == {Topology.full([2, 2])}
    assert len({hash(tree) for tree in trees}) == 1


def test_a_tree_of_leaves_of_different_depth() -> None:
    assert Topology.from_choices([[0, 0, 2], [1]]) == Topology.from_choices([[0], [1], [0, 0], [0, 0, 2]])


@pytest.mark.parametrize("choices", [[], [1]])
def test_nothing_below_the_root(choices: list[int]) -> None:
    assert Topology.from_choices(choices) == Topology.root() == Topology.chain(0)


def test_what_a_topology_knows() -> None:
    tree = Topology.from_paths([[0], [2], [0, 1], [0, 1, 5]])
    assert tree.size == 5
    assert tree.parents == (-1, 0, 0, 1, 3)
    assert tree.ranks == (0, 0, 2, 1, 5)
    assert tree.depths == (0, 1, 1, 2, 3)
    assert tree.depth == 3
    assert tree.paths == ((), (0,), (2,), (0, 1), (0, 1, 5))


def test_chain() -> None:
    assert Topology.chain(3) == Topology((-1, 0, 1, 2), (0, 0, 0, 0)) == Topology.full([1, 1, 1])


def test_trim() -> None:
    tree = Topology.from_paths([[0], [2], [0, 1], [0, 1, 5], [0, 1, 3]])
    assert tree.trim(9) == tree.trim(3) == tree
    assert tree.trim(2) == Topology.from_paths([[0], [2], [0, 1]])
    assert tree.trim(1) == Topology.from_paths([[0], [2]])
    assert tree.trim(0) == Topology.root()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([[0], [0, 0], [1, 0]], ["[1]"]),  # a gap: the node [1] is missing
        ([[0], [0, 0, 0, 1]], ["[0, 0]"]),  # the shortest of the missing ones
        ([[0], [1], [0]], ["[0]", "twice"]),
        ([[0], []], ["empty path"]),
        ([[0], [-1]], ["-1"]),
        ([[0], [0, -2]], ["-2"]),
        ([[0], 1], ["[[0], 1]"]),
        ([2, 2], ["[2, 2]", "2"]),
        ([1, 0], ["[0]", "width 0"]),
        ([1, -3], ["width -3"]),
        ([[0], [0.5]], ["0.5"]),  # never rounded in silence
        ([[0], ["x"]], ["x"]),
    ],
)
def test_wrong_choices_are_named(choices: list[object], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Topology.from_choices(choices)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parents", "ranks", "words"),
    [
        ((), (), ["-1"]),
        ((0,), (0,), ["-1", "[0]"]),
        ((-1, 1), (0, 0), ["node 1", "parent 1"]),  # its own parent
        ((-1, 0, 3, 0), (0, 0, 0, 1), ["node 2", "parent 3"]),  # a parent after its child
        ((-1, -1), (0, 0), ["node 1", "parent -1"]),  # two roots
        ((-1, 0), (0,), ["2", "1"]),
        ((-1, 0), (0, -1), ["node 1", "-1"]),
        ((-1, 0, 0), (0, 3, 3), ["node 2", "rank 3", "parent 0"]),
    ],
)
def test_wrong_topologies_are_named(parents: tuple[int, ...], ranks: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Topology(parents, ranks)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_ancestors_of_a_small_tree() -> None:
    #      0
    #    1   2
    #   3 4
    seen = ancestor_matrix(torch.tensor([-1, 0, 0, 1, 1]))
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 256, 257])
def test_a_long_chain_sees_all_of_itself(size: int) -> None:
    # the closure squares: one product too few shows at the sizes around powers of two
    seen = ancestor_matrix(torch.arange(-1, size - 1))
    assert torch.equal(seen, torch.ones(size, size).tril().bool())


def test_rows_may_have_different_trees() -> None:
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0]])
    shape = Shape.of(parents)
    assert shape.depths.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert shape.parents.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert torch.equal(shape.ancestors[0], ancestor_matrix(parents[0]))
    assert torch.equal(shape.ancestors[1], ancestor_matrix(parents[1]))


def test_static_shape() -> None:
    shape = Shape.static(Topology.full([2, 1]), "cpu")
    assert shape.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert shape.levels == 3


def test_size_counts_root_and_fillers() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.long)
    tree = DraftTree(Shape.static(Topology.chain(2), "cpu"), tokens, torch.tensor([[True, False, False]] * 2))
    assert tree.size == 3


def test_plain_decoding_needs_no_mask() -> None:
    root = Shape.static(Topology.root(), "cpu")
    assert attention_bias(root, [7, 7], 8, torch.float64) is None
    assert attention_bias(root, [7], 8, torch.float64, window=8) is None  # the window reaches back to the start
    assert attention_bias(root, [8], 9, torch.float64, window=8) is not None
    assert attention_bias(root, [7, 6], 8, torch.float64) is not None


def test_masked_slots_get_the_lowest_finite_number() -> None:
    # -inf would make a row of nothing but masked slots NaN
    bias = attention_bias(Shape.static(Topology.full([2]), "cpu"), [2], 5, torch.float32)
    assert bias is not None and bias.shape == (1, 1, 3, 5) and bias.dtype == torch.float32
    assert sorted(set(bias.flatten().tolist())) == [torch.finfo(torch.float32).min, 0.0]


def test_one_shape_serves_prefixes_of_any_length_and_type() -> None:
    # a session keeps its shape from step to step, and whatever was made for one step must be right for the next
    shape = Shape.static(Topology.full([2, 1]), "cpu")
    for length in (5, 250, 251, 3, 300, 299, 1000, 1):
        for dtype in (torch.float32, torch.float64):
            bias = attention_bias(shape, [length, length], length + 5, dtype)
            assert bias is not None and bias.dtype == dtype and bias.shape == (1, 1, 5, length + 5)
            seen = torch.cat([torch.ones(5, length).bool(), shape.ancestors[0]], 1)
            assert torch.equal(bias[0, 0] == 0, seen)
            assert set(bias[0, 0][~seen].tolist()) == {torch.finfo(dtype).min}
