"""Rows of examples: whole, each once, no seam crossed, the same for the same seed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.data.corpus import DataConfig, RandomBlocks, pack
from medusa.data.examples import Example
from medusa.data.packing import (
    Layout,
    PackedRows,
    TiledBlocks,
    filler_id,
    lay_out,
    order,
    pack_examples,
    text_rows,
)
from medusa.errors import UserError

from .chats import chat_tokenizer

FILLER = 999


def example(length: int, prompt: int = 1, row: int = 0) -> Example:
    """An example whose ids tell where they come from: row * 1000 + place."""
    place_T = torch.arange(length)
    return Example(row * 1000 + place_T, place_T >= prompt, (prompt,), row)


def examples(*lengths: int, prompt: int = 1) -> list[Example]:
    return [example(length, prompt, row) for row, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=40)


@given(lengths=LENGTHS, block=st.integers(3, 20), seed=st.integers(0, 3), drop=st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_supervised_token_is_in_one_row_of_its_own_example(
    lengths: list[int], block: int, seed: int, drop: bool
) -> None:
    given_ = examples(*lengths)
    kept = [each for each in given_ if not drop or len(each.ids) <= block]
    if not kept:
        with pytest.raises(
            UserError, match=rf"all {len(lengths)} are longer than data\.block={block}: raise the block"
        ):
            lay_out(given_, block, "drop", seed)
        return
    made = lay_out(given_, block, "drop" if drop else "split", seed)
    assert made.too_long == sum(length > block for length in lengths)
    rows = PackedRows(given_, block, len(made.rows), seed, filler=FILLER, too_long="drop" if drop else "split")
    seen: Counter[int] = Counter()
    for item in rows:
        ids, segments, labels = (item[name].tolist() for name in ("input_ids", "segments", "labels"))
        assert len(ids) == len(segments) == len(labels) == block
        assert segments == sorted(segments) and segments[0] == 0
        for segment in set(segments):
            part = [place for place in range(block) if segments[place] == segment]
            if ids[part[0]] == FILLER:
                assert segment == segments[-1] and all(ids[p] == FILLER and labels[p] == -100 for p in part)
            else:  # consecutive tokens of one example
                assert [ids[p] for p in part] == list(range(ids[part[0]], ids[part[0]] + len(part)))
                assert [labels[p] for p in part] == [ids[p] if ids[p] % 1000 else -100 for p in part]
        seen.update(label for label in labels if label != -100)
    wanted = [int(token) for each in kept for token in each.ids[each.supervised]]
    assert seen == Counter(wanted)
    assert made.filled == pytest.approx(
        sum(piece.length for row in made.rows for piece in row) / (block * len(made.rows))
    )


def test_what_fits_is_whole_and_rows_are_full() -> None:
    made = lay_out(examples(6, 4, 7, 3, 5, 5), 10)
    assert len(made.rows) == 3 and made.filled == 1.0
    assert sorted(len(row) for row in made.rows) == [2, 2, 2]
    for seed in range(3):  # the longest first, whatever the seed
        assert lay_out(examples(*[7, 3] * 6, *[6, 4] * 6, *[5] * 6), 10, seed=seed).filled == 1.0
    assert len(lay_out(examples(9, 11), 10).rows) == 2  # the last token of the second fills up the first
    assert [(piece.start, piece.end) for row in made.rows for piece in row if piece.start] == []


def test_too_long_ones_are_split_or_dropped_and_counted() -> None:
    given_ = [*examples(25, 4), example(25, prompt=20, row=2)]
    made = lay_out(given_, 10, "split")
    # Of the third example the first two pieces hold no answer.
    assert (made.too_long, made.pieces, made.unsupervised) == (2, 6, 2)
    pieces = sorted(piece for row in made.rows for piece in row)
    assert pieces == [(0, 0, 10), (0, 10, 20), (0, 20, 25), (1, 0, 4), (2, 20, 25)]
    dropped = lay_out(given_, 10, "drop")
    assert (dropped.too_long, dropped.pieces, dropped.unsupervised) == (2, 0, 0)
    assert dropped.rows == [[(1, 0, 4)]]
    with pytest.raises(UserError, match="no token of them is supervised: give answers"):
        lay_out(examples(4, prompt=4), 10)


def test_each_epoch_has_every_row_once_in_its_own_order_that_the_seed_decides() -> None:
    given_ = examples(*([9, 8, 7] * 10))
    made = PackedRows(given_, 10, 90, seed=1, filler=0)
    assert len(made.layout.rows) == 30
    epochs = [[made.row(index) for index in range(start, start + 30)] for start in (0, 30, 60)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PackedRows(given_, 10, 200, seed=1, filler=0)
    assert [again.row(index) for index in (89, 3, 45)] == [made.row(index) for index in (89, 3, 45)]
    other = PackedRows(given_, 10, 90, seed=2, filler=0)
    assert [other.row(index) for index in range(30)] != epochs[0] and other.layout.rows != made.layout.rows
    assert len(made) == len(list(made)) == 90


def test_the_order_never_changes() -> None:
    # A run resumed under another release must see the rows it would have seen.
    assert order(8, 7, 1) == [7, 5, 3, 2, 0, 1, 6, 4]
    assert order(8, 7, 2) != order(8, 7, 1)


def test_held_out_rows_are_all_there_once() -> None:
    given_ = examples(6, 4, 7)
    rows = pack_examples(given_, 10, FILLER)
    labels = rows["labels"][:]
    assert sorted(labels[labels != -100].tolist()) == sorted(int(t) for each in given_ for t in each.ids[1:])
    assert rows[0]["input_ids"].dtype == torch.int64 and set(rows.column_names) == {"input_ids", "segments", "labels"}


def test_the_filler_is_the_pad_or_the_end_or_anything() -> None:
    tokenizer = chat_tokenizer(None)
    assert filler_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert filler_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert filler_id(tokenizer) == 0


def test_an_empty_layout_is_not_full() -> None:
    assert Layout([], 10, 0, 0, 0).filled == 0


@given(extra=st.integers(0, 4), count=st.integers(1, 7), seed=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_tiled_rows_are_those_of_the_text_each_once_in_an_epoch(extra: int, count: int, seed: int) -> None:
    tokens_T = torch.arange(5 * count + extra)
    segments_T = tokens_T // 3
    packed = pack(tokens_T.split(3), 5)[:]
    rows = TiledBlocks(tokens_T, segments_T, 5, 3 * count + 1, seed)
    for epoch in range(3):
        items = [rows[epoch * count + place] for place in range(count)]
        items.sort(key=lambda item: int(item["input_ids"][0]))
        assert [item["input_ids"].tolist() for item in items] == packed["input_ids"].tolist()
        assert [item["segments"].tolist() for item in items] == packed["segments"].tolist()
    again = TiledBlocks(tokens_T, segments_T, 5, 99, seed)
    assert [rows.row(index) for index in range(len(rows))] == [again.row(index) for index in range(len(rows))]


def test_tiled_rows_come_in_another_order_in_each_epoch_and_for_each_seed() -> None:
    tokens_T = torch.arange(80)
    orders = {
        tuple(rows.row(10 * epoch + place) for place in range(10))
        for rows in (TiledBlocks(tokens_T, tokens_T, 8, 99, seed) for seed in (0, 1))
        for epoch in range(3)
    }
    assert len(orders) == 6
    with pytest.raises(UserError, match="the text has 7 tokens, a block 8"):
        TiledBlocks(tokens_T[:7], tokens_T[:7], 8, 1, 0)


def test_a_plain_text_is_cut_as_the_configuration_says() -> None:
    documents = [torch.arange(30)]
    for windows, kind in (("random", RandomBlocks), ("tiled", TiledBlocks)):
        made = text_rows(documents, DataConfig(block=8, windows=windows), 4, 0)  # type: ignore[arg-type]
        assert type(made) is kind and len(made) == 4 and made.block == 8
