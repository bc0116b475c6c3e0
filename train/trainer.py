"""The driver of a stage: a subclass of transformers' Trainer, and what it is told.

What it trains, and by which loss, is for its own subclasses (``loop``, ``joint``) to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from .distributed import ALONE, Group
from .optim import make_optimizer, rate
from .resumable import ResumableTrainer
from .training import Training
from .zero import gather, held_in_parts, trainer_options, whole_copy

Write = Callable[[int, dict[str, Any]], None]  # step, figures


class StageTrainer(ResumableTrainer):
    """What the stages share: our optimizer, schedule, data order and log.

    A step's rows may be taken in several micro-batches: each loss is divided by what the whole step supervises, on all
    processes, so that losses and gradients add up to those of one batch, however uneven the micro-batches are.
    """

    optimizer: Any
    lr_scheduler: Any
    loss_is_scaled_for_ga = True  # or the Trainer would divide once more

    def __init__(
        self,
        model: nn.Module,
        rows: Any,
        training: Training,
        *,
        seed: int,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        group.align(model, device)
        super().__init__(model=model, args=_arguments(training, seed, device, group), train_dataset=rows)
        self.model_accepts_loss_kwargs = False  # what a step supervises is counted below, per head
        self.remove_callback(PrinterCallback)
        self.training = training
        self.group = group
        self.report: Write | None = None
        # What is evaluated and saved, on the first process: the model itself where it is whole.
        copied = group.leads and held_in_parts(group.deepspeed)
        self.judged: Any = whole_copy(model, self.beside()) if copied else model

    def beside(self) -> list[object]:
        """What the model refers to and does not train, and a copy of it refers to as well."""
        return []

    def gather(self) -> None:
        """Bring ``judged`` up to date. All processes take part."""
        if held_in_parts(self.group.deepspeed):
            gather(self.model, self.judged if self.group.leads else None)

    def vocabulary(self) -> Iterable[Tensor]:
        """The weights whose rows are tokens."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """More to log than the loss, since the last time."""
        return {}

    def supervised(self, batch: dict[str, Tensor]) -> Tensor:
        """How many targets the loss of ``batch`` is a sum over."""
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Any]:
        """The micro-batches of a step, and what all processes supervise in it."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self.whole(batches) if batches else None

    def whole(self, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        """What ``batches`` and those of the other processes supervise together."""
        count = torch.stack([self.supervised(batch) for batch in batches]).sum(0).to(self.args.device)
        return self.group.sum(count)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The stage's own optimizer instead of the Trainer's."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.vocabulary(), self.training)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The stage's own schedule instead of the Trainer's."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: rate(step, self.training)
            )
        return self.lr_scheduler

    def trunk_speed(self) -> float | None:
        """Tokens per second that all processes' trunks read in bare forwards, if they are frozen."""
        return None

    def try_step(self) -> None:
        """Forward and backward of the first batch, leaving nothing behind: to time it."""
        group, self.group = self.group, ALONE  # each process takes its own time
        self.compute_loss(self.model, self.first_batch()).backward()
        self.model.zero_grad()
        self.figures()
        self.group = group

    def first_batch(self) -> dict[str, Tensor]:
        """The first micro-batch, whatever this process's own is."""
        rows = [self.train_dataset[index] for index in range(self.args.per_device_train_batch_size)]
        return {name: torch.stack([row[name] for row in rows]).to(self.args.device) for name in rows[0]}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand the figures of the last steps on; the Trainer's summary at the end is left out."""
        if "loss" not in logs or self.report is None:
            return
        self.report(self.state.global_step, logs | self.figures())


def _arguments(training: Training, seed: int, device: torch.device, group: Group) -> TrainingArguments:
    """What the Trainer is told."""
    # The log's figures come from our own loss; when to save is for the callback that watches the steps to say.
    arguments = TrainingArguments(
        output_dir=".",
        max_steps=training.steps,
        per_device_train_batch_size=group.rows(training),  # dealt out in turn: a step has the same rows
        gradient_accumulation_steps=training.accumulate,
        max_grad_norm=training.clip,
        logging_steps=min(training.log_every, training.steps),
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=device.type == "cpu",  # unasked, several processes on CPUs would each train alone
        remove_unused_columns=False,
        label_names=[],
        train_sampling_strategy="sequential",  # the rows are in random order already, which a resumed run repeats
        dataloader_pin_memory=device.type != "cpu",
        seed=seed,
        ddp_find_unused_parameters=False,
        **trainer_options(group.deepspeed),
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for torchrun; DataParallel splits a loss wrongly
    return arguments
