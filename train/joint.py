"""The joint stage: trunk and heads trained together (Medusa-2; Cai et al. 2024, section 2.2.2).

The heads stage before it is the warm-up of the heads, the first of the paper's two stages. The trunk learns through a
low-rank adapter; at the end that is merged into it, and the heads are bound to the model that this makes. Decoding is
then exact to the merged trunk: the model was changed.

Dimensions: B batch, T time, D hidden, K heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa.calibrate import Continuations, continuations
from medusa.checkpoint import load_heads, save_heads, save_tree
from medusa.heads import MedusaHeads
from medusa.tree import Topology
from medusa.trunk import Trunk

from .checkpoints import Saved, told
from .config import EvaluationConfig
from .distill import repeated_share
from .heldout import Best, judge, text_loss
from .joint_loss import JointLoss, heads_weight, trunk_loss
from .loop import HeadsObjective, HeadsTrainer, checkpoint_activations, positions_of
from .lora import Adapter
from .newtrunk import digest, digest_weights, load_trunk, save_model
from .optim import adamw
from .pairs import pair_mask
from .record import AGAIN, MERGED
from .training import HeadsTraining, JointTraining

if TYPE_CHECKING:
    import datasets

    from .job import Job


class JointObjective(HeadsObjective):
    """Heads and adapter with their loss: the module that is trained."""

    def __init__(self, heads: MedusaHeads, adapter: Adapter, of_heads: HeadsTraining, training: JointTraining) -> None:
        super().__init__(heads, of_heads)
        self.adapter = adapter
        self.taught = training.trunk_loss == "teacher"

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, segments: Tensor, labels: Tensor | None = None
    ) -> JointLoss:
        """Losses of trunk and heads on a batch of rows [B, T]; ``labels`` are the tokens, -100 where not supervised."""
        labels = input_ids if labels is None else labels
        trunk, teacher_BTD = self.heads.trunk, None
        if self.taught:
            with self.adapter.off():
                teacher_BTD = self.read(input_ids, segments)
        hidden_BTD = trunk.forward_with_gradients(input_ids, positions_BT=positions_of(segments), keep=1).hidden
        trunk_sum, count = trunk_loss(trunk, hidden_BTD, labels, segments, teacher_BTD, self.chunk)
        return JointLoss(trunk_sum, count, self.loss(hidden_BTD, input_ids, segments, labels))


class JointTrainer(HeadsTrainer):
    """Trains heads and adapter together, each at its own rate."""

    model: JointObjective
    training: JointTraining

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._trunk_sums: list[Tensor] = []

    def trunk_speed(self) -> None:
        """Of no meaning here: the trunk is not frozen."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with a rate for the adapter and one for the heads."""
        if self.optimizer is None:
            parts = (self.model.adapter, self.training.lr), (self.model.heads, self.training.heads_lr)
            self.optimizer = adamw(parts, self.vocabulary(), self.training.weight_decay)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The trunk's loss and the heads' as :meth:`JointLoss.total`; of a micro-batch, its part of the step's."""
        output: JointLoss = model(**inputs)
        self.count(output.heads)
        self._trunk_sums.append(torch.stack([output.trunk_sum.detach().double(), output.count.double()]))
        weight = heads_weight(self.state.global_step, self.training)
        return self.accelerator.num_processes * output.total(weight, num_items_in_batch)  # gradients are averaged

    def supervised(self, batch: dict[str, Tensor]) -> Tensor:
        """Next tokens, then the pairs of each head [1 + K]."""
        mask_BT = pair_mask(batch.get("labels", batch["input_ids"]), batch["segments"], -1)
        return torch.cat([mask_BT.sum()[None], super().supervised(batch)])

    def try_step(self) -> None:
        """As everywhere; that dropout draws in it is undone."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            super().try_step()

    def counters(self) -> dict[str, Any]:
        """The trunk's sums too."""
        return super().counters() | {"trunk_sums": self.pooled(self._trunk_sums)}

    def restore(self, saved: Saved) -> None:
        """The trunk's sums too."""
        super().restore(saved)
        self._trunk_sums = self.own_part(saved.counters["trunk_sums"])

    def figures(self) -> dict[str, Any]:
        """The trunk's mean loss beside the heads' figures, and what theirs weighed last."""
        loss, count = self.group.sum(torch.stack(self._trunk_sums).sum(0)).tolist()
        self._trunk_sums.clear()
        weight = heads_weight(max(self.state.global_step - 1, 0), self.training)
        return {"trunk_loss": loss / max(count, 1), "heads_weight": weight} | super().figures()


