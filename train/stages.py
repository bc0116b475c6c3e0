"""The stages of a training run: trunk, text of its own, heads, trunk and heads jointly, an EAGLE layer, calibration.

Each is made if it is asked for, skipped if its result is there and valid, and gone on with if a checkpoint of it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from medusa.calibrate import Calibration, recalibrate
from medusa.checkpoint import CALIBRATION
from medusa.eagle import EagleLayer
from medusa.eagle_calibrate import recalibrate_layer
from medusa.eagle_files import PLACE
from medusa.heads import MedusaHeads
from medusa.machine import pick_device
from medusa.progress import progress

from .checkpoints import told
from .config import NewTrunk, TrainConfig
from .distributed import joined
from .eagle import EagleStage
from .heads import HeadsStage
from .heldout import text_loss
from .interrupt import Interruption
from .job import Job, Report
from .joint import make_joint
from .loop import TrunkTrainer
from .lora import targets
from .newtrunk import check_name, load_trunk, new_model, save_model
from .own_text import make_text
from .pictures import of_calibration
from .record import AGAIN, TRUNK, RunRecord
from .shared import SharedRecord, Unheard
from .text import Corpus
from .tracking import run_log


def train(config: TrainConfig, fresh: str | None = None, report: Report = print) -> RunRecord:
    """Run the stages that are not made yet.

    Args:
        config: what to make.
        fresh: make this stage ("trunk", "text", "heads", "joint", "eagle" or "calibration") and those that rest on it
            anew.
        report: takes a line at the start and end of each stage.

    Returns:
        The record of the run folder, with each stage's result.

    Raises:
        UserError: wrong data, a trunk that is missing or can't be driven, results made with other settings, a disk
            that takes no more.
        Interrupted: SIGTERM or Ctrl-C; called again, this goes on with what was saved.
        Elsewhere: of several processes another one has failed.
    """
    with joined(config) as group, ExitStack() as ending:
        interruption = Interruption()
        ending.enter_context(interruption.watched())
        record = SharedRecord(config, fresh, group)
        say = report if group.leads else _nothing
        log = group.alone(lambda: ending.enter_context(run_log(record.folder, config.tracking, record.content())))
        heard, threads = log or Unheard(record.folder), torch.get_num_threads()
        _train(Job(config, record, heard, Corpus(config, say), say, threads, interruption, group))
        record.stages = group.first(lambda: record.stages)
    return record


def _nothing(line: str) -> None:
    """Reports nothing: one process's reports are enough."""


def _train(job: Job) -> None:
    config = job.config
    if config.trunk.name is not None:
        check_name(config.trunk.name)
    pick_device(config.trunk.device)
    if config.trunk.new is not None:
        make_trunk(job, config.trunk.new)
    trunk = load_trunk(config.trunk, job.folder)
    if trunk.context is not None:
        config.check_context(trunk.context)
    job.log.tell("fingerprint", trunk.fingerprint())
    job.corpus.take_tokenizer(trunk)
    if config.joint is not None:
        targets(trunk, config.joint)  # what can't be adapted is refused before the heads are trained
    if config.own_text is not None:
        make_text(job, trunk, config.own_text)
    heads = None if config.heads is None else HeadsStage(job, trunk, config.heads).make()
    if config.joint is not None and heads is not None:
        heads = make_joint(job, heads, config.joint)
    layer = None if config.eagle is None else EagleStage(job, trunk, config.eagle).make()
    job.group.alone(lambda: make_calibration(job, heads, layer))
    job.group.first(job.forget_held)


def make_trunk(job: Job, new: NewTrunk) -> None:
    """Train a new trunk and save it, with its tokenizer, as an ordinary Hugging Face checkpoint."""
    config, training = job.config, job.config.trunk_training
    settings = job.settings("seed", "data", "trunk_training") | {"trunk.new": asdict(new)}
    folder = job.folder / TRUNK
    if job.is_made("trunk", settings, folder):
        return
    saved = job.record.resumable("trunk", settings)
    rows, heldout = job.rows("trunk", training), job.corpus.heldout_rows()
    job.corpus.heldout_prompts(config.evaluation)  # if the text is too short for the heads' stage, say so now
    if config.own_text is not None:
        job.corpus.beginnings(config.own_text)
    start = job.begin("trunk", saved)
    model = new_model(new, job.corpus.tokenizer, config.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    job.report(f"trunk: {size:,} parameters, {job.amount(training)}")
    trainer = TrunkTrainer(
        model, rows, training, seed=config.seed, device=pick_device(config.trunk.device), group=job.group
    )

    def evaluate(step: int) -> dict[str, Any]:
        return {"heldout_loss": text_loss(trainer.judged, heldout, config.evaluation.rows)}

    def finish() -> None:
        loss = text_loss(trainer.judged, heldout)
        with told("the trunk", folder, AGAIN):
            save_model(folder, trainer.judged, job.corpus.tokenizer)
        job.record.done("trunk", settings, start, {"parameters": size, "heldout_loss": loss})
        job.report(f"trunk: held-out loss {loss:.3f} nats per token; saved in {folder}")

    job.run("trunk", trainer, evaluate, start, settings, saved)
    job.group.alone(finish)


def make_calibration(job: Job, heads: MedusaHeads | None, layer: EagleLayer | None) -> None:
    """Choose the trees that are fastest on this machine: for the heads, and for an EAGLE layer."""
    config = job.config
    settings = job.settings("calibration", "evaluation")
    if job.is_made("calibration", settings, job.folder / (CALIBRATION if heads else PLACE / CALIBRATION)):
        return
    drafts = heads or layer
    assert drafts is not None
    held = job.held(drafts.trunk)
    start = job.begin("calibration")
    ids_1T = torch.tensor([held.ids[0][:16]], device=drafts.trunk.device)  # about as many tokens as a tree has nodes
    job.set_threads(lambda: drafts.trunk.forward(ids_1T))
    result: dict[str, Any] = {}
    if heads is not None:
        found = _calibrated(job, "calibration", partial(recalibrate, job.folder, heads, held))
        result = asdict(found.chosen)
    if layer is not None:
        depth, place = config.eagle_training.depth, job.folder / PLACE
        found = _calibrated(job, "calibration of eagle", partial(recalibrate_layer, place, layer, held, depth))
        result["eagle"] = asdict(found.chosen)
    job.record.done("calibration", settings, start, result)


def _calibrated(job: Job, name: str, work: Callable[..., Calibration]) -> Calibration:
    """Calibrate, with progress, and tell what came of it."""
    sizes, rounds = job.config.calibration.sizes, job.config.calibration.rounds
    with told("the tree", job.folder, AGAIN), progress(rounds, name) as advance:
        found = work(sizes=sizes, rounds=rounds, progress=lambda done, total: advance())
    job.report(
        f"{name}: of {len(found.rows)} trees the one of {found.topology.size} nodes is fastest here:"
        f" {found.chosen.tokens_per_step:.3f} tokens per step, {found.chosen.step_ms:.2f} ms each"
    )
    job.log.pictures(name.replace(" of ", "_"), 0, lambda: of_calibration(found))
    return found
