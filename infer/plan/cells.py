"""The measurements in a folder that `medusa plan` goes by: the cost curve of a calibration, the cells of benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from medusa.checkpoint import CALIBRATION, TREE, read_tree
from medusa.errors import UserError
from medusa.expected import Milestone, chain_shares, equal_chain, interpolate, typical
from medusa.files import read_json
from medusa.plots import depth_shares

from ..bench.contenders import REFERENCE
from ..bench.prompt_sets import HELDOUT
from ..bench.run import NULL

T = TypeVar("T")
HEADS = "auto"  # what --drafter calls the run's own heads and tree
REPORTS = ("benchmark/report.json", "report/report.json", "report.json")  # the last: of a folder that is a report's


@dataclass(frozen=True)
class Way:
    """What a cell of a benchmark found of one contender; ``step_ms`` is of the whole batch.

    ``along`` says how steps and their time add up along the text, the time in such steps; empty where the report
    doesn't say it. ``method`` and ``draft_temperature`` are how ``medusa generate`` is told to decode so.
    """

    label: str
    shares: list[float]
    step_ms: float
    first_ms: float
    nodes: int | None
    along: tuple[Milestone, ...] = ()
    method: str = ""
    draft_temperature: float | None = None


@dataclass(frozen=True)
class Cell:
    """One prompt set, temperature and batch size of a benchmark; ``ways`` are ours and lossless, plus ``generate``.

    ``heads_speedup``: how many times faster the run's heads were than no drafts, the reading of the prompts included,
    over outputs of ``max_new_tokens``; None where one of the two was left out.
    """

    prompt_set: str
    temperature: float
    batch_size: int
    ways: dict[str, Way]
    max_new_tokens: int
    heads_speedup: float | None
    source: str

    @property
    def plain(self) -> Way:
        """Decoding without drafts: ours, or where it was left out that of the library."""
        return self.ways.get(NULL) or self.ways[REFERENCE]


@dataclass(frozen=True)
class Curve:
    """``calibration.json``: what a step of one row costs by the nodes of its tree, and what trees bring."""

    points: list[tuple[float, float]]  # nodes, milliseconds of a step
    trees: list[tuple[int, list[float]]]  # nodes, shares by depth
    chosen: int  # nodes of the run's tree

    def step_ms(self, nodes: int, rows: int) -> float:
        """A step of ``rows`` rows is taken to cost as much as one of one row with as many nodes."""
        return interpolate(self.points, nodes * rows) if len(self.points) > 1 else self.points[0][1]


def read_curve(folder: Path) -> Curve:
    """The run's calibration.

    Raises:
        UserError: there is none, or it has no tree of one node, which is plain decoding, or another.
    """
    path = folder / CALIBRATION
    if not path.is_file():
        raise UserError(f"{folder} has no {CALIBRATION}: make it with `medusa calibrate {folder}`")
    return _reading(path, lambda content: _curve(folder, content), f"medusa calibrate {folder}")


def _curve(folder: Path, content: dict[str, Any]) -> Curve:
    rows = sorted(content["rows"], key=lambda row: row["nodes"])
    sizes = [int(row["nodes"]) for row in rows]
    if 1 not in sizes or len(sizes) < 2:
        asked = " ".join(map(str, dict.fromkeys([1, *sizes, 4, 8, 16])))
        raise UserError(
            f"{folder / CALIBRATION} has trees of {', '.join(map(str, sizes))} nodes: a plan needs that of 1, plain"
            f" decoding, and others; `medusa calibrate {folder} --sizes {asked}`"
        )
    trees = []
    for row in rows[1:]:
        depth = int(row["depth"])
        shares = chain_shares(equal_chain(row["tokens_per_step"], depth), depth)
        if row["nodes"] == content["chosen"]["nodes"] and (folder / TREE).is_file():
            shares = _measured(folder, content["node_share"]) or shares
        trees.append((int(row["nodes"]), shares))
    return Curve([(float(row["nodes"]), float(row["step_ms"])) for row in rows], trees, content["chosen"]["nodes"])


def _measured(folder: Path, node_share: list[float]) -> list[float]:
    """The chosen tree's shares by depth; empty where tree.json was changed since."""
    topology = read_tree(folder)
    return depth_shares(topology, node_share) if topology.size == len(node_share) else []


def read_cells(folder: Path) -> list[Cell]:
    """The cells of all benchmark reports in ``folder``. UserError for one that can't be read."""
    cells: list[Cell] = []
    for name in REPORTS:
        path = folder / name
        if path.is_file():
            cells += _reading(path, lambda report, name=name: _cells(report, name), f"medusa bench {folder}")  # type: ignore[misc]
    return cells


