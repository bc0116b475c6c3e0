"""What stands before a server's routes: who may ask, by which name, and how much is read of a body."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .errors import ApiError

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

GUARDED = ("/v1/", "/metrics")
NO_KEY = {"www-authenticate": "Bearer"}


class Guard:
    """Middleware (ASGI): answers what is refused itself; else hands on, with the body read whole.

    Args:
        app: what it guards.
        body: the most bytes of a body.
        seconds: in which a body has to arrive.
        key: the bearer token that /v1 and /metrics ask for; None asks for none.
        hosts: names by which the server may be asked, without the port; empty for any. Where no token is asked for,
            it keeps pages of other sites, whose names were made to lead here, from asking through a browser.
    """

    def __init__(
        self, app: App, *, body: int, seconds: float, key: str | None = None, hosts: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._body = body
        self._seconds = seconds
        self._key = key
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_length(headers.get(b"content-length", b""))
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except asyncio.TimeoutError:  # in Python 3.10 another than TimeoutError
            late = ApiError(408, f"the body did not arrive within {self._seconds:g} seconds", code="timeout")
            await _answer(send, late)
        except ApiError as error:
            await _answer(send, error)
        else:
            if body is not None:
                await self._app(scope, _again(body, receive), send)

    def _check_host(self, host: str) -> None:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._hosts and name.strip("[]").lower() not in self._hosts:
            said = f"this server is not asked by the name {name!r:.60}: its user may allow it by --allowed-hosts"
            raise ApiError(403, said, code="host_not_allowed")

    def _check_key(self, path: str, given: bytes) -> None:
        if self._key is None or not path.startswith(GUARDED):
            return
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key.encode()):
            said = "no valid key: give the header Authorization: Bearer KEY"
            raise ApiError(401, said, code="invalid_api_key", headers=NO_KEY)

    def _check_length(self, given: bytes) -> None:
        if given.isdigit() and int(given) > self._body:
            self._refuse_body()

    def _refuse_body(self) -> None:
        raise ApiError(413, f"the body is larger than {self._body} bytes: shorten it", code="body_too_large")

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None where the client has left."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._body:
                self._refuse_body()
            if not message.get("more_body", False):
                return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """A channel on which the body comes first, then what follows."""
    told = False

    async def replay() -> Any:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, error: ApiError) -> None:
    content = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": content})
