"""From held-out text to the tree of an EAGLE layer, as :mod:`medusa.calibrate` does it for heads.

Along a path of true tokens the layer reads what :meth:`medusa.eagle.EagleLayer.unroll` makes it read. So one reading of
a text for each depth tells where the true token stands in each list that drafting along it would see.

Dimensions: T tokens, S steps, D hidden, F features, K depths, V' the tokens that the layer drafts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from medusa.calibrate import ROUNDS, SIZES, Calibration, Continuations, choose, text_ranks
from medusa.checkpoint import CALIBRATION, save_tree
from medusa.confidence import fitted
from medusa.costs import Progress, drafter_costs
from medusa.drafters.eagle import EagleDrafter
from medusa.eagle import EagleLayer
from medusa.errors import UserError
from medusa.files import write_json
from medusa.tree import Topology

TEXTS = 16  # read at a time


@torch.no_grad()
def layer_features(layer: EagleLayer, held: Continuations) -> list[Tensor]:
    """What the layer reads of each text [T, F]: the states kept with it, or those of other layers, read again here."""
    if not layer.layers:
        return held.hidden
    features: list[Tensor] = []
    for start in range(0, len(held.ids), TEXTS):
        texts = held.ids[start : start + TEXTS]
        output = layer.trunk.forward(_padded(texts).to(layer.trunk.device), keep=1, layers=layer.layers)
        read_BTF = layer.features(output)  # causal: pads on the right change nothing
        features.extend(read_BTF[row, : len(ids)].clone() for row, ids in enumerate(texts))
    return features


def _padded(texts: Sequence[Sequence[int]]) -> Tensor:
    ids_BT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, ids in enumerate(texts):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    return ids_BT


@torch.no_grad()
def judged_depths(
    layer: EagleLayer, held: Continuations, features: Sequence[Tensor], depth: int
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Of each text what :func:`medusa.confidence.judged` tells of heads: each depth's logits and true columns."""
    for start in range(0, len(held.ids), TEXTS):
        texts = held.ids[start : start + TEXTS]
        ids_BT = _padded(texts).to(layer.trunk.device)
        read_BTF = torch.nn.utils.rnn.pad_sequence(list(features[start : start + TEXTS]), batch_first=True)
        states = layer.unroll(ids_BT, read_BTF, depth)
        for row, ids in enumerate(texts):
            first = held.starts[start + row] - 1  # a step at state t has the root t+1 and emits t+2 at least
            yield [_judged(layer, ids_BT[row], state[row], first, len(ids), k) for k, state in enumerate(states)]


def _judged(
    layer: EagleLayer, ids_T: Tensor, state_TD: Tensor, first: int, length: int, depth: int
) -> tuple[Tensor, Tensor]:
    """The guesses ``depth`` tokens behind the root's own [S, V'], and the true columns [S]."""
    pairs = torch.arange(first, max(first, length - 2 - depth), device=ids_T.device) + depth
    return layer.logits(state_TD[pairs]), layer.columns(ids_T[pairs + 2])


def layer_ranks(layer: EagleLayer, held: Continuations, features: Sequence[Tensor], depth: int) -> list[Tensor]:
    """Per text int64 [S, K]: where the true token stands at each depth (see :func:`medusa.calibrate.head_ranks`).

    ``features`` are those of :func:`layer_features`.
    """
    texts = zip(held.ids, held.starts, judged_depths(layer, held, features, depth), strict=True)
    return [text_ranks(layer, ids, start, found, depth) for ids, start, found in texts]


def calibrate_layer(
    layer: EagleLayer,
    held: Continuations,
    depth: int,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Calibration:
    """The static tree, at most ``depth`` deep, that is fastest here (see :func:`medusa.calibrate.calibrate`).

    Raises:
        UserError: fewer than two held-out prompts.
    """
    if len(held.ids) < 2:
        raise UserError(f"{len(held.ids)} held-out prompts: calibration needs 2 or more, to grow and to judge")
    grown_on, judged_on = held.halves()
    features = layer_features(layer, grown_on)
    prompt = held.ids[0][: held.starts[0]]

    def costs(topologies: Sequence[Topology]) -> list[tuple[float, float]]:
        drafters = [EagleDrafter(layer, topology) for topology in topologies]
        return drafter_costs(layer.trunk, drafters, topologies, [prompt], rounds, progress)

    return choose(
        layer_ranks(layer, grown_on, features, depth),
        layer_ranks(layer, judged_on, layer_features(layer, judged_on), depth),
        sizes,
        costs,
        fitted(layer, judged_depths(layer, grown_on, features, depth), depth),
    )


def recalibrate_layer(
    folder: Path,
    layer: EagleLayer,
    held: Continuations,
    depth: int,
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate on this machine and write the tree and the measurements into the layer's folder."""
    found = calibrate_layer(layer, held, depth, sizes=sizes, rounds=rounds, progress=progress)
    save_tree(folder, found.topology)
    write_json(folder / CALIBRATION, found.as_json())
    return found
