"""From the options of a call to what the decode loop is asked, row by row.

Dimensions: T time, V vocabulary.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from medusa.accept import AcceptRule
from medusa.drafters.base import Drafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError, reason
from medusa.laws import Processor
from medusa.parallel import agreed, spread
from medusa.processing import Processing
from medusa.processors import Row
from medusa.requests import Past, Request
from medusa.rules import TypicalRule
from medusa.trunk import Trunk

from .options import OF_THE_CALL, Options, functions
from .redraft import redraft
from .tally import Tally, Watch
from .transcript import Transcript

# In generate a processor given by the caller takes the place of the one that an option of this name makes.
REPLACES = {
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
}


@dataclass(frozen=True)
class Call:
    """What one call decodes: ``tallies`` hold the rows' requests, each prompt's continuations side by side.

    ``drafter`` and ``rule`` are one for all rows; no rule is the lossless one that fits.
    """

    drafter: Drafter
    rule: AcceptRule | None
    tallies: list[Tally]

    @property
    def requests(self) -> list[Request]:
        """What the decode loop is asked."""
        return [tally.request for tally in self.tallies]


def prepare(
    trunk: Trunk,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    given: Mapping[str, Any],
    each: Sequence[Mapping[str, Any]] | None = None,
    past: Past | None = None,
) -> Call:
    """Make requests of prompts' ids and a call's keywords.

    ``each`` holds further options of every prompt, over the shared ones. ``past`` is what the only prompt may begin
    with.

    Raises:
        UserError: options that can't be followed, or a prompt too long.
    """
    options = [Options.of(given, trunk)] * len(prompts) if each is None else _each(trunk, len(prompts), given, each)
    shared = options[0]  # as far as it speaks of the call
    turns = range(shared.num_return_sequences or 1)
    places = [(number, turn) for number in range(len(prompts)) for turn in turns]
    objects = [options[number].logits_processor for number, _ in places]
    start = time.perf_counter()
    tallies = []
    for (number, turn), processor in zip(places, _own(objects), strict=True):
        tally = _tally(trunk, prompts[number], options[number], turn, processor, start)
        tally.request = replace(tally.request, past=past)
        tally.request.allowance(trunk, number)
        tallies.append(tally)
    rule = None
    if shared.acceptance == "typical":
        given_or_usual = {"epsilon": shared.typical_epsilon, "delta": shared.typical_delta}
        rule = TypicalRule(**{name: value for name, value in given_or_usual.items() if value is not None})
    return Call(_drafter(drafter, shared), rule, tallies)


def _each(trunk: Trunk, prompts: int, given: Mapping[str, Any], each: Sequence[Mapping[str, Any]]) -> list[Options]:
    """Every prompt's own options over the shared ones."""
    if not isinstance(each, Sequence) or not all(isinstance(own, Mapping) for own in each):
        raise UserError(f"each={each!r:.60}: give a list of dicts of options, one for every prompt")
    if len(each) != prompts:
        raise UserError(f"each has {len(each)} dicts of options for {prompts} prompts: give one for every prompt")
    options = []
    for number, own in enumerate(each):
        for name in own:
            if name in OF_THE_CALL:
                raise UserError(f"each[{number}] has {name!r}, which is one for all prompts: give it beside each")
        try:
            options.append(Options.of({**given, **own}, trunk))
        except UserError as error:
            raise UserError(f"each[{number}]: {error}") from error
    return options


def _own(processors: Sequence[Any]) -> list[Any]:
    """Each row's own processor: the object given where one row has it, else copies, so that a state is a row's own."""
    rows = Counter(map(id, processors))
    try:
        return [given if rows[id(given)] == 1 else copy.deepcopy(given) for given in processors]
    except Exception as error:  # whatever the user's object raises
        raise UserError(
            f"logits_processor can't be copied, and every row of a batch needs its own ({reason(error)}): give one per"
            " prompt by each"
        ) from error


def _tally(trunk: Trunk, ids: Sequence[int], options: Options, turn: int, given: Any, start: float) -> Tally:
    """One row's account, its request included."""
    if options.stops and trunk.tokenizer is None:
        raise UserError(
            f"stop_strings={options.stop_strings!r} are looked for in text, and the trunk has no tokenizer: give it"
            " one, or stop_strings=None"
        )
    transcript = Transcript(trunk.tokenizer, ids, options.stops, options.include_stop, options.eos)
    if options.max_time is not None and spread(trunk.model):
        raise UserError(f"max_time={options.max_time} with tp_plan: each process has a clock of its own; leave it out")
    deadline = None if options.max_time is None else start + options.max_time
    watch = Watch(transcript, ids, functions(options.stopping_criteria), deadline, trunk.device)
    law = options.sampling
    if law.temperature > 0:
        drawn = agreed(trunk.model, secrets.randbelow(1 << 63))
        seed = drawn if options.seed is None else (options.seed + turn) % (1 << 63)
        law = replace(law, seed=seed)
    processing, processors = options.processing, functions(given)
    processing.check(trunk.vocab_size)
    request = Request(
        ids,
        options.limit(len(ids)),
        options.eos,
        law,
        processing=_without(processing, given),
        processor=_chain(processors) if processors else None,
        watch=None if watch.idle else watch,
        logprobs=options.alternatives,
    )
    Row(request.processing, len(ids), request.longest, request.eos)  # refused now, not when the row's turn comes
    return Tally(request, transcript, watch, lossless=options.acceptance == "lossless")


def _without(processing: Processing, given: Any) -> Processing:
    """What the caller's own processors leave to the built-in ones."""
    items = given if isinstance(given, (list, tuple)) else [given]
    replaced = {REPLACES[type(item).__name__] for item in items if type(item).__name__ in REPLACES}
    return replace(processing, **{name: getattr(Processing, name) for name in replaced}) if replaced else processing


def _chain(processors: Sequence[Processor]) -> Processor:
    """One processor of several."""

    def process(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
        for processor in processors:
            scores_1V = processor(ids_1T, scores_1V)
        return scores_1V

    return process


def _drafter(drafter: Drafter, options: Options) -> Drafter:
    """The drafter for a call, which may choose its drafts otherwise."""
    if options.baseline:
        return NullDrafter()
    if options.drafting is None and options.draft_temperature is None:
        return drafter
    return redraft(drafter, options.drafting, options.draft_temperature)
