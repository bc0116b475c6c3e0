"""The training driver: subclasses of transformers' Trainer, and what it is told.

Dimensions: B batch, T time, D hidden, K heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from medusa.heads import MedusaHeads

from .checkpoints import Saved
from .config import HeadsTraining, Training
from .loss import HeadLoss, count_pairs, multi_head_loss, pair_mask, weights
from .optim import make_optimizer, rate
from .resumable import ResumableTrainer

Write = Callable[[int, dict[str, Any]], None]  # step, figures


def positions_of(segments_BT: Tensor) -> Tensor:
    """Positions that count from 0 in each segment: int64 [B, T].

    Given these and neither mask nor cache, transformers lets no token attend across a seam.
    """
    index_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    seam_BT = torch.nn.functional.pad(segments_BT.diff(dim=1) != 0, (1, 0))
    return index_T - (index_T * seam_BT).cummax(1).values


def next_token_loss(
    model: Any, ids_BT: Tensor, segments_BT: Tensor, labels_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the next token's losses within segments, in nats, and the number of them.

    ``labels_BT``: the tokens again, -100 where not supervised; None supervises all.
    """
    logits = model(input_ids=ids_BT, position_ids=positions_of(segments_BT), use_cache=False).logits
    labels_BT = ids_BT if labels_BT is None else labels_BT
    labels_BT = labels_BT[:, 1:].masked_fill(segments_BT.diff(dim=1) != 0, -100)
    loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels_BT.flatten(), reduction="sum")
    return loss, (labels_BT != -100).sum()


class HeadsObjective(nn.Module):
    """The heads with their loss: the module that is trained. The trunk is reached through them, and not part of it."""

    def __init__(self, heads: MedusaHeads, training: HeadsTraining) -> None:
        super().__init__()
        self.heads = heads
        self.weights_K = weights(heads.config.num, training.decay)
        self.chunk = training.chunk
        self.targets = training.targets

    def forward(self, input_ids: Tensor, segments: Tensor, labels: Tensor | None = None) -> HeadLoss:
        """Loss of all heads on a batch of rows [B, T]; ``labels`` are the tokens, -100 where not supervised."""
        labels = input_ids if labels is None else labels
        output = self.heads.trunk.forward(input_ids, positions_BT=positions_of(segments), keep=1)
        return multi_head_loss(
            self.heads,
            output.hidden,
            input_ids,
            labels,
            segments,
            self.weights_K,
            self.chunk,
            teacher_states=None if self.targets == "text" else output.hidden,
            acceptance=self.targets == "acceptance",
        )


class StageTrainer(ResumableTrainer):
    """What the stages share: our optimizer, schedule, data order and log.

    A step's rows may be taken in several micro-batches: each loss is divided by what the whole step supervises, on all
    processes, so that losses and gradients add up to those of one batch, however uneven the micro-batches are.
    """

    optimizer: Any
    lr_scheduler: Any
    loss_is_scaled_for_ga = True  # or the Trainer would divide once more

    def __init__(self, model: nn.Module, rows: Any, training: Training, *, seed: int, device: torch.device) -> None:
        # The log's figures come from our own loss; when to save is for the callback that watches the steps to say.
        arguments = TrainingArguments(
            output_dir=".",
            max_steps=training.steps,
            per_device_train_batch_size=training.batch // training.accumulate,
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
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for torchrun; DataParallel splits a loss wrongly
        super().__init__(model=model, args=arguments, train_dataset=rows)
        self.model_accepts_loss_kwargs = False  # what a step supervises is counted below, per head
        self.remove_callback(PrinterCallback)
        self.training = training
        self.report: Write | None = None

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
        return self.accelerator.reduce(count) if self.accelerator.num_processes > 1 else count

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
        rows = [self.train_dataset[index] for index in range(self.training.batch // self.training.accumulate)]
        inputs = {name: torch.stack([row[name] for row in rows]).to(self.args.device) for name in rows[0]}
        self.compute_loss(self.model, inputs).backward()
        self.model.zero_grad()
        self.figures()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hand the figures of the last steps on; the Trainer's summary at the end is left out."""
        if "loss" not in logs or self.report is None:
            return
        self.report(self.state.global_step, logs | self.figures())


class TrunkTrainer(StageTrainer):
    """Trains a causal language model on the next token."""

    def vocabulary(self) -> Iterable[Tensor]:
        """Embedding and projection."""
        return self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Mean loss of the next token; of a micro-batch, its part of the step's."""
        loss_sum, count = next_token_loss(model, inputs["input_ids"], inputs["segments"], inputs.get("labels"))
        count = count if num_items_in_batch is None else num_items_in_batch
        return self.accelerator.num_processes * loss_sum / count.clamp(min=1)  # processes' gradients are averaged

    def supervised(self, batch: dict[str, Tensor]) -> Tensor:
        """Next tokens within segments."""
        return pair_mask(batch.get("labels", batch["input_ids"]), batch["segments"], -1).sum()


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
        """Weighted sum of the heads' mean losses; of a micro-batch, its part of the step's."""
        output: HeadLoss = model(**inputs)
        self._sums.append(
            torch.stack(
                [output.loss_sums_K.detach(), output.counts_K, output.top1_K, output.top5_K, output.outside_K]
            ).double()
        )
        # Processes' gradients are averaged.
        return self.accelerator.num_processes * output.total(counts_K=num_items_in_batch)

    def supervised(self, batch: dict[str, Tensor]) -> Tensor:
        """Pairs of each head [K]."""
        labels_BT = batch.get("labels", batch["input_ids"])
        return count_pairs(labels_BT, batch["segments"], self.model.heads.config.num)

    def counters(self) -> dict[str, Any]:
        """The sums per head too."""
        return super().counters() | {"sums": [sums.tolist() for sums in self._sums]}

    def restore(self, saved: Saved) -> None:
        """The sums per head too."""
        super().restore(saved)
        device = self.args.device
        self._sums = [torch.tensor(sums, dtype=torch.float64, device=device) for sums in saved.counters["sums"]]

    def figures(self) -> dict[str, Any]:
        """Loss, top-1 and top-5 per head, and the share of targets outside its draft vocabulary."""
        loss_K, count_K, top1_K, top5_K, outside_K = torch.stack(self._sums).sum(0)
        self._sums.clear()
        pairs = count_K.clamp(min=1)
        figures = {"head_loss": loss_K / pairs, "top1": top1_K / pairs, "top5": top5_K / pairs}
        if self.model.heads.draft_ids is not None:
            figures["outside"] = outside_K / pairs
        return {name: value.tolist() for name, value in figures.items()}
