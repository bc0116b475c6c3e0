"""Peak memory and time of the heads' loss, forward and backward, above weights and gradients.

    python benchmarks/loss_memory.py --tokens 512 2048
    python benchmarks/loss_memory.py --projection shared --vocab 8192 --teacher states

Heads are built on a trunk of one layer in SmolLM2-135M's sizes (hidden 576, vocabulary 49,152, tied) with random
weights: the loss sees no more of a trunk than its last states, its embedding and its projection. Each case runs in a
process of its own, and two peaks are reported, in MB of 10^6 bytes, less the heads' gradients, which it leaves behind:

* allocated: what torch's allocator held at most, by torch.profiler's events, the operations' own scratch space
  included: exact, and the same each time;
* resident: the process's largest resident set, which has the matrix library's buffers in it, and what the C library
  keeps back. It is taken first, without the profiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from medusa.heads import KINDS, PROJECTIONS, HeadsConfig, MedusaHeads
from medusa.machine import describe
from medusa.train.loss import multi_head_loss, weights
from medusa.trunk import Trunk

HIDDEN, VOCAB = 576, 49152


def peak_allocated(work: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator held at most during ``work``, above those before it."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def make_heads(args: argparse.Namespace) -> MedusaHeads:
    """Heads on one layer in SmolLM2-135M's sizes."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    trunk = Trunk(transformers.LlamaForCausalLM(config), check=False)
    draft_ids = None if args.vocab is None else torch.arange(args.vocab) * (VOCAB // args.vocab)
    return MedusaHeads(HeadsConfig(args.kind, args.num, 1, args.projection, args.vocab, args.rank), trunk, draft_ids)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    heads, tokens = make_heads(args), args.tokens[0]
    columns_BT = torch.randint(heads.choices, (tokens // 512 or 1, min(tokens, 512)))
    ids_BT = heads.tokens(columns_BT)  # every target is drafted: as dear as it gets
    hidden_BTD = torch.randn(*ids_BT.shape, HIDDEN, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"acceptance": args.acceptance}
    if args.teacher == "states":
        options["teacher_states"] = hidden_BTD
    elif args.teacher == "logits":
        options["teacher"] = heads.trunk.project(hidden_BTD).detach()

    def step() -> None:
        """Leaves gradients, from none."""
        loss = multi_head_loss(heads, hidden_BTD, ids_BT, ids_BT, None, weights(args.num), args.chunk, **options)
        loss.total().backward()

    gradients = sum(parameter.nbytes for parameter in heads.parameters())
    gc.collect()
    before, start = _resident(), time.perf_counter()
    step()
    seconds, resident = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    heads.zero_grad()
    return {
        "tokens": tokens,
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "gradients_MB": gradients / 1e6,
        "allocated_MB": (peak_allocated(step) - gradients) / 1e6,
        "resident_MB": (resident - gradients) / 1e6,
        "seconds": seconds,
    }


def _resident() -> int:
    """Bytes resident now; the largest set so far may be a gone one of the trunk's making."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(argv: list[str] | None = None) -> None:
    """Measure each number of tokens and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="medusa")
    parser.add_argument("--num", type=int, default=4)
    parser.add_argument("--projection", choices=PROJECTIONS, default="own")
    parser.add_argument("--vocab", type=int, help="tokens that the heads draft from; all if not given")
    parser.add_argument("--rank", type=int, help="of a low-rank projection")
    parser.add_argument("--teacher", choices=("none", "logits", "states"), default="none")
    parser.add_argument("--acceptance", action="store_true", help="minus the logarithm of the laws' overlap")
    parser.add_argument("--chunk", type=int, help="pairs whose logits exist at a time")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--here", action="store_true", help="measure the one case in this process; print JSON")
    args = parser.parse_args(argv)
    if args.here:
        print(json.dumps(measure(args)))
        return
    given = sys.argv[1:] if argv is None else argv
    print(describe())
    for tokens in args.tokens:
        command = [sys.executable, __file__, *given, "--tokens", str(tokens), "--here"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"KINETO_LOG_LEVEL": "99"}
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            "  ".join(
                f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in found.items()
            )
        )


if __name__ == "__main__":
    main()
