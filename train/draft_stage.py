"""The stage that trains what drafts on the frozen trunk, whatever it is: heads (``heads``) or an EAGLE layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from medusa.bound import Bound
from medusa.calibrate import Continuations
from medusa.checkpoint import save_tree
from medusa.trunk import Trunk

from .checkpoints import told
from .heldout import DraftEvaluation
from .loop import DraftTrainer
from .newtrunk import unchanged
from .pictures import of_ranks
from .record import AGAIN, TRUNK
from .states import Numbered, kept, wanted
from .training import DraftTraining

if TYPE_CHECKING:
    from .job import Job

Drafts = TypeVar("Drafts", bound=Bound)
DEPENDS = ("seed", "data", "own_text", "evaluation")  # parts of the configuration that every such result depends on


class DraftStage(ABC, Generic[Drafts]):
    """Trains heads or a layer on the frozen trunk, and saves the best, with the tree that they were judged by.

    Args:
        job: the run under way.
        trunk: what is drafted for.
        training: how what drafts is trained.
        folder: where it is saved.
    """

    name: ClassVar[str]  # of the stage, and of what it makes in the configuration
    what: ClassVar[str]  # it makes, in sentences
    weights: ClassVar[str]  # the file
    trainer: ClassVar[type[DraftTrainer]]

    def __init__(self, job: Job, trunk: Trunk, training: DraftTraining, folder: Path) -> None:
        self.job, self.trunk, self.training, self.folder = job, trunk, training, folder

    def make(self) -> Drafts:
        """Train, or go on with that, where it is not done yet; return what drafts."""
        job, trunk, name = self.job, self.trunk, self.name
        settings = self.settings()
        if job.is_made(name, settings, self.folder / self.weights):
            return self.load()
        saved = job.record.resumable(name, settings)
        rows = job.rows(name, self.training)
        keep_states = wanted(self.cache_states(), rows, trunk, job.folder, job.report, job.group.size)
        held = job.held(trunk, saved)
        start = job.begin(name, saved)
        drafts = self.new(job.draft_ids(name, self.vocab(), trunk, rows))
        size = sum(parameter.numel() for parameter in drafts.parameters())
        job.report(f"{name}: {self.about()}, {size:,} parameters, {job.amount(self.training)}")
        objective, data = self.objective(drafts), Numbered(rows) if keep_states else rows
        how: dict[str, Any] = {"seed": job.config.seed, "device": trunk.device, "group": job.group}
        trainer = self.trainer(objective, data, self.training, **how)
        evaluation = self.evaluation(trainer.judged, held)
        trainer.kept = evaluation
        states = kept(keep_states, rows, trunk, job.folder, job.group.rank, saved is not None)
        with unchanged(trunk, self.what), states as objective.states:
            job.run(name, trainer, evaluation, start, settings, saved)
        return job.group.alone(partial(self._finish, evaluation, settings, start, size)) or self.load()

    def settings(self) -> dict[str, Any]:
        """What the result depends on."""
        return {"trunk": self.trunk.fingerprint()} | self.job.settings(*DEPENDS, self.name, self.training.group)

    def _finish(self, evaluation: DraftEvaluation, settings: dict[str, Any], start: float, size: int) -> Drafts:
        """Save the best with its tree, put it on record, and return it as it decodes."""
        job, trunk = self.job, self.job.config.trunk
        evaluation.restore_best()
        made: Any = evaluation.module.to(self.trunk.dtype).eval()
        with told(self.what, self.folder, AGAIN):
            self.save(made, trunk.name or str(job.folder / TRUNK), trunk.revision)
            save_tree(self.folder, evaluation.tree)
        best = {"tokens_per_step": evaluation.tokens_per_step, "nodes": evaluation.tree.size, "step": evaluation.step}
        job.record.done(self.name, settings, start, {"parameters": size} | best)
        job.report(
            f"{self.name}: {evaluation.tokens_per_step:.3f} tokens per step with a tree of {evaluation.tree.size}"
            f" nodes, best after {evaluation.step} steps; saved in {self.folder}"
        )
        job.log.pictures(self.name, self.training.steps, lambda: of_ranks(evaluation.tree, evaluation.ranks()[1]))
        return made

    @abstractmethod
    def about(self) -> str:
        """What is made, as the first line of the stage says it."""

    def cache_states(self) -> Any:
        """Whether to keep the trunk's states (see :func:`medusa.train.states.wanted`)."""
        return self.training.cache_states

    @abstractmethod
    def vocab(self) -> int | None:
        """How many tokens are drafted from; None for all."""

    @abstractmethod
    def new(self, draft_ids: Tensor | None) -> Drafts:
        """What is trained, as it starts."""

    @abstractmethod
    def objective(self, drafts: Drafts) -> Any:
        """Its loss: the module that is trained."""

    @abstractmethod
    def evaluation(self, judged: Any, held: Continuations) -> DraftEvaluation:
        """How ``judged``, an objective, is evaluated."""

    @abstractmethod
    def load(self) -> Drafts:
        """What was saved."""

    @abstractmethod
    def save(self, made: Drafts, trunk: str, revision: str | None) -> None:
        """Save ``made``, which names its trunk."""
