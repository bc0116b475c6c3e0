"""What a process knows of its launcher, torchrun or DeepSpeed's, and how it ends as one of several.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

WRONG_INPUT, FAULT = 2, 1  # exit codes
ENDED = "ended"  # the key under which the first process to fail leaves its exit code and rank


class Elsewhere(Exception):
    """Another process has failed and said why; this one ends with the same exit ``code``, in silence."""

    def __init__(self, code: int) -> None:
        super().__init__(f"another process has ended with code {code}")
        self.code = code


def processes() -> int:
    """How many processes were started together, this one included."""
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


def first_to_end(store: Store, rank: int, code: int) -> int | None:
    """None if this process, which ends with exit ``code``, is the first to fail, else the exit code of that one.

    The first alone says why. ``store`` is the one of keys that all processes share.
    """
    mine = f"{code} {rank}"
    try:
        first = store.compare_set(ENDED, "", mine).decode()
    except (RuntimeError, OSError):  # the store has gone with the process that kept it
        return code
    return None if first == mine else int(first.split()[0])
