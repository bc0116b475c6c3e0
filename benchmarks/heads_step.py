"""What a step of heads training costs beyond the work that it can't be without.

    python benchmarks/heads_step.py
    python benchmarks/heads_step.py --cases smollm2-own --vocab 49152 --dtype bfloat16

Three things are timed in turns, without an optimizer, on one batch:

* trunk: a bare forward of the trunk's body;
* heads: the same heads by plain autograd: every head's logits of all its positions at once, F.cross_entropy, backward;
* step: what training does, the trunk's forward included, and cached: the same with the trunk's states kept from before.

Told are step / (trunk + heads) and cached / heads, each the median over the turns of the ratio within a turn. The
goal is 1.15. Trunks have random weights, in SmolLM2-135M's sizes (all positions 49,152 tokens wide, tied) and in those
of the demo (4 layers of 128, 65 characters).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch.nn import functional

from medusa.files import write_json
from medusa.heads import KINDS, HeadsConfig, MedusaHeads
from medusa.machine import describe, seconds
from medusa.train.config import HeadsTraining
from medusa.train.loop import HeadsObjective, kept_in, positions_of
from medusa.train.pairs import FIRST, pair_mask
from medusa.train.states import States
from medusa.trunk import Trunk

GOAL = 1.15
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
DEMO: dict[str, Any] = {
    "vocab_size": 65,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A trunk's sizes, its heads, and the shape of a batch."""

    sizes: dict[str, Any]
    projection: str
    num: int
    batch: int
    block: int


CASES = {
    "smollm2-shared": Case(SMOLLM2, "shared", 4, 1, 512),
    "smollm2-own": Case(SMOLLM2, "own", 4, 1, 512),
    "demo": Case(DEMO, "own", 6, 8, 256),
}


def make_objective(case: Case, kind: str, vocab: int | None, dtype: torch.dtype) -> HeadsObjective:
    """Heads on a random trunk, with their loss."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**case.sizes)).to(dtype)
    trunk = Trunk(model, check=False)
    vocab = None if vocab is None or vocab >= trunk.vocab_size else vocab
    draft_ids = None if vocab is None else torch.arange(vocab) * (trunk.vocab_size // vocab)
    training = HeadsTraining()
    config = HeadsConfig(kind, case.num, 1, case.projection, vocab)
    return HeadsObjective(MedusaHeads(config, trunk, draft_ids, dtype=kept_in(training, trunk)), training)


def bare_heads(
    heads: MedusaHeads, hidden: torch.Tensor, ids_BT: torch.Tensor, segments_BT: torch.Tensor, weights_K: torch.Tensor
) -> None:
    """Forward and backward of all heads by plain autograd, every target being one that they draft."""
    hidden_MD, ids_M = hidden.flatten(0, 1), ids_BT.flatten()
    with torch.no_grad():
        embedded_ME = heads.embed(ids_M)
    for head in range(heads.config.num):
        index_N = pair_mask(ids_BT, segments_BT, head).flatten().nonzero()[:, 0]
        context = None
        if reads := heads.config.reads(head):
            context = heads.context(head, embedded_ME[index_N[:, None] + torch.arange(1, reads + 1)])
        logits_NV = heads.logits(head, heads.features(head, hidden_MD[index_N], context))
        targets_N = heads.columns(ids_M[index_N + FIRST + head])
        (weights_K[head] * functional.cross_entropy(logits_NV.float(), targets_N)).backward()


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(case: Case, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of each part and the two ratios."""
    objective = make_objective(case, args.kind, args.vocab, getattr(torch, args.dtype))
    heads, trunk = objective.heads, objective.heads.trunk
    ids_BT = heads.tokens(torch.randint(heads.choices, (case.batch, case.block)))
    segments_BT = torch.zeros_like(ids_BT)
    hidden = objective.read(ids_BT, segments_BT)
    states, row_B = States(folder / "0.bin", trunk, case.batch, case.block, keep=False), torch.arange(case.batch)
    weights_K = objective.weights_K.float()

    def forward() -> None:
        with torch.no_grad():
            trunk.model.base_model(input_ids=ids_BT, position_ids=positions_of(segments_BT), use_cache=False)

    def step(cached: bool) -> None:
        objective.states = states if cached else None
        objective(ids_BT, segments_BT, row=row_B).total().backward()

    works: dict[str, Callable[[], None]] = {
        "trunk": forward,
        "heads": lambda: bare_heads(heads, hidden, ids_BT, segments_BT, weights_K),
        "step": lambda: step(False),
        "cached": lambda: step(True),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    clock = seconds if args.clock == "wall" else processor_seconds
    for _ in range(1 + args.rounds):
        for name, work in works.items():
            heads.zero_grad()
            times[name].append(clock(work))
    states.close()
    turns = [dict(zip(times, turn, strict=True)) for turn in list(zip(*times.values(), strict=True))[1:]]  # 0 warms up
    ratios = {
        "step_ratio": median(turn["step"] / (turn["trunk"] + turn["heads"]) for turn in turns),
        "cached_ratio": median(turn["cached"] / turn["heads"] for turn in turns),
    }
    return {name: median(turn[name] for turn in turns) for name in works} | ratios


def main(argv: list[str] | None = None) -> None:
    """Measure the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--kind", choices=KINDS, default="root")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that the heads draft from, at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, where others use the machine"
    )
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(describe())
    print(f"{'seconds':16}{'trunk':>9}{'heads':>9}{'step':>9}{'cached':>9}   step ratio   cached ratio   (goal {GOAL})")
    found = {}
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            row = found[name] = measure(CASES[name], args, Path(folder))
        timed = "".join(f"{row[part]:9.4f}" for part in ("trunk", "heads", "step", "cached"))
        print(f"{name:16}{timed}{row['step_ratio']:13.3f}{row['cached_ratio']:15.3f}", flush=True)
    if args.out is not None:
        options = {key: value for key, value in vars(args).items() if key != "out"}
        write_json(args.out, {"machine": describe(), "options": options, "goal": GOAL, "cases": found})


if __name__ == "__main__":
    main()
