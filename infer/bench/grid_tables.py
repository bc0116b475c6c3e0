"""The report of the reference benchmark as tables of text and sentences."""

from __future__ import annotations

from typing import Any

from medusa.tables import Table, compiled_line, machine_line, verdict

from .contenders import REFERENCE

TYPICAL = "+typical"  # behind a drafter's name: its drafts are accepted by the typical rule, which is lossy
WARMTH = "@"  # behind that: the draft temperature, where it is not the usual one


def label(report: dict[str, Any], name: str) -> str:
    """What a contender is called: what it drafts with, and whether its law is not the trunk's."""
    about = report["contenders"][name]
    if name == "none":
        return "no drafts"
    called = about.get("drafter", name).removesuffix(TYPICAL)
    tree = ""
    if called == "auto":
        called, nodes = about["name"], about["tree"]["nodes"]
        tree = f", {nodes} nodes" if nodes > 1 else ", root alone"
    if about.get("draft_temperature"):
        tree += f", drafts at {about['draft_temperature']:g} T"
    return f"{called}{tree}" if about["lossless"] else f"{called}{tree}, typical (lossy)"


def tables(report: dict[str, Any]) -> list[Table]:
    """For each prompt set: its figures in every cell; by category; and what was accepted by depth."""
    made = []
    for name in report["prompt_sets"]:
        cells = [cell for cell in report["cells"] if cell["prompt_set"] == name]
        made.append(_figures(report, name, cells))
        made += [_by_category(report, cell) for cell in cells if len(report["prompt_sets"][name]["categories"]) > 1]
        made.append(_by_depth(report, cells[0]))
    return [table for table in made if table.rows]


def where(cell: dict[str, Any]) -> str:
    """Temperature and batch size of a cell."""
    return f"temperature {cell['temperature']:g}, batch {cell['batch_size']}"


def _figures(report: dict[str, Any], name: str, cells: list[dict[str, Any]]) -> Table:
    heads = ["", "tokens/s", "first ms", "ms/token", "tokens/step", "x generate", "x after"]
    rows = []
    for cell in cells:
        if len(cells) > 1:
            rows.append([f"T {cell['temperature']:g}, batch {cell['batch_size']}", *[""] * (len(heads) - 1)])
        for contender, figures in cell["contenders"].items():
            decode_ms = figures["decode_ms_per_token"]
            row = [
                label(report, contender),
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['first_token_ms']:.1f}",
                "" if decode_ms is None else f"{decode_ms:.2f}",
                _ranged(figures["tokens_per_step"], "value"),
            ]
            ratios = [_ranged(figures["speedup"], "median"), _ranged(figures["decode_speedup"], "median", bounds=False)]
            rows.append([*row, *(["1", "1"] if contender == REFERENCE else ratios)])
    about = report["prompt_sets"][name]
    several = f" in {len(about['categories'])} categories" if len(about["categories"]) > 1 else ""
    alone = f", {where(cells[0])}" if len(cells) == 1 else ""
    return Table(f"{name}: {about['prompts']} prompts{several}{alone} (brackets: 95 % interval)", heads, rows)


def _ranged(found: dict[str, float] | None, key: str, bounds: bool = True) -> str:
    if found is None:
        return ""
    bounds = bounds and found["low"] < found["high"]  # without drafts each step gives one token
    return f"{found[key]:.2f}" + (f" [{found['low']:.2f}, {found['high']:.2f}]" if bounds else "")


def _by_category(report: dict[str, Any], cell: dict[str, Any]) -> Table:
    names = [name for name in cell["contenders"] if name != REFERENCE]
    rows = []
    for category in cell["contenders"][REFERENCE]["categories"]:
        row = [category]
        for name in names:
            part = cell["contenders"][name]["categories"][category]
            steps = part["tokens_per_step"]
            row.append(f"{part['speedup']['median']:.2f}" + (f" ({steps['value']:.2f})" if steps else ""))
        rows.append(row)
    title = f"{cell['prompt_set']} by category, {where(cell)}: x generate (tokens/step)"
    return Table(title, ["", *(label(report, name) for name in names)], rows)


def _by_depth(report: dict[str, Any], cell: dict[str, Any]) -> Table:
    shares = {name: figures["accepted"]["share"] for name, figures in cell["contenders"].items()}
    depth = max(map(len, shares.values()))
    rows = [
        [label(report, name), *(f"{each:.1%}" for each in share), *[""] * (depth - len(share))]
        for name, share in shares.items()
        if share
    ]
    title = f"{cell['prompt_set']}, {where(cell)}: share of steps that accept so many drafted tokens or more"
    return Table(title, ["", *map(str, range(1, depth + 1))], rows)


def notes(report: dict[str, Any]) -> list[str]:
    """What stands below the tables, a sentence each."""
    trunk, options = report["trunk"], report["options"]
    lines = [_identity(report, cell) for cell in report["cells"] if cell["identical"] is not None]
    lines += _left_out(report)
    if lossy := [label(report, name) for name, about in report["contenders"].items() if not about["lossless"]]:
        lines.append(f"Lossy, so its text is not the trunk's own: {'; '.join(lossy)}.")
    of = f" of {report['source']}" if "source" in report else ""
    ends = "an EOS is a token like any other" if options["ignore_eos"] else "less where an EOS ends a row"
    lines += [
        f"Trunk{of}: {trunk['family']}, {trunk['parameters'] / 1e6:.2f} M parameters, {trunk['dtype']}.",
        f"Each prompt is continued by {options['max_new_tokens']} tokens ({ends}), {options['repeats']} times,"
        " contenders in turns.",
        "First: until the first token of each row, so the prompts' reading; ms/token: after it. Tokens/step: tokens"
        " after the first / forwards of the trunk after the prefill, a forward counting once for each row it serves."
        " x: times as fast as generate per token, median over batches, with the prompts' reading and after it.",
        compiled_line(report),
        machine_line(report["machine"]),
    ]
    return lines


def _identity(report: dict[str, Any], cell: dict[str, Any]) -> str:
    found, others = (_named(report, each) for each in (cell["identical"], cell["identical"]["others"]))
    line = f"{cell['prompt_set']}, {where(cell)}: {verdict(found)}"
    if others["equal"] < others["prompts"]:
        line += f" Others, of which that is not asked: {verdict(others)}"
    return line


def _named(report: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The same with contenders as tables call them."""
    kinds = ("near_ties", "mismatches")
    named = {kind: [each | {"contender": label(report, each["contender"])} for each in found[kind]] for kind in kinds}
    return found | named


def _left_out(report: dict[str, Any]) -> list[str]:
    """Each contender that could not be run, with the cells where and the reason."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in report["left_out"]:
        found.setdefault((each["contender"], each["why"]), []).append(each)
    lines = []
    for (name, why), cells in found.items():
        sizes = ", ".join(dict.fromkeys(str(cell["batch_size"]) for cell in cells))
        lines.append(f"Left out of {len(cells)} of {len(report['cells'])} cells (batch {sizes}): {name}: {why}.")
    return lines
