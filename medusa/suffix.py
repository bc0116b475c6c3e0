"""Where did the last tokens of a text occur before? A suffix automaton, built token by token.

Blumer et al. (1985), "The smallest automaton recognizing the subwords of a text". Its states are the classes of
substrings that end at the same places; a state's *link* leads to the longest suffix of its strings that ends at more
places. A token costs amortised constant time, however long the text is (of a bounded number of symbols, since a state
that is split off copies the transitions of another).

:class:`SuffixMatcher` also follows the longest suffix of the text that occurred before (a longest match of bounded
length, hence constant too) and keeps where each such suffix ended last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROOT = 0


class SuffixMatcher:
    """A text, and the places at which its ends of ``least`` to ``most`` tokens occurred before.

    ``steps`` counts what was done: links followed, transitions redirected or copied.

    Args:
        most: the longest end that is looked for.
        least: the shortest.
    """

    def __init__(self, most: int, least: int = 1) -> None:
        self.most = most
        self.least = least
        self.text: list[int] = []
        self.steps = 0
        # of each state: its transitions, its link, its longest string's length, where that ended last before now
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.size: list[int] = [0]
        self.end: list[int] = [-1]
        self._last = ROOT  # of the whole text
        self._state, self._matched = ROOT, 0  # of the longest end that occurred before, at most ``most`` tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._note()
            self._match(token)
            self._append(token)
            self._settle()

    @property
    def matched(self) -> int:
        """Length of the longest end of the text, at most ``most``, that occurred before."""
        return self._matched

    def matches(self) -> Iterator[tuple[int, int]]:
        """The states of the ends that occurred before, the longest first, and where each ended last before."""
        state, length = self._state, self._matched
        while length >= self.least and state != ROOT:
            yield state, self.end[state]
            state = self.link[state]
            length = self.size[state]

    def continuations(self, state: int) -> Iterator[int]:
        """Where a string of ``state`` ended before, once for every token that ever followed it, the newest first."""
        for following in reversed(self.next[state].values()):
            yield self.end[following] - 1

    def _note(self) -> None:
        """The ends that occurred before have occurred here too, as the next token sees it."""
        here = len(self.text) - 1
        for state, _ in self.matches():
            self.end[state] = here
            self.steps += 1

    def _match(self, token: int) -> None:
        """Follow the longest end that occurred before to ``token``; where it never led there, a shorter one."""
        state = self._state
        while state != ROOT and token not in self.next[state]:
            state = self.link[state]
            self._matched = self.size[state]
            self.steps += 1
        if token in self.next[state]:
            self._state, self._matched = self.next[state][token], self._matched + 1
        else:
            self._state, self._matched = ROOT, 0

    def _append(self, token: int) -> None:
        """Add the strings that end with this token."""
        self.text.append(token)
        new = self._state_of({}, self.size[self._last] + 1, len(self.text) - 1)
        state = self._last
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
            self.steps += 1
        if state == -1:
            self.link[new] = ROOT
        else:
            self.link[new] = self._ending(state, token)
        self._last = new

    def _ending(self, state: int, token: int) -> int:
        """The state whose longest string is that of ``state`` and ``token``: there already, or split off another."""
        old = self.next[state][token]
        if self.size[old] == self.size[state] + 1:
            return old
        clone = self._state_of(dict(self.next[old]), self.size[state] + 1, self.end[old])
        self.steps += len(self.next[old])
        self.link[clone], self.link[old] = self.link[old], clone
        while state != -1 and self.next[state].get(token) == old:
            self.next[state][token] = clone
            state = self.link[state]
            self.steps += 1
        return clone

    def _state_of(self, transitions: dict[int, int], size: int, end: int) -> int:
        self.next.append(transitions)
        self.link.append(ROOT)
        self.size.append(size)
        self.end.append(end)
        return len(self.next) - 1

    def _settle(self) -> None:
        """Cut the match to ``most`` tokens, and go to the state that holds it, which may have been split off."""
        self._matched = min(self._matched, self.most)
        while self._state != ROOT and self.size[self.link[self._state]] >= self._matched:
            self._state = self.link[self._state]
            self.steps += 1
