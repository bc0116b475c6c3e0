"""What an EAGLE layer learns, and its trainer.

Dimensions: B batch, T time, D hidden, F features, K passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from medusa.eagle import EagleLayer
from medusa.trunk import TrunkOutput

from .eagle_loss import EagleLoss, eagle_loss
from .loop import DraftTrainer, positions_of
from .loss import weights
from .pairs import count_pairs
from .states import States
from .training import EagleTraining


class EagleObjective(nn.Module):
    """The layer with its loss: the module that is trained. The trunk is reached through it, and not part of it."""

    states: States | None = None  # those of earlier epochs, for rows that have a number: all that version 1 reads

    def __init__(self, layer: EagleLayer, training: EagleTraining) -> None:
        super().__init__()
        self.layer = layer
        self.training_of = training
        self.weights_K = weights(training.passes, training.decay)

    def forward(
        self, input_ids: Tensor, segments: Tensor, labels: Tensor | None = None, row: Tensor | None = None
    ) -> EagleLoss:
        """Loss of all passes on a batch of rows [B, T].

        ``labels`` are the tokens, -100 where not supervised; ``row`` [B] numbers the rows.
        """
        asked = self.training_of
        if self.states is None or row is None:
            output = self.read(input_ids, segments)
            features_BTF, hidden_BTD = self.layer.features(output), output.hidden
        else:
            hidden_BTD = self.states.of(row, input_ids, segments, partial(self._last, input_ids, segments))
            features_BTF = hidden_BTD
        features_BTF = self.noised(features_BTF)
        return eagle_loss(
            self.layer,
            self.layer.unroll(input_ids, features_BTF, asked.passes, segments),
            hidden_BTD,
            input_ids if labels is None else labels,
            segments,
            self.weights_K,
            asked.chunk,
            taught=asked.targets == "trunk",
            features=asked.feature_weight > 0,
        )

    def read(self, input_ids: Tensor, segments: Tensor) -> TrunkOutput:
        """The trunk's last states [B, T, D], and those of the layers that are fused."""
        trunk, layers = self.layer.trunk, self.layer.layers
        return trunk.forward(input_ids, positions_BT=positions_of(segments), keep=1, layers=layers)

    def _last(self, input_ids: Tensor, segments: Tensor) -> Tensor:
        return self.read(input_ids, segments).hidden

    def noised(self, features_BTF: Tensor) -> Tensor:
        """Features with evenly drawn noise (EAGLE, section 4.1): drafting reads states that are not quite right."""
        if not self.training_of.noise:
            return features_BTF
        return features_BTF + self.training_of.noise * (2 * torch.rand_like(features_BTF) - 1)


class EagleTrainer(DraftTrainer):
    """Trains an EAGLE layer on a frozen trunk."""

    model: EagleObjective
    training: EagleTraining
    summed = "depth_loss"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.also = ("feature_loss",) if self.training.feature_weight else ()

    @property
    def drafts(self) -> EagleLayer:
        """The layer."""
        return self.model.layer

    def vocabulary(self) -> Iterable[Tensor]:
        """Its own projection, if it has one."""
        return [] if self.drafts.lm_head is None else [self.drafts.lm_head.weight]

    def try_step(self) -> None:
        """As every stage's, with the trunk's forward in it and no states kept; that noise is drawn is undone."""
        device, states = self.args.device, self.model.states
        self.model.states = None
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                super().try_step()
        finally:
            self.model.states = states

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weighted sum of the passes' mean losses; of a micro-batch, its part of the step's."""
        output: EagleLoss = model(**inputs)
        self.count(output.tokens, *([output.feature_sums_K.detach()] if self.also else []))
        # Processes' gradients are averaged.
        return self.accelerator.num_processes * output.total(self.training.feature_weight, num_items_in_batch)

    def supervised(self, batch: dict[str, Tensor]) -> Tensor:
        """Pairs of each pass [K]."""
        return count_pairs(batch.get("labels", batch["input_ids"]), batch["segments"], self.training.passes)
