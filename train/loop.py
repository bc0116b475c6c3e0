"""The training driver: subclasses of transformers' Trainer, and what it is told.

Dimensions: B batch, T time, D hidden, K heads, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.progress import Advance, progress

from .config import HeadsTraining, Training
from .loss import HeadLoss, multi_head_loss, weights
from .optim import make_optimizer, rate

USUAL_STEPS = 20  # whose median is the usual duration of a step
FAR_TOO_LONG = 5  # times that: what one thread loses against two is less than half

Evaluate = Callable[[int], dict[str, Any]]  # steps done -> figures
Write = Callable[[int, dict[str, Any]], None]  # step, figures


def positions_of(segments_BT: Tensor) -> Tensor:
    """Positions that count from 0 in each segment: int64 [B, T].

    Given these and neither mask nor cache, transformers lets no token attend across a seam.
    """
    index_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    seam_BT = torch.nn.functional.pad(segments_BT.diff(dim=1) != 0, (1, 0))
    return index_T - (index_T * seam_BT).cummax(1).values


def next_token_loss(model: Any, ids_BT: Tensor, segments_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the next token's losses within segments, in nats, and the number of them."""
    logits = model(input_ids=ids_BT, position_ids=positions_of(segments_BT), use_cache=False).logits
    labels_BT = ids_BT[:, 1:].masked_fill(segments_BT.diff(dim=1) != 0, -100)
    loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels_BT.flatten(), reduction="sum")
    return loss, (labels_BT != -100).sum()


class HeadsObjective(nn.Module):
    """The heads with their loss: the module that is trained. The trunk is reached through them, and not part of it."""

    def __init__(self, heads: MedusaHeads, training: HeadsTraining) -> None:
        super().__init__()
        self.heads = heads
        self.weights_K = weights(heads.config.num, training.decay)
        self.chunk = training.chunk
        self.taught = training.targets == "trunk"

    def forward(self, input_ids: Tensor, segments: Tensor) -> HeadLoss:
        """Loss of all heads on a batch of rows [B, T]."""
        # All logits only where they are the targets. (Trunk.forward computes without gradients.)
        output = self.heads.trunk.forward(input_ids, positions_BT=positions_of(segments), keep=0 if self.taught else 1)
        teacher = output.logits if self.taught else None
        return multi_head_loss(
            self.heads, output.hidden, input_ids, input_ids, segments, self.weights_K, self.chunk, teacher
        )


class StageTrainer(Trainer):
    """What the stages share: our optimizer, schedule, data order and log. The Trainer itself saves nothing."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, model: nn.Module, rows: Any, training: Training, *, seed: int, device: torch.device) -> None:
        # The log's figures come from our own loss; checkpoints are not the Trainer's to write.
        arguments = TrainingArguments(
            output_dir=".",
            max_steps=training.steps,
            per_device_train_batch_size=training.batch,
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
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for torchrun; DataParallel splits a loss wrongly
        super().__init__(model=model, args=arguments, train_dataset=rows)
        self.model_accepts_loss_kwargs = False  # or losses and gradients grow with accumulation
        self.remove_callback(PrinterCallback)
        self.training = training
        self.watch: Watch | None = None

    def vocabulary(self) -> Iterable[Tensor]:
        """The weights whose rows are tokens."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """More to log than the loss, since the last time."""
        return {}

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

    def try_step(self) -> None:
        """Forward and backward of the first batch, leaving nothing behind: to time it."""
        rows = [self.train_dataset[index] for index in range(self.training.batch)]
        inputs = {name: torch.stack([row[name] for row in rows]).to(self.args.device) for name in rows[0]}
        self.compute_loss(self.model, inputs).backward()
        self.model.zero_grad()
        self.figures()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saving is the stage's business: the Trainer's way would store the trunk, and fails on tied weights."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand the figures of the last steps on; the Trainer's summary at the end is left out."""
        if "loss" not in logs or self.watch is None:
            return
        self.watch.log(self.state.global_step, logs | self.figures())


class TrunkTrainer(StageTrainer):
    """Trains a causal language model on the next token."""

    def vocabulary(self) -> Iterable[Tensor]:
        """Embedding and projection."""
        return self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean loss of the next token."""
        loss_sum, count = next_token_loss(model, inputs["input_ids"], inputs["segments"])
        return loss_sum / count.clamp(min=1)


class HeadsTrainer(StageTrainer):
    """Trains heads on a frozen trunk (Medusa-1; Cai et al. 2024, section 2.2.1)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sums: list[Tensor] = []

    def vocabulary(self) -> Iterable[Tensor]:
        """The heads' own projections."""
        return [head.projection.weight for head in self.model.heads.heads if head.projection is not None]

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weighted sum of the heads' mean losses."""
        output: HeadLoss = model(**inputs)
        self._sums.append(
            torch.stack([output.loss_sums_K.detach(), output.counts_K, output.top1_K, output.top5_K]).double()
        )
        return output.total()

    def figures(self) -> dict[str, Any]:
        """Loss, top-1 and top-5 per head."""
        loss_K, count_K, top1_K, top5_K = torch.stack(self._sums).sum(0)
        self._sums.clear()
        pairs = count_K.clamp(min=1)
        figures = {"head_loss": loss_K / pairs, "top1": top1_K / pairs, "top5": top5_K / pairs}
        return {name: value.tolist() for name, value in figures.items()}


@dataclass
class Watch(TrainerCallback):
    """Follows the steps: progress, held-out evaluation, log. Evaluation does not count as training time."""

    training: Training
    model: nn.Module
    tokens: int  # in a step
    evaluate: Evaluate
    write: Write
    advance: Advance
    pace: Pace

    def __post_init__(self) -> None:
        self.seconds, self.steps, self.started = 0.0, 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step starts."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is done: evaluate if it is time to.

        Raises:
            UserError: the weights are no longer finite.
        """
        taken = time.perf_counter() - self.started
        self.seconds += taken
        self.steps += 1
        if self.pace.is_lost(taken):
            torch.set_num_threads(1)
            self.write(state.global_step, {"threads": 1})
        shown: dict[str, Any] = {}
        if state.global_step % self.training.eval_every == 0 or state.global_step == self.training.steps:
            self.check(state.global_step)
            found = self.evaluate(state.global_step)
            self.write(state.global_step, found)
            shown = {key: value for key, value in found.items() if isinstance(value, float)}
        self.advance(1, tokens=self.tokens, **shown)

    def check(self, step: int) -> None:
        """Raise UserError if training has diverged: no evaluation may see such weights, and nothing is saved."""
        for name, value in self.model.named_parameters():
            if value.requires_grad and not value.isfinite().all():
                raise UserError(
                    f"{name} is no longer finite at step {step}: training has diverged; lower lr (now"
                    f" {self.training.lr}) or raise warmup (now {self.training.warmup})"
                )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Write what the Trainer found over the last steps."""
        speed = self.steps * self.tokens / max(self.seconds, 1e-9)
        self.seconds, self.steps = 0.0, 0
        self.advance(0, loss=figures["loss"])
        self.write(step, figures | {"tokens_per_second": round(speed, 1)})


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


def follow(trainer: StageTrainer, name: str, evaluate: Evaluate, write: Write, auto_threads: bool = False) -> None:
    """Train to the end, with progress, evaluation and log; ``auto_threads``: fall back to one when that is faster."""
    training = trainer.training
    tokens = training.batch * trainer.train_dataset.block
    with progress(training.steps, name) as advance:
        trainer.watch = Watch(training, trainer.model, tokens, evaluate, write, advance, Pace(auto_threads))
        trainer.add_callback(trainer.watch)
        trainer.train()
