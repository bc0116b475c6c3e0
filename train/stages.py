"""The stages of a training run: trunk, heads, calibration.

Each is skipped if its result is there and valid, and gone on with if a checkpoint of it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.calibrate import Continuations, continuations, recalibrate
from medusa.checkpoint import CALIBRATION, WEIGHTS, load_heads, save_heads, save_tree
from medusa.heads import MedusaHeads
from medusa.machine import pick_device, pick_threads
from medusa.progress import progress
from medusa.trunk import Trunk
from medusa.vocabulary import draft_vocabulary, token_counts

from .checkpoints import Saved, to_disk, told
from .config import NewTrunk, TrainConfig, Training
from .follow import follow
from .heldout import HeadsEvaluation, text_loss
from .interrupt import Interruption
from .loop import HeadsObjective, HeadsTrainer, StageTrainer, TrunkTrainer
from .newtrunk import check_name, digest, load_trunk, new_model, save_model
from .record import TRUNK, RunRecord
from .text import Corpus
from .tracking import RunLog, run_log

Report = Callable[[str], None]

# What may change between the parts of a run that was interrupted, and without a result being made anew.
SAVING = ("save_every", "save_minutes", "keep")
AGAIN = "make room there, and run the same command again"


@dataclass
class Job:
    """A run under way, as its stages see it. ``threads`` is what torch started with."""

    config: TrainConfig
    record: RunRecord
    log: RunLog
    corpus: Corpus
    report: Report
    threads: int
    interruption: Interruption
    _held: Continuations | None = None
    _held_threads: int = 0

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.record.folder

    def set_threads(self, work: Callable[[], object], before: int = 0) -> None:
        """Use the number of threads asked for, or the one that does ``work`` fastest, or that was used ``before``.

        Sums depend on it in their last bits: who goes on where another process was takes its number.
        """
        asked = self.config.threads
        torch.set_num_threads(self.threads if asked == "auto" else asked)
        if asked == "auto" and before:
            torch.set_num_threads(min(before, self.threads))
        elif asked == "auto" and pick_device(self.config.trunk.device).type == "cpu":
            pick_threads(work)

    def is_made(self, stage: str, settings: dict[str, Any], what: Path) -> bool:
        """Whether the stage can be skipped; says so."""
        if not self.record.is_made(stage, settings):
            return False
        self.record.checkpoints(stage).remove()  # of a process killed just when the stage was done
        self.report(f"{stage}: {what} is there")
        return True

    def begin(self, stage: str, saved: Saved | None = None) -> float:
        """Start a stage, or go on with it: clear what an earlier try left, and return the time at which it began."""
        self.record.begin(stage, saved)
        if saved is None:
            self.log.begin(stage)
            return time.perf_counter()
        self.log.begin(stage, saved.step)
        self.report(f"{stage}: goes on from step {saved.step} ({saved.folder})")
        return time.perf_counter() - saved.seconds

    def run(
        self,
        stage: str,
        trainer: StageTrainer,
        evaluate: Callable[[int], dict[str, Any]],
        start: float,
        settings: dict[str, Any],
        saved: Saved | None,
    ) -> None:
        """Train a stage, begun at ``start``, to its end."""
        self.set_threads(trainer.try_step, saved.threads["steps"] if saved else 0)
        trainer.store = self.record.checkpoints(stage, trainer.training.keep)
        trainer.notes = lambda: self._notes(start, settings)
        write = partial(self.log.write, stage)
        follow(trainer, stage, evaluate, write, self.config.threads == "auto", self.interruption, saved)

    def _notes(self, start: float, settings: dict[str, Any]) -> dict[str, Any]:
        to_disk(self.log.path)  # no checkpoint may outlive the lines before it
        threads = {"steps": torch.get_num_threads(), "before": self._held_threads}
        return {"settings": settings, "seconds": round(time.perf_counter() - start, 3), "threads": threads}

    def held(self, trunk: Trunk, saved: Saved | None = None) -> Continuations:
        """The trunk's own greedy continuations of held-out prompts, made once: heads and trees are judged by them."""
        if self._held is None:
            evaluation = self.config.evaluation
            prompts = self.corpus.heldout_prompts(evaluation)
            ids_1T = torch.tensor(prompts[:1], device=trunk.device)
            self.set_threads(lambda: trunk.forward(ids_1T), saved.threads["before"] if saved else 0)
            self._held_threads = torch.get_num_threads()
            with progress(len(prompts), "held-out continuations") as advance:
                self._held = continuations(
                    trunk, prompts, evaluation.tokens, progress=lambda done, total: advance(done - advance.done)
                )
        return self._held


