"""Compare kinds of heads on one trunk, at equal tokens, each at its own best learning rate.

    python benchmarks/heads.py --trunk runs/tinyshakespeare/trunk --out runs/heads
    python benchmarks/heads.py --kinds medusa medusa+32 medusa+64 hydra

Trains every kind at every rate (about a minute each on one core at demo size), prints a table, and writes heads.json
and heads.png to the output folder: held-out tokens per step against steps, from the log of each run. A kind's best rate
is the one whose heads come to the most held-out tokens per step.

A kind with a number, such as medusa+64, has a Markov bias of that rank. Of these the time of drafting is told as well:
with the bias, without it, and as a share of drafting and the trunk's forward, all timed in turns in one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from medusa.calibrate import ROUNDS, SIZES
from medusa.checkpoint import LOG, load_heads, load_tree
from medusa.data.corpus import DataConfig
from medusa.decoding import Decoder, Request
from medusa.drafters.medusa import MedusaDrafter
from medusa.files import write_atomically, write_json
from medusa.heads import KINDS, HeadsConfig, MedusaHeads
from medusa.machine import describe, seconds
from medusa.train import TrainConfig, train
from medusa.train.config import CalibrationConfig, EvaluationConfig, HeadsTraining, TrunkConfig
from medusa.trunk import Trunk

RATES = (0.006, 0.012, 0.024, 0.048)
CHOICE = "best rate by held-out tokens per step"
TURNS = 200  # in which drafting is timed
# Told apart by colour-blind readers too; kinds beyond the three take those that are left.
COLOURS = {"medusa": "#0072B2", "root": "#E69F00", "hydra": "#009E73"}
MORE_COLOURS = ("#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442")


def heads_of(kind: str, num: int) -> HeadsConfig:
    """The heads that a name such as medusa or medusa+64 stands for."""
    name, _, rank = kind.partition("+")
    return HeadsConfig(kind=name, num=num, markov=int(rank) if rank else None)


def run(kind: str, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train one kind at one rate; return its result and its held-out curve."""
    config = TrainConfig(
        run=str(args.out / f"{kind}-{lr}"),
        data=DataConfig(path=args.text, tokenizer="trunk", block=256),
        trunk=TrunkConfig(name=str(args.trunk)),
        heads=heads_of(kind, args.num),
        heads_training=HeadsTraining(steps=args.steps, lr=lr, eval_every=max(args.steps // 12, 1)),
        evaluation=EvaluationConfig(prompts=128, tokens=96),
        calibration=CalibrationConfig(
            sizes=SIZES if args.calibrate else (1, 16), rounds=ROUNDS if args.calibrate else 1
        ),
    )
    record = train(config, args.fresh)
    training, found = config.heads_training, record.result("heads")
    lines = [json.loads(line) for line in (record.folder / LOG).read_text().splitlines()]
    curve = [line for line in lines if "heldout_top1" in line]
    losses = [line for line in lines if "head_loss" in line][-10:]
    return {
        "kind": kind,
        "lr": lr,
        "folder": str(record.folder),
        "parameters": found["parameters"],
        "best": found["tokens_per_step"],  # over all evaluations, as the heads that are saved are chosen
        "nodes": config.evaluation.nodes,
        "loss": [sum(line["head_loss"][k] for line in losses) / len(losses) for k in range(args.num)],
        "steps": [line["step"] for line in curve],
        "tokens": [line["step"] * training.batch * config.data.block for line in curve],
        "tokens_per_step": [line["tokens_per_step"] for line in curve],
        "top1": [line["heldout_top1"] for line in curve],
    }


def draw(best: list[dict[str, Any]], path: Path) -> None:
    """Held-out tokens per step and a head's top-1, against tokens trained on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"Each kind of heads at its {CHOICE}")
    left, right = figure.subplots(1, 2)
    head = min(1, len(best[0]["loss"]) - 1)  # the second, where there is one: kinds differ from there on
    more = iter(MORE_COLOURS)
    for row in best:
        seen = [tokens / 1e6 for tokens in row["tokens"]]
        label, colour = f"{row['kind']} (rate {row['lr']:g})", COLOURS.get(row["kind"]) or next(more)
        left.plot(seen, row["tokens_per_step"], label=label, color=colour, marker="o", markersize=4)
        right.plot(seen, [line[head] for line in row["top1"]], label=label, color=colour, marker="o", markersize=4)
    left.set(xlabel="million tokens trained on", ylabel=f"tokens per step, {best[0]['nodes']} nodes")
    left.set_title("Tokens per step on held-out continuations")
    right.set(xlabel="million tokens trained on", ylabel="share of positions", ylim=(0, 1))
    right.set_title(f"Best guess of head {head} right, held out")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


@torch.inference_mode()
def drafting_times(folder: Path, trunk: Trunk, turns: int) -> dict[str, float]:
    """Milliseconds of drafting with the bias and without, and of the trunk's forward; ratios within turns."""
    heads, tree = load_heads(folder, trunk), load_tree(folder, HeadsConfig())
    plain = MedusaHeads(replace(heads.config, markov=None), trunk, heads.draft_ids, initialise=False)
    plain.load_state_dict({name: value for name, value in heads.state_dict().items() if ".markov." not in name})
    works: dict[str, Callable[[], object]] = {}
    for name, each in (("with", heads), ("without", plain)):
        decoder = Decoder(trunk, MedusaDrafter(each, tree))
        decoder.admit([Request(range(16), 256)])
        works[name] = lambda d=decoder: d.session.propose(d.root_B, tree.depth)  # type: ignore[misc]
        drafted = decoder.session.propose(decoder.root_B, tree.depth)
        works["forward"] = lambda d=decoder, t=drafted: trunk.tree_forward(t, d.cache)  # type: ignore[misc]
    taken = [{name: seconds(work) for name, work in works.items()} for _ in range(1 + turns)][1:]  # the first warms up
    return {f"{name}_ms": 1e3 * median(turn[name] for turn in taken) for name in works} | {
        "drafting": median(turn["with"] / turn["without"] for turn in taken),
        "step": median((turn["with"] + turn["forward"]) / (turn["without"] + turn["forward"]) for turn in taken),
    }


def main(argv: list[str] | None = None) -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trunk", type=Path, default=Path("runs/tinyshakespeare/trunk"))
    parser.add_argument("--out", type=Path, default=Path("runs/heads"))
    parser.add_argument("--text", help="a local copy of tinyshakespeare")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--num", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", default=KINDS, metavar="KIND", help="also with a bias' rank: medusa+64")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--calibrate", action="store_true", help="also measure every tree's cost here")
    parser.add_argument("--fresh", nargs="?", const="heads", choices=("heads", "calibration"), help="make anew")
    args = parser.parse_args(argv)
    rows = [run(kind, lr, args) for kind in args.kinds for lr in args.rates]
    best = [max((row for row in rows if row["kind"] == kind), key=lambda row: row["best"]) for kind in args.kinds]
    print(f"* {CHOICE}, with a tree of {rows[0]['nodes']} nodes")
    print(f"  {'kind':10}{'rate':>8}{'tokens/step':>13}   training loss of each head, last lines of the log")
    for row in rows:
        losses = " ".join(f"{loss:.3f}" for loss in row["loss"])
        print(f"{'*' if row in best else ' '} {row['kind']:10}{row['lr']:8g}{row['best']:13.3f}   {losses}")
    for row in best:
        if "+" in row["kind"]:
            row["times"] = found = drafting_times(Path(row["folder"]), Trunk.load(args.trunk), TURNS)
            print(
                f"  {row['kind']}: drafting takes {found['with_ms']:.2f} ms with the bias, {found['without_ms']:.2f}"
                f" without: x {found['drafting']:.2f}; with the trunk's forward of {found['forward_ms']:.2f} ms,"
                f" x {found['step']:.3f}"
            )
    write_json(args.out / "heads.json", {"machine": describe(), "steps": args.steps, "choice": CHOICE, "rows": rows})
    draw(best, args.out / "heads.png")


if __name__ == "__main__":
    main()
