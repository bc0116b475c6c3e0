"""From held-out text to a tree: what the heads guess right, what a node costs here, which tree is fastest.

Held-out means the trunk's own greedy continuations of held-out prompts: that is what decoding verifies.

Dimensions: T positions, D hidden, K heads, N nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.checkpoint import CALIBRATION, save_tree
from medusa.confidence import judged, temperatures
from medusa.costs import Progress, step_costs
from medusa.decoding import Request, generate_ids
from medusa.drafters.none import NullDrafter
from medusa.eagle import EagleLayer
from medusa.errors import UserError
from medusa.files import write_json
from medusa.heads import MedusaHeads
from medusa.machine import describe
from medusa.tree import Topology
from medusa.trunk import Trunk

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NEVER = 1 << 40  # the rank of a token that is not drafted
TIES = 16  # tokens of one score, in half precision not rare, up to which a rank says something
ROUNDS = 40  # times each tree is measured: medians over fewer jump
GOOD_ENOUGH = 0.98  # a smaller tree this close to the fastest is taken: timings are no better than that


@dataclass(frozen=True)
class Continuations:
    """Prompts with the trunk's greedy continuation: ids, where the continuation starts, and the states [T, D]."""

    ids: list[list[int]]
    starts: list[int]
    hidden: list[Tensor]

    def halves(self) -> tuple[Continuations, Continuations]:
        """Every other row: one half to grow a tree on, the other to judge it."""
        first, second = slice(0, None, 2), slice(1, None, 2)
        return (
            Continuations(self.ids[first], self.starts[first], self.hidden[first]),
            Continuations(self.ids[second], self.starts[second], self.hidden[second]),
        )


def continuations(
    trunk: Trunk, prompts: Sequence[Sequence[int]], tokens: int, batch: int = 16, progress: Progress | None = None
) -> Continuations:
    """Continue ``prompts`` greedily by ``tokens`` tokens, in batches, and keep the trunk's states of the whole text."""
    held = Continuations([], [], [])
    eos = trunk.eos_ids
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        new = generate_ids(trunk, NullDrafter(), [Request(prompt, tokens, eos) for prompt in some])
        texts = [[*prompt, *ids] for prompt, ids in zip(some, new, strict=True)]
        padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in enumerate(texts):
            padded[row, : len(text)] = torch.tensor(text)
        hidden = trunk.forward(padded.to(trunk.device), keep=1).hidden  # causal: pads on the right change nothing
        held.ids.extend(texts)
        held.starts.extend(map(len, some))
        # Copies: a view that is sent to another process takes the whole batch with it.
        held.hidden.extend(hidden[row, : len(text)].clone() for row, text in enumerate(texts))
        if progress:
            progress(min(start + batch, len(prompts)), len(prompts))
    return held


@torch.no_grad()
def head_ranks(heads: MedusaHeads, held: Continuations) -> list[Tensor]:
    """Per row int64 [T, K]: where the true token stands in each head's list, 0 for the most likely.

    Row t drafts from the t-th state that a step could start at: the last of the prompt, then those of the
    continuation, up to the one that has a token left to emit after its root. -1 where the text has ended, ``NEVER``
    for a token that is never drafted, or not to be counted on: it only pads the vocabulary, is outside the heads' draft
    vocabulary, or ties with many others.
    """
    texts = zip(held.ids, held.starts, held.hidden, strict=True)
    return [text_ranks(heads, text[0], text[1], judged(heads, *text), heads.config.num) for text in texts]


