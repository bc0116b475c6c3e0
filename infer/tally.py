"""One row's account while it is decoded: what it says, when it ends, and what that took.

Dimensions: T time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.decoding import Request, Step, TokenLogprob

from .transcript import Transcript

Criterion = Callable[[Tensor, None], object]  # transformers' protocol: (input_ids [1, T], scores) -> done


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    ``text`` is what the new tokens add to the prompt's text, special tokens left out (empty without a tokenizer).
    ``token_ids`` include the EOS that ended them. ``steps`` counts the trunk's forwards after the prefill.
    ``finish_reason`` is ``"eos"``, ``"stop"`` (a stop string, which counts before an EOS that completes it, or a
    stopping criterion) or ``"length"`` (a limit asked for, of tokens or of time, or the trunk's context).
    ``accepted[n]`` counts the steps at which n drafted tokens were accepted, before anything cut them. ``seconds`` run
    from the prefill to the row's end. ``seed`` is what the row was sampled with, given or drawn; None for a greedy
    row. ``logprobs``, if asked for, are the tokens' log-probabilities (nats) by the trunk's own law, before any
    processor or temperature, and ``top_logprobs`` the likeliest ids' at each of them. ``stop`` is the stop string that
    ended the text. ``lossless`` says whether drafts were accepted by a rule that leaves the law as it is.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    steps: int
    finish_reason: str
    accepted: list[int]
    seconds: float
    seed: int | None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    stop: str | None = None
    lossless: bool = True

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by steps / steps; the prefill and its token don't count. 0 if there was no step.

        Tokens that were decoded and left out, with a stop string that is not to be included, don't count either.
        """
        return max(len(self.token_ids) - 1, 0) / self.steps if self.steps else 0.0


class Watch:
    """Sees each token of one row as it is emitted, and says when the row ends otherwise than by EOS or length.

    Args:
        transcript: looks for stop strings.
        prompt: the ids that precede.
        criteria: transformers' stopping criteria; each is called once per token, with all ids so far.
        deadline: when time is up, by ``time.perf_counter``.
        device: where the criteria's ids lie.
    """

    def __init__(
        self,
        transcript: Transcript,
        prompt: Sequence[int],
        criteria: Sequence[Criterion],
        deadline: float | None,
        device: torch.device,
    ) -> None:
        self.stopped = False  # by a stop string or a criterion
        self._transcript = transcript
        self._criteria = criteria
        self._deadline = deadline
        self._size = len(prompt)
        if criteria:
            self._ids_1T = torch.tensor([list(prompt)], dtype=torch.long, device=device)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to watch for."""
        return not self._criteria and self._deadline is None and not self._transcript.looks

    def __call__(self, token: int) -> bool:
        if self._transcript.looks:
            self._transcript.push([token])
            self.stopped = self._transcript.stop is not None
        if self._criteria:
            ids_1T = self._with(token)
            for criterion in self._criteria:  # all of them: they may count their calls
                self.stopped |= bool(torch.as_tensor(criterion(ids_1T, None)).any())
        return self.stopped or (self._deadline is not None and time.perf_counter() > self._deadline)

    def _with(self, token: int) -> Tensor:
        """All ids so far [1, T], a view: what is behind them is unwritten, and what was shown stays."""
        if self._size == self._ids_1T.shape[1]:
            self._ids_1T = torch.cat([self._ids_1T, torch.empty_like(self._ids_1T)], 1)
        self._ids_1T[0, self._size] = token
        self._size += 1
        return self._ids_1T[:, : self._size]


class Tally:
    """One row's account while it is decoded.

    Args:
        request: what is decoded; its ``watch`` is ``watch``, unless that is idle.
        transcript: what it says.
        watch: what may end it.
        lossless: whether the rule that accepts its drafts is.
    """

    def __init__(self, request: Request, transcript: Transcript, watch: Watch, lossless: bool = True) -> None:
        self.request = request
        self.transcript = transcript
        self.finish_reason = ""
        self.logprobs: list[TokenLogprob] = []  # of all tokens so far, if they were asked for
        self._watch = watch
        self._lossless = lossless
        self._accepted: list[int] = []  # per step
        self._seconds = 0.0

    def add(self, row: int, step: Step, seconds: float) -> None:
        """Count a step that served ``row``, this row's number in the batch; ``seconds`` since decoding began."""
        if not self.transcript.looks:  # else the watch was shown them
            self.transcript.push(step.tokens[row])
        self.logprobs += step.logprobs.get(row, [])
        if step.nodes:
            self._accepted.append(step.accepted[row])
        self._seconds = seconds
        ended = step.finished.get(row, "")
        if not ended:
            return
        self.transcript.end()
        if self.transcript.stop is not None or (ended == "stop" and self._watch.stopped):
            self.finish_reason = "stop"
        else:
            self.finish_reason = "length" if ended == "stop" else ended  # time is a limit too

    def completion(self) -> Completion:
        """The account closed."""
        self.transcript.take()
        law, ids, logprobs = self.request.sampling, self.transcript.ids, self.logprobs
        asked = self.request.logprobs
        return Completion(
            text="".join(self.transcript.pieces),
            token_ids=ids,
            prompt_ids=list(self.request.ids),
            steps=len(self._accepted),
            finish_reason=self.finish_reason,
            accepted=[self._accepted.count(length) for length in range(max(self._accepted, default=-1) + 1)],
            seconds=self._seconds,
            seed=law.seed if law.temperature > 0 else None,
            logprobs=None if asked is None else [each.logprob for each in logprobs[: len(ids)]],
            top_logprobs=[each.top for each in logprobs[: len(ids)]] if asked else None,
            stop=self.transcript.stop,
            lossless=self._lossless,
        )
