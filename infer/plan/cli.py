"""The command ``medusa plan``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.cli import new_parser, parse
from medusa.errors import UserError, reason
from medusa.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .picker import Assumed, Check, Plan

DESCRIPTION = (
    "Recommend a way of decoding, or none, for a load, and say how much faster it is. It goes by what `medusa"
    " calibrate` and `medusa bench` measured in a run's folder; no model is loaded. Without a run it goes by assumed"
    " numbers: --alpha and --cost."
)
JSON, PNG = "plan.json", "plan.png"


def run(command: str, argv: list[str]) -> int:
    """Run ``medusa plan ARGV``; return the exit code."""
    from .load import Load
    from .picker import ALPHAS

    parser = new_parser("plan", DESCRIPTION)
    parser.add_argument(
        "run", type=str, nargs="?", help="a folder made by `medusa train`, or that of a benchmark's report"
    )
    parser.add_class_arguments(Load)
    parser.add_argument("--prompt_set", type=str, help="of those benchmarked; left out, the first of the report")
    parser.add_argument(
        "--alpha",
        type=float,
        nargs="+",
        help="assumed: the share of drafted tokens that are accepted, below 1, one or several;"
        f" left out with --cost, {', '.join(map(str, ALPHAS))}",
    )
    parser.add_argument(
        "--cost", type=float, help="assumed: the time of drafting a token, as a share of a trunk forward, above 0"
    )
    parser.add_argument("--max_drafted", type=int, default=16, help="assumed: the longest chain that is considered")
    parser.add_argument("--explain", action="store_true", help="show the arithmetic")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    parser.add_argument("--out", type=str, help=f"a folder for {JSON} and {PNG}; left out, nothing is written")
    args = parse(parser, argv)
    _check(args.run, args.alpha, args.cost, args.prompt_set)
    load = Load(**{field.name: args[field.name] for field in fields(Load)})
    if args.run is None:
        return _assumed(args, load)
    return _measured(args, load)


def _check(folder: str | None, alpha: list[float] | None, cost: float | None, prompt_set: str | None) -> None:
    """Refuse what does not make one question."""
    if folder is not None and (alpha is not None or cost is not None):
        raise UserError(f"{folder} was measured, --alpha and --cost are assumed: give one of the two")
    if folder is None and cost is None:
        if alpha is None:
            raise UserError("nothing to plan by: give a folder made by `medusa train`, or --alpha and --cost")
        raise UserError("--alpha without --cost: give the time of drafting a token, such as --cost 0.1 trunk forwards")
    if folder is None and prompt_set is not None:
        raise UserError(f"--prompt-set {prompt_set} belongs to a run's benchmark: name the run, or leave it out")


def _assumed(args: Any, load: Any) -> int:
    from .picker import ALPHAS, assume
    from .plots import assumed

    found = assume(args.alpha or ALPHAS, args.cost, load, args.max_drafted)
    if args.out:
        _write(Path(args.out).expanduser(), found.as_json(), assumed(found))
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _say([_chains(found)], _chain_lines(found, args.explain), args.out)
    return 0


def _measured(args: Any, load: Any) -> int:
    from .picker import checks, plan
    from .plots import measured

    folder = Path(args.run).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {args.run} here: give one made by `medusa train`, or --alpha and --cost")
    found, checked = plan(folder, load, args.prompt_set), checks(folder)
    if args.out:
        _write(Path(args.out).expanduser(), found.as_json(), measured(found))
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _say([_candidates(found)], _lines(found, checked, args.run, args.explain), args.out)
    return 0


def _say(tables: list[Table], lines: list[str], out: str | None) -> None:
    from ..bench.report import print_tables

    print_tables(tables, lines)
    if out:
        print_tables([], [f"Plan and plot: {Path(out).expanduser()}"], soft_wrap=True)


def _candidates(found: Plan) -> Table:
    load = found.load
    rows = [
        [
            each.candidate.label + ("  <- recommended" if each is found.chosen else ""),
            f"{each.tokens_per_step:.2f}",
            f"{each.step_ms:.2f}",
            f"{each.step_cost:.2f}",
            f"{each.speedup:.2f}" if each.fits else "no room",
            each.candidate.estimated or "measured",
        ]
        for each in found.predictions
    ]
    about = f"{load.max_new_tokens} tokens, batch {load.batch_size}, temperature {load.temperature:g}"
    return Table(
        f"{about} (x plain: times as fast as no drafts)",
        ["", "tokens/step", "step ms", "plain steps", "x plain", "cost and acceptance"],
        rows,
    )


def _lines(found: Plan, checked: list[Check], folder: str, arithmetic: bool) -> list[str]:
    from .picker import explain

    chosen = found.chosen
    if chosen is None:
        lines = ["Recommended: off. Decode with --drafter none."]
    else:
        way = chosen.candidate
        warmth = "" if way.draft_temperature is None else f" --draft-temperature {way.draft_temperature:g}"
        how = f"Decode with --drafter {way.method}{warmth}."
        if not way.made:
            how = f"Make its tree with `medusa calibrate {folder} --sizes 1 {way.nodes}`."
        lines = [f"Recommended: {way.label}, {chosen.speedup:.2f} x as fast as without drafts. {how}"]
    lines += found.why
    if found.over_generate is not None:
        slower = ", so that is faster still" if found.over_generate < 1 else ""
        lines.append(f"It is {found.over_generate:.2f} x as fast as plain generate of transformers{slower}.")
    lines += [f"Note: {note}" for note in found.notes]
    if arithmetic:
        lines += [line for each in found.predictions for line in explain(each, found.load)]
        for each in checked:
            off = each.predicted / each.measured - 1
            lines.append(
                f"Check: by calibration {each.label} are {each.predicted:.2f} x as fast as no drafts;"
                f" {each.source}: {each.measured:.2f} x ({off:+.0%})."
            )
    return lines


def _chains(found: Assumed) -> Table:
    rows = [
        [
            f"{chain.alpha:g}",
            str(chain.best) if chain.best else "off",
            f"{chain.tokens[chain.best]:.2f}",
            f"{chain.speedups[chain.best]:.2f}",
            f"{chain.request_speedup:.2f}",
        ]
        for chain in found.chains
    ]
    heads = ["alpha", "best N", "tokens/forward", "x plain", f"x plain, {found.load.max_new_tokens} tokens"]
    return Table(f"Chains of N drafted tokens, each at {found.cost:g} trunk forwards (assumed)", heads, rows)


def _chain_lines(found: Assumed, arithmetic: bool) -> list[str]:
    from .picker import SHORT

    lines = [
        "Tokens/forward = (1 - a^(N+1)) / (1 - a); x plain = that / (N c + 1) (Leviathan et al. 2023, equation 1 and"
        " theorem 3.8). The last column counts the prompt's reading as one forward, and cuts the last step's surplus."
    ]
    load, off = found.load, [f"{chain.alpha:g}" for chain in found.chains if not chain.best]
    if off:
        lines.append(f"Off at alpha {', '.join(off)}: drafting a token costs as much as it brings, or more.")
    if load.max_new_tokens <= SHORT:
        lines.append(
            f"Outputs as short as {load.max_new_tokens}: the reading of the prompt dominates, and stays as it is."
        )
    if load.batch_size > 1 or load.temperature > 0 or load.free_memory_mb is not None:
        lines.append(
            "Batch size, temperature and memory change alpha and cost: give those of your load, or a measured run."
        )
    if arithmetic:
        for chain in found.chains:
            a, n, c, tokens = chain.alpha, chain.best, found.cost, chain.tokens[chain.best]
            formula = f"(1 - {a:g}^{n + 1}) / (1 - {a:g}) = {tokens:.3f}"
            lines.append(f"a = {a:g}: {formula}; {tokens:.3f} / ({n} x {c:g} + 1) = {chain.speedups[n]:.3f}")
    return lines


def _write(folder: Path, content: dict[str, Any], figure: Figure) -> None:
    """Write JSON and PNG. Raises UserError where that can't be."""
    from medusa.files import write_bytes, write_json
    from medusa.plots import png

    try:
        write_bytes(folder / PNG, png(figure))
        write_json(folder / JSON, content)
    except OSError as error:
        raise UserError(f"{folder} can't be written ({reason(error)}): name another folder with --out") from error
