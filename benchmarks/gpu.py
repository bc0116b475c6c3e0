"""What speculative decoding costs and brings on this device, on trunks with random weights: no download, minutes.

    python benchmarks/gpu.py                       # on a GPU: Llama shapes of 1B and 7B, in bf16
    python benchmarks/gpu.py --out gpu.json        # also writes the figures, after each part
    python benchmarks/gpu.py --compile             # our steps compiled too (compiling takes minutes of its own)

It needs torch, transformers and this repository. For each shape, and for our steps as they are and recorded as CUDA
graphs, it measures

* the limits: bytes read and operations done per second, and from them the least time of a forward;
* the cost curve: the trunk's forward over trees of 1 to 64 nodes behind a text, against that least time;
* a step taken apart, with untrained heads over a tree: our share, and (step - heads) / bare trunk forward;
* tokens per second at given acceptance: each draft along the tree's first children is accepted with a probability that
  is set, whatever the trunk says, since random weights agree to nothing. Beside it plain ``generate``, and our own loop
  without drafts, in turns.

What fails is written down with its reason, and the rest goes on; after ``--limit`` seconds nothing more is begun.
Without a GPU the very same code runs at a small size on the processor, and says so: that shows that it runs, and
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from medusa.compiled import CompiledSteps, StepSize
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError, reason
from medusa.folded import settle
from medusa.graphs import GraphedSteps
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer.bench.contenders import Task, library_way, our_way
from medusa.infer.bench.given import GivenRule, spread
from medusa.infer.bench.profile import HEADS, profile
from medusa.infer.bench.profile_report import account, trunk_bytes, trunk_operations
from medusa.infer.warmup import compile_step, step_sizes
from medusa.machine import describe, peak_memory_mb, pick_device, rates, seconds
from medusa.packed import settle_products
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

# Llama 3.2 1B and Llama 2 7B; the small one runs anywhere.
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "small": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
NODES = (1, 2, 4, 8, 16, 32, 64)
HEADS_NUM, HEADS_RANK = 4, 64
EAGER, GRAPHS, COMPILED, BOTH = "eager", "graphs", "compiled", "compiled, graphs"
SMALL = "There is no GPU here: the same code ran at a small size on the processor. It says nothing about a GPU."


def make_trunk(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Trunk:
    """A Llama with random weights, made where it is used."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=4096, eos_token_id=None, pad_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    settle_products(model)
    return settle(Trunk(model, check=False))


def steps_of(kind: str, trunk: Trunk, sizes: list[StepSize]) -> CompiledSteps | None:
    """How the trunk's steps of these sizes run."""
    if kind == EAGER:
        return None
    if kind == COMPILED:
        return CompiledSteps(trunk, sizes)
    return GraphedSteps(trunk, sizes, compiled=kind == BOTH)


@torch.inference_mode()
def cost_curve(trunk: Trunk, prompt: list[int], rounds: int, sizes: list[int]) -> list[dict[str, float]]:
    """The trunk's forward over chains of each size behind ``prompt``, in turns; medians in milliseconds."""
    cache = trunk.new_cache(1)
    trunk.prefill(torch.tensor([prompt], device=trunk.device), [len(prompt)], cache)
    trees = {}
    for nodes in sizes:
        tokens_1N = torch.randint(trunk.vocab_size, (1, nodes), device=trunk.device)
        shape = Shape.static(Topology.chain(nodes - 1), trunk.device)
        trees[nodes] = DraftTree(shape, tokens_1N, torch.ones_like(tokens_1N, dtype=torch.bool))
    times: dict[int, list[float]] = {nodes: [] for nodes in sizes}
    for _ in range(rounds + 2):
        for nodes, tree in trees.items():
            times[nodes].append(seconds(lambda t=tree: trunk.tree_forward(t, cache)))  # type: ignore[misc]
    limits = rates(trunk.device, trunk.dtype, trunk_bytes(trunk, 0))
    rows = []
    for nodes in sizes:
        taken, view = median(times[nodes][2:]), len(prompt) + nodes
        least = limits.seconds(trunk_bytes(trunk, view), trunk_operations(trunk, nodes, view))
        rows.append({"nodes": nodes, "ms": 1e3 * taken, "least_ms": 1e3 * least, "ratio": taken / least})
    return rows


