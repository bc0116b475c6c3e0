"""Lookahead against a loop of plain forwards: what the window sees, how it moves, what the pool offers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa.decoding import Decoder, Request, decode
from medusa.drafters.lookahead import Lookahead, LookaheadDrafter
from medusa.errors import UserError
from medusa.testing import plain_greedy, recompute, tiny_trunk
from medusa.tree import DraftTree
from medusa.trunk import Trunk

PROMPT = [5, 5, 0, 8, 21, 33, 60, 2, 2, 1, 7]
SIZES = [(1, 2, 1, True), (3, 2, 2, False), (1, 4, 2, True), (5, 4, 3, True), (4, 3, 9, False)]


class Plain:
    """The paper's algorithm by whole forwards, with neither tree nor cache, at temperature 0."""

    def __init__(self, trunk: Trunk, lookahead: Lookahead, prompt: list[int]) -> None:
        self.trunk, self.lookahead, self.prompt = trunk, lookahead, prompt
        self.taken = 0
        self.levels = [[self.filler() for _ in range(lookahead.window)] for _ in range(lookahead.ngram - 1)]
        self.pool: list[list[int]] = []  # every n-gram ever found, the latest last
        size = lookahead.ngram
        if lookahead.prompt:
            self.pool = [prompt[start : start + size] for start in range(len(prompt) - size + 1)]

    def filler(self) -> int:
        self.taken += 1
        return self.prompt[self.taken % len(self.prompt)]

    def guesses(self, root: int) -> list[list[int]]:
        found: list[list[int]] = []
        for ngram in reversed(self.pool):
            if ngram[0] == root and ngram[1:] not in found:
                found.append(ngram[1:])
        return found[: self.lookahead.guesses]

    def step(self, text: list[int]) -> int:
        """Accept the best guess behind ``text``, which ends with the root, and move on; return how much it was."""
        root, truth = text[-1], plain_greedy(self.trunk, text, self.lookahead.ngram)
        accepted = max((common(run, truth) for run in self.guesses(root)), default=0)
        self.levels[0][0] = root
        found = []
        for column in range(self.lookahead.window):
            sees = [*text[:-1], *self.levels[0][: column + 1], *(level[column] for level in self.levels[1:])]
            found.append(int(recompute(self.trunk, sees)[-1].argmax()))
        rows = [*self.levels, found]
        self.pool += [list(ngram) for ngram in zip(*rows, strict=True)]
        self.levels = []
        for level in rows[1:]:
            stays = level[accepted:]
            self.levels.append(stays + [self.filler() for _ in range(len(level) - len(stays))])
        return accepted


def common(run: list[int], truth: list[int]) -> int:
    """How many tokens of ``run`` are right."""
    return next((at for at, (one, other) in enumerate(zip(run, truth, strict=False)) if one != other), len(run))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize(("window", "ngram", "guesses", "prompt"), SIZES)
def test_the_loop_does_what_the_plain_algorithm_does(
    family: str, window: int, ngram: int, guesses: int, prompt: bool
) -> None:
    trunk, lookahead = tiny_trunk(family), Lookahead(window, ngram, guesses, prompt)
    plain, text = Plain(trunk, lookahead, PROMPT), list(PROMPT)
    decoder = Decoder(trunk, LookaheadDrafter(lookahead))
    text += decoder.admit([Request(PROMPT, 60)]).tokens[0]
    total = 0
    for _ in range(16):
        step = decoder.step()
        assert step.accepted[0] == plain.step(text)
        row = decoder.session.rows[0]  # type: ignore[attr-defined]
        assert row.levels == plain.levels
        total += step.accepted[0]
        text += step.tokens[0]
    assert text == [*PROMPT, *plain_greedy(trunk, PROMPT, len(text) - len(PROMPT))]
    assert total > 0 or window < 4


def test_the_window_is_not_drafted_where_it_serves_no_further_step() -> None:
    steps = list(decode(tiny_trunk("llama"), LookaheadDrafter(Lookahead(5, 4, 1)), [Request(PROMPT, 9)]))
    window = 5 * 3
    emitted = 0
    for step in steps[:-1]:
        emitted += len(step.tokens[0])
    assert all(step.nodes >= window for step in steps[1:-2]) and steps[-1].nodes < window


def proposed(lookahead: Lookahead, room: int) -> tuple[DraftTree, int]:
    session = LookaheadDrafter(lookahead).open(tiny_trunk("llama"))
    session.start([[1, 2, 3, 1, 2, 4, 1]], torch.empty(0), None)  # type: ignore[arg-type]
    return session.propose(torch.tensor([2]), room), lookahead.window * (lookahead.ngram - 1)


def test_guesses_are_the_latest_ngrams_that_begin_with_the_root() -> None:
    tree, window = proposed(Lookahead(4, 3, 5), 9)
    assert tree.tokens_BN[0, window:].tolist() == [4, 1, 3, 1]
    assert tree.shape.parents[0, window:].tolist() == [0, window, 0, window + 2]
    assert tree.valid_BN[0].tolist() == [True] + [False] * (window - 1) + [True] * 4
    assert proposed(Lookahead(4, 3, 1), 9)[0].tokens_BN[0, window:].tolist() == [4, 1]
    assert proposed(Lookahead(4, 3, 5), 1)[0].tokens_BN.tolist() == [[2, 4, 3]]
    assert proposed(Lookahead(4, 3, 5), 0)[0].tokens_BN.tolist() == [[2]]
    assert proposed(Lookahead(4, 3, 5, prompt=False), 9)[0].size == window


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ngram": 1}, "ngram=1: give a whole number from 2"),
        ({"window": 0}, "window=0: give a whole number from 1"),
        ({"guesses": 0}, "guesses=0"),
        ({"window": 2.5}, "window=2.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Lookahead(**options)


def test_a_window_longer_than_the_context_is_refused() -> None:
    trunk = tiny_trunk("gpt2", n_positions=12)
    LookaheadDrafter(Lookahead(10, 4)).open(trunk)
    with pytest.raises(UserError, match="window=11 and ngram=4 looks 12 tokens ahead, and a text may reach 12"):
        LookaheadDrafter(Lookahead(11, 4)).open(trunk)
