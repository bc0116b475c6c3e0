"""The log of a run: always train_log.jsonl, a line per event and flushed; Weights & Biases beside it if asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from medusa.checkpoint import LOG
from medusa.errors import UserError
from medusa.files import write_text

from .checkpoints import writing
from .config import TrackingConfig


class RunLog:
    """Events of all stages in one file; a stage made anew drops its earlier lines."""

    def __init__(self, folder: Path, wandb_run: Any = None) -> None:
        self.path = folder / LOG
        self._wandb = wandb_run

    def begin(self, stage: str, step: int = -1) -> None:
        """Drop the lines of an earlier try at this stage, or those after ``step``, which is gone on from."""
        if self.path.exists():
            with self._writing():
                lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
                if lines and not lines[-1].endswith("\n"):
                    del lines[-1]  # a kill, or a full disk, in the middle of it
                kept = [line for line in lines if _is_older(json.loads(line), stage, step)]
                write_text(self.path, "".join(kept))
        if self._wandb is not None:  # each stage counts its own steps
            self._wandb.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one event. Lists hold a value per head.

        Raises:
            UserError: the file can't be written.
        """
        with self._writing(), self.path.open("a", encoding="utf-8") as file:  # closed each time: a kill loses no line
            file.write(json.dumps({"stage": stage, "step": step, **values}) + "\n")
        if self._wandb is not None:
            self._wandb.log({f"{stage}/{key}": value for key, value in _spread({"step": step, **values})})

    def _writing(self) -> AbstractContextManager[None]:
        way = "make room and run the same command again to go on from the last checkpoint"
        return writing(str(self.path), way)


@contextmanager
def run_log(folder: Path, config: TrackingConfig, settings: Mapping[str, Any]) -> Iterator[RunLog]:
    """Open the log of the run in ``folder``; ``settings`` are shown in Weights & Biases.

    Raises:
        UserError: Weights & Biases is asked for and not installed, or can't start.
    """
    if config.wandb == "off":
        yield RunLog(folder)
        return
    run = _start_wandb(folder, config, settings)
    failed = True
    try:
        yield RunLog(folder, run)
        failed = False
    finally:
        run.finish(exit_code=int(failed))


def _start_wandb(folder: Path, config: TrackingConfig, settings: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"tracking.wandb={config.wandb} needs the package 'wandb': pip install 'medusa-decoding[train]', or leave"
            " tracking off"
        ) from error
    if config.wandb == "online" and not wandb.api.api_key:  # without a terminal to ask on it would stop the training
        raise UserError("tracking.wandb=online finds no key: run `wandb login`, or use tracking.wandb=offline")
    mode: Literal["offline", "online"] = "online" if config.wandb == "online" else "offline"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=config.project,
            name=folder.name,
            dir=str(folder),
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except (OSError, wandb.errors.Error) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"tracking.wandb={config.wandb} can't start ({reason}): use offline or off") from error


def _is_older(event: Mapping[str, Any], stage: str, step: int) -> bool:
    return event["stage"] != stage or event["step"] <= step


def _spread(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists as one value per head: ``top1`` -> ``top1/0``, ``top1/1`` …"""
    for key, value in values.items():
        if isinstance(value, list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        else:
            yield key, value
