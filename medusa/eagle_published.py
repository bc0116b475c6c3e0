"""EAGLE layers that others published: a ``config.json`` beside ``model.safetensors`` or ``pytorch_model.bin``.

* EAGLE and EAGLE-2: ``fc`` and ``layers.0``, without a norm on what the layer reads or on its way out. Its state is
  projected by the trunk.
* EAGLE-3: ``fc``, ``midlayer`` (elsewhere ``layers.0``) with ``hidden_norm`` and ``input_layernorm``, ``norm``,
  ``lm_head``, and of a reduced vocabulary ``d2t``: what is added to a column's number to give its token's id.

Sizes are read off the tensors; the config, that of EAGLE's authors, SGLang or `speculators`, says what they don't:
numbers of heads, rotary frequencies, which layers are fused. An embedding that lies beside them is the trunk's own,
which is compared: one that differs is of another trunk, and is refused.

Dimensions: V vocabulary, V' the tokens drafted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.bound_files import fill
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_block import THETA, EagleSizes
from medusa.errors import UserError
from medusa.trunk import Trunk
from medusa.weights import read_object, read_tensors, tensor_files

CONFIG = "config.json"
# Safetensors first: nothing in them can run.
FILES = [f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")]
PUBLISHED_EAGLE = [CONFIG, "model*.safetensors*", "pytorch_model*.bin*"]  # of a hub repository
# Their names' beginnings, and ours. What is beside them: the embedding, and two forms of the draft vocabulary.
NAMES = {
    "fc.": "body.fc.",
    "midlayer.": "body.layer.",
    "layers.0.": "body.layer.",
    "norm.": "norm.",
    "lm_head.": "lm_head.",
}
EMBEDDING, TO_TOKENS, TO_COLUMNS = "embed_tokens.weight", "d2t", "t2d"
FUSED = "eagle_aux_hidden_state_layer_ids"
SAME = 0.02  # of an embedding's largest value: roundings of half precision are far below, other embeddings far above


def is_published_eagle(folder: Path) -> bool:
    """Whether ``folder`` holds a published EAGLE layer; UserError if its weights can't be read."""
    path = _path(folder)
    return path is not None and "fc.weight" in tensor_files(path)


def load_published_eagle(folder: Path, trunk: Trunk) -> EagleLayer:
    """Load a published layer for ``trunk``.

    Warns where nothing tells whether it was trained on this trunk.

    Raises:
        UserError: no layer there, one for another trunk, as far as sizes and embedding tell, tensors that are missing,
            left over or mis-shaped, or a config that lacks what the tensors don't say.
    """
    path = _path(folder)
    if path is None:
        raise UserError(f"{folder} holds no published EAGLE layer: give a folder with {' or '.join(FILES[::2])}")
    held = {name: value for file in set(tensor_files(path).values()) for name, value in _of(path, file).items()}
    said = _said(folder / CONFIG)
    embedding = held.pop(EMBEDDING, None)
    held.pop(TO_COLUMNS, None)  # the same vocabulary by its tokens
    offset = held.pop(TO_TOKENS, None)
    weights = {_ours(path, name): value for name, value in held.items()}
    sizes = _sizes(path, weights, said)
    draft_ids = None if offset is None else _vocabulary(weights, offset, trunk)
    try:
        config = _config(sizes, said, None if draft_ids is None else len(draft_ids))
        layer = EagleLayer(config, trunk, draft_ids, sizes=sizes, initialise=False)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if embedding is not None:
        _compare(path, embedding, trunk)
    else:
        warnings.warn(
            f"the EAGLE layer in {folder} does not say which weights it was trained on: that this trunk is its own is"
            " taken on trust (with another the text stays right, and few guesses are)",
            stacklevel=2,
        )
    if "lm_head.bias" in (own := layer.state_dict()):  # published ones have none
        weights["lm_head.bias"] = torch.zeros_like(own["lm_head.bias"])
    fill(layer, weights | ({} if draft_ids is None else {"draft_ids": draft_ids}), path)
    return layer.eval()


def _path(folder: Path) -> Path | None:
    if not (folder / CONFIG).is_file():
        return None
    return next((folder / file for file in FILES if (folder / file).is_file()), None)


def _of(path: Path, file: Path) -> dict[str, Tensor]:
    """The tensors that ``path``, the file itself or an index, has in ``file``."""
    return read_tensors(file, [name for name, each in tensor_files(path).items() if each == file])


