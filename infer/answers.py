"""One answer to templated messages, which may go on from a text in a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from medusa.decoding import Decoder, Past, Step
from medusa.errors import UserError

from .calls import prepare
from .streams import Stream
from .tally import Completion
from .text import written_eos

if TYPE_CHECKING:
    from .engine import Engine


class Answer:
    """One answer: prepared, then started, then taken in pieces, and ended at any moment between steps.

    Args:
        engine: decodes.
        ids: the rendered messages.
        options: those of ``Engine.generate``.
        way_out: what to do where the messages fill the context.
        past: a text in a cache; the cache is this answer's from ``start`` on.

    Raises:
        UserError: the context is full, or options that can't be followed.
    """

    def __init__(
        self, engine: Engine, ids: list[int], options: Mapping[str, Any], way_out: str, past: Past | None = None
    ) -> None:
        trunk = engine.trunk
        horizon = trunk.horizon(len(ids))
        if horizon is not None and len(ids) >= horizon:
            raise UserError(
                f"the messages come to {len(ids)} tokens and a text may reach {horizon} with this trunk: {way_out}"
            )
        call = prepare(trunk, engine.drafter, [ids], options, past=past)
        if len(call.tallies) != 1:
            raise UserError(f"num_return_sequences={len(call.tallies)}: a chat goes on from one answer, leave it out")
        (self.tally,) = call.tallies
        self.reused = 0 if past is None else past.known(ids, trunk)
        self._tokenizer = trunk.tokenizer
        self._decoder = Decoder(trunk, call.drafter, call.rule)
        self.whole = False  # the last piece was taken
        self._taken: list[str] = []
        self._seconds = 0.0
        self._over = False
        self._sound = False  # False while a step is under way, and for good once one was broken off

    @property
    def text(self) -> str:
        """The text that was taken."""
        return "".join(self._taken)

    def start(self) -> None:
        """Read the messages and choose the first token."""
        self._forward(lambda: self._decoder.admit([self.tally.request]))

    def pieces(self) -> Generator[str, None, None]:
        """The text in pieces of whole characters."""
        while not self._over:
            piece = self.tally.transcript.take()
            if self.tally.finish_reason:
                piece = piece.removesuffix(self._written_eos())
                self.whole = True
            if piece:
                self._taken.append(piece)
                yield piece
            if self.whole:
                return
            if not self._over:
                self._forward(self._decoder.step)

    def end(self) -> Past | None:
        """Decode no more; return the text in the cache, or None after a step that was broken off."""
        self._over = True
        if not self._sound:
            return None
        self._decoder.finish(0)
        return self._decoder.past()

    def completion(self) -> Completion:
        """The account of a whole answer."""
        return replace(self.tally.completion(), text=self.text)

    def _forward(self, forward: Callable[[], Step]) -> None:
        self._sound = False
        start = time.perf_counter()
        step = forward()
        self._seconds += time.perf_counter() - start
        self.tally.add(0, step, self._seconds)
        self._sound = True

    def _written_eos(self) -> str:
        """What the EOS wrote at the end, if one did."""
        assert self._tokenizer is not None
        ended = self.tally.finish_reason == "eos"
        return written_eos(self._tokenizer, self.tally.transcript.ids[-1]) if ended else ""


class Reply(Stream):
    """A stream of an answer."""

    def __init__(self, pieces: Generator[str, None, None], answer: Answer) -> None:
        super().__init__(pieces, answer.tally)
        self._answer = answer

    @property
    def completion(self) -> Completion | None:
        """The whole answer, or None while it is under way, and where it ended early."""
        return self._answer.completion() if self._answer.whole else None
