"""Files: written whole, byte for byte as given, and read with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa.errors import UserError
from medusa.files import read_json, write_atomically, write_bytes, write_json, write_text


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("text", ["", "ends\n", "dos\r\nline\rends\n\n", "é 漢 \U0001f40d \u2028", "\ufeffmarked"])
def test_text_is_kept_to_the_byte(tmp_path: Path, text: str) -> None:
    write_text(tmp_path / "file", text)
    assert (tmp_path / "file").read_bytes() == text.encode("utf-8")


def test_text_is_utf_8_whatever_the_machines_own_encoding() -> None:
    # os.linesep and the locale have no say: the text becomes bytes before anything is opened
    seen: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.files.write_bytes", lambda path, content: seen.append(content))
        write_text(Path("unused"), "é\n")
    assert seen == [b"\xc3\xa9\n"]


def test_bytes_replace_what_was_there_and_folders_are_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file.bin"
    for content in (bytes(range(256)), b""):
        write_bytes(target, content)
        assert target.read_bytes() == content and list(target.parent.iterdir()) == [target]


def test_text_that_is_not_unicode_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "file", "half a pair: \ud800")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [{}, {"a": [1, 2.5, None, True, "é"], "b": {"c": []}}, {"tiny": 5e-324, "big": 2**80}]
)
def test_json_comes_back(tmp_path: Path, content: dict[str, object]) -> None:
    write_json(tmp_path / "file.json", content)
    assert read_json(tmp_path / "file.json") == content
    assert (tmp_path / "file.json").read_text().endswith("}\n")
    assert (tmp_path / "file.json").read_text() == json.dumps(content, indent=2) + "\n"


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_text(target, "old")

    def interrupted(temporary: Path) -> None:
        temporary.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, interrupted)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_writer_that_renames_into_place_is_seen_whole(tmp_path: Path) -> None:
    # some libraries write beside the name they are given and rename: the name may be another file by then
    def renames(temporary: Path) -> None:
        beside = temporary.with_suffix(".part")
        beside.write_text("new")
        os.replace(beside, temporary)

    write_atomically(tmp_path / "file", renames)
    assert (tmp_path / "file").read_text() == "new" and list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_in_the_way_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "name", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["name"] and (tmp_path / "name").is_dir()


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
@pytest.mark.usefixtures("umask")
def test_a_file_is_as_private_as_the_user_wants_files_to_be(tmp_path: Path, mask: int, mode: int) -> None:
    os.umask(mask)
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{half",
        b"[1]",
        b'"text"',
        b"null",
        b"3",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"a": 1} {"b": 2}',
        b"{'a': 1}",
    ],
)
def test_what_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UserError, match="make the folder anew") as caught:
        read_json(tmp_path / "file.json")
    assert str(tmp_path / "file.json") in one_line(caught)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a file, no folder")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "text" / "below.json"):
        with pytest.raises(UserError) as caught:
            read_json(path)
        assert str(path) in one_line(caught) and "medusa train" in one_line(caught)
