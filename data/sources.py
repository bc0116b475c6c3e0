"""Reading a source into rows: a plain text, JSON lines, Parquet, a folder, the hub, or a stream of one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.errors import UserError, nearest
from medusa.files import read_json

if TYPE_CHECKING:
    import datasets

    from .corpus import DataConfig

TINYSHAKESPEARE = "tinyshakespeare"
TEXT_SUFFIXES = (".txt", ".md", ".text")
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
ANSWERS = "answers.jsonl"  # in a folder made by `medusa distill`
META = "meta.json"  # beside them: what they were made with
Report = Callable[[str], None]


def read_text(path: Path) -> str:
    """Read a UTF-8 file, line ends untouched. Raises UserError when it is missing, empty or not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): give a text file") from error
    if not data:
        raise UserError(f"{path} is empty: give a file that holds text")
    return _decode_utf8(data, path)


def text_file(config: DataConfig, report: Report | None) -> Path | None:
    """The plain text file that is the source, or None for a set of rows."""
    if config.source == TINYSHAKESPEARE:
        from .tinyshakespeare import obtain

        return obtain(path=Path(config.path).expanduser() if config.path else None, report=report)
    path = Path(config.source).expanduser()
    return path if path.suffix.lower() in TEXT_SUFFIXES and not path.is_dir() else None


def load_rows(config: DataConfig) -> datasets.Dataset:
    """The rows of a source that is no plain text; the first ``config.examples`` of them where that is given.

    Raises:
        UserError: a source that is missing, empty, or of an unknown kind, and an unknown split.
    """
    rows = _load(config)
    if config.streaming:
        return _taken(rows, config)
    return rows if config.examples is None else rows.select(range(min(config.examples, len(rows))))


def answered_by(source: str) -> str | None:
    """The fingerprint of the trunk that gave the answers of a source made by `medusa distill`; None if nothing tells.

    Raises:
        UserError: the file beside the answers that tells it can't be read.
    """
    path = Path(source).expanduser()
    meta = path / META if path.is_dir() else path.with_suffix(f".{META}")
    if not meta.is_file():
        return None
    settings = read_json(meta).get("settings")
    found = settings.get("fingerprint") if isinstance(settings, dict) else None
    return None if found is None else str(found)


def _taken(stream: Any, config: DataConfig) -> datasets.Dataset:
    """The first ``config.examples`` rows of a stream, in memory."""
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    if isinstance(stream, Dataset):  # a folder saved by datasets: it is on the disk, read as it is needed
        return stream.select(range(min(config.examples or 0, len(stream))))
    try:
        with quiet():
            rows = list(stream.take(config.examples))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise _cannot_load(config.source, error) from error
    return Dataset.from_list(rows, features=stream.features)


def _load(config: DataConfig) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(config.source).expanduser()
    loader = LOADERS.get(path.suffix.lower())
    files = [path]
    if path.is_dir():
        files, loader = _data_files(path)
        if loader is None:
            return _load_folder(path, config.split)
    if path.is_file() and loader is None:
        raise UserError(f"{path} has an unknown ending: rename it to one of {', '.join((*TEXT_SUFFIXES, *LOADERS))}")
    if loader is None:
        _check_hub_name(config.source)
    else:
        for file in files:
            _check_file(file, loader)
    try:
        with quiet():
            options = {"split": config.split, "streaming": config.streaming}
            if loader is None:
                return load_dataset(config.source, config.config_name, **options)
            return load_dataset(loader, data_files=[str(file) for file in files], **options)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise _cannot_load(config.source, error) from error


def _cannot_load(source: str, error: Exception) -> UserError:
    cause = error.__cause__ or error
    reason = next(iter(str(cause).splitlines()), type(cause).__name__)
    return UserError(f"can't load {source!r} ({reason}): check the name, the file and the split")


def _data_files(folder: Path) -> tuple[list[Path], str | None]:
    """The files of a folder that is no saved data set, and their loader: those of `medusa distill`, or all of a kind.

    Without any, no loader.
    """
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [], None
    if (folder / ANSWERS).is_file():
        return [folder / ANSWERS], LOADERS[Path(ANSWERS).suffix]
    for suffix in (".jsonl", ".parquet"):
        if files := sorted(folder.glob(f"*{suffix}")):
            return files, LOADERS[suffix]
    return [], None


def _check_file(path: Path, loader: str) -> None:
    if not path.is_file():
        raise UserError(f"{path} does not exist: give an existing file")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty: give a file that holds text")
    if loader == "json":
        _check_utf8(path)  # the loader itself finds out only when a row is read


def _load_folder(path: Path, split: str) -> datasets.Dataset:
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"folder {path} was not saved by datasets and holds no .jsonl or .parquet file: give a folder that does, or"
            " a file in it"
        ) from error
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
def quiet() -> Iterator[None]:
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
