"""The log of a run: always train_log.jsonl, a line per event and flushed; beside it what else is asked for.

Weights & Biases and TensorBoard get the same figures, and pictures too. All three are gone on with after an
interruption: what was made after the checkpoint is dropped, or known to be there and not sent again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from medusa.checkpoint import LOG
from medusa.curves import Event, parse_log
from medusa.errors import UserError
from medusa.files import write_text

from .checkpoints import writing
from .config import TrackingConfig
from .record import STAGES, resting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Tracker(Protocol):
    """Where the log goes as well."""

    def begin(self, stage: str, step: int, kept: Sequence[Event]) -> None:
        """A stage begins, or goes on after ``step``; ``kept`` are all lines of the log that still hold."""

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """One event."""

    def picture(self, stage: str, step: int, name: str, figure: Figure) -> None:
        """A picture of how the stage ended."""

    def tell(self, name: str, value: str) -> None:
        """Something about the run that was not known at its start."""

    def close(self, failed: bool) -> None:
        """The process ends."""


class RunLog:
    """Events of all stages in one file; a stage made anew drops its earlier lines, and those of the stages after it."""

    def __init__(self, folder: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.path = folder / LOG
        self._trackers = trackers

    def begin(self, stage: str, step: int = -1) -> None:
        """Drop the lines of an earlier try at this stage, or those after ``step``, which is gone on from."""
        kept: list[Event] = []
        with self._writing():
            if self.path.exists():
                events, _ = parse_log(self.path.read_bytes())  # without half a line that a kill has left
                kept = [event for event in events if _is_older(event, stage, step)]
                write_text(self.path, "".join(json.dumps(event) + "\n" for event in kept))
            for tracker in self._trackers:
                tracker.begin(stage, step, kept)

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one event. Lists hold a value per head.

        Raises:
            UserError: the file can't be written.
        """
        with self._writing():
            with self.path.open("a", encoding="utf-8") as file:  # closed each time: a kill loses no line
                file.write(json.dumps({"stage": stage, "step": step, **values}) + "\n")
            for tracker in self._trackers:
                tracker.write(stage, step, values)

    def pictures(self, stage: str, step: int, draw: Callable[[], Mapping[str, Figure]]) -> None:
        """Show how a stage ended; ``draw`` is not called where nobody sees it."""
        if self._trackers:
            for name, figure in draw().items():
                for tracker in self._trackers:
                    tracker.picture(stage, step, name, figure)

    def tell(self, name: str, value: str) -> None:
        """Add to what is known of the run; files of the run's own hold it anyway."""
        for tracker in self._trackers:
            tracker.tell(name, value)

    def _writing(self) -> AbstractContextManager[None]:
        way = "make room and run the same command again to go on from the last checkpoint"
        return writing(str(self.path), way)


@contextmanager
def run_log(folder: Path, config: TrackingConfig, settings: Mapping[str, Any]) -> Iterator[RunLog]:
    """Open the log of the run in ``folder``; ``settings`` are shown where it goes as well.

    Raises:
        UserError: a package that is asked for is not installed, or there is no key for Weights & Biases.
    """
    trackers: list[Tracker] = []
    if config.wandb != "off":
        from .wandb_tracker import WandbTracker

        trackers.append(WandbTracker(folder, config, settings))
    if config.tensorboard:
        from .tensorboard_tracker import TensorBoardTracker

        trackers.append(TensorBoardTracker(folder, settings))
    failed = True
    try:
        yield RunLog(folder, trackers)
        failed = False
    finally:
        for tracker in trackers:
            tracker.close(failed)


@contextmanager
def needed(package: str, setting: str) -> Iterator[None]:
    """Import ``package``, and matplotlib for the pictures; UserError where one is missing, which ``setting`` needs."""
    try:
        import matplotlib  # noqa: F401

        yield
    except ImportError as error:
        missing = "matplotlib" if (error.name or "").startswith("matplotlib") else package
        raise UserError(
            f"{setting} needs the package {missing!r}: pip install 'medusa-decoding[train]', or leave it out"
        ) from error


def _is_older(event: Event, stage: str, step: int) -> bool:
    if stage in STAGES and event["stage"] != stage and event["stage"] in resting(stage):
        return False
    return bool(event["stage"] != stage or event["step"] <= step)


def spread(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists as one value per head: ``top1`` -> ``top1/0``, ``top1/1`` …"""
    for key, value in values.items():
        if isinstance(value, list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        else:
            yield key, value
