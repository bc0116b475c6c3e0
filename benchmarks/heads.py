"""Compare the three kinds of heads on one trunk, at equal tokens, each at its own best learning rate.

    python benchmarks/heads.py --trunk runs/tinyshakespeare/trunk --out runs/heads

Trains every kind at every rate (about a minute each on one core at demo size), prints a table, and writes heads.json
and heads.png (held-out curves of each kind's best rate) to the output folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from medusa.calibrate import SIZES
from medusa.data.corpus import DataConfig
from medusa.files import write_atomically, write_json
from medusa.heads import KINDS, HeadsConfig
from medusa.machine import describe
from medusa.train import TrainConfig, train
from medusa.train.config import CalibrationConfig, EvaluationConfig, HeadsTraining, TrunkConfig

RATES = (0.006, 0.012, 0.024, 0.048)
COLOURS = {"medusa": "#0072B2", "root": "#E69F00", "hydra": "#009E73"}  # told apart by colour-blind readers too


def run(kind: str, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train one kind at one rate; return its result and its held-out curve."""
    config = TrainConfig(
        run=str(args.out / f"{kind}-{lr}"),
        data=DataConfig(path=args.text, tokenizer="trunk", block=256),
        trunk=TrunkConfig(name=str(args.trunk)),
        heads=HeadsConfig(kind=kind, num=args.num),
        heads_training=HeadsTraining(steps=args.steps, lr=lr, eval_every=max(args.steps // 12, 1)),
        evaluation=EvaluationConfig(prompts=128, tokens=96),
        calibration=CalibrationConfig(sizes=SIZES if args.calibrate else (1, 16), rounds=40 if args.calibrate else 1),
    )
    record = train(config)
    lines = [json.loads(line) for line in (record.folder / "train_log.jsonl").read_text().splitlines()]
    curve = [line for line in lines if "heldout_top1" in line]
    losses = [line for line in lines if "head_loss" in line][-10:]  # the mean of the last hundred steps
    return {
        "kind": kind,
        "lr": lr,
        "parameters": record.result("heads")["parameters"],
        "loss": [sum(line["head_loss"][k] for line in losses) / len(losses) for k in range(args.num)],
        "steps": [line["step"] for line in curve],
        "tokens_per_step": [line["tokens_per_step"] for line in curve],
        "top1": [line["heldout_top1"] for line in curve],
    }


def draw(best: list[dict[str, Any]], tokens_per_step: int, path: Path) -> None:
    """Held-out tokens per step and first head's top-1, against tokens trained on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in best:
        seen = [step * tokens_per_step / 1e6 for step in row["steps"]]
        label, colour = f"{row['kind']} (rate {row['lr']:g})", COLOURS[row["kind"]]
        left.plot(seen, row["tokens_per_step"], label=label, color=colour, marker="o", markersize=4)
        right.plot(seen, [line[1] for line in row["top1"]], label=label, color=colour, marker="o", markersize=4)
    left.set(xlabel="million tokens trained on", ylabel="tokens per step, 16 nodes")
    left.set_title("Expected tokens per step on held-out continuations")
    right.set(xlabel="million tokens trained on", ylabel="share of positions", ylim=(0, 1))
    right.set_title("Second head's best guess right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trunk", type=Path, default=Path("runs/tinyshakespeare/trunk"))
    parser.add_argument("--out", type=Path, default=Path("runs/heads"))
    parser.add_argument("--text", help="a local copy of tinyshakespeare")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--num", type=int, default=6)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--calibrate", action="store_true", help="also measure every tree's cost here")
    args = parser.parse_args()
    rows = [run(kind, lr, args) for kind in KINDS for lr in args.rates]
    weights = [0.8**k for k in range(args.num)]
    print(f"{'kind':8}{'rate':>8}{'loss':>8}  {'tokens/step':>11}   loss per head")
    for row in rows:
        row["weighted_loss"] = sum(w * loss for w, loss in zip(weights, row["loss"], strict=True)) / sum(weights)
        losses = " ".join(f"{loss:.3f}" for loss in row["loss"])
        print(
            f"{row['kind']:8}{row['lr']:8g}{row['weighted_loss']:8.3f}  {max(row['tokens_per_step']):11.3f}   {losses}"
        )
    best = [min((row for row in rows if row["kind"] == kind), key=lambda row: row["weighted_loss"]) for kind in KINDS]
    write_json(args.out / "heads.json", {"machine": describe(), "steps": args.steps, "rows": rows})
    draw(best, 8 * 256, args.out / "heads.png")


if __name__ == "__main__":
    main()
