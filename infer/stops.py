"""Stop strings: where the first of them ends, whatever tokens it comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """The string that was found, and how many characters of the last push lie up to its end."""

    stop: str
    end: int


class StopFinder:
    """Reads a text character by character and finds the first place where a stop string ends.

    Of several that end at the same character the longest is found. A string may begin in ``before``, the text that
    precedes; one that ends there is not found. The cost is linear (Knuth, Morris and Pratt 1977).
    """

    def __init__(self, stops: Sequence[str], before: str = "") -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        for character in before:
            self._read(character)

    @property
    def begun(self) -> int:
        """The most characters at the text's end that may yet turn out to begin a stop string."""
        return max(self._matched, default=0)

    def push(self, text: str) -> Found | None:
        """Read on; once a string was found, nothing more is to be pushed."""
        for place, character in enumerate(text):
            found = self._read(character)
            if found is not None:
                return Found(found, place + 1)
        return None

    def _read(self, character: str) -> str | None:
        ended = None
        for number, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                ended = ended or stop
                matched = borders[-1]
            self._matched[number] = matched
        return ended


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``, the length of the longest shorter one that it ends with."""
    borders = [0]
    for character in stop[1:]:
        size = borders[-1]
        while size and stop[size] != character:
            size = borders[size - 1]
        borders.append(size + (stop[size] == character))
    return borders
