"""Following a stage through its steps: progress, evaluation, log, checkpoints, and what ends it early.

Nothing here has a part in what a step computes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from medusa.errors import UserError
from medusa.machine import peak_memory_mb
from medusa.progress import Advance, progress

from .checkpoints import Saved
from .interrupt import Interrupted, Interruption
from .resumable import trained
from .trainer import StageTrainer, Write
from .zero import let_go, own

USUAL_STEPS = 20  # whose median is the usual duration of a step
FAR_TOO_LONG = 5  # times that: what one thread loses against two is less than half

Evaluate = Callable[[int], dict[str, Any]]  # steps done -> figures


@dataclass
class Watch(TrainerCallback):
    """Follows the steps. Evaluation does not count as training time."""

    trainer: StageTrainer
    evaluate: Evaluate
    write: Write
    advance: Advance
    pace: Pace
    interruption: Interruption
    saved: Saved | None = None

    def __post_init__(self) -> None:
        self.training = self.trainer.training
        self.tokens = self.training.batch * self.trainer.train_dataset.block
        self.seconds, self.steps, self.started = 0.0, 0, 0.0
        self.trunk_speed: float | None = None
        self.stopped_by: int | None = None
        self.last_save = time.monotonic()
        self.safe = None if self.saved is None else self.saved.step  # the step that would be gone on from

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has set its counters to zero: go on where they were."""
        if self.saved is not None:
            self.trainer.restore(self.saved)
        self.trunk_speed = self.trainer.trunk_speed()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step starts."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is done: evaluate if it is time to, say whether to save and to stop.

        Raises:
            UserError: the weights are no longer finite.
        """
        taken = time.perf_counter() - self.started
        self.seconds += taken
        self.steps += 1
        shown: dict[str, Any] = {}
        if state.global_step % self.training.eval_every == 0 or state.global_step == self.training.steps:
            self.check(state.global_step)
            self.trainer.gather()
            found = self.trainer.group.first(partial(self.evaluate, state.global_step))
            self.write(state.global_step, found)
            shown = {key: value for key, value in found.items() if isinstance(value, float)}
        self.advance(1, tokens=self.tokens, **shown)
        wishes = self.pace.is_lost(taken), self.interruption.number is not None, self.is_due(state.global_step)
        lost, stop, due = self.trainer.anywhere(*wishes)
        if lost:
            torch.set_num_threads(1)
            self.write(state.global_step, {"threads": 1})
        if self.trainer.store is not None and (stop or due):
            self.check(state.global_step)
            control.should_save = True  # after the log's line of this step, if it has one
        if stop:
            control.should_training_stop = True
            self.stopped_by = self.interruption.number or signal.SIGTERM  # which another process was sent

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is written."""
        self.last_save = time.monotonic()
        self.safe = state.global_step

    def is_due(self, step: int) -> bool:
        """Whether it is time for a checkpoint; after the last step the result itself is saved."""
        every, minutes = self.training.save_every, self.training.save_minutes
        by_steps = every is not None and step % every == 0
        by_time = minutes is not None and time.monotonic() - self.last_save >= 60 * minutes
        return step < self.training.steps and (by_steps or by_time)

    def check(self, step: int) -> None:
        """Raise UserError if training has diverged: no evaluation may see such weights, and they are not saved."""
        bad = next(
            (name for name, value in trained(self.trainer.model).items() if not own(value).isfinite().all()), None
        )
        if any(self.trainer.anywhere(bad is not None)):
            raise UserError(
                f"{bad or 'a weight'} is no longer finite at step {step}: training has diverged; lower lr (now"
                f" {self.training.lr}) or raise warmup (now {self.training.warmup})"
            )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Write what the Trainer found over the last steps.

        ``tokens_per_second`` of all processes; ``trunk_share``, where the trunk is frozen, what that is of the tokens
        that a bare forward of it reads (more than 1 with kept states); ``peak_memory_mb`` of this process so far.
        """
        speed = self.steps * self.tokens / max(self.seconds, 1e-9)
        self.seconds, self.steps = 0.0, 0
        self.advance(0, loss=figures["loss"])
        share = None if self.trunk_speed is None else round(speed / self.trunk_speed, 3)
        found = {"trunk_share": share, "peak_memory_mb": peak_memory_mb(self.trainer.args.device)}
        known = {name: value for name, value in found.items() if value is not None}
        self.write(step, figures | {"tokens_per_second": round(speed, 1)} | known)


class Pace:
    """Notices that a machine has become busy: several threads then wait for each other, tens of times slower than one.

    ``watched``: whether the number of threads is ours to change.
    """

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.usual: list[float] = []
        self.slow = 0

    def is_lost(self, seconds: float) -> bool:
        """Whether, after a step of ``seconds``, one thread should take over: three steps in a row took far too long."""
        if not self.watched or torch.get_num_threads() == 1:
            return False
        if len(self.usual) < USUAL_STEPS:
            self.usual.append(seconds)
            return False
        self.slow = self.slow + 1 if seconds > FAR_TOO_LONG * median(self.usual) else 0
        return self.slow == 3


def follow(
    trainer: StageTrainer,
    name: str,
    evaluate: Evaluate,
    write: Write,
    auto_threads: bool = False,
    interruption: Interruption | None = None,
    saved: Saved | None = None,
) -> None:
    """Train to the end, or from ``saved`` on, with progress, evaluation, log and checkpoints (those of the trainer).

    ``auto_threads``: fall back to one thread when that is faster.

    Raises:
        Interrupted: a signal asked for it, and the step under way was finished and saved.
        UserError: training has diverged, or a checkpoint can't be written or read.
    """
    interruption = interruption or Interruption()
    done = 0 if saved is None else saved.step
    label = name if saved is None else f"{name}, from step {done}"
    with (
        progress(trainer.training.steps - done, label, hidden=not trainer.group.leads) as advance,
        interruption.deferred(),
    ):
        watch = Watch(trainer, evaluate, write, advance, Pace(auto_threads), interruption, saved)
        trainer.report = watch.log
        trainer.add_callback(watch)
        trainer.train(resume_from_checkpoint=None if saved is None else str(saved.folder))
    if trainer.group.deepspeed is not None:
        let_go()
    number = watch.stopped_by or interruption.number  # it may also have come behind the last step
    if number is not None:
        raise Interrupted(number, name, watch.safe)
