"""What a benchmark times: a batch continued by our loop, or by the library's own ``generate`` in its several ways.

All give the same account (:class:`Trial`), so that what is compared is counted alike.

Dimensions: B batch, T time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from medusa.accept import AcceptRule
from medusa.decoding import Decoder, Request
from medusa.drafters.base import Drafter
from medusa.folded import library_attention
from medusa.packed import as_loaded
from medusa.sampling import SamplingParams
from medusa.trunk import Trunk

from ..contradictions import NEUTRAL

REFERENCE = "generate"  # the library's own, with its default cache, as users call it: what others are compared with
# Greedy, and nothing that a model's own generation config could add: our loop is given the same task.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "eos_token_id": None}
LOOKUP = {"prompt_lookup_num_tokens": 10}  # as many as transformers' guide to prompt lookup takes


@dataclass(frozen=True)
class Task:
    """How a batch of prompts is to be continued.

    ``tokens``: the most of each row. ``temperature``: 0 is greedy; no filter is applied to the law. Row r of ours
    draws with ``seed`` + r, the library with ``seed``. ``eos``: ids that end a row; without any, all are equally long.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Trial:
    """A batch continued once.

    Args:
        rows: each row's new tokens, the EOS that ended it included.
        seconds: from the ids on the host to all tokens.
        first_seconds: the share of it until the first tokens: reading the prompts.
        first_tokens: tokens that came with that, of all rows: one each, but where drafts were verified already then.
        accepted: drafted tokens that a forward of the trunk accepted after that, one entry for each row it served.
        pace: after the prompts' reading and after each forward, how many tokens each row had or had ended with, and
            the seconds since the start.
    """

    rows: list[list[int]]
    seconds: float
    first_seconds: float
    first_tokens: int
    accepted: tuple[int, ...]
    pace: tuple[tuple[int, float], ...] = ()

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))


Way = Callable[[Sequence[Sequence[int]], Task], Trial]


@dataclass(frozen=True)
class Contender:
    """A way of decoding with its name. ``lossless``: whether its law is the trunk's own. ``alone``: takes one row.

    ``drawn``: whether it differs from another one only in rows that sample, so that greedy cells go without it.
    """

    name: str
    run: Way
    ours: bool = True
    lossless: bool = True
    alone: bool = False
    drawn: bool = False
    facts: dict[str, Any] = field(default_factory=dict)  # for the report


def our_way(trunk: Trunk, drafter: Drafter, rule: AcceptRule | None = None) -> Way:
    """The decode loop with ``drafter``; without a ``rule``, by the lossless one that fits."""

    def run(prompts: Sequence[Sequence[int]], task: Task) -> Trial:
        synchronise(trunk)
        start = time.perf_counter()
        decoder = Decoder(trunk, drafter, rule)
        laws = [SamplingParams(temperature=task.temperature, seed=task.seed + row) for row in range(len(prompts))]
        requests = [Request(prompt, task.tokens, task.eos, law) for prompt, law in zip(prompts, laws, strict=True)]
        first = decoder.admit(requests).tokens  # brings its tokens to the host: no need to synchronise
        prefilled = time.perf_counter()
        rows = [list(first[row]) for row in range(len(prompts))]
        accepted: list[int] = []
        pace = [(_least(rows, decoder.live), prefilled - start)]
        while decoder.live:
            step = decoder.step()
            for row, tokens in step.tokens.items():
                rows[row] += tokens
                accepted.append(step.accepted[row])
            pace.append((_least(rows, decoder.live), time.perf_counter() - start))
        synchronise(trunk)
        end = time.perf_counter()
        return Trial(rows, end - start, prefilled - start, len(rows), tuple(accepted), tuple(pace))

    return run


def _least(rows: Sequence[Sequence[int]], live: Collection[int]) -> int:
    """Tokens that every row has which is to go on; of the longest where none is."""
    return min(len(rows[row]) for row in live) if live else max(map(len, rows))


def library_way(trunk: Trunk, **how: Any) -> Way:
    """``generate`` of transformers with ``how`` it is asked to decode, such as ``cache_implementation="static"``.

    Prompts of several lengths are padded on the left. The model runs as the library loads it, with its attention and
    without our packed weights. A stopping criterion notes when each forward's tokens came.
    """
    pad = getattr(trunk.tokenizer, "pad_token_id", None) or 0  # masked, and after its EOS a row is not looked at
    drafts = [value for value in how.values() if isinstance(value, torch.nn.Module)]

    def run(prompts: Sequence[Sequence[int]], task: Task) -> Trial:
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        call = GREEDY | _law(trunk, task) | {"eos_token_id": sorted(task.eos) or None, "pad_token_id": pad} | how
        models = trunk.model, *drafts
        with torch.random.fork_rng(), _errors_only(), as_loaded(*models), library_attention(*models):
            torch.manual_seed(task.seed)
            synchronise(trunk)
            start = time.perf_counter()
            watch = _Watch(trunk, len(prompts))
            out_BT = trunk.model.generate(
                input_ids=ids_BT.to(trunk.device),
                attention_mask=mask_BT.to(trunk.device),
                max_new_tokens=task.tokens,
                stopping_criteria=[watch],
                **call,
            )
            new = out_BT[:, longest:].tolist()
            synchronise(trunk)
            end = time.perf_counter()
        rows = [_ended(row, task.eos) for row in new]
        return _trial(rows, watch, longest, start, end)

    return run


def assistant(draft: Trunk) -> Any:
    """The model of a draft as ``generate`` takes it, with a generation config of its own, which that changes."""
    model = copy.copy(draft.model)
    model.generation_config = copy.deepcopy(model.generation_config)
    return model


def synchronise(trunk: Trunk) -> None:
    """Wait for the device."""
    if trunk.device.type == "cuda":
        torch.cuda.synchronize(trunk.device)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Keep out of the way what ``generate`` logs about how it calls itself, as assisted generation does."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class _Watch:
    """Notes how long the text is after each forward of ``generate``, and when it was so."""

    def __init__(self, trunk: Trunk, rows: int) -> None:
        self.trunk = trunk
        self.lengths: list[int] = []
        self.times: list[float] = []
        self._on_B = torch.zeros(rows, dtype=torch.bool, device=trunk.device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self.lengths:
            synchronise(self.trunk)
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return self._on_B


def _law(trunk: Trunk, task: Task) -> dict[str, Any]:
    """What makes ``generate`` draw at the temperature and from the whole law, whatever the model's config says."""
    if task.temperature == 0:
        return {}
    config = trunk.model.generation_config
    named = {name: value for name, value in NEUTRAL.items() if getattr(config, name, None) is not None}
    return named | {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}


def _ended(row: list[int], eos: frozenset[int]) -> list[int]:
    """The row up to its EOS, which it includes: what follows only pads the batch."""
    before = list(takewhile(lambda token: token not in eos, row))
    return row[: len(before) + 1]


def _trial(rows: list[list[int]], watch: _Watch, longest: int, start: float, end: float) -> Trial:
    """The account of what ``generate`` did: each forward counts for the rows that had not ended."""
    totals = [length - longest for length in watch.lengths]  # new tokens after each forward
    accepted = []
    for row in rows:
        for before, total in pairwise(totals):
            if before < len(row):
                accepted.append(min(total, len(row)) - before - 1)
    first = sum(min(totals[0], len(row)) for row in rows)
    pace = tuple((total, at - start) for total, at in zip(totals, watch.times, strict=True))
    return Trial(rows, end - start, watch.times[0] - start, first, tuple(accepted), pace)
