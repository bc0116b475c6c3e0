"""From the bodies of requests to rows and replies: what a server does, without the web around it."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medusa.errors import UserError, nearest

from ..inputs import read_prompts
from ..messages import Message, Template
from .errors import EXPECTED, ApiError, as_api_error
from .metrics import Metrics
from .replies import DONE, ChatReply, Reply, TextReply, TokenTexts, event
from .rows import Ended, Row, check_context, make_rows, warm_up_tokenizer
from .scheduler import Scheduler
from .tickets import Gone, Ticket

if TYPE_CHECKING:
    from ..engine import Engine
    from .models import Asked, ChatMessage, ChatRequest, CompletionRequest

# Parameters whose names are those of the engine's options, and OpenAI's names for others.
SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty")
RENAMED = {"max_tokens": "max_new_tokens", "n": "num_return_sequences", "stop": "stop_strings"}


@dataclass(frozen=True)
class Settings:
    """A server's name for its model, and its limits.

    Args:
        name: of the model.
        rows: decoded at once.
        queue: rows that may wait.
        context: tokens that a text may reach; None for as many as the trunk's own.
        body: bytes of a request.
        timeout: seconds of a request, waiting included.
        key: the bearer token; None asks for none.
        hosts: names by which it may be asked; none for any.
    """

    name: str
    rows: int = 8
    queue: int = 64
    context: int | None = None
    body: int = 1 << 20
    timeout: float = 600.0
    key: str | None = None
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = {"rows": 1, "queue": 1, "context": 2, "body": 1}
        for name, most in least.items():
            value = getattr(self, name)
            if value is not None and value < most:
                raise UserError(f"{name}={value}: give at least {most}")
        if not self.timeout > 0:
            raise UserError(f"timeout={self.timeout}: give seconds above 0")
        if self.key is not None and not self.key:
            raise UserError("the key is empty: give one, or none at all")


@dataclass(frozen=True)
class Order:
    """A request that was read: its rows, how many prompts they come from, and how it is answered."""

    rows: list[Row]
    prompts: int
    reply: Reply
    plain: bool
    stream: bool
    with_usage: bool


class Service:
    """What is served: an engine behind a scheduler.

    Raises:
        UserError: a trunk without tokenizer.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        if engine.trunk.tokenizer is None:
            raise UserError("this trunk has no tokenizer to make text with: a server needs one")
        warm_up_tokenizer(engine.trunk.tokenizer)
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics()
        self.scheduler = Scheduler(engine, rows=settings.rows, queue=settings.queue, observer=self.metrics)
        self.metrics.watch(self.scheduler)
        self._texts = TokenTexts(engine.trunk.tokenizer)
        self._started = int(time.time())
        self._reading = threading.Lock()  # one prompt is encoded at a time

    def chat(self, body: ChatRequest) -> Order:
        """Read a request for a chat's answer.

        Raises:
            ApiError: it can't be followed.
        """
        most = _one_of(body, "max_completion_tokens", "max_tokens")
        options = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs, "max_new_tokens": most}
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, f"top_logprobs={body.top_logprobs} without logprobs: add it", param="top_logprobs")

        def prompts() -> list[list[int]]:
            template = Template(self.engine.trunk.tokenizer)
            return [template.ids(template.check([_message(each) for each in body.messages]))]

        return self._order(body, options, prompts, "messages")

    def complete(self, body: CompletionRequest) -> Order:
        """Read a request for continuations.

        Raises:
            ApiError: it can't be followed.
        """
        tops = body.logprobs
        options = {} if tops is None else {"logprobs": True, "top_logprobs": tops}
        trunk = self.engine.trunk
        return self._order(
            body, options, lambda: read_prompts(body.prompt, None, trunk.tokenizer, trunk.vocab_size).rows, "prompt"
        )

    def ticket(self, order: Order, receive: Any) -> Ticket:
        """Submit what was read.

        Raises:
            ApiError: the queue is full, or the server stops.
        """
        seconds = self.settings.timeout
        try:
            return Ticket(self.scheduler, order.rows, receive, plain=order.plain, pieces=order.stream, timeout=seconds)
        except EXPECTED as error:
            raise as_api_error(error) from error

    async def answer(self, order: Order, ticket: Ticket) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: there is none.
            Gone: nobody waits for it.
        """
        try:
            async with aclosing(ticket.events()) as events:
                ends = [each async for each in events if isinstance(each, Ended)]
        except EXPECTED as error:
            raise as_api_error(error) from error
        return order.reply.whole(ends, order.prompts)

    async def stream(self, order: Order, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; what goes wrong under way is told by one."""
        extra: dict[str, Any] = {"usage": None} if order.with_usage else {}
        ends = []
        try:
            for row in order.rows:
                if (chunk := order.reply.opening(row.index)) is not None:
                    yield event(chunk | extra)
            async with aclosing(ticket.events()) as events:
                async for each in events:
                    if isinstance(each, Ended):
                        ends.append(each)
                        yield event(order.reply.end(each) | extra)
                    elif (chunk := order.reply.piece(each)) is not None:
                        yield event(chunk | extra)
            if order.with_usage:
                yield event(order.reply.usage(ends, order.prompts))
            yield DONE
        except Gone:
            return
        except EXPECTED as error:
            yield event(as_api_error(error).body)
        finally:
            ticket.close()

    def models(self) -> dict[str, Any]:
        """The list of the one model."""
        return {"object": "list", "data": [self.model(self.settings.name)]}

    def model(self, name: str | None) -> dict[str, Any]:
        """The model of that name; None is the one there is.

        Raises:
            ApiError: another name.
        """
        own, trunk = self.settings.name, self.engine.trunk
        if name not in (None, own):
            said = f"no model {name!r:.60} here{nearest(str(name), [own])}: this server has {own!r}"
            raise ApiError(404, said, param="model", code="model_not_found")
        contexts = [each for each in (self.settings.context, trunk.horizon(1)) if each is not None]
        return {
            "id": own,
            "object": "model",
            "created": self._started,
            "owned_by": "medusa",
            "context": min(contexts, default=None),
            "chat": bool(getattr(trunk.tokenizer, "chat_template", None)),
            "drafter": self.engine.drafter.name,
        }

    def health(self) -> dict[str, Any]:
        """Whether decoding goes on, and for how many."""
        status = "ok" if self.scheduler.alive else "failed"
        return {"status": status, "rows": self.scheduler.serving, "waiting": self.scheduler.waiting}

    def _order(self, body: Asked, own: Mapping[str, Any], prompts: Callable[[], list[list[int]]], where: str) -> Order:
        self.model(body.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options without stream: leave it out", param="stream_options")
        options = {**_options(body), **{name: value for name, value in own.items() if value is not None}}
        known, context, drafts = type(body).model_fields, self.settings.context, bool(body.drafts)
        with self._reading:
            try:
                ids = prompts()
                check_context(self.engine, ids, context)
            except UserError as error:
                raise as_api_error(error, known, where) from error
            count, most = len(ids) * (body.n or 1), self.settings.queue
            if count > most:
                said = f"{count} answers asked for: this server takes {most}"
                raise ApiError(400, said, param="n" if body.n else where)
            try:
                bare = where == "messages"
                rows = make_rows(self.engine, ids, options, context=context, bare=bare, drafts=drafts)
            except UserError as error:
                raise as_api_error(error, known) from error
        kind = ChatReply if where == "messages" else TextReply
        reply = kind(self.settings.name, self._texts, logprobs=bool(options.get("logprobs")), drafts=drafts)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return Order(rows, len(ids), reply, bool(body.baseline), bool(body.stream), usage)


def _options(body: Asked) -> dict[str, Any]:
    """What a body asks of the engine; what it leaves out is left out."""
    options = {name: getattr(body, name) for name in SAME}
    options |= {ours: getattr(body, theirs) for theirs, ours in RENAMED.items()}
    options["stop_strings"] = body.stop or None
    options["sequence_bias"] = {(int(token),): bias for token, bias in (body.logit_bias or {}).items()} or None
    given = {name: value for name, value in options.items() if value is not None}
    return given | {"include_stop": False, "baseline": bool(body.baseline)}


def _one_of(body: ChatRequest, new: str, old: str) -> int | None:
    """The value of two names for one thing."""
    newer, older = getattr(body, new), getattr(body, old)
    if newer is not None and older is not None and newer != older:
        raise ApiError(400, f"{new}={newer} and {old}={older}: give one of the two", param=new)
    found: int | None = newer if newer is not None else older
    return found


def _message(given: ChatMessage) -> Message:
    """A message as templates take it: text alone, and no role of OpenAI's own."""
    message = given.model_dump(exclude_none=True)
    if given.role == "developer":
        message["role"] = "system"
    if isinstance(given.content, list):
        message["content"] = "".join(part.text for part in given.content)
    return message
