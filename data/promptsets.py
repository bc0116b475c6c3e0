"""Questions for benchmarks: our own in the six categories of Spec-Bench (Xia et al. 2024), or a file of the user's.

The public file of Spec-Bench (``question.jsonl``: category and turns) is read as it is; its eight kinds of
conversation, which come from MT-bench, count as one category there and here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.errors import UserError, nearest

from .records import Message, conversation
from .sources import read_text

FOLDER = Path(__file__).parent / "questions"
# Our names, each with what it is.
CATEGORIES = {
    "conversation": "multi-turn conversation",
    "translation": "translation",
    "summarisation": "summarisation",
    "qa": "question answering",
    "mathematics": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = dict.fromkeys(MT_BENCH, "conversation") | {
    "summarization": "summarisation",
    "math_reasoning": "mathematics",
}
FIELDS = ("turns", "messages", "prompt")
UNNAMED = "all"  # the category of rows that name none


@dataclass(frozen=True)
class Question:
    """What a user asks in ``turns``, one after the other, each after the answer to the one before.

    ``before`` are messages that precede the first turn.
    """

    category: str
    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()


def spec_questions() -> list[Question]:
    """Our own questions, category by category."""
    return [question for category in CATEGORIES for question in read_questions(FOLDER / f"{category}.jsonl")]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file of JSON lines with turns, messages or prompt, and perhaps a category.

    Messages end with what is asked: an answer at their end is left out.

    Raises:
        UserError: no such file, a line that is no JSON object, or one with none of the fields.
    """
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path} holds no line: give JSON lines with {', '.join(FIELDS[:-1])} or {FIELDS[-1]}")
    return [_question(row, f"{path}, line {number}") for number, row in rows]


def choose(questions: Sequence[Question], count: int, categories: Sequence[str] | None = None) -> list[Question]:
    """The first ``count`` questions, the categories taking turns, so that each has as many as the next, or one more.

    ``categories``: those wanted, all where left out. The same call gives the same questions.

    Raises:
        UserError: an unknown category.
    """
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.category, []).append(question)
    for name in categories or ():
        if name not in found:
            raise UserError(f"category {name!r}{nearest(name, found)}: these questions have {', '.join(found)}")
    wanted = [found[name] for name in found if categories is None or name in categories]
    turns = [each[place] for place in range(max(map(len, wanted))) for each in wanted if place < len(each)]
    return turns[:count]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is no JSON ({error}): give one JSON object on each line") from error
        if not isinstance(row, Mapping):
            raise UserError(f"{path}, line {number} is {row!r:.60}: give a JSON object on each line")
        yield number, row


def _question(row: Mapping[str, Any], name: str) -> Question:
    given = str(row.get("category") or UNNAMED)
    category = SPEC_BENCH.get(given, given)
    field = next((field for field in FIELDS if row.get(field)), None)
    if field is None:
        raise UserError(
            f"{name} has {', '.join(row) or 'no field'}, and none of {', '.join(FIELDS)}: name what is asked by one of"
            " them (Spec-Bench's question.jsonl has category and turns)"
        )
    value = row[field]
    if field == "prompt" and isinstance(value, str):
        return Question(category, (value,))
    texts = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(turn, str) for turn in value)
    if texts and field != "messages":
        if not all(turn.strip() for turn in value):
            raise UserError(f"{name} has an empty turn: give what the user says")
        return Question(category, tuple(value))
    if field == "turns":
        raise UserError(f"{name} has turns={value!r:.60}: give a list of texts")
    return _asked(conversation(value, f"{name}: {field}"), category, name)


def _asked(messages: list[Message], category: str, name: str) -> Question:
    """The last thing that the user says, after all that came before."""
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise UserError(f"{name} asks nothing: its messages need one of the user's that is to be answered")
    *before, asked = messages
    return Question(category, (asked["content"],), tuple(before))
