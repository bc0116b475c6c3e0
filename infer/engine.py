"""The engine: a trunk and a drafter behind ``generate`` and ``stream``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch

from medusa.checkpoint import MANIFEST, load_heads, load_tree
from medusa.decoding import Request, Step, decode
from medusa.dialects import is_published, load_published, published_tree
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.encoding import encode
from medusa.errors import UserError, nearest
from medusa.trunk import Trunk

from .options import Options
from .source import find, load_trunk
from .text import Detokeniser

DRAFTERS = ("auto", "none")


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    ``text`` is what the new tokens add to the prompt's text, special tokens left out (empty without a tokenizer).
    ``token_ids`` include the EOS that ended them. ``steps`` counts the trunk's forwards after the prefill.
    ``finish_reason`` is ``"eos"`` or ``"length"`` (the limit asked for, or the trunk's context). ``accepted[n]`` counts
    the steps at which n drafted tokens were accepted, before the limit cut any. ``seconds`` run from the prefill to
    the row's end. ``seed`` is what the row was sampled with, given or drawn; None for a greedy row.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    steps: int
    finish_reason: str
    accepted: list[int]
    seconds: float
    seed: int | None

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by steps / steps; the prefill and its token don't count. 0 if there was no step."""
        return (len(self.token_ids) - 1) / self.steps if self.steps else 0.0


class Stream(Iterator[str]):
    """A completion's text in pieces of whole characters; ``completion`` is there once the last piece was taken."""

    def __init__(self, pieces: Iterator[str], tally: _Tally) -> None:
        self._pieces = pieces
        self._tally = tally

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def completion(self) -> Completion | None:
        """The whole answer, or None while it is under way."""
        return self._tally.completion() if self._tally.finish_reason else None


class Engine:
    """Decodes with a trunk and a drafter. It holds no state of a request: calls from several threads don't meet.

    Args:
        trunk: the model whose text is produced, and its tokenizer.
        drafter: what guesses ahead; None guesses nothing.
    """

    def __init__(self, trunk: Trunk, drafter: Drafter | None = None) -> None:
        self.trunk = trunk
        self.drafter: Drafter = drafter or NullDrafter()

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        drafter: str = "auto",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        check: bool = True,
    ) -> Engine:
        """Load a folder made by ``medusa train``, heads as the reference publishes them, or a hub repository of either.

        ``drafter``: "auto" for the folder's own heads and tree, "none" to decode without drafts; a plain trunk loads
        only with "none". ``dtype`` and ``device`` are the trunk's ("auto": its own, and a GPU where there is one);
        ``check`` verifies at load that it can be driven exactly with a token tree.

        Raises:
            UserError: nothing there, a plain trunk with drafter "auto", or heads that don't belong to the trunk.
        """
        if drafter not in DRAFTERS:
            raise UserError(f"drafter={drafter!r}{nearest(drafter, DRAFTERS)}: choose from {', '.join(DRAFTERS)}")
        folder = find(str(source), revision)
        if folder is not None and ((folder / MANIFEST).is_file() or is_published(folder)):
            trunk = load_trunk(folder, dtype=dtype, device=device, check=check)
            return cls(trunk, None if drafter == "none" else _medusa(folder, trunk))
        if drafter != "none":
            raise UserError(
                f"{source} has no {MANIFEST}, so no heads: give a folder made by `medusa train`; a plain trunk decodes"
                " with `medusa generate --baseline`, in Python with drafter='none'"
            )
        plain = Trunk.load(
            folder or source,
            dtype=dtype,
            device=device,
            revision=None if folder else revision,
            check=check,
        )
        return cls(plain)

    @overload
    def generate(self, prompt: str | list[int], **options: Any) -> Completion: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Any) -> list[Completion]: ...

    def generate(
        self, prompt: str | list[int] | list[str] | list[list[int]], **options: Any
    ) -> Completion | list[Completion]:
        """Continue a prompt, text or token ids, or a batch of them; each row is what it would be alone.

        ``options`` are the fields of :class:`medusa.infer.options.Options`: ``max_new_tokens``, ``max_length``,
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed``, ``eos_token_id``, ``baseline``. Those not given come
        from the trunk's ``generation_config``, then decoding is greedy. A row that samples without a ``seed`` draws one
        of its own, and its completion says which.

        Raises:
            UserError: an unknown or unsupported option, a value out of range, a prompt that is empty, too long, of
                mixed kinds, or with characters the tokenizer does not know.
        """
        prompts = [prompt] if _is_single(prompt) else prompt
        drafter, tallies = self._prepare(prompts, options)
        steps = decode(self.trunk, drafter, [tally.request for tally in tallies])
        for step, seconds in _timed(steps):
            for row in step.tokens:
                tallies[row].add(row, step, seconds)
        for tally in tallies:
            tally.say(tally.ids, last=True)
        completions = [tally.completion() for tally in tallies]
        return completions[0] if _is_single(prompt) else completions

    def stream(self, prompt: str | list[int], **options: Any) -> Stream:
        """Continue one prompt piece by piece; the pieces joined are the completion's text. Options as in ``generate``.

        Raises:
            UserError: as ``generate``, at the call and not at the first piece; also for an engine without tokenizer.
        """
        if not _is_single(prompt):
            raise UserError("stream takes one prompt, a text or a list of ids: give a batch to generate")
        if self.trunk.tokenizer is None:
            raise UserError("this engine's trunk has no tokenizer to make text with: use generate for token ids")
        drafter, (tally,) = self._prepare([prompt], options)
        steps = decode(self.trunk, drafter, [tally.request])
        first = next(timed := _timed(steps))  # a prompt that can't be decoded is refused here
        return Stream(_pieces(first, timed, tally), tally)

    def _prepare(self, prompts: Any, given: dict[str, Any]) -> tuple[Drafter, list[_Tally]]:
        options = Options.of(given, self.trunk)
        tallies = []
        for ids in self._encode(prompts):
            detokeniser = Detokeniser(self.trunk.tokenizer, ids) if self.trunk.tokenizer is not None else None
            tallies.append(_Tally(options.request(self.trunk, ids), detokeniser))
        return NullDrafter() if options.baseline else self.drafter, tallies

    def _encode(self, prompts: Any) -> list[list[int]]:
        """Token ids of prompts that are all texts or all ids; an empty one becomes the BOS."""
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise UserError(f"prompt {prompts!r:.60}: give a text, a list of token ids, or a list of either, not empty")
        tokenizer = self.trunk.tokenizer
        if all(isinstance(prompt, str) for prompt in prompts):
            if tokenizer is None:
                raise UserError(f"prompt {prompts[0]!r:.60}: the trunk has no tokenizer: give token ids")
            rows = [encode(tokenizer, prompt, add_special_tokens=True) for prompt in prompts]
        elif all(_is_ids(prompt) for prompt in prompts):
            rows = [list(prompt) for prompt in prompts]
        else:
            raise UserError(f"prompt {prompts!r:.60}: give texts alone or lists of token ids alone")
        if all(rows):
            return rows
        bos = tokenizer.bos_token_id if tokenizer is not None else None
        if bos is None:
            raise UserError(
                f"prompt {rows.index([])} is empty and the tokenizer has no BOS to begin with: give at least one token"
            )
        return [row or [bos] for row in rows]


