"""One thread that decodes for all requests: rows join and leave between steps.

Rows wait in one queue, first come first served. Requests that ask for plain decoding have a batch of their own beside
the one with drafts; both step in turns and share the places. A batch that stands empty is dropped, its cache with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from medusa.decoding import Decoder, Step, joining
from medusa.drafters.none import NullDrafter

from .rows import Failed, Job, Row

if TYPE_CHECKING:
    from ..engine import Engine

LOG = logging.getLogger(__name__)


class QueueFull(Exception):
    """Too many rows wait already."""


class Stopping(Exception):
    """The server takes no more requests, or ended before this one was answered."""


class TimedOut(Exception):
    """The request's time is up."""


class Broken(Exception):
    """Decoding failed, by no fault of the request's."""


class Observer:
    """Is told what the scheduler does, from its thread; this one takes no notice."""

    def joined(self, row: Row, waited: float) -> None:
        """A row left the queue after so many seconds."""

    def stepped(self, plain: bool, step: Step, seconds: float) -> None:
        """A step was made, the prefill of new rows included."""

    def told(self, job: Job, seconds: float) -> None:
        """A request had its first token after so many seconds."""

    def over(self, job: Job, outcome: str, seconds: float) -> None:
        """A request ended: ``done``, ``cancelled``, ``timeout``, ``stopped`` or ``error``."""


class Lane:
    """A batch under way and the rows it serves, by their numbers in it."""

    def __init__(self, engine: Engine, plain: bool) -> None:
        self.plain = plain
        self.decoder = Decoder(engine.trunk, NullDrafter() if plain else engine.drafter)
        self.serving: dict[int, tuple[Job, Row]] = {}


