"""The commands ``medusa export`` and ``medusa push``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse

if TYPE_CHECKING:
    from .write import Exported

MB = 1e6


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa COMMAND ARGV``; return the exit code."""
    return {"export": _export, "push": _push}[command](argv)


def _export(argv: list[str]) -> int:
    """Write heads for another engine."""
    from medusa.matrices import DTYPES

    from ..cli import quiet_unless_terminal
    from .write import FORMATS, export_run

    parser = new_parser(
        "export",
        "Write heads in the layout of another engine, into a new folder with a model card. What was written is read"
        " again as that engine reads it, and compared with the heads, before it is put there.",
    )
    parser.add_argument("run", type=str, help="a folder made by `medusa train`, or published heads, or a hub id")
    parser.add_argument("--to", type=str, required=True, help=f"the format: {', '.join(FORMATS)}")
    parser.add_argument("--out", type=str, required=True, help="the folder to make")
    parser.add_argument(
        "--dtype", type=str, default="auto", help=f"of the weights: {', '.join(DTYPES)}; auto: as they are saved"
    )
    parser.add_argument(
        "--base", type=str, help="the hub id or folder of the trunk, for the engine; left out, where it is here"
    )
    parser.add_argument("--device", type=str, default="auto", help="where the trunk runs; auto: a GPU if there is one")
    args = parse(parser, argv)
    quiet_unless_terminal()
    _report(export_run(args.run, args.to, args.out, dtype=args.dtype, base=args.base, device=args.device))
    return 0


def _report(made: Exported) -> None:
    from .cards import nearness

    files = ", ".join(f"{name} ({size / MB:.1f} MB)" for name, size in made.sizes.items())
    found = made.agreement
    print(f"{made.to}: {made.folder}: {files}, README.md")
    print(
        f"read again: {found.tensors} tensors; the logits of what was trained, {nearness(found.error)}; the same first"
        f" choices at {found.same} of {found.positions} positions"
    )
    for note in made.notes:
        print(f"note: {note}")


def _push(argv: list[str]) -> int:
    """Upload a folder to the hub."""
    from .push import push

    parser = new_parser(
        "push",
        "Upload a folder made by `medusa export`, or heads, tree and trunk of one made by `medusa train`, to the"
        " Hugging Face hub. The token is what `hf auth login` keeps, or HF_TOKEN.",
    )
    parser.add_argument("folder", type=str, help="one made by `medusa export` or `medusa train`")
    parser.add_argument("--repo", type=str, required=True, help="the repository to make, as NAME or OWNER/NAME")
    parser.add_argument("--private", action="store_true", help="make it private; of one that is new")
    parser.add_argument("--update", action="store_true", help="add to a repository that is there")
    parser.add_argument("--message", type=str, help="of the commit; left out, what the folder is")
    args = parse(parser, argv)
    given = {name: args[name] for name in ("private", "update", "message")}
    print(push(Path(args.folder).expanduser(), args.repo, **given))
    return 0
