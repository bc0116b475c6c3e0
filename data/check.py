"""The check before the first step: what would train without complaint and teach nothing, or the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medusa.errors import UserError

from .examples import Examples
from .packing import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_documents(documents: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check token ids of plain texts.

    Raises:
        UserError: no token at all, a second BOS, padding, or nothing but one text again and again.
    """
    if not any(len(ids) for ids in documents):
        raise UserError("the training text has no tokens: give more text")
    for row, ids in enumerate(documents):
        _check_ids(ids, f"document {row}", tokenizer, "the text holds one, and the tokenizer adds its own")
    _check_differ(documents, "documents")


def check_examples(examples: Examples, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the examples of the training split.

    Raises:
        UserError: no supervised token, a second BOS, padding, or nothing but one example again and again.
    """
    if not any(bool(example.supervised.any()) for example in examples):
        raise UserError("none of the examples has a supervised token: give answers, or set data.supervise=all")
    cause = "the chat template writes it twice, or a text begins with one"
    for example in examples:
        _check_ids(example.ids, f"row {example.row}", tokenizer, cause)
    _check_differ([example.ids for example in examples], "examples")


def warnings(examples: Examples, layout: Layout | None = None) -> list[str]:
    """A line on each thing that training bears, but someone should know."""
    counts, found = examples.counts, []
    if counts["faulty"]:
        found.append(f"{counts['faulty']:,} rows are of no use and left out, the first because: {examples.faults[0]}")
    if counts["open_ended"]:
        found.append(
            f"{counts['open_ended']:,} answers are not ended by a token: where they end is not learnt, since the chat"
            " template writes no end-of-turn token behind them"
        )
    if counts["truncated"]:
        found.append(f"{counts['truncated']:,} answers were cut off at their limit and have no end")
    if counts["repeated"]:
        found.append(
            f"{counts['repeated']:,} examples more than conversations: the chat template rewrites earlier answers, so"
            " each of those is learnt where it was the last"
        )
    if layout is not None:
        found += _of_layout(layout)
    return found


def shared(train: Examples, heldout: Examples) -> int:
    """How many held-out examples are among those of training."""
    known = {example.ids.numpy().tobytes() for example in train}
    return sum(example.ids.numpy().tobytes() in known for example in heldout)


def _of_layout(layout: Layout) -> list[str]:
    found = []
    if layout.too_long:
        done = f"split into {layout.pieces:,} pieces" if layout.pieces else "dropped"
        found.append(f"{layout.too_long:,} examples are longer than data.block={layout.block} and {done}")
    if layout.unsupervised:
        found.append(f"{layout.unsupervised:,} pieces of them hold no supervised token and are left out")
    return found


def _check_ids(ids: Tensor, name: str, tokenizer: PreTrainedTokenizerBase, cause: str) -> None:
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    if bos is not None and ids[:2].tolist() == [bos, bos]:
        raise UserError(
            f"{name} begins with the BOS {tokenizer.bos_token!r} twice ({cause}): decoding has one, so leave one out"
        )
    if pad is None or pad in (bos, tokenizer.eos_token_id, tokenizer.unk_token_id) or not len(ids):
        return
    padding = ids == pad
    if padding[-1] or (padding[1:] & padding[:-1]).any():
        raise UserError(
            f"{name} is padded: it holds the pad token {tokenizer.pad_token!r} {int(padding.sum())} times, and would"
            " teach it; give the tokens without padding"
        )


def _check_differ(rows: Sequence[Tensor], name: str) -> None:
    if len(rows) > 1 and all(torch.equal(rows[0], other) for other in rows[1:]):
        raise UserError(f"all {len(rows):,} {name} of training are the same: give different ones")
