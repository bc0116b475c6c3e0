"""What a user may ask of decoding, and what it comes to for one trunk: an argument counts before the model's own
``generation_config``, and that before greedy decoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from medusa.decoding import Request
from medusa.errors import UserError, nearest
from medusa.sampling import SamplingParams
from medusa.trunk import Trunk

NEW_TOKENS = 256  # where neither the caller nor the model sets a limit: some paragraphs, and never without end
CONFIG_TOP_K = 50  # what transformers samples with where a generation_config samples and names no top_k
INTEGERS = ("max_new_tokens", "max_length", "top_k", "seed")
NUMBERS = ("temperature", "top_p", "min_p")
FILTERS = ("top_k", "top_p", "min_p")

# transformers' own options that change the text and are not built, and the value at which each does nothing (None: an
# option that does nothing only when it is empty).
UNSUPPORTED: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "frequency_penalty": 0.0,
    "guidance_scale": 1.0,
    "logits_processor": None,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "stopping_criteria": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": 1.0,
    "typical_p": 1.0,
    "watermarking_config": None,
}
ONLY_WHEN_SAMPLING = ("epsilon_cutoff", "eta_cutoff", "top_h", "typical_p")


@dataclass(frozen=True)
class Options:
    """How one call decodes. What is left out is as the model's own generation_config says, and then greedy.

    Args:
        max_new_tokens: the most tokens to emit; 256 where the model sets no limit either.
        max_length: the same limit with the prompt's tokens counted in; give one of the two.
        temperature: 0 is greedy, above it tokens are drawn at random.
        top_k: draw from the k most likely tokens; 0 keeps all.
        top_p: draw from the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        min_p: draw from tokens at least this fraction as likely as the most likely one; 0 keeps all.
        seed: the same seed draws the same tokens, in any batch; left out, every sampled row draws a seed of its own.
        eos_token_id: the id or ids that end the text; an empty list for none.
        baseline: decode without drafts: the same loop, one token per step.

    Raises:
        UserError: a value of the wrong kind, or options that contradict each other.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    baseline: bool = False

    def __post_init__(self) -> None:
        for name in INTEGERS + NUMBERS:
            value, whole = getattr(self, name), name in INTEGERS
            if value is not None and not _is_number(value, int if whole else (int, float)):
                raise UserError(f"{name}={value!r}: give {'a whole number' if whole else 'a number'}")
        if not isinstance(self.baseline, bool):
            raise UserError(f"baseline={self.baseline!r}: give True or False")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise UserError(f"seed={self.seed}: seeds lie in 0..2**63-1")
        if self.max_new_tokens is not None and self.max_length is not None:
            raise UserError(
                f"max_new_tokens={self.max_new_tokens} and max_length={self.max_length}: give one of the two limits"
            )

    @classmethod
    def of(cls, given: dict[str, Any], trunk: Trunk) -> Options:
        """Check the keywords of a call.

        Raises:
            UserError: an option that does not exist (the nearest is named), or one that is not built, asked for by
                the caller or by the trunk's ``generation_config``.
        """
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name == "do_sample":
                raise UserError(f"do_sample={value!r}: temperature=0 is greedy and a temperature above 0 samples")
            if name in UNSUPPORTED and not _is_neutral(name, value):
                raise UserError(f"{name}={value!r} is not supported: leave it out")
            if name not in known and name not in UNSUPPORTED:
                raise UserError(f"unknown option {name!r}{nearest(name, known)}: the options are {', '.join(known)}")
        options = cls(**{name: value for name, value in given.items() if name in known})
        _refuse_unsupported_defaults(trunk.model.generation_config, given, options)
        return options

    def request(self, trunk: Trunk, ids: Sequence[int]) -> Request:
        """One prompt's request; a row that samples has the seed asked for, or one that nobody has seen before."""
        config = trunk.model.generation_config
        law = self.sampling(config)
        if law.temperature > 0 and self.seed is None:
            law = replace(law, seed=secrets.randbelow(1 << 63))
        return Request(ids, self._limit(config, len(ids)), self._eos(trunk), law)

    def sampling(self, config: Any) -> SamplingParams:
        """The law to draw by; ``config``, a ``GenerationConfig``, has a say where its ``do_sample`` is true."""
        model: dict[str, Any] = {}
        if config.do_sample:
            own = {name: getattr(config, name) for name in (*NUMBERS, "top_k")}
            model = {"temperature": 1.0, "top_k": CONFIG_TOP_K} | _given(own)
        asked = _given({name: getattr(self, name) for name in (*NUMBERS, "top_k")})
        params = SamplingParams(**(model | asked), seed=self.seed or 0)
        idle = [name for name in FILTERS if name in asked and asked[name] != getattr(SamplingParams, name)]
        if idle and "temperature" not in model | asked:
            raise UserError(
                f"{idle[0]}={asked[idle[0]]} has no effect on greedy decoding: give a temperature above 0 too"
            )
        return params

    def _limit(self, config: Any, size: int) -> int:
        new, total = self.max_new_tokens, self.max_length
        if new is None and total is None:
            new, total = config.max_new_tokens, config.max_length
        if new is not None:
            return new
        if total is None:
            return NEW_TOKENS
        if total <= size:
            raise UserError(
                f"the prompt has {size} tokens and max_length is {total}, the prompt included: raise it, or give"
                " max_new_tokens instead"
            )
        return total - size

    def _eos(self, trunk: Trunk) -> frozenset[int]:
        given = self.eos_token_id
        if given is None:
            return trunk.eos_ids
        ids: list[Any] = list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]
        for token in ids:
            if not _is_number(token, int) or not 0 <= token < trunk.vocab_size:
                raise UserError(f"eos_token_id={given!r}: give ids in 0..{trunk.vocab_size - 1}")
        return frozenset(ids)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_neutral(name: str, value: Any) -> bool:
    return value is None or value == [] or value == UNSUPPORTED[name]


def _refuse_unsupported_defaults(config: Any, given: dict[str, Any], options: Options) -> None:
    """Refuse what ``model.generate`` would do by its ``generation_config`` and we can't, unless the caller undid it."""
    samples = options.sampling(config).temperature > 0
    for name, neutral in UNSUPPORTED.items():
        value = getattr(config, name, None)
        if given.get(name) is not None or _is_neutral(name, value) or (name in ONLY_WHEN_SAMPLING and not samples):
            continue
        undo = "" if neutral is None else f", or give {name}={neutral!r} to Engine.generate"
        raise UserError(
            f"the trunk's generation_config sets {name}={value!r}, which is not supported: clear it in"
            f" generation_config.json{undo}"
        )
