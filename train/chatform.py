"""What a chat template puts around a user's turn, found by rendering: no template's words are known here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from medusa.data.chat import ChatTemplate
from medusa.data.records import Message
from medusa.encoding import encode
from medusa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Said in place of the user and the assistant. Letters alone, which every tokenizer knows; the first ones differ, so
# that no token of what stands before belongs to one of them and passes for all.
PROBES = ("Apples and pears", "what about it", "Is that so")
REPLY = "Certainly they are"


@dataclass(frozen=True)
class UserTurn:
    """The ids before what a user says, and what ends it: a text, and its id where it is one token of its own."""

    header: list[int]
    end: str
    end_id: int | None


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether there is a chat template."""
    return tokenizer is not None and bool(tokenizer.chat_template)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of messages and of what opens the answer. The template writes the BOS, if there is one.

    Raises:
        UserError: the template refuses the messages or writes two BOS, or the tokenizer lacks a character.
    """
    ids = ChatTemplate(tokenizer).ids(messages, opening=True)
    if not ids:
        raise UserError("the chat template writes nothing for a prompt: give a trunk with another one")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        raise UserError(
            f"the chat template writes the BOS {tokenizer.bos_token!r} twice: the trunk was not trained so, mend the"
            " template"
        )
    return ids


def user_turn(tokenizer: PreTrainedTokenizerBase, system: str | None = None, bare: bool = False) -> UserTurn:
    """The header and end of a first user turn.

    Args:
        tokenizer: brings the template.
        system: a system turn before it; None leaves that to the template, which may write one of its own.
        bare: without any system turn, as before a later turn of the user's.

    Raises:
        UserError: the template does not show where a turn begins or ends.
    """
    template = ChatTemplate(tokenizer)
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    rendered = [template.render([*start, _user(probe)], opening=True) for probe in PROBES]
    before, after = _around(rendered[0], PROBES[0])
    if bare:
        header = _bare_header(template, before)
        rendered = [header + probe + after for probe in PROBES]
    header_ids = _shared([encode(tokenizer, text) for text in rendered])
    if not header_ids:
        raise UserError("the chat template puts nothing before what a user says: give prompts by --prompts")
    _, closing = _around(template.render([*start, _user(PROBES[0])]), PROBES[0])
    return UserTurn(header_ids, *_end(tokenizer, closing.strip() or after.strip()))


def marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that are one token each and no part of what a user says: the special and the added ones, longest first."""
    return sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} - {""}, key=len, reverse=True)


def _bare_header(template: ChatTemplate, before: str) -> str:
    """What stands between the end of an assistant's turn and the user's next words, with the BOS that opens a text."""
    turns = [_user(PROBES[0]), {"role": "assistant", "content": REPLY}]
    _, end = _around(template.render(turns), REPLY)
    _, rest = _around(template.render([*turns, _user(PROBES[1])]), REPLY)
    between, _ = _around(rest, PROBES[1])
    # trailing white space may be of the text's end, not of the turn's
    end = end if between.startswith(end) else end.rstrip()
    if not between.startswith(end) or not between[len(end) :].strip():
        raise UserError(
            "the chat template does not show where a later turn of the user's begins: leave out --own.bare, or give"
            " prompts by --prompts"
        )
    header, bos = between[len(end) :], template.tokenizer.bos_token
    opens = bool(bos) and before.startswith(bos) and not header.startswith(bos)
    return (bos if opens else "") + header


def _end(tokenizer: PreTrainedTokenizerBase, closing: str) -> tuple[str, int | None]:
    if not closing:
        raise UserError("the chat template does not mark the end of a user's turn: give prompts by --prompts")
    for mark in marks(tokenizer):
        if closing.startswith(mark):
            return mark, tokenizer.convert_tokens_to_ids(mark)
    return closing, None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _around(text: str, probe: str) -> tuple[str, str]:
    """What stands before and after ``probe``."""
    before, found, after = text.partition(probe)
    if not found:
        raise UserError(
            "the chat template does not repeat what a user says word for word, so its turns can't be told apart: give"
            " prompts by --prompts"
        )
    return before, after


def _shared(rows: Sequence[list[int]]) -> list[int]:
    """The ids that all rows begin with: a token that reaches into what is said is none of them."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return [column[0] for column in same]
