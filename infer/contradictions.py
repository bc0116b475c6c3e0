"""Options that exclude each other: refused before anything is decoded, with both values and the way out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from medusa.errors import UserError

if TYPE_CHECKING:
    from .options import Options

# What filters and the like are where they do nothing.
NEUTRAL = {"top_k": 0, "top_p": 1, "min_p": 0, "top_h": 1, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}


def refuse_contradictions(asked: Mapping[str, Any], merged: Options) -> None:
    """Hold the options that a caller gave against each other, and against what all of them come to.

    Raises:
        UserError: two that exclude each other, or one that would do nothing.
    """
    _limits(asked)
    _sampling(asked, merged)
    _acceptance(asked)
    _output(asked)


def _limits(asked: Mapping[str, Any]) -> None:
    for new, total in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if new in asked and total in asked:
            raise UserError(f"{new}={asked[new]} and {total}={asked[total]}: give one of the two limits")
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        if least in asked and most in asked and asked[least] > asked[most]:
            raise UserError(f"{least}={asked[least]} is above {most}={asked[most]}: lower the one or raise the other")


def _sampling(asked: Mapping[str, Any], merged: Options) -> None:
    temperature, do_sample = asked.get("temperature"), asked.get("do_sample")
    if do_sample and temperature == 0:
        raise UserError("do_sample=True and temperature=0, which is greedy: leave one of them out")
    if do_sample is False and temperature not in (None, 0, 1):
        raise UserError(f"do_sample=False and temperature={temperature}, which samples: leave one of them out")
    if merged.do_sample:
        return
    told = temperature is not None or do_sample is not None  # then it is known that filters don't matter
    for name, neutral in NEUTRAL.items():
        if not told and asked.get(name, neutral) != neutral:
            raise UserError(
                f"{name}={asked[name]} has no effect on greedy decoding: give a temperature above 0 too, or"
                " do_sample=True"
            )
    if (merged.num_return_sequences or 1) > 1:
        raise UserError(
            f"num_return_sequences={merged.num_return_sequences}, and greedy decoding has one answer: give a"
            " temperature above 0 too, or do_sample=True"
        )


def _acceptance(asked: Mapping[str, Any]) -> None:
    typical = asked.get("acceptance") == "typical"
    for name in ("typical_epsilon", "typical_delta"):
        if name in asked and not typical:
            raise UserError(f"{name}={asked[name]} has no effect on lossless acceptance: give acceptance='typical' too")
        if name in asked and not 0 < asked[name] <= 1:
            raise UserError(f"{name}={asked[name]}: it must be in (0, 1]")
    if typical and asked.get("logits_processor") is not None:
        raise UserError(
            "acceptance='typical' weighs all drafts at once, and a logits_processor is called along one text: leave one"
            " of the two out"
        )
    temperature = asked.get("draft_temperature")
    if temperature is not None and not 0 < temperature < math.inf:
        raise UserError(f"draft_temperature={temperature}: give a number above 0 (1 is the row's own)")
    if temperature is not None and asked.get("drafting") == "top":
        raise UserError(f"draft_temperature={temperature} and drafting='top', which draws none: leave one of them out")
    for name in ("acceptance", "drafting", "draft_temperature"):
        if asked.get("baseline") and name in asked and asked[name] != "lossless":
            raise UserError(f"{name}={asked[name]!r} and baseline=True, which drafts nothing: leave one of them out")


def _output(asked: Mapping[str, Any]) -> None:
    if asked.get("logprobs") is False and asked.get("top_logprobs"):
        raise UserError(f"top_logprobs={asked['top_logprobs']} and logprobs=False: leave one of them out")
