"""The exercises of docs/exercises.md on a trained run: each prints a table and leaves JSON, and a plot where one helps.

    python benchmarks/exercises.py law runs/tinyshakespeare        # sampled text has the trunk's law: chi-square
    python benchmarks/exercises.py depth runs/tinyshakespeare      # speedup against the number of drafted tokens
    python benchmarks/exercises.py rollback runs/tinyshakespeare   # the cache after rejected drafts
    python benchmarks/exercises.py kl runs/tinyshakespeare         # acceptance against KL divergence

Dimensions: B rows, T positions, S positions judged, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.accept import AcceptRule
from medusa.broken import NoResidual, Wrong
from medusa.calibrate import continuations, head_ranks, tokens_per_step
from medusa.checkpoint import load_heads, load_tree
from medusa.confidence import judged
from medusa.costs import step_costs
from medusa.cut import cut
from medusa.decoding import Decoder, Request, decode
from medusa.drafters.base import Drafter
from medusa.drafters.children import Drafting
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.prompt_lookup import PromptLookupDrafter
from medusa.files import write_atomically, write_json
from medusa.heads import MedusaHeads
from medusa.infer.prompts import heldout_prompts
from medusa.infer.source import load_trunk
from medusa.lawkit import chi_square, ks_uniform
from medusa.machine import describe
from medusa.plots import BLUE, GREY, ORANGE, new_figure, png, say
from medusa.rules import TypicalRule
from medusa.sampling import SamplingParams
from medusa.tree import Topology
from medusa.trunk import Trunk

CELLS = 50  # of the chi-square test: 1,000 tokens are due in each of 50,000


def texts(
    trunk: Trunk, drafter: Drafter, prompts: Sequence[Sequence[int]], tokens: int, rule: AcceptRule | None = None
) -> list[list[int]]:
    """Each prompt with its continuation at temperature 1, seeds 0, 1, …"""
    rows = [list(prompt) for prompt in prompts]
    sampled = [SamplingParams(temperature=1.0, seed=seed) for seed in range(len(rows))]
    requests = [Request(prompt, tokens, sampling=each) for prompt, each in zip(prompts, sampled, strict=True)]
    for step in decode(trunk, drafter, requests, rule, most=32):
        for row, new in step.tokens.items():
            rows[row] += new
    return rows


def transformed(trunk: Trunk, text: Sequence[int], start: int, seed: int) -> list[float]:
    """Each token after ``start`` as a number that is uniform, whatever came before, if it has the trunk's law.

    The sum of the law over all likelier tokens, and as much of the token's own share as chance says (Rosenblatt 1952).
    In the order of ids, what a wrong rule adds to one token and takes from another would even out over positions.
    """
    ids = torch.tensor(text, device=trunk.device)
    law_SV = trunk.forward(ids[None]).logits[0, start - 1 : -1].double().softmax(-1)
    share_S1 = law_SV.gather(1, ids[start:, None])
    share_S, below_S = share_S1[:, 0], (law_SV * (law_SV > share_S1)).sum(-1)
    chance_S = torch.rand(len(share_S), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    numbers: list[float] = (below_S + chance_S.to(share_S.device) * share_S).tolist()
    return numbers


def law(heads: MedusaHeads, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Is sampled text the trunk's, in law? Three ways that must pass, and two that must not."""
    trunk, tree = heads.trunk, load_tree(run, heads.config)
    prompts = heldout_prompts(run, args.prompts, 64)
    drawn, likeliest = MedusaDrafter(heads, tree), MedusaDrafter(heads, tree, Drafting("top"))
    ways: dict[str, tuple[Drafter, AcceptRule | None]] = {
        "no drafts": (NullDrafter(), None),
        "heads, children drawn": (drawn, None),
        "heads, likeliest children": (likeliest, None),
        "prompt lookup": (PromptLookupDrafter(), None),
        "wrong: no residual after a rejection": (drawn, Wrong(NoResidual)),
        "lossy: typical acceptance": (likeliest, TypicalRule()),
    }
    found = {}
    for name, (drafter, rule) in ways.items():
        rows = texts(trunk, drafter, prompts, args.tokens, rule)
        numbers = [
            number for seed, row in enumerate(rows) for number in transformed(trunk, row, len(prompts[seed]), seed)
        ]
        counts = Counter(min(int(number * CELLS), CELLS - 1) for number in numbers)
        p_value = chi_square(counts, [1 / CELLS] * CELLS)
        found[name] = {"tokens": len(numbers), "chi_square": p_value, "kolmogorov_smirnov": ks_uniform(numbers)}
        print(f"{name:40}{len(numbers):8,} tokens   chi-square p = {p_value:.3g}   KS p = {ks_uniform(numbers):.3g}")
    return found