def _said(path: Path) -> dict[str, Any]:
    """The config. That of ``speculators`` has the layer's own part nested, which is brought to the top."""
    said = read_object(path)
    nested = said.get("transformer_layer_config")
    if not isinstance(nested, dict):
        return said
    if said.get("norm_before_residual", True):  # left out, it counts as true in vLLM, which reads these folders
        raise UserError(
            f"{path}: by norm_before_residual the layer adds to the norm of the hidden state, not to that state: give a"
            " layer trained without"
        )
    return nested | {FUSED: said.get(FUSED)}


def _ours(path: Path, name: str) -> str:
    for theirs, ours in NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    raise UserError(
        f"{path}: tensor {name} belongs to no published EAGLE layout, whose names begin with"
        f" {', '.join(NAMES)}: give one layer in the format of its authors"
    )


def _sizes(path: Path, weights: Mapping[str, Tensor], said: Mapping[str, Any]) -> EagleSizes:
    """What the tensors and the config say; what is missing among the others is left for :func:`fill` to find."""
    shape = {name: tuple(value.shape) for name, value in weights.items()}
    heads, needed = said.get("num_attention_heads"), ("fc", "layer.self_attn.q_proj", "layer.mlp.gate_proj")
    if lost := [name for name in needed if len(shape.get(f"body.{name}.weight", ())) != 2]:
        raise UserError(f"{path} has no matrix {lost[0]}.weight: get the whole file")
    if not isinstance(heads, int) or heads < 1 or said.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"{path.parent / CONFIG}: num_attention_heads is {heads!r} and hidden_act {said.get('hidden_act')!r}: an"
            " EAGLE layer needs a number from 1, and silu"
        )
    hidden, reads = shape["body.fc.weight"]
    wide = "body.layer.hidden_norm.weight" in shape
    kv_heads = said.get("num_key_value_heads") or heads
    return EagleSizes(
        hidden=hidden,
        embedding=shape.get("body.layer.input_layernorm.weight", (hidden,))[0] if wide else reads - hidden,
        heads=heads,
        kv_heads=kv_heads if isinstance(kv_heads, int) else heads,
        head_size=shape["body.layer.self_attn.q_proj.weight"][0] // heads,
        inner=shape["body.layer.mlp.gate_proj.weight"][0],
        fused=reads if wide else 0,
        eps=float(said.get("rms_norm_eps", 1e-6)),
        bare=not wide and "body.layer.input_layernorm.weight" not in shape,
        fc_bias="body.fc.bias" in shape,
        qkv_bias="body.layer.self_attn.q_proj.bias" in shape,
        rope=_rope(said),
    )


def _rope(said: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary frequencies, as older configs and newer ones have them."""
    rope = dict(said.get("rope_parameters") or said.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    return {"rope_theta": said.get("rope_theta") or THETA} | rope | {"rope_type": kind}


def _config(sizes: EagleSizes, said: Mapping[str, Any], vocab: int | None) -> EagleConfig:
    """Of version 3 the layers that the config names, else those of the paper's own code."""
    if not sizes.fused:
        return EagleConfig(1, vocab)
    layers = said.get(FUSED)
    if layers is None and (written := (said.get("eagle_config") or {}).get(FUSED)) is not None:
        # SGLang's: there the layers that write the states are counted, from 0; at the top the layers that read them.
        layers = [layer + 1 for layer in written]
    return EagleConfig(3, vocab, None if layers is None else tuple(layers))


def _vocabulary(weights: dict[str, Tensor], offset: Tensor, trunk: Trunk) -> Tensor:
    """The ids that are drafted, ascending and of the tokenizer; the rows of the projection are put in their order."""
    ids = offset.long() + torch.arange(len(offset))
    order = ids.argsort()
    order = order[ids[order] < trunk.draftable]
    if "lm_head.weight" in weights and len(weights["lm_head.weight"]) == len(ids):
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
    return ids[order]


def _compare(path: Path, embedding: Tensor, trunk: Trunk) -> None:
    """Refuse a layer whose embedding is not the trunk's own."""
    own = trunk.model.get_input_embeddings().weight
    if own.is_meta:
        return
    rows = min(len(own), len(embedding))
    same = own.shape[1:] == embedding.shape[1:]
    if same:
        theirs = embedding[:rows].to(own.device, torch.float32)
        same = bool((own[:rows].float() - theirs).abs().amax() <= SAME * theirs.abs().amax())
    if not same:
        raise UserError(
            f"{path} was trained on a trunk with another embedding, {tuple(embedding.shape)}, than this one's,"
            f" {tuple(own.shape)}: load the trunk it belongs to"
        )
