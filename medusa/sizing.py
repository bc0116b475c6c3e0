"""How large a tree is worth verifying for so many rows: by what calibration says trees bring, and what steps cost here.

Tokens per second of a batch are rows x tokens per step / a step's time. So of the trees of a checkpoint's growth the
one with the most tokens per step and time is taken; the root alone, which is plain decoding, is one of them. What steps
cost is measured on the machine at hand, since a calibration is one of a single row and perhaps of another machine: for
each number of rows, rounded up to a power of two, when it is first met; then it is kept for the next process.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from medusa.calibrate import GOOD_ENOUGH, grown
from medusa.checkpoint import CALIBRATION
from medusa.costs import Scratch
from medusa.errors import UserError, reason
from medusa.files import read_json, write_json
from medusa.heads import MedusaHeads
from medusa.machine import cache_folder, setting
from medusa.tree import Topology

KEPT = "steps.json"
ROUNDS = 12  # times that steps are measured whose trees are near the best: fewer once ENOUGH_S are spent
ENOUGH_S = 0.25  # seconds for one number of rows
CLEARLY = 1.1  # times as many tokens per second: what a short measurement may be wrong by is no reason to change
DOUBT = 1.25  # a tree that seems this many times slower than the best is, whatever the noise


@dataclass(frozen=True)
class Rung:
    """A tree, and how many tokens a step with it brings on held-out continuations."""

    topology: Topology
    tokens_per_step: float


def rungs(folder: Path, own: Topology) -> list[Rung]:
    """The trees of a checkpoint's calibration, the smallest first, which is the root alone.

    One that kept no growth, as older ones, has two: the root and ``own``, the checkpoint's tree.

    Raises:
        UserError: no calibration, or one that does not say what these trees bring.
    """
    path = folder / CALIBRATION
    way_out = f"make it with `medusa calibrate {folder}`"
    if not path.is_file():
        raise UserError(f"{folder} has no {CALIBRATION}, which says what trees of each size bring: {way_out}")
    content = read_json(path)
    try:
        gains = {int(row["nodes"]): float(row["tokens_per_step"]) for row in content["rows"]}
        order = content.get("growth")
        if order is None:
            trees = [own] if own.size == 1 else [Topology.root(), own]
        else:
            trees = [grown([tuple(each) for each in order], nodes) for nodes in sorted({1, *gains})]
        return [Rung(tree, gains[tree.size] if tree.size > 1 else 1.0) for tree in trees]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not say what trees of each size bring ({reason(error)}): {way_out}") from error


class Sizing:
    """Picks, for a number of rows, one of some trees that ``heads`` can fill.

    Args:
        heads: on the trunk that decodes.
        rungs: the trees, the smallest first.
        kept: the file of what was measured before, by default in the user's cache folder.
        own: the checkpoint's tree, which is kept to where another is not clearly better.
    """

    def __init__(
        self, heads: MedusaHeads, rungs: Sequence[Rung], kept: Path | None = None, own: Topology | None = None
    ) -> None:
        self.heads = heads
        self.rungs = list(rungs)
        self.trees = [rung.topology for rung in rungs]
        self.kept = kept or cache_folder() / KEPT
        self.own = self.trees.index(own) if own in self.trees else None
        self._picked: dict[tuple[int, int], int] = {}  # by rows and threads
        self._lock = Lock()

    def __call__(self, rows: int) -> int:
        """The place of the tree to take; the first call for a number of rows may measure."""
        key = 1 << (rows - 1).bit_length(), torch.get_num_threads()
        if key not in self._picked:
            with self._lock:  # two that measure at once would slow each other down
                if key not in self._picked:
                    self._picked[key] = best(self.rungs, self.costs(key[0]), self.own)
        return self._picked[key]

    def costs(self, rows: int) -> list[float]:
        """Seconds of a step with each tree, measured or kept; infinite for trees that can't pay.

        Where the file can't be written it is measured in each process.
        """
        key = self._key(rows)
        entries = _read(self.kept)
        for entry in entries:
            if entry["setting"] == key and len(entry["seconds"]) == len(self.rungs):
                return [float("inf") if each is None else each for each in entry["seconds"]]
        found = measure(Scratch(self.heads, self.trees, rows), self.rungs)
        told = [each if each < float("inf") else None for each in found]
        with suppress(OSError):
            mine = {"setting": key, "seconds": told, "measured": time.strftime("%Y-%m-%d")}
            write_json(self.kept, {"entries": [*entries, mine]})
        return found

    def _key(self, rows: int) -> dict[str, Any]:
        trunk = self.heads.trunk
        compiled = trunk.compiled is not None and any(size.rows == rows for size in trunk.compiled.sizes)
        return setting(trunk.device, trunk.dtype) | self._drafts | {"compiled": compiled, "rows": rows}

    @cached_property
    def _drafts(self) -> dict[str, Any]:
        trunk = self.heads.trunk
        shapes = json.dumps([[tree.parents, tree.ranks] for tree in self.trees])
        return {
            "trunk": trunk.fingerprint(),
            "attention": getattr(trunk.config, "_attn_implementation", None),
            "heads": asdict(self.heads.config),
            "trees": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        }


def best(rungs: Sequence[Rung], seconds: Sequence[float], own: int | None = None) -> int:
    """The place of the tree with the most tokens per second; of those about as good the smallest.

    ``own``: the place of one that was chosen with more care than is taken here, and is left for a clear gain only.
    """
    paces = [rung.tokens_per_step / each for rung, each in zip(rungs, seconds, strict=True)]
    if own is not None and CLEARLY * paces[own] >= max(paces):
        return own
    return next(place for place, pace in enumerate(paces) if pace >= GOOD_ENOUGH * max(paces))


def measure(scratch: Scratch, rungs: Sequence[Rung]) -> list[float]:
    """Least seconds of a step with each tree, in turns; infinite for those beyond which none can pay.

    The least, since others' work only makes steps slower; and no more than a larger tree was seen to take, which costs
    no less. Once that price is too high for the most tokens that any brings, larger ones are not tried.
    """
    found = [float("inf")] * len(rungs)
    spent, pace = 0.0, 0.0
    for place, rung in enumerate(rungs):
        timed = scratch.step(place), scratch.step(place)  # the first makes what later ones find made
        found[place], spent = min(timed), spent + sum(timed)
        pace = max(pace, rung.tokens_per_step / found[place])
        if DOUBT * max(each.tokens_per_step for each in rungs[place:]) / found[place] < pace:
            break
    close = [place for place, rung in enumerate(rungs) if DOUBT * rung.tokens_per_step / found[place] >= pace]
    for turn in range(ROUNDS):
        if turn and spent > ENOUGH_S:
            break
        for place in close:
            taken = scratch.step(place)
            found[place], spent = min(found[place], taken), spent + taken
    return [min(found[place:]) for place in range(len(found))]


def _read(file: Path) -> list[dict[str, Any]]:
    """What is in the file; nothing where it is not there, or not as it was written."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
        return [each for each in entries if isinstance(each["setting"], dict) and _is_times(each["seconds"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _is_times(given: Any) -> bool:
    """Whether it may be the seconds of some trees, the first of which was measured."""
    numbers = all(each is None or (isinstance(each, float) and each > 0) for each in given)
    return isinstance(given, list) and numbers and bool(given) and given[0] is not None
