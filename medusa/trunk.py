"""The trunk: any Hugging Face causal language model, frozen, driven with token trees.

One of the two files that know transformers' forwards. No modelling code is forked: a tree is verified through a 4-D
attention mask, explicit positions and our own cache class. Whether a family can be driven this way exactly is not
assumed but checked at load.

Dimensions: B batch, T new tokens, N tree nodes, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

from medusa.cache import LayerShape, PlaneShape, SlotCache
from medusa.errors import UserError
from medusa.fingerprint import fingerprint
from medusa.selfcheck import check_tree
from medusa.tree import DraftTree, attention_bias


@dataclass(frozen=True)
class TrunkOutput:
    """``logits`` [B, kept, V], ``hidden`` [B, T, D] after the final norm, ``states`` of the layers asked for."""

    logits: Tensor
    hidden: Tensor
    states: tuple[Tensor, ...] = ()


class Trunk:
    """A frozen verifier.

    ``model`` is used as it is and never modified but for ``eval()`` and ``requires_grad_(False)``.

    Raises:
        UserError: the model has no causal language-modelling head, no key/value cache that can roll back, or fails
            the self-check.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None = None, *, check: bool = True) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        self.family: str = model.config.model_type
        if getattr(model.config, "is_encoder_decoder", False):
            raise UserError(
                f"model type {self.family!r} is an encoder-decoder: a trunk must be a causal language model"
            )
        parameters = inspect.signature(model.forward).parameters
        self._refuse_biased(parameters)
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        if self._head is None:
            raise UserError(f"model type {self.family!r} has no language-modelling head: give a causal language model")
        self.windows = self._find_windows()
        self._turning_point = self._find_turning_point()
        self.layers = self._find_layers()
        if check:
            check_tree(self)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        check: bool = True,
        **options: Any,
    ) -> Trunk:
        """Load a folder or hub id with its tokenizer; ``options`` go to ``from_pretrained``."""
        name = str(name)
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise UserError(f"no trunk at {name}: give a folder saved by save_pretrained, or a hub id")
        name = str(Path(name).expanduser()) if name.startswith("~") else name
        try:
            config = AutoConfig.from_pretrained(name, revision=revision)
            if getattr(config, "is_encoder_decoder", False):
                raise UserError(
                    f"trunk {name} is of type {config.model_type!r}, an encoder-decoder: give a causal language model"
                )
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, revision=revision, **options)
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        except (OSError, ValueError, KeyError, TypeError) as error:  # what from_pretrained raises for a bad folder
            if isinstance(error, UserError):
                raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
            raise UserError(f"trunk {name} cannot be loaded: {reason} (give a folder or a hub id)") from error
        return cls(model.to(device) if device is not None else model, tokenizer, check=check)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the hidden states."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """V: columns of the logits."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """D: size of the state the language-modelling head reads."""
        return self._head.weight.shape[-1]

    @property
    def draftable(self) -> int:
        """Ids below this number exist in the tokenizer; rows that only pad the vocabulary are never drafted."""
        return self.vocab_size if self.tokenizer is None else min(self.vocab_size, len(self.tokenizer))

    @property
    def context(self) -> int | None:
        """Most positions the trunk can take; None if it knows no limit."""
        for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(getattr(self.config, key, None), int):
                return getattr(self.config, key)
        return None

    def horizon(self, length: int) -> int | None:
        """The position that a text of ``length`` tokens may not reach; None if there is no limit.

        Where rotary frequencies depend on a forward's largest position, what is cached on one side of that change is
        wrong on the other: a text that begins before it ends there.
        """
        if self._turning_point is not None and (length < self._turning_point or self._turns_ever_after):
            return self._turning_point
        return self.context

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text, by the model's own generation config."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def fingerprint(self) -> str:
        """Identity of the source weights, the same for any dtype or quantisation they are loaded in."""
        return fingerprint(self.model)

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache for ``rows`` rows."""
        return SlotCache(self.layers, rows)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of ``ids``: [.., D_in]."""
        return self._embedding(ids)

    def project(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Logits of states [.., D], through the trunk's own projection or one of the same form.

        Applies what the trunk does after it (Cohere's scale, Granite's division, Gemma's softcap). Whether that is
        the trunk's own path is what ``check_projection`` finds out.
        """
        if weight is None:
            weight, bias = self._head.weight, self._head.bias
        logits = torch.nn.functional.linear(hidden, weight, bias)
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    @torch.no_grad()
    def forward(
        self,
        ids_BT: Tensor,
        cache: SlotCache | None = None,
        mask: Tensor | dict[str, Tensor | None] | None = None,
        positions_BT: Tensor | None = None,
        keep: int | Tensor = 0,
        layers: Sequence[int] = (),
    ) -> TrunkOutput:
        """One forward of the unmodified model.

        ``keep``: 0 for the logits of all positions, n for the last n, or the indices along T. ``layers``: whose
        output states to return as well (0 is the embedding).
        """
        kwargs: dict[str, Any] = {"logits_to_keep": keep} if self._keeps else {}
        if cache is not None:
            kwargs[self._cache_name] = cache
        if positions_BT is not None:
            kwargs["position_ids"] = positions_BT
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask,
            use_cache=cache is not None,
            output_hidden_states=True,
            return_dict=True,
            **kwargs,
        )
        states = output.hidden_states
        return TrunkOutput(output.logits, states[-1], tuple(states[layer] for layer in layers))

    def prefill(self, ids_BT: Tensor, lengths: Sequence[int], cache: SlotCache) -> tuple[Tensor, Tensor, TrunkOutput]:
        """Read right-padded prompts into an empty cache.

        Returns the logits [B, V] and state [B, D] of each row's last real token, and the whole output.
        """
        rows = torch.arange(len(lengths), device=ids_BT.device)
        last_B = torch.tensor(lengths, device=ids_BT.device) - 1
        kept = torch.unique(last_B)  # logits of these columns alone: all of them could be T x V per row
        cache.reserve(ids_BT.shape[1])
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None].expand_as(ids_BT)
        output = self.forward(ids_BT, cache, None, positions, keep=kept)
        column_B = torch.searchsorted(kept, last_B) if self._keeps else last_B
        cache.set_lengths(lengths)
        return output.logits[rows, column_B], output.hidden[rows, last_B], output

    def tree_forward(self, tree: DraftTree, cache: SlotCache) -> TrunkOutput:
        """Score every node of every row's tree in one forward: logits [B, N, V], hidden [B, N, D]."""
        lengths = cache.lengths
        total = cache.reserve(tree.size)
        start_B1 = torch.tensor(lengths, device=tree.tokens_BN.device)[:, None]
        positions_BN = start_B1 + tree.shape.depths
        horizon = self.horizon(min(lengths))
        if horizon is not None and cache.longest + tree.shape.levels > horizon:
            positions_BN = positions_BN.clamp(max=horizon - 1)  # nodes beyond it are past a row's limit
        masks = {
            kind: attention_bias(tree.shape, lengths, total, self.dtype, window)
            for kind, window in self.windows.items()
        }
        mask = masks if self._by_type else masks["full_attention"]
        return self.forward(tree.tokens_BN, cache, mask, positions_BN)

    def _refuse_biased(self, parameters: Any) -> None:
        """Refuse by name what no short trial would show: attention that does not go by explicit positions."""
        local = "local" in (getattr(self.config, "attention_layers", None) or ())
        if "position_ids" not in parameters or getattr(self.config, "alibi", False) or local:
            raise UserError(
                f"model type {self.family!r} does not attend by explicit positions (it has ALiBi or local layers), so a"
                " token tree can't be scored exactly: use a trunk with rotary or learned positions"
            )

    def _find_turning_point(self) -> int | None:
        """The position at which rotary frequencies change, if they do; whether they go on changing beyond it."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
        self._turns_ever_after = any(kind.get("rope_type") == "dynamic" for kind in kinds)
        for kind in kinds:
            if kind.get("rope_type") in ("longrope", "dynamic"):
                own = getattr(self.config, "original_max_position_embeddings", None)
                return kind.get("original_max_position_embeddings") or own or self.context
        return None

    def _find_windows(self) -> dict[str, int | None]:
        """Sliding window per layer type; a model without layer types has one entry, for all of its layers."""
        kinds = getattr(self.config, "layer_types", None)
        window = getattr(self.config, "sliding_window", None)
        self._by_type = kinds is not None
        if kinds is None:
            return {"full_attention": window}
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UserError(
                f"model type {self.family!r} has layers of type {', '.join(unknown)}, which can't roll back a rejected"
                " draft: use a trunk with full or sliding attention only"
            )
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}

    @torch.no_grad()
    def _find_layers(self) -> list[LayerShape]:
        """Read the shape of every layer's keys and values off a forward of one token."""
        probe = DynamicCache(config=self.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            output = self.model(input_ids=ids, use_cache=True, return_dict=True, **{self._cache_name: probe})
            held = getattr(output, self._cache_name)
            pairs = [(layer.keys, layer.values) for layer in held.layers]
            return [LayerShape(_plane(keys), _plane(values)) for keys, values in pairs]
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"model type {self.family!r} keeps no plain key/value cache, so a rejected draft can't be rolled back:"
                " use an attention-only causal language model as the trunk"
            ) from error


def _plane(states: Tensor) -> PlaneShape:
    return PlaneShape(states.shape[1], states.shape[3], states.device, states.dtype)
