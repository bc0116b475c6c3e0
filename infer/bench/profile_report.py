"""What a profile comes to, in figures, tables and sentences: each part's share of a step, and how far the limits are.

Dimensions: N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, mode
from typing import Any

from medusa.machine import Rates
from medusa.tables import Table
from medusa.trunk import Trunk

from .profile import CLOCKS, HEADS, NOT_OURS, PARTS, Parts

# What is aimed at, on an ordinary machine.
OWN_SHARE = "below 5 % with the demo's trunk, below 2 % with SmolLM2-135M's"
OVERHEAD, BOUND = 1.10, 1.3


def trunk_bytes(trunk: Trunk, view: int) -> int:
    """Bytes that a forward has to read: its weights once, and the keys and values of ``view`` slots.

    An embedding that is not the projection too is left out, since few of its rows are read. Experts count as all read.
    """
    return _weights(trunk, lambda weight: weight.numel() * weight.element_size()) + view * sum(
        plane.heads * plane.size * plane.dtype.itemsize
        for layer in trunk.layers
        for plane in (layer.keys, layer.values)
    )


def trunk_operations(trunk: Trunk, nodes: int, view: int) -> int:
    """Operations of a forward of so many nodes: two per weight and node, and attention's two products."""
    attention = sum(
        trunk.config.num_attention_heads * (layer.keys.size + layer.values.size) * view for layer in trunk.layers
    )
    return 2 * nodes * (_weights(trunk, lambda weight: weight.numel()) + attention)


def _weights(trunk: Trunk, count: Callable[[Any], int]) -> int:
    embedding, head = (
        each.weight for each in (trunk.model.get_input_embeddings(), trunk.model.get_output_embeddings())
    )
    return sum(map(count, trunk.model.parameters())) - (0 if embedding is head else count(embedding))


def account(trunk: Trunk, steps: Sequence[Parts], rates: Rates) -> dict[str, Any]:
    """The figures of one drafter, as JSON can hold them, of its steps with the usual number of nodes.

    ``parts``: median milliseconds of each and its share of all time. ``own_share`` is what is neither the trunk's
    forward nor the heads', ``overhead`` the step less the heads over the trunk's forward of the same shape. ``bound``
    is the least time of that forward by the machine's rates.
    """
    nodes = mode(step.nodes for step in steps)
    whole = [step for step in steps if step.nodes == nodes]
    time, view = sum(step.total for step in whole), round(median(step.view for step in whole))
    parts = {}
    for part in PARTS:
        each = [step.seconds.get(part, 0.0) for step in whole]
        parts[part] = {"ms": 1e3 * median(each), "share": sum(each) / time}
    own = [step.total - sum(step.seconds.get(part, 0.0) for part in NOT_OURS) for step in whole]
    bare_ms = 1e3 * median(step.bare for step in whole)
    return {
        "nodes": nodes,
        "steps": len(whole),
        "tokens_per_step": sum(step.tokens for step in whole) / len(whole),
        "step_ms": 1e3 * median(step.total for step in whole),
        "parts": parts,
        "own_ms": 1e3 * median(own),
        "own_share": sum(own) / time,
        "bare_ms": bare_ms,
        "overhead": median((step.total - step.seconds.get(HEADS, 0.0)) / step.bare for step in whole),
        "bound": _bound(trunk, nodes, view, rates, bare_ms),
    }


def _bound(trunk: Trunk, nodes: int, view: int, rates: Rates, bare_ms: float) -> dict[str, Any]:
    bytes_, operations = trunk_bytes(trunk, view), trunk_operations(trunk, nodes, view)
    read_ms, compute_ms = 1e3 * bytes_ / rates.bytes_per_second, 1e3 * operations / rates.operations_per_second
    ms = max(read_ms, compute_ms)
    return {
        "view": view,
        "bytes": bytes_,
        "operations": operations,
        "read_ms": read_ms,
        "compute_ms": compute_ms,
        "ms": ms,
        "ratio": bare_ms / ms,
    }


def tables(report: dict[str, Any]) -> list[Table]:
    """The parts of a step, and the limits."""
    found = report["drafters"]
    heads = [called(*named) for named in found.items()]
    parts = Table("Where a step's time goes: milliseconds, share", ["part", *heads], [])
    for part, says in PARTS.items():
        each = [figures["parts"][part] for figures in found.values()]
        if any(one["share"] >= 5e-4 for one in each):
            parts.rows.append([says, *(f"{one['ms']:.3f}  {one['share']:6.1%}" for one in each)])
    parts.rows.append(["the whole step", *(f"{figures['step_ms']:.3f}  100.0%" for figures in found.values())])
    limits = Table("Against the limits", ["", *heads], [])
    for says, show in LIMITS.items():
        limits.rows.append([says, *map(show, found.values())])
    return [parts, limits]


LIMITS: dict[str, Callable[[dict[str, Any]], str]] = {
    "our share of the step": lambda each: f"{each['own_share']:.1%}",
    "our time, ms": lambda each: f"{each['own_ms']:.3f}",
    "(step - heads) / bare trunk forward": lambda each: f"{each['overhead']:.2f}",
    "bare trunk forward, ms": lambda each: f"{each['bare_ms']:.3f}",
    "reading weights and cache, ms": lambda each: f"{each['bound']['read_ms']:.3f}",
    "operations, ms": lambda each: f"{each['bound']['compute_ms']:.3f}",
    "bare trunk forward / the larger of them": lambda each: f"{each['bound']['ratio']:.2f}",
    "tokens per step": lambda each: f"{each['tokens_per_step']:.2f}",
}


def called(name: str, figures: dict[str, Any]) -> str:
    """A drafter in tables and plots."""
    return f"{'no drafts' if name == 'none' else name}, {figures['nodes']} node{'s' * (figures['nodes'] > 1)}"


def notes(report: dict[str, Any]) -> list[str]:
    """What a reader has to know beside the tables."""
    rates, machine, trunk = report["rates"], report["machine"], report["trunk"]
    steps = ", ".join(str(figures["steps"]) for figures in report["drafters"].values())
    read, done = rates["bytes_per_second"] / 1e9, rates["operations_per_second"] / 1e9
    return [
        f"{machine['processor']}, {machine['threads']} threads on {machine['cores']} cores, accelerator"
        f" {machine['accelerator']}, torch {machine['torch']}; trunk {trunk['family']},"
        f" {trunk['parameters'] / 1e6:.1f} M parameters in {trunk['dtype']}, steps"
        f" {'compiled' if report['compiled'] else 'eager'}; {steps} steps, by {CLOCKS[report['clock']]}",
        f"Rates of this machine, measured {rates['measured']}: {read:.1f} GB/s over {rates['read_bytes'] / 1e6:.0f} MB,"
        f" {done:,.0f} GFLOP/s in {rates['dtype']}: the best that was seen. On a machine that does other work too,"
        " steps fall behind",
        f"Aims: our share {OWN_SHARE}; (step - heads) / bare trunk forward at most {OVERHEAD:.2f}; bare trunk forward"
        f" at most {BOUND} of its limit. The trunk's forward and the heads are not our share, all else is",
    ]