class Scheduler:
    """Decodes what is submitted, in a thread of its own once it is started.

    :meth:`submit`, :meth:`cancel` and :meth:`stop` may be called from any thread; all else is the worker's.

    Args:
        engine: its trunk, its drafter.
        rows: the most rows decoded at once.
        queue: the most rows that wait.
        clock: seconds, of any start.
        observer: is told what happens.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int = 8,
        queue: int = 64,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> None:
        self.rows = rows
        self.queue = queue
        self._engine = engine
        self._clock = clock
        self._observer = observer or Observer()
        self._lock = threading.Condition()  # over what follows, up to the lanes
        self._waiting: deque[tuple[Job, Row]] = deque()
        self._draining = self._aborting = False
        self._lanes: dict[bool, Lane] = {}  # by whether they are plain; the worker's alone
        self._thread = threading.Thread(target=self._run, name="medusa decoding", daemon=True)

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def serving(self) -> int:
        """Rows being decoded."""
        return sum(len(lane.serving) for lane in list(self._lanes.values()))

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let a request wait its turn.

        Raises:
            QueueFull: its rows do not all find a place in the queue.
            Stopping: nothing is taken in any more.
        """
        with self._lock:
            if self._draining:
                raise Stopping("the server is stopping: ask again later, or another one")
            if len(self._waiting) + len(job.rows) > self.queue:
                raise QueueFull(
                    f"{len(self._waiting)} rows wait, this request has {len(job.rows)} and at most {self.queue} may"
                    " wait: ask again later"
                )
            job.submitted = self._clock()
            self._waiting.extend((job, row) for row in job.rows)
            self._lock.notify_all()

    def cancel(self, job: Job) -> None:
        """End a request whose answer nobody waits for; its rows are free after the step under way."""
        with self._lock:
            job.cancelled = True
            self._lock.notify_all()

    def stop(self, grace: float = 0.0) -> None:
        """Take in nothing more; let what is under way end within ``grace`` seconds, then break it off."""
        with self._lock:
            self._draining = True
            self._lock.notify_all()
        self._thread.join(grace)
        with self._lock:
            self._aborting = True
            self._lock.notify_all()
        self._thread.join()

    def turn(self) -> None:
        """One round: let go what is cancelled or overdue, let rows join, make a step of each batch."""
        self._sweep()
        while self._join():
            pass
        for lane in list(self._lanes.values()):
            if lane.serving:
                self._forward(lane, lane.decoder.step)
        for plain in [plain for plain, lane in self._lanes.items() if not lane.serving]:
            del self._lanes[plain]

    def _run(self) -> None:
        try:
            while self._wait():
                self.turn()
        finally:
            with self._lock:
                self._draining = True  # also where a fault ends the thread: nobody waits for nothing
            for job in self._jobs():
                self._end(job, "stopped", Stopping("the server stopped before the answer was whole"))

    def _wait(self) -> bool:
        """Sleep until there is something to do; return False to end."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting or self._lanes or self._draining)
            return not self._aborting and bool(self._waiting or self._lanes)

    def _jobs(self) -> list[Job]:
        """All requests that wait or are decoded, each once."""
        with self._lock:
            waiting = [job for job, _ in self._waiting]
        serving = [job for lane in self._lanes.values() for job, _ in lane.serving.values()]
        return list(dict.fromkeys(serving + waiting))

    def _sweep(self) -> None:
        now = self._clock()
        for job in self._jobs():
            if job.cancelled:
                self._end(job, "cancelled")
            elif job.overdue(now):
                self._end(job, "timeout", TimedOut(f"no whole answer within {job.timeout:g} seconds"))

    def _join(self) -> bool:
        """Admit rows from the front of the queue to one batch; return whether any came."""
        free = self.rows - self.serving
        with self._lock:
            if not self._waiting or free < 1:
                return False
            plain = self._waiting[0][0].plain
            lane = self._lanes.get(plain) or Lane(self._engine, plain)
            alike = takewhile(lambda each: each[0].plain == plain, islice(self._waiting, free))
            requests = [row.tally.request for _, row in alike]
            coming = [self._waiting.popleft() for _ in range(joining(lane.decoder, requests, None))]
        if not coming:  # until the rows of this batch have ended: theirs are texts of other lengths
            return False
        self._lanes[plain] = lane
        now = self._clock()
        for number, (job, row) in enumerate(coming, lane.decoder.admitted):
            row.started = now
            lane.serving[number] = (job, row)
            self._observer.joined(row, now - job.submitted)
        self._forward(lane, lambda: lane.decoder.admit([row.tally.request for _, row in coming]))
        return True

    def _forward(self, lane: Lane, forward: Callable[[], Step]) -> None:
        """Make a step and hand out what it brought. One that fails takes its whole batch down, and no other."""
        start = self._clock()
        try:
            step = forward()
            self._observer.stepped(lane.plain, step, self._clock() - start)
            for number in step.tokens:
                self._hand_out(lane, number, step)
        except Exception as error:  # out of memory, say: the thread must live on
            LOG.exception("a step failed, and with it %d rows", len(lane.serving))
            self._lanes.pop(lane.plain, None)
            for job in dict.fromkeys(job for job, _ in lane.serving.values()):
                self._end(job, "error", Broken(f"decoding failed ({type(error).__name__})"))

    def _hand_out(self, lane: Lane, number: int, step: Step) -> None:
        job, row = lane.serving[number]
        piece = row.add(number, step, self._clock() - row.started)
        if not step.nodes and row is job.rows[0]:
            self._observer.told(job, self._clock() - job.submitted)
        if job.pieces:
            job.deliver(piece)
        if not row.ended:
            return
        del lane.serving[number]
        job.deliver(row.end())
        if all(each.ended for each in job.rows):
            self._end(job, "done")

    def _end(self, job: Job, outcome: str, error: Exception | None = None) -> None:
        """Free what a request still holds, once, and say so if it is by an ``error``."""
        if job.over:
            return
        job.over = True
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each[0] is not job)
        for lane in self._lanes.values():
            for number in [number for number, (owner, _) in lane.serving.items() if owner is job]:
                del lane.serving[number]
                lane.decoder.finish(number)
        self._observer.over(job, outcome, self._clock() - job.submitted)
        if error is not None:
            job.deliver(Failed(error))
