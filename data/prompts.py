"""Prompts cut from held-out text: the same call gives the same ones, evenly spread.

The text has two halves that share no token: by prompts of the first, heads are judged and trees chosen; a benchmark
takes its prompts from the second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from torch import Tensor

from medusa.errors import UserError

Half = Literal["judging", "benchmark"]


def cut_prompts(documents: Sequence[Tensor], count: int, length: int, half: Half) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids from one half of the documents, none across a seam.

    Raises:
        UserError: that half has fewer places for prompts of that length.
    """
    lengths = [len(ids) for ids in documents]
    middle = sum(lengths) // 2
    firsts, places = [], []  # of each document: the first token that a prompt may start at, and how many there are
    for offset, size in zip(accumulate([0, *lengths]), lengths, strict=False):
        cut = min(max(middle - offset, 0), size)
        first, end = (0, cut) if half == "judging" else (cut, size)
        firsts.append(first)
        places.append(max(end - first - length + 1, 0))
    if sum(places) < count:
        raise UserError(
            f"half of the held-out text has {sum(places)} places for prompts of {length} tokens and {count} are asked"
            " for: ask for fewer or shorter ones, or hold out more text"
        )
    ends = list(accumulate(places))
    prompts = []
    for index in range(count):
        place = index * ends[-1] // count
        document = bisect_right(ends, place)
        start = firsts[document] + place - ends[document] + places[document]
        prompts.append(documents[document][start : start + length].tolist())
    return prompts
