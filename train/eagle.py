"""The stage that trains an EAGLE layer on the frozen trunk: EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025).

It needs no heads. Where a run makes both they learn from the same rows, and are judged by the same continuations.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa.calibrate import Continuations
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_calibrate import layer_features, layer_ranks
from medusa.eagle_files import EAGLE_WEIGHTS, PLACE, load_eagle, save_eagle
from medusa.trunk import Trunk

from .draft_stage import DraftStage
from .eagle_objective import EagleObjective, EagleTrainer
from .heldout import DraftEvaluation
from .training import EagleTraining

if TYPE_CHECKING:
    from .job import Job


class EagleEvaluation(DraftEvaluation):
    """Counts tokens per step on the trunk's own continuations, and keeps the layer that brought the most.

    Args:
        layer: what is trained.
        held: the continuations.
        depth: most levels of a tree.
        nodes: size of the tree.
    """

    def __init__(self, layer: EagleLayer, held: Continuations, depth: int, nodes: int) -> None:
        super().__init__(layer, held, nodes)
        self.layer, self.depth = layer, depth

    @cached_property
    def _halves(self) -> list[tuple[Continuations, list[Tensor]]]:
        """The halves of the continuations with what the layer reads of them, once: the trunk is frozen."""
        return [(half, layer_features(self.layer, half)) for half in self.held.halves()]

    def ranks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of both halves where the true tokens stand, depth by depth."""
        first, second = (layer_ranks(self.layer, *half, self.depth) for half in self._halves)
        return first, second


class EagleStage(DraftStage[EagleLayer]):
    """Makes the layer ``config`` for ``trunk``."""

    name, what, weights = "eagle", "the EAGLE layer", EAGLE_WEIGHTS
    trainer = EagleTrainer
    training: EagleTraining

    def __init__(self, job: Job, trunk: Trunk, config: EagleConfig) -> None:
        super().__init__(job, trunk, job.config.eagle_training, job.folder / PLACE)
        self.config = config

    def about(self) -> str:
        """Version and passes."""
        return f"a layer of version {self.config.version}, {self.training.passes} passes"

    def cache_states(self) -> Any:
        """For version 1 alone: version 3 reads states of inner layers."""
        return self.training.cache_states if self.config.version == 1 else False

    def vocab(self) -> int | None:
        """That of the layer."""
        return self.config.vocab

    def new(self, draft_ids: Tensor | None) -> EagleLayer:
        """A layer of random weights."""
        kept = self.training.kept_in(self.trunk.dtype)
        return EagleLayer(self.config, self.trunk, draft_ids, dtype=kept, seed=self.job.config.seed)

    def objective(self, drafts: EagleLayer) -> EagleObjective:
        """The loss of all passes."""
        return EagleObjective(drafts, self.training)

    def evaluation(self, judged: EagleObjective, held: Continuations) -> EagleEvaluation:
        """By the layer's ranks of true tokens."""
        return EagleEvaluation(judged.layer, held, self.training.depth, self.job.config.evaluation.nodes)

    def load(self) -> EagleLayer:
        """The layer in the folder."""
        return load_eagle(self.folder, self.trunk)

    def save(self, made: EagleLayer, trunk: str, revision: str | None) -> None:
        """Weights and manifest."""
        save_eagle(self.folder, made, trunk, revision)
