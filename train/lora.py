"""A low-rank adapter on the trunk (LoRA; Hu et al. 2021): what training may change of it. The package peft makes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa.errors import UserError, nearest
from medusa.trunk import Trunk

from .training import JointTraining

SLOT = "default"  # peft's name for the one adapter


class Adapter(nn.Module):
    """LoRA on the linear layers that ``training`` names, put on the trunk's model in place; it changes nothing yet.

    The parts that were added are registered here, and the model is not: so a trainer finds these parameters alone, and
    its ``train()`` switches this dropout on and nothing of the trunk's own.

    Raises:
        UserError: as :func:`targets`.
    """

    def __init__(self, trunk: Trunk, training: JointTraining, seed: int) -> None:
        import peft

        super().__init__()
        names = targets(trunk, training)
        config = peft.LoraConfig(
            r=training.rank,
            lora_alpha=training.alpha,
            lora_dropout=training.dropout,
            target_modules=names,
            fan_in_fan_out=isinstance(trunk.model.get_submodule(names[0]), Conv1D),  # whose weight is transposed
        )
        torch.manual_seed(seed)
        self._tuner = (peft.LoraModel(trunk.model, config, SLOT),)  # in a tuple: it holds the model
        self.parts = nn.ModuleList(
            nn.ModuleDict({"a": layer.lora_A[SLOT], "b": layer.lora_B[SLOT], "dropout": layer.lora_dropout[SLOT]})
            for layer in trunk.model.modules()
            if hasattr(layer, "base_layer")
        )
        trunk.model.eval()  # what peft adds comes in training mode
        self.parts.to(torch.promote_types(trunk.dtype, torch.float32))  # half precision loses small updates

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the trunk is the one it was, to the bit."""
        self._tuner[0].disable_adapter_layers()
        try:
            yield
        finally:
            self._tuner[0].enable_adapter_layers()

    def base_weights(self) -> dict[str, Tensor]:
        """The trunk's own weights, by the names that they have without the adapter."""
        own: dict[str, Tensor] = self._tuner[0].model.state_dict()
        return {name.replace(".base_layer.", "."): value for name, value in own.items() if ".lora_" not in name}

    def merge(self) -> None:
        """Add the adapter to the trunk's weights, and take it off: the model is an ordinary one again, and another."""
        self._tuner[0].merge_and_unload()


def targets(trunk: Trunk, training: JointTraining) -> list[str]:
    """The full names of the linear layers to adapt: never the vocabulary projection, which heads start from.

    Raises:
        UserError: no layer of a name, or a trunk whose weights can't take up an adapter.
    """
    _refuse(trunk)
    return chosen_layers(trunk.model, training)


def chosen_layers(model: Any, training: JointTraining) -> list[str]:
    """The full names of the layers of ``model`` that ``training`` names.

    Raises:
        UserError: no layer of a name.
    """
    found = linear_layers(model)
    if training.modules == "all-linear":
        return found
    known = sorted({name.rpartition(".")[2] for name in found})
    for module in training.modules:
        if not any(_means(module, name) for name in found):
            raise UserError(
                f"joint.modules: no linear layer of the trunk's body is called {module!r}{nearest(module, known)}:"
                f" choose from {', '.join(known)}, or all-linear"
            )
    return [name for name in found if any(_means(module, name) for module in training.modules)]


def linear_layers(model: Any) -> list[str]:
    """The names of the model's linear layers, without its vocabulary projection."""
    head = model.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]


def _means(module: str, name: str) -> bool:
    """Whether the layer ``name`` is one that ``module`` stands for: by its whole name, or by how that ends."""
    return name == module or name.endswith(f".{module}")


def _refuse(trunk: Trunk) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if getattr(trunk.model, "hf_quantizer", None) is not None:
        raise UserError(
            "joint: this trunk is quantised, and an adapter merged into it would be rounded away: name the trunk it was"
            " made from, or leave joint out"
        )
    if any(isinstance(module, BaseTunerLayer) for module in trunk.model.modules()):
        raise UserError(
            "joint: this trunk has an adapter already: merge that into it first (peft's merge_and_unload), save the"
            " model and name that, or leave joint out"
        )