def depth(heads: MedusaHeads, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Chains of 0, 1, … drafted tokens: tokens per step, a step's cost, and what they come to."""
    trunk = heads.trunk
    held = continuations(trunk, heldout_prompts(run, args.prompts, 64, "judging"), args.tokens)
    ranks = head_ranks(heads, held)
    chains = [Topology.chain(n) if n else Topology.root() for n in range(heads.config.num + 1)]
    costs = step_costs(heads, chains, [held.ids[0][: held.starts[0]]], args.rounds)
    first = tokens_per_step(chains[1], ranks) - 1
    rows = []
    for n, (chain, (step_ms, _)) in enumerate(zip(chains, costs, strict=True)):
        gain, cost = tokens_per_step(chain, ranks), step_ms / costs[0][0]
        formula = sum(first**power for power in range(n + 1))
        rows.append({"drafted": n, "tokens_per_step": gain, "formula": formula, "cost": cost, "speedup": gain / cost})
        print(f"N = {n}   {gain:.2f} tokens per step ({formula:.2f} by formula)   cost x {cost:.2f}   ", end="")
        print(f"speedup {gain / cost:.2f}")
    return {"a": first, "rows": rows}


def rollback(heads: MedusaHeads, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """After every step: does the cache hold what reading the text afresh would give? And without the rollback?"""
    trunk = Trunk(heads.trunk.model.double(), heads.trunk.tokenizer)
    bushy = Topology.full([2] * min(heads.config.num, 3))
    decoder = Decoder(trunk, MedusaDrafter(load_heads(run, trunk), bushy))
    decoder.admit([Request(heldout_prompts(run, 1, 64)[0], args.tokens)])
    off, stale, rejected, steps = 0.0, 0.0, 0, 0
    while True:
        step = decoder.step()
        if not decoder.rows:
            break
        rejected, steps = rejected + step.nodes - 1 - step.accepted[0], steps + 1
        text, kept, fresh = decoder.rows[0].text, decoder.cache.lengths[0], trunk.new_cache(1)
        trunk.prefill(torch.tensor([text[:kept]], device=trunk.device), [kept], fresh)
        for layer in range(len(trunk.layers)):
            for ours, theirs in zip(decoder.cache.read(layer, 0), fresh.read(layer, 0), strict=True):
                off = max(off, float((ours - theirs).abs().max()))
                stale = max(stale, float((ours[..., 1:, :] - theirs[..., :-1, :]).abs().max()))  # one slot astray
    print(f"{steps} steps, {rejected} drafted tokens rejected. From a cache that read the text afresh, keys and values")
    print(f"differ by at most {off:.1e} (fp64); were they one slot astray, by {stale:.1e}")
    return {"steps": steps, "rejected": rejected, "largest_difference": off, "one_slot_astray": stale}


def kl(heads: MedusaHeads, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """For drafts of several kinds: how far their law is from the trunk's, and how often a drawn token is accepted."""
    trunk = heads.trunk
    rows = texts(trunk, NullDrafter(), heldout_prompts(run, args.prompts, 64), args.tokens)
    drafts: dict[str, list[tuple[Tensor, Tensor]]] = {}  # a name: pairs of laws [S, V], the trunk's and the draft's

    def add(name: str, p_SV: Tensor, logits_SV: Tensor) -> None:
        for temperature in (0.5, 1.0, 2.0):
            label = name if temperature == 1 else f"{name}, temperature {temperature:g}"
            drafts.setdefault(label, []).append((p_SV, (logits_SV.double() / temperature).softmax(-1)))

    for text in rows:
        ids_1T = torch.tensor([text], device=trunk.device)
        output = trunk.forward(ids_1T)
        p_TV = output.logits[0].double().softmax(-1)
        for layers in range(1, len(trunk.layers)):
            add(f"first {layers} of {len(trunk.layers)} layers", p_TV, cut(trunk, layers).forward(ids_1T).logits[0])
        if heads.draft_ids is None:  # else the two laws are of different tokens
            for head, (logits_SV, _) in enumerate(judged(heads, text, 64, output.hidden[0])):
                add(f"head {head}", p_TV[64 + head :][: len(logits_SV)], logits_SV)
    found = {}
    for name, pairs in drafts.items():
        p_SV, q_SV = (torch.cat(part) for part in zip(*pairs, strict=True))
        accepted = float(torch.minimum(p_SV, q_SV).sum(-1).mean())
        divergence = float(torch.xlogy(p_SV, p_SV / q_SV).sum(-1).mean())
        least = max(1 - math.sqrt(divergence / 2), 1 - math.sqrt(1 - math.exp(-divergence)))
        found[name] = {"kl": divergence, "acceptance": accepted, "least": least}
        print(f"{name:40}KL(p, q) {divergence:6.3f} nats   accepted {accepted:.3f}   at least {least:.3f}")
    return found


def draw_depth(found: dict[str, Any]) -> Any:
    """Speedup against N, measured and by the formula."""
    figure, (axes,) = new_figure(1, 6.4, 4.2)
    rows = found["rows"]
    drafted = [row["drafted"] for row in rows]
    axes.plot(drafted, [row["tokens_per_step"] for row in rows], "o-", color=BLUE, label="tokens per step")
    axes.plot(drafted, [row["formula"] for row in rows], ":", color=GREY, label=f"formula, a = {found['a']:.2f}")
    axes.plot(drafted, [row["speedup"] for row in rows], "s-", color=ORANGE, label="speedup over no drafts")
    best = max(rows, key=lambda row: row["speedup"])
    at = (best["drafted"], best["speedup"])
    axes.annotate(f"best: N = {best['drafted']}", at, (0, -18), textcoords="offset points")
    axes.set(xlabel="drafted tokens N (a chain)", ylim=(0, None))
    axes.legend(frameon=False)
    say(figure, "More drafts bring more tokens per step, and cost more than they bring")
    return figure


def draw_kl(found: dict[str, Any]) -> Any:
    """Acceptance against KL, with what must be accepted at least."""
    figure, (axes,) = new_figure(1, 7.2, 4.6)
    most = max(row["kl"] for row in found.values())
    grid = [most * step / 200 for step in range(201)]
    bounds = [max(1 - math.sqrt(at / 2), 1 - math.sqrt(1 - math.exp(-at))) for at in grid]
    axes.plot(grid, bounds, color=GREY, label="least acceptance at this KL (Pinsker; Bretagnolle and Huber)")
    groups: dict[str, Callable[[str], bool]] = {
        "own first layers": lambda name: name.startswith("first"),
        "heads": lambda name: name.startswith("head"),
    }
    for (label, belongs), colour in zip(groups.items(), (ORANGE, BLUE), strict=True):
        points = [(row["kl"], row["acceptance"]) for name, row in found.items() if belongs(name)]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, label=label)
    axes.set(xlabel="KL(p, q), nats per token", ylabel="drawn tokens accepted", ylim=(0, 1))
    axes.legend(frameon=False)
    say(figure, "The nearer a draft's law to the trunk's, the more is accepted")
    return figure


EXERCISES = {"law": (law, None), "depth": (depth, draw_depth), "rollback": (rollback, None), "kl": (kl, draw_kl)}
SIZES = {"law": (200, 250), "depth": (64, 128), "rollback": (1, 200), "kl": (32, 128)}  # prompts, tokens of each


def main(argv: list[str] | None = None) -> None:
    """Do one exercise on a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercise", choices=list(EXERCISES))
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help="left out: exercises/ in the run's folder")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args(argv)
    prompts, tokens = SIZES[args.exercise]
    args.prompts, args.tokens = args.prompts or prompts, args.tokens or tokens
    exercise, draw = EXERCISES[args.exercise]
    trunk = load_trunk(args.run, dtype="auto", device="auto")
    with torch.inference_mode():
        found = exercise(load_heads(args.run, trunk), args.run, args)
    out = args.out or args.run / "exercises"
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{args.exercise}.json", {"machine": describe(), "found": found})
    if draw is not None:
        write_atomically(out / f"{args.exercise}.png", lambda temporary: temporary.write_bytes(png(draw(found))))


if __name__ == "__main__":
    main()
