"""The command ``medusa bench``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from medusa.cli import new_parser, parse
from medusa.errors import UserError

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
    ("temperatures", float, "0 is greedy"),
    ("batch_sizes", int, "rows that are decoded at once"),
]


def bench(argv: list[str]) -> int:
    """Compare plain and speculative decoding."""
    from medusa.checkpoint import CONFIG

    from .bench import BenchOptions, run_bench
    from .bench_axes import BASELINES, AxisOptions
    from .bench_run import run_axes
    from .cli import add_machine, quiet_unless_terminal
    from .drafters import listed

    parser = new_parser(
        "bench",
        "Compare plain and speculative decoding. A run alone is measured on its held-out text, its heads beside plain"
        " decoding. The options with an axis measure every combination of what they name; of anything but a run, that"
        " is the prompt set spec where none is named.",
    )
    parser.add_argument("run", type=str, help="a folder made by `medusa train`, or of a trunk, or a hub id")
    parser.add_argument("--out", type=str, help="where the report goes; left out, into the run's folder")
    add_machine(parser)
    parser.add_class_arguments(BenchOptions)
    for name, kind, says in AXES:
        text = says.format(drafters=listed(), baselines=listed(BASELINES))
        parser.add_argument(f"--{name}", type=kind, nargs="+", help=f"axis: {text}")
    parser.add_argument(
        "--compile", action="store_true", help="compile the trunk's steps in our own loop; of a run alone"
    )
    parser.add_argument("--compile_baseline", action="store_true", help="compile the baseline static")
    parser.add_argument("--ignore_eos", action="store_true", help="all rows are equally long: an EOS ends none")
    args = parse(parser, argv)
    options = BenchOptions(**{field.name: args[field.name] for field in fields(BenchOptions)})
    given = {field.name: args[field.name] for field in fields(AxisOptions)}
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    axes = AxisOptions(**asked)
    quiet_unless_terminal()
    where = {"dtype": args.dtype, "device": args.device}
    if asked or not (Path(args.run).expanduser() / CONFIG).is_file():
        if args.compile:
            raise UserError("--compile is for a run on its held-out text: leave it out, or the options with an axis")
        return run_axes(args.run, options, axes, args.out, **where)
    return run_bench(args.run, options, args.out, compile=args.compile, **where)
