"""What is asked of the decode loop, and what it answers: nouns without a model.

Dimensions: T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from medusa.cache import SlotCache
from medusa.errors import UserError
from medusa.laws import Processor
from medusa.processors import Processing
from medusa.sampling import SamplingParams
from medusa.trunk import Trunk

UNPROCESSED = Processing()  # one for all: to check its values takes longer than all else about a request


@dataclass(frozen=True)
class Past:
    """A text whose keys and values are still there: what a conversation keeps from turn to turn.

    ``ids`` are those in ``cache``, which has one row and belongs to whoever decodes with this past.
    """

    ids: Sequence[int]
    cache: SlotCache

    @classmethod
    def of(cls, text: Sequence[int], cache: SlotCache) -> Past:
        """The part of ``text`` that the only row of ``cache`` holds; what it holds beyond is forgotten."""
        size = min(len(text), cache.lengths[0])
        cache.set_lengths([size])
        return cls(list(text[:size]), cache)

    def known(self, prompt: Sequence[int], trunk: Trunk) -> int:
        """How many tokens of ``prompt`` need not be read again; at least one always is, for its state.

        None where the past, or what is common, lies on the other side of a change of the trunk's rotary frequencies.
        """
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, prompt, strict=False))
        size = min(sum(1 for _ in same), len(prompt) - 1)
        sides = {trunk.horizon(each) for each in (len(self.ids), size, len(prompt))}
        return size if len(sides) == 1 else 0


@dataclass(frozen=True)
class Request:
    """One row's prompt, limits and law.

    Args:
        ids: the prompt's token ids, at least one.
        max_new_tokens: the row ends after exactly so many tokens, if nothing ends it before.
        eos: ids that end the row; the one that did is its last token.
        sampling: how its tokens are chosen.
        processing: what the built-in processors do to its logits first.
        processor: any other processor, called along the accepted walk, once per emitted token and in order, with the
            ids [1, T] so far and the scores [1, V]; it returns the scores. It may keep a state.
        watch: called with each emitted token, in order; the row ends after the token for which it returns True.
        logprobs: None, or how many of the most likely tokens to report beside each emitted token's log-probability.
        past: a text already in a cache that the prompt may begin with.
    """

    ids: Sequence[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    processing: Processing = UNPROCESSED
    processor: Processor | None = None
    watch: Callable[[int], bool] | None = None
    logprobs: int | None = None
    past: Past | None = None

    @property
    def processed(self) -> bool:
        """Whether its logits are changed before its law is taken."""
        return self.processor is not None or not self.processing.idle

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest answer asked for."""
        return len(self.ids) + self.max_new_tokens

    def allowance(self, trunk: Trunk, row: int) -> int:
        """How many tokens the row may emit: what was asked, or what the context leaves.

        Raises:
            UserError: naming ``row``: no tokens, an id outside the vocabulary, no room, or nothing asked for.
        """
        size = len(self.ids)
        if not size:
            raise UserError(f"prompt {row} has no tokens: give at least one")
        worst = max(self.ids, key=lambda token: token if token >= 0 else trunk.vocab_size - token)
        if not 0 <= worst < trunk.vocab_size:
            raise UserError(f"prompt {row} has token id {worst}: ids lie in 0..{trunk.vocab_size - 1}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: ask for at least 1")
        horizon = trunk.horizon(size)
        if horizon is None:
            return self.max_new_tokens
        if size >= horizon:
            raise UserError(
                f"prompt {row} has {size} tokens and a text may reach {horizon} with this trunk: shorten it to at most"
                f" {horizon - 1}"
            )
        return min(self.max_new_tokens, horizon - size)


@dataclass(frozen=True)
class TokenLogprob:
    """The trunk's own log-probability (nats) of an emitted token, before any processor, temperature or filter.

    ``top`` maps the ids of the most likely tokens, as many as were asked for, to theirs, the likeliest first.
    """

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Step:
    """What one verifier forward brought: ``tokens[row]`` for the rows it served, ``finished[row]`` why a row ended.

    ``finished`` is ``"eos"``, ``"stop"`` (its ``watch``) or ``"length"``. ``accepted[row]`` counts drafted tokens that
    the trunk agreed to, before any limit cut them. ``nodes`` is the size of the tree, 0 for a prefill. ``logprobs``
    has an entry per token of the rows that asked.
    """

    tokens: dict[int, list[int]]
    finished: dict[int, str]
    accepted: dict[int, int]
    nodes: int
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


class Underway:
    """A row that is being decoded: its request, its text so far and the tokens it may still emit."""

    def __init__(self, request: Request, left: int) -> None:
        self.request = request
        self.left = left
        self.text = list(request.ids)
        self.prompt = len(self.text)

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Emit ``tokens`` up to the row's end; return those emitted, and why the row ended or nothing."""
        request, reason, taken = self.request, "", 0
        for token in tokens:
            self.text.append(token)
            self.left -= 1
            taken += 1
            stopped = request.watch is not None and request.watch(token)
            reason = "eos" if token in request.eos else "stop" if stopped else "" if self.left else "length"
            if reason:
                break
        return list(tokens[:taken]), reason
