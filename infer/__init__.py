"""Decoding for users: the engine, its command line and its benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Completion, Engine

__all__ = ["Completion", "Engine"]


def __getattr__(name: str) -> object:
    # Late, so that `medusa generate --help` does not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import engine

    return getattr(engine, name)
