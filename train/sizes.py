"""What a run's training takes, from the trunk's configuration alone: nothing is downloaded, and no weights are made.

Trunk and heads are built on torch's meta device, by the classes that build the real ones. GB are 10^9 bytes. What is
counted are tensors whose size is known: not the trunk's activations, nor what an allocator or DeepSpeed's buffers add.

Symbols: c bytes of a number as heads compute, w of one as their weights are trained, P trained parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from medusa.family import text_config
from medusa.heads import HeadSizes, new_head
from medusa.loading import LOADING_ERRORS

from .config import TrainConfig, TrunkConfig
from .launch import processes
from .lora import chosen_layers
from .loss import default_chunk
from .states import record_bytes
from .zero import in_bf16, read_settings, stage_of

GB, MB = 1e9, 1e6
FP32 = 4  # bytes, of ZeRO's own copies and moments


@dataclass(frozen=True)
class TrunkSizes:
    """A trunk whose configuration was read: its model on the meta device, and what its weights are loaded in."""

    model: Any
    dtype: torch.dtype
    quantised: bool

    @cached_property
    def parameters(self) -> int:
        """Those of the whole model; a tied projection counts once."""
        return count(self.model)

    @cached_property
    def for_heads(self) -> HeadSizes:
        """What the size of heads depends on."""
        output, ids = self.model.get_output_embeddings(), torch.zeros(1, dtype=torch.long, device="meta")
        embedding = self.model.get_input_embeddings()(ids).shape[-1]
        vocab = text_config(self.model.config).vocab_size
        return HeadSizes(output.weight.shape[-1], embedding, vocab, output.bias is not None)


def read_trunk(trunk: TrunkConfig) -> TrunkSizes | None:
    """The sizes of a named trunk; None where its configuration is not in reach, or not that of a language model."""
    try:
        config = AutoConfig.from_pretrained(
            trunk.name, revision=trunk.revision, local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except LOADING_ERRORS:
        return None
    if model.get_output_embeddings() is None:
        return None
    own = text_config(config).dtype or torch.float32
    dtype = own if trunk.dtype == "auto" else getattr(torch, trunk.dtype)
    return TrunkSizes(model, dtype, getattr(config, "quantization_config", None) is not None)


def count(module: nn.Module) -> int:
    """Parameters of ``module``."""
    return sum(parameter.numel() for parameter in module.parameters())


def head_parameters(config: TrainConfig, trunk: TrunkSizes) -> list[int]:
    """Parameters of each head.

    Raises:
        UserError: a rank beyond the projection's.
    """
    with torch.device("meta"):
        return [count(new_head(config.heads, index, trunk.for_heads)) for index in range(config.heads.num)]


def adapter_parameters(config: TrainConfig, trunk: TrunkSizes) -> int:
    """Parameters of a joint stage's adapter: of each layer a matrix from its inputs, and one to its outputs.

    Raises:
        UserError: no layer of a name.
    """
    if config.joint is None:
        return 0
    names = chosen_layers(trunk.model, config.joint)
    return sum(config.joint.rank * sum(trunk.model.get_submodule(name).weight.shape) for name in names)


@dataclass(frozen=True)
class Memory:
    """Bytes that P parameters in training take in one process: ``kept`` all the time, ``step`` more within a step."""

    kept: float
    step: float


def memory(parameters: int, width: int, deepspeed: str | None) -> Memory:
    """Memory of ``parameters`` whose weights take ``width`` bytes each, in the process that takes most: the first.

    Kept are weights, gradients and AdamW's two moments (Muon has one). Within a step the loss hands over a whole set of
    gradients (medusa.train.loss), a second one where earlier parts of the step have left theirs; else AdamW works in as
    much.
    """
    if deepspeed is None:
        copies = 4 + (processes() > 1)  # several processes without DeepSpeed exchange gradients through a copy
        return Memory(parameters * width * copies, parameters * width)
    settings = read_settings(deepspeed)
    stage, share = stage_of(settings), 1 / processes()
    width = 2 if in_bf16(settings) else width
    weights, gradients = width * (share if stage == 3 else 1), width * (share if stage >= 2 else 1)
    whole = width * (1 + (stage == 3))  # the loss's gradients, and the weights that ZeRO-3 gathers for it
    judged = width if stage == 3 or in_bf16(settings) else 0  # the first process's whole copy, to evaluate
    return Memory(parameters * (weights + gradients + 3 * FP32 * share + judged), parameters * whole)


def loss_bytes(config: TrainConfig, trunk: TrunkSizes, largest: int) -> int:
    """Memory of the heads' loss: a chunk's logits and laws, and of the ``largest`` head casts and gradients."""
    c, w = trunk.dtype.itemsize, config.heads_training.kept_in(trunk.dtype).itemsize
    logits = c + 2 * FP32  # as computed; in fp32; their logarithms
    if config.heads_training.targets != "text":
        logits += 2 * FP32
    casts = 2 * w + (2 * c if c != w else 0)  # a chunk's gradient and the sum so far; weight and gradient as computed
    columns = config.heads.vocab or trunk.for_heads.vocab
    return _chunk(config, columns) * columns * logits + largest * casts


def _chunk(config: TrainConfig, columns: int) -> int:
    return config.heads_training.chunk or default_chunk(columns)


def tell(config: TrainConfig, trunk: TrunkSizes) -> Iterator[str]:
    """Lines on the memory of training on a named trunk."""
    each, adapter = head_parameters(config, trunk), adapter_parameters(config, trunk)
    dtype = config.heads_training.kept_in(trunk.dtype)
    weights, loss = trunk.parameters * trunk.dtype.itemsize, loss_bytes(config, trunk, max(each))
    columns = config.heads.vocab or trunk.for_heads.vocab
    parts = {"heads": sum(each)} | ({} if config.joint is None else {"joint": sum(each) + adapter})
    yield f"memory       {_processes(config)}GB of 10^9 bytes, without the trunk's activations"
    most = " at most, it is quantised" if trunk.quantised else ""
    yield f"             trunk {weights / GB:.2f} GB in {_name(trunk.dtype)}{most}"
    chunk = _chunk(config, columns)
    yield f"             loss {loss / GB:.2f} GB: {chunk} x {columns:,} logits at a time, and a head's gradients"
    for name, parameters in parts.items():
        found = memory(parameters, dtype.itemsize, config.deepspeed)
        whole = weights + found.kept + found.step + loss
        yield (
            f"             {name} {found.kept / GB:.2f} GB: weights in {_name(dtype)}, gradients, moments;"
            f" {found.step / GB:.2f} GB more in a step: {whole / GB:.1f} GB with the others"
        )
    saved = max(parts.values()) * 4 * dtype.itemsize  # weights, the best ones so far, moments
    yield f"disk         {saved / GB:.2f} GB a checkpoint; {config.heads_training.keep} are kept while one is filled"
    row = record_bytes(config.data.block, trunk.for_heads.hidden, trunk.dtype)
    yield f"             {row / MB:.2f} MB for the states of a row, where they are kept (heads_training.cache_states)"


def _processes(config: TrainConfig) -> str:
    if processes() == 1 and config.deepspeed is None:
        return ""
    way = f" by ZeRO-{stage_of(read_settings(config.deepspeed))}" if config.deepspeed else ""
    return f"of the first of {processes()} processes{way}; "


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
