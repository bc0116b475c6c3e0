"""Heads as plain matrices, which is what other engines take: residual blocks and a projection for each of them.

What an engine's heads of kind ``medusa`` can't do is refused with the reason: reading tokens, adding a bias, drafting
from a part of the vocabulary. What the trunk does after its projection: a scale goes into the projection; a softcap
keeps the order of tokens, so that drafts are the same without it.

Dimensions: D hidden, V vocabulary, V' the tokens that heads draft from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.errors import UserError
from medusa.head_parts import Head, LowRank
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.trunk import Trunk

DTYPES = ("float32", "float16", "bfloat16")


class NotExpressible(UserError):
    """Heads that a layout has no words for. Other heads on the same trunk may do."""


@dataclass(frozen=True)
class Matrices:
    """Heads as every engine takes them.

    ``blocks``: weight [D, D] and bias [D] of each head's layers; ``projections`` [V', D] of each head, one and the same
    tensor where ``shared``; ``draft_ids`` int64 [V'] unless V' = ``vocab``. ``notes``: what became different, in words.
    """

    blocks: list[list[tuple[Tensor, Tensor]]]
    projections: list[Tensor]
    shared: bool
    draft_ids: Tensor | None
    vocab: int
    notes: list[str]

    @property
    def hidden(self) -> int:
        """D."""
        return self.projections[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are in."""
        return self.projections[0].dtype


def refuse(config: HeadsConfig, engine: str, *, reduced: bool = True) -> None:
    """Refuse what can be seen to be beyond an engine without any weights.

    Raises:
        NotExpressible: what these heads do that the engine has no words for.
    """
    if config.kind != "medusa":
        read = {"root": "the token just chosen", "hydra": "the tokens drafted before theirs"}[config.kind]
        raise NotExpressible(
            f"heads of kind {config.kind!r} also read {read}, and those of {engine} read the trunk's state alone"
        )
    if config.markov is not None:
        raise NotExpressible(
            f"heads.markov={config.markov}: {engine} adds nothing to a head's logits by the token before"
        )
    if config.vocab is not None and config.projection != "shared" and not reduced:
        raise NotExpressible(
            f"heads.vocab={config.vocab}: {engine} takes a projection to the whole vocabulary, and these heads'"
            f" own have that many rows (vllm takes them)"
        )


def matrices(heads: MedusaHeads, engine: str, *, reduced: bool = True, dtype: torch.dtype | None = None) -> Matrices:
    """The heads' weights in ``dtype``, None for what they are kept in; low ranks are multiplied out.

    ``reduced``: whether the engine, which errors name, takes heads that draft from a part of the vocabulary.

    Raises:
        NotExpressible: heads that the engine has no words for.
        UserError: weights that overflow ``dtype``.
    """
    refuse(heads.config, engine, reduced=reduced)
    kept = dtype or next(heads.head(0).parameters()).dtype
    ids, notes = heads.draft_ids, []
    if ids is not None and len(ids) == heads.trunk.vocab_size:
        ids = None
    if ids is not None and not reduced:
        notes.append(f"the heads draft from all tokens there, and not from {len(ids)}: the projection is the trunk's")
        ids = None
    shared = heads.config.projection == "shared"
    one = rounded(_trunk_projection(heads, ids), kept, "the trunk's projection") if shared else None
    blocks, projections = [], []
    for index in range(heads.config.num):
        head, where = heads.head(index), f"head {index}"
        held = {name: rounded(value, kept, where) for name, value in head.blocks.state_dict().items()}
        layers = range(heads.config.layers)
        blocks.append([(held[f"{layer}.linear.weight"], held[f"{layer}.linear.bias"]) for layer in layers])
        projections.append(one if one is not None else rounded(_own_projection(heads, head), kept, where))
    if heads.config.projection == "low_rank":
        notes.append(f"projections of rank {heads.config.rank} are multiplied out: {projections[0].numel():,} numbers")
    if getattr(heads.trunk.config, "final_logit_softcapping", None) is not None:
        notes.append("the trunk's softcap is left out: it keeps the order of tokens, so the drafts are the same")
    return Matrices(blocks, projections, shared, ids, heads.trunk.vocab_size, notes)


def _own_projection(heads: MedusaHeads, head: Head) -> Tensor:
    """[V', D], with the trunk's scale in it."""
    projection = head.projection
    assert projection is not None
    refuse_bias(projection.bias)
    weight = projection.weight.detach()
    if isinstance(projection, LowRank):
        weight = weight.double() @ projection.down.weight.detach().double()
    return scaled(weight, heads.trunk)


def _trunk_projection(heads: MedusaHeads, ids: Tensor | None) -> Tensor:
    """The trunk's, or its rows ``ids``: [V', D], with its scale in it."""
    output = heads.trunk.model.get_output_embeddings()
    output = getattr(output, "base_layer", output)  # with an adapter on it, heads use the base's
    refuse_bias(output.bias)
    weight = output.weight.detach()
    return scaled(weight if ids is None else weight[ids], heads.trunk)


def refuse_bias(bias: Tensor | None) -> None:
    """Raise NotExpressible for the bias of a projection, unless it is 0."""
    if bias is not None and bool(bias.any()):
        raise NotExpressible("the projection has a bias, and no other engine's heads have one there")


def scaled(weight: Tensor, trunk: Trunk) -> Tensor:
    """What :meth:`medusa.trunk.Trunk.project` multiplies logits by goes into the weight."""
    scale = getattr(trunk.config, "logit_scale", None)
    divisor = getattr(trunk.config, "logits_scaling", None)
    if scale is None and divisor is None:
        return weight
    return weight.double() * (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)


def rounded(values: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """``values`` in ``dtype``, to be written; UserError that names ``where`` if it can't hold one of them."""
    narrow = values.detach().to(dtype).cpu().contiguous()
    if not bool(narrow.isfinite().all()):
        largest = float(values.detach().abs().max())
        kind = str(dtype).removeprefix("torch.")
        raise UserError(
            f"{where} holds a weight of {largest:.3g}, beyond {kind}: choose another of {', '.join(DTYPES)}"
        )
    return narrow
