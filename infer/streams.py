"""A text that is told while it is decoded: as an iterator of pieces, or to a streamer of transformers' kind.

Dimensions: T time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

import torch
from torch import Tensor

from medusa.decoding import Step
from medusa.errors import UserError

from .tally import Completion, Tally


class Streamer(Protocol):
    """transformers' protocol of streamers."""

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids [1, T], then each token [1]."""
        ...

    def end(self) -> None:
        """There is no more."""
        ...


class Stream(Iterator[str]):
    """A completion's text in pieces of whole characters; ``completion`` is there once the last piece was taken.

    One that is closed, or dropped, before its end stops decoding.
    """

    def __init__(self, pieces: Generator[str, None, None], tally: Tally) -> None:
        self._pieces = pieces
        self._tally = tally

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; what was not taken will not be."""
        self._pieces.close()

    @property
    def completion(self) -> Completion | None:
        """The whole answer, or None while it is under way."""
        return self._tally.completion() if self._tally.finish_reason else None


def check_streamer(streamer: object, rows: int) -> None:
    """Refuse what is no streamer, or one for several ``rows``."""
    for name in ("put", "end"):
        if not callable(getattr(streamer, name, None)):
            raise UserError(
                f"streamer={streamer!r:.60} has no {name}: give an object such as transformers' TextStreamer"
            )
    if rows != 1:
        raise UserError(f"a streamer takes one text, and this call makes {rows}: give one prompt, or no streamer")


def put_certain(streamer: Streamer, tally: Tally, told: int) -> int:
    """Hand on the tokens behind the first ``told`` that are certain; return how many those were."""
    new = tally.transcript.ids[told : tally.transcript.sure]
    for token in new:
        streamer.put(torch.tensor([token]))
    return len(new)


def pieces(
    first: tuple[Step, float], rest: Generator[tuple[Step, float], None, None], tally: Tally
) -> Generator[str, None, None]:
    """The certain text that each step brings; closed early, it ends the decoding too."""
    try:
        step, seconds = first
        while True:
            tally.add(0, step, seconds)
            piece = tally.transcript.take()
            if piece:
                yield piece
            if tally.finish_reason:
                return
            step, seconds = next(rest)
    finally:
        rest.close()
