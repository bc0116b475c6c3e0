"""Prompt lookup in a session: what was accepted is looked up too, rows keep apart, options are checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from medusa.accept import Acceptance
from medusa.decoding import Decoder, Request, decode
from medusa.drafters.branches import Branches, as_tree
from medusa.drafters.prompt_lookup import Lookup, PromptLookupDrafter, PromptLookupSession
from medusa.errors import UserError
from medusa.lawtoys import ToyTrunk
from medusa.testing import tiny_trunk
from medusa.tree import Shape

NOTHING: Any = None  # hidden states, outputs and trunks, which prompt lookup does not look at


def fresh(lookup: Lookup, texts: list[list[int]]) -> PromptLookupSession:
    session = PromptLookupDrafter(lookup).open(NOTHING)
    session.start(texts, NOTHING, NOTHING)
    return session


def drafted(text: list[int], room: int = 99, **options: int) -> list[list[int]]:
    """The runs that are drafted behind ``text``, whose last token is the root."""
    tree = fresh(Lookup(**options), [text[:-1]]).propose(torch.tensor(text[-1:]), room)
    ways = [[node for node in line if node > 0] for line in tree.shape.paths[0].tolist()]
    return [
        [int(tree.tokens_BN[0, node]) for node in way] for way in ways if way and way[-1] not in tree.shape.parents[0]
    ]


@pytest.mark.parametrize(
    ("text", "options", "runs"),
    [
        ([1, 2, 3, 4, 5, 1, 2], {"tokens": 3}, [[3, 4, 5]]),
        ([1, 2, 3, 4, 9, 2, 5, 6, 1, 2], {"tokens": 2}, [[3, 4], [5, 6]]),  # the longer end first, then the shorter
        ([1, 2, 3, 4, 9, 2, 5, 6, 1, 2], {"tokens": 2, "least": 2}, [[3, 4]]),
        ([1, 2, 3, 4, 9, 2, 5, 6, 1, 2], {"tokens": 2, "most": 1}, [[5, 6], [3, 4]]),  # the latest first
        ([1, 2, 3, 4, 9, 2, 5, 6, 1, 2], {"tokens": 2, "branches": 1}, [[3, 4]]),
        ([1, 2, 3, 4, 9, 2, 5, 6, 1, 2], {"tokens": 4, "nodes": 5}, [[3, 4, 9, 2], [5]]),
        ([7, 1, 8, 7, 1, 9, 7, 2, 5, 7, 1], {"tokens": 2, "least": 2}, [[9, 7], [8, 7]]),  # one end, two followers
        ([1, 2, 1, 2, 1, 2], {"tokens": 5}, [[1, 2, 1, 2, 1]]),  # a repetition goes on
        ([6, 6], {"tokens": 3}, [[6, 6, 6]]),
        ([1, 2, 3, 4], {}, []),
        ([5], {}, []),
    ],
)
def test_what_followed_is_drafted(text: list[int], options: dict[str, int], runs: list[list[int]]) -> None:
    assert sorted(drafted(text, **options)) == sorted(runs)
    first = fresh(Lookup(**options), [text[:-1]]).propose(torch.tensor(text[-1:]), 99).tokens_BN[0, 1:].tolist()
    assert first[: len(runs[0])] == runs[0] if runs else not first
    assert sorted(drafted(text, 1, **options)) == sorted([run[0]] for run in runs)
    assert drafted(text, 0, **options) == []


def test_drafts_after_any_acceptance_equal_those_of_a_fresh_start() -> None:
    rng = random.Random(2)
    texts = [[rng.randrange(4) for _ in range(size)] for size in (1, 9, 30, 4)]
    session = fresh(Lookup(), texts)
    for turn in range(40):
        if turn % 11 == 10:
            session.select([3, 0, 2])
            session.admit([1, 3], fresh(Lookup(), [[1, 2, 3, 1], [0, 0]]))
            texts = [texts[3], [1, 2, 3, 1], texts[2], [0, 0]]
        roots = torch.tensor([rng.randrange(4) for _ in texts])
        tree, expected = session.propose(roots, 6), fresh(Lookup(), texts).propose(roots, 6)
        assert tree.tokens_BN.tolist() == expected.tokens_BN.tolist()
        assert tree.valid_BN.tolist() == expected.valid_BN.tolist()
        assert torch.equal(tree.shape.parents, expected.shape.parents)
        last_B = torch.tensor([rng.choice(valid.nonzero()[:, 0].tolist()) for valid in tree.valid_BN])
        paths_BA = tree.shape.paths_to(last_B)
        session.commit(tree, NOTHING, Acceptance(paths_BA, last_B, torch.zeros_like(last_B)))
        for text, path, tokens in zip(texts, paths_BA.tolist(), tree.tokens_BN.tolist(), strict=True):
            text += [tokens[node] for node in path if node >= 0]


def test_a_text_that_repeats_is_decoded_in_long_steps() -> None:
    cycle: Any = ToyTrunk(torch.eye(5, dtype=torch.float64).roll(1, 1).repeat(5, 1))  # 0, 1, 2, 3, 4, 0, 1, ..
    steps = list(decode(cycle, PromptLookupDrafter(Lookup(tokens=7)), [Request([0, 1, 2, 3, 4, 0], 1 + 8 * 4)]))
    assert [len(step.tokens[0]) for step in steps] == [1, 8, 8, 8, 8]


def test_a_free_slot_is_not_looked_up() -> None:
    decoder = Decoder(tiny_trunk("llama"), PromptLookupDrafter())
    decoder.admit([Request([1, 2, 1], 40) for _ in range(3)])
    decoder.finish(2)
    size = len(decoder.session.rows[2].text)  # type: ignore[attr-defined]
    decoder.step()
    assert len(decoder.session.rows[2].text) == size  # type: ignore[attr-defined]
    assert len(decoder.session.rows[0].text) > size  # type: ignore[attr-defined]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_shape_of_runs_is_that_of_their_parents(seed: int, same: bool) -> None:
    rng, rows = random.Random(seed), [Branches(0, 9) for _ in range(3)]
    for row in rows:
        rng = random.Random(seed) if same else rng
        for _ in range(4):
            row.add([rng.randrange(2) for _ in range(rng.randint(1, 4))])
    shape = as_tree(rows, torch.device("cpu")).shape
    size = max(len(row.parents) for row in rows)
    parents = torch.tensor([row.parents + [0] * (size - len(row.parents)) for row in rows[: 1 if same else 3]])
    expected = Shape.of(parents, int(shape.depths.max()) + 1)
    for part in ("ancestors", "depths", "parents", "paths"):
        assert torch.equal(getattr(shape, part), getattr(expected, part)), part


def test_rows_of_different_sizes_are_one_tree() -> None:
    one, other = Branches(5, 9), Branches(6, 3)
    assert one.add([1, 2]) and one.add([1, 3, 4]) and not one.add([1, 2]) and not one.add([])
    assert other.add([1, 2, 3, 4]) and other.full and not other.add([9])
    assert other.unacceptable(2, 8) == 4
    tree = as_tree([one, other, Branches(7, 1)], torch.device("cpu"))
    assert tree.tokens_BN.tolist() == [[5, 1, 2, 3, 4], [6, 1, 2, 3, 8], [7, 0, 0, 0, 0]]
    assert tree.shape.parents.tolist() == [[0, 0, 1, 1, 3], [0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]
    assert tree.valid_BN.tolist() == [[True] * 5, [True] * 4 + [False], [True] + [False] * 4]
    assert tree.shape.levels == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"branches": 0}, "branches=0: give a whole number from 1"),
        ({"tokens": 2.0}, "tokens=2.0"),
        ({"nodes": True}, "nodes=True"),
        ({"least": 5, "most": 4}, "least=5 above most=4"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Lookup(**options)
