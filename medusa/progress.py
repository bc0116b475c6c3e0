"""Progress of long work: a bar where stderr is a terminal, a plain line now and then where it is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_EVERY_S = 15.0  # rare enough for a log file, often enough to see that something moves


class Advance:
    """Counts work done: call it with the steps that were done, the tokens they took and figures to show."""

    def __init__(
        self, total: int, show: Callable[[Advance], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.done, self.tokens = total, 0, 0
        self.figures: dict[str, float | str] = {}
        self._show, self._clock = show, clock
        self._start = clock()

    def __call__(self, steps: int = 1, *, tokens: int = 0, **figures: float | str) -> None:
        """Add ``steps`` and ``tokens``; ``figures`` replace those of the same name."""
        self.done += steps
        self.tokens += tokens
        self.figures.update(figures)
        self._show(self)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    def text(self) -> str:
        """One line: done/total, tokens/s where tokens were counted, the time left (or taken, at the end), figures."""
        parts = [f"{self.done}/{self.total}"]
        if self.tokens:
            parts.append(f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s")
        if self.done >= self.total:
            parts.append(f"in {clock_time(self.seconds)}")
        elif self.done:
            parts.append(f"{clock_time(self.seconds / self.done * (self.total - self.done))} left")
        parts += [f"{name} {_short(value)}" for name, value in self.figures.items()]
        return "  ".join(parts)


@contextmanager
def progress(
    total: int, label: str, stream: TextIO | None = None, every: float = PLAIN_EVERY_S, hidden: bool = False
) -> Iterator[Advance]:
    """Show the progress of ``total`` steps on ``stream`` (stderr); yields what to call as they are done.

    Where the stream is no terminal, a plain line appears each ``every`` seconds, so that short work says nothing.
    ``hidden`` shows nothing at all.
    """
    if hidden:
        yield Advance(total, lambda advance: None)
        return
    stream = stream or sys.stderr
    show = _bar if stream.isatty() else _plain
    with show(total, label, stream, every) as advance:
        yield advance


@contextmanager
def _plain(total: int, label: str, stream: TextIO, every: float) -> Iterator[Advance]:
    spoke, ended = 0.0, False

    def show(advance: Advance) -> None:
        nonlocal spoke, ended
        end = advance.done >= advance.total and spoke > 0  # who said something also says the end, once
        if not ended and (end or advance.seconds - spoke >= every):
            spoke, ended = advance.seconds, advance.done >= advance.total
            print(f"{label}: {advance.text()}", file=stream, flush=True)

    yield Advance(total, show)


@contextmanager
def _bar(total: int, label: str, stream: TextIO, every: float) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[text]}")
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(label, total=total, text="")
        yield Advance(total, lambda advance: bar.update(task, completed=advance.done, text=advance.text()))


def clock_time(seconds: float) -> str:
    """``1:05`` or ``2:03:04``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
