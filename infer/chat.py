"""Chats: messages are answered, and a conversation reads only what is new in each turn.

A conversation keeps the keys and values of the text so far. Each turn is rendered by the chat template anew and from
the first message on, so what a template does to earlier turns counts; of those ids the beginning that equals the text
in the cache is not read again, the rest of the cache is rolled back. So an answer is what a conversation without a
cache would get; in half precision, to rounding: two logits that are as good as equal may then change places.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa.decoding import Past
from medusa.errors import UserError

from .answers import Answer, Reply
from .messages import Message, Template
from .options import Options
from .streams import Stream
from .tally import Completion

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Conversation", "chat", "stream_chat"]


def chat(
    engine: Engine,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Completion:
    """Answer ``messages``; see :meth:`medusa.infer.Engine.chat`."""
    answer = _answer(engine, messages, tools, chat_template_kwargs, options)
    for _ in answer.pieces():
        pass
    return answer.completion()


def stream_chat(
    engine: Engine,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Stream:
    """Answer ``messages`` piece by piece; see :meth:`medusa.infer.Engine.stream_chat`."""
    answer = _answer(engine, messages, tools, chat_template_kwargs, options)
    return Reply(answer.pieces(), answer)


class Conversation:
    """Turns of a user and a model, and the cache of the text so far. It belongs to one thread.

    A turn counts once its answer is whole. A stream that ends early, closed or broken off by an error, leaves the turn
    with the text that was taken from it, and no turn where none was; the next turn ends a stream that is under way.
    A call of :meth:`say` that ends in an error leaves everything as it was.

    Several conversations with one engine do not meet; each holds a cache of its own.

    Args:
        engine: decodes.
        system: what the model is told first; None leaves it to the template, which may have a text of its own.
        tools: functions or JSON schemas that the model may call, for templates that speak of tools.
        chat_template_kwargs: the template's own variables, or a ``chat_template`` in place of the tokenizer's.
        options: those of ``Engine.generate``, for every turn.

    Raises:
        UserError: no chat template, one that takes no such system message, or options that can't be followed.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._engine = engine
        self._template = Template(engine.trunk.tokenizer, tools, chat_template_kwargs)
        Options.of(options, engine.trunk)
        self._options = options
        self._first: list[Message] = []
        if system is not None:
            self._first = [self._template.check_one({"role": "system", "content": system}, "system")]
            self._template.ids([*self._first, {"role": "user", "content": "?"}])
        self._messages = list(self._first)
        self._past: Past | None = None
        self._underway: Answer | None = None
        self._asked: Message = {}
        self._reused = 0

    @property
    def messages(self) -> list[Message]:
        """The turns so far, the system's message first; a copy. An answer under way is not among them."""
        return [dict(message) for message in self._messages]

    @property
    def reused(self) -> int:
        """How many tokens of the last turn's prompt were in the cache and not read again."""
        return self._reused

    def say(self, text: str, **options: Any) -> Completion:
        """The model's answer to ``text``. ``options`` are this turn's own, over those of the conversation.

        Raises:
            UserError: an empty text, a character that the tokenizer doesn't know, options that can't be followed, or a
                conversation that fills the context: nothing is ever left out of it in silence.
        """
        answer = self._begin(text, options)
        try:
            for _ in answer.pieces():
                pass
        finally:
            self._leave(answer, keep=answer.whole)
        return answer.completion()

    def stream(self, text: str, **options: Any) -> Stream:
        """The answer to ``text`` piece by piece; options and errors as in :meth:`say`, at the call."""
        answer = self._begin(text, options)
        return Reply(self._pieces(answer), answer)

    def undo(self) -> str:
        """Forget the last turn; return what the user said in it.

        Raises:
            UserError: there is none.
        """
        self._end_stream()
        if self._messages == self._first:
            raise UserError("no turn to undo: nothing has been said")
        *self._messages, asked, _ = self._messages
        return str(asked["content"])

    def reset(self) -> None:
        """Forget all turns; the system's message stays."""
        self._end_stream()
        self._messages = list(self._first)

    def _begin(self, text: str, options: Mapping[str, Any]) -> Answer:
        self._end_stream()
        asked = self._template.check_one({"role": "user", "content": text}, "the message")
        ids = self._template.ids([*self._messages, asked])
        answer = Answer(
            self._engine, ids, {**self._options, **options}, "undo turns or reset the conversation", self._past
        )
        self._past = None  # from here on the cache is the answer's
        self._reused = answer.reused
        answer.start()
        self._underway, self._asked = answer, asked
        return answer

    def _pieces(self, answer: Answer) -> Generator[str, None, None]:
        try:
            yield from answer.pieces()
        finally:
            self._leave(answer, keep=answer.whole or bool(answer.text))

    def _end_stream(self) -> None:
        """End a stream that is under way where it is."""
        if self._underway is not None:
            self._leave(self._underway, keep=bool(self._underway.text))

    def _leave(self, answer: Answer, keep: bool) -> None:
        """Take the cache back from an answer and, to ``keep`` it, note the turn. The second time does nothing."""
        if self._underway is not answer:
            return
        self._underway = None
        self._past = answer.end()
        if keep:
            self._messages += [self._asked, {"role": "assistant", "content": answer.text}]


def _answer(
    engine: Engine,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Answer:
    template = Template(engine.trunk.tokenizer, tools, chat_template_kwargs)
    answer = Answer(engine, template.ids(template.check(messages)), options, "leave some out, or shorten them")
    answer.start()
    return answer
