"""The command ``medusa generate``, the way to ``medusa calibrate`` and ``medusa bench``, and what commands share."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse
from medusa.errors import UserError
from medusa.launch import launched, processes

if TYPE_CHECKING:
    import jsonargparse

    from medusa.trunk import Trunk

    from .engine import Completion, Engine


NODES = 16  # tokens of a trial forward: about as many as a tree has nodes

# Options of Engine.generate that the command line has no words for.
IN_PYTHON = {"logits_processor", "stopping_criteria", "sequence_bias", "num_return_sequences"}


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa COMMAND ARGV``; return the exit code."""
    from .bench.cli import bench
    from .calibrate_cli import calibrate

    commands = {"generate": _generate, "calibrate": calibrate, "bench": bench}
    if command == "generate" and launched():
        from medusa.parallel import together

        return together(lambda: _generate(argv))
    return commands[command](argv)


def quiet_unless_terminal() -> None:
    """Loading shows a bar of transformers' own; keep it out of log files."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _generate(argv: list[str]) -> int:
    """Continue a prompt: the text goes to stdout, one line of figures to stderr."""
    from .options import Options

    parser = new_parser("generate", "Continue a prompt: the text goes to stdout, a line of figures to stderr.")
    parser.add_argument("run", type=str, help="a folder made by `medusa train`, or the hub id of one")
    parser.add_argument("--prompt", type=str, help="the text to continue")
    parser.add_argument("--prompt_file", type=str, help="a UTF-8 file that holds it")
    parser.add_argument("--stream", action="store_true", help="print the text while it is decoded")
    parser.add_argument("--json", action="store_true", help="print text, ids and figures as one JSON object")
    _add_decoding(parser)
    parser.add_argument(
        "--tp_plan", type=str, help="auto: share the trunk out over the processes that torchrun started, by its plan"
    )
    args = parse(parser, argv)
    if launched() and args.tp_plan is None:
        raise UserError(f"processes={processes()} without --tp-plan would all do the same: add --tp-plan auto")
    if args.stream and args.json:
        raise UserError("--stream and --json: the JSON is printed at the end, give one of the two")
    if (args.logprobs or args.top_logprobs) and not args.json:
        raise UserError("--logprobs or --top-logprobs without --json, which prints them: add it")
    prompt = _prompt(args)
    engine = _engine(args)
    names = [field.name for field in fields(Options) if field.name not in IN_PYTHON]
    options = {name: args[name] for name in names if args[name] is not None}  # None would undo the model's own
    options["logprobs"] = args.logprobs or bool(args.top_logprobs)
    if args.stream:
        completion = _print_stream(engine, prompt, options)
    else:
        completion = engine.generate(prompt, **options)
        print(json.dumps(_as_json(prompt, completion)) if args.json else prompt + completion.text)
    print(_figures(completion), file=sys.stderr)
    return 0


def _add_decoding(parser: jsonargparse.ArgumentParser) -> None:
    """Where and how to decode, for the commands that do."""
    from .options import Options

    add_engine(parser)
    parser.add_argument(
        "--compile", action="store_true", help="compile the trunk's steps: minutes the first time, see medusa warmup"
    )
    parser.add_argument(
        "--eager", action="store_true", help="do without the compiled steps that medusa warmup left on this machine"
    )
    parser.add_argument("--stop_strings", type=str, nargs="+", help="texts that end the text where they first come")
    parser.add_argument("--logprobs", action="store_true", help="report each token's log-probability; with --json")
    parser.add_class_arguments(Options, skip={"baseline", "stop_strings", "logprobs", *IN_PYTHON})


def add_engine(parser: jsonargparse.ArgumentParser) -> None:
    """What decodes, and where; :func:`load_engine` loads it."""
    from .drafters import listed

    add_machine(parser)
    add_packed(parser)
    parser.add_argument(
        "--threads", type=int, help="processor threads; left out, as many as calibration, or a trial, finds best here"
    )
    parser.add_argument("--baseline", action="store_true", help="decode without drafts: the same text, step by step")
    parser.add_argument("--drafter", type=str, help=f"what guesses ahead, auto if left out: {listed()}")


def add_machine(parser: jsonargparse.ArgumentParser) -> None:
    """What a trunk is loaded in, and where."""
    parser.add_argument(
        "--dtype", type=str, default="auto", help="what the trunk is loaded in, such as float32; auto: its own"
    )
    parser.add_argument("--device", type=str, default="auto", help="where it runs; auto: a GPU where there is one")


def add_packed(parser: jsonargparse.ArgumentParser) -> None:
    """Whether weights are packed for few rows."""
    parser.add_argument(
        "--packed",
        type=bool | None,
        help="keep a second copy of the weights, packed for the few tokens of a step on a processor; left out, where"
        " that is faster and takes no more than half of the free memory",
    )


def _prompt(args: jsonargparse.Namespace) -> str:
    if (args.prompt is None) == (args.prompt_file is None):
        raise UserError("give the prompt by --prompt or by --prompt-file, one of the two")
    if args.prompt is not None:
        return str(args.prompt)
    from medusa.data.corpus import read_text

    return read_text(Path(args.prompt_file).expanduser())


def _engine(args: jsonargparse.Namespace) -> Engine:
    if args.compile and args.eager:
        raise UserError("--compile and --eager: steps run compiled or not, give one of the two")
    engine = load_engine(args)
    if args.compile:
        engine.warmup()
    return engine


def load_engine(args: jsonargparse.Namespace) -> Engine:
    """The engine that the options of :func:`add_engine` name; torch's threads are set."""
    from .engine import Engine
    from .warmup import use_stored

    if args.baseline and args.drafter not in (None, "auto", "none"):
        raise UserError(f"--baseline and --drafter {args.drafter}: one drafts nothing, give the other alone")
    quiet_unless_terminal()
    drafter = "none" if args.baseline else args.drafter or "auto"
    shared_out = {"tp_plan": plan} if (plan := args.get("tp_plan")) is not None else {}
    how = {"dtype": args.dtype, "device": args.device, "packed": args.packed}
    engine = Engine.load(args.run, drafter=drafter, compile=False, **how, **shared_out)
    threads = args.threads
    if threads is None and not shared_out and "OMP_NUM_THREADS" not in os.environ:
        threads = _calibrated_threads(Path(args.run).expanduser())
        threads = threads or fastest_threads(engine.trunk, [0] * NODES)
    set_threads(threads)
    if not args.get("eager"):
        use_stored(engine.trunk, engine.drafter, engine.max_rows)  # for these threads
    return engine


