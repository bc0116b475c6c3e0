"""The optimizer of a stage and its learning-rate schedule.

AdamW, or Muon (Jordan et al. 2024) for the matrices inside the network and AdamW for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from .config import Training

BETAS = (0.9, 0.95)  # second moments forget faster than by default, as is usual for language models


class Joined(Optimizer):
    """Several optimizers that act as one: groups and state are shared, so schedulers and checkpoints see one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        self.sizes = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            # Linked anew each time: load_state_dict replaces both objects.
            part.state, part.param_groups = self.state, self.param_groups[start : start + size]
            part.step()
            start += size
        return loss


def matrices(module: nn.Module, vocabulary: Iterable[Tensor]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split what is trained into the matrices inside the network, and the rest.

    Embeddings and projections to the ``vocabulary`` belong to the rest: their rows are tokens, not directions.
    """
    outside = {id(weight) for weight in vocabulary}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    inside = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in outside]
    chosen = {id(parameter) for parameter in inside}
    return inside, [parameter for parameter in trained if id(parameter) not in chosen]


def make_optimizer(module: nn.Module, vocabulary: Iterable[Tensor], training: Training) -> Optimizer:
    """The optimizer that ``training`` asks for. Only matrices inside the network decay."""
    if training.optimizer == "adamw":
        return adamw([(module, training.lr)], vocabulary, training.weight_decay)
    decayed, plain = _groups(module, vocabulary, training.weight_decay)
    inside, rest = decayed["params"], plain["params"]
    parts: list[Optimizer] = []
    if inside:
        parts.append(torch.optim.Muon([decayed], lr=training.muon_lr))
    if rest:
        parts.append(AdamW([plain], lr=training.lr, betas=BETAS))
    return Joined(parts)


def adamw(parts: Iterable[tuple[nn.Module, float]], vocabulary: Iterable[Tensor], weight_decay: float) -> Optimizer:
    """AdamW with a peak learning rate for each part of what is trained; a schedule scales them all alike."""
    outside = [*vocabulary]
    groups = [group | {"lr": lr} for module, lr in parts for group in _groups(module, outside, weight_decay)]
    return AdamW([group for group in groups if group["params"]], betas=BETAS)


def _groups(module: nn.Module, vocabulary: Iterable[Tensor], weight_decay: float) -> tuple[dict[str, Any], ...]:
    """Parameter groups: the matrices inside the network, which decay, and the rest."""
    inside, rest = matrices(module, vocabulary)
    return {"params": inside, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}


def rate(step: int, training: Training) -> float:
    """Share of the peak learning rate at ``step``, from 0: a linear rise, then the schedule down to the floor."""
    rise = min(1.0, (step + 1) / max(training.warmup, 1))
    done = min(step / training.steps, 1.0)
    fall = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[training.schedule]
    return rise * (training.floor + (1 - training.floor) * fall)
