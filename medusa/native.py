"""C++ of our own, compiled on the machine that runs it: what torch has no operation for at the speed it could have.

A source is one file beside this module, without headers of torch or Python, so that a compiler takes seconds over it,
once per machine: what it makes is kept in the user's cache folder, under a name that goes by the source, the
compiler and the processor. It is a program: one that somebody else owns or may write to is not taken. Where there is no
compiler there is no library, and callers have another way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from medusa.files import is_own, write_bytes
from medusa.machine import cache_folder

COMPILERS = ("c++", "g++", "clang++")
COMMON = ("-O3", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC")
# for this very processor, as compilers call it, with threads and without
OWN = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
PATIENCE_S = 120.0


@cache
def library(name: str) -> ctypes.CDLL | None:
    """The source ``name``.cpp as a library, compiled where that was not done yet; None without a compiler that can."""
    compiler, source = find_compiler(), Path(__file__).with_name(f"{name}.cpp")
    if compiler is None:
        return None
    kept = cache_folder() / "native" / f"{name}-{_key(source, compiler)}.so"
    return _kept(kept) or _made(source, compiler, kept)


def find_compiler() -> list[str] | None:
    """The C++ compiler, with words behind it: what ``CXX`` says, else the system's; None where there is none."""
    named = os.environ.get("CXX")
    calls = [[named], named.split()] if named else [[each] for each in COMPILERS]  # a path may hold spaces
    return next(([found, *words[1:]] for words in calls if words and (found := shutil.which(words[0]))), None)


def build(source: Path, compiler: Sequence[str], to: Path, flags: Sequence[str]) -> bool:
    """Compile into the file ``to``; whether that worked."""
    command = [*compiler, *COMMON, *flags, str(source), "-o", str(to)]
    try:
        return subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _made(source: Path, compiler: Sequence[str], kept: Path) -> ctypes.CDLL | None:
    """Compiled and kept; for this process alone where the cache folder takes no files, or none that can be run."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / source.with_suffix(".so").name
        if not any(build(source, compiler, made, flags) for flags in OWN):
            return None
        try:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(kept, made.read_bytes())
            kept.chmod(0o600)  # whatever the user's umask
        except OSError:
            return _loaded(made)
        return _kept(kept) or _loaded(made)


def _kept(file: Path) -> ctypes.CDLL | None:
    """None also where somebody else may have written the file: folders are shared by users too."""
    try:
        return _loaded(file) if is_own(file.parent) and is_own(file) else None
    except OSError:
        return None


def _loaded(file: Path) -> ctypes.CDLL | None:
    """None where there is no such file, or one that the system can't load: damaged, or in a folder without programs."""
    try:
        return ctypes.CDLL(str(file)) if file.is_file() else None
    except OSError:
        return None


def _key(source: Path, compiler: Sequence[str]) -> str:
    """What the compiled file depends on: folders are shared by machines, and a processor knows only its own words."""
    programs = [Path(found).resolve() for word in compiler if (found := shutil.which(word))]  # `ccache g++` is two
    states = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in programs]
    parts = [source.read_bytes(), str((COMMON, OWN, states, *compiler)).encode(), processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def processor() -> bytes:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return repr((platform.machine(), platform.processor(), platform.node())).encode()
    first = info.read_bytes().partition(b"\n\n")[0]
    told = (line for line in first.splitlines() if line.startswith((b"model", b"flags", b"Features", b"CPU part")))
    return platform.machine().encode() + b"\n".join(told)
