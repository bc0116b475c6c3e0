"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): its settings, its start, and whole weights out of its parts.

Only what is trained is given to it. A frozen trunk stays whole on each process; of the heads it shares out the
optimizer's moments and the gradients (ZeRO-2), or the weights as well (ZeRO-3).
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from medusa import configs
from medusa.errors import UserError, reason

Module = TypeVar("Module", bound=nn.Module)

# What the recipe says; a number here could only contradict it.
FROM_RECIPE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def read_settings(name: str) -> dict[str, Any]:
    """DeepSpeed's settings by the name of those that ship, or from a JSON file.

    Raises:
        UserError: there are none, they can't be read, or they say what the recipe says.
    """
    path = configs.deepspeed(name)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"deepspeed={name} can't be read as JSON ({reason(error)}): start from a copy of zero2"
        ) from error
    zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UserError(f"deepspeed={name} has no zero_optimization.stage: give 1, 2 or 3")
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise UserError(f"deepspeed={name} has {key!r}, which is the recipe's to say: leave it out")
    for key in FROM_RECIPE:
        if settings.get(key) != "auto":
            raise UserError(
                f"deepspeed={name} has {key}={settings.get(key)}, which is the recipe's to say: give 'auto'"
            )
    if _is_on(settings, "fp16"):
        raise UserError(f"deepspeed={name} has fp16.enabled=true: its range is too small for these losses; use bf16")
    return settings


def _is_on(settings: Mapping[str, Any], precision: str) -> bool:
    return settings.get(precision, {}).get("enabled") is True


def stage_of(settings: Mapping[str, Any]) -> int:
    """1, 2 or 3."""
    stage: int = settings["zero_optimization"]["stage"]
    return stage


def in_bf16(settings: Mapping[str, Any]) -> bool:
    """Whether the weights in training are rounded to bf16, beside copies that are not."""
    return _is_on(settings, "bf16")


def kind_of(settings: Mapping[str, Any]) -> str:
    """What weights and moments are like under these settings."""
    return f"ZeRO-{stage_of(settings)}{' in bf16' if in_bf16(settings) else ''}"


def held_in_parts(settings: Mapping[str, Any] | None) -> bool:
    """Whether the module in training is not what one process would have: its weights are shared out, or rounded."""
    return settings is not None and (stage_of(settings) == 3 or in_bf16(settings))


def trainer_options(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """What transformers' TrainingArguments are told of DeepSpeed."""
    if settings is None:
        return {}
    return {"deepspeed": copy.deepcopy(dict(settings)), "bf16": in_bf16(settings)}


def on_cpu() -> None:
    """Tell DeepSpeed that there is no GPU, before accelerate imports it, as it does wherever it is installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextmanager
def started(device: torch.device) -> Iterator[None]:
    """Import DeepSpeed, let it compile nothing, and spare the user what torch deprecates in it.

    Raises:
        UserError: it is not installed.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"deepspeed can't be imported ({reason(error)}): pip install 'medusa-decoding[distributed]', or leave the"
            " option out"
        ) from error
    if device.type == "cpu":
        # Its own way of talking through shared memory is compiled at first use, in minutes; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        yield


def keep_together(module: nn.Module) -> None:
    """Let ZeRO-3 gather the weights of ``module`` before its forward, and again before its backward.

    Left to itself it gathers those of each submodule before that one's forward, which is too late: the loss takes them
    as inputs of a function that makes their gradients.
    """
    from deepspeed.runtime.zero import register_external_parameter

    for parameter in module.parameters():
        register_external_parameter(module, parameter)


def whole_copy(module: Module, shared: Iterable[object]) -> Module:
    """A copy to put whole weights into; ``shared`` objects are its own as well."""
    return copy.deepcopy(module, {id(each): each for each in shared})


@torch.no_grad()
def gather(module: nn.Module, copy: nn.Module | None) -> None:
    """Put the weights in training, in their own precision, into ``copy``. All take part, with or without one."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
            if copy is not None:
                copy.get_parameter(name).copy_(parameter if whole is None else whole)


def own(parameter: torch.Tensor) -> torch.Tensor:
    """What this process has of a parameter: under ZeRO-3 its part, elsewhere the whole."""
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return part


def let_go() -> None:
    """Forget the settings of a stage that is over: models loaded later would be shared out by them."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
