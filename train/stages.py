"""The stages of a training run: trunk, heads, calibration. Each is skipped if its result is there and valid."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medusa.calibrate import Continuations, continuations, recalibrate
from medusa.checkpoint import CALIBRATION, load_heads, save_heads, save_tree
from medusa.heads import MedusaHeads
from medusa.machine import pick_device, pick_threads
from medusa.progress import progress
from medusa.trunk import Trunk

from .config import NewTrunk, TrainConfig
from .heldout import HeadsEvaluation, text_loss
from .loop import HeadsObjective, HeadsTrainer, StageTrainer, TrunkTrainer, follow
from .newtrunk import check_name, digest, load_trunk, new_model, save_model
from .record import TRUNK, RunRecord
from .text import Corpus
from .tracking import RunLog, run_log

Report = Callable[[str], None]


@dataclass
class Job:
    """A run under way, as its stages see it. ``threads`` is what torch started with."""

    config: TrainConfig
    record: RunRecord
    log: RunLog
    corpus: Corpus
    report: Report
    threads: int
    _held: Continuations | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.record.folder

    def set_threads(self, work: Callable[[], object]) -> None:
        """Use the number of threads asked for, or the one that does ``work`` fastest."""
        asked = self.config.threads
        torch.set_num_threads(self.threads if asked == "auto" else asked)
        if asked == "auto" and pick_device(self.config.trunk.device).type == "cpu":
            pick_threads(work)

    def begin(self, stage: str) -> float:
        """Start a stage: clear what an earlier try left, and return the time."""
        self.record.begin(stage)
        self.log.begin(stage)
        return time.perf_counter()

    def run(self, stage: str, trainer: StageTrainer, evaluate: Callable[[int], dict[str, Any]]) -> None:
        """Train a stage to its end."""
        self.set_threads(trainer.try_step)
        write = partial(self.log.write, stage)
        follow(trainer, stage, evaluate, write, auto_threads=self.config.threads == "auto")

    def held(self, trunk: Trunk) -> Continuations:
        """The trunk's own greedy continuations of held-out prompts, made once: heads and trees are judged by them."""
        if self._held is None:
            evaluation = self.config.evaluation
            prompts = self.corpus.heldout_prompts(evaluation)
            ids_1T = torch.tensor(prompts[:1], device=trunk.device)
            self.set_threads(lambda: trunk.forward(ids_1T))
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
        UserError: wrong data, a trunk that is missing or can't be driven, results made with other settings.
    """
    record = RunRecord(config, fresh)
    if config.trunk.name is not None:
        check_name(config.trunk.name)
    pick_device(config.trunk.device)
    with run_log(record.folder, config.tracking, asdict(config)) as log:
        job = Job(config, record, log, Corpus(config, report), report, torch.get_num_threads())
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
    if job.record.is_made("trunk", settings):
        job.report(f"trunk: {folder} is there")
        return
    rows, heldout = job.corpus.training_rows(training.steps, training.batch), job.corpus.heldout_rows()
    job.corpus.heldout_prompts(config.evaluation)  # if the text is too short for the heads' stage, say so now
    start = job.begin("trunk")
    model = new_model(new, job.corpus.tokenizer, config.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    job.report(f"trunk: {size:,} parameters, {training.steps} steps of {training.batch} x {config.data.block} tokens")
    trainer = TrunkTrainer(model, rows, training, seed=config.seed, device=pick_device(config.trunk.device))
    job.run("trunk", trainer, lambda step: {"heldout_loss": text_loss(model, heldout, config.evaluation.rows)})
    loss = text_loss(model, heldout)
    save_model(folder, model, job.corpus.tokenizer)
    job.record.done("trunk", settings, start, {"parameters": size, "heldout_loss": loss})
    job.report(f"trunk: held-out loss {loss:.3f} nats per token; saved in {folder}")


def make_heads(job: Job, trunk: Trunk) -> MedusaHeads:
    """Train heads on the frozen trunk; save the best ones, with the tree they were judged by."""
    config, training = job.config, job.config.heads_training
    settings = {"trunk": trunk.fingerprint()} | _settings(job, "seed", "data", "heads", "heads_training", "evaluation")
    if job.record.is_made("heads", settings):
        job.report(f"heads: those in {job.folder} are there")
        return load_heads(job.folder, trunk)
    rows = job.corpus.training_rows(training.steps, training.batch)
    held = job.held(trunk)
    start = job.begin("heads")
    heads = MedusaHeads(config.heads, trunk)
    size = sum(parameter.numel() for parameter in heads.parameters())
    job.report(
        f"heads: {heads.config.num} of kind {heads.config.kind}, {size:,} parameters, {training.steps} steps of"
        f" {training.batch} x {config.data.block} tokens"
    )
    evaluation = HeadsEvaluation(heads, held, config.evaluation.nodes)
    trainer = HeadsTrainer(HeadsObjective(heads, training), rows, training, seed=config.seed, device=trunk.device)
    before = digest(trunk)
    job.run("heads", trainer, evaluation)
    if digest(trunk) != before:
        raise RuntimeError("the trunk's weights changed while only the heads were trained")
    evaluation.restore_best()
    save_heads(job.folder, heads.eval(), config.trunk.name or str(job.folder / TRUNK), config.trunk.revision)
    save_tree(job.folder, evaluation.tree)
    best = {"tokens_per_step": evaluation.tokens_per_step, "nodes": evaluation.tree.size, "step": evaluation.step}
    job.record.done("heads", settings, start, {"parameters": size} | best)
    job.report(
        f"heads: {evaluation.tokens_per_step:.3f} tokens per step with a tree of {evaluation.tree.size} nodes, best"
        f" after {evaluation.step} steps; saved in {job.folder}"
    )
    return heads


def make_calibration(job: Job, heads: MedusaHeads) -> None:
    """Choose the tree that is fastest on this machine."""
    config = job.config
    settings = _settings(job, "calibration", "evaluation")
    if job.record.is_made("calibration", settings):
        job.report(f"calibration: {job.folder / CALIBRATION} is there")
        return
    held = job.held(heads.trunk)
    start = job.begin("calibration")
    ids_1T = torch.tensor([held.ids[0][:16]], device=heads.trunk.device)  # about as many tokens as a tree has nodes
    job.set_threads(lambda: heads.trunk.forward(ids_1T))
    sizes, rounds = config.calibration.sizes, config.calibration.rounds
    with progress(rounds, "calibration") as advance:
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
    return parts
