"""SIGTERM and Ctrl-C: the step under way is finished and saved, then the process ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTE = b"\nmedusa: stopping after this step; once more to stop at once\n"


class Interrupted(KeyboardInterrupt):
    """Signal ``number`` ended the run, in ``stage``, which is saved at ``step``; None where there is nothing of it."""

    def __init__(self, number: int, stage: str | None = None, step: int | None = None) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.stage, self.step = number, stage, step


class Interruption:
    """Whether the process was asked to end. ``number`` is the signal that asked, once it did."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._waits = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the signals over; those set to be ignored (by nohup, say) stay so. Only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal wait until ``number`` is looked at."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._waits or self.number is not None:
            raise Interrupted(number)
        self.number = number
        os.write(2, NOTE)  # print may be what was interrupted
