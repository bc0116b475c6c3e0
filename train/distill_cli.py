"""The command ``medusa distill``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse
from medusa.errors import UserError

if TYPE_CHECKING:
    import jsonargparse

    from medusa.drafters.base import Drafter
    from medusa.trunk import Trunk

    from .distill_run import Distillation

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as shells give them
DESCRIPTION = (
    "Let a trunk answer prompts, for heads to learn from what it really says: a JSON line per answer, with the token"
    " ids. Stopped at any moment, it goes on with the same command."
)


class _Terminated(BaseException):
    """SIGTERM came."""


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa distill ARGV``; return the exit code."""
    args = parse(_parser(), argv)
    code, what = 0, ""
    try:
        with _sigterm_raises():
            work = _prepare(args)
            try:
                work.run()
            except (KeyboardInterrupt, _Terminated) as stop:
                code = INTERRUPTED if isinstance(stop, KeyboardInterrupt) else TERMINATED
                what = f"{work.tally.text()} are kept, go on with the same command"
    except _Terminated:
        code, what = TERMINATED, "nothing was begun"
    if code:
        print(f"medusa: stopped; {what}", file=sys.stderr)
        return code
    print(f"{work.places.answers}\n  {work.tally.text()}")
    return 0


def _parser() -> jsonargparse.ArgumentParser:
    from .distill import DistillConfig
    from .prompts import OwnPrompts

    parser = new_parser("distill", DESCRIPTION)
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_argument("trunk", type=str, help="a folder or hub id of a model, or a folder made by `medusa train`")
    parser.add_argument(
        "--out", type=str, required=True, help="a folder for the answers, or their file, which ends with .jsonl"
    )
    parser.add_argument(
        "--prompts",
        type=str,
        help="a .jsonl file with prompt or messages, and perhaps id, per line, or a text with a prompt per line; left"
        " out, the model writes its own prompts",
    )
    parser.add_class_arguments(DistillConfig)
    parser.add_class_arguments(OwnPrompts, "own")
    parser.add_argument("--system", type=str, help="a system turn before each prompt; left out, the template says it")
    parser.add_argument("--heads", type=str, help="a folder made by `medusa train`: decode with its heads, faster")
    parser.add_argument("--rows", type=int, default=32, help="texts decoded at once")
    parser.add_argument("--dtype", type=str, default="auto", help="what the trunk is loaded in; auto: its own")
    parser.add_argument("--device", type=str, default="auto", help="where it runs; auto: a GPU where there is one")
    parser.add_argument("--threads", type=int, help="processor threads; left out, 1 or all, whichever is faster now")
    return parser


def _prepare(args: jsonargparse.Namespace) -> Distillation:
    """Load what is needed and see that it fits what is there."""
    from transformers.utils import logging

    from .distill import DistillConfig
    from .distill_run import Distillation, Places
    from .prompts import OwnPrompts

    config = DistillConfig(**{field.name: args[field.name] for field in fields(DistillConfig)})
    own = OwnPrompts(**{field.name: args.own[field.name] for field in fields(OwnPrompts)})
    source = own if args.prompts is None else Path(args.prompts).expanduser()
    if isinstance(source, Path) and not source.is_file():
        raise UserError(f"no file {source}: give one with a prompt per line by --prompts, or leave that out")
    if isinstance(source, Path) and own != OwnPrompts():
        raise UserError("--prompts and --own: the one reads prompts, the other has them written, give one of the two")
    for name in ("rows", "threads"):
        if args[name] is not None and args[name] < 1:
            raise UserError(f"{name}={args[name]}: give at least 1")
    Places.at(args.out)  # before gigabytes are read
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    trunk = _load_trunk(args)
    drafter = _load_drafter(args, trunk)
    _set_threads(args, trunk)
    return Distillation(
        trunk,
        args.out,
        source,
        config,
        drafter=drafter,
        system=args.system,
        rows=args.rows,
        name=args.trunk,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _load_trunk(args: jsonargparse.Namespace) -> Trunk:
    import torch

    from medusa.checkpoint import MANIFEST, read_manifest, trunk_source
    from medusa.packed import settle_products
    from medusa.trunk import Trunk

    folder, name, revision = Path(args.trunk).expanduser(), args.trunk, None
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        name, revision = trunk_source(folder, manifest), manifest.revision
    elif folder.is_dir():
        name = str(folder)
    trunk = Trunk.load(name, dtype=args.dtype, device=args.device, revision=revision, packed=False)
    if trunk.dtype is torch.bfloat16:
        # The same products to the bit. In fp32 they are rounded otherwise, and which are faster is a trial: a set that
        # goes on must be the one that was never broken off.
        settle_products(trunk.model)
    return trunk


def _load_drafter(args: jsonargparse.Namespace, trunk: Trunk) -> Drafter | None:
    if args.heads is None:
        return None
    from medusa.checkpoint import load_heads, load_tree
    from medusa.drafters.medusa import MedusaDrafter

    folder = Path(args.heads).expanduser()
    heads = load_heads(folder, trunk)
    return MedusaDrafter(heads, load_tree(folder, heads.config))


def _set_threads(args: jsonargparse.Namespace, trunk: Trunk) -> None:
    import torch

    from medusa.machine import pick_threads

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    elif trunk.device.type == "cpu":
        ids_BT = torch.zeros(args.rows, 1, dtype=torch.long)
        pick_threads(lambda: trunk.forward(ids_BT), repeats=3)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does."""

    def leave(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
