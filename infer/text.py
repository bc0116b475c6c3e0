"""From token ids to text while they arrive: whole characters only, at linear cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
TAIL = 4  # tokens that hold any unfinished character: UTF-8 takes at most 4 bytes, a token at least 1
PENDING = 16  # tokens without a whole character among them; more than TAIL of them can't be one character to come


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that ``decode(skip_special_tokens=True)`` leaves out."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added if token.special}


def written_eos(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """What an EOS writes at the end of a text: some tokenizers don't call it a special token."""
    if token in special_ids(tokenizer):
        return ""
    return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """What turns ids into text as they are: without clean-up, which would eat a space that has been given already.

    The tokenizer's own core where the library puts nothing else between: its conversions take ten times as long.
    """
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerFast) and "decode" not in vars(tokenizer):
        kind, usual = type(tokenizer), PreTrainedTokenizerFast
        if kind.decode is usual.decode and kind._decode is usual._decode:
            return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


class Detokeniser:
    """Turns one row's tokens into text piece by piece; the pieces never hold half a character.

    Joined, the pieces are what the tokens add to the text of ``context``, the prompt's ids: a tokenizer that strips
    the first space of a text (sentencepiece) doesn't strip the completion's. Special tokens are left out. However the
    tokens are grouped into pushes, the text is the same.

    A token's text may depend on its neighbours, so it is read off a window: the tokens of the last push, for context,
    and those that follow. The window moves on whenever its text ends in a whole character, so each token is decoded a
    fixed number of times. (After Hugging Face's text-generation-inference.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = ()) -> None:
        self._decode = decoder(tokenizer)
        self._special = special_ids(tokenizer)
        self._context = self._visible(context)
        self._pending: list[int] = []  # tokens after the context whose text is not all given
        self._given = len(self._decode(self._context).rstrip(REPLACEMENT))  # characters of the window already given

    def push(self, tokens: Iterable[int]) -> str:
        """Take in the next tokens; return the text that is certain by now, perhaps none."""
        new = self._visible(tokens)
        if not new:
            return ""
        text = self._decode(self._context + self._pending + new)
        if len(new) > 1 and REPLACEMENT in text:
            # bytes that never become a character: one by one, or what is given would depend on the grouping
            return "".join(self.push([token]) for token in new)
        self._pending += new
        whole = len(text.rstrip(REPLACEMENT))
        piece = text[self._given : whole]
        self._given = max(self._given, whole)
        if whole == len(text):
            self._context, self._pending = self._pending, []
            self._given = len(self._decode(self._context))
        elif len(self._pending) > PENDING:
            piece += self._give_up(text)
        return piece

    def finish(self) -> str:
        """The rest: what the tokens say of a character that was never finished."""
        return self._decode(self._context + self._pending)[self._given :]

    def _give_up(self, text: str) -> str:
        """Give all but the last character of a window that does not end in a whole one, and shorten it.

        Before the last replacement character nothing can change any more: an unfinished character is one of them.
        """
        piece = text[self._given : -1]
        self._context, self._pending = (self._context + self._pending)[-TAIL:], []
        self._given = len(self._decode(self._context)) - 1
        return piece

    def _visible(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if token not in self._special]