@torch.no_grad()
def text_ranks(
    drafts: MedusaHeads | EagleLayer,
    ids: Sequence[int],
    start: int,
    depths: Iterable[tuple[Tensor, Tensor]],
    most: int,
) -> Tensor:
    """:func:`head_ranks` of one text; ``depths`` are what :func:`medusa.confidence.judged` tells of ``most`` depths."""
    row = torch.full((max(len(ids) - 1 - start, 0), most), -1)
    for depth, (logits, answer) in enumerate(depths):
        true, logits = logits.gather(1, answer.clamp(min=0)[:, None]), drafts.draftable(logits)
        rank = drafts.choices - 1 - (logits < true).sum(1)  # the last of those that tie
        # where many tie, which of them stands where is chance, though it looks like one and the same rank
        told = (logits == true).sum(1) <= TIES  # never, where one is not a number
        drafted = (answer >= 0) & (answer < drafts.choices) & told & ~logits.isnan().any(1)
        row[: len(answer), depth] = torch.where(drafted, rank, NEVER).cpu()
    return row


def accuracy(ranks: Sequence[Tensor], best: int) -> list[float]:
    """Share of positions at which the true token is among a head's ``best`` candidates; each head has its own count."""
    joined = torch.cat(list(ranks))
    known = (joined >= 0).sum(0)
    hits = ((joined >= 0) & (joined < best)).sum(0)
    return (hits / known.clamp(min=1)).tolist()


def growth(ranks: Sequence[Tensor], size: int) -> list[tuple[int, ...]]:
    """The order in which a tree of ``size`` nodes grows: each node adds the most expected tokens per step.

    A node's gain is the share of positions at which the true continuation begins with the node's path of ranks,
    counted jointly, so that no independence of heads is assumed. A child's gain never exceeds its parent's: taking
    the largest gains first keeps the tree closed, and every beginning of the list is the best tree of its size.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for row in ranks:
        for line in row.tolist():
            known = next((depth for depth, rank in enumerate(line) if rank in (-1, NEVER)), len(line))
            counts.update(tuple(line[:depth]) for depth in range(1, known + 1))
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return order[: size - 1]


def grow(ranks: Sequence[Tensor], size: int) -> Topology:
    """The tree of at most ``size`` nodes with the most expected tokens per step."""
    return grown(growth(ranks, size), size)


def grown(order: Sequence[Sequence[int]], size: int) -> Topology:
    """The tree of at most ``size`` nodes that the beginning of a growth makes."""
    return Topology.from_paths(order[: size - 1]) if order[: size - 1] else Topology.root()


def accepted_paths(topology: Topology, ranks: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Walk the continuations as decoding would: the path of ranks that each step accepts."""
    paths = set(topology.paths)
    accepted = []
    for row in ranks:
        lines = [tuple(line) for line in row.tolist()]
        at = 0
        while at < len(lines):
            length = 0
            while lines[at][: length + 1] in paths and length < topology.depth:
                length += 1
            accepted.append(lines[at][:length])
            at += length + 1
    return accepted


def node_shares(topology: Topology, ranks: Sequence[Tensor]) -> list[float]:
    """For each node of the tree, the share of steps that accept it; the root's is 1."""
    accepted = accepted_paths(topology, ranks)
    counts = Counter(path[:depth] for path in accepted for depth in range(1, len(path) + 1))
    return [1.0, *(counts[path] / max(len(accepted), 1) for path in topology.paths[1:])]


def tokens_per_step(topology: Topology, ranks: Sequence[Tensor]) -> float:
    """Tokens emitted / verifier forwards on the continuations, prefill not counted."""
    steps = len(accepted_paths(topology, ranks))
    return sum(map(len, ranks)) / steps if steps else 1.0


def acceptance(topology: Topology, ranks: Sequence[Tensor]) -> list[float]:
    """For each depth of the tree, of the steps that accepted all above it the share that accepted its token too.

    What the tree lacks is not accepted: a node without children ends the walk as a wrong guess does. The mean accepted
    length is the sum over depths of the product of these shares down to each.
    """
    lengths = [len(path) for path in accepted_paths(topology, ranks)]
    reached = [sum(length >= depth for length in lengths) for depth in range(topology.depth + 1)]
    return [reached[depth + 1] / max(reached[depth], 1) for depth in range(topology.depth)]


