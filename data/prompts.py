"""Prompts cut from held-out text: the same call gives the same ones, evenly spread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from medusa.errors import UserError

# Heads are judged, and trees chosen, by prompts that begin at whole shares of the held-out text. A benchmark's begin
# this part of a share later: the golden ratio's, so that the two sets of places do not meet, whatever their numbers.
APART = 0.382


def cut_prompts(documents: Sequence[Tensor], count: int, length: int, shift: float = 0.0) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids, evenly spread over the documents, none across a seam.

    ``shift``, from 0 to 1, moves all of them by that part of their distance.

    Raises:
        UserError: the documents have fewer places for prompts of that length.
    """
    places = [max(len(ids) - length + 1, 0) for ids in documents]  # a prompt can start at every token of a document
    if sum(places) < count:
        raise UserError(
            f"the held-out text has {sum(places)} places for prompts of {length} tokens and {count} are asked for: ask"
            " for fewer or shorter ones, or hold out more text"
        )
    ends = list(accumulate(places))
    prompts = []
    for index in range(count):
        place = int((index + shift) * ends[-1] / count)
        document = bisect_right(ends, place)
        start = place - ends[document] + places[document]
        prompts.append(documents[document][start : start + length].tolist())
    return prompts