def _calibrated_threads(folder: Path) -> int | None:
    """The threads the run was calibrated with, if that was on such a machine."""
    from medusa.checkpoint import CALIBRATION
    from medusa.files import read_json
    from medusa.machine import describe

    if not (folder / CALIBRATION).is_file():
        return None
    here, there = describe(), read_json(folder / CALIBRATION).get("machine", {})
    return there.get("threads") if all(there.get(key) == here[key] for key in ("processor", "cores")) else None


def set_threads(threads: int | None) -> None:
    """Use the threads asked for, if any number was."""
    import torch

    if threads is not None:
        if threads < 1:
            raise UserError(f"threads={threads}: give at least 1")
        torch.set_num_threads(threads)


def _print_stream(engine: Engine, prompt: str, options: dict[str, object]) -> Completion:
    stream = engine.stream(prompt, **options)
    print(prompt, end="", flush=True)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    assert stream.completion is not None
    return stream.completion


def _as_json(prompt: str, completion: Completion) -> dict[str, object]:
    return {"prompt": prompt, **asdict(completion), "tokens_per_step": completion.tokens_per_step}


def _figures(completion: Completion) -> str:
    tokens = len(completion.token_ids)
    stop = "" if completion.stop is None else f" {completion.stop!r}"
    seed = "" if completion.seed is None else f", seed {completion.seed}"
    lossy = "" if completion.lossless else ", lossy"
    return (
        f"{tokens} tokens in {completion.seconds:.2f} s ({tokens / completion.seconds:.0f} tokens/s),"
        f" {completion.steps} steps, {completion.tokens_per_step:.2f} tokens per step,"
        f" finish reason {completion.finish_reason}{stop}{seed}{lossy}"
    )


def fastest_threads(trunk: Trunk, prompt: list[int]) -> int | None:
    """Found on a forward of about as many positions as a tree has nodes; None where the processor doesn't decode."""
    import torch

    from medusa.machine import pick_threads

    if trunk.device.type != "cpu":
        return None
    ids_1T = torch.tensor([prompt[:NODES]])
    return pick_threads(lambda: trunk.forward(ids_1T))
