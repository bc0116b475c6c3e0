"""What a run's training takes, from the trunk's configuration alone: nothing is downloaded, and no weights are made.

Trunk, heads and an EAGLE layer are built on torch's meta device, by the classes that build the real ones. GB are 10^9
bytes. What is counted are tensors whose size is known: not the trunk's activations, nor what an allocator or
DeepSpeed's buffers add.

Symbols: c bytes of a number as heads compute, w of one as their weights are trained, P trained parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from medusa.eagle import EagleConfig, eagle_sizes
from medusa.eagle_block import Body, EagleSizes
from medusa.family import text_config
from medusa.heads import HeadSizes, new_head
from medusa.launch import processes
from medusa.loading import LOADING_ERRORS

from .config import TrainConfig, TrunkConfig
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

    def for_eagle(self, config: EagleConfig) -> EagleSizes:
        """What the size of an EAGLE layer depends on.

        Raises:
            UserError: layers that the trunk lacks, or sizes that make no such layer.
        """
        meta = torch.device("meta")
        facts: Any = SimpleNamespace(
            config=text_config(self.model.config),
            hidden_size=self.for_heads.hidden,
            device=meta,
            embed=self.model.get_input_embeddings(),
        )
        return eagle_sizes(config, facts)


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
    heads = config.heads
    if heads is None:
        return []
    with torch.device("meta"):
        return [count(new_head(heads, index, trunk.for_heads)) for index in range(heads.num)]


def layer_parameters(config: TrainConfig, trunk: TrunkSizes) -> list[int]:
    """Parameters of an EAGLE layer: of its vocabulary projection, 0 where it uses the trunk's, and of the rest."""
    eagle = config.eagle
    if eagle is None:
        return []
    sizes, output = trunk.for_eagle(eagle), trunk.for_heads
    with torch.device("meta"):
        body = count(Body(sizes, eagle.version))
    if eagle.version == 1:
        return [0, body]
    return [(eagle.vocab or output.vocab) * (sizes.hidden + output.bias), body + sizes.hidden]  # and the final norm


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


@dataclass(frozen=True)
class Stage:
    """What a stage trains: its ``parameters``, in ``dtype``; the ``largest`` part that a chunk's gradient is made of.

    ``columns`` of its logits, for ``chunk`` positions at a time; ``laws`` says whether the trunk's are made beside
    them; ``scores`` bytes of attention that its passes keep for the backward.
    """

    parameters: int
    dtype: torch.dtype
    largest: int
    columns: int
    chunk: int
    laws: bool
    keep: int
    scores: int = 0


def stages(config: TrainConfig, trunk: TrunkSizes) -> dict[str, Stage]:
    """The stages on a named trunk, by name."""
    found, whole = {}, trunk.for_heads.vocab
    each, adapter = head_parameters(config, trunk), adapter_parameters(config, trunk)
    if config.heads is not None:
        of, columns = config.heads_training, config.heads.vocab or whole
        own = Stage(
            sum(each),
            of.kept_in(trunk.dtype),
            max(each),
            columns,
            of.chunk or default_chunk(columns),
            of.targets != "text",
            of.keep,
        )
        found["heads"] = own
        if config.joint is not None:
            found["joint"] = replace(own, parameters=own.parameters + adapter)
    if config.eagle is not None:
        training, columns = config.eagle_training, config.eagle.vocab or whole
        projection, rest = layer_parameters(config, trunk)
        found["eagle"] = Stage(
            projection + rest,
            training.kept_in(trunk.dtype),
            projection,
            columns,
            training.chunk or default_chunk(columns),
            training.targets == "trunk",
            training.keep,
            _scores(config, config.eagle, trunk),
        )
    return found


def _scores(config: TrainConfig, eagle: EagleConfig, trunk: TrunkSizes) -> int:
    """Bytes of attention's shares that an EAGLE layer's passes keep: in fp32, and rounded where it computes in less."""
    training, c = config.eagle_training, trunk.dtype.itemsize
    rows = training.batch // training.accumulate // processes()
    shares = rows * trunk.for_eagle(eagle).heads * config.data.block**2 * training.passes
    return shares * (max(FP32, c) + (c if c < FP32 else 0))


def loss_bytes(stage: Stage, trunk: TrunkSizes) -> int:
    """Memory of a stage's loss: a chunk's logits and laws, and of the largest part's casts and gradients."""
    c, w = trunk.dtype.itemsize, stage.dtype.itemsize
    logits = c + 2 * FP32  # as computed; in fp32; their logarithms
    if stage.laws:
        logits += 2 * FP32
    casts = 2 * w + (2 * c if c != w else 0)  # a chunk's gradient and the sum so far; weight and gradient as computed
    return stage.chunk * stage.columns * logits + stage.largest * casts


def tell(config: TrainConfig, trunk: TrunkSizes) -> Iterator[str]:
    """Lines on the memory of training on a named trunk."""
    parts = stages(config, trunk)
    weights = trunk.parameters * trunk.dtype.itemsize
    yield f"memory       {_processes(config)}GB of 10^9 bytes, without the trunk's activations"
    most = " at most, it is quantised" if trunk.quantised else ""
    yield f"             trunk {weights / GB:.2f} GB in {_name(trunk.dtype)}{most}"
    for name, stage in parts.items():
        loss = loss_bytes(stage, trunk)
        if name != "joint":  # its heads have the same
            logits = f"{stage.chunk} x {stage.columns:,} logits at a time"
            yield f"             loss {loss / GB:.2f} GB: {logits}, and {_gradients(name)}"
        if stage.scores:
            yield f"             passes {stage.scores / GB:.2f} GB: their attention, kept for the backward"
        found = memory(stage.parameters, stage.dtype.itemsize, config.deepspeed)
        whole = weights + found.kept + found.step + loss + stage.scores
        yield (
            f"             {name} {found.kept / GB:.2f} GB: weights in {_name(stage.dtype)}, gradients, moments;"
            f" {found.step / GB:.2f} GB more in a step: {whole / GB:.1f} GB with the others"
        )
    largest = max(parts.values(), key=lambda stage: stage.parameters * stage.dtype.itemsize)
    saved = largest.parameters * 4 * largest.dtype.itemsize  # weights, the best ones so far, moments
    yield f"disk         {saved / GB:.2f} GB a checkpoint; {largest.keep} are kept while one is filled"
    if config.heads is not None or (config.eagle is not None and config.eagle.version == 1):
        row = record_bytes(config.data.block, trunk.for_heads.hidden, trunk.dtype)
        yield (f"             {row / MB:.2f} MB for the states of a row, where they are kept (cache_states)")


def _gradients(stage: str) -> str:
    return "a head's gradients" if stage == "heads" else "the projection's gradient, if it has one of its own"


def _processes(config: TrainConfig) -> str:
    if processes() == 1 and config.deepspeed is None:
        return ""
    way = f" by ZeRO-{stage_of(read_settings(config.deepspeed))}" if config.deepspeed else ""
    return f"of the first of {processes()} processes{way}; "


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
