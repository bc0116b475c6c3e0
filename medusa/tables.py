"""The benchmark's report as tables of text, for whoever shows them: a terminal, Markdown, a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A title, column heads and rows of text; the first column is text, the others numbers."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def label(report: dict[str, Any], name: str) -> str:
    """What a contender is called in tables and plots."""
    if name == "none":
        return "no drafts"
    tree = report["drafter"].get("tree")
    if not tree or name != report["drafter"]["name"]:
        return name
    return f"{name}, {tree['nodes']} nodes" if tree["nodes"] > 1 else f"{name}, root alone"


def tables(report: dict[str, Any]) -> list[Table]:
    """The report's tables: speed, acceptance by depth (if anything was accepted), a step and its parts."""
    return [table for table in (_speed(report), _acceptance(report), _step(report)) if table.rows]


def _speed(report: dict[str, Any]) -> Table:
    names = list(report["contenders"])
    found = {(each["of"], each["over"]): each for each in report["speedups"]}
    rows = []
    for name in names:
        figures = report["contenders"][name]
        row = [
            label(report, name),
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['ms_per_token']:.2f}",
            f"{figures['tokens_per_step']:.2f}",
        ]
        rows.append([*row, *(_ratio(found.get((name, over)), name == over) for over in names[:2])])
    heads = ["", "tokens/s", "ms/token", "tokens/step", "x generate", "x no drafts"]
    return Table("Speed (ratios: median over prompts, 95 % interval)", heads, rows)


def _ratio(found: dict[str, Any] | None, same: bool) -> str:
    if found is None:
        return "1" if same else ""
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _acceptance(report: dict[str, Any]) -> Table:
    pairs = zip(report["accepted"]["share"], report["accepted"]["conditional"], strict=True)
    rows = [[str(depth), f"{share:.1%}", f"{given:.1%}"] for depth, (share, given) in enumerate(pairs, start=1)]
    return Table("Accepted by depth", ["depth", "steps that accept it", "of those that accept the one before"], rows)


def _step(report: dict[str, Any]) -> Table:
    rows = [
        [
            label(report, name),
            str(cost["nodes"]),
            *(f"{cost[key]:.3f}" for key in ("step_ms", "heads_ms", "forward_ms", "bare_ms")),
            f"{cost['overhead']:.2f}",
            f"{cost['own_share']:.1%}",
        ]
        for name, cost in report["steps"].items()
    ]
    heads = ["", "nodes", "step ms", "heads ms", "forward ms", "bare ms", "step overhead", "our share"]
    return Table("One step", heads, rows)


def notes(report: dict[str, Any]) -> list[str]:
    """What stands below the tables, a sentence each."""
    trunk, options, null = report["trunk"], report["options"], report["steps"]["none"]
    found = trunk["heldout_loss"]
    loss = "not measured: text too short" if found is None else f"{found:.3f} nats per token"
    nulls_ms = report["contenders"]["none"]["decode_ms_per_token"]
    lines = [
        verdict(report["identical"]),
        f"Trunk: {trunk['family']}, {trunk['parameters'] / 1e6:.2f} M parameters, {trunk['dtype']},"
        f" held-out loss {loss}.",
        f"Timed: {report['identical']['prompts']} held-out prompts of {options['prompt_length']} tokens, continued by"
        f" {options['max_new_tokens']}, {options['repeats']} times each, contenders in turns."
        f" Repeated 4-grams in the text: {report['repeated_4grams']:.1%}.",
        f"Our loop without drafts takes {nulls_ms:.3f} ms per token after the prefill in the timed runs. Taken apart,"
        f" its step takes {null['step_ms']:.3f} ms and a bare trunk forward of one token {null['bare_ms']:.3f} ms.",
        "Forward: the trunk's, inside the step; bare: the same call by itself. Step overhead = (step - heads) / bare."
        " Our share = (step - heads - forward) / step.",
    ]
    return [*lines, compiled_line(report), machine_line(report["machine"])]


def compiled_line(report: dict[str, Any]) -> str:
    """Whether our loop ran compiled, and with packed weights."""
    sizes: dict[int, list[str]] = {}
    for rows, nodes in report.get("compiled") or []:
        sizes.setdefault(rows, []).append(str(nodes))
    layers, ways = report["trunk"].get("packed") or 0, " and ".join(report["trunk"].get("packed_ways") or ["oneDNN"])
    packed = (
        f" The weights of {layers} layers were packed for it ({ways}); the library ran as loaded." if layers else ""
    )
    if not sizes:
        return f"Our loop ran eagerly: none of its steps was compiled.{packed}"
    each = "; ".join(f"{rows} row{'s' * (rows > 1)} of {', '.join(nodes)}" for rows, nodes in sizes.items())
    return f"Our loop's steps were compiled, for these rows and nodes: {each}. All else ran eagerly.{packed}"


def machine_line(machine: dict[str, Any]) -> str:
    """What a report was measured on, as a sentence."""
    accelerator = "" if machine["accelerator"] == "none" else f", {machine['accelerator']}"
    return (
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads used{accelerator};"
        f" torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}."
    )


def verdict(found: dict[str, Any]) -> str:
    """Whether outputs are those of ``generate``, and where not, each first difference."""
    lines = [f"Outputs identical to generate: {found['equal']} of {found['prompts']} prompts."]
    for kind, which in (("near-tie", "near_ties"), ("MISMATCH", "mismatches")):
        for each in found[which]:
            gap = "one output ends early" if each["gap"] is None else f"top-2 logit gap {each['gap']:.2g}"
            lines.append(f"{kind}: {each['contender']}, prompt {each['prompt']}, token {each['position']}: {gap}.")
    return " ".join(lines)
