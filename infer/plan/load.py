"""What the user wants to decode, as `medusa plan` asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from medusa.errors import UserError


@dataclass(frozen=True)
class Load:
    """What is to be decoded.

    Args:
        batch_size: rows that are decoded at once.
        max_new_tokens: tokens of each output.
        temperature: 0 is greedy.
        free_memory_mb: memory left beside the trunk, in 10^6 bytes, for the weights of what drafts; left out, enough.

    Raises:
        UserError: a batch size or length below 1, or a negative temperature or memory.
    """

    batch_size: int = 1
    max_new_tokens: int = 200
    temperature: float = 0.0
    free_memory_mb: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: give at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature}: give at least 0, which is greedy")
        if self.free_memory_mb is not None and not self.free_memory_mb >= 0:
            raise UserError(f"free_memory_mb={self.free_memory_mb}: give at least 0, or leave it out")

    @property
    def one_greedy_row(self) -> bool:
        """Whether it is what calibration measures."""
        return self.batch_size == 1 and self.temperature == 0
