"""Logits processors: what is done to the trunk's logits before laws are made of them, node by node of a tree.

The names, the arithmetic and the order are those of transformers' ``generate``; each node gets what a step-by-step
decode gets whose text is the node's prefix. So the tree stays lossless: a rule changes the law of the trunk, and the
acceptance rules take whatever law that is.

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from medusa import penalties
from medusa.errors import UserError
from medusa.penalties import Biases, Prefixes, numbers
from medusa.processing import Processing

Made = TypeVar("Made", Tensor, Biases)


@dataclass(frozen=True)
class Row:
    """What the processors know of a row beside its text.

    Args:
        processing: what is asked for.
        prompt: tokens of the prompt.
        longest: tokens that prompt and continuation may have together: transformers' ``max_length``.
        eos: ids that end the row.

    Raises:
        UserError: the EOS's score is to grow, but no id is an EOS.
    """

    processing: Processing
    prompt: int
    longest: int
    eos: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        decay = self.processing.exponential_decay_length_penalty
        if decay is not None and not self.eos:
            raise UserError(
                f"exponential_decay_length_penalty={decay} without an EOS token, whose score it raises: name one or"
                " leave it out"
            )


def process(logits_BNV: Tensor, prefixes: Prefixes, rows: Sequence[Row]) -> Tensor:
    """Return the scores that each node's law is made of: [B, N, V], fp32 or better, -inf where a token is forbidden.

    The result is a new tensor, unless no row asks for anything: the logits themselves then. Nodes that are not valid
    get some scores or other.

    Raises:
        UserError: an id outside the vocabulary.
    """
    # sums and products of half-precision logits are far off; transformers too works in fp32
    scores_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    groups: dict[tuple[Processing, frozenset[int]], list[int]] = {}
    for number, row in enumerate(rows):
        if not row.processing.idle:
            row.processing.check(logits_BNV.shape[-1])
            groups.setdefault((row.processing, row.eos), []).append(number)
    if groups and scores_BNV is logits_BNV:
        scores_BNV = logits_BNV.clone(memory_format=torch.contiguous_format)
    for chosen in groups.values():
        if len(chosen) == len(rows):
            _Group(scores_BNV, prefixes, rows).run()
            continue
        some, alike = prefixes.rows(chosen), [rows[number] for number in chosen]
        if chosen[-1] - chosen[0] == len(chosen) - 1:  # neighbours: changed where they are
            _Group(scores_BNV[chosen[0] : chosen[-1] + 1], some, alike).run()
        else:
            index = numbers(chosen, scores_BNV.device)
            part_BNV = scores_BNV.index_select(0, index)
            _Group(part_BNV, some, alike).run()
            scores_BNV.index_copy_(0, index, part_BNV)
    return scores_BNV


class _Group:
    """Rows that ask for the same. What cannot matter at any of their nodes is left out, by lengths the host knows."""

    def __init__(self, scores_BNV: Tensor, prefixes: Prefixes, rows: Sequence[Row]) -> None:
        self.scores_BNV = scores_BNV
        self.prefixes = prefixes
        self.rows = rows
        self.asked = rows[0].processing
        self.eos = rows[0].eos

    def run(self) -> None:
        """Change the scores, in the order of transformers' list; the two penalties it lacks follow its own."""
        asked, scores_BNV, prefixes = self.asked, self.scores_BNV, self.prefixes
        if asked.sequence_bias:
            self._biases("sequence_bias", lambda: dict(asked.sequence_bias)).add(scores_BNV, prefixes)
        if asked.repetition_penalty != 1:
            penalties.penalise_repetition(scores_BNV, prefixes, asked.repetition_penalty)
        if asked.frequency_penalty or asked.presence_penalty:
            prompts = [row.prompt for row in self.rows]
            penalties.penalise_frequency(scores_BNV, prefixes, prompts, asked.frequency_penalty, asked.presence_penalty)
        if asked.no_repeat_ngram_size:
            penalties.forbid_repeated_ngrams(scores_BNV, prefixes, asked.no_repeat_ngram_size)
        if asked.bad_words_ids:
            self._biases("bad_words_ids", self._bad_words).add(scores_BNV, prefixes)
        self._lengths()
        if asked.suppress_tokens:
            penalties.forbid(scores_BNV, self._tokens(asked.suppress_tokens))
        if asked.begin_suppress_tokens:
            late = asked.forced_bos_token_id is not None  # a forced token after a text of one is no beginning
            first_BN = self._at([row.prompt + (late and row.prompt == 1) for row in self.rows])
            if first_BN is not None:
                penalties.forbid(scores_BNV, self._tokens(asked.begin_suppress_tokens), first_BN)

    def _lengths(self) -> None:
        """The rules on how long a text is, and what stands among them."""
        asked, scores_BNV = self.asked, self.scores_BNV
        eos_X = self._tokens(tuple(sorted(self.eos)))
        new = asked.min_new_tokens
        short_BN = self._below([row.prompt + new if new else asked.min_length for row in self.rows])
        if short_BN is not None:
            penalties.forbid(scores_BNV, eos_X, short_BN)
        if asked.forced_bos_token_id is not None:
            one_BN = self._at([1] * len(self.rows))
            if one_BN is not None:
                penalties.force(scores_BNV, self._tokens((asked.forced_bos_token_id,)), one_BN)
        last_BN = self._at([row.longest - 1 for row in self.rows]) if asked.forced_eos_token_id else None
        if last_BN is not None:
            penalties.force(scores_BNV, self._tokens(asked.forced_eos_token_id), last_BN)
        if asked.remove_invalid_values:
            scores_BNV.nan_to_num_(0.0)
        if asked.exponential_decay_length_penalty is not None:
            start, factor = asked.exponential_decay_length_penalty
            starts = [row.prompt + start for row in self.rows]
            if any(length + self.prefixes.deepest > start for length, start in self._with_lengths(starts)):
                penalties.hasten(scores_BNV, eos_X, factor, self.prefixes.length_BN - self._column(starts))

    def _bad_words(self) -> dict[tuple[int, ...], float]:
        ends = {(token,) for token in self.eos}  # forbidding an EOS is min_length's task
        return {words: -math.inf for words in self.asked.bad_words_ids if words not in ends}

    def _below(self, limits: list[int]) -> Tensor | None:
        """Bool [B, N]: the nodes whose prefix is shorter than its row's limit; None where there is none."""
        if all(length >= limit for length, limit in self._with_lengths(limits)):
            return None
        return self.prefixes.length_BN < self._column(limits)

    def _at(self, limits: list[int]) -> Tensor | None:
        """Bool [B, N]: the nodes whose prefix is exactly as long as its row's limit; None where there is none."""
        if not any(0 <= limit - length <= self.prefixes.deepest for length, limit in self._with_lengths(limits)):
            return None
        return self.prefixes.length_BN == self._column(limits)

    def _with_lengths(self, limits: list[int]) -> Iterable[tuple[int, int]]:
        return zip(self.prefixes.lengths, limits, strict=True)

    def _column(self, values: list[int]) -> Tensor:
        return numbers(values, self.scores_BNV.device)[:, None]

    def _tokens(self, ids: tuple[int, ...]) -> Tensor:
        """The ids that are in the vocabulary, int64 [X]."""
        vocabulary, device = self.scores_BNV.shape[-1], self.scores_BNV.device
        known = [token for token in ids if token < vocabulary]
        return self._made((ids, vocabulary), lambda: torch.tensor(known, dtype=torch.long, device=device))

    def _biases(self, name: str, pairs: Callable[[], dict[tuple[int, ...], float]]) -> Biases:
        return self._made((name, self.eos), lambda: Biases.of(pairs(), self.scores_BNV.device))

    def _made(self, key: object, make: Callable[[], Made]) -> Made:
        made: dict[object, Any] = self.asked._made
        key = (key, self.scores_BNV.device)
        if key not in made:
            made[key] = make()
        return made[key]
