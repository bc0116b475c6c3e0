"""Lookahead decoding (Fu et al. 2024): the trunk guesses for itself, by Jacobi iteration beside the verification.

Each step carries, beside the guesses, a *window*: W columns of N - 1 tokens, where column i is a trajectory of the
iteration that began i tokens ahead. In one forward each column gets its next token, which makes W n-grams of N tokens;
the window then moves on by what was accepted. Guesses are n-grams seen before that begin with the root.

The window is part of the token tree: its first level is a chain from the root, and the rest of each column hangs below
the first token of that column, so that a token sees what the paper's mask (figure 2) lets it see. Its nodes are scored
and can't be accepted. What is in the pool depends on the text and on the trunk's likeliest tokens, never on a draw.

Dimensions: B batch, D hidden, N nodes (of a tree; elsewhere the n-gram's size), W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from medusa.accept import Acceptance
from medusa.drafters.base import free, place_each, roots
from medusa.drafters.branches import Branches, as_tree
from medusa.errors import UserError
from medusa.sampling import Chance
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput


@dataclass(frozen=True)
class Lookahead:
    """How far the window looks and how many guesses are verified.

    Args:
        window: W, columns of the window.
        ngram: N, tokens of an n-gram: the one it begins with, and N - 1 that are guessed.
        guesses: G, the most n-grams that are kept for one first token, and verified in one step.
        prompt: whether the prompt's own n-grams are guesses too.

    Raises:
        UserError: a number out of range.
    """

    window: int = 5
    ngram: int = 4
    guesses: int = 5
    prompt: bool = True

    def __post_init__(self) -> None:
        for each, least in zip(fields(self)[:3], (1, 2, 1), strict=True):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"lookahead with {each.name}={value!r}: give a whole number from {least}")

    @property
    def reach(self) -> int:
        """How many tokens beyond the root the window looks."""
        return self.window + self.ngram - 3


class LookaheadDrafter:
    """Drafts n-grams that the trunk itself found on the way."""

    name = "lookahead"

    def __init__(self, lookahead: Lookahead | None = None) -> None:
        self.lookahead = lookahead or Lookahead()

    def open(self, trunk: Trunk) -> LookaheadSession:
        """A session of one batch. UserError if the window is longer than the trunk's context."""
        reach, context = self.lookahead.reach, trunk.horizon(0)
        if context is not None and reach >= context:
            raise UserError(
                f"lookahead with window={self.lookahead.window} and ngram={self.lookahead.ngram} looks {reach} tokens"
                f" ahead, and a text may reach {context} with this trunk: make them smaller"
            )
        return LookaheadSession(self.lookahead, trunk.draftable)


@dataclass
class _Row:
    """What is remembered of one row.

    ``levels[j][i]`` is token j of column i, to stand i + j tokens behind the root; ``levels[0][0]`` is the root itself.
    ``pool`` maps a token to the runs that may follow it, the latest last. ``filler`` are tokens to begin columns with,
    taken in turn (the paper draws them from the prompt).
    """

    filler: Sequence[int]
    levels: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    taken: int = 0

    def fill(self) -> int:
        """One more token to begin with."""
        self.taken += 1
        return self.filler[self.taken % len(self.filler)]

    def keep(self, ngram: Sequence[int], most: int) -> None:
        """Put an n-gram into the pool; of those with one first token the latest ``most`` stay."""
        first, run = ngram[0], tuple(ngram[1:])
        runs = self.pool.setdefault(first, {})
        runs.pop(run, None)
        runs[run] = None
        if len(runs) > most:
            del runs[next(iter(runs))]


class LookaheadSession:
    """Each row's window and pool."""

    def __init__(self, lookahead: Lookahead, draftable: int) -> None:
        self.lookahead = lookahead
        self.draftable = draftable  # ids that the tokenizer lacks are not guessed
        self.rows: list[_Row] = []
        self._windowed = False  # whether the last trees had a window

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Begin each row's window with tokens of its prompt."""
        window, size = self.lookahead.window, self.lookahead.ngram
        self.rows = [_Row(list(prompt)) for prompt in prompts]
        for row, prompt in zip(self.rows, prompts, strict=True):
            row.levels = [[row.fill() for _ in range(window)] for _ in range(size - 1)]
            if self.lookahead.prompt:
                for start in range(len(prompt) - size + 1):
                    row.keep(prompt[start : start + size], self.lookahead.guesses)

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """The window, and behind it the n-grams that begin with the root, at most ``room`` tokens deep."""
        self._windowed = room > 1  # in the last step but one it would serve nothing any more
        trees = []
        for number, (row, root) in enumerate(zip(self.rows, roots(root_B, chance), strict=True)):
            tree = Branches(root, self.lookahead.guesses * (self.lookahead.ngram - 1))
            row.levels[0][0] = root
            if self._windowed:
                self._add_window(tree, row)
            if not free(chance, number):
                for run in reversed(row.pool.get(root, {})):
                    tree.add(run[:room])
            trees.append(tree)
        return as_tree(trees, root_B.device)

    def _add_window(self, tree: Branches, row: _Row) -> None:
        """Add the window, level by level: its token j of column i is node j * W + i."""
        window = self.lookahead.window
        for column in range(1, window):
            tree.unacceptable(column - 1, row.levels[0][column])
        for level in range(1, len(row.levels)):
            for column in range(window):
                tree.unacceptable((level - 1) * window + column, row.levels[level][column])

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Take in what follows each column, and move the window on by the accepted tokens."""
        if not self._windowed:
            return
        window, last = self.lookahead.window, self.lookahead.ngram - 2
        logits_BWV = verified.logits[:, last * window : (last + 1) * window, : self.draftable]
        pairs = zip(self.rows, logits_BWV.argmax(-1).tolist(), acceptance.on_host(tree), strict=True)
        for row, found, walk in pairs:
            moved = len(walk.path)
            columns = [*row.levels, found]
            for ngram in zip(*columns, strict=True):
                row.keep(ngram, self.lookahead.guesses)
            # a column's next token stands one place further on, as all stand one nearer to a root one place further on
            row.levels = [[*level[moved - 1 :], *(row.fill() for _ in level[: moved - 1])] for level in columns[1:]]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.rows = [self.rows[row] for row in rows]

    def admit(self, slots: Sequence[int], other: LookaheadSession) -> None:
        """Take over another session's rows."""
        place_each(self.rows, slots, other.rows)
