"""What can be asked of the logits processors: names, ranges, and the forms in which values come.

Dimensions: V vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import SupportsIndex

from medusa.errors import UserError


@dataclass(frozen=True)
class Processing:
    """What is done to one row's logits before its law is taken; the names are transformers' own.

    Args:
        repetition_penalty: tokens that occurred, in the prompt too: a positive score is divided by it, a negative
            one multiplied; 1 leaves them.
        frequency_penalty: subtracted once per occurrence among the new tokens (OpenAI's and vLLM's).
        presence_penalty: subtracted once from each token that occurred among the new tokens.
        no_repeat_ngram_size: no run of so many tokens comes twice; 0 allows it.
        bad_words_ids: sequences of ids that never come; one that is an EOS id alone is passed over.
        sequence_bias: sequences of ids and what is added to the score of the last when the others precede it.
        suppress_tokens: ids that never come.
        begin_suppress_tokens: ids that do not come first.
        min_length: no EOS before so many tokens, the prompt's included; ``min_new_tokens`` takes precedence.
        min_new_tokens: no EOS before so many new tokens.
        forced_bos_token_id: the token that follows a text of one token.
        forced_eos_token_id: one of these comes last when the limit is reached.
        exponential_decay_length_penalty: after so many new tokens, the EOS's score grows by this factor per token.
        remove_invalid_values: NaN becomes 0, an infinity the dtype's largest or smallest number.

    Lists are taken for tuples, one id for ``forced_eos_token_id`` and a mapping for ``sequence_bias``.

    Raises:
        UserError: a value outside its range or of another form.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False

    def __post_init__(self) -> None:
        for name, (read, rule) in _RULES.items():
            value = getattr(self, name)
            read_value = read(value)
            unset = value is None and getattr(Processing, name) is None
            if read_value is None and not unset:
                raise UserError(f"{name}={value!r}: it must be {rule}")
            object.__setattr__(self, name, read_value)
        never = set(self.suppress_tokens)
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = set(self._scored[name])
            if forced and forced <= never:
                raise UserError(
                    f"{name}={getattr(self, name)}: suppress_tokens forbids what it forces; take it out of one of them"
                )

    @cached_property
    def idle(self) -> bool:
        """Whether nothing is asked for."""
        return all(getattr(self, each.name) == each.default for each in fields(self))

    def check(self, vocabulary: int) -> None:
        """Hold the ids against the vocabulary.

        Raises:
            UserError: an id that must be scored lies outside. (Suppressing one that cannot come changes nothing.)
        """
        if self._largest >= vocabulary:
            for name, ids in self._scored.items():
                if max(ids, default=-1) >= vocabulary:
                    raise UserError(f"{name} names token {max(ids)}: the model's ids lie in 0..{vocabulary - 1}")

    @cached_property
    def _scored(self) -> dict[str, list[int]]:
        return {
            "sequence_bias": [token for words, _ in self.sequence_bias for token in words],
            "bad_words_ids": [token for words in self.bad_words_ids for token in words],
            "forced_bos_token_id": [] if self.forced_bos_token_id is None else [self.forced_bos_token_id],
            "forced_eos_token_id": list(self.forced_eos_token_id),
        }

    @cached_property
    def _largest(self) -> int:
        return max((token for ids in self._scored.values() for token in ids), default=-1)

    @cached_property
    def _made(self) -> dict[object, object]:
        """Tensors made of the lists above, each once per device: see :class:`_Group`."""
        return {}


# How each option is read, None for what cannot be, and what it must be.


def _whole(value: object) -> int | None:
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        return None
    try:
        number = operator.index(value)  # numpy's whole numbers too
    except TypeError:  # an array has the method, but may hold more than one
        return None
    return number if number >= 0 else None


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _positive(value: object) -> float | None:
    number = _finite(value)
    return number if number is not None and number > 0 else None


def _ids(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, Iterable):
        return None
    read = [_whole(token) for token in value]
    known = tuple(token for token in read if token is not None)
    return known if len(known) == len(read) else None


def _one_or_more(value: object) -> tuple[int, ...] | None:
    token = _whole(value)
    return _ids(value) if token is None else (token,)


def _words(value: object) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(value, Iterable):
        return None
    read = [_ids(each) for each in value]
    known = tuple(words for words in read if words)
    return known if len(known) == len(read) else None


def _biased(value: object) -> tuple[tuple[tuple[int, ...], float], ...] | None:
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable):
        return None
    read: dict[tuple[int, ...], float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            return None
        words, bias = _ids(pair[0]), pair[1]
        if not words or (bias != -math.inf and _finite(bias) is None):
            return None
        read[words] = float(bias)
    return tuple(read.items())


def _decay(value: object) -> tuple[int, float] | None:
    if not isinstance(value, Sequence) or len(value) != 2:
        return None
    start, factor = _whole(value[0]), _positive(value[1])
    return None if start is None or factor is None else (start, factor)


_RULES: dict[str, tuple[Callable[[object], object], str]] = {
    "repetition_penalty": (_positive, "above 0 (1 leaves the scores)"),
    "frequency_penalty": (_finite, "a finite number (0 leaves the scores)"),
    "presence_penalty": (_finite, "a finite number (0 leaves the scores)"),
    "no_repeat_ngram_size": (_whole, "a whole number from 0 (0 allows repeats)"),
    "bad_words_ids": (_words, "sequences of token ids, none empty, such as ((5, 6), (7,))"),
    "sequence_bias": (_biased, "pairs of token ids and a number below infinity, such as (((5, 6), -1.5),)"),
    "suppress_tokens": (_ids, "token ids such as (5, 6)"),
    "begin_suppress_tokens": (_ids, "token ids such as (5, 6)"),
    "min_length": (_whole, "a whole number from 0 (0 lets a text end at once)"),
    "min_new_tokens": (_whole, "a whole number from 0 (0 lets a text end at once)"),
    "forced_bos_token_id": (_whole, "a token id, or None"),
    "forced_eos_token_id": (_one_or_more, "token ids such as (2,)"),
    "exponential_decay_length_penalty": (_decay, "new tokens from 0 and a factor above 0, such as (100, 1.01)"),
    "remove_invalid_values": (lambda value: value if isinstance(value, bool) else None, "True or False"),
}
