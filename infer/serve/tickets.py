"""A request's side of the scheduler: its events as they come, and an end to it where its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from .guard import Receive
from .rows import Ended, Event, Failed, Job, Piece, Row
from .scheduler import Scheduler


class Gone(Exception):
    """The client has left."""


class Ticket:
    """A submitted request, on the event loop that made it.

    Args:
        scheduler: decodes it.
        rows: of the request.
        receive: the channel of its connection, the body read: what comes next is that the client leaves.
        plain: without drafts.
        pieces: whether it is told piece by piece.
        timeout: seconds, waiting included.

    Raises:
        QueueFull, Stopping: as :meth:`Scheduler.submit`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rows: Sequence[Row],
        receive: Receive,
        *,
        plain: bool = False,
        pieces: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._scheduler = scheduler
        self._job = Job(rows, self._deliver, plain=plain, pieces=pieces, timeout=timeout)
        scheduler.submit(self._job)
        self._watch = asyncio.create_task(self._until_gone(receive))

    async def events(self) -> AsyncGenerator[Piece | Ended, None]:
        """What happens to the rows, up to their ends.

        Raises:
            Gone: the client left.
            TimedOut, Stopping, Broken: there is no answer.
        """
        left = len(self._job.rows)
        try:
            while left:
                event = await self._queue.get()
                if isinstance(event, Failed):
                    raise event.error
                left -= isinstance(event, Ended)
                yield event
        finally:
            self.close()

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        self._watch.cancel()
        self._scheduler.cancel(self._job)

    def _deliver(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._scheduler.cancel(self._job)
        self._queue.put_nowait(Failed(Gone()))
