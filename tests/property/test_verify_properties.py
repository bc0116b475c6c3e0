"""One forward over a tree against a plain forward over each of its paths, and the rule against a walk in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa.accept import DeterministicRule
from medusa.lawkit import Constant
from medusa.laws import Laws
from medusa.mask import chain_shape, positions
from medusa.sampling import Chance, SamplingParams
from medusa.sampling import draw as draw_token
from medusa.testing import recompute
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput

from .helpers import FAMILIES, FAST, line_of, padded, parents_of, tree_of, trunk_of


def verify(trunk: Trunk, texts: list[list[int]], tree: DraftTree) -> TrunkOutput:
    slots = trunk.new_cache(len(texts))
    trunk.prefill(padded(texts), [len(text) for text in texts], slots)
    return trunk.tree_forward(tree, slots)


@FAST
@given(st.data())
def test_a_tree_forward_equals_each_path_alone(data: st.DataObject) -> None:
    draw = data.draw
    trunk = trunk_of(draw(st.sampled_from(FAMILIES)))
    ids = st.integers(0, trunk.vocab_size - 1)
    texts = draw(st.lists(st.lists(ids, min_size=1, max_size=11), min_size=1, max_size=3))
    size = draw(st.integers(1, 8))
    parents = [parents_of(draw, size)] * len(texts) if draw(st.booleans()) else [parents_of(draw, size) for _ in texts]
    tokens = [[draw(ids) for _ in range(size)] for _ in texts]
    output = verify(trunk, texts, tree_of(parents[:1] if parents[0] is parents[-1] else parents, tokens))
    for row, text in enumerate(texts):
        for node in range(size):
            plain = text + [tokens[row][each] for each in line_of(parents[row], node)]
            torch.testing.assert_close(output.logits[row, node], recompute(trunk, plain)[-1], rtol=1e-11, atol=1e-11)
            hidden = trunk.forward(torch.tensor([plain])).hidden[0, -1]
            torch.testing.assert_close(output.hidden[row, node], hidden, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_a_chain_made_directly_is_that_of_its_topology(size: int) -> None:
    made, known = chain_shape(size, "cpu"), Shape.static(Topology.chain(size - 1), "cpu")
    for name in ("ancestors", "depths", "parents", "paths"):
        mine, its = getattr(made, name), getattr(known, name)
        assert mine.dtype == its.dtype and torch.equal(mine, its), name


@pytest.mark.parametrize(
    ("lengths", "expected"), [([3, 3], [[3, 4, 4, 5]] * 2), ([0, 4], [[0, 1, 1, 2], [4, 5, 5, 6]])]
)
def test_positions_are_length_and_depth_cut_below_the_horizon(lengths: list[int], expected: list[list[int]]) -> None:
    shape = Shape.of(torch.tensor([[-1, 0, 0, 1]]), 3)
    for horizon in (None, 99, 7, 6, 5, 4):
        cut = [[min(place, (horizon or 99) - 1) for place in row] for row in expected]
        assert positions(shape, lengths, horizon).tolist() == cut


@FAST
@given(st.data())
def test_prefill_of_a_ragged_batch_equals_each_row_alone(data: st.DataObject) -> None:
    draw = data.draw
    trunk = trunk_of(draw(st.sampled_from(FAMILIES)))
    ids = st.integers(0, trunk.vocab_size - 1)
    texts = draw(st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=4))
    pad = draw(ids)
    slots = trunk.new_cache(len(texts))
    logits, hidden, _ = trunk.prefill(padded(texts, pad), [len(text) for text in texts], slots)
    assert slots.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], recompute(trunk, text)[-1], rtol=1e-11, atol=1e-11)
        alone = trunk.forward(torch.tensor([text])).hidden[0, -1]
        torch.testing.assert_close(hidden[row], alone, rtol=1e-11, atol=1e-11)


def walk(parents: list[int], tokens: list[int], valid: list[bool], choice: list[int]) -> tuple[list[int], int]:
    """Follow from the root the valid child that holds the token chosen; return the path and the token after it."""
    path = [0]
    while True:
        nexts = [
            node
            for node in range(1, len(parents))
            if parents[node] == path[-1] and valid[node] and tokens[node] == choice[path[-1]]
        ]
        if not nexts:
            return path, choice[path[-1]]
        assert len(nexts) == 1
        path.append(nexts[0])


@FAST
@given(st.data())
def test_the_rule_equals_a_walk(data: st.DataObject) -> None:
    draw, vocab = data.draw, 5
    rows, size = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    parents, tokens = [], []
    for _ in range(rows):
        line, names = [-1], [draw(st.integers(0, vocab - 1))]
        taken: dict[int, set[int]] = {}
        for _ in range(1, size):
            parent = draw(st.sampled_from([node for node in range(len(line)) if len(taken.get(node, ())) < vocab]))
            used = taken.setdefault(parent, set())
            names.append(draw(st.sampled_from([token for token in range(vocab) if token not in used])))
            used.add(names[-1])
            line.append(parent)
        parents.append(line)
        tokens.append(names)
    valid = [[True, *(draw(st.booleans()) or draw(st.booleans()) for _ in range(1, size))] for _ in range(rows)]
    weights = [[[draw(st.integers(0, 2)) for _ in range(vocab)] for _ in range(size)] for _ in range(rows)]
    laws = torch.tensor(weights).double() + torch.nn.functional.one_hot(torch.tensor(tokens), vocab) * 0.5
    laws /= laws.sum(-1, keepdim=True)
    greedy = draw(st.booleans())
    if greedy:
        laws = torch.nn.functional.one_hot(laws.argmax(-1), vocab).double()
        chance, choice = None, laws.argmax(-1)
    else:
        numbers = [[draw(st.floats(0, 1, exclude_max=True)) for _ in range(size)] for _ in range(rows)]
        uniform = torch.tensor(numbers).double()
        chance = Chance([SamplingParams(temperature=1.0)] * rows, [0] * rows, Constant(uniform), "cpu")
        choice = draw_token(laws, uniform)
    tree = DraftTree(Shape.of(torch.tensor(parents)), torch.tensor(tokens), torch.tensor(valid))
    acceptance = DeterministicRule()(tree, Laws.given(laws, None, chance))
    for row in range(rows):
        path, following = walk(parents[row], tokens[row], valid[row], choice[row].tolist())
        assert acceptance.length_B[row] == len(path)
        assert acceptance.path_BA[row].tolist() == path + [-1] * (acceptance.path_BA.shape[1] - len(path))
        assert acceptance.next_token_B[row] == following


@FAST
@given(st.data())
def test_a_filler_changes_nothing_but_what_hangs_below_it(data: st.DataObject) -> None:
    draw = data.draw
    trunk = trunk_of(draw(st.sampled_from(FAMILIES)))
    size = draw(st.integers(2, 7))
    parents = parents_of(draw, size)
    filler = draw(st.integers(1, size - 1))
    text = [7, 0, 3, 12]
    outputs = []
    for token in (0, 41):
        tokens = torch.arange(size)[None] + 5
        tokens[0, filler] = token
        valid = torch.ones(1, size).bool()
        valid[0, filler] = False
        outputs.append(verify(trunk, [text], DraftTree(Shape.of(torch.tensor([parents])), tokens, valid)).logits[0])
    for node in range(size):
        if filler not in line_of(parents, node):
            torch.testing.assert_close(outputs[0][node], outputs[1][node], rtol=1e-12, atol=1e-12)
