"""The suffix automaton against search by brute force, and its cost by counting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.drafters.branches import Branches
from medusa.drafters.prompt_lookup import Lookup, look_up
from medusa.suffix import SuffixMatcher

MANY = settings(max_examples=300, deadline=None)
TEXTS = st.integers(1, 4).flatmap(lambda symbols: st.lists(st.integers(0, symbols - 1), min_size=1, max_size=40))


def ends_of(text: list[int], size: int) -> list[int]:
    """Where the last ``size`` tokens ended before, by brute force."""
    tail = text[len(text) - size :]
    return [end for end in range(size - 1, len(text) - 1) if text[end - size + 1 : end + 1] == tail]


def states_of(text: list[int], least: int, most: int) -> list[list[int]]:
    """Where the ends of the text ended before, the longest first; those that ended at the same places are one state."""
    ends = [ends_of(text, size) for size in range(min(most, len(text) - 1), least - 1, -1)]
    return [each for at, each in enumerate(ends) if each and (not at or each != ends[at - 1])]


@MANY
@given(TEXTS, st.integers(1, 8), st.integers(1, 4))
def test_matches_are_those_of_brute_force(text: list[int], most: int, least: int) -> None:
    matcher = SuffixMatcher(most, min(least, most))
    for count, token in enumerate(text, start=1):
        matcher.extend([token])
        known = text[:count]
        sizes = [size for size in range(1, min(most, count - 1) + 1) if ends_of(known, size)]
        assert matcher.matched == max(sizes, default=0)
        assert [end for _, end in matcher.matches()] == [ends[-1] for ends in states_of(known, matcher.least, most)]


@MANY
@given(TEXTS, st.integers(1, 8))
def test_every_token_that_ever_followed_is_a_continuation(text: list[int], most: int) -> None:
    matcher = SuffixMatcher(most)
    matcher.extend(text)
    for (state, _), ends in zip(matcher.matches(), states_of(text, 1, most), strict=True):
        followed = list(matcher.continuations(state))
        assert set(followed) <= set(ends)
        tokens = [text[place + 1] for place in followed]
        assert sorted(tokens) == sorted({text[place + 1] for place in ends})


@MANY
@given(TEXTS, st.data(), st.integers(0, 7))
def test_branches_are_what_followed(text: list[int], data: st.DataObject, room: int) -> None:
    least = data.draw(st.integers(1, 3))
    lookup = Lookup(
        most=data.draw(st.integers(least, 6)),
        least=least,
        branches=data.draw(st.integers(1, 4)),
        tokens=data.draw(st.integers(1, 5)),
        nodes=data.draw(st.integers(1, 9)),
    )
    matcher, tree = SuffixMatcher(lookup.most, lookup.least), Branches(text[-1], lookup.nodes)
    matcher.extend(text)
    look_up(matcher, lookup, room, tree)
    paths: list[list[int]] = [[]]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        paths.append([*paths[parent], token])
    inner = set(tree.parents)
    leaves = [path for node, path in enumerate(paths) if node not in inner and path]
    sizes = [size for size in range(least, min(lookup.most, len(text) - 1) + 1) if ends_of(text, size)]
    assert len(tree.tokens) - 1 <= lookup.nodes and len(leaves) <= lookup.branches and all(tree.valid)
    assert len({tuple(path) for path in paths}) == len(paths)  # no two siblings alike
    assert max(map(len, paths)) <= min(room, lookup.tokens)
    for path in leaves:
        assert any(follows(text, end, len(path)) == path for size in sizes for end in ends_of(text, size))
    if sizes and room:  # the first run is what followed the longest end where it occurred last
        first = follows(text, ends_of(text, max(sizes))[-1], min(room, lookup.tokens, lookup.nodes))
        assert first in paths
    assert bool(leaves) == bool(sizes and room)


def follows(text: list[int], end: int, count: int) -> list[int]:
    """The tokens behind ``end``, the text taken to repeat what stands there."""
    grown = list(text)
    while len(grown) < end + 1 + count:
        grown.append(grown[len(grown) - (len(text) - 1 - end)])
    return grown[end + 1 : end + 1 + count]


@pytest.mark.parametrize("kind", ["one token", "two tokens", "random", "period", "fibonacci", "new tokens"])
@pytest.mark.parametrize(("most", "least"), [(1, 1), (16, 1), (10_000, 9_990)])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str, most: int, least: int) -> None:
    rng = random.Random(1)
    short, long = [1], [1, 0]
    while len(long) < 8000:
        short, long = long, long + short
    text = {
        "one token": [0] * 8000,
        "two tokens": [rng.randrange(2) for _ in range(8000)],
        "random": [rng.randrange(300) for _ in range(8000)],
        "period": [place % 37 for place in range(8000)],
        "fibonacci": long[:8000],
        "new tokens": list(range(8000)),
    }[kind]
    matcher, steps = SuffixMatcher(most, least), []
    for start in range(0, 8000, 2000):
        before = matcher.steps
        matcher.extend(text[start : start + 2000])
        steps.append(matcher.steps - before)
    assert max(steps) <= (most - least + 9) * 2000  # the ends that are noted, and few links and copies
    assert len(matcher.next) <= 2 * len(text)  # states
