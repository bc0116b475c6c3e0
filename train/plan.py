"""What a run would do and take, told without loading data or weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from .config import NewTrunk, TrainConfig, Training
from .newtrunk import is_missing, llama_config, maker_of
from .record import RunRecord
from .sizes import head_parameters, layer_parameters, read_trunk, tell


def plan(config: TrainConfig) -> list[str]:
    """A line per stage, then memory and disk. Raises UserError for a folder that holds something else."""
    record = RunRecord(config)
    lines = [f"run          {record.folder}", f"data         {config.data.source}, {config.data.tokenizer} tokenizer"]
    trunk, sizes = config.trunk, None if config.trunk.name is None else read_trunk(config.trunk)
    if trunk.new is not None:
        lines.append(f"trunk        new, {inner_size(trunk.new):,} parameters without vocabulary")
        lines.append(f"             {_effort(config.trunk_training, config)}")
    elif trunk.name is not None:
        maker = maker_of(trunk.name) if is_missing(trunk.name) else None
        size = f", {sizes.parameters:,} parameters" if sizes else ""
        lines.append(f"trunk        {trunk.name}{size}{f' (make it first: {maker})' if maker else ''}")
    if (own := config.own_text) is not None:
        tokens = own.new_tokens(config.data.block)
        lines.append(f"text         the trunk's own, {own.prompts:,} beginnings of {own.prompt_tokens} tokens")
        lines.append(f"             {tokens} tokens each, {own.prompts * tokens:,} in all")
    if (heads := config.heads) is not None:
        size = f", {sum(head_parameters(config, sizes)):,} parameters" if sizes else ""
        lines.append(f"heads        {heads.num} of kind {heads.kind}, {heads.projection} projection{size}")
        lines.append(f"             {_effort(config.heads_training, config)}")
    if config.joint is not None:
        lines.append(f"joint        the heads, and the trunk through an adapter of rank {config.joint.rank}")
        lines.append(f"             {_effort(config.joint, config)}")
    if config.eagle is not None:
        size = f", {sum(layer_parameters(config, sizes)):,} parameters" if sizes else ""
        passes = f"{config.eagle_training.passes} passes"
        lines.append(f"eagle        a layer of version {config.eagle.version}, {passes}{size}")
        lines.append(f"             {_effort(config.eagle_training, config)}")
    lines.append(f"calibration  trees of {', '.join(map(str, config.calibration.sizes))} nodes")
    if sizes is not None:
        lines.extend(tell(config, sizes))
    elif trunk.name is not None:
        lines.append("memory       unknown until the trunk's config.json can be read: nothing is downloaded here")
    return lines


def inner_size(new: NewTrunk) -> int:
    """Parameters of a new trunk without embedding and projection; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(new, vocab_size=1))
    whole = sum(parameter.numel() for parameter in model.parameters())
    return whole - new.hidden * (1 if new.tied else 2)


def _effort(training: Training, config: TrainConfig) -> str:
    tokens = training.steps * training.batch * config.data.block
    return f"{training.steps} steps of {training.batch} x {config.data.block} tokens, {tokens:,} in all"
