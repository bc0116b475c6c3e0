"""One row's tokens and text while they come, up to a stop string: what is certain, and what has to wait."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .stops import Found, StopFinder
from .text import REPLACEMENT, Detokeniser, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """The account of what a row says.

    Stop strings are looked for in a text in which special tokens stand as they are written, though the row's own
    leaves them out: so one of them can end it. They may begin in the prompt. Once one was found no more is taken in. An
    EOS that is a special token is no stop string by a part of its name.

    Args:
        tokenizer: None makes no text.
        prompt: the ids that precede.
        stops: the strings that end the text.
        include_stop: whether the text ends with the stop string, and the ids with the token that completed it; else
            the text ends before it, and the ids are the fewest that cover the text.
        eos: ids that end the row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = True,
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self.ids: list[int] = []
        self.stop: str | None = None
        self.pieces: list[str] = []  # the text that was taken
        self._taken = 0  # its characters
        self._held = ""  # the text behind it
        self._sure = 0  # characters of the whole text that are certain
        self._over = False
        self._detokeniser = None if tokenizer is None else Detokeniser(tokenizer, prompt)
        self._finder: StopFinder | None = None
        if not stops:
            return
        assert tokenizer is not None, "stop strings are looked for in text"
        self._tokenizer = tokenizer
        self._include = include_stop
        self._special = special_ids(tokenizer)
        self._eos = eos & self._special
        self._finder = StopFinder(stops, _tail(tokenizer, prompt, max(map(len, stops))))
        self._ends: list[int] = []  # characters of text up to each token's end
        self._written: list[int] = []  # the same, special tokens written out

    @property
    def looks(self) -> bool:
        """Whether it looks for stop strings, and so wants each token as it comes."""
        return self._finder is not None

    @property
    def sure(self) -> int:
        """How many of the tokens are certain."""
        held = self._finder is not None and not self._include and not self._over
        return self._cover(self._sure) if held else len(self.ids)

    def push(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens, up to the one that completes a stop string."""
        if self._finder is not None:
            for token in tokens:
                if self.stop is None:
                    self._read(token, self._finder)
            return
        self.ids += tokens
        if self._detokeniser is not None:
            self._held += self._detokeniser.push(tokens)
        self._sure = self._taken + len(self._held)

    def end(self) -> None:
        """The row has ended: all that was said is certain."""
        self._over = True
        if self.stop is None and self._detokeniser is not None:
            self._held += self._detokeniser.finish()
            self._sure = self._taken + len(self._held)

    def take(self) -> str:
        """The text that has become certain since the last time."""
        count = self._sure - self._taken
        piece, self._held = self._held[:count], self._held[count:]
        if piece:
            self.pieces.append(piece)
            self._taken += len(piece)
        return piece

    def _read(self, token: int, finder: StopFinder) -> None:
        assert self._detokeniser is not None
        special = token in self._special
        piece = str(self._tokenizer.convert_ids_to_tokens(token)) if special else self._detokeniser.push([token])
        before = self._written[-1] if self._written else 0
        self._held += "" if special else piece
        self.ids.append(token)
        self._written.append(before + len(piece))
        self._ends.append(self._taken + len(self._held))
        found = finder.push(piece)
        if found is not None and (token not in self._eos or found.stop.endswith(piece)):
            self._stop(found, before, special)
        elif self._include:
            self._sure = self._ends[-1]
        else:
            self._sure = max(self._sure, self._character(self._written[-1] - finder.begun))

    def _stop(self, found: Found, before: int, special: bool) -> None:
        """Cut text and ids at a stop string that the last token, ``before`` which so much was written, completes."""
        self.stop = found.stop
        place = before + found.end - (0 if self._include else len(found.stop))
        if special and place >= before:
            self._finish_before_special()
        self._sure = self._ends[-1] if special and place >= before else self._character(place)
        if not self._include:
            del self.ids[self._cover(self._sure) :]

    def _finish_before_special(self) -> None:
        """What is left of a character that will never be finished belongs to the token before the last."""
        assert self._detokeniser is not None
        self._held += self._detokeniser.finish()
        self._ends[-2:] = [self._taken + len(self._held)] * len(self._ends[-2:])

    def _character(self, place: int) -> int:
        """How many characters of the text precede a ``place`` in the text with special tokens written out."""
        if place <= 0:
            return 0
        token = bisect_left(self._written, place)
        written, said = (self._written[token - 1], self._ends[token - 1]) if token else (0, 0)
        return min(said + place - written, self._ends[token])  # a special token says nothing

    def _cover(self, size: int) -> int:
        """The fewest tokens whose text has ``size`` characters."""
        return bisect_left(self._ends, size) + 1 if size else 0


def _tail(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], size: int) -> str:
    """The last characters of the prompt's text, special tokens written out, up to the last that is whole."""
    # a character may take four tokens, the last one be unfinished, and the space that a window begins with be lost
    window = list(prompt[-4 * (size + 2) :])
    text = tokenizer.decode(window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text).rstrip(REPLACEMENT)[-size:]