class JointEvaluation(Best):
    """Judges heads and adapter by the adapted trunk's own continuations, made anew each time: decoding verifies those.

    Of those whose held-out loss is within the tolerance it keeps the best; the start is always one of them. Text that
    repeats itself is easily guessed, so the share of repeated 4-grams stands beside the tokens per step.

    Args:
        objective: what is trained.
        prompts: held-out prompts.
        rows: held-out text for the loss.
        config: how far prompts are continued, the size of the tree, and how many of the rows are taken.
        training: by what share the loss may exceed that at the start.
    """

    def __init__(
        self,
        objective: JointObjective,
        prompts: Sequence[Sequence[int]],
        rows: datasets.Dataset,
        config: EvaluationConfig,
        training: JointTraining,
    ) -> None:
        super().__init__(objective)
        self.heads = objective.heads
        self.nodes, self.tolerance = config.nodes, training.loss_tolerance
        self._held = partial(continuations, self.heads.trunk, prompts, config.tokens)
        self._loss = partial(text_loss, self.heads.trunk.model, rows, config.rows)
        self.start: dict[str, float] = {}
        self.best: dict[str, float] = {}

    def __call__(self, step: int, held: Continuations | None = None) -> dict[str, Any]:
        """Evaluate after ``step`` steps; ``held`` are the trunk's continuations where they are known already.

        Returns the figures of :func:`medusa.train.heldout.judge`, the loss on held-out text, that of the trunk before
        this stage, and ``repeated``, the mean share of repeated 4-grams of the continuations.
        """
        self.module.eval()  # no dropout; each step of training switches it on again
        held = self._held() if held is None else held
        tree, figures = judge(self.heads, held, self.nodes)
        own = {"heldout_loss": self._loss(), "repeated": repeated(held), "tokens_per_step": figures["tokens_per_step"]}
        self.start = self.start or own
        if own["heldout_loss"] <= (1 + self.tolerance) * self.start["heldout_loss"]:
            self.offer(step, own["tokens_per_step"], tree)
        if self.step == step:
            self.best = own
        return figures | own | {"heldout_loss_before": self.start["heldout_loss"]}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The figures of the start and of the best too."""
        figures, tensors = super().state()
        return figures | {"start": self.start, "best": self.best}, tensors

    def load_state(self, figures: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """The figures of the start and of the best too."""
        super().load_state(figures, tensors)
        self.start, self.best = dict(figures["start"]), dict(figures["best"])

    def result(self) -> dict[str, Any]:
        """What the best brings, with the same figures of the start."""
        before = {f"{name}_before": value for name, value in self.start.items()}
        return self.best | before | {"nodes": self.tree.size, "step": self.step}


def repeated(held: Continuations) -> float:
    """Mean share of each continuation's 4-grams that came before in it."""
    shares = [repeated_share(ids[start:]) for ids, start in zip(held.ids, held.starts, strict=True)]
    return sum(shares) / max(len(shares), 1)


