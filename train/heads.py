"""The stage that trains heads on the frozen trunk (Medusa-1; Cai et al. 2024, section 2.2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa.calibrate import Continuations
from medusa.checkpoint import WEIGHTS, load_heads, save_heads
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.trunk import Trunk

from .draft_stage import DraftStage
from .heldout import HeadsEvaluation
from .loop import HeadsObjective, HeadsTrainer
from .training import HeadsTraining

if TYPE_CHECKING:
    from .job import Job


class HeadsStage(DraftStage[MedusaHeads]):
    """Makes the heads ``config`` for ``trunk``."""

    name, what, weights = "heads", "the heads", WEIGHTS
    trainer = HeadsTrainer
    training: HeadsTraining

    def __init__(self, job: Job, trunk: Trunk, config: HeadsConfig) -> None:
        super().__init__(job, trunk, job.config.heads_training, job.record.heads_folder)
        self.config = config

    def settings(self) -> dict[str, Any]:
        """Whether a joint stage follows, too: the heads are then saved elsewhere."""
        return super().settings() | ({} if self.job.config.joint is None else {"joint": True})

    def about(self) -> str:
        """Number and kind."""
        return f"{self.config.num} of kind {self.config.kind}"

    def vocab(self) -> int | None:
        """That of the heads."""
        return self.config.vocab

    def new(self, draft_ids: Tensor | None) -> MedusaHeads:
        """Heads that say what the trunk's own says."""
        return MedusaHeads(self.config, self.trunk, draft_ids, dtype=self.training.kept_in(self.trunk.dtype))

    def objective(self, drafts: MedusaHeads) -> HeadsObjective:
        """The loss of all heads."""
        return HeadsObjective(drafts, self.training)

    def evaluation(self, judged: HeadsObjective, held: Continuations) -> HeadsEvaluation:
        """By the heads' ranks of true tokens."""
        return HeadsEvaluation(judged.heads, held, self.job.config.evaluation.nodes)

    def load(self) -> MedusaHeads:
        """The heads in the folder."""
        return load_heads(self.folder, self.trunk)

    def save(self, made: MedusaHeads, trunk: str, revision: str | None) -> None:
        """Weights and manifest."""
        save_heads(self.folder, made, trunk, revision)
