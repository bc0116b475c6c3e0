"""What a process knows of its launcher, torchrun or DeepSpeed's, before it meets the others. Imports nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WRONG_INPUT = 2  # the exit code


class Elsewhere(Exception):
    """Another process has failed and said why; this one ends with the same exit ``code``, in silence."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another process has ended with code {code}")
        self.code = code


def processes() -> int:
    """How many processes train, this one included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched() -> bool:
    """Whether a launcher has started several processes, of which this is one."""
    return processes() > 1


def speaks() -> bool:
    """Whether this process is the one of its machine that tells of errors made before the processes meet."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def own_end() -> Iterator[None]:
    """Let a process of several that fails end with its own exit code: a launcher sends SIGTERM to those left."""
    try:
        yield
    except BaseException:
        if launched():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


def leave(code: int) -> int:
    """Return the exit code; of several processes, end with it at once.

    All is written and the process group is gone by then, but what DeepSpeed and accelerate still hold of it has threads
    that now and then abort the interpreter's own way out, and the launcher takes that for a failure.
    """
    if launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
