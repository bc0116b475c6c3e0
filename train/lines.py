"""A JSONL file that grows by whole lines and survives being cut off at any of them, with its settings beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from medusa.errors import UserError, reason
from medusa.files import write_json

from .config import flatten

FORMAT = 1
AGAIN = "what is finished is kept, go on with the same command"


class Lines:
    """Appends objects to a JSONL file, each at once and whole.

    What an earlier process left is read first; a last line without its end was being written when it was killed, and is
    cut off. Only one process may write a file (where the system can lock it).

    Raises:
        UserError: the file can't be made or read, a line of it is no object, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - held until close
            _lock(self._file, path)

    def read(self) -> Iterator[dict[str, Any]]:
        """The objects that the file holds; a torn last line goes."""
        self._file.seek(0)
        whole = 0
        with self._readable(), open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                yield self._parsed(line, number)
        with self._readable():
            self._file.truncate(whole)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except ValueError as error:
            raise UserError(f"{self.path}:{number} is no JSON: mend or remove that line") from error
        if not isinstance(content, dict):
            raise UserError(f"{self.path}:{number} holds no object: mend or remove that line")
        return content

    def append(self, content: Mapping[str, Any]) -> None:
        """Write one line. UserError if it can't be written in full."""
        left = memoryview(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise UserError(f"{self.path} can't be written ({error.strerror}): {AGAIN}") from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} can't be used ({reason(error)}): name another by --out") from error


def _lock(file: BinaryIO, path: Path) -> None:
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of when the process ends, however it does
    except BlockingIOError as error:
        file.close()
        raise UserError(f"{path} is being written by another process: wait for it, or name another by --out") from error
    except OSError:
        return  # a file system without locks: there the user takes care


def keep_settings(path: Path, settings: Mapping[str, Any], info: Mapping[str, Any], *data: Path) -> None:
    """Note what ``data`` are made with, or see that it is what they were begun with; ``info`` may differ, is replaced.

    Raises:
        UserError: it was begun with another value of a setting, which is named; or nothing says how it was made.
    """
    plain = json.loads(json.dumps(settings))  # tuples are lists
    before, now = _known(path, data), flatten(plain)
    for key in () if before is None else [*now, *(key for key in before if key not in now)]:
        assert before is not None
        if before.get(key) != now.get(key):
            raise UserError(
                f"{data[0]} was begun with {key}={before.get(key)}, now it is {now.get(key)}: give the same, or another"
                " --out"
            )
    try:
        write_json(path, {"format": FORMAT, "settings": plain, **info})
    except OSError as error:
        raise UserError(f"{path} can't be written ({reason(error)}): name another by --out") from error


def _known(path: Path, data: Sequence[Path]) -> dict[str, Any] | None:
    """The settings that ``path`` tells of; None where nothing has been made."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        for made in (each for each in data if each.is_file() and each.stat().st_size):
            raise UserError(f"{made} has no {path.name} that tells how it was made: name another by --out") from None
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({reason(error)}): name another by --out") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise UserError(f"{path} tells no settings: name another by --out")
    if content.get("format") != FORMAT:
        raise UserError(f"{path} has format {content.get('format')}, this version writes {FORMAT}: name another --out")
    return flatten(content["settings"])
