"""Heads in the layouts of other engines: what each one's folder holds, as tensors and a config.

What all of them share are heads of kind ``medusa`` (Cai et al. 2024): residual blocks ``x + SiLU(W x + b)`` and a
projection without bias, that read the trunk's last state alone. Names and config keys are those that each engine's own
loader asks for:

* ``vllm`` (its ``MedusaModel``): ``blocks.{head}.layers.{layer}.weight`` and ``.bias``, ``lm_heads.{head}.weight``, and
  ``token_map``, the ids of a draft vocabulary;
* ``tgi``, ``tensorrt-llm`` and ``medusa-v1``: the reference's ``{head}.{layer}.linear.weight`` and ``.bias``, and
  ``{head}.{layers}.weight``; their configs differ.

What engines make of a folder is written down apart from this, in ``engines.py``, to check it by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa.files import write_atomically, write_json
from medusa.heads import MedusaHeads
from medusa.matrices import Matrices, matrices
from medusa.tree import Topology

CONFIG = "config.json"


@dataclass(frozen=True)
class Export:
    """What goes into a folder: the config, the weights and the files that hold them, and what there is to say."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    files: tuple[str, ...]
    notes: list[str]


@dataclass(frozen=True)
class Layout:
    """One engine's layout of Medusa heads.

    Args:
        engine: what it is called.
        files: where the weights go; each holds all of them.
        names: the tensors' names, and what they hold.
        config: the config's entries, but for those of a base and a tree.
        reduced: whether heads may draft from a part of the vocabulary.
        base: whether the config names the trunk.
        tree: whether the config holds a tree; the other engines draft a chain of first choices.
        families: the trunks that the engine knows Medusa for; empty where any that it serves will do.
    """

    engine: str
    files: tuple[str, ...]
    names: Callable[[Matrices], dict[str, Tensor]]
    config: Callable[[Matrices], dict[str, Any]]
    reduced: bool = False
    base: bool = True
    tree: bool = False
    families: tuple[str, ...] = field(default=())


def _vllm_names(found: Matrices) -> dict[str, Tensor]:
    names = {}
    for head, layers in enumerate(found.blocks):
        for layer, (weight, bias) in enumerate(layers):
            names[f"blocks.{head}.layers.{layer}.weight"] = weight
            names[f"blocks.{head}.layers.{layer}.bias"] = bias
        if head == 0 or not found.shared:
            names[f"lm_heads.{head}.weight"] = found.projections[head]
    return names if found.draft_ids is None else names | {"token_map": found.draft_ids}


def _vllm_config(found: Matrices) -> dict[str, Any]:
    # Beside num_heads no key may hold both "num" and "heads": its reader takes the last such key for that number.
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": found.hidden,
        "vocab_size": found.vocab,
        "truncated_vocab_size": len(found.projections[0]),
        "num_heads": len(found.blocks),
        "num_hidden_layers": len(found.blocks[0]),
        "medusa_fc_bias": True,
        "original_lm_head": found.shared,
        "torch_dtype": str(found.dtype).removeprefix("torch."),
    }


def _reference_names(found: Matrices) -> dict[str, Tensor]:
    names = {}
    for head, layers in enumerate(found.blocks):
        for layer, (weight, bias) in enumerate(layers):
            names[f"{head}.{layer}.linear.weight"] = weight
            names[f"{head}.{layer}.linear.bias"] = bias
        names[f"{head}.{len(layers)}.weight"] = found.projections[head]
    return names


def _reference_config(found: Matrices) -> dict[str, Any]:
    # No "architectures": by that key TGI tells other speculators from Medusa heads.
    return {"medusa_num_heads": len(found.blocks), "medusa_num_layers": len(found.blocks[0])}


def _tensorrt_config(found: Matrices) -> dict[str, Any]:
    # It reads the number of heads under either name, by its version.
    both = {"num_medusa_heads": len(found.blocks), "num_medusa_layers": len(found.blocks[0])}
    sizes = {"hidden_size": found.hidden, "vocab_size": found.vocab}
    return _reference_config(found) | both | sizes


HEADS_FILE = "medusa_lm_head"
LAYOUTS = {
    "vllm": Layout("vLLM", ("model.safetensors",), _vllm_names, _vllm_config, reduced=True, base=False),
    "tgi": Layout("Text Generation Inference", (f"{HEADS_FILE}.safetensors",), _reference_names, _reference_config),
    "tensorrt-llm": Layout(
        "TensorRT-LLM",
        (f"{HEADS_FILE}.safetensors", f"{HEADS_FILE}.pt"),
        _reference_names,
        _tensorrt_config,
        tree=True,
        families=("llama", "qwen2", "qwen3"),
    ),
    "medusa-v1": Layout(
        "the reference implementation of Medusa",
        (f"{HEADS_FILE}.safetensors", f"{HEADS_FILE}.pt"),
        _reference_names,
        _reference_config,
        tree=True,
        families=("llama", "mistral"),
    ),
}


def export(
    heads: MedusaHeads, layout: Layout, *, base: str, topology: Topology | None = None, dtype: torch.dtype | None = None
) -> Export:
    """What the folder of these heads holds; ``base`` is the name by which the engine finds the trunk.

    ``dtype``: of the weights; None for what they are kept in. ``topology``: the tree, for layouts that have one.

    Raises:
        NotExpressible: heads that the layout has no words for.
        UserError: weights that overflow ``dtype``.
    """
    found = matrices(heads, layout.engine, reduced=layout.reduced, dtype=dtype)
    config, notes = layout.config(found), list(found.notes)
    if layout.base:
        config["base_model_name_or_path"] = base
    if layout.tree and topology is not None:
        if topology.size == 1:
            topology = Topology.chain(len(found.blocks))
            notes.append("the tree is the root alone, as speculation did not pay when it was made: a chain is written")
        config["medusa_choices"] = [list(path) for path in topology.paths[1:]]
    if layout.families and heads.trunk.family not in layout.families:
        known = " and ".join(layout.families)
        notes.append(f"{layout.engine} knows Medusa for trunks of type {known}: this one is of {heads.trunk.family}")
    return Export(config, layout.names(found), layout.files, notes)


def write(folder: Path, made: Export) -> None:
    """Write config and weights into ``folder``."""
    write_json(folder / CONFIG, made.config)
    for file in made.files:
        if file.endswith(".safetensors"):
            write_atomically(folder / file, partial(save_file, _apart(made.weights), metadata={"format": "pt"}))
        else:
            write_atomically(folder / file, partial(torch.save, made.weights))


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with copies for what would be there twice: safetensors holds no tensor under two names."""
    seen: set[int] = set()
    apart = {}
    for name, value in weights.items():
        apart[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return apart
