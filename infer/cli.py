"""The commands ``medusa generate``, ``medusa calibrate`` and ``medusa bench``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.cli import new_parser, parse
from medusa.errors import UserError

if TYPE_CHECKING:
    import jsonargparse

    from medusa.calibrate import Calibration

    from .engine import Completion, Engine

CALIBRATION = "calibration.json"
SPELLING = "The words of an option's name may be joined by - or by _."


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa COMMAND ARGV``; return the exit code."""
    commands = {"generate": _generate, "calibrate": _calibrate, "bench": _bench}
    return commands[command](argv)


def _quiet_unless_terminal() -> None:
    """Loading shows a bar of transformers' own, in log files too."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _generate(argv: list[str]) -> int:
    """Continue a prompt: the text goes to stdout, one line of figures to stderr."""
    from .options import Options

    parser = new_parser("generate", f"Continue a prompt. {SPELLING}")
    parser.add_argument("run", type=str, help="a folder made by `medusa train`, or the hub id of one")
    parser.add_argument("--prompt", type=str, help="the text to continue")
    parser.add_argument("--prompt_file", type=str, help="a UTF-8 file that holds it")
    parser.add_argument("--stream", action="store_true", help="print the text while it is decoded")
    parser.add_argument("--json", action="store_true", help="print text, ids and figures as one JSON object")
    _add_machine(parser)
    parser.add_argument("--baseline", action="store_true", help="decode without drafts: the same text, step by step")
    parser.add_class_arguments(Options, skip={"baseline"})
    args = parse(parser, argv)
    if args.stream and args.json:
        raise UserError("--stream and --json: the JSON is printed at the end, give one of the two")
    prompt = _prompt(args)
    engine = _engine(args)
    options = {field.name: args[field.name] for field in fields(Options)}
    if args.stream:
        completion = _print_stream(engine, prompt, options)
    else:
        completion = engine.generate(prompt, **options)
        print(json.dumps(_as_json(prompt, completion)) if args.json else prompt + completion.text)
    print(_figures(completion), file=sys.stderr)
    return 0


def _add_machine(parser: jsonargparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", type=str, default="auto", help="what the trunk is loaded in")
    parser.add_argument("--device", type=str, help="where it runs, such as cpu or cuda")
    parser.add_argument("--threads", type=int, help="processor threads; by default what calibration found best here")


def _prompt(args: jsonargparse.Namespace) -> str:
    if (args.prompt is None) == (args.prompt_file is None):
        raise UserError("give the prompt by --prompt or by --prompt-file, one of the two")
    if args.prompt is not None:
        return str(args.prompt)
    from medusa.data.corpus import read_text

    return read_text(Path(args.prompt_file).expanduser())


def _engine(args: jsonargparse.Namespace) -> Engine:
    from .engine import Engine

    _quiet_unless_terminal()
    engine = Engine.load(args.run, drafter="none" if args.baseline else "auto", dtype=args.dtype, device=args.device)
    _set_threads(args.threads, Path(args.run).expanduser() / CALIBRATION)
    return engine


def _set_threads(threads: int | None, calibration: Path) -> None:
    """Use the threads asked for, else those the run was calibrated with if that was on such a machine."""
    import torch

    from medusa.files import read_json
    from medusa.machine import describe

    if threads is None and calibration.is_file() and "OMP_NUM_THREADS" not in os.environ:
        here, there = describe(), read_json(calibration).get("machine", {})
        if all(there.get(key) == here[key] for key in ("processor", "cores")):
            threads = there.get("threads")
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
    return (
        f"{tokens} tokens in {completion.seconds:.2f} s ({tokens / completion.seconds:.0f} tokens/s),"
        f" {completion.steps} steps, {completion.tokens_per_step:.2f} tokens per step,"
        f" finish reason {completion.finish_reason}"
    )


def _calibrate(argv: list[str]) -> int:
    """Measure trees on this machine and save the fastest in the run's folder."""
    from medusa.calibrate import SIZES

    parser = new_parser("calibrate", f"Choose the token tree that is fastest on this machine. {SPELLING}")
    parser.add_argument("run", type=str, help="a folder made by `medusa train`")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts; half grow the tree, half judge it")
    parser.add_argument("--prompt_length", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that the trunk continues each by")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of nodes to try")
    parser.add_argument("--rounds", type=int, default=40, help="times each of them is measured")
    _add_machine(parser)
    args = parse(parser, argv)
    for name in ("prompts", "prompt_length", "tokens", "rounds"):
        if args[name] < 1:
            raise UserError(f"{name}={args[name]}: give at least 1")
    if min(args.sizes) < 1:
        raise UserError(f"sizes={args.sizes}: a tree has at least 1 node, the root")
    folder = Path(args.run).expanduser()
    found = _measure(folder, args)
    _print_trees(found)
    print(f"saved in {folder}", file=sys.stderr)
    return 0


def _measure(folder: Path, args: jsonargparse.Namespace) -> Calibration:
    import torch

    from medusa.calibrate import calibrate
    from medusa.checkpoint import load_heads, save_tree
    from medusa.files import write_json
    from medusa.machine import pick_threads
    from medusa.progress import progress

    from .prompts import heldout_prompts
    from .source import load_trunk

    _quiet_unless_terminal()
    trunk = load_trunk(folder, dtype=args.dtype, device=args.device)
    heads = load_heads(folder, trunk)
    prompts = heldout_prompts(folder, args.prompts, args.prompt_length, shift=0.0)
    if args.threads is not None:
        _set_threads(args.threads, folder / CALIBRATION)
    elif trunk.device.type == "cpu":
        ids_1T = torch.tensor([prompts[0][:16]])  # about as many positions as a tree has nodes
        pick_threads(lambda: trunk.forward(ids_1T))
    with progress(args.rounds, "calibrate") as advance:
        found = calibrate(
            trunk,
            heads,
            prompts,
            tokens=args.tokens,
            sizes=args.sizes,
            rounds=args.rounds,
            progress=lambda done, total: advance(),
        )
    save_tree(folder, found.topology)
    write_json(folder / CALIBRATION, found.as_json())
    return found


def _print_trees(found: Calibration) -> None:
    print("nodes  depth  tokens/step  step ms  forward ms  tokens/s")
    for row in found.rows:
        print(
            f"{row.nodes:5}  {row.depth:5}  {row.tokens_per_step:11.2f}  {row.step_ms:7.2f}  {row.forward_ms:10.2f}"
            f"  {row.tokens_per_second:8.0f}{'  <- chosen' if row == found.chosen else ''}"
        )


def _bench(argv: list[str]) -> int:
    """Compare plain and speculative decoding on held-out prompts."""
    from .bench import BenchOptions, run_bench

    parser = new_parser("bench", f"Compare plain and speculative decoding on held-out prompts. {SPELLING}")
    parser.add_argument("run", type=str, help="a folder made by `medusa train`")
    parser.add_argument("--out", type=str, help="where the report goes, by default the run's folder report")
    parser.add_class_arguments(BenchOptions)
    args = parse(parser, argv)
    options = BenchOptions(**{field.name: args[field.name] for field in fields(BenchOptions)})
    _quiet_unless_terminal()
    return run_bench(args.run, options, args.out)
