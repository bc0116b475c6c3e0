"""The command ``medusa train``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa import configs
from medusa.cli import new_parser, parse
from medusa.errors import UserError, nearest
from medusa.launch import WRONG_INPUT, Elsewhere, launched, leave, own_end, speaks

from .config import TrainConfig, keys
from .record import CALIBRATION, MERGED, OWN, PLACE, RUN, STAGES, RunRecord

if TYPE_CHECKING:
    import jsonargparse

USAGE = "medusa train [RECIPE] [OPTIONS]"
DESCRIPTION = (
    "Train speculative heads or an EAGLE layer, and first the trunk where the recipe asks for a new one. RECIPE is a"
    f" YAML file or the name of one that ships with the package ({', '.join(configs.names())}); options override it. A"
    " run that was interrupted, even killed, goes on from its last checkpoint when the same command is given again;"
    " what is made is left as it is."
)


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa train ARGV``; return the exit code."""
    try:
        config, args = read_config(argv)
    except UserError:
        if not speaks():
            return WRONG_INPUT
        raise
    if args.dry_run:
        from .plan import plan

        if speaks():
            print("\n".join(plan(config)))
        return 0
    from transformers.utils import logging

    from .interrupt import Interrupted
    from .stages import train

    logging.disable_progress_bar()  # of loading and saving weights: there is one of our own where it takes long
    try:
        with own_end():
            record = train(config, args.fresh, report=lambda line: print(line, file=sys.stderr, flush=True))
    except Interrupted as stop:
        way = "the same command, started in the same way" if launched() else again(argv)
        print(f"medusa: {stopped(stop.stage, stop.step)}; go on with: {way}", file=sys.stderr)
        return leave(128 + stop.number)
    except Elsewhere as end:
        return leave(end.code)
    if os.environ.get("RANK", "0") == "0":
        print(summary(record))
    return leave(0)


def stopped(stage: str | None, step: int | None) -> str:
    """What an interruption left."""
    if stage is None:
        return "interrupted between the steps of training; what is made is kept"
    return f"interrupted in stage {stage}, " + (f"saved at step {step}" if step is not None else "nothing saved yet")


def again(argv: list[str]) -> str:
    """The command that goes on: that of ``argv``, but for what would begin anew."""
    kept: list[str] = []
    for index, word in enumerate(argv):
        is_value = index > 0 and argv[index - 1] == "--fresh" and word in STAGES
        if not is_value and word.partition("=")[0] != "--fresh":
            kept.append(word)
    return shlex.join(["medusa", "train", *kept])


def read_config(argv: list[str]) -> tuple[TrainConfig, jsonargparse.Namespace]:
    """The configuration that ``argv`` asks for, and the options that are no part of it.

    Raises:
        UserError: an unknown recipe, key or value; the nearest known one is named.
    """
    parser = _parser()
    if not argv:
        raise UserError(f"name a recipe, {', '.join(configs.names())} or a YAML file, or see medusa train --help")
    if not argv[0].startswith("-"):
        argv = ["--config", str(find_recipe(argv[0])), *argv[1:]]
    args = parse(parser, argv, keys())
    made = _instantiated(parser, args)
    config = TrainConfig(**{field.name: made[field.name] for field in fields(TrainConfig)})
    if args.resume:
        check_begun(config, args.fresh)
    return config, args


def _instantiated(parser: jsonargparse.ArgumentParser, args: jsonargparse.Namespace) -> jsonargparse.Namespace:
    """The configuration's parts, made; what an optional one refuses is told as by any other."""
    try:
        return parser.instantiate(args)
    except ValueError as error:  # jsonargparse's own, where a part may also be null
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def check_begun(config: TrainConfig, fresh: str | None) -> None:
    """Refuse to begin a run where one was to be gone on with."""
    if fresh is not None:
        raise UserError(f"--resume goes on and `--fresh {fresh}` begins anew: give one of them")
    folder = Path(config.run).expanduser()
    if not (folder / RUN).is_file():
        raise UserError(f"--resume: {folder} holds no {RUN}, hence no run: give its folder with --run, or leave it out")


def _parser() -> jsonargparse.ArgumentParser:
    parser = new_parser("train", DESCRIPTION)
    parser.usage = USAGE
    parser.add_argument("--config", action="config", help="a recipe, as by its position")
    parser.add_argument("--dry_run", action="store_true", help="say what would be done, and load nothing")
    parser.add_argument(
        "--fresh",
        nargs="?",
        const=next(iter(STAGES)),
        choices=list(STAGES),
        help="make this stage and those after it anew; without a value all of them",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="only go on with a run, as is done anyway where there is one: an error if none was begun in this folder",
    )
    parser.add_class_arguments(TrainConfig)
    return parser


def find_recipe(name: str) -> Path:
    """The YAML file of that path, or the shipped recipe of that name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        return configs.path(name)
    beside = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    raise UserError(
        f"no recipe {name}{nearest(name, [*beside, *configs.names()])}: give a YAML file, or one of"
        f" {', '.join(configs.names())}"
    )


def summary(record: RunRecord) -> str:
    """What was made, and what to do with it."""
    lines = [f"{record.folder}"]
    if "trunk" in record.stages:
        trunk = record.result("trunk")
        lines.append(f"  trunk        {trunk['parameters']:,} parameters, held-out loss {trunk['heldout_loss']:.3f}")
    if record.config.own_text is not None:
        text = record.result("text")
        lines.append(f"  text         {text['texts']:,} of the trunk's own, {text['tokens']:,} tokens, in {OWN}")
    trees, heads, eagle = record.result("calibration"), record.config.heads, record.config.eagle
    if heads is not None:
        size = record.result("heads")["parameters"]
        lines.append(f"  heads        {heads.num} of kind {heads.kind}, {size:,} parameters")
        if record.config.joint is not None:
            lines += _joint(record)
        lines.append(_tree(trees, CALIBRATION))
    if eagle is not None:
        size = record.result("eagle")["parameters"]
        lines.append(f"  eagle        a layer of version {eagle.version}, {size:,} parameters, in {PLACE}")
        lines.append(_tree(trees["eagle"], f"{PLACE / CALIBRATION}"))
    lines.append(f"next: medusa bench {record.folder}")
    return "\n".join(lines)


def _tree(tree: Mapping[str, Any], file: str) -> str:
    return (
        f"  tree         {tree['nodes']} nodes, {tree['depth']} deep: {tree['tokens_per_step']:.2f} tokens per step,"
        f" {tree['tokens_per_second']:.0f} tokens/s ({file} has all sizes)"
    )


def _joint(record: RunRecord) -> Iterator[str]:
    found = record.result("joint")
    yield (
        f"  joint        {found['tokens_per_step']:.2f} tokens per step, before {found['tokens_per_step_before']:.2f};"
        f" held-out loss {found['heldout_loss']:.3f}, before {found['heldout_loss_before']:.3f}"
    )
    changed = "the model was changed" if found["step"] else "which is the trunk as it was"
    yield f"               exact to the merged trunk, {record.folder / MERGED}: {changed}"
    yield f"               the heads before it, on the trunk before it, are in {record.heads_folder}"