class _Tally:
    """One row's account while it is decoded."""

    def __init__(self, request: Request, detokeniser: Detokeniser | None) -> None:
        self.request = request
        self.detokeniser = detokeniser
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.accepted: list[int] = []  # per step
        self.finish_reason = ""
        self.seconds = 0.0

    def add(self, row: int, step: Step, seconds: float) -> None:
        """Count a step that served ``row``, this row's number in the batch; ``seconds`` since decoding began."""
        self.ids += step.tokens[row]
        if step.nodes:
            self.accepted.append(step.accepted[row])
        self.finish_reason = step.finished.get(row, "")
        self.seconds = seconds

    def say(self, tokens: Sequence[int], last: bool) -> str:
        """The text that ``tokens`` bring."""
        if self.detokeniser is None:
            return ""
        piece = self.detokeniser.push(tokens) + (self.detokeniser.finish() if last else "")
        self.pieces.append(piece)
        return piece

    def completion(self) -> Completion:
        """The account closed."""
        law = self.request.sampling
        histogram = [self.accepted.count(length) for length in range(max(self.accepted, default=-1) + 1)]
        return Completion(
            text="".join(self.pieces),
            token_ids=self.ids,
            prompt_ids=list(self.request.ids),
            steps=len(self.accepted),
            finish_reason=self.finish_reason,
            accepted=histogram,
            seconds=self.seconds,
            seed=law.seed if law.temperature > 0 else None,
        )


def _medusa(folder: Path, trunk: Trunk) -> MedusaDrafter:
    if not (folder / MANIFEST).is_file():
        heads = load_published(folder, trunk)
        return MedusaDrafter(heads, published_tree(folder, heads.config))
    heads = load_heads(folder, trunk)
    return MedusaDrafter(heads, load_tree(folder, heads.config))


def _timed(steps: Iterator[Step]) -> Iterator[tuple[Step, float]]:
    """Each step with the seconds spent in decoding so far; what the consumer does in between does not count."""
    spent = 0.0
    while True:
        start = time.perf_counter()
        step = next(steps, None)
        if step is None:
            return
        spent += time.perf_counter() - start
        yield step, spent


def _pieces(first: tuple[Step, float], rest: Iterator[tuple[Step, float]], tally: _Tally) -> Iterator[str]:
    step, seconds = first
    while True:
        tally.add(0, step, seconds)
        piece = tally.say(step.tokens[0], last=bool(tally.finish_reason))
        if piece:
            yield piece
        if tally.finish_reason:
            return
        step, seconds = next(rest)


def _is_ids(prompt: object) -> bool:
    if not isinstance(prompt, (list, tuple)):
        return False
    return all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _is_single(prompt: object) -> bool:
    return isinstance(prompt, str) or (_is_ids(prompt) and bool(prompt))
