"""Prompts from held-out text or conversations: the same call gives the same ones, evenly spread.

Both have two halves that share no token: by prompts of the first, heads are judged and trees chosen; a benchmark takes
its prompts from the second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from medusa.errors import UserError

from .corpus import DataConfig, tokenise
from .examples import Example, make_examples
from .records import format_of

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

Half = Literal["judging", "benchmark"]
Documents = Sequence[Tensor] | Sequence[Example]


def heldout_documents(
    heldout: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig, first: int = 0
) -> Documents:
    """What ``heldout_prompts`` takes prompts from: token ids of texts, or examples of anything else.

    ``first`` is the number of the first row, for errors. Raises as ``tokenise`` and ``make_examples``.
    """
    if format_of(heldout) == "text":
        return tokenise(heldout, tokenizer)
    return make_examples(heldout, tokenizer, config, first).items


def heldout_prompts(documents: Documents, count: int, length: int, half: Half) -> list[list[int]]:
    """``count`` prompts of one half: cut from texts, or the whole of what decoding is given before an answer.

    ``length``: the tokens of each, of conversations at most so many. Raises as ``cut_prompts`` and ``chat_prompts``.
    """
    examples = [each for each in documents if isinstance(each, Example)]
    if examples:
        return chat_prompts(examples, count, length, half)
    return cut_prompts([each for each in documents if isinstance(each, Tensor)], count, length, half)


def chat_prompts(examples: Sequence[Example], count: int, most: int, half: Half) -> list[list[int]]:
    """``count`` different prompts of at most ``most`` tokens from the rows of one half, evenly spread.

    A prompt is never cut: it is what stands before an answer, the header of the assistant's turn included.

    Raises:
        UserError: that half has fewer of them.
    """
    rows = sorted({example.row for example in examples})
    middle = rows[len(rows) // 2]
    mine = [example for example in examples if (example.row < middle) == (half == "judging")]
    whole = {tuple(example.ids[:end].tolist()): None for example in mine for end in example.prompts if end}
    short = [list(prompt) for prompt in whole if len(prompt) <= most]
    if len(short) < count:
        raise UserError(
            f"half of the held-out conversations have {len(short)} different prompts of at most {most} tokens (and"
            f" {len(whole) - len(short)} longer ones) and {count} are asked for: ask for fewer or allow longer ones, or"
            " hold out more"
        )
    return [short[index * len(short) // count] for index in range(count)]


def cut_prompts(documents: Sequence[Tensor], count: int, length: int, half: Half) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids from one half of the documents, none across a seam.

    Raises:
        UserError: that half has fewer places for prompts of that length.
    """
    lengths = [len(ids) for ids in documents]
    middle = sum(lengths) // 2
    parts = []
    for offset, size in zip(accumulate([0, *lengths]), lengths, strict=False):
        cut = min(max(middle - offset, 0), size)
        parts.append((0, cut) if half == "judging" else (cut, size))
    return _spread(documents, parts, count, length, "half of the held-out text", "hold out more text")


def beginnings(documents: Sequence[Tensor], count: int, length: int) -> list[list[int]]:
    """``count`` beginnings of ``length`` token ids from all of the documents, evenly spread, none across a seam.

    Raises:
        UserError: there are fewer places for them.
    """
    parts = [(0, len(ids)) for ids in documents]
    return _spread(documents, parts, count, length, "the training text", "give more text")


def _spread(
    documents: Sequence[Tensor], parts: Sequence[tuple[int, int]], count: int, length: int, what: str, way: str
) -> list[list[int]]:
    """Prompts, evenly spread, from ``parts``: of each document its first token to take, and that behind its last."""
    places = [max(end - first - length + 1, 0) for first, end in parts]
    if sum(places) < count:
        raise UserError(
            f"{what} has {sum(places)} places for prompts of {length} tokens and {count} are asked for: ask for fewer"
            f" or shorter ones, or {way}"
        )
    ends = list(accumulate(places))
    prompts = []
    for index in range(count):
        place = index * ends[-1] // count
        document = bisect_right(ends, place)
        start = parts[document][0] + place - ends[document] + places[document]
        prompts.append(documents[document][start : start + length].tolist())
    return prompts