def make_joint(job: Job, heads: MedusaHeads, training: JointTraining) -> MedusaHeads:
    """Train trunk and heads together from where the heads stage ended; save the merged trunk, and heads bound to it.

    Where nothing better is found, the start itself is saved: a trunk equal to the one before, and the same heads.
    """
    config, trunk, folder = job.config, heads.trunk, job.folder / MERGED
    settings = {"trunk": trunk.fingerprint()}
    settings |= job.settings("seed", "data", "heads", "heads_training", "joint", "evaluation")
    if job.is_made("joint", settings, folder):
        return load_heads(job.folder, _load_merged(job))
    saved = job.record.resumable("joint", settings)
    rows, heldout = job.rows("joint", training), job.corpus.heldout_rows()
    held = job.held(trunk) if saved is None else None
    start = job.begin("joint", saved)
    before, loss_before = digest(trunk), text_loss(trunk.model, heldout)
    adapter, heads = Adapter(trunk, training, config.seed), heads.to(config.heads_training.kept_in(trunk.dtype))
    checkpoint_activations(trunk.model, training)
    objective = JointObjective(heads, adapter, config.heads_training, training)
    size = sum(parameter.numel() for parameter in adapter.parameters())
    about = f"an adapter of rank {training.rank}, {size:,} parameters, with the heads"
    job.report(f"joint: {about}, {job.amount(training)}")
    prompts = job.corpus.heldout_prompts(config.evaluation)
    evaluation = JointEvaluation(objective, prompts, heldout, config.evaluation, training)
    if held is not None:
        job.log.write("joint", 0, evaluation(0, held))
    trainer = JointTrainer(objective, rows, training, seed=config.seed, device=trunk.device, group=job.group)
    trainer.kept = evaluation
    job.run("joint", trainer, evaluation, start, settings, saved)

    def finish() -> MedusaHeads:
        evaluation.restore_best()
        bound = _save_merged(job, objective, evaluation.tree, before)
        loss = text_loss(bound.trunk.model, heldout)
        found = evaluation.result() | {"heldout_loss": loss, "heldout_loss_before": loss_before}
        job.record.done("joint", settings, start, {"parameters": size} | found)
        job.report(_told(found, evaluation.step))
        job.report(f"joint: saved in {job.folder}; what is decoded is exact to the merged trunk, {folder}")
        return bound

    return job.group.alone(finish) or heads  # another process has nothing left to do with them


def _load_merged(job: Job) -> Trunk:
    return load_trunk(replace(job.config.trunk, name=str(job.folder / MERGED), new=None, revision=None), job.folder)


def _save_merged(job: Job, objective: JointObjective, tree: Topology, before: str) -> MedusaHeads:
    """Merge the adapter, save the trunk that this makes and the heads with their tree, and return them bound to it.

    Raises:
        RuntimeError: the trunk's own weights are not those of the digest ``before``, by a fault of ours.
        UserError: the disk takes no more.
    """
    heads, adapter, folder = objective.heads, objective.adapter, job.folder / MERGED
    if digest_weights(adapter.base_weights()) != before:
        raise RuntimeError("the trunk's own weights changed while only an adapter on it was trained")
    adapter.merge()
    with told("the merged trunk", job.folder, AGAIN):
        save_model(folder, heads.trunk.model, job.corpus.tokenizer)
    bound = rebound(heads, _load_merged(job))
    with told("the heads", job.folder, AGAIN):
        save_heads(job.folder, bound, str(folder))
        save_tree(job.folder, tree)
    return bound


def rebound(heads: MedusaHeads, trunk: Trunk) -> MedusaHeads:
    """The same heads on another trunk of the same shape."""
    made = MedusaHeads(heads.config, trunk, heads.draft_ids, initialise=False)
    made.load_state_dict(heads.state_dict())
    return made.eval()


def _told(found: Mapping[str, Any], step: int) -> str:
    if step == 0:
        return "joint: no step brought more within the tolerance: the trunk stays as it was, and so do the heads"
    return (
        f"joint: {found['tokens_per_step']:.3f} tokens per step with a tree of {found['nodes']} nodes, best after"
        f" {step} steps, before {found['tokens_per_step_before']:.3f}; held-out loss {found['heldout_loss']:.3f},"
        f" before {found['heldout_loss_before']:.3f}; repeated 4-grams {found['repeated']:.1%}, before"
        f" {found['repeated_before']:.1%}"
    )
