"""A run under way: what its stages share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.calibrate import Continuations, continuations
from medusa.machine import pick_device, pick_threads
from medusa.progress import progress
from medusa.trunk import Trunk
from medusa.vocabulary import draft_vocabulary, token_counts

from . import continued
from .checkpoints import Saved, to_disk, told
from .config import TrainConfig, Training
from .distributed import Group
from .follow import follow
from .interrupt import Interruption
from .own_text import own_rows
from .record import AGAIN, HELD, RunRecord
from .text import Corpus
from .tracking import RunLog
from .trainer import StageTrainer

Report = Callable[[str], None]

# What may change between the parts of a run that was interrupted, and without a result being made anew.
SAVING = ("save_every", "save_minutes", "keep", "gradient_checkpointing", "cache_states")


@dataclass
class Job:
    """A run under way, as its stages see it. ``threads`` is what torch started with."""

    config: TrainConfig
    record: RunRecord
    log: RunLog
    corpus: Corpus
    report: Report
    threads: int
    interruption: Interruption
    group: Group = field(default_factory=Group)
    _held: tuple[Trunk, Continuations] | None = None
    _held_threads: int = 0

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.record.folder

    def set_threads(self, work: Callable[[], object], before: int = 0) -> None:
        """Use the number of threads asked for, or the one that does ``work`` fastest, or that was used ``before``.

        Sums depend on it in their last bits: who goes on where another process was takes its number.
        """
        asked = self.config.threads
        torch.set_num_threads(self.threads if asked == "auto" else asked)
        if asked == "auto" and before:
            torch.set_num_threads(min(before, self.threads))
        elif asked == "auto" and pick_device(self.config.trunk.device).type == "cpu":
            pick_threads(work)

    def is_made(self, stage: str, settings: dict[str, Any], what: Path) -> bool:
        """Whether the stage can be skipped; says so."""
        if not self.record.is_made(stage, settings):
            return False
        self.group.first(self.record.checkpoints(stage).remove)  # of a process killed just when the stage was done
        self.report(f"{stage}: {what} is there")
        return True

    def begin(self, stage: str, saved: Saved | None = None) -> float:
        """Start a stage, or go on with it: clear what an earlier try left, and return the time at which it began."""
        self.record.begin(stage, saved)
        if saved is None:
            self.log.begin(stage)
            return time.perf_counter()
        self.log.begin(stage, saved.step)
        self.report(f"{stage}: goes on from step {saved.step} ({saved.folder})")
        return time.perf_counter() - saved.seconds

    def run(
        self,
        stage: str,
        trainer: StageTrainer,
        evaluate: Callable[[int], dict[str, Any]],
        start: float,
        settings: dict[str, Any],
        saved: Saved | None,
    ) -> None:
        """Train a stage, begun at ``start``, to its end."""
        self.set_threads(trainer.try_step, saved.threads["steps"] if saved else 0)
        torch.set_num_threads(self.group.first(torch.get_num_threads))  # each has tried, while the others did
        trainer.store = self.record.checkpoints(stage, trainer.training.keep)
        trainer.notes = lambda: self._notes(start, settings)
        write = partial(self.log.write, stage)
        follow(trainer, stage, evaluate, write, self.config.threads == "auto", self.interruption, saved)

    def _notes(self, start: float, settings: dict[str, Any]) -> dict[str, Any]:
        to_disk(self.log.path)  # no checkpoint may outlive the lines before it
        threads = {"steps": torch.get_num_threads(), "before": self._held_threads}
        return {"settings": settings, "seconds": round(time.perf_counter() - start, 3), "threads": threads}

    def held(self, trunk: Trunk, saved: Saved | None = None) -> Continuations:
        """The trunk's own greedy continuations of held-out prompts, made once: heads and trees are judged by them.

        They are kept in the run folder until all is made.

        Raises:
            UserError: too little text to hold prompts out, a disk that takes no more.
        """
        if self._held is None or self._held[0] is not trunk:
            self._held = trunk, self.group.first(partial(self._continuations, trunk, saved))
        return self._held[1]

    def _continuations(self, trunk: Trunk, saved: Saved | None) -> Continuations:
        evaluation = self.config.evaluation
        prompts = self.corpus.heldout_prompts(evaluation)
        path, key = self.folder / HELD, continued.key_of(trunk, prompts, evaluation.tokens, self.config.threads)
        known = continued.read(path, key, trunk.device)
        before = known.threads if known else saved.threads["before"] if saved else 0
        ids_1T = torch.tensor(prompts[:1], device=trunk.device)
        self.set_threads(lambda: trunk.forward(ids_1T), before)
        self._held_threads = torch.get_num_threads()
        if known is not None:
            return known.held
        with progress(len(prompts), "held-out continuations") as advance:
            held = continuations(
                trunk, prompts, evaluation.tokens, progress=lambda done, total: advance(done - advance.done)
            )
        with told("the held-out continuations", self.folder, AGAIN):
            continued.write(path, key, continued.Continued(held, self._held_threads))
        return held

    def forget_held(self) -> None:
        """Remove the file of the continuations, which a run that is made needs no more."""
        (self.folder / HELD).unlink(missing_ok=True)

    def draft_ids(self, stage: str, size: int | None, trunk: Trunk, rows: Any) -> Tensor | None:
        """The ``size`` tokens that a stage's result drafts from, the most frequent ones of what ``rows`` supervise.

        Raises:
            UserError: more than the tokenizer has, or fewer than the special tokens that occur.
        """
        if size is None:
            return None
        texts = (row.get("labels", row["input_ids"]) for row in (rows[index] for index in range(len(rows))))
        counts_V = token_counts(texts, trunk.vocab_size)
        ids = draft_vocabulary(trunk, counts_V, size, f"{stage}.vocab")
        covered = counts_V[ids].sum() / counts_V.sum().clamp(min=1)
        self.report(f"{stage}: drafts from {size:,} tokens, which are {covered:.1%} of the text")
        return ids

    def amount(self, training: Training) -> str:
        """How much a stage trains, as its first line says it."""
        return f"{training.steps} steps of {training.batch} x {self.config.data.block} tokens"

    def rows(self, stage: str, training: Training) -> Any:
        """The rows to train a stage on.

        Raises:
            UserError: data that can't be trained on, or a stage that these processes can't train.
        """
        self.group.check(stage, training)
        if self.config.own_text is not None and stage != "trunk":
            return own_rows(self, training.steps * training.batch)
        return self.group.in_turn(lambda: self.corpus.training_rows(training.steps, training.batch))

    def settings(self, *names: str) -> dict[str, Any]:
        """The parts of the configuration that a stage's result depends on."""
        parts = {name: value for name, value in asdict(self.config).items() if name in names}
        if "data" in parts:
            parts["data"].pop("path")  # a local copy of a corpus is the same corpus
        if parts.get("own_text"):
            parts["own_text"].pop("batch")  # changes what is said by rounding alone
        for name in parts:
            if isinstance(getattr(self.config, name), Training):
                parts[name] = {key: value for key, value in parts[name].items() if key not in SAVING}
        return parts
