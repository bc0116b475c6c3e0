"""Checkpoints of a stage that is under way: folders that are whole or not there. ``resumable`` fills them.

A checkpoint holds what the coming steps depend on and nothing else: the trained weights, the optimizer, the schedule
and the random states (files of the Trainer's own), the evaluation's best so far, and what has been summed since the
log's last line. The data need no state: row i depends on (seed, i) alone, and rows are taken in order.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from medusa.errors import UserError, reason
from medusa.files import read_json

FORMAT = 1
FOLDER = "checkpoints"  # in the run folder, a folder per stage
PREFIX = "checkpoint-"  # and the step; the Trainer's own name for it
NEW = ".new"  # where the next one is filled
STATE, WEIGHTS, BEST = "stage.json", "model.safetensors", "best.safetensors"

# How torch words that a file could not be written; it raises RuntimeError for that as for all else.
TORCH_WRITER = ("inline_container", "PytorchStreamWriter")


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its folder, and what ``stage.json`` says beside the Trainer's own files."""

    folder: Path
    step: int
    settings: dict[str, Any]  # those of the stage
    seconds: float  # that the stage had taken
    threads: dict[str, int]  # that torch had used, for the steps and for what came before them
    counters: dict[str, Any]  # of the trainer
    figures: dict[str, Any]  # of the evaluation
    kind: str = ""  # what the Trainer's files are for: one process or several alike, or DeepSpeed and how many

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """Read ``stage.json``.

        Raises:
            UserError: it is missing, broken or of another format.
        """
        way = f"remove {folder} to go on from the checkpoint before it"
        try:
            content = read_json(folder / STATE)
        except UserError as error:
            raise UserError(f"{folder} can't be used, {STATE} is missing or broken: {way}") from error
        if content.pop("format", None) != FORMAT:
            raise UserError(f"{folder} is not of format {FORMAT}, which this version reads: {way}")
        try:
            return cls(folder, **content)
        except TypeError as error:
            raise UserError(f"{folder / STATE} has other fields than this version writes: {way}") from error


class Checkpoints:
    """The checkpoints of one stage in ``folder``, of which the last ``keep`` stay.

    One is filled in a folder beside the others, brought to the disk and renamed: whatever happens, a folder of its name
    is whole.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def all(self) -> list[Path]:
        """The checkpoints there are, the oldest first."""
        named = {path.name.removeprefix(PREFIX): path for path in self.folder.glob(f"{PREFIX}*")}
        found = {int(step): path for step, path in named.items() if step.isdecimal()}
        return [found[step] for step in sorted(found)]

    def newest(self) -> Saved | None:
        """The last one, if there is any."""
        found = self.all()
        return Saved.read(found[-1]) if found else None

    def clear(self) -> Path:
        """Make room for the next one, and return the folder in which its own is to be made."""
        place = self.folder / NEW
        for left in self.folder.glob(".*"):
            shutil.rmtree(left)  # of a process that was killed
        place.mkdir(parents=True)
        return place

    def publish(self, step: int) -> None:
        """Put what was filled in its place, and drop those that are too many."""
        name = f"{PREFIX}{step}"
        made, place = self.folder / NEW / name, self.folder / name
        shared(made)
        for path in (*made.rglob("*"), made):
            to_disk(path)
        if place.exists():  # of the same settings and step, hence the same
            vanish(place)
        os.replace(made, place)
        to_disk(self.folder)
        self.discard()
        for old in self.all()[: -self.keep]:
            vanish(old)

    def discard(self) -> None:
        """Drop a checkpoint that is not whole."""
        shutil.rmtree(self.folder / NEW, ignore_errors=True)

    def remove(self) -> None:
        """Drop all of them: the stage is made, or begun anew."""
        vanish(self.folder)
        parent = self.folder.parent
        if parent.name == FOLDER and parent.exists() and not any(parent.iterdir()):
            parent.rmdir()


def vanish(folder: Path) -> None:
    """Remove a folder, under another name first: one that is half removed is not seen as whole."""
    old = folder.with_name(f".old.{folder.name}")
    if old.exists():
        shutil.rmtree(old)  # of a process that was killed
    if folder.exists():
        os.replace(folder, old)
        shutil.rmtree(old)


def shared(folder: Path) -> None:
    """Give the files in ``folder`` the mode that the user's umask gives new ones: safetensors makes them private."""
    probe = folder / ".probe"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk: a rename may get there before it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # of a folder, where the system has no such thing
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: str, way: str) -> Iterator[None]:
    """Raise UserError where ``what`` can't be written, with the ``way`` out."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} can't be written ({error.strerror or reason(error)}): {way}") from error


@contextmanager
def told(what: str, folder: Path, way: str) -> Iterator[None]:
    """Raise UserError where ``what`` can't be written to ``folder``: a full disk, one that is read-only, a quota."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(mark in str(error) for mark in TORCH_WRITER):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else reason(error)
        raise UserError(f"{what} can't be written to {folder} ({why}; {_free(folder)}): {way}") from error


def _free(folder: Path) -> str:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return f"{shutil.disk_usage(place).free / 2**20:,.0f} MiB are free"