def train(config: TrainConfig, fresh: str | None = None, report: Report = print) -> RunRecord:
    """Run the stages that are not made yet.

    Args:
        config: what to make.
        fresh: make this stage ("trunk", "heads" or "calibration") and those after it anew.
        report: takes a line at the start and end of each stage.

    Returns:
        The record of the run folder, with each stage's result.

    Raises:
        UserError: wrong data, a trunk that is missing or can't be driven, results made with other settings, a disk
            that takes no more.
        Interrupted: SIGTERM or Ctrl-C; called again, this goes on with what was saved.
    """
    interruption = Interruption()
    with interruption.watched():
        return _train(config, fresh, report, interruption)


def _train(config: TrainConfig, fresh: str | None, report: Report, interruption: Interruption) -> RunRecord:
    record = RunRecord(config, fresh)
    if config.trunk.name is not None:
        check_name(config.trunk.name)
    pick_device(config.trunk.device)
    with run_log(record.folder, config.tracking, asdict(config)) as log:
        job = Job(config, record, log, Corpus(config, report), report, torch.get_num_threads(), interruption)
        if config.trunk.new is not None:
            make_trunk(job, config.trunk.new)
        trunk = load_trunk(config.trunk, record.folder)
        if trunk.context is not None:
            config.check_context(trunk.context)
        job.corpus.take_tokenizer(trunk)
        make_calibration(job, make_heads(job, trunk))
    return record


