"""The command ``medusa serve``."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse
from medusa.errors import UserError, reason

from ..cli import add_engine, load_engine

if TYPE_CHECKING:
    import jsonargparse

    from .serving import Settings

KEY = "MEDUSA_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa serve ARGV``; return the exit code."""
    args = parse(_parser(), argv)
    if not args.grace >= 0:
        raise UserError(f"grace={args.grace}: give seconds from 0 up")
    settings = _settings(args)
    from .app import check_packages, create_app, serve, urls

    check_packages()
    with _listener(args.host, args.port) as listener:
        _draft_nothing_without_heads(args)
        engine = load_engine(args)
        app = create_app(engine, settings)
        listener.listen(128)
        found = urls(listener)
        _note(f"{settings.name} is served: {found['page']} is a page to chat, {found['api']} the API; Ctrl-C stops")
        if settings.key is None and args.host not in LOOPBACK:
            _note(f"whoever reaches {args.host} may use it: set {KEY} or --api-key-file to ask for a key")
        serve(app, listener, args.grace)
    return 0


def _parser() -> jsonargparse.ArgumentParser:
    parser = new_parser("serve", "Serve a model over HTTP, as OpenAI's API has it, and a page to chat.")
    parser.add_argument(
        "run", type=str, help="a folder made by `medusa train`, or a trunk's folder, or the hub id of either"
    )
    parser.add_argument("--host", type=str, default="127.0.0.1", help="the address to listen at")
    parser.add_argument("--port", type=int, default=8000, help="the port; 0 takes a free one")
    parser.add_argument("--name", type=str, help="what the model is called; left out, as its folder is")
    parser.add_argument("--rows", type=int, default=8, help="answers decoded at once")
    parser.add_argument("--queue", type=int, default=64, help="answers that may wait beyond them")
    parser.add_argument("--context", type=int, help="tokens that a text may reach, where that is less than the trunk's")
    parser.add_argument("--body", type=int, default=1 << 20, help="bytes of a request")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request, waiting included")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for answers under way when it is stopped")
    parser.add_argument("--api_key_file", type=str, help=f"a file with the bearer token to ask for, or set {KEY}")
    parser.add_argument(
        "--allowed_hosts", type=str, nargs="+", help="names it may be asked by; at a loopback address its own alone"
    )
    add_engine(parser)
    return parser


def _settings(args: jsonargparse.Namespace) -> Settings:
    from .serving import Settings

    hosts = tuple(args.allowed_hosts or ())
    if args.host in LOOPBACK:
        hosts = (*LOOPBACK, *hosts)
    return Settings(
        name=args.name or Path(args.run).expanduser().resolve().name,
        rows=args.rows,
        queue=args.queue,
        context=args.context,
        body=args.body,
        timeout=args.timeout,
        key=_key(args.api_key_file),
        hosts=tuple(host.lower() for host in hosts),
    )


def _key(file: str | None) -> str | None:
    """The bearer token; never on the command line, which every user of the machine may read."""
    if file is None:
        return os.environ.get(KEY)
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{file} can't be read ({reason(error)}): give a file that holds the key") from error
    if not key:
        raise UserError(f"{file} is empty: give a file that holds the key")
    return key


def _listener(host: str, port: int) -> socket.socket:
    """A socket bound there: taken before a model is loaded."""
    if not 0 <= port < 1 << 16:  # the system would take what is left of it by 65536
        raise UserError(f"--port {port}: give one in 0..65535; 0 takes a free one")
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port} can't be listened at ({reason(error)}): give another; port 0 takes a free one"
        ) from error
    return listener


def _draft_nothing_without_heads(args: jsonargparse.Namespace) -> None:
    from ..drafters import has_drafts
    from ..source import find

    if not args.baseline and args.drafter in (None, "auto") and not has_drafts(find(args.run, None)):
        args.baseline = True
        _note(f"no heads in {args.run}: answers are decoded without drafts")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
