"""Drafting from the text itself: what followed when its last tokens occurred before (prompt lookup; Saxena 2023).

Good where an answer repeats its prompt or itself: code, summaries, tables. It needs no model. The longest end of the
text that occurred before is found by a suffix automaton, as in SAM decoding (Hu et al. 2024), so a token costs the same
however long the text is.

Dimensions: B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from medusa.accept import Acceptance
from medusa.drafters.base import free, place_each, roots
from medusa.drafters.branches import Branches, accepted, as_tree
from medusa.errors import UserError
from medusa.sampling import Chance
from medusa.suffix import SuffixMatcher
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput


@dataclass(frozen=True)
class Lookup:
    """What is looked for, and how much of what followed is drafted.

    Args:
        most: tokens of the longest end of the text that is looked for; the place where that occurred last comes first.
        least: tokens of the shortest end that is looked for.
        branches: the most continuations that are drafted, those of longer ends first.
        tokens: the most tokens of each.
        nodes: the most drafted tokens in all.

    Raises:
        UserError: a number below 1, or ``least`` above ``most``.
    """

    most: int = 16
    least: int = 1
    branches: int = 3
    tokens: int = 8
    nodes: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"prompt lookup with {field.name}={value!r}: give a whole number from 1")
        if self.least > self.most:
            raise UserError(f"prompt lookup with least={self.least} above most={self.most}: exchange them")


class PromptLookupDrafter:
    """Drafts what followed the text's last tokens when they occurred before."""

    name = "prompt lookup"

    def __init__(self, lookup: Lookup | None = None) -> None:
        self.lookup = lookup or Lookup()

    def open(self, trunk: Trunk) -> PromptLookupSession:
        """A session of one batch."""
        return PromptLookupSession(self.lookup)


class PromptLookupSession:
    """An automaton of each row's text."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.rows: list[SuffixMatcher] = []

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Take in the prompts."""
        self.rows = [SuffixMatcher(self.lookup.most, self.lookup.least) for _ in prompts]
        for row, prompt in zip(self.rows, prompts, strict=True):
            row.extend(prompt)

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """What followed each row's last tokens, at most ``room`` tokens deep: a tree of its own in every row."""
        return as_tree(self.branches(root_B, room, chance), root_B.device)

    def branches(self, root_B: Tensor, room: int, chance: Chance | None = None) -> list[Branches]:
        """The same as the runs themselves, row by row."""
        trees = [Branches(root, self.lookup.nodes) for root in roots(root_B, chance)]
        for number, (row, tree) in enumerate(zip(self.rows, trees, strict=True)):
            if not free(chance, number):
                row.extend(tree.tokens)
                look_up(row, self.lookup, room, tree)
        return trees

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Append what was accepted."""
        for row, tokens in zip(self.rows, accepted(tree, acceptance), strict=True):
            row.extend(tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.rows = [self.rows[row] for row in rows]

    def admit(self, slots: Sequence[int], other: PromptLookupSession) -> None:
        """Take over another session's rows."""
        place_each(self.rows, slots, other.rows)


def look_up(row: SuffixMatcher, lookup: Lookup, room: int, tree: Branches) -> None:
    """Add to ``tree`` what followed the ends of the text: of each end where it occurred last, then what else followed.

    At most ``branches`` continuations are added; one that begins like another is looked at as often at the most.
    """
    length, left = min(room, lookup.tokens), lookup.branches
    for state, end in row.matches():
        left -= tree.add(_follow(row.text, end, length))
        for other in row.continuations(state):
            if not left or tree.full:
                return
            if not tree.starts_with(row.text[other + 1]):
                left -= tree.add(_follow(row.text, other, length))


def _follow(text: Sequence[int], end: int, length: int) -> list[int]:
    """The tokens behind place ``end``; where the text ends before there are enough, it is taken to go on repeating."""
    period = len(text) - 1 - end
    return [text[end + 1 + place % period] for place in range(length)]
