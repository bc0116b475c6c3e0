"""Record and log of a run of several processes: the first one's are the run's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .checkpoints import Saved
from .config import TrainConfig
from .distributed import Group
from .record import RunRecord
from .tracking import RunLog


class SharedRecord(RunRecord):
    """The record of a run folder, kept by the first process of ``group``; the others are told what it says."""

    def __init__(self, config: TrainConfig, fresh: str | None, group: Group) -> None:
        vars(self).update(group.first(lambda: vars(RunRecord(config, fresh))))
        self._group = group

    def is_made(self, stage: str, settings: Mapping[str, Any]) -> bool:
        """As the first process finds."""
        return self._group.first(partial(super().is_made, stage, settings))

    def resumable(self, stage: str, settings: Mapping[str, Any]) -> Saved | None:
        """As the first process finds, if it fits these processes."""
        saved = self._group.first(partial(super().resumable, stage, settings))
        if saved is not None:
            self._group.check_saved(saved)
        return saved

    def begin(self, stage: str, saved: Saved | None = None) -> None:
        """By the first process."""
        self._group.first(partial(super().begin, stage, saved))

    def done(self, stage: str, settings: Mapping[str, Any], start: float, result: Mapping[str, Any]) -> None:
        """By the first process; all know the stages that are made."""
        self._group.first(partial(super().done, stage, settings, start, result))
        self.stages = self._group.first(lambda: self.stages)


class Unheard(RunLog):
    """The log of a process that is not the first: nothing is written."""

    def begin(self, stage: str, step: int = -1) -> None:
        """Nothing."""

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""
