"""The command ``medusa bench``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.cli import new_parser, parse
from medusa.errors import UserError

if TYPE_CHECKING:
    import jsonargparse

    from .run import BenchOptions

# The axes as options that take several values: name, kind, and what --help says.
AXES: list[tuple[str, type, str]] = [
    ("prompt_set", str, "heldout, tinyshakespeare, spec (questions in Spec-Bench's categories), or .jsonl files"),
    ("categories", str, "which categories of the questions; left out, all, in turns"),
    (
        "drafters",
        str,
        "{drafters}; +typical behind a name accepts by the typical rule, which is lossy",
    ),
    ("baselines", str, "of the library, beside generate: {baselines}"),
    ("temperatures", float, "0 is greedy, and measured where none is named"),
    ("draft_temperatures", float, "of drafts that are drawn in rows that sample, each times the row's own; 1 is usual"),
    ("batch_sizes", int, "rows that are decoded at once"),
]


def bench(argv: list[str]) -> int:
    """Compare plain and speculative decoding."""
    from medusa.checkpoint import CONFIG

    from ..cli import quiet_unless_terminal
    from .axes import AxisOptions
    from .grid import run_axes
    from .profile import WALL
    from .run import BenchOptions, run_bench

    args = parse(_parser(), argv)
    options = BenchOptions(**{field.name: args[field.name] for field in fields(BenchOptions)})
    given = {field.name: args[field.name] for field in fields(AxisOptions)}
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    axes = AxisOptions(**asked)
    quiet_unless_terminal()
    how = {name: args[name] for name in ("dtype", "device", "packed", "compile")}
    if args.profile:
        return _profile(args, options, asked, how)
    if args.profile_clock != WALL:
        raise UserError(f"--profile-clock {args.profile_clock} without --profile, which it is for: add that")
    if asked or not (Path(args.run).expanduser() / CONFIG).is_file():
        return run_axes(args.run, options, axes, args.out, **how)
    return run_bench(args.run, options, args.out, **how)


def _parser() -> jsonargparse.ArgumentParser:
    from ..cli import add_machine, add_packed
    from ..drafters import listed
    from .axes import BASELINES
    from .profile import CLOCKS, WALL
    from .run import BenchOptions

    parser = new_parser(
        "bench",
        "Compare plain and speculative decoding. A run alone is measured on its held-out text, its heads beside plain"
        " decoding. The options with an axis measure every combination of what they name; of anything but a run, that"
        " is the prompt set spec where none is named.",
    )
    parser.add_argument("run", type=str, help="a folder made by `medusa train`, or of a trunk, or a hub id")
    parser.add_argument("--out", type=str, help="where the report goes; left out, into the run's folder")
    add_machine(parser)
    add_packed(parser)
    parser.add_class_arguments(BenchOptions)
    for name, kind, says in AXES:
        text = says.format(drafters=listed(), baselines=listed(BASELINES))
        parser.add_argument(f"--{name}", type=kind, nargs="+", help=f"axis: {text}")
    parser.add_argument("--compile", action="store_true", help="compile the trunk's steps in our own loop")
    parser.add_argument("--compile_baseline", action="store_true", help="compile the baseline static")
    parser.add_argument("--ignore_eos", action="store_true", help="all rows are equally long: an EOS ends none")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="instead, take steps apart: what each part takes, and how far the machine's limits are; goes with"
        " --drafters, one --prompt-set and --compile",
    )
    parser.add_argument(
        "--profile_clock", choices=list(CLOCKS), default=WALL, help="cpu: processor time, where others use the machine"
    )
    return parser


def _profile(args: jsonargparse.Namespace, options: BenchOptions, asked: dict[str, Any], how: dict[str, Any]) -> int:
    """Take steps apart; of the axes ``asked`` for, that knows drafters and one prompt set."""
    from .profile_run import run_profile

    drafters, sets = asked.pop("drafters", None), asked.pop("prompt_set", [None])
    if asked or len(sets) > 1:
        other = f"--{next(iter(asked))}".replace("_", "-") if asked else "second --prompt-set"
        raise UserError(f"--profile takes no {other}: leave it out")
    return run_profile(args.run, options, drafters, sets[0], args.out, clock=args.profile_clock, **how)
