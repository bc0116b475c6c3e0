"""Values that the host gives to the device, without waiting for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of numbers, or lists of them, on the device.

    ``torch.tensor(values, device=...)`` has the host wait until a GPU has done all that was queued before, and nothing
    is queued meanwhile; here it goes on. The values are safe: what leaves memory that is not pinned is copied first.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def whole_numbers(rows: Iterable[Iterable[int]], *shape: int) -> Tensor:
    """Int64 of this shape, on the host, of the rows' numbers in order: by ``torch.tensor`` it takes twice as long, and
    more for nested lists."""
    return torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.long).view(shape)
