"""Sources of our own, compiled once per machine: kept, made anew where damaged, done without where nothing compiles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa import native

SOURCE = 'extern "C" int answer() { return 42; }\n'

COMPILER = native.find_compiler() or []

if not COMPILER:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source beside the module, which is elsewhere for a while, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native.library.cache_clear()
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE)
    yield file
    native.library.cache_clear()


def kept(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "medusa" / "native").glob("*"))


def answer() -> int | None:
    native.library.cache_clear()  # as in the next process
    found = native.library("answer")
    return None if found is None else found.answer()


def test_it_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer() == 42
    (file,) = kept(source)
    monkeypatch.setattr(native, "build", lambda *_: pytest.fail("compiled again"))
    assert answer() == 42 and kept(source) == [file]


def test_another_source_is_another_library(source: Path) -> None:
    assert answer() == 42
    source.write_text(SOURCE.replace("42", "43"))
    assert answer() == 43 and len(kept(source)) == 2


@pytest.mark.parametrize("what", ["compiler", "processor"])
def test_it_goes_by_what_it_was_made_with(source: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer() == 42
    if what == "processor":
        monkeypatch.setattr(native, "processor", lambda: b"another")
    else:
        other = source.with_name("other")
        other.write_text('#!/bin/sh\nexec "$@"\n')
        other.chmod(0o755)
        monkeypatch.setenv("CXX", " ".join([str(other), *COMPILER]))  # as with ccache
    assert answer() == 42 and len(kept(source)) == 2


def test_a_path_may_hold_spaces(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = source.with_name("a compiler")
    other.write_text(f'#!/bin/sh\nexec {" ".join(COMPILER)} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert native.find_compiler() == [str(other)] and answer() == 42


@pytest.mark.parametrize("named", ["no-such-compiler", "no-such-launcher g++", " "])
def test_a_compiler_that_is_not_there_is_none(source: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    assert native.find_compiler() is None and answer() is None


def test_a_damaged_file_is_made_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer() == 42
    (file,) = kept(source)
    # in another place, as a system knows the library that lies in this one
    damaged = source.with_name("other") / "medusa" / "native" / file.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.with_name("other")))
    assert answer() == 42 and damaged.stat().st_size == file.stat().st_size


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="knows no users")
@pytest.mark.parametrize("whose", ["of another", "a file open to others", "a folder open to others"])
def test_a_program_that_somebody_else_may_have_written_is_not_taken(
    source: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.library("answer")
    (file,) = kept(source)
    assert answer() == 42 and file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    # in another place, as a system knows the library that lies in this one
    planted = source.with_name("other") / "medusa" / "native" / file.name
    planted.parent.mkdir(parents=True)
    source.write_text(SOURCE.replace("42", "666"))
    assert native.build(source, COMPILER, planted, ())
    source.write_text(SOURCE)
    planted.chmod(0o600), planted.parent.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.with_name("other")))
    if whose == "of another":
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    else:
        (planted if "file" in whose else planted.parent).chmod(0o777)
    assert answer() == 42


def test_what_others_may_not_write_is_kept_whatever_the_umask(source: Path) -> None:
    before = os.umask(0o002)
    try:
        assert answer() == 42
    finally:
        os.umask(before)
    (file,) = kept(source)
    first = file.stat().st_mtime_ns
    assert answer() == 42 and file.stat().st_mtime_ns == first


def test_a_folder_that_takes_no_files_is_done_without(source: Path) -> None:
    (source.parent / "cache").write_text("a file, and no folder")
    assert answer() == 42


@pytest.mark.parametrize("why", ["none", "named", "fails", "hangs"])
def test_without_a_compiler_that_can(source: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "none":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda _: None)
    elif why == "named":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif why == "fails":
        source.write_text("this is no C++")
    else:
        monkeypatch.setattr(native, "PATIENCE_S", 0.0)
    assert answer() is None and not kept(source)


def test_flags_that_a_compiler_doesn_t_know_are_left_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "OWN", (("-march=nothing",), ()))
    assert answer() == 42
