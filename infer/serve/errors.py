"""What a server refuses, in the shape that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from medusa.errors import UserError, nearest

from .rows import ContextExceeded
from .scheduler import Broken, QueueFull, Stopping, TimedOut

INVALID, OVERLOADED, FAILED = "invalid_request_error", "overloaded_error", "server_error"
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients heed it: the same request would only fail again
RETRY = {"retry-after": "1"}
# What a request may end in by its own fault, or the load's.
EXPECTED = (UserError, QueueFull, Stopping, TimedOut, Broken)
# OpenAI's names for options of the engine.
OPENAI_NAMES = {
    "logits_processor": "logit_bias",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}
# Parameters of OpenAI's that nothing here follows; others it names are taken at the one value that does nothing.
UNSUPPORTED = (
    "audio",
    "function_call",
    "functions",
    "moderation",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
)


class ApiError(Exception):
    """An answer that is an error: HTTP status, and OpenAI's four fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception, known: Container[str] = (), param: str | None = None) -> ApiError:
    """The answer to a request that ended in one of ``EXPECTED``.

    ``known``: its parameters, by one of which a message about it begins; ``param`` is meant where none does.
    """
    said = str(error)
    if isinstance(error, UserError):
        said = re.sub(r"\w+", lambda word: OPENAI_NAMES.get(word[0], word[0]), said)
        first = re.match(r"\w*", said)
        code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
        return ApiError(400, said, param=first[0] if first and first[0] in known else param, code=code)
    if isinstance(error, QueueFull):
        return ApiError(429, said, kind=OVERLOADED, code="queue_full", headers=RETRY)
    if isinstance(error, Stopping):
        return ApiError(503, said, kind=OVERLOADED, code="stopping", headers=RETRY)
    if isinstance(error, TimedOut):
        return ApiError(504, said, kind=FAILED, code="timeout", headers=NO_RETRY)
    return ApiError(500, said, kind=FAILED, code="decoding_failed")


def explain(errors: Sequence[Mapping[str, Any]], known: Sequence[str]) -> ApiError:
    """What is wrong with a body, by pydantic's account: an unknown parameter, or the first one's deepest error."""
    unknown = [each for each in errors if each["type"] == "extra_forbidden" and len(each["loc"]) == 2]
    first = (unknown or errors)[0]["loc"][1:2]
    error = max((each for each in errors if each["loc"][1:2] == first), key=lambda each: len(each["loc"]))
    where = error["loc"][1:]
    if error["type"] == "json_invalid" or not where:
        return ApiError(400, "the body is no JSON object: give one, and the header content-type: application/json")
    name = str(where[0])
    param = name + "".join(f"[{part}]" for part in where[1:2] if isinstance(part, int))
    param += "".join(f".{part}" for part in where[2:3] if isinstance(where[1], int) and str(part).isidentifier())
    if error["type"] == "extra_forbidden" and len(where) == 1:
        if name in UNSUPPORTED:
            return ApiError(
                400, f"{name} is not supported here: leave it out", param=name, code="unsupported_parameter"
            )
        said = f"unknown parameter {name!r:.60}{nearest(name, known)}: leave it out"
        return ApiError(400, said, param=name, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing: give it", param=param, code="missing_parameter")
    said = str(error["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}={error['input']!r:.60}: {said[:1].lower()}{said[1:]}", param=param)
