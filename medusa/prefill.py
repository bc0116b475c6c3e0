"""Reading texts into a cache: whole prompts, or more of texts whose beginnings are held.

Dimensions: B rows, T new tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa.cache import SlotCache
from medusa.mask import chain_shape
from medusa.packed import refresh
from medusa.tree import DraftTree
from medusa.uploads import upload

if TYPE_CHECKING:
    from medusa.trunk import Trunk, TrunkOutput

CHUNK = 512  # tokens read on in one forward: the mask has a row for each of them, as long as the whole text


def prefill(
    trunk: Trunk, ids_BT: Tensor, lengths: Sequence[int], cache: SlotCache, layers: Sequence[int] = ()
) -> tuple[Tensor, Tensor, TrunkOutput]:
    """Read ``lengths`` tokens of each row behind what it holds; see :meth:`medusa.trunk.Trunk.prefill`.

    Prompts in an empty cache go in one forward without a mask, which takes the fast causal kernels.
    """
    assert min(lengths) > 0, "a row without new tokens has no last state"
    refresh(trunk.model)
    if trunk.compiled is not None:
        trunk.compiled.refresh()
    if not cache.longest:
        return _read(trunk, ids_BT, lengths, cache, layers)
    horizon = trunk.horizon(cache.longest)
    ends = [length + new for length, new in zip(cache.lengths, lengths, strict=True)]
    assert horizon is None or max(ends) <= horizon, "a text goes beyond what the cached part of it allows"
    logits_BV, state_BD, output = _read(trunk, ids_BT[:, :CHUNK], lengths, cache, layers)
    parts = [(output.hidden, *output.states)]
    for start in range(CHUNK, ids_BT.shape[1], CHUNK):
        left = [new - start for new in lengths]
        *last, output = _read(trunk, ids_BT[:, start : start + CHUNK], left, cache, layers)
        goes_on_B1 = upload([new > 0 for new in left], ids_BT.device)[:, None]
        logits_BV, state_BD = (
            torch.where(goes_on_B1, new, old) for new, old in zip(last, (logits_BV, state_BD), strict=True)
        )
        parts.append((output.hidden, *output.states))
    hidden, *states = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return logits_BV, state_BD, replace(output, logits=logits_BV[:, None], hidden=hidden, states=tuple(states))


def _read(
    trunk: Trunk, ids_BT: Tensor, lengths: Sequence[int], cache: SlotCache, layers: Sequence[int]
) -> tuple[Tensor, Tensor, TrunkOutput]:
    """One forward. ``lengths`` may go beyond T, or be below 1: no row then reads more than T tokens, or any."""
    size, device, held = ids_BT.shape[1], ids_BT.device, cache.lengths
    last = [min(max(new, 1), size) - 1 for new in lengths]
    columns = sorted(set(last))  # logits of these alone: all of them would be T x V per row
    kept = upload(columns, device)
    if cache.longest:
        tree = DraftTree(chain_shape(size, device), ids_BT, torch.ones_like(ids_BT, dtype=torch.bool))
        output = trunk.tree_forward(tree, cache, kept, layers=layers)
    else:
        cache.reserve(size)
        positions_BT = torch.arange(size, device=device)[None].expand_as(ids_BT)
        output = trunk.forward(ids_BT, cache, None, positions_BT, keep=kept, layers=layers)
    cache.set_lengths([length + min(max(new, 0), size) for length, new in zip(held, lengths, strict=True)])
    rows_B = torch.arange(len(lengths), device=device)
    place_B, last_B = upload([[columns.index(each) for each in last], last], device)
    return output.logits[rows_B, place_B], output.hidden[rows_B, last_B], output
