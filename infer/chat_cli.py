"""The command ``medusa chat``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from medusa.cli import new_parser, parse
from medusa.errors import UserError, nearest

from .cli import IN_PYTHON, _add_decoding, _engine

if TYPE_CHECKING:
    import jsonargparse

    from .chat import Conversation
    from .engine import Completion

LEAVE = ("/quit", "/exit")
COMMANDS = {
    "/undo": "forget the last question and its answer",
    "/reset": "forget all of them",
    "/help": "these lines",
    "/quit": "leave; so does Ctrl-D",
}
ASK = "> "


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa chat ARGV``; return the exit code."""
    from .options import Options

    args = parse(_parser(), argv)
    _check(args)
    plain = not args.baseline and args.drafter in (None, "auto") and not _has_drafts(args.run)
    args.baseline = args.baseline or plain
    engine = _engine(args)
    names = [field.name for field in fields(Options) if field.name not in (*IN_PYTHON, "baseline")]
    options = {name: args[name] for name in names if args[name] is not None}  # None would undo the model's own
    options["logprobs"] = args.logprobs or bool(args.top_logprobs)
    conversation = engine.conversation(args.system, chat_template_kwargs=args.chat_template_kwargs, **options)
    if plain:
        _note(f"no heads in {args.run}: the answers are decoded without drafts")
    if args.message is None:
        return _loop(conversation)
    if args.json:
        completion = conversation.say(args.message)
        print(json.dumps(_as_json(conversation, completion)))
        _note(_figures(conversation, completion))
    else:
        _answer(conversation, args.message, lambda: False)
    return 0


def _parser() -> jsonargparse.ArgumentParser:

    parser = new_parser("chat", "Chat with a model; the answers go to stdout, all else to stderr.")
    parser.add_argument(
        "run", type=str, help="a folder made by `medusa train`, or a trunk's folder, or the hub id of either"
    )
    parser.add_argument("--system", type=str, help="what the model is told first; left out, the template says it")
    parser.add_argument("--message", type=str, help="one question: answer it and end")
    parser.add_argument(
        "--json", action="store_true", help="print messages, ids and figures as one JSON object; with --message"
    )
    parser.add_argument(
        "--chat_template_kwargs",
        type=dict[str, Any],
        help="the template's own variables, such as '{enable_thinking: false}'",
    )
    _add_decoding(parser)
    return parser


def _check(args: jsonargparse.Namespace) -> None:
    if args.json and args.message is None:
        raise UserError("--json without --message: it prints one answer, give the question by --message")
    if (args.logprobs or args.top_logprobs) and not args.json:
        raise UserError("--logprobs or --top-logprobs without --json, which prints them: add it")


def _has_drafts(source: str) -> bool:
    from .drafters import has_drafts
    from .source import find

    return has_drafts(find(source, None))


def _loop(conversation: Conversation) -> int:
    """Ask and answer until the input ends. Off a terminal every line of stdin is a question."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):  # keys that edit the line, where Python has it
            import readline  # noqa: F401
        _note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            line = _ask(at_terminal)
            if line is None or line.strip() in LEAVE:
                return 0
            _turn(conversation, line, at_terminal)
        except KeyboardInterrupt:  # while a line is waited for, or before its answer has begun
            if not at_terminal:
                raise
            print(file=sys.stderr)
            _note("Ctrl-D or /quit leaves")
        except UserError as error:
            if not at_terminal:
                raise
            print(f"medusa: {error}", file=sys.stderr)


def _ask(at_terminal: bool) -> str | None:
    """The next line that is not empty; None at the end of the input."""
    while True:
        try:
            if at_terminal and not sys.stdout.isatty():  # the answers alone go where stdout does
                print(ASK, end="", file=sys.stderr, flush=True)
            line = input(ASK if at_terminal and sys.stdout.isatty() else "")
        except EOFError:
            if at_terminal:
                print(file=sys.stderr)
            return None
        if line.strip():
            return line


def _turn(conversation: Conversation, line: str, at_terminal: bool) -> None:
    """Follow a command, or answer. A command is one word; a message may begin with such a word."""
    word = line.strip()
    if not word.startswith("/") or len(word.split()) > 1:
        known, whole = len(conversation.messages), False
        with _interruptible() if at_terminal else nullcontext(lambda: False) as interrupted:
            whole = _answer(conversation, line, interrupted)
        if not whole:
            kept = len(conversation.messages) > known
            print(flush=True)
            _note("stopped; /undo forgets what was said" if kept else "stopped; the question is forgotten")
    elif word == "/undo":
        _note(f"forgotten: {conversation.undo():.60}")
    elif word == "/reset":
        conversation.reset()
        _note("all forgotten")
    elif word == "/help":
        _note("\n".join(f"{name:<8}{what}" for name, what in COMMANDS.items()))
    else:
        raise UserError(f"no command {word:.60}{nearest(word, COMMANDS)}: /help lists them")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Take the first Ctrl-C as a wish, for the step under way to end well; the second breaks it off."""
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def wish(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, wish)
    try:
        with suppress(KeyboardInterrupt):
            yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(conversation: Conversation, text: str, interrupted: Callable[[], bool]) -> bool:
    """Print the answer while it comes, then its figures; return whether it is whole."""
    with conversation.stream(text) as stream:
        while not interrupted() and (piece := next(stream, None)) is not None:
            print(piece, end="", flush=True)
    if stream.completion is None:
        return False
    print(flush=True)
    _note(_figures(conversation, stream.completion))
    return True


def _as_json(conversation: Conversation, completion: Completion) -> dict[str, Any]:
    figures = {"tokens_per_step": completion.tokens_per_step}
    return {"messages": conversation.messages, **asdict(completion), **figures}


def _figures(conversation: Conversation, completion: Completion) -> str:
    tokens, prompt = len(completion.token_ids), len(completion.prompt_ids)
    cut = ", cut at the limit (--max-new-tokens)" if completion.finish_reason == "length" else ""
    seed = "" if completion.seed is None else f", seed {completion.seed}"
    lossy = "" if completion.lossless else ", lossy"
    return (
        f"{tokens} tokens in {completion.seconds:.2f} s ({tokens / completion.seconds:.0f} tokens/s),"
        f" {completion.tokens_per_step:.2f} tokens per step,"
        f" {prompt - conversation.reused} of {prompt} prompt tokens read{cut}{seed}{lossy}"
    )


def _note(text: str) -> None:
    """Say something beside the chat: on stderr, dim on a terminal."""
    dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)
