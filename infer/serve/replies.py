"""What a server answers, whole or in chunks, in the shapes of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa.decoding import TokenLogprob

from ..text import REPLACEMENT
from .rows import Ended, Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..tally import Completion

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = b"data: [DONE]\n\n"
Told = Sequence[tuple[int, TokenLogprob]]


def event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class TokenTexts:
    """What single tokens say in the midst of a text: a first space is not stripped, as sentencepiece's decoders do."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token, token])[len(self._decode([token])) :]
        return self._known[token]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Reply:
    """One answer of either kind, under one id.

    Args:
        model: the name it is served by.
        texts: what single tokens say.
        logprobs: whether log-probabilities were asked for.
        drafts: whether chunks tell at which depth their parts were guessed.
    """

    prefix = object = chunk = ""

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool = False, drafts: bool = False) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._texts = texts
        self._logprobs = logprobs
        self._drafts = drafts

    def whole(self, ends: Sequence[Ended], prompts: int) -> dict[str, Any]:
        """The answer in one piece; each of ``prompts`` prompts has its choices side by side."""
        choices = [
            self._choice(end.index, self._message(end.completion.text), end.logprobs)
            | {"finish_reason": REASONS[end.completion.finish_reason], "medusa": figures(end.completion)}
            for end in sorted(ends, key=lambda end: end.index)
        ]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage(ends, prompts)}

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """A chunk; None where a step made nothing certain that was asked for."""
        if not piece.text and not piece.logprobs:
            return None
        choice = self._choice(piece.index, self._delta(piece.text), piece.logprobs)
        if self._drafts:
            parts = [{"text": text, "depth": depth} for text, depth in piece.drafts]
            choice["medusa"] = {"drafts": parts, "steps": piece.steps, "tokens": piece.tokens}
        return self._chunk([choice | {"finish_reason": None}])

    def end(self, end: Ended) -> dict[str, Any]:
        """The last chunk of a choice."""
        choice = self._choice(end.index, self._delta(None), None)
        reason = REASONS[end.completion.finish_reason]
        return self._chunk([choice | {"finish_reason": reason, "medusa": figures(end.completion)}])

    def usage(self, ends: Sequence[Ended], prompts: int) -> dict[str, Any]:
        """The chunk behind all others, for those who ask for it."""
        return self._chunk([]) | {"usage": usage(ends, prompts)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, where there is one before its text."""
        return None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk, "choices": choices}

    def _choice(self, index: int, said: dict[str, Any], told: Told | None) -> dict[str, Any]:
        asked = self._logprobs and told is not None
        return {"index": index, **said, "logprobs": self._table(index, told or []) if asked else None}

    def _message(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def _table(self, index: int, told: Told) -> dict[str, Any]:
        raise NotImplementedError


class ChatReply(Reply):
    """The answer to a chat."""

    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        """Whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _table(self, index: int, told: Told) -> dict[str, Any]:
        content = [
            self._entry(token, each.logprob) | {"top_logprobs": [self._entry(*top) for top in each.top.items()]}
            for token, each in told
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts(token)
        known = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": known}


class TextReply(Reply):
    """The continuation of a prompt."""

    prefix, object, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool = False, drafts: bool = False) -> None:
        super().__init__(model, texts, logprobs=logprobs, drafts=drafts)
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _table(self, index: int, told: Told) -> dict[str, Any]:
        tokens, offsets = [self._texts(token) for token, _ in told], []
        for text in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        tops = [{self._texts(token): finite(value) for token, value in each.top.items()} for _, each in told]
        logprobs = [finite(each.logprob) for _, each in told]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI too says -9999 of what is as good as impossible."""
    return max(logprob, -9999.0)


def figures(completion: Completion) -> dict[str, Any]:
    """What an answer took."""
    names = ("steps", "tokens_per_step", "accepted", "seconds", "seed", "stop", "lossless")
    return {name: getattr(completion, name) for name in names}


def usage(ends: Sequence[Ended], prompts: int) -> dict[str, int]:
    """Tokens read and emitted. Of a prompt's choices, which stand side by side, the first counts it."""
    read = sum(len(end.completion.prompt_ids) for end in ends if end.index % (len(ends) // prompts) == 0)
    emitted = sum(len(end.completion.token_ids) for end in ends)
    return {"prompt_tokens": read, "completion_tokens": emitted, "total_tokens": read + emitted}
