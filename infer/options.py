"""What a user may ask of decoding, under transformers' own names, and what it comes to for one trunk: an argument
counts before the model's own ``generation_config``, and that before greedy decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real  # those of other libraries too
from typing import Any

from medusa.drafters.children import MODES
from medusa.errors import UserError, nearest
from medusa.processing import Processing
from medusa.sampling import SamplingParams
from medusa.trunk import Trunk

from .contradictions import NEUTRAL, refuse_contradictions
from .defaults import UNSUPPORTED, Defaults, check_names

__all__ = ["NEW_TOKENS", "OF_THE_CALL", "UNSUPPORTED", "Options"]

NEW_TOKENS = 256  # where neither the caller nor the model sets a limit: some paragraphs, and never without end
TOP_K = 50  # what transformers samples with where it is told to sample and no top_k is named
ACCEPTANCES = ("lossless", "typical")
FILTERS = tuple(NEUTRAL)
PROCESSED = tuple(field.name for field in fields(Processing))
OURS = ("frequency_penalty", "presence_penalty")  # generate has no such options: no config speaks of them
# One decision for all rows of a call.
OF_THE_CALL = (
    "acceptance",
    "typical_epsilon",
    "typical_delta",
    "drafting",
    "draft_temperature",
    "baseline",
    "num_return_sequences",
)
INTEGERS = ("max_new_tokens", "max_length", "top_k", "seed", "num_return_sequences", "top_logprobs")
NUMBERS = ("temperature", *FILTERS[1:], "max_time", "typical_epsilon", "typical_delta", "draft_temperature")
FLAGS = ("do_sample", "include_stop", "logprobs", "baseline")


@dataclass(frozen=True)
class Options:
    """How one prompt is decoded. What is left out is as the model's own generation_config says, and then greedy.

    Args:
        max_new_tokens: the most tokens to emit; 256 where the model sets no limit either.
        max_length: the same limit with the prompt's tokens counted in; give one of the two.
        do_sample: whether tokens are drawn at random, as transformers does it: by the model's own temperature and
            filters where none are given, and from the 50 likeliest where no top_k is. Left out, the temperature says.
        temperature: 0 is greedy, above it tokens are drawn at random.
        top_k: draw from the k most likely tokens; 0 keeps all.
        top_p: draw from the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        min_p: draw from tokens at least this fraction as likely as the most likely one; 0 keeps all.
        top_h: draw from the most likely tokens whose entropy stays within this fraction of the whole law's.
        typical_p: draw from the tokens closest to the law's entropy whose mass reaches p; 1 keeps all.
        epsilon_cutoff: draw from tokens at least this likely; 0 keeps all.
        eta_cutoff: the same with a cutoff that falls with the law's entropy; 0 keeps all.
        seed: the same seed draws the same tokens, in any batch; left out, every sampled row draws a seed of its own.
        eos_token_id: the id or ids that end the text; an empty list for none.
        stop_strings: the text, or each of the texts, that end the text where they first come; they may begin in the
            prompt. The one that ends first counts, of those the longest.
        include_stop: whether text and ids end with the stop string, as in transformers, or before it, as from servers.
        max_time: seconds after which the text ends with the next token.
        num_return_sequences: continuations of each prompt, to be sampled; with a seed, they have it and those after it.
        repetition_penalty: tokens that occurred, in the prompt too, have a positive score divided by it and a negative
            one multiplied; 1 leaves them.
        frequency_penalty: subtracted from a token's score once per occurrence among the new tokens.
        presence_penalty: subtracted once from the score of each token that occurred among the new tokens.
        no_repeat_ngram_size: no run of so many tokens comes twice; 0 allows it.
        bad_words_ids: sequences of ids that never come.
        sequence_bias: sequences of ids and what is added to the score of the last when the others precede it.
        suppress_tokens: ids that never come.
        begin_suppress_tokens: ids that do not come first.
        min_length: the text does not end before so many tokens, the prompt's included.
        min_new_tokens: the text does not end before so many new tokens.
        forced_bos_token_id: the token that follows a prompt of one token.
        forced_eos_token_id: the id, or one of the ids, that comes last when the limit is reached.
        exponential_decay_length_penalty: after so many new tokens the EOS's score grows by a factor, given second.
        remove_invalid_values: whether NaN and infinite scores are made numbers.
        logprobs: whether to report each token's log-probability.
        top_logprobs: how many of the likeliest tokens to report with it.
        acceptance: how drafts are accepted; lossless keeps the trunk's own law, typical is faster and does not.
        typical_epsilon: a probability that is always typical enough; 0.09 if left out.
        typical_delta: how far below a typical probability a draft may lie, as a factor; 0.3 if left out.
        drafting: how drafts are chosen in rows that sample; sampled draws them, mixed draws the last of those that
            compete and takes the likeliest for the others, top takes the likeliest alone.
        draft_temperature: drafts are drawn at this times the temperature; 1 if left out.
        logits_processor: a function of ids [1, T] and scores [1, V], or a list of such, called once per token; in a
            batch each row has a copy of its own.
        stopping_criteria: a function of ids [1, T] and scores (none here), or a list of such, called once per token;
            the rows of a batch share it.
        baseline: decode without drafts: the same loop, one token per step.

    Raises:
        UserError: a value of the wrong kind or outside its range.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    seed: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    include_stop: bool = True
    max_time: float | None = None
    num_return_sequences: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Any = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    acceptance: str = "lossless"
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    drafting: str | None = None
    draft_temperature: float | None = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    baseline: bool = False

    def __post_init__(self) -> None:
        for name in INTEGERS + NUMBERS:
            value, whole = getattr(self, name), name in INTEGERS
            if value is not None and not _is_number(value, Integral if whole else Real):
                raise UserError(f"{name}={value!r}: give {'a whole number' if whole else 'a number'}")
            if type(value) not in (int, float, type(None)):
                object.__setattr__(self, name, int(value) if whole else float(value))
        for name in FLAGS:
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise UserError(f"{name}={getattr(self, name)!r}: give True or False")
        for name, names in (("acceptance", ACCEPTANCES), ("drafting", MODES)):
            value = getattr(self, name)
            if value is not None and value not in names:
                raise UserError(f"{name}={value!r}{nearest(str(value), names)}: choose from {', '.join(names)}")
        for name, least in (("max_new_tokens", 1), ("num_return_sequences", 1), ("max_time", 0), ("top_logprobs", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UserError(f"{name}={value}: it must be at least {least}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise UserError(f"seed={self.seed}: seeds lie in 0..2**63-1")
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise UserError(f"stop_strings={self.stop_strings!r}: give a text or a list of texts, none empty")
        for name in ("logits_processor", "stopping_criteria"):
            if not all(map(callable, functions(getattr(self, name)))):
                raise UserError(
                    f"{name}={getattr(self, name)!r:.60}: give a function of ids and scores, or a list of such"
                )
        self.processing, self.sampling  # noqa: B018 - what can't be asked is refused here

    @classmethod
    def of(cls, given: Mapping[str, Any], trunk: Trunk) -> Options:
        """What the keywords of a call come to.

        As in ``generate``, an option that is None undoes what the model's own ``generation_config`` says of it. The
        keywords may hold a ``generation_config``, which counts before the model's own.

        Raises:
            UserError: an option that does not exist (the nearest is named), one that is not built, asked for by the
                caller or by a ``generation_config``, options that contradict each other, or a value of the wrong kind.
        """
        names = [field.name for field in fields(cls)]
        check_names(given, names)
        asked = {name: given[name] for name in names if given.get(name) is not None}
        cls(**asked)  # what is wrong here is the caller's
        _check_eos(asked.get("eos_token_id"), trunk.vocab_size)
        defaults = Defaults(given, trunk)
        defaults.refuse_unsupported()
        try:
            merged = cls(**_merged(asked, given, defaults))
        except UserError as error:
            raise UserError(f"the trunk's generation_config: {error}") from error
        refuse_contradictions(asked, merged)
        return merged

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings or ())

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end the text."""
        return frozenset(_ids(self.eos_token_id) or ())

    @property
    def sampling(self) -> SamplingParams:
        """The law to draw by, seed 0 where none was given."""
        values = {name: getattr(self, name) for name in ("temperature", *FILTERS, "seed")}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    @property
    def processing(self) -> Processing:
        """What the built-in processors are asked to do."""
        values = {name: getattr(self, name) for name in PROCESSED}
        return Processing(**{name: value for name, value in values.items() if value is not None})

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to report beside each log-probability; None for no report."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None

    def limit(self, size: int) -> int:
        """How many tokens may follow a prompt of ``size`` tokens."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None:
            return NEW_TOKENS
        if self.max_length <= size:
            raise UserError(
                f"the prompt has {size} tokens and max_length is {self.max_length}, the prompt included: raise it, or"
                " give max_new_tokens instead"
            )
        return self.max_length - size


def functions(given: Any) -> list[Any]:
    """The functions of one, of a list, or of one of transformers' lists, which are functions themselves."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) and not callable(given) else [given]


def _merged(asked: Mapping[str, Any], given: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """What was asked over what the configs say, as ``generate`` merges them; the caller's limits count first."""
    named = ("max_new_tokens", "max_length", "eos_token_id", "stop_strings", "max_time", "num_return_sequences")
    own = {name: defaults.get(name) for name in (*named, *PROCESSED) if name not in OURS}
    for new, total in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if new in asked or total in asked:
            own[new] = own[total] = None
        elif own[new] is not None:
            own[total] = None
    merged = {name: value for name, value in own.items() if value is not None} | dict(asked)
    return merged | _drawn(asked, given, defaults)


def _drawn(asked: Mapping[str, Any], given: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """Temperature and filters; the configs have a say where the caller or they themselves tell to sample."""
    told = asked["do_sample"] if "do_sample" in asked else bool(defaults.get("do_sample"))
    temperature = asked.get("temperature")
    if asked.get("do_sample") is False or temperature == 0 or (temperature is None and not told):
        return {"do_sample": False, "temperature": 0.0}
    own = {name: defaults.get(name) for name in ("temperature", *FILTERS)} if told else {}
    values = {"temperature": 1.0} | ({} if "top_k" in given or not told else {"top_k": TOP_K})
    values |= {name: value for name, value in own.items() if value is not None}
    return {"do_sample": True} | values | {name: asked[name] for name in ("temperature", *FILTERS) if name in asked}


def _check_eos(given: Any, vocabulary: int) -> None:
    for token in _ids(given) or ():
        if not _is_number(token, Integral) or not 0 <= token < vocabulary:
            raise UserError(f"eos_token_id={given!r}: give ids in 0..{vocabulary - 1}")


def _ids(given: Any) -> list[Any] | None:
    """An id or ids as a list."""
    if given is None:
        return None
    given = given.tolist() if hasattr(given, "tolist") else given
    return list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
