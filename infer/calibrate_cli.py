"""The command ``medusa calibrate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.cli import new_parser, parse
from medusa.errors import UserError, reason

from .cli import add_machine, fastest_threads, quiet_unless_terminal, set_threads

if TYPE_CHECKING:
    import jsonargparse

    from medusa.calibrate import Calibration
    from medusa.trunk import Trunk


def calibrate(argv: list[str]) -> int:
    """Measure trees on this machine and save the fastest in the run's folder."""
    from .bench.report import check_writable
    from .drafters import has_drafts
    from .recipe import CALIBRATED_BY, calibration_settings

    parser = new_parser(
        "calibrate",
        "Choose the token tree that is fastest on this machine, for the run's heads, its EAGLE layer, or both. How much"
        " is measured is what the run's recipe says, unless an option says otherwise.",
    )
    parser.add_argument("run", type=str, help="a folder made by `medusa train`")
    parser.add_argument("--prompts", type=int, help="held-out prompts; half grow the tree, half judge it")
    parser.add_argument("--prompt_tokens", type=int, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, help="tokens that the trunk continues each by")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of nodes to try")
    parser.add_argument("--rounds", type=int, help="times each of them is measured")
    add_machine(parser)
    parser.add_argument(
        "--threads", type=int, help="processor threads; left out, 1 or all: both are measured anew and the faster kept"
    )
    args = parse(parser, argv)
    folder = Path(args.run).expanduser()
    if not has_drafts(folder):
        raise UserError(f"{args.run} has no medusa.json, so no heads, and no EAGLE layer: give a run of `medusa train`")
    settings = calibration_settings(folder, {name: args[name] for name in CALIBRATED_BY})
    check_writable(folder, "its tree can't be replaced; copy the folder to where it can")
    for what, found in _measure(folder, settings, args):
        _print_trees(what, found)
    print(f"saved in {folder}", file=sys.stderr)
    return 0


def _measure(folder: Path, settings: dict[str, Any], args: jsonargparse.Namespace) -> list[tuple[str, Calibration]]:
    from medusa.calibrate import continuations
    from medusa.progress import progress

    from .prompts import heldout_prompts
    from .source import load_trunk

    quiet_unless_terminal()
    trunk = load_trunk(folder, dtype=args.dtype, device=args.device)
    ways = _ways(folder, trunk)
    prompts = heldout_prompts(folder, settings["prompts"], settings["prompt_tokens"], "judging")
    set_threads(args.threads if args.threads is not None else fastest_threads(trunk, prompts[0]))
    with progress(len(prompts), "held-out continuations") as advance:
        held = continuations(
            trunk, prompts, settings["tokens"], progress=lambda done, total: advance(done - advance.done)
        )
    sizes, rounds, measured = settings["sizes"], settings["rounds"], []
    try:
        for what, way in ways:
            with progress(rounds, f"calibration of the {what}") as advance:
                found = way(held=held, sizes=sizes, rounds=rounds, progress=lambda done, total: advance())
            measured.append((what, found))
    except OSError as error:
        raise UserError(f"{folder} can't be written ({reason(error)}): copy it to where it can") from error
    return measured


def _ways(folder: Path, trunk: Trunk) -> list[tuple[str, Callable[..., Calibration]]]:
    """What there is to calibrate, and how."""
    from medusa.calibrate import recalibrate
    from medusa.checkpoint import MANIFEST, load_heads
    from medusa.drafters.eagle import DEPTH
    from medusa.eagle_calibrate import recalibrate_layer
    from medusa.eagle_files import eagle_place, load_eagle

    from .drafters import kept_temperatures

    ways: list[tuple[str, Callable[..., Calibration]]] = []
    if (folder / MANIFEST).is_file():
        ways.append(("heads", partial(recalibrate, folder, load_heads(folder, trunk))))
    if (place := eagle_place(folder)) is not None:
        depth = len(kept_temperatures(place) or ()) or DEPTH  # as it was calibrated before
        ways.append(("EAGLE layer", partial(recalibrate_layer, place, load_eagle(place, trunk), depth=depth)))
    return ways


def _print_trees(what: str, found: Calibration) -> None:
    print(f"trees of the {what}")
    print("nodes  depth  tokens/step  step ms  forward ms  tokens/s")
    for row in found.rows:
        print(
            f"{row.nodes:5}  {row.depth:5}  {row.tokens_per_step:11.2f}  {row.step_ms:7.2f}  {row.forward_ms:10.2f}"
            f"  {row.tokens_per_second:8.0f}{'  <- chosen' if row == found.chosen else ''}"
        )
