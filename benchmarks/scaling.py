"""How the cost of decoding grows with the size of what is decoded: measured, with fitted slopes.

    python benchmarks/scaling.py                                  # a small trunk with random weights: some minutes
    python benchmarks/scaling.py --trunk FOLDER --batches 1 4     # a trunk of your own; axes may be cut short

Four axes, each with the others at their usual value:

* context: milliseconds of a step behind 128 to 8,192 tokens, without drafts and with a tree;
* output: seconds of a whole answer of 64 to 2,048 tokens, without drafts and with a tree whose drafts are accepted at a
  given rate, whatever the trunk says;
* batch: milliseconds of a step that serves 1 to 32 rows;
* nodes: milliseconds of a step over a tree of 1 to 64 nodes.

Of each line two fits are told: its cost as fixed part + part per unit, by least squares, and the exponent of its
growth from the smallest size to the largest. Sizes take turns, so that a machine that slows down for a while slows all
of them. On a machine that others use too, --clock cpu counts processor time.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from medusa.decoding import Decoder, Request
from medusa.drafters.base import Drafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.files import write_json
from medusa.folded import settle
from medusa.infer.bench.contenders import synchronise
from medusa.infer.bench.given import GivenDrafter, GivenRule, spread
from medusa.machine import describe, pick_device
from medusa.packed import settle_products
from medusa.trunk import Trunk

SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
DEPTH = 4  # of the trees
PLAIN, TREE = "no drafts", "tree"
UNITS = {"context": "tokens of context", "output": "new tokens", "batch": "rows", "nodes": "nodes"}


def make_trunk(args: argparse.Namespace) -> Trunk:
    """The trunk asked for, or a small Llama with random weights."""
    if args.trunk is not None:
        return Trunk.load(args.trunk, dtype=args.dtype, device=args.device)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=1 << 17, eos_token_id=None, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config).to(pick_device(args.device))
    if args.dtype != "auto":
        model = model.to(getattr(torch, args.dtype))
    settle_products(model)
    return settle(Trunk(model, check=False))


def least_squares(sizes: Sequence[float], costs: Sequence[float]) -> dict[str, float | None]:
    """``fixed`` + ``slope`` x size, and the ``exponent`` of the growth between the ends; None with fewer than 2 sizes.

    With ``fit``, the share of the variation that the line explains.
    """
    if len(sizes) < 2:
        return {"fixed": None, "slope": None, "exponent": None, "fit": None}
    x, y = sum(sizes) / len(sizes), sum(costs) / len(costs)
    spread_x, spread_y = sum((each - x) ** 2 for each in sizes), sum((each - y) ** 2 for each in costs)
    both = sum((a - x) * (b - y) for a, b in zip(sizes, costs, strict=True))
    exponent = math.log(costs[-1] / costs[0]) / math.log(sizes[-1] / sizes[0])
    fit = both**2 / (spread_x * spread_y) if spread_y else 1.0
    return {"fixed": y - both / spread_x * x, "slope": both / spread_x, "exponent": exponent, "fit": fit}


class Bench:
    """A trunk, random prompts for it, and the clock."""

    def __init__(self, trunk: Trunk, args: argparse.Namespace) -> None:
        self.trunk, self.args = trunk, args
        self.tree: Drafter = GivenDrafter(spread(args.tree, DEPTH))
        self._random = torch.Generator().manual_seed(0)

    def prompt(self, tokens: int) -> list[int]:
        """Random ids."""
        ids: list[int] = torch.randint(self.trunk.vocab_size, (tokens,), generator=self._random).tolist()
        return ids

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, by the clock asked for, the device's work included."""
        clock = time.process_time if self.args.clock == "cpu" else time.perf_counter
        synchronise(self.trunk)
        start = clock()
        work()
        synchronise(self.trunk)
        return clock() - start

    def decoder(self, drafter: Drafter, prompts: Sequence[Sequence[int]], tokens: int, chance: float = 0.0) -> Decoder:
        """A decoder whose rows have read their prompts."""
        made = Decoder(self.trunk, drafter, GivenRule(chance))
        made.admit([Request(prompt, tokens) for prompt in prompts])
        return made

    def steps(self, decoders: dict[tuple[str, int], Decoder]) -> dict[str, dict[int, float]]:
        """Median milliseconds of a step of each, in turns. Nothing drafted is accepted: texts grow alike."""
        times: dict[tuple[str, int], list[float]] = {key: [] for key in decoders}
        for turn in range(self.args.rounds + 1):
            for key, each in decoders.items():
                taken = self.seconds(each.step)
                if turn:  # the first warms up
                    times[key].append(1e3 * taken)
        found: dict[str, dict[int, float]] = {}
        for (name, size), each_time in times.items():
            found.setdefault(name, {})[size] = median(each_time)
        return found

    def context(self) -> dict[str, dict[int, float]]:
        """Steps behind texts of each length."""
        room = self.args.rounds + 2 + DEPTH
        return self.steps(
            {
                (name, size): self.decoder(drafter, [self.prompt(size)], room)
                for size in self.args.contexts
                for name, drafter in self.both().items()
            }
        )

    def both(self) -> dict[str, Drafter]:
        """Without drafts, and with the tree."""
        return {PLAIN: NullDrafter(), TREE: self.tree}

    def output(self) -> dict[str, dict[int, float]]:
        """Seconds of whole answers; the prompt's reading is not counted."""
        found: dict[str, dict[int, float]] = {}
        prompt = self.prompt(self.args.prompt)
        for size in self.args.outputs:
            for name, drafter in self.both().items():
                decoder = self.decoder(drafter, [prompt], size, self.args.acceptance)
                found.setdefault(name, {})[size] = self.seconds(lambda d=decoder: _to_the_end(d))  # type: ignore[misc]
        return found

    def batch(self) -> dict[str, dict[int, float]]:
        """Steps that serve so many rows."""
        room, found = self.args.rounds + 2 + DEPTH, dict[tuple[str, int], Decoder]()
        for size in self.args.batches:
            prompts = [self.prompt(self.args.prompt) for _ in range(size)]
            found |= {(name, size): self.decoder(each, prompts, room) for name, each in self.both().items()}
        return self.steps(found)

    def nodes(self) -> dict[str, dict[int, float]]:
        """Steps over trees of so many nodes."""
        room, prompt = self.args.rounds + 2 + DEPTH, self.prompt(self.args.prompt)
        trees = {size: GivenDrafter(spread(size, DEPTH)) for size in self.args.nodes}
        return self.steps({(TREE, size): self.decoder(each, [prompt], room) for size, each in trees.items()})