def make_trunk(job: Job, new: NewTrunk) -> None:
    """Train a new trunk and save it, with its tokenizer, as an ordinary Hugging Face checkpoint."""
    config, training = job.config, job.config.trunk_training
    settings = _settings(job, "seed", "data", "trunk_training") | {"trunk.new": asdict(new)}
    folder = job.folder / TRUNK
    if job.is_made("trunk", settings, folder):
        return
    saved = job.record.resumable("trunk", settings)
    rows, heldout = job.corpus.training_rows(training.steps, training.batch), job.corpus.heldout_rows()
    job.corpus.heldout_prompts(config.evaluation)  # if the text is too short for the heads' stage, say so now
    start = job.begin("trunk", saved)
    model = new_model(new, job.corpus.tokenizer, config.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    job.report(f"trunk: {size:,} parameters, {training.steps} steps of {training.batch} x {config.data.block} tokens")
    trainer = TrunkTrainer(model, rows, training, seed=config.seed, device=pick_device(config.trunk.device))

    def evaluate(step: int) -> dict[str, Any]:
        return {"heldout_loss": text_loss(model, heldout, config.evaluation.rows)}

    job.run("trunk", trainer, evaluate, start, settings, saved)
    loss = text_loss(model, heldout)
    with told("the trunk", folder, AGAIN):
        save_model(folder, model, job.corpus.tokenizer)
    job.record.done("trunk", settings, start, {"parameters": size, "heldout_loss": loss})
    job.report(f"trunk: held-out loss {loss:.3f} nats per token; saved in {folder}")


def make_heads(job: Job, trunk: Trunk) -> MedusaHeads:
    """Train heads on the frozen trunk; save the best ones, with the tree they were judged by."""
    config, training = job.config, job.config.heads_training
    settings = {"trunk": trunk.fingerprint()} | _settings(job, "seed", "data", "heads", "heads_training", "evaluation")
    if job.is_made("heads", settings, job.folder / WEIGHTS):
        return load_heads(job.folder, trunk)
    saved = job.record.resumable("heads", settings)
    rows = job.corpus.training_rows(training.steps, training.batch)
    held = job.held(trunk, saved)
    start = job.begin("heads", saved)
    heads = MedusaHeads(config.heads, trunk, _draft_ids(job, trunk, (rows[index] for index in range(len(rows)))))
    size = sum(parameter.numel() for parameter in heads.parameters())
    job.report(
        f"heads: {heads.config.num} of kind {heads.config.kind}, {size:,} parameters, {training.steps} steps of"
        f" {training.batch} x {config.data.block} tokens"
    )
    evaluation = HeadsEvaluation(heads, held, config.evaluation.nodes)
    trainer = HeadsTrainer(HeadsObjective(heads, training), rows, training, seed=config.seed, device=trunk.device)
    before = digest(trunk)
    trainer.kept = evaluation
    job.run("heads", trainer, evaluation, start, settings, saved)
    if digest(trunk) != before:
        raise RuntimeError("the trunk's weights changed while only the heads were trained")
    evaluation.restore_best()
    with told("the heads", job.folder, AGAIN):
        save_heads(job.folder, heads.eval(), config.trunk.name or str(job.folder / TRUNK), config.trunk.revision)
        save_tree(job.folder, evaluation.tree)
    best = {"tokens_per_step": evaluation.tokens_per_step, "nodes": evaluation.tree.size, "step": evaluation.step}
    job.record.done("heads", settings, start, {"parameters": size} | best)
    job.report(
        f"heads: {evaluation.tokens_per_step:.3f} tokens per step with a tree of {evaluation.tree.size} nodes, best"
        f" after {evaluation.step} steps; saved in {job.folder}"
    )
    return heads


def _draft_ids(job: Job, trunk: Trunk, rows: Iterable[dict[str, Tensor]]) -> Tensor | None:
    """The tokens that heads draft from: the most frequent ones of what the rows supervise."""
    size = job.config.heads.vocab
    if size is None:
        return None
    counts_V = token_counts((row.get("labels", row["input_ids"]) for row in rows), trunk.vocab_size)
    ids = draft_vocabulary(trunk, counts_V, size)
    covered = counts_V[ids].sum() / counts_V.sum().clamp(min=1)
    job.report(f"heads: they draft from {size:,} tokens, which are {covered:.1%} of the text")
    return ids


def make_calibration(job: Job, heads: MedusaHeads) -> None:
    """Choose the tree that is fastest on this machine."""
    config = job.config
    settings = _settings(job, "calibration", "evaluation")
    if job.is_made("calibration", settings, job.folder / CALIBRATION):
        return
    held = job.held(heads.trunk)
    start = job.begin("calibration")
    ids_1T = torch.tensor([held.ids[0][:16]], device=heads.trunk.device)  # about as many tokens as a tree has nodes
    job.set_threads(lambda: heads.trunk.forward(ids_1T))
    sizes, rounds = config.calibration.sizes, config.calibration.rounds
    with told("the tree", job.folder, AGAIN), progress(rounds, "calibration") as advance:
        found = recalibrate(job.folder, heads, held, sizes=sizes, rounds=rounds, progress=lambda done, total: advance())
    job.record.done("calibration", settings, start, asdict(found.chosen))
    job.report(
        f"calibration: of {len(found.rows)} trees the one of {found.topology.size} nodes is fastest here:"
        f" {found.chosen.tokens_per_step:.3f} tokens per step, {found.chosen.step_ms:.2f} ms each"
    )


def _settings(job: Job, *names: str) -> dict[str, Any]:
    """The parts of the configuration that a stage's result depends on."""
    parts = {name: value for name, value in asdict(job.config).items() if name in names}
    if "data" in parts:
        parts["data"].pop("path")  # a local copy of a corpus is the same corpus
    for name in parts:
        if isinstance(getattr(job.config, name), Training):
            parts[name] = {key: value for key, value in parts[name].items() if key not in SAVING}
    return parts
