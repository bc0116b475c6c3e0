"""This engine against its peers on one trunk: plain generate, a static cache, assisted generation.

    python benchmarks/peers.py runs/tinyshakespeare --cut 2
    python benchmarks/peers.py smollm2 --cut 10 --prompts 8 --max-new-tokens 128

The same as `medusa bench RUN --baselines static prompt-lookup cut:LAYERS`, whose report it writes too: contenders take
turns prompt by prompt, in one process. To that it adds what each of ours is to *each* peer, and not to plain generate
alone: a prompt's ratio of seconds per token is the median over repeats of two runs that stood next to each other in
time; told are the median over prompts, with its bootstrapped 95 % interval.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from medusa.errors import UserError
from medusa.files import read_json, write_json
from medusa.infer.bench.axes import AxisOptions
from medusa.infer.bench.grid import run_axes
from medusa.infer.bench.run import BenchOptions
from medusa.infer.bench.summary import interval


def ratios(cell: dict[str, Any], ours: str, peer: str, seed: int) -> dict[str, Any]:
    """How many times faster ``ours`` is than ``peer`` per token, from the prompt's ids to the last token."""
    each = []
    for mine, theirs in zip(*(cell["contenders"][name]["trials"] for name in (ours, peer)), strict=True):
        pairs = zip(mine, theirs, strict=True)
        each.append(median(b["seconds"] / b["tokens"] / (a["seconds"] / a["tokens"]) for a, b in pairs))
    low, high = interval(each, median, seed)
    return {"ours": ours, "peer": peer, "median": median(each), "low": low, "high": high, "prompts": len(each)}


def compared(report: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Each of ours over each peer, and our heads over our own plain decoding, cell by cell."""
    mine = {name for name, each in report["contenders"].items() if each["ours"]}
    rows = []
    for cell in report["cells"]:
        about = {key: cell[key] for key in ("prompt_set", "temperature", "batch_size")}
        names = list(cell["contenders"])
        for ours in (name for name in names if name in mine):
            peers = [name for name in names if name not in mine] + (["none"] if ours != "none" in names else [])
            rows += [about | ratios(cell, ours, peer, seed) for peer in peers]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the ratios."""
    print(f"\n{'ours':24}{'over':28}{'times':>7}   95 % interval  prompts")
    for row in rows:
        span = f"{row['low']:.2f} to {row['high']:.2f}"
        print(f"{row['ours']:24}{row['peer']:28}{row['median']:7.2f}   {span:>13}  {row['prompts']:7}")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 if an output of ours is not the trunk's own, 2 for what can't be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run, the name of shipped heads, a trunk's folder, or a hub id")
    parser.add_argument("--drafters", nargs="+", help="ours; left out, no drafts and the folder's own heads")
    parser.add_argument("--cut", type=int, default=2, help="layers of the cut that drafts for the library")
    parser.add_argument("--prompt-set", nargs="+")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="left out, 1 or all, whichever suits generate better")
    parser.add_argument("--compile-baseline", action="store_true", help="compile the library's static cache")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("peers"), help="the folder that reports are written to")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """The benchmark, and what comes of it."""
    options = BenchOptions(args.prompts, args.prompt_length, args.max_new_tokens, args.repeats, args.seed, args.threads)
    axes = AxisOptions(
        prompt_set=args.prompt_set,
        drafters=args.drafters,
        baselines=["static", "prompt-lookup", f"cut:{args.cut}"],
        compile_baseline=args.compile_baseline,
        ignore_eos=True,
    )
    code = run_axes(args.run, options, axes, str(args.out), dtype=args.dtype, device=args.device)
    report = read_json(args.out / "report.json")
    rows = compared(report, args.seed)
    show(rows)
    write_json(args.out / "peers.json", {"machine": report["machine"], "trunk": report["trunk"], "ratios": rows})
    return code


if __name__ == "__main__":
    sys.exit(main())
