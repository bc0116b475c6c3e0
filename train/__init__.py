"""Training: from a recipe to a run folder that holds a trunk, heads for it and the tree that is fastest here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TrainConfig
    from .stages import train

__all__ = ["TrainConfig", "train"]


def __getattr__(name: str) -> object:
    # Late, so that `medusa train --help` does not wait for the Trainer.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TrainConfig":
        from .config import TrainConfig

        return TrainConfig
    from .stages import train

    return train
