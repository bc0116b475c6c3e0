"""Held-out tokens per step against tokens trained on, of several runs in one picture, whatever drafts in them.

python benchmarks/curves.py runs/tinyshakespeare runs/tinyshakespeare-medusa runs/tinyshakespeare-eagle --out curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from medusa.checkpoint import CONFIG, LOG
from medusa.errors import UserError
from medusa.files import write_atomically
from medusa.plots import LINES, new_figure, png, say

STAGES = ("heads", "eagle")  # whose evaluations count tokens per step


def curves(run: Path) -> list[tuple[str, list[float], list[float]]]:
    """Of each stage that was trained: what it is, millions of tokens, and tokens per step.

    Raises:
        UserError: the folder holds no log of such a stage.
    """
    if not (run / LOG).is_file() or not (run / CONFIG).is_file():
        raise UserError(f"{run} has no {LOG} and {CONFIG}: give a folder made by `medusa train`")
    config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / LOG).read_text(encoding="utf-8").splitlines()]
    found = []
    for stage in STAGES:
        judged = [line for line in lines if line.get("stage") == stage and "tokens_per_step" in line]
        if judged:
            per_step = config[f"{stage}_training"]["batch"] * config["data"]["block"] / 1e6
            steps = [line["step"] * per_step for line in judged]
            found.append((_name(stage, config[stage]), steps, [line["tokens_per_step"] for line in judged]))
    if not found:
        raise UserError(f"{run / LOG} has no evaluation of heads or of an EAGLE layer: train them first")
    return found


def _name(stage: str, config: dict[str, Any]) -> str:
    if stage == "eagle":
        return f"EAGLE-{config['version']}"
    bias = f" + Markov bias of rank {config['markov']}" if config.get("markov") else ""
    return f"{config['kind']} heads{bias}"


def main(argv: list[str] | None = None) -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    figure, (axes,) = new_figure(1, 7.2, 4.4)
    every = [curve for run in args.runs for curve in curves(run)]
    for number, (name, seen, gained) in enumerate(sorted(every, key=lambda curve: -max(curve[2]))):
        axes.plot(
            seen, gained, "o-", markersize=4, color=LINES[number % len(LINES)], label=f"{name}: {max(gained):.2f}"
        )
    axes.set(xlabel="million tokens trained on", ylabel="tokens per step, held out", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    say(figure, "What drafts learn from the same text, on the same trunk")
    write_atomically(args.out, lambda temporary: temporary.write_bytes(png(figure)))


if __name__ == "__main__":
    main()