def _reading(path: Path, read: Callable[[dict[str, Any]], T], command: str) -> T:
    """What ``read`` makes of a JSON file; what it lacks is the user's to mend."""
    content = read_json(path)
    try:
        return read(content)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path} lacks what a plan needs ({error!r}): make it anew with `{command}`") from error


def _cells(report: dict[str, Any], source: str) -> list[Cell]:
    return _axes_cells(report, source) if "cells" in report else [_one_cell(report, source)]


def _one_cell(report: dict[str, Any], source: str) -> Cell:
    """The report of a run alone: greedy, one row, its held-out text."""
    heads, tokens, speedup = report["drafter"], report["options"]["max_new_tokens"], None
    ways = {name: _timed(report, name) for name in (REFERENCE, NULL)}
    if (name := heads["name"]) != NULL:
        shares = report["accepted"]["share"]
        ways[HEADS] = replace(_timed(report, name), label=_label(HEADS, heads), shares=shares, nodes=_nodes(heads))
        speedup = next(each["median"] for each in report["speedups"] if (each["of"], each["over"]) == (name, NULL))
    return Cell(HELDOUT, 0.0, 1, ways, tokens, speedup, source)


def _timed(report: dict[str, Any], name: str) -> Way:
    """A contender by its timed runs, which all have the same number of tokens: medians, as some runs are disturbed."""
    found, tokens = report["contenders"][name], report["options"]["max_new_tokens"]
    whole_ms = 1e3 * median(run for row in report["seconds"][name] for run in row)
    first_ms = found["prefill_ms"]
    if first_ms is None:  # generate doesn't tell it apart
        first_ms = whole_ms / tokens
    step_ms = (whole_ms - first_ms) / (tokens - 1) * found["tokens_per_step"]
    along = _along(report.get("pace", {}).get(name, []), step_ms)
    return Way(name, [], step_ms, first_ms, 1 if name == NULL else None, along)


def _axes_cells(report: dict[str, Any], source: str) -> list[Cell]:
    cells = []
    for cell in report["cells"]:
        ways = {}
        for name, figures in cell["contenders"].items():
            facts = report["contenders"][name]
            usable = (facts["ours"] and facts["lossless"]) or name == REFERENCE
            if usable and (step_ms := _step_ms(figures["trials"], cell["batch_size"])) is not None:
                shares = figures["accepted"]["share"]
                along = _along([[each.get("pace") for each in batch] for batch in figures["trials"]], step_ms)
                first_ms, how = figures["first_token_ms"], (facts.get("drafter", name), facts.get("draft_temperature"))
                ways[name] = Way(_label(name, facts), shares, step_ms, first_ms, _nodes(facts), along, *how)
        rates = {name: cell["contenders"][name]["speedup"]["median"] for name in ways}
        speedup = rates[HEADS] / rates[NULL] if HEADS in rates and NULL in rates else None
        where = cell["prompt_set"], cell["temperature"], cell["batch_size"]
        cells.append(Cell(*where, ways, report["options"]["max_new_tokens"], speedup, source))
    return cells


def _step_ms(trials: list[list[dict[str, Any]]], rows: int) -> float | None:
    """Milliseconds of a step of the batch, median over runs; None without a step.

    A forward counts once for each row that it serves, so the steps that end after others cost their rows more.
    """
    runs = [each for batch in trials for each in batch if each["steps"]]
    if not runs:
        return None
    return 1e3 * rows * median((each["seconds"] - each["first_seconds"]) / each["steps"] for each in runs)


def _along(runs: list[list[Any]], step_ms: float) -> tuple[Milestone, ...]:
    """The typical text's milestones from those of runs [prompt][repeat], in times of ``step_ms``; empty without any."""
    texts = []
    for repeats in runs:
        known = [
            [Milestone(int(n), steps, 1e3 * taken / step_ms) for n, steps, taken in each] for each in repeats if each
        ]
        if known:
            texts.append(typical(known))
    found = typical(texts) if texts else []
    return tuple(found) if found and found[-1].tokens > 1 else ()


def _nodes(facts: dict[str, Any]) -> int | None:
    return facts["tree"]["nodes"] if facts.get("tree") else None


def _label(name: str, facts: dict[str, Any]) -> str:
    name, nodes = facts.get("drafter", name), _nodes(facts)
    called = facts["name"] if name == HEADS else name
    warmth = facts.get("draft_temperature")
    at = f", drafts at {warmth:g} T" if warmth else ""
    return f"{called}, {nodes} nodes{at}" if nodes else f"{called}{at}"
