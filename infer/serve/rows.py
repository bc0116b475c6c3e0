"""What a server decodes for a request, row by row, and what each step makes certain of a row.

A row is exactly what the engine would decode for the same prompt and options; here it only learns to tell in pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from medusa.decoding import Step, TokenLogprob
from medusa.errors import UserError

from ..calls import prepare
from ..text import Detokeniser, written_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..engine import Engine
    from ..tally import Completion, Tally


@dataclass(frozen=True)
class Piece:
    """What has become certain of a row since the last piece.

    ``logprobs`` has an entry for each token that became certain, if they were asked for: its id and what the trunk
    says of it; there is none for an EOS, which is no text. ``drafts`` are parts of ``text`` with the depth of the tree
    at which each was guessed, 0 for what the trunk chose itself. ``steps`` and ``tokens`` are the row's so far.
    """

    index: int
    text: str
    logprobs: list[tuple[int, TokenLogprob]]
    drafts: list[tuple[str, int]]
    steps: int
    tokens: int


@dataclass(frozen=True)
class Ended:
    """A row's account, closed. It follows the row's last piece; ``logprobs`` are those of all pieces."""

    index: int
    completion: Completion
    logprobs: list[tuple[int, TokenLogprob]]


@dataclass(frozen=True)
class Failed:
    """The request is over, and has no answer; nothing follows."""

    error: Exception


Event = Piece | Ended | Failed


class Depths:
    """Which depth of the trees a row's characters were guessed at."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._detokeniser = Detokeniser(tokenizer, prompt)
        self._runs: deque[tuple[int, int]] = deque()  # characters, depth
        self._last = 0

    def push(self, tokens: Sequence[int], accepted: int) -> None:
        """Take in a step's tokens, of which the first ``accepted`` were drafted, one at each depth from 1."""
        for place, token in enumerate(tokens):
            self._last = place + 1 if place < accepted else 0
            self._runs.append((len(self._detokeniser.push([token])), self._last))

    def take(self, text: str) -> list[tuple[str, int]]:
        """Cut ``text``, which follows what was taken before, where the depth changes."""
        parts: list[tuple[str, int]] = []
        while text:
            size, depth = self._runs.popleft() if self._runs else (len(text), self._last)  # the rest of a character
            if size > len(text):
                self._runs.appendleft((size - len(text), depth))
            part, text = text[:size], text[size:]
            if part and parts and parts[-1][1] == depth:
                parts[-1] = (parts[-1][0] + part, depth)
            elif part:
                parts.append((part, depth))
        return parts


class Row:
    """One row of a request, from its place in the queue to its end.

    Args:
        tally: its account, with what the decode loop is asked.
        index: its number among the request's choices.
        tokenizer: the trunk's.
        bare: leave what the EOS writes out of the text, as chats do.
        drafts: tell the depth that each part of the text was guessed at.
    """

    def __init__(
        self, tally: Tally, index: int, tokenizer: PreTrainedTokenizerBase, bare: bool = False, drafts: bool = False
    ) -> None:
        self.tally = tally
        self.index = index
        self.started = 0.0  # when it was admitted, by the scheduler's clock
        self._tokenizer = tokenizer
        self._bare = bare
        self._depths = Depths(tokenizer, tally.request.ids) if drafts else None
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # that were told
        self._text: list[str] = []
        self._steps = self._tokens = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.tally.finish_reason)

    def add(self, number: int, step: Step, seconds: float) -> Piece:
        """Count a step that served this row as ``number``; return what is certain by now, perhaps nothing."""
        tokens = step.tokens[number]
        if self._depths is not None:
            self._depths.push(tokens, step.accepted[number] if step.nodes else 0)
        self.tally.add(number, step, seconds)
        self._steps += bool(step.nodes)
        self._tokens += len(tokens)
        text = self.tally.transcript.take()
        if self._bare and self.tally.finish_reason == "eos":
            text = text.removesuffix(written_eos(self._tokenizer, self.tally.transcript.ids[-1]))
        self._text.append(text)
        drafts = [] if self._depths is None else self._depths.take(text)
        return Piece(self.index, text, self._new_logprobs(), drafts, self._steps, self._tokens)

    def end(self) -> Ended:
        """The account closed."""
        return Ended(self.index, replace(self.tally.completion(), text="".join(self._text)), self._logprobs)

    def _new_logprobs(self) -> list[tuple[int, TokenLogprob]]:
        if self.tally.request.logprobs is None:
            return []
        ids = self.tally.transcript.ids
        sure = self.tally.transcript.sure - (self.tally.finish_reason == "eos")
        span = slice(len(self._logprobs), sure)
        new = list(zip(ids[span], self.tally.logprobs[span], strict=True))
        self._logprobs += new
        return new


class Job:
    """A request: its rows, and where their events go.

    Args:
        rows: each prompt's answers.
        deliver: takes the events; it is called from the thread that decodes, must return at once and raise nothing.
        plain: decode without drafts.
        pieces: deliver pieces too, and not the ends alone.
        timeout: seconds from the moment it is submitted, waiting included.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        deliver: Callable[[Event], None],
        *,
        plain: bool = False,
        pieces: bool = True,
        timeout: float | None = None,
    ) -> None:
        self.rows = list(rows)
        self.deliver = deliver
        self.plain = plain
        self.pieces = pieces
        self.timeout = timeout
        self.submitted = 0.0
        self.cancelled = False
        self.over = False

    def overdue(self, now: float) -> bool:
        """Whether its time is up."""
        return self.timeout is not None and now - self.submitted > self.timeout


class ContextExceeded(UserError):
    """A prompt that leaves no room for an answer."""


def check_context(engine: Engine, prompts: Sequence[Sequence[int]], context: int | None = None) -> None:
    """Refuse a prompt that fills the trunk's context, or a lower one.

    Raises:
        ContextExceeded: there is one.
    """
    for ids in prompts:
        horizons = [each for each in (engine.trunk.horizon(len(ids)), context) if each is not None]
        if horizons and len(ids) >= min(horizons):
            raise ContextExceeded(
                f"the prompt has {len(ids)} tokens and a text may reach {min(horizons)} here: shorten it"
            )


def make_rows(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    *,
    context: int | None = None,
    bare: bool = False,
    drafts: bool = False,
) -> list[Row]:
    """The rows of a request: what ``Engine.generate`` would decode for ``prompts`` with these ``options``.

    ``context``: tokens that a text may reach here, its prompt included, where that is fewer than the trunk's own.

    Raises:
        ContextExceeded: a prompt that fills the context.
        UserError: options that can't be followed, or a trunk without tokenizer.
    """
    tokenizer = engine.trunk.tokenizer
    if tokenizer is None:
        raise UserError("this trunk has no tokenizer to make text with: a server needs one")
    check_context(engine, prompts, context)
    tallies = prepare(engine.trunk, engine.drafter, prompts, options).tallies
    for tally in tallies:
        if options.get("seed") is None:  # one was drawn: below 2**53 it is exact in every client's JSON
            law = tally.request.sampling
            tally.request = replace(tally.request, sampling=replace(law, seed=law.seed >> 10))
        if context is not None:
            most = min(tally.request.max_new_tokens, context - len(tally.request.ids))
            tally.request = replace(tally.request, max_new_tokens=most)
    return [Row(tally, index, tokenizer, bare, drafts) for index, tally in enumerate(tallies)]


def warm_up_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the tokenizer set what it sets at its first call, before several threads use it."""
    tokenizer.decode(tokenizer.encode(" ", add_special_tokens=False))
