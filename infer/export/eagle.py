"""An EAGLE-3 layer as a piece to export, and the comparison of what an engine reads with what was trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from medusa.eagle import EagleLayer
from medusa.eagle_engines import read_eagle
from medusa.eagle_exports import EAGLE_LAYOUTS, export_eagle, refuse_eagle
from medusa.eagle_files import (
    DEPTH,
    EAGLE_WEIGHTS,
    eagle_place,
    eagle_tree,
    eagle_trunk,
    load_eagle,
    read_eagle_manifest,
)

from ..source import load_trunk
from .parts import Agreement, Piece, agreement, capped, in_words, sample, saved_in, trunk_name, wide, written_in


def eagle_piece(folder: Path, to: str, *, dtype: torch.dtype | None, base: str | None, device: str) -> Piece:
    """The EAGLE layer of the run ``folder`` for the layout ``to``.

    Raises:
        NotExpressible: a layer that the layout has no words for.
        UserError: it can't be loaded, or ``dtype`` can't hold it.
    """
    place = eagle_place(folder)
    assert place is not None
    layout = EAGLE_LAYOUTS[to]
    refuse_eagle(read_eagle_manifest(place).config, layout)  # before anything large is loaded
    trunk = load_trunk(folder, dtype="auto", device=device, check=False, packed=False)
    layer = load_eagle(place, trunk, saved_in(place / EAGLE_WEIGHTS) if (place / EAGLE_WEIGHTS).is_file() else None)
    name = base or trunk_name(eagle_trunk(place)[0])
    # Where the tree is the root alone, as drafting did not pay when it was made, the usual chain is written.
    made = export_eagle(layer, layout, base=name, depth=eagle_tree(place).depth or DEPTH, dtype=dtype)
    about = _about(layer, name, written_in(made))
    compared = partial(compare_eagle, to=to, layer=layer, dtype=written_in(made))
    return Piece(made, trunk, name, place, "An EAGLE-3 layer", about, "eagle", compared)


def _about(layer: EagleLayer, base: str, dtype: torch.dtype) -> str:
    drafted = layer.trunk.vocab_size if layer.draft_ids is None else len(layer.draft_ids)
    states = ", ".join(map(str, layer.layers[:-1]))
    return (
        f"One decoder layer that drafts for `{base}`, token after token, from what layers {states} and"
        f" {layer.layers[-1]} of it (of {layer.trunk.config.num_hidden_layers}) give. It drafts from {drafted:,} of"
        f" {layer.trunk.vocab_size:,} tokens. Weights in {in_words(dtype)}."
    )


@torch.no_grad()
def compare_eagle(folder: Path, to: str, layer: EagleLayer, dtype: torch.dtype) -> Agreement:
    """Read the folder as the engine does, and compare the logits of two tokens drafted one after the other.

    The first is drafted at every position of a text that the trunk reads, the second behind the whole of it, by the
    layer's own state in place of the trunk's.

    Raises:
        UserError: names, shapes or logits that are not what they should be.
    """
    trunk, precision, ids = layer.trunk, wide(layer.trunk), sample(layer.trunk)
    read = read_eagle(folder, to, trunk.hidden_size, trunk.vocab_size, trunk.config.num_hidden_layers)
    features = torch.cat(trunk.forward(ids, layers=read.states).states, -1)[0, :-1].to(precision).cpu()
    embedded = trunk.embed(ids[0, 1:]).to(precision).cpu()
    fused = read.fuse(features)
    states, logits = read.forward(embedded, fused)
    drafted = read.forward(embedded, torch.cat([fused[:-1], states[-2:-1]]))[1][-1:]
    columns = torch.arange(trunk.vocab_size) if layer.draft_ids is None else layer.draft_ids.cpu()
    theirs = torch.cat([logits, drafted])[:, columns]
    return agreement(trunk, read.tensors, [(_logits(layer, ids, dtype).cpu(), capped(trunk, theirs))], dtype)


def _logits(layer: EagleLayer, ids_1T: Tensor, dtype: torch.dtype) -> Tensor:
    """Our own logits [T, V'] of the same, of weights rounded to ``dtype`` as those written are."""
    trunk, precision = layer.trunk, wide(layer.trunk)
    again = EagleLayer(layer.config, trunk, layer.draft_ids, sizes=layer.sizes, initialise=False, dtype=precision)
    rounded = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in layer.state_dict().items()
    }
    again.load_state_dict(rounded)
    features = again.features(trunk.forward(ids_1T, layers=again.layers)).to(precision)
    first, second = again.unroll(ids_1T, features, 2)
    return again.logits(torch.cat([first[0], second[0, -1:]]))