def throughput(trunk: Trunk, heads: MedusaHeads, prompt: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second after the first: plain ``generate``, our loop without drafts, trees at given acceptance."""
    ways = {"generate": library_way(trunk), "ours, no drafts": our_way(trunk, NullDrafter())}
    for nodes in args.nodes:
        drafter = MedusaDrafter(heads, spread(nodes, HEADS_NUM))
        for chance in args.acceptance:
            ways[f"{nodes} nodes, {chance:.0%} accepted"] = our_way(trunk, drafter, GivenRule(chance))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(args.repeats + 1):
        for name, way in ways.items():
            trial = way([prompt], Task(args.tokens))
            later = trial.tokens - trial.first_tokens
            if turn:  # the first warms up
                found[name].append((later / (trial.seconds - trial.first_seconds), later / len(trial.accepted)))
    rows = []
    for name, runs in found.items():
        against = [mine[0] / plain[0] for mine, plain in zip(runs, found["generate"], strict=True)]
        rate, steps = median(rate for rate, _ in runs), median(per for _, per in runs)
        rows.append({"way": name, "tokens_per_second": rate, "tokens_per_step": steps, "speedup": median(against)})
    return rows


def measure(
    kind: str, trunk: Trunk, drafters: dict[str, Drafter], heads: MedusaHeads, args: argparse.Namespace
) -> dict[str, Any]:
    """All figures of one shape whose steps run like this."""
    start = time.perf_counter()
    drawn = torch.randint(trunk.vocab_size, (args.context,), generator=torch.Generator().manual_seed(0))
    prompt: list[int] = drawn.tolist()
    own = sorted({size for drafter in drafters.values() for size in step_sizes(drafter, [1])})
    sizes = own if kind in (COMPILED, BOTH) else sorted({*own, *(StepSize(1, nodes) for nodes in NODES)})
    trunk.compiled = steps_of(kind, trunk, sizes)
    first = {} if kind == EAGER else {size.nodes: seconds(lambda s=size: compile_step(trunk, s)) for size in sizes}  # type: ignore[misc]
    limits = rates(trunk.device, trunk.dtype, trunk_bytes(trunk, 0))
    curve = cost_curve(trunk, prompt, args.rounds, [size.nodes for size in sizes])
    profile(trunk, drafters, [prompt], HEADS_NUM + 2)  # warms up
    steps = profile(trunk, drafters, [prompt], args.rounds + HEADS_NUM + 2)  # towards the end trees have no room
    return {
        "first_steps_s": first,
        "cost_curve": curve,
        "steps": {each: account(trunk, parts, limits) for each, parts in steps.items()},
        "throughput": throughput(trunk, heads, prompt, args),
        "peak_memory_mb": peak_memory_mb(trunk.device),
        "seconds": time.perf_counter() - start,
    }


def measure_shape(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    args: argparse.Namespace,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """All figures of one shape, one way after the other; ``tell`` is given what is there so far."""
    trunk = make_trunk(SHAPES[name], dtype, device)
    heads = MedusaHeads(HeadsConfig("root", HEADS_NUM, projection="low_rank", rank=HEADS_RANK), trunk, dtype=dtype)
    heads = heads.to(device).eval()
    drafters: dict[str, Drafter] = {"none": NullDrafter()}
    drafters |= {f"{nodes} nodes": MedusaDrafter(heads, spread(nodes, HEADS_NUM)) for nodes in args.nodes}
    limits = rates(device, dtype, trunk_bytes(trunk, 0))
    found: dict[str, Any] = {
        "shape": SHAPES[name],
        "parameters": trunk.model.num_parameters(),
        "folded": trunk.copies > 1,
        "bytes_per_second": limits.bytes_per_second,
        "operations_per_second": limits.operations_per_second,
        "ways": {},
    }
    for kind in args.steps:
        found["ways"][kind] = _tried(args, lambda k=kind: measure(k, trunk, drafters, heads, args))  # type: ignore[misc]
        tell(found)


def _tried(args: argparse.Namespace, work: Callable[[], Any]) -> Any:
    """What work finds, or why it finds nothing."""
    if time.perf_counter() - args.start > args.limit:
        return {"failed": f"not begun: {args.limit} seconds were over"}
    try:
        return work()
    except (RuntimeError, UserError) as error:  # of CUDA too, memory that is not there among them
        return {"failed": reason(error)}


def show(name: str, found: dict[str, Any]) -> None:
    """Print the tables of what was measured last of one shape."""
    read, done = found["bytes_per_second"] / 1e9, found["operations_per_second"] / 1e12
    kind, figures = list(found["ways"].items())[-1]
    print(f"\n{name}, {kind}: {found['parameters'] / 1e6:,.0f} M parameters, {read:,.0f} GB/s, {done:.2f} TFLOP/s")
    if "failed" in figures:
        print(f"failed: {figures['failed']}", flush=True)
    else:
        print(f"peak memory {figures['peak_memory_mb']} MB, first steps {sum(figures['first_steps_s'].values()):.1f} s")
        show_figures(figures)


def show_figures(found: dict[str, Any]) -> None:
    """Print one way's tables."""
    print(f"\n{'nodes':>8}{'forward ms':>12}{'least ms':>10}{'ratio':>8}{'to 1 node':>11}")
    for row in found["cost_curve"]:
        more = row["ms"] / found["cost_curve"][0]["ms"]
        print(f"{row['nodes']:8}{row['ms']:12.3f}{row['least_ms']:10.3f}{row['ratio']:8.2f}{more:11.2f}")
    print(f"\n{'step':>12}{'ms':>9}{'heads ms':>10}{'bare forward ms':>17}{'ours':>8}{'(step - heads) / bare':>23}")
    for each, row in found["steps"].items():
        heads_ms, bare_ms = row["parts"][HEADS]["ms"], row["bare_ms"]
        print(
            f"{each:>12}{row['step_ms']:9.3f}{heads_ms:10.3f}{bare_ms:17.3f}{row['own_share']:8.1%}"
            f"{row['overhead']:23.2f}"
        )
    print(f"\n{'way':>24}{'tokens/s':>10}{'tokens/step':>13}{'against generate':>18}")
    for row in found["throughput"]:
        rate, per = row["tokens_per_second"], row["tokens_per_step"]
        print(f"{row['way']:>24}{rate:10.1f}{per:13.2f}{row['speedup']:18.2f}", flush=True)


def asked(argv: list[str] | None) -> argparse.Namespace:
    """The options, with what they are where they are left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="left out: 1B and 7B, or small without a GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="left out: bfloat16, or float32")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each run")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 64], help="of the trees")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.8], help="of each draft on the way")
    parser.add_argument("--rounds", type=int, default=20, help="forwards of each size, and steps taken apart")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("--compile", action="store_true", help="compile our steps too")
    parser.add_argument("--limit", type=float, default=720, help="seconds after which nothing more is begun")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    args = parser.parse_args(argv)
    on_gpu = pick_device(args.device).type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.shapes = args.shapes or (["1B", "7B"] if on_gpu else ["small"])
    ways = {EAGER: True, GRAPHS: on_gpu, COMPILED: args.compile, BOTH: on_gpu and args.compile}
    args.steps = [way for way, taken in ways.items() if taken]
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    args = asked(argv)
    device, dtype = pick_device(args.device), getattr(torch, args.dtype)
    on_gpu = device.type == "cuda"
    machine = describe() | {"date": time.strftime("%Y-%m-%d"), "dtype": args.dtype}
    options = {key: value for key, value in vars(args).items() if key != "out"}
    report: dict[str, Any] = {"machine": machine, "options": options, "shapes": {}} | (
        {} if on_gpu else {"note": SMALL}
    )
    print(json.dumps(machine, indent=2))

    def write(name: str, found: dict[str, Any]) -> None:
        report["shapes"][name] = found
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=2))
        if "ways" in found:
            show(name, found)
        else:
            print(f"\n{name} failed: {found['failed']}", flush=True)

    args.start = time.perf_counter()
    for name in args.shapes:
        failed = _tried(args, lambda n=name: measure_shape(n, device, dtype, args, partial(write, n)))  # type: ignore[misc]
        if failed is not None:
            write(name, failed)
        if on_gpu:
            gc.collect()  # of one shape nothing stays for the next
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    if not on_gpu:
        print(f"\n{SMALL}")


if __name__ == "__main__":
    main()
