"""The stage that trains an EAGLE layer on the frozen trunk: EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025).

It needs no heads. Where a run makes both they learn from the same rows, and are judged by the same continuations.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa.calibrate import Continuations
from medusa.checkpoint import save_tree
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_calibrate import layer_features, layer_ranks
from medusa.eagle_files import EAGLE_WEIGHTS, PLACE, load_eagle, save_eagle
from medusa.trunk import Trunk

from .checkpoints import told
from .eagle_objective import EagleObjective, EagleTrainer
from .heldout import Best, judge_ranks
from .newtrunk import unchanged
from .pictures import of_ranks
from .record import AGAIN, TRUNK
from .states import Numbered, kept, wanted

if TYPE_CHECKING:
    from .job import Job


class EagleEvaluation(Best):
    """Counts tokens per step on the trunk's own continuations, and keeps the layer that brought the most.

    Args:
        layer: what is trained.
        held: the continuations.
        depth: most levels of a tree.
        nodes: size of the tree.
    """

    def __init__(self, layer: EagleLayer, held: Continuations, depth: int, nodes: int) -> None:
        super().__init__(layer)
        self.layer, self.held, self.depth, self.nodes = layer, held, depth, nodes

    @cached_property
    def _halves(self) -> list[tuple[Continuations, list[Tensor]]]:
        """The halves of the continuations with what the layer reads of them, once: the trunk is frozen."""
        return [(half, layer_features(self.layer, half)) for half in self.held.halves()]

    def ranks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of both halves where the true tokens stand: what grows a tree, and what judges it."""
        first, second = (layer_ranks(self.layer, *half, self.depth) for half in self._halves)
        return first, second

    def __call__(self, step: int) -> dict[str, Any]:
        """Evaluate the layer as it is after ``step`` steps (see :func:`medusa.train.heldout.judge_ranks`)."""
        tree, figures = judge_ranks(*self.ranks(), self.nodes)
        self.offer(step, figures["tokens_per_step"], tree)
        return figures


def make_eagle(job: Job, trunk: Trunk, eagle: EagleConfig) -> EagleLayer:
    """Train an EAGLE layer on the frozen trunk; save the best one, with the tree that it was judged by."""
    config, training = job.config, job.config.eagle_training
    settings = {"trunk": trunk.fingerprint()} | job.settings(
        "seed", "data", "own_text", "eagle", "eagle_training", "evaluation"
    )
    folder = job.folder / PLACE
    if job.is_made("eagle", settings, folder / EAGLE_WEIGHTS):
        return load_eagle(folder, trunk)
    saved = job.record.resumable("eagle", settings)
    rows = job.rows("eagle", training)
    choice = training.cache_states if eagle.version == 1 else False
    keep_states = wanted(choice, rows, trunk, job.folder, job.report, job.group.size)
    held = job.held(trunk, saved)
    start = job.begin("eagle", saved)
    draft_ids = job.draft_ids("eagle", eagle.vocab, trunk, rows)
    layer = EagleLayer(eagle, trunk, draft_ids, dtype=training.kept_in(trunk.dtype), seed=config.seed)
    size = sum(parameter.numel() for parameter in layer.parameters())
    job.report(
        f"eagle: a layer of version {eagle.version}, {size:,} parameters, {training.steps} steps of {training.batch} x"
        f" {config.data.block} tokens, {training.passes} passes"
    )
    objective, data = EagleObjective(layer, training), Numbered(rows) if keep_states else rows
    trainer = EagleTrainer(objective, data, training, seed=config.seed, device=trunk.device, group=job.group)
    evaluation = EagleEvaluation(trainer.judged.layer, held, training.depth, config.evaluation.nodes)
    trainer.kept = evaluation
    states = kept(keep_states, rows, trunk, job.folder, job.group.rank, saved is not None)
    with unchanged(trunk, "an EAGLE layer was"), states as objective.states:
        job.run("eagle", trainer, evaluation, start, settings, saved)

    def finish() -> EagleLayer:
        evaluation.restore_best()
        made = evaluation.layer.to(trunk.dtype).eval()  # as it drafts
        with told("the EAGLE layer", folder, AGAIN):
            save_eagle(folder, made, config.trunk.name or str(job.folder / TRUNK), config.trunk.revision)
            save_tree(folder, evaluation.tree)
        best = {"tokens_per_step": evaluation.tokens_per_step, "nodes": evaluation.tree.size, "step": evaluation.step}
        job.record.done("eagle", settings, start, {"parameters": size} | best)
        job.report(
            f"eagle: {evaluation.tokens_per_step:.3f} tokens per step with a tree of {evaluation.tree.size} nodes, best"
            f" after {evaluation.step} steps; saved in {folder}"
        )
        job.log.pictures("eagle", training.steps, lambda: of_ranks(evaluation.tree, evaluation.ranks()[1]))
        return made

    return job.group.alone(finish) or load_eagle(folder, trunk)
