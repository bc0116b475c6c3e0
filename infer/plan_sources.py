"""The ways of decoding that `medusa plan` chooses from, with what is expected of each at the user's load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from medusa.checkpoint import CALIBRATION, MANIFEST, WEIGHTS, read_manifest
from medusa.errors import UserError, nearest
from medusa.expected import interpolate

from .bench import NULL
from .contenders import REFERENCE
from .plan_cells import HEADS, Cell, Curve, Way, read_cells, read_curve
from .plan_load import Load

OF_HEADS = (HEADS, "dynamic", "mixed")  # drafters that need the run's heads
WEIGHTLESS = ("none", "cut", "prompt-lookup", "lookahead")  # and that bring no weights; others name a folder
SIMILAR = 2  # times longer or shorter than benchmarked, up to which outputs are taken to be drafted as well
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Candidate:
    """A way of decoding at the user's load.

    Args:
        method: as ``--drafter`` takes it.
        label: what it is called in tables.
        shares: shares of depths 1, 2, … (:mod:`medusa.expected`).
        step_ms: milliseconds of a step of the whole batch.
        plain_ms: the same of plain decoding, measured beside it.
        first_ms: until the first token of each row, the reading of the prompts.
        plain_first_ms: the same of plain decoding.
        nodes: of the tree, where it is one and the same.
        memory_mb: of what it adds to the trunk, in 10^6 bytes; None where that isn't known.
        source: which file it comes from.
        made: whether ``--drafter METHOD`` decodes so as things stand; else its tree has to be made first.
        estimated: what was not measured at this load but concluded; empty where it was measured.
    """

    method: str
    label: str
    shares: list[float]
    step_ms: float
    plain_ms: float
    first_ms: float
    plain_first_ms: float
    nodes: int | None
    memory_mb: float | None
    source: str
    made: bool = True
    estimated: str = ""


def gather(folder: Path, load: Load, prompt_set: str | None = None) -> tuple[list[Candidate], Way | None, list[str]]:
    """All candidates in ``folder`` at ``load``, plain ``generate`` there if it was measured, and what to know of them.

    Raises:
        UserError: a run without calibration, a folder with neither that nor a report, or an unknown prompt set.
    """
    cells = read_cells(folder)
    run = (folder / MANIFEST).is_file()
    if not run and not cells and not (folder / CALIBRATION).is_file():
        raise UserError(
            f"{folder} holds neither a run nor a benchmark's report: give a folder made by `medusa train` or `medusa"
            " bench`, or assumed numbers with --alpha and --cost"
        )
    curve = read_curve(folder) if run or not cells else None
    notes: list[str] = []
    at, exact, scaled = _at_load(_of_set(cells, prompt_set), load, curve, notes)
    if at is not None and not 1 / SIMILAR <= load.max_new_tokens / at.max_new_tokens <= SIMILAR:
        notes.append(
            f"Benchmarked on outputs of {at.max_new_tokens} tokens: of {load.max_new_tokens} another share may be"
            " accepted, above all where greedy text comes to repeat itself. Measure it with `medusa bench"
            f" {folder} --max-new-tokens {max(load.max_new_tokens, 2)}`."
        )
    found = [_from_cell(folder, at, name, exact) for name in at.ways if name not in (NULL, REFERENCE)] if at else []
    if curve is not None and (load.one_greedy_row or at is None or scaled):  # else the benchmark knows better
        known = {each.nodes for each in found if each.method == HEADS}
        first_ms = at.plain.first_ms if at else None
        found += [each for each in from_curve(folder, curve, load, first_ms) if each.nodes not in known]
        notes += _cautions(folder, load)
    return found, at.ways.get(REFERENCE) if at else None, notes


def _cautions(folder: Path, load: Load) -> list[str]:
    """What a calibration, which is of one greedy row, leaves open at ``load``."""
    lines = []
    if load.temperature > 0:
        lines.append(
            f"Calibration is greedy: at temperature {load.temperature:g} less is accepted."
            f" Measure it with `medusa bench {folder} --temperatures {load.temperature:g}`."
        )
    if load.batch_size > 1:
        lines.append(
            f"The cost of {load.batch_size} rows is read off the curve of one row, at {load.batch_size} times the"
            f" nodes, and may be higher. Measure it with `medusa bench {folder} --batch-sizes {load.batch_size}`."
        )
    return lines


def _of_set(cells: list[Cell], prompt_set: str | None) -> list[Cell]:
    """The cells of a prompt set, by default the first one."""
    names = list(dict.fromkeys(cell.prompt_set for cell in cells))
    if prompt_set is None:
        return [cell for cell in cells if cell.prompt_set == names[0]]
    if prompt_set not in names:
        known = ", ".join(names) or "none"
        raise UserError(
            f"prompt_set={prompt_set!r} was not benchmarked{nearest(prompt_set, names)}: there is {known};"
            f" `medusa bench RUN --prompt-set {prompt_set}` measures it"
        )
    return [cell for cell in cells if cell.prompt_set == prompt_set]


def _at_load(cells: list[Cell], load: Load, curve: Curve | None, notes: list[str]) -> tuple[Cell | None, bool, bool]:
    """The cell at the load's temperature and batch size, or one concluded from others.

    Also, whether it was measured, and if not whether its costs are scaled by the calibration's curve.
    """
    if not cells:
        return None, False, False
    nearest_T = min((cell.temperature for cell in cells), key=lambda each: abs(each - load.temperature))
    if nearest_T != load.temperature:
        notes.append(
            f"Benchmarked at temperature {nearest_T:g}, not {load.temperature:g}: acceptance is that of there."
        )
    sizes = {cell.batch_size: cell for cell in reversed(cells) if cell.temperature == nearest_T}
    if load.batch_size in sizes:
        return sizes[load.batch_size], nearest_T == load.temperature, False
    closest = sizes[min(sizes, key=lambda each: abs(each - load.batch_size))]
    known = ", ".join(map(str, sorted(sizes)))
    if len(sizes) > 1:
        notes.append(f"Benchmarked with {known} rows: what {load.batch_size} cost lies on the line through them.")
        return _on_line(closest, sizes, load.batch_size), False, False
    ways = {name: _scaled(way, curve, closest, load.batch_size) for name, way in closest.ways.items()}
    kept = {name: way for name, way in ways.items() if way is not None}
    if out := [name for name in ways if name not in kept and name != REFERENCE]:
        notes.append(f"Benchmarked with {known} rows only, so left out: {', '.join(out)}.")
    return (replace(closest, batch_size=load.batch_size, ways=kept) if NULL in kept else None), False, True


def _on_line(closest: Cell, sizes: dict[int, Cell], rows: int) -> Cell:
    """Acceptance of the closest batch size, times on the line through those measured."""
    ways = {}
    for name, way in closest.ways.items():
        here = {size: cell.ways[name] for size, cell in sizes.items() if name in cell.ways}
        if len(here) > 1:
            step = interpolate([(size, each.step_ms) for size, each in here.items()], rows)
            first = interpolate([(size, each.first_ms) for size, each in here.items()], rows)
            ways[name] = replace(way, step_ms=step, first_ms=first)
    return replace(closest, batch_size=rows, ways=ways)


def _scaled(way: Way, curve: Curve | None, cell: Cell, rows: int) -> Way | None:
    """A way with the cost of more rows by the calibration's curve; None for what that says nothing of."""
    nodes = 1 if way is cell.ways.get(NULL) else way.nodes
    if curve is None or nodes is None or way.label == REFERENCE:
        return None
    dearer = curve.step_ms(nodes, rows) / curve.step_ms(nodes, cell.batch_size)
    return replace(way, step_ms=way.step_ms * dearer, first_ms=way.first_ms * rows / cell.batch_size)


