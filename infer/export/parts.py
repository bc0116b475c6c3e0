"""What the exports of heads and of EAGLE layers share: what is to be written, and how near it reads back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from medusa.data.trunks import PARENT, SOURCES
from medusa.errors import UserError
from medusa.exports import Export
from medusa.trunk import Trunk

POSITIONS = 24  # of a text that the trunk reads to compare on: states of its own, and enough to tell heads apart
# Relative to the largest logit. Both sides compute in fp32 or wider with weights rounded alike; only where a product
# is rounded, a low rank multiplied out or a scale, the rounding itself shows.
EXACT = {torch.float64: 1e-9}
CLOSE = 1e-4
PRODUCT = {torch.float16: 1e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class Agreement:
    """How near a folder came that was read again.

    ``tensors`` were read; ``error`` is the largest difference of a logit, relative to the largest one; at ``same`` of
    ``positions`` all first choices are the same.
    """

    tensors: int
    error: float
    same: int
    positions: int


@dataclass(frozen=True)
class Piece:
    """What is exported: its files, the trunk and the name it has there, and the words of its card.

    ``place``: the folder that its calibration lies in. ``stage``: that of its training. ``compare`` reads a folder
    again and says how near it came.
    """

    made: Export
    trunk: Trunk
    base: str
    place: Path
    what: str
    about: str
    stage: str
    compare: Callable[[Path], Agreement]


def trunk_name(name: str) -> str:
    """A folder by its whole path, since engines start anywhere; a hub id as it is."""
    place = PARENT / name if name in SOURCES else Path(name)
    return str(place.resolve()) if place.is_dir() else name


def saved_in(file: Path) -> torch.dtype:
    """What the weights in a safetensors file are in."""
    with safe_open(file, framework="pt") as held:
        found = (held.get_tensor(name).dtype for name in held.keys())  # noqa: SIM118 - not a dict
        return next(dtype for dtype in found if dtype.is_floating_point)


def written_in(made: Export) -> torch.dtype:
    """What the weights of an export are in."""
    return next(value.dtype for value in made.weights.values() if value.is_floating_point())


def in_words(dtype: torch.dtype) -> str:
    """``torch.float16`` -> float16."""
    return str(dtype).removeprefix("torch.")


def sample(trunk: Trunk) -> Tensor:
    """A random text [1, POSITIONS] of the trunk's tokens."""
    ids = torch.randint(trunk.draftable, (1, POSITIONS), generator=torch.Generator().manual_seed(0))
    return ids.to(trunk.device)


def wide(trunk: Trunk) -> torch.dtype:
    """What is compared in."""
    return torch.promote_types(trunk.dtype, torch.float32)


def capped(trunk: Trunk, logits: Tensor) -> Tensor:
    """With the trunk's softcap, which engines leave out."""
    cap = getattr(trunk.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def agreement(
    trunk: Trunk, tensors: int, pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype, *, product: bool = False
) -> Agreement:
    """Compare our logits and theirs, each [positions, V'], of weights in ``dtype``.

    ``product``: whether a product was rounded to it, which ours are not.

    Raises:
        UserError: they differ by more than rounding.
    """
    apart, same = [], torch.ones(len(pairs[0][0]), dtype=torch.bool)
    for mine, theirs in pairs:
        apart.append((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-6))
        same &= mine.argmax(-1) == theirs.argmax(-1)
    worst = float(torch.stack(apart).max())  # of these, a NaN is the largest
    scaled = any(getattr(trunk.config, key, None) is not None for key in ("logit_scale", "logits_scaling"))
    exact = EXACT.get(dtype, CLOSE) if dtype == wide(trunk) else CLOSE
    allowed = PRODUCT.get(dtype, CLOSE) if product or scaled else exact
    if not worst <= allowed:  # also true for NaN
        raise UserError(
            f"what was written does not read back: logits differ by {worst:.2g} of the largest, allowed is"
            f" {allowed:.2g}: choose --dtype float32, and report this if it stays"
        )
    return Agreement(tensors, worst, int(same.sum()), len(same))
