"""A drafter that chooses its tokens otherwise in rows that sample: by another mode, or at another temperature."""

from __future__ import annotations

import copy
from typing import Any, cast

from medusa.drafters.base import Drafter
from medusa.drafters.children import Drafting
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.sized import SizedDrafter
from medusa.errors import UserError


def draws(drafter: Drafter) -> bool:
    """Whether the drafter draws tokens at random in rows that sample, so that a draft temperature means something."""
    part = _drawing(drafter)[-1]
    own = getattr(part, "drafting", None)
    return isinstance(own, Drafting) and own.mode != "top"


def redraft(drafter: Drafter, mode: str | None = None, temperature: float | None = None) -> Drafter:
    """``drafter`` with another mode or draft temperature; the one given stays as it is, and shares its weights.

    Of a mixed tree that is the heads' part; of trees of each step, or of several sizes, the tree that is given for rows
    that sample.

    Raises:
        UserError: a drafter that draws nothing, a mode that it does not have, or a temperature that is not above 0.
    """
    *outer, part = _drawing(drafter)
    own = getattr(part, "drafting", None)
    if not isinstance(own, Drafting) or (temperature is not None and (mode or own.mode) == "top"):
        asked = f"drafting={mode!r}" if mode is not None else f"draft_temperature={temperature!r}"
        raise UserError(f"{asked}: the drafter {drafter.name!r} draws nothing, leave it out")
    changed: Any = copy.copy(part)
    changed.drafting = Drafting(mode or own.mode, own.temperature if temperature is None else temperature)
    if mode is not None and isinstance(part, DynamicDrafter):
        DynamicDrafter(part.heads, part.nodes, changed.drafting)  # refuses what does not go with its heads
    for whole in reversed(outer):
        inner, changed = changed, copy.copy(whole)
        setattr(changed, "dynamic" if isinstance(whole, MixedDrafter) else "sampling", inner)
    return cast(Drafter, changed)


def _drawing(drafter: Drafter) -> list[Any]:
    """The drafter, and within it those that it leaves the choice to; the last one makes it."""
    parts: list[Any] = [drafter]
    if isinstance(drafter, MixedDrafter):
        parts.append(drafter.dynamic)
    if isinstance(parts[-1], (DynamicDrafter, SizedDrafter)) and parts[-1].sampling is not None:
        parts.append(parts[-1].sampling)
    return parts