def _to_the_end(decoder: Decoder) -> None:
    while decoder.live:
        decoder.step()


def lines(axis: str, found: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """Each line with its fits."""
    return [
        {"axis": axis, "line": name, "sizes": list(costs), "costs": list(costs.values())}
        | least_squares(list(costs), list(costs.values()))
        for name, costs in found.items()
    ]


def growth(rows: Sequence[dict[str, Any]]) -> float | None:
    """How much more a step with the tree grows with the context than one without drafts: 1 is alike."""
    grown = {row["line"]: row["costs"][-1] / row["costs"][0] for row in rows if row["axis"] == "context"}
    return grown[TREE] / grown[PLAIN] if len(grown) == 2 else None


def show(row: dict[str, Any]) -> None:
    """Print one line."""
    unit = "s" if row["axis"] == "output" else "ms"
    costs = "  ".join(f"{size}: {cost:.4g}" for size, cost in zip(row["sizes"], row["costs"], strict=True))
    print(f"{row['axis']}, {row['line']} ({unit} by {UNITS[row['axis']]})  {costs}")
    if row["slope"] is not None:
        print(
            f"    {row['fixed']:.4g} + {row['slope']:.4g} x size (r2 {row['fit']:.3f}), grows with exponent"
            f" {row['exponent']:.2f}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Measure the axes, print, write; 2 for what can't be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trunk", help="a folder or hub id; left out, a small trunk with random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--axes", nargs="+", choices=UNITS, default=[*UNITS])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--outputs", type=int, nargs="+", default=[64, 256, 512, 1024, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tree", type=int, default=8, help="nodes of the tree on the other axes")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt on the other axes")
    parser.add_argument("--acceptance", type=float, default=0.6, help="of each draft, on the axis of output")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each size")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args(argv)
    try:
        measure(args)
    except UserError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace) -> None:
    """The axes that were asked for."""
    if min(*args.contexts, *args.outputs, *args.batches, *args.nodes, args.tree, args.prompt, args.rounds, 2) < 1:
        raise UserError("sizes and rounds are counted from 1: give larger ones")
    torch.set_num_threads(args.threads)
    trunk = make_trunk(args)
    bench, rows = Bench(trunk, args), list[dict[str, Any]]()
    print(f"{describe()}\n{trunk.family}, {trunk.model.num_parameters() / 1e6:.1f} M parameters, {trunk.dtype}")
    for axis in args.axes:
        found = lines(axis, getattr(bench, axis)())
        rows += found
        for row in found:
            show(row)
    more = growth(rows)
    if more is not None:
        ends = f"from {args.contexts[0]} to {args.contexts[-1]} tokens of context"
        print(f"{ends} a step with the tree grows {more:.2f} times as much as one without drafts")
    if args.out is not None:
        options = {key: value for key, value in vars(args).items() if key != "out"}
        write_json(args.out, {"machine": describe(), "options": options, "lines": rows, "growth": more})


if __name__ == "__main__":
    sys.exit(main())
