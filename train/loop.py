"""What is trained, and by which loss: the objectives, and a trainer for each.

Dimensions: B batch, T time, D hidden, K heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.machine import seconds

from .checkpoints import Saved
from .config import HeadsTraining, Training
from .loss import HeadLoss, multi_head_loss, weights
from .pairs import count_pairs, pair_mask
from .states import States
from .trainer import StageTrainer
from .zero import keep_together

TRIALS = 3  # of the trunk's bare forward, at the start of a stage


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


def checkpoint_activations(model: Any, training: Training) -> None:
    """Let each block of ``model`` keep only its input for the backward, if ``training`` asks for it.

    transformers' own switch acts in training mode alone, which a trunk under an adapter never is in: its dropout stays
    off. So the blocks are wrapped here.

    Raises:
        UserError: the family has no such blocks.
    """
    if not training.gradient_checkpointing:
        return
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(f"gradient_checkpointing=true: {model.config.model_type} models can't do it; leave it out")
    for block in blocks:
        block.forward = partial(_kept_small, block.forward)


def _kept_small(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, **named)


class HeadsObjective(nn.Module):
    """The heads with their loss: the module that is trained. The trunk is reached through them, and not part of it."""

    states: States | None = None  # those of earlier epochs, for rows that have a number

    def __init__(self, heads: MedusaHeads, training: HeadsTraining) -> None:
        super().__init__()
        self.heads = heads
        self.weights_K = weights(heads.config.num, training.decay)
        self.chunk = training.chunk
        self.targets = training.targets

    def forward(
        self, input_ids: Tensor, segments: Tensor, labels: Tensor | None = None, row: Tensor | None = None
    ) -> HeadLoss:
        """Loss of all heads on a batch of rows [B, T].

        ``labels`` are the tokens, -100 where not supervised; ``row`` [B] numbers the rows.
        """
        if self.states is None or row is None:
            hidden = self.read(input_ids, segments)
        else:
            hidden = self.states.of(row, input_ids, segments, partial(self.read, input_ids, segments))
        return self.loss(hidden, input_ids, segments, input_ids if labels is None else labels)

    def read(self, input_ids: Tensor, segments: Tensor) -> Tensor:
        """The trunk's last states [B, T, D]."""
        return self.heads.trunk.forward(input_ids, positions_BT=positions_of(segments), keep=1).hidden

    def loss(self, hidden_BTD: Tensor, input_ids: Tensor, segments: Tensor, labels: Tensor) -> HeadLoss:
        """Loss of all heads that read the trunk's states ``hidden_BTD``, which get a gradient if they require one."""
        return multi_head_loss(
            self.heads,
            hidden_BTD,
            input_ids,
            labels,
            segments,
            self.weights_K,
            self.chunk,
            teacher_states=None if self.targets == "text" else hidden_BTD,
            acceptance=self.targets == "acceptance",
        )


class TrunkTrainer(StageTrainer):
    """Trains a causal language model on the next token."""

    def __init__(self, model: nn.Module, rows: Any, training: Training, **options: Any) -> None:
        checkpoint_activations(model, training)
        super().__init__(model, rows, training, **options)

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


class DraftTrainer(StageTrainer):
    """Trains what drafts for a frozen trunk, and sums up how well it guesses, head by head or depth by depth."""

    summed = "head_loss"  # the name of the losses in the log
    also: tuple[str, ...] = ()  # names of what else is summed up

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sums: list[Tensor] = []
        if self.group.deepspeed is not None:
            keep_together(self.model)

    @property
    def drafts(self) -> Any:
        """What drafts: it knows its trunk and its draft vocabulary."""
        raise NotImplementedError

    def beside(self) -> list[object]:
        """The trunk."""
        return [self.drafts.trunk]

    def trunk_speed(self) -> float | None:
        """Measured on the first batch; the first forward warms up."""
        batch = self.first_batch()
        times = [seconds(lambda: self.model.read(batch["input_ids"], batch["segments"])) for _ in range(1 + TRIALS)]
        return self.accelerator.num_processes * batch["input_ids"].numel() / median(times[1:])

    def count(self, output: HeadLoss, *also: Tensor) -> None:
        """Add to the sums that the log's next line is made of."""
        counts = output.counts_K, output.top1_K, output.top5_K, output.outside_K, *also
        self._sums.append(torch.stack([output.loss_sums_K.detach(), *counts]).double())

    def counters(self) -> dict[str, Any]:
        """The sums too."""
        return super().counters() | {"sums": self.pooled(self._sums)}

    def restore(self, saved: Saved) -> None:
        """The sums too."""
        super().restore(saved)
        self._sums = self.own_part(saved.counters["sums"])

    def figures(self) -> dict[str, Any]:
        """Loss, top-1 and top-5 per head or depth, and the share of targets outside its draft vocabulary."""
        loss_K, count_K, top1_K, top5_K, outside_K, *also = self.group.sum(torch.stack(self._sums).sum(0))
        self._sums.clear()
        pairs = count_K.clamp(min=1)
        figures = {self.summed: loss_K / pairs, "top1": top1_K / pairs, "top5": top5_K / pairs}
        if self.drafts.draft_ids is not None:
            figures["outside"] = outside_K / pairs
        figures |= {name: sum_K / pairs for name, sum_K in zip(self.also, also, strict=True)}
        return {name: value.tolist() for name, value in figures.items()}


class HeadsTrainer(DraftTrainer):
    """Trains heads on a frozen trunk (Medusa-1; Cai et al. 2024, section 2.2.1)."""

    @property
    def drafts(self) -> MedusaHeads:
        """The heads."""
        heads: MedusaHeads = self.model.heads
        return heads

    def try_step(self) -> None:
        """As every stage's, with the trunk's forward in it and no states kept."""
        states, self.model.states = self.model.states, None
        try:
            super().try_step()
        finally:
            self.model.states = states

    def vocabulary(self) -> Iterable[Tensor]:
        """The heads' own projections, and their biases."""
        return self.drafts.vocabulary()

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weighted sum of the heads' mean losses; of a micro-batch, its part of the step's."""
        output: HeadLoss = model(**inputs)
        self.count(output)
        # Processes' gradients are averaged.
        return self.accelerator.num_processes * output.total(counts_K=num_items_in_batch)

    def supervised(self, batch: dict[str, Tensor]) -> Tensor:
        """Pairs of each head [K]."""
        labels_BT = batch.get("labels", batch["input_ids"])
        return count_pairs(labels_BT, batch["segments"], self.drafts.config.num)
