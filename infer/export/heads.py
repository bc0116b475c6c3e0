"""Medusa heads as a piece to export, and the comparison of what an engine reads with what was trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from medusa.checkpoint import MANIFEST, TREE, WEIGHTS, load_heads, load_tree, read_manifest, trunk_source
from medusa.dialects import load_published, published_tree, published_trunk
from medusa.engines import ENGINES
from medusa.errors import UserError
from medusa.exports import LAYOUTS, export
from medusa.head_parts import LowRank
from medusa.heads import MedusaHeads
from medusa.matrices import refuse
from medusa.tree import Topology

from ..source import load_trunk
from .parts import Agreement, Piece, agreement, capped, in_words, sample, saved_in, trunk_name, wide, written_in


def heads_piece(folder: Path, to: str, *, dtype: torch.dtype | None, base: str | None, device: str) -> Piece:
    """The heads in ``folder``, ours or published, for the layout ``to``.

    Raises:
        NotExpressible: heads that the layout has no words for.
        UserError: they can't be loaded, or ``dtype`` can't hold them.
    """
    layout = LAYOUTS[to]
    if (folder / MANIFEST).is_file():
        refuse(read_manifest(folder).heads, layout.engine, reduced=layout.reduced)  # before anything large is loaded
    heads, topology, trunk = _load(folder, device)
    made = export(heads, layout, base=base or trunk, topology=topology, dtype=dtype)
    about = _about(heads, base or trunk, written_in(made))
    compared = partial(compare, to=to, heads=heads, dtype=written_in(made))
    return Piece(made, heads.trunk, base or trunk, folder, "Medusa heads", about, "heads", compared)


def _load(folder: Path, device: str) -> tuple[MedusaHeads, Topology | None, str]:
    """The heads in the precision they are saved in, their tree, and the trunk's name."""
    trunk = load_trunk(folder, dtype="auto", device=device, check=False, packed=False)
    if not (folder / MANIFEST).is_file():
        heads = load_published(folder, trunk)
        return heads, published_tree(folder, heads.config), published_trunk(folder)
    manifest = read_manifest(folder)
    heads = load_heads(folder, trunk, saved_in(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else None)
    topology = load_tree(folder, heads.config) if (folder / TREE).is_file() else None
    return heads, topology, trunk_name(trunk_source(folder, manifest))


def _about(heads: MedusaHeads, base: str, dtype: torch.dtype) -> str:
    config, trunk = heads.config, heads.trunk
    blocks = "one residual block" if config.layers == 1 else f"{config.layers} residual blocks"
    drafted = trunk.vocab_size if heads.draft_ids is None else len(heads.draft_ids)
    return (
        f"{config.num} Medusa heads of {blocks} each on the last hidden state ({trunk.hidden_size} numbers) of"
        f" `{base}`, trained to draft from {drafted:,} of {trunk.vocab_size:,} tokens. Weights in {in_words(dtype)}."
        " Head k, from 0, guesses the token k + 2 places after the one that was read last."
    )


def compare(folder: Path, to: str, heads: MedusaHeads, dtype: torch.dtype) -> Agreement:
    """Read the folder as the engine does and compare its logits with those of ``heads`` in weights of ``dtype``.

    Raises:
        UserError: names, shapes or logits that are not what they should be.
    """
    trunk = heads.trunk
    read = ENGINES[to](folder, trunk.hidden_size, trunk.vocab_size)
    hidden = trunk.forward(sample(trunk)).hidden[0].to(wide(trunk))
    theirs = read.logits(hidden.cpu())
    if len(theirs) != heads.config.num:
        raise UserError(f"{folder}: the engine finds {len(theirs)} heads, there are {heads.config.num}")
    columns = torch.arange(trunk.vocab_size) if heads.draft_ids is None else heads.draft_ids.cpu()
    pairs = [
        (_logits(heads, index, hidden, dtype).cpu(), capped(trunk, logits[:, columns]))
        for index, logits in enumerate(theirs)
    ]
    return agreement(trunk, read.tensors, pairs, dtype, product=heads.config.projection == "low_rank")


@torch.no_grad()
def _logits(heads: MedusaHeads, index: int, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Our own logits [.., V'] in the precision of ``hidden``, of weights rounded to ``dtype`` as those written are."""
    head, trunk = heads.head(index), heads.trunk
    rounded = {name: value.to(dtype).to(hidden.dtype) for name, value in head.state_dict().items()}
    features: Tensor = functional_call(head, rounded, (hidden, None))
    if head.projection is None:
        output = trunk.model.get_output_embeddings()
        output = getattr(output, "base_layer", output)
        weight = output.weight.data if heads.draft_ids is None else output.weight.data[heads.draft_ids]
        return trunk.project(features, weight.to(dtype).to(hidden.dtype))
    if isinstance(head.projection, LowRank):
        features = features @ rounded["projection.down.weight"].T
    return trunk.project(features, rounded["projection.weight"])
