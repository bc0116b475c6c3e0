"""What a report needs of each way to draft that a run made: its tree, what was measured of it, how well it guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from medusa.checkpoint import CALIBRATION, TREE, read_tree
from medusa.curves import BEST, is_number
from medusa.eagle_files import PLACE
from medusa.files import read_json
from medusa.tree import Topology

from .record import MEDUSA_1


@dataclass(frozen=True)
class Drafts:
    """The heads of a run, or its EAGLE layer.

    ``title`` of the section on its tree, ``mark`` that begins its pictures' names; ``folder`` of its calibration,
    ``places`` where its tree may be; ``events`` of the stages that made it, ``made`` the record of all that are.
    """

    title: str
    mark: str
    folder: Path
    places: Sequence[Path]
    events: Sequence[Mapping[str, Any]]
    made: Mapping[str, Any]

    @cached_property
    def calibration(self) -> dict[str, Any] | None:
        """The trees that were tried, if they were."""
        return read_json(self.folder / CALIBRATION) if (self.folder / CALIBRATION).is_file() else None

    @cached_property
    def tree(self) -> Topology | None:
        """The tree that it drafts with, or was judged by last."""
        return next((read_tree(place) for place in self.places if (place / TREE).is_file()), None)

    @cached_property
    def shares(self) -> list[float] | None:
        """The share of steps that accept each node of the tree, where calibration has counted them."""
        shares = (self.calibration or {}).get("node_share")
        return shares if shares and self.tree is not None and len(shares) == self.tree.size else None

    @cached_property
    def best(self) -> Mapping[str, Any] | None:
        """The evaluation that it was kept by: of the last stage that has any, the one with the most tokens."""
        found = [event for event in self.events if is_number(event.get(BEST))]
        found = [event for event in found if event["stage"] == found[-1]["stage"]]
        kept = self.made.get(found[-1]["stage"], {}).get("result", {}).get("step") if found else None
        of_kept = [event for event in found if event["step"] == kept]
        return max(of_kept or found, key=lambda event: event[BEST], default=None)


def drafts_of(folder: Path, events: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> list[Drafts]:
    """What a run drafts with: heads, an EAGLE layer or both. Where nothing is there yet, the heads that may come."""
    eagle = [event for event in events if event["stage"] == "eagle"]
    others = [event for event in events if event["stage"] != "eagle"]
    place = folder / PLACE
    layer = Drafts("Tree of the EAGLE layer", "eagle", place, [place], eagle, made)
    heads = Drafts("Tree", "calibration", folder, [folder, folder / MEDUSA_1], others, made)
    if not eagle:
        return [heads]
    return [layer] if heads.tree is None and heads.best is None else [heads, layer]
