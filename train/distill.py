"""Self-distillation: the trunk answers prompts with the batched decode loop, and heads learn what it will really say.

Dimensions: T time, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from medusa.decoding import Request, TokenLogprob, decode
from medusa.drafters.base import Drafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.sampling import SamplingParams
from medusa.trunk import Trunk

from .prompts import Prompt, seed_of

GRAM = 4  # tokens of a run that counts as repeated when it comes again


@dataclass(frozen=True)
class DistillConfig:
    """How prompts are answered.

    Args:
        max_new_tokens: an answer that has not ended by then is kept as it is, with finish "length".
        temperature: 0 is greedy; of several, each prompt takes the one that its id chooses.
        top_k: draw from the k most likely tokens; 0 keeps all.
        top_p: draw from the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        seed: of the whole set; a prompt's own seed is made of it and the prompt's id.
        soft_labels: how many of the most likely tokens to store for each token, with their log-probabilities; 0 for
            none.
    """

    max_new_tokens: int = 256
    temperature: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    soft_labels: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: ask for at least 1")
        if self.soft_labels < 0:
            raise UserError(f"soft_labels={self.soft_labels}: give at least 0 (0 stores none)")
        if not self.temperature:
            raise UserError("temperature=[]: give at least one")
        for temperature in self.temperature:
            SamplingParams(temperature, self.top_k, self.top_p)

    def sampling(self, name: str) -> SamplingParams:
        """How the prompt of the id ``name`` is answered, whatever others there are."""
        temperature = self.temperature[seed_of(self.seed, "temperature", name) % len(self.temperature)]
        return SamplingParams(temperature, self.top_k, self.top_p, seed=seed_of(self.seed, "answer", name))


@dataclass(frozen=True)
class Example:
    """A prompt and what the trunk answered, in the very ids that it read and emitted, the EOS included.

    ``finish`` is "eos" or "length"; ``repeated`` the share of the answer's 4-grams that came before in it: an answer
    caught in a loop is near 1. ``top``, if asked for: ``ids`` [T][R] and their ``logprobs`` [T][R] (nats, the trunk's
    own, before temperature and filters), the likeliest first.
    """

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: str
    temperature: float
    seed: int
    repeated: float
    top: dict[str, list[list[Any]]] | None = None

    def line(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {name: value for name, value in vars(self).items() if name != "top" or value is not None}


def distill(
    trunk: Trunk,
    prompts: Sequence[Prompt],
    config: DistillConfig | None = None,
    *,
    drafter: Drafter | None = None,
    rows: int = 32,
    on_step: Callable[[int], object] = lambda tokens: None,
) -> Iterator[Example]:
    """Answer prompts, ``rows`` at once, and yield each answer as it ends.

    In exact arithmetic an answer depends on its prompt, id and ``config`` alone: not on the company, the order or, but
    for drafts drawn at random, the drafter. ``on_step`` is called with the number of tokens of each step.

    Raises:
        UserError: a prompt that can't be decoded.
    """
    config = config or DistillConfig()
    if rows < 1:
        raise UserError(f"rows={rows}: answer at least 1 at once")
    requests = [
        Request(
            prompt.ids,
            config.max_new_tokens,
            trunk.eos_ids,
            config.sampling(prompt.id),
            logprobs=config.soft_labels or None,
        )
        for prompt in prompts
    ]
    answers: dict[int, list[int]] = {}
    labels: dict[int, list[TokenLogprob]] = {}
    for step in decode(trunk, drafter or NullDrafter(), requests, most=rows):
        on_step(sum(map(len, step.tokens.values())))
        for row, tokens in step.tokens.items():
            answers.setdefault(row, []).extend(tokens)
        for row, chances in step.logprobs.items():
            labels.setdefault(row, []).extend(chances)
        for row, finish in step.finished.items():
            yield _example(prompts[row], requests[row].sampling, answers.pop(row), finish, labels.pop(row, None))


def _example(
    prompt: Prompt, sampling: SamplingParams, answer: list[int], finish: str, labels: list[TokenLogprob] | None
) -> Example:
    top: dict[str, list[list[Any]]] | None = None
    if labels is not None:
        logprobs = [[round(value, 4) for value in each.top.values()] for each in labels]
        top = {"ids": [list(each.top) for each in labels], "logprobs": logprobs}
    repeated = round(repeated_share(answer), 4)
    return Example(prompt.id, list(prompt.ids), answer, finish, sampling.temperature, sampling.seed, repeated, top)


def repeated_share(ids: Sequence[int], size: int = GRAM) -> float:
    """The share of runs of ``size`` tokens that came before: 0 where none did, near 1 in a loop."""
    runs = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
