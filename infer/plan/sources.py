"""The ways of decoding that `medusa plan` chooses from, with what is expected of each at the user's load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medusa.checkpoint import CALIBRATION, MANIFEST, WEIGHTS, read_manifest
from medusa.errors import UserError, nearest
from medusa.expected import Milestone, at, expected_steps, interpolate, tree_tokens

from ..bench.contenders import REFERENCE
from ..bench.run import NULL
from .cells import HEADS, Cell, Curve, Way, read_cells, read_curve
from .load import Load

OF_HEADS = (HEADS, "sized", "dynamic", "mixed")  # drafters that need the run's heads
WEIGHTLESS = ("none", "cut", "prompt-lookup", "lookahead")  # and that bring no weights; others name a folder
SIMILAR = 2  # times longer than benchmarked up to which outputs are taken to go on alike; or shorter, not along texts
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
        along: how steps, and their time in such steps, add up along the text; left out, as the shares say.
        plain_along: the same of plain decoding.
        draft_temperature: as ``--draft-temperature`` takes it; None for the usual one.
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
    along: tuple[Milestone, ...] = ()
    plain_along: tuple[Milestone, ...] = ()
    draft_temperature: float | None = None

    @property
    def warmth(self) -> float:
        """The draft temperature, as a factor of the rows' own."""
        return 1.0 if self.draft_temperature is None else self.draft_temperature

    def taken(self, tokens: int) -> Milestone:
        """The steps to ``tokens`` tokens, the first included, and their milliseconds."""
        steps = expected_steps(self.shares, tokens - 1)
        found = at(self.along, tokens) if self.along else Milestone(tokens, steps, steps)
        return replace(found, time=found.time * self.step_ms)

    def plain_taken(self, tokens: int) -> Milestone:
        """The same of plain decoding."""
        return plain_taken(self.plain_along, self.plain_ms, tokens)


def plain_taken(along: Sequence[Milestone], step_ms: float, tokens: int) -> Milestone:
    """The steps to ``tokens`` tokens, the first included, without drafts, and their milliseconds."""
    time = at(along, tokens).time if along else tokens - 1
    return Milestone(tokens, tokens - 1, time * step_ms)


def gather(folder: Path, load: Load, prompt_set: str | None = None) -> tuple[list[Candidate], Way | None, list[str]]:
    """All candidates in ``folder`` at ``load``, plain ``generate`` there if it was measured, and what to know of them.

    Raises:
        UserError: a run without calibration, a folder with neither that nor a report, or an unknown prompt set.
    """
    cells = read_cells(folder)
    run = (folder / MANIFEST).is_file()  # whose heads were calibrated
    if not run and not cells and not (folder / CALIBRATION).is_file():
        raise UserError(
            f"{folder} holds neither a run nor a benchmark's report: give a folder made by `medusa train` or `medusa"
            " bench`, or assumed numbers with --alpha and --cost"
        )
    curve = read_curve(folder) if run or not cells else None
    notes: list[str] = []
    cell, exact, scaled = _at_load(_of_set(cells, prompt_set), load, curve, notes)
    longer = ""
    if cell is not None and not _similar(cell, load):
        longer = "from shorter outputs" if load.max_new_tokens > cell.max_new_tokens else "from longer outputs"
        notes.append(
            f"Benchmarked on outputs of {cell.max_new_tokens} tokens: of {load.max_new_tokens} another share may be"
            " accepted, above all where greedy text comes to repeat itself. Measure it with `medusa bench"
            f" {folder} --max-new-tokens {max(load.max_new_tokens, 2)}`, which then serves for shorter ones as well."
        )
    named = [name for name in cell.ways if name not in (NULL, REFERENCE)] if cell else []
    found = [_from_cell(folder, cell, name, longer if exact else "from another load") for name in named] if cell else []
    if curve is not None and (load.one_greedy_row or cell is None or scaled):  # else the benchmark knows better
        known = {each.nodes for each in found if each.method == HEADS}
        first_ms = cell.plain.first_ms if cell else None
        found += [each for each in from_curve(folder, curve, load, first_ms, cell) if each.nodes not in known]
        notes += _cautions(folder, load)
    return found, cell.ways.get(REFERENCE) if cell else None, notes


def _similar(cell: Cell, load: Load) -> bool:
    """Whether what the cell measured says what outputs as long as the load's take."""
    times = load.max_new_tokens / cell.max_new_tokens
    known = all(way.along for name, way in cell.ways.items() if name != REFERENCE)
    return times <= SIMILAR and (known or times >= 1 / SIMILAR)


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


def _from_cell(folder: Path, cell: Cell, name: str, estimated: str) -> Candidate:
    way, plain = cell.ways[name], cell.plain
    return Candidate(
        method=way.method or name,
        label=way.label,
        shares=way.shares,
        step_ms=way.step_ms,
        plain_ms=plain.step_ms,
        first_ms=way.first_ms,
        plain_first_ms=plain.first_ms,
        nodes=way.nodes,
        memory_mb=_memory(folder, way.method or name),
        source=f"{cell.source}, {cell.prompt_set}",
        estimated=estimated,
        along=way.along,
        plain_along=plain.along,
        draft_temperature=way.draft_temperature,
    )


def from_curve(
    folder: Path, curve: Curve, load: Load, first_ms: float | None, cell: Cell | None = None
) -> list[Candidate]:
    """The calibration's trees at ``load``; ``first_ms``: the reading of the prompts, where it was measured.

    Where the run's tree was benchmarked in ``cell``, the others are taken to fare along the text as it did.
    """
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
            along=_alike(curve, shares, cell),
            plain_along=cell.plain.along if cell else (),
        )
        for nodes, shares in curve.trees
    ]


def _alike(curve: Curve, shares: Sequence[float], cell: Cell | None) -> tuple[Milestone, ...]:
    """The milestones of the heads' tree in ``cell``, with as many fewer steps as the tree of ``shares`` brings more.

    A step brings one token at least, and one step the second token.
    """
    own = cell.ways.get(HEADS) if cell else None
    calibrated = dict(curve.trees).get(own.nodes) if own and own.nodes else None
    if own is None or calibrated is None:
        return ()
    ratio = tree_tokens(calibrated) / tree_tokens(shares)
    found = []
    for each in own.along:
        steps = max(min(each.steps * ratio, each.tokens - 1), min(each.steps, 1))
        found.append(Milestone(each.tokens, steps, each.time * (steps / each.steps if each.steps else 1)))
    return tuple(found)


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