def _from_cell(folder: Path, cell: Cell, name: str, exact: bool) -> Candidate:
    way, plain = cell.ways[name], cell.plain
    return Candidate(
        method=name,
        label=way.label,
        shares=way.shares,
        step_ms=way.step_ms,
        plain_ms=plain.step_ms,
        first_ms=way.first_ms,
        plain_first_ms=plain.first_ms,
        nodes=way.nodes,
        memory_mb=_memory(folder, name),
        source=f"{cell.source}, {cell.prompt_set}",
        estimated="" if exact else "from another load",
    )


def from_curve(folder: Path, curve: Curve, load: Load, first_ms: float | None) -> list[Candidate]:
    """The calibration's trees at ``load``; ``first_ms``: the reading of the prompts, where it was measured."""
    rows = load.batch_size
    plain_ms = curve.step_ms(1, rows)
    first_ms = plain_ms if first_ms is None else first_ms  # the least that it can be
    kind = read_manifest(folder).heads.kind if (folder / MANIFEST).is_file() else "heads"
    return [
        Candidate(
            method=HEADS,
            label=f"{kind}, {nodes} nodes",
            shares=shares,
            step_ms=curve.step_ms(nodes, rows),
            plain_ms=plain_ms,
            first_ms=first_ms,
            plain_first_ms=first_ms,
            nodes=nodes,
            memory_mb=_memory(folder, HEADS),
            source=CALIBRATION,
            made=nodes == curve.chosen,
            estimated="" if load.one_greedy_row else "from one greedy row",
        )
        for nodes, shares in curve.trees
    ]


def _memory(folder: Path, method: str) -> float | None:
    """What the weights of a drafter take beside the trunk's, in 10^6 bytes."""
    word, _, about = method.partition(":")
    if word in OF_HEADS:
        return (folder / WEIGHTS).stat().st_size / 1e6 if (folder / WEIGHTS).is_file() else None
    if word in WEIGHTLESS:
        return 0.0
    if not about:
        return None
    files = [file for kind in WEIGHT_FILES for file in Path(about).expanduser().glob(kind)]
    return sum(file.stat().st_size for file in files) / 1e6 if files else None
