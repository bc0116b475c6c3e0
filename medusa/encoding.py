"""Encoding text so that no character is ever dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from medusa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of ``text``; a character outside the vocabulary is a UserError, never dropped.

    Tokenizers that have an unk token or fall back to bytes encode everything, and are left to it.
    """
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    except Exception:  # the tokenizers library raises the bare class for what it doesn't know
        offset = _first_unknown(tokenizer, text)
        if offset is None:
            raise
        raise _unknown_character(tokenizer, text, offset) from None
    if tokenizer.unk_token_id is not None or _decode(tokenizer, ids) == text:
        return ids
    offset = _first_unknown(tokenizer, text)
    if offset is not None:
        raise _unknown_character(tokenizer, text, offset)
    return ids


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return cast(str, tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _knows(tokenizer: PreTrainedTokenizerBase, char: str) -> bool:
    """Whether ``char`` alone yields a token of its own (a word-start mark such as sentencepiece's doesn't count)."""
    try:
        ids = tokenizer.encode(char, add_special_tokens=False)
    except Exception:  # as in encode
        return False
    return bool(ids) if char.isspace() else bool(_decode(tokenizer, ids).strip())


def _first_unknown(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Offset of the first character that yields no token; asked one by one, since offsets shift after a dropped one."""
    unknown = (char for char in dict.fromkeys(text) if not _knows(tokenizer, char))
    return next((text.index(char) for char in unknown), None)


def _unknown_character(tokenizer: PreTrainedTokenizerBase, text: str, offset: int) -> UserError:
    char = text[offset]
    return UserError(
        f"character {char!r} (U+{ord(char):04X}) at offset {offset} is not among the {len(tokenizer)} symbols of the "
        "tokenizer: remove it, or use a tokenizer that knows it"
    )
