"""The command ``medusa report``."""

from __future__ import annotations

from pathlib import Path

from medusa.cli import new_parser, parse
from medusa.errors import UserError

DESCRIPTION = (
    "Draw the curves of training runs, finished or not, and what came of them: one page to open in a browser, its"
    " pictures, and curves.json. Several runs are drawn into the same pictures, to compare them."
)


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa report ARGV``; return the exit code."""
    parser = new_parser("report", DESCRIPTION)
    parser.add_argument("run", nargs="+", type=str, help="folders made by `medusa train`")
    parser.add_argument("--out", type=str, help="the report's folder; left out, that of the run, and in it report/")
    args = parse(parser, argv)
    folders = [Path(folder).expanduser() for folder in args.run]
    if len(folders) > 1 and args.out is None:
        raise UserError(f"{len(folders)} runs are compared outside of their folders: say where with --out")
    from .report import named
    from .report_page import write_pages

    runs = named(folders)
    place = write_pages(runs, Path(args.out).expanduser() if args.out else folders[0] / "report")
    for each in runs:
        print(f"{each.name}: {each.status()}")
    print(f"Report: {place}")
    return 0