@dataclass(frozen=True)
class SizeRow:
    """One tree size: what it brings and what it costs on this machine."""

    nodes: int
    depth: int
    tokens_per_step: float
    step_ms: float
    forward_ms: float
    tokens_per_second: float


@dataclass(frozen=True)
class Calibration:
    """The tree chosen, how often a step accepts each of its nodes, and why it was chosen."""

    topology: Topology
    node_share: list[float]
    rows: list[SizeRow]
    accuracy: dict[str, list[float]]
    temperatures: list[float]  # of each head's probabilities, for dynamic trees
    growth: list[tuple[int, ...]]  # below the root, as of :func:`growth`: every beginning is the best tree of its size
    machine: dict[str, str | int] = field(default_factory=describe)

    @property
    def chosen(self) -> SizeRow:
        """The row of the tree chosen."""
        return next(row for row in self.rows if row.nodes == self.topology.size)

    def as_json(self) -> dict[str, Any]:
        """For ``calibration.json``."""
        return {
            "chosen": asdict(self.chosen),
            "node_share": self.node_share,
            "rows": [asdict(row) for row in self.rows],
            "accuracy": self.accuracy,
            "temperatures": self.temperatures,
            "growth": [list(path) for path in self.growth],
            "machine": self.machine,
        }


def calibrate(
    heads: MedusaHeads,
    held: Continuations,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Calibration:
    """Grow trees on held-out continuations, measure each size's cost here, and choose the most tokens per second.

    Trees are grown on one half of ``held`` and judged on the other; costs are those of one row. The tree of one node is
    plain decoding: if that wins, speculation does not pay on this machine.
    """
    if len(held.ids) < 2:
        raise UserError(f"{len(held.ids)} held-out prompts: calibration needs 2 or more, to grow and to judge")
    grown_on, judged_on = held.halves()
    prompt = held.ids[0][: held.starts[0]]
    return choose(
        head_ranks(heads, grown_on),
        head_ranks(heads, judged_on),
        sizes,
        lambda topologies: step_costs(heads, topologies, [prompt], rounds, progress),
        temperatures(heads, grown_on.ids, grown_on.starts, grown_on.hidden),
    )


def choose(
    ranks: Sequence[Tensor],
    fresh: Sequence[Tensor],
    sizes: Sequence[int],
    costs_of: Callable[[Sequence[Topology]], Sequence[tuple[float, float]]],
    trusted: list[float],
) -> Calibration:
    """The tree of the most tokens per second, whatever drafts.

    Args:
        ranks: where true tokens stand (see :func:`head_ranks`), to grow trees on.
        fresh: the same of other text, to judge them by.
        sizes: numbers of nodes to try.
        costs_of: milliseconds of a step and of the trunk's forward with each of some trees.
        trusted: a temperature for the probabilities of each depth.
    """
    order = growth(ranks, max(sizes))
    trees = {tree.size: tree for tree in (grown(order, size) for size in sorted(set(sizes)))}  # scarce data: fewer
    topologies = list(trees.values())
    rows = []
    for topology, (step_ms, forward_ms) in zip(topologies, costs_of(topologies), strict=True):
        gain = tokens_per_step(topology, fresh)
        rows.append(SizeRow(topology.size, topology.depth, gain, step_ms, forward_ms, 1e3 * gain / step_ms))
    fastest = max(row.tokens_per_second for row in rows)
    chosen = next(row for row in rows if row.tokens_per_second >= GOOD_ENOUGH * fastest)
    found = {"top1": accuracy(fresh, 1), "top5": accuracy(fresh, 5)}
    tree = trees[chosen.nodes]
    return Calibration(tree, node_shares(tree, fresh), rows, found, trusted, order)


def recalibrate(
    folder: Path,
    heads: MedusaHeads,
    held: Continuations,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate on this machine and write the tree and the measurements into the checkpoint."""
    found = calibrate(heads, held, sizes=sizes, rounds=rounds, progress=progress)
    save_tree(folder, found.topology)
    write_json(folder / CALIBRATION, found.as_json())
    return found
