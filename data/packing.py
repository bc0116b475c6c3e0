"""Rows of examples: each whole where it fits, no seam crossed, in an order that a seed decides.

Dimensions: T tokens of a row.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from medusa.errors import UserError

from .corpus import DataConfig, RandomBlocks, check_length, flatten, within_row
from .examples import IGNORE, Example

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

TooLong = Literal["split", "drop"]


class Piece(NamedTuple):
    """Tokens ``start`` to ``end`` of an example."""

    example: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """In tokens."""
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """Which pieces stand in which row.

    ``too_long``: examples that were, and were split or dropped; ``pieces``: what the split ones gave; ``unsupervised``:
    pieces left out since nothing in them is learnt. ``filled``: share of the rows' tokens that are examples'.
    """

    rows: list[list[Piece]]
    block: int
    too_long: int
    pieces: int
    unsupervised: int

    @property
    def filled(self) -> float:
        """Share of the rows' tokens that are examples'."""
        return sum(piece.length for row in self.rows for piece in row) / max(len(self.rows) * self.block, 1)


def order(count: int, *seeds: int) -> list[int]:
    """The numbers below ``count`` in an order that depends on ``seeds`` alone, in every release."""
    return sorted(range(count), key=lambda index: _digest(*seeds, index))


def _digest(*parts: int) -> bytes:
    return hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()


def lay_out(examples: Sequence[Example], block: int, too_long: TooLong = "split", seed: int = 0) -> Layout:
    """Fit examples into rows of ``block`` tokens: the longest first, each into the fullest row that has room for it.

    Equally long ones come in the order of ``seed``. An example that is longer than a row is split into pieces, of which
    those without a supervised token are left out, or dropped.

    Raises:
        UserError: nothing is left.
    """
    pieces, long, split, unsupervised = [], 0, 0, 0
    for index in order(len(examples), seed):
        example = examples[index]
        length = len(example.ids)
        if length > block:
            long += 1
            if too_long == "drop":
                continue
        parts = [Piece(index, start, min(start + block, length)) for start in range(0, length, block)]
        split += len(parts) if len(parts) > 1 else 0
        for piece in parts:
            if example.supervised[piece.start : piece.end].any():
                pieces.append(piece)
            else:
                unsupervised += 1
    if not pieces:
        why = f"all {long} are longer than data.block={block}" if long else "no token of them is supervised"
        raise UserError(f"no example is left to train on, {why}: {'raise the block' if long else 'give answers'}")
    pieces.sort(key=lambda piece: -piece.length)  # stable: the seed's order stays among equals
    return Layout(_fit(pieces, block), block, long, split, unsupervised)


def _fit(pieces: Sequence[Piece], block: int) -> list[list[Piece]]:
    """Best fit: each piece into the row with the least room that is enough."""
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for piece in pieces:
        place = bisect_left(room, (piece.length, -1))
        left, row = room.pop(place) if place < len(room) else (block, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        if left > piece.length:
            insort(room, (left - piece.length, row))
    return rows


def filler_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands behind the last example of a row: never learnt, never seen by an example, so any id would do."""
    return next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)


def build_row(examples: Sequence[Example], pieces: Sequence[Piece], block: int, filler: int) -> dict[str, Tensor]:
    """A row: int64 [T] each.

    ``input_ids``; ``segments``, which number the pieces from 0, the filler behind them included; ``labels``, the ids
    where they are learnt and -100 elsewhere.
    """
    ids_T = torch.full((block,), filler, dtype=torch.int64)
    labels_T = torch.full((block,), IGNORE, dtype=torch.int64)
    segments_T = torch.full((block,), len(pieces), dtype=torch.int64)
    at = 0
    for number, piece in enumerate(pieces):
        part, target = slice(piece.start, piece.end), slice(at, at + piece.length)
        ids_T[target] = examples[piece.example].ids[part]
        labels_T[target] = examples[piece.example].labels()[part]
        segments_T[target] = number
        at += piece.length
    return {"input_ids": ids_T, "segments": segments_T, "labels": labels_T}


class Epochs(torch.utils.data.Dataset[dict[str, Tensor]]):
    """``count`` rows of ``block`` tokens, epoch after epoch, each time in another order.

    There are ``samples`` items; item i depends on (seed, i) alone.
    """

    def __init__(self, count: int, block: int, samples: int, seed: int) -> None:
        self.count, self.block, self.samples, self.seed = count, block, samples, seed
        self._epoch, self._order = -1, [0]

    def __len__(self) -> int:
        return self.samples

    def row(self, index: int) -> int:
        """Which of the rows item ``index`` is."""
        epoch, place = divmod(index, self.count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order(self.count, self.seed, epoch)
        return self._order[place]

    def build(self, row: int) -> dict[str, Tensor]:
        """Row number ``row``: int64 [T] each."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.build(self.row(index))


class TiledBlocks(Epochs):
    """Rows side by side in a token stream, each once in an epoch.

    ``tokens_T`` and ``segments_T`` come from ``corpus.flatten``; items are as those of ``corpus.RandomBlocks``. A
    shorter rest at the end is dropped. Raises UserError when the stream is shorter than a block.
    """

    def __init__(self, tokens_T: Tensor, segments_T: Tensor, block: int, samples: int, seed: int) -> None:
        check_length(len(tokens_T), block)
        super().__init__(len(tokens_T) // block, block, samples, seed)
        self.tokens_T, self.segments_T = tokens_T, segments_T

    def build(self, row: int) -> dict[str, Tensor]:
        """``input_ids`` and ``segments`` of a row."""
        window = slice(row * self.block, (row + 1) * self.block)
        return {"input_ids": self.tokens_T[window].clone(), "segments": within_row(self.segments_T[window])}


def text_rows(documents: Sequence[Tensor], config: DataConfig, samples: int, seed: int) -> RandomBlocks | TiledBlocks:
    """Rows of token ids, cut as ``config.windows`` says. Raises UserError when there are fewer than a block."""
    kind = TiledBlocks if config.windows == "tiled" else RandomBlocks
    return kind(*flatten(documents), config.block, samples, seed)


class PackedRows(Epochs):
    """Rows of examples, as ``build_row`` makes them; which share a row does not change. Raises as ``lay_out``."""

    def __init__(
        self,
        examples: Sequence[Example],
        block: int,
        samples: int,
        seed: int,
        *,
        filler: int,
        too_long: TooLong = "split",
    ) -> None:
        self.examples, self.filler = examples, filler
        self.layout = lay_out(examples, block, too_long, seed)
        super().__init__(len(self.layout.rows), block, samples, seed)

    def build(self, row: int) -> dict[str, Tensor]:
        """A row of the layout."""
        return build_row(self.examples, self.layout.rows[row], self.block, self.filler)


def pack_examples(
    examples: Sequence[Example], block: int, filler: int, too_long: TooLong = "split"
) -> datasets.Dataset:
    """All rows once, in torch format: columns as ``build_row``. Raises as ``lay_out``."""
    from datasets import Dataset

    rows = [build_row(examples, pieces, block, filler) for pieces in lay_out(examples, block, too_long).rows]
    columns = {name: torch.stack([row[name] for row in rows]).numpy() for name in rows[0]}
    return Dataset.from_dict(columns).with_format("torch")
