"""Chat templates: from messages to token ids, and which of the tokens an assistant writes.

What an assistant writes is what follows the prompt that decoding would give it: the answer, what the template puts
behind it, and the token that ends the turn. No template's words are known here; all is found by rendering, and checked
in token ids: the prompt's own encoding must be the beginning of the whole one's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.encoding import encode
from medusa.errors import UserError, reason

from .records import Message
from .sources import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "AnswerEndsHere"  # letters alone: no filter of a template changes them
SEEN = 24  # characters shown on each side of a fault


class TemplateFault(UserError):
    """A conversation that the template does not write so that its answers can be told apart."""


@dataclass
class Rendered:
    """A conversation as token ids.

    ``written``: whether the assistant writes the token. ``prompts``: how many tokens stand before each answer.
    ``open_ended``: answers that no token ends.
    """

    ids: list[int]
    written: list[bool]
    prompts: list[int]
    open_ended: int = 0


@dataclass(frozen=True)
class _Turn:
    """A conversation up to an answer, as a text: the messages, what decoding is given, and where the answer ends.

    ``start`` and ``end`` are offsets in ``text``; ``ended``: the answer has a token that ends it.
    """

    messages: Sequence[Message]
    text: str
    start: int
    end: int
    ended: bool


class ChatTemplate:
    """The chat template of a tokenizer, or one from a file; ``options`` are the template's own variables.

    Raises:
        UserError: there is none, or the file can't be read.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, file: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        if file is None and not tokenizer.chat_template:
            raise UserError(
                "the data are messages and the tokenizer has no chat template: name a file with one by data.template,"
                " or take a trunk that was trained to chat"
            )
        if file is not None and not Path(file).expanduser().is_file():
            raise UserError(
                f"data.template={file!r} is no file: give one that holds a chat template in Jinja, or leave it out for"
                " the tokenizer's own"
            )
        self.tokenizer, self.options = tokenizer, dict(options or {})
        self.name = f"the chat template {file}" if file else "the tokenizer's chat template"
        self.given = read_text(Path(file).expanduser()) if file else None

    @cached_property
    def tagged(self) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return bool(TAGS.search(self.tokenizer.get_chat_template(self.given))) and self.tokenizer.is_fast

    def ids(self, messages: Sequence[Message], opening: bool = False) -> list[int]:
        """Ids of a conversation; ``opening``: and of what opens an answer. The template writes the BOS, if any."""
        return encode(self.tokenizer, self.render(messages, opening))

    def answers(self, messages: Sequence[Message], first: int = 0) -> list[Rendered]:
        """The conversation with its answers marked, those from message ``first`` on.

        Where a template writes an answer otherwise once the conversation goes on (leaves out its thoughts, say), the
        answer is learnt as it was written: one more conversation ends with it.

        Raises:
            UserError: there is no answer, the template refuses the messages, or does not show where an answer stands.
        """
        turns = [
            self._turn(messages[: place + 1])
            for place, message in enumerate(messages)
            if place >= max(first, 1) and message["role"] == "assistant"  # the first message answers nothing
        ]
        if not turns:
            raise UserError("no message is the assistant's, so there is nothing to learn: add an answer")
        found: list[Rendered] = []
        while turns:
            rendered, turns = self._marked(turns)
            found.append(rendered)
        return found[::-1]

    def _marked(self, turns: list[_Turn]) -> tuple[Rendered, list[_Turn]]:
        """The last turn's conversation with all answers marked that it writes as they were, and the other turns."""
        last = turns[-1]
        ids = encode(self.tokenizer, last.text)
        kept = [turn for turn in turns if turn is last or self._stays(turn, last, ids)]
        tagged = self._tags(last.messages, ids) if self.tagged else [True] * len(ids)
        rendered = Rendered(ids, [False] * len(ids), [])
        behind = len(last.text), len(ids)  # where what follows the answer ends, in characters and in tokens
        for turn in reversed(kept):
            start = self._count(ids, last.text, turn.start)
            stop = self._stop(ids, last.text, turn, *behind)
            written = tagged[start:stop]
            if True not in written:
                raise TemplateFault(f"{self.name} marks nothing of the answer {turn.messages[-1]['content']!r:.60}")
            if turn.ended:  # what ends the turn, where the tags leave it out
                after = written[::-1].index(True)
                written[len(written) - after :] = [True] * after
            rendered.written[start:stop] = written
            rendered.prompts.insert(0, start)
            rendered.open_ended += not turn.ended
            behind = turn.start, start
        return rendered, [turn for turn in turns if turn not in kept]

    def _stays(self, turn: _Turn, last: _Turn, ids: list[int]) -> bool:
        """Whether a later conversation holds the answer as it was."""
        same = last.text.startswith(turn.text[: turn.end])
        # An end that is no token may merge with what follows.
        return same and (turn.ended or self._cut(ids, last.text, turn.end) is not None)

    def _turn(self, messages: Sequence[Message]) -> _Turn:
        """The conversation up to an answer, which is its last message."""
        text = self.render(messages)
        prompt = self._prompt(messages, text)
        end, ended = self._end(messages, text)
        return _Turn(messages, text, len(prompt), end, ended)

    def render(self, messages: Sequence[Message], opening: bool = False) -> str:
        """The text of a conversation; ``opening``: and of what opens an answer."""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=opening))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.given, **self.options, **options
            )
        except Exception as error:  # a template is code that came with the model: it raises anything
            roles = ", ".join(message["role"] for message in messages) or "nobody"
            raise TemplateFault(
                f"{self.name} refuses messages of {roles} ({reason(error)}): give them as this model takes them"
            ) from error

    def _prompt(self, messages: Sequence[Message], whole: str) -> str:
        """What decoding is given to answer: the messages before, and what opens the answer."""
        prompt = self.render(messages[:-1], opening=True)
        if not whole.startswith(prompt) and self.tagged and whole.startswith(before := self._before(messages)):
            return before  # the tags alone say what is written
        if not whole.startswith(prompt):
            place = next(place for place, char in enumerate(prompt) if place >= len(whole) or whole[place] != char)
            raise TemplateFault(
                f"{self.name} does not begin an answered conversation with the prompt that asks for the answer: after"
                f" {whole[max(0, place - SEEN) : place]!r} the prompt has {prompt[place : place + SEEN]!r}, the"
                f" conversation {whole[place : place + SEEN]!r} (data.template_options may change that, and what"
                " `medusa distill` writes needs no template)"
            )
        if prompt != self.render(messages[:-1]):
            return prompt
        # Nothing opens the answer: what stands before it, the assistant's name say, is no part of it either.
        before = self._before(messages)
        named = whole.startswith(before) and before[len(prompt) :].strip()
        return before if named else prompt

    def _before(self, messages: Sequence[Message]) -> str:
        """What stands before the content of the last message."""
        marked = messages[-1] | {"content": MARK + messages[-1]["content"]}
        return self.render([*messages[:-1], marked]).partition(MARK)[0]

    def _end(self, messages: Sequence[Message], whole: str) -> tuple[int, bool]:
        """Where the last message ends, its end-of-turn token included, and whether it has one."""
        content = messages[-1]["content"]
        marked = self.render([*messages[:-1], messages[-1] | {"content": content + MARK}])
        _, mark, after = marked.rpartition(MARK)
        if not mark or not whole.endswith(after):
            raise TemplateFault(f"{self.name} does not write the answer {content!r:.60} as it stands")
        end = len(whole) - len(after)
        if messages[-1].get("tool_calls"):  # they stand between the content and the end
            calls = [found.end() for found in self._ends.finditer(whole, end)]
            return (calls[-1], True) if calls else (len(whole.rstrip()), False)
        found = self._ends.match(whole, end)
        return (found.end(), True) if found else (end, False)

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """A token that ends a turn: any that is not made of text; after calls of tools it is the last of them."""
        tokens = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        names = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, names))})") if names else re.compile(r"(?!)")

    def _tags(self, messages: Sequence[Message], ids: list[int]) -> list[bool]:
        """Which tokens the template's own tags mark."""
        found = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert found["input_ids"] == ids
        return [bool(marked) for marked in found["assistant_masks"]]

    def _stop(self, ids: list[int], text: str, turn: _Turn, end: int, count: int) -> int:
        """How many tokens there are up to the end of ``turn``; the first ``count`` take the first ``end`` characters.

        Nothing reaches across a token that ends a turn, so only what follows it is encoded, which is short.
        """
        rest = encode(self.tokenizer, text[turn.end : end])
        stop = count - len(rest)
        if turn.ended and ids[stop:count] == rest:
            return stop
        return self._count(ids, text, turn.end)

    def _count(self, ids: list[int], text: str, length: int) -> int:
        """How many tokens the first ``length`` characters take, if they are the same ones when they stand alone."""
        count = self._cut(ids, text, length)
        if count is None:
            raise TemplateFault(
                f"{self.name} lets tokens reach across the end of {text[max(0, length - SEEN) : length]!r} into"
                f" {text[length : length + SEEN]!r}, so decoding would see other ones than training"
            )
        return count

    def _cut(self, ids: list[int], text: str, length: int) -> int | None:
        part = encode(self.tokenizer, text[:length])
        return len(part) if ids[: len(part)] == part else None
