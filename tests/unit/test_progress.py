"""Progress: quiet and plain away from a terminal, a bar on one."""

from __future__ import annotations

import io

import pytest

from medusa.progress import Advance, clock_time, progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_short_work_says_nothing_away_from_a_terminal() -> None:
    stream = io.StringIO()
    with progress(3, "work", stream) as advance:
        for _ in range(3):
            advance(tokens=10)
    assert stream.getvalue() == ""


def test_long_work_says_a_plain_line_now_and_then_and_the_end_once() -> None:
    stream = io.StringIO()
    with progress(3, "work", stream, every=0.0) as advance:
        advance(tokens=10, loss=1.23456)
        advance(2)
        advance(0, loss=1.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("work: 1/3  ") and "tokens/s" in lines[0] and lines[0].endswith("loss 1.235")
    assert lines[1].startswith("work: 3/3  ") and " in 0:00" in lines[1]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress(2, "work", stream) as advance:
        advance(2)
    assert "work" in stream.getvalue() and "2/2" in stream.getvalue() and "\x1b[" in stream.getvalue()


def test_rate_and_time_left_come_from_the_clock() -> None:
    now = iter([0.0, 10.0, 10.0, 10.0])
    advance = Advance(4, lambda advance: None, clock=lambda: next(now))
    advance(1, tokens=500)
    assert advance.text() == "1/4  50 tokens/s  0:30 left"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.4, "1:05"), (7384, "2:03:04")])
def test_clock_time(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text
