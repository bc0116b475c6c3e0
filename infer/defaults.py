"""What transformers' ``generate`` knows and the engine's options don't: what is refused, what does nothing here, and
what a ``GenerationConfig`` says where a call says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from medusa.errors import UserError, nearest

if TYPE_CHECKING:
    from medusa.trunk import Trunk

BEAMS = "one text is followed, not several beams"
DRAFTER = "the engine's own drafter guesses ahead"
SCORES = "give logprobs=True and top_logprobs"
# transformers' own options that are not built, and the value at which each does nothing.
UNSUPPORTED: dict[str, Any] = {
    "assistant_early_exit": None,
    "assistant_model": None,
    "assistant_tokenizer": None,
    "constraints": None,
    "custom_generate": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "inputs_embeds": None,
    "negative_prompt_attention_mask": None,
    "negative_prompt_ids": None,
    "num_beam_groups": 1,
    "num_beams": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_logits": False,
    "output_scores": False,
    "past_key_values": None,
    "penalty_alpha": 0.0,
    "prefix_allowed_tokens_fn": None,
    "prompt_lookup_num_tokens": None,
    "token_healing": False,
    "use_mtp": False,
    "watermarking_config": None,
}
INSTEAD = {
    "assistant_early_exit": DRAFTER,
    "assistant_model": DRAFTER,
    "constraints": BEAMS,
    "diversity_penalty": BEAMS,
    "encoder_no_repeat_ngram_size": "there is no encoder, no_repeat_ngram_size reads the prompt too",
    "encoder_repetition_penalty": "there is no encoder, repetition_penalty reads the prompt too",
    "force_words_ids": BEAMS,
    "inputs_embeds": "give token ids",
    "num_beam_groups": BEAMS,
    "num_beams": BEAMS,
    "output_logits": SCORES,
    "output_scores": SCORES,
    "prefix_allowed_tokens_fn": "give logits_processor=[PrefixConstrainedLogitsProcessor(function, 1)]",
    "prompt_lookup_num_tokens": DRAFTER,
    "use_mtp": DRAFTER,
}
# Options of generate that change no text here: how it is computed, what pads a batch, what acts on beams alone.
NO_EFFECT = (
    "bos_token_id",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "early_stopping",
    "length_penalty",
    "pad_token_id",
    "prefill_chunk_size",
    "renormalize_logits",
    "return_dict_in_generate",
    "synced_gpus",
    "tokenizer",
    "use_cache",
)


def check_names(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse what is no option.

    Raises:
        UserError: an option that does not exist (the nearest is named), or one that is not built.
    """
    known = list(known)
    for name, value in given.items():
        if name in UNSUPPORTED and not _is_neutral(name, value):
            way_out = f"{INSTEAD[name]}, leave it out" if name in INSTEAD else "leave it out"
            raise UserError(f"{name}={value!r:.60} is not supported: {way_out}")
        if name not in (*known, *UNSUPPORTED, *NO_EFFECT, "generation_config"):
            raise UserError(f"unknown option {name!r}{nearest(name, known)}: see help(medusa.infer.options.Options)")


class Defaults:
    """What counts where the caller says nothing: a ``GenerationConfig`` given with the call, then the model's own.

    As in ``generate``, a name that the caller gives is never looked up here, not even when its value is None.

    Args:
        given: the keywords of the call.
        trunk: whose model has a ``generation_config``.

    Raises:
        UserError: something else than a ``GenerationConfig`` given as such, or an option in one that is not built.
    """

    def __init__(self, given: Mapping[str, Any], trunk: Trunk) -> None:
        self._given = given
        own, model = given.get("generation_config"), trunk.model.generation_config
        if own is not None and not hasattr(own, "to_dict"):
            raise UserError(f"generation_config={own!r:.60}: give a transformers GenerationConfig")
        self._configs = [config for config in (own, model) if config is not None]

    def get(self, name: str) -> Any:
        """The value for ``name``; None where the caller gives one, or nobody does."""
        if name in self._given:
            return None
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)

    def refuse_unsupported(self) -> None:
        """Refuse what ``generate`` would do by a config and the engine can't, unless the caller undid it."""
        for name, neutral in UNSUPPORTED.items():
            value = self.get(name)
            if not _is_neutral(name, value) and not name.startswith("output_"):  # more output is no other text
                raise UserError(
                    f"the trunk's generation_config sets {name}={value!r:.60}, which is not supported: clear it in"
                    f" generation_config.json, or give {name}={neutral!r} to Engine.generate"
                )


def _is_neutral(name: str, value: Any) -> bool:
    return value is None or value == UNSUPPORTED[name] or (isinstance(value, (list, tuple, dict)) and not value)
