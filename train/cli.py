"""The command ``medusa train``."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from medusa import configs
from medusa.cli import new_parser, parse
from medusa.errors import UserError, nearest

from .config import TrainConfig, keys
from .record import CALIBRATION, STAGES, RunRecord

if TYPE_CHECKING:
    import jsonargparse

USAGE = "medusa train [RECIPE] [OPTIONS]"
DESCRIPTION = (
    "Train speculative heads, and first the trunk where the recipe asks for a new one. RECIPE is a YAML file or the"
    f" name of one that ships with the package ({', '.join(configs.names())}); options override it."
)


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa train ARGV``; return the exit code."""
    config, args = read_config(argv)
    if args.dry_run:
        from .plan import plan

        print("\n".join(plan(config)))
        return 0
    from transformers.utils import logging

    from .stages import train

    logging.disable_progress_bar()  # of loading and saving weights: there is one of our own where it takes long
    record = train(config, args.fresh, report=lambda line: print(line, file=sys.stderr, flush=True))
    print(summary(record))
    return 0


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
    made = parser.instantiate(args)
    return TrainConfig(**{field.name: made[field.name] for field in fields(TrainConfig)}), args


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
    heads, tree = record.result("heads"), record.result("calibration")
    config = record.config.heads
    lines.append(f"  heads        {config.num} of kind {config.kind}, {heads['parameters']:,} parameters")
    lines.append(
        f"  tree         {tree['nodes']} nodes, {tree['depth']} deep: {tree['tokens_per_step']:.2f} tokens per step,"
        f" {tree['tokens_per_second']:.0f} tokens/s ({CALIBRATION} has all sizes)"
    )
    lines.append(f"next: medusa bench {record.folder}")
    return "\n".join(lines)
