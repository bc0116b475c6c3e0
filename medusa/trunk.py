"""The trunk: any Hugging Face causal language model, frozen, driven with token trees.

One of the files that know transformers' models. No modelling code is forked: a tree is verified through a 4-D
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
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedTokenizerBase

from medusa.cache import LayerShape, PlaneShape, SlotCache, StepCache
from medusa.compiled import CompiledSteps
from medusa.errors import UserError
from medusa.family import Scaling, context, refuse_by_config, text_config, turning_point, windows
from medusa.fingerprint import fingerprint
from medusa.folded import copies_in, fold_mask, settle
from medusa.loading import load_model
from medusa.mask import attention_bias, positions
from medusa.packed import settle_products
from medusa.prefill import prefill
from medusa.selfcheck import check_tree, projects_directly
from medusa.tree import DraftTree


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
        self.family: str = model.config.model_type
        parameters = inspect.signature(model.forward).parameters
        stateful = bool(getattr(model, "_is_stateful", False))
        refuse_by_config(self.family, model.config, "position_ids" in parameters, stateful)
        self.config = text_config(model.config)
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        if self._head is None:
            raise UserError(f"model type {self.family!r} has no language-modelling head: give a causal language model")
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps = "logits_to_keep" in parameters
        self._by_type = getattr(self.config, "layer_types", None) is not None
        self.dtype: torch.dtype = model.dtype
        self.windows = windows(self.config)
        self.scaled = Scaling.of(self.config)
        self.context = context(self.config)
        self._turning_point, self._turns_on = turning_point(self.config)
        self._body: Any = None
        self.compiled: CompiledSteps | None = None  # set by who wants tree steps compiled
        self.copies = copies_in(self.config)
        self.layers = self._find_layers()
        if projects_directly(self):
            self._body = model.base_model
        if check:
            check_tree(self)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        check: bool = True,
        adapter: str | Path | None = None,
        packed: bool | None = None,
        **options: Any,
    ) -> Trunk:
        """Load a folder or hub id with its tokenizer.

        ``adapter``: a folder or hub id of a peft adapter to put on it (LoRA and its kin); a folder that holds an
        adapter alone brings its base. The adapter's weights stay beside the model's, so heads made for the base fit,
        and what is decoded is the adapted model's text. ``options`` go to ``from_pretrained``:
        ``quantization_config``, ``gguf_file``, ``device_map``, ``attn_implementation``, ``trust_remote_code``,
        ``subfolder``, ``token`` and so on. With a ``device_map`` the model stays where that puts it. ``packed``: have a
        copy of the weights packed for few rows (:mod:`medusa.packed`); None where that is faster and memory allows.

        Raises:
            UserError: nothing there, broken or incomplete files, or a kind of model that can't be a trunk.
        """
        model, tokenizer = load_model(
            name, dtype=dtype, device=device, revision=revision, adapter=adapter, options=options
        )
        trunk = cls(model, tokenizer, check=False)
        settle_products(model, packed)
        return settle(trunk, choose="attn_implementation" not in options) if check else trunk

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        at: torch.device = self._embedding.weight.device
        if at.type == "meta":  # offloaded: fetched to where it works for each forward
            return torch.device(self._embedding._hf_hook.execution_device)
        return at

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
    def embedding_values(self) -> int:
        """Numbers in the input embedding."""
        return self._embedding.weight.numel()

    def horizon(self, length: int) -> int | None:
        """The position that a text of ``length`` tokens may not reach; None if there is no limit.

        Where rotary frequencies depend on a forward's largest position, what is cached on one side of that change is
        wrong on the other: a text that begins before it ends there.
        """
        if self._turning_point is not None and (length <= self._turning_point or self._turns_on):
            return self._turning_point
        return self.context

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text, by the model's own generation config."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def fingerprint(self) -> str:
        """Identity of the source weights, the same for any dtype, quantisation or adapter they are loaded with."""
        return fingerprint(self.model)

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache for ``rows`` rows."""
        return SlotCache(self.layers, rows)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of ``ids``: [.., D_in]."""
        return self._embedding(ids)

    def project(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Logits of states [.., D], through the trunk's own projection or one of the same form.

        Applies what the trunk does after it. Whether that is the trunk's own path is what ``check_projection`` tells.
        """
        return self.scaled(self._head(hidden) if weight is None else linear(hidden, weight, bias))

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
        """One forward of the unmodified model, without gradients.

        ``keep``: 0 for the logits of all positions, n for the last n, or the indices along T. ``layers``: whose
        output states to return as well (0 is the embedding).

        Where the model's logits were found to be, to the bit, the projection of its body's last state, the body is
        called and projected here; elsewhere the whole model is called, and asked for its hidden states. A step over a
        tree of a size that is compiled runs compiled.
        """
        whole = isinstance(keep, int) and keep == 0
        if self.compiled is not None and cache is not None and positions_BT is not None and whole:
            size = self.compiled.size_for(ids_BT.shape[0], ids_BT.shape[1], layers)
            if size is not None:
                return TrunkOutput(*self.compiled(size, ids_BT, cache, mask, positions_BT, layers))
        return self.forward_with_gradients(ids_BT, cache, mask, positions_BT, keep, layers)

    def forward_with_gradients(
        self,
        ids_BT: Tensor,
        cache: SlotCache | StepCache | None = None,
        mask: Tensor | dict[str, Tensor | None] | None = None,
        positions_BT: Tensor | None = None,
        keep: int | Tensor = 0,
        layers: Sequence[int] = (),
    ) -> TrunkOutput:
        """:meth:`forward` for training an adapter on the model, which alone can get gradients: the model is frozen."""
        arguments = self.arguments(ids_BT, cache, mask, positions_BT)
        if self._body is not None:
            collect = {"output_hidden_states": True} if layers else {}
            output = self._body(**arguments, **collect)
            hidden, states = output.last_hidden_state, tuple(output.hidden_states[layer] for layer in layers)
            return TrunkOutput(self.project(_keep(hidden, keep)), hidden, states)
        if self._keeps:
            arguments["logits_to_keep"] = keep
        output = self.model(output_hidden_states=True, **arguments)
        logits = output.logits if self._keeps else _keep(output.logits, keep)
        states = output.hidden_states
        return TrunkOutput(logits, states[-1], tuple(states[layer] for layer in layers))

    def arguments(
        self,
        ids_BT: Tensor,
        cache: Any = None,
        mask: Tensor | dict[str, Tensor | None] | None = None,
        positions_BT: Tensor | None = None,
    ) -> dict[str, Any]:
        """What the model's forward is called with, by this family's own names."""
        mask = fold_mask(mask, self.copies)
        given: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask, "use_cache": cache is not None}
        if cache is not None:
            given[self._cache_name] = cache
        if positions_BT is not None:
            given["position_ids"] = positions_BT
        return given | {"return_dict": True}

    def prefill(
        self, ids_BT: Tensor, lengths: Sequence[int], cache: SlotCache, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, TrunkOutput]:
        """Read right-padded texts, ``lengths`` tokens of each, behind what the rows hold: nothing, or their beginning.

        Returns the logits [B, V] and state [B, D] of each row's last real token, and an output whose ``hidden``, and
        ``states`` of the ``layers`` asked for, cover all of ``ids_BT``.
        """
        return prefill(self, ids_BT, lengths, cache, layers)

    def tree_forward(
        self, tree: DraftTree, cache: SlotCache, keep: int | Tensor = 0, known: int = 0, layers: Sequence[int] = ()
    ) -> TrunkOutput:
        """Score every node of every row's tree in one forward: logits [B, N, V], hidden [B, N, D].

        ``keep`` and ``layers``: as :meth:`forward` has them. The first ``known`` nodes lie behind the rows already:
        they are looked at and not read again, and the output is of the others. No row's length changes.
        """
        shape, lengths = tree.shape, cache.lengths
        if known:
            cache.set_lengths([length + known for length in lengths])
        total = cache.reserve(tree.size - known)
        masks = {
            kind: attention_bias(shape, lengths, total, self.dtype, window, known)
            for kind, window in self.windows.items()
        }
        mask = masks if self._by_type else masks["full_attention"]
        positions_BN = positions(shape, lengths, self.horizon(max(lengths)))  # rows that live lie on one side of that
        if not known:  # the usual step, without two views
            return self.forward(tree.tokens_BN, cache, mask, positions_BN, keep, layers)
        output = self.forward(tree.tokens_BN[:, known:], cache, mask, positions_BN[:, known:], keep, layers)
        cache.set_lengths(lengths)
        return output

    @torch.no_grad()
    def _find_layers(self) -> list[LayerShape]:
        """Read the shape of every layer's keys and values off a forward of one token."""
        probe = DynamicCache(config=self.config)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            output = self.model(**self.arguments(ids, probe))
            held = getattr(output, self._cache_name)
            return [LayerShape(PlaneShape.of(layer.keys), PlaneShape.of(layer.values)) for layer in held.layers]
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"model type {self.family!r} keeps no plain key/value cache, so a rejected draft can't be rolled back:"
                " use an attention-only causal language model as the trunk"
            ) from error


def _keep(values_BT: Tensor, keep: int | Tensor) -> Tensor:
    """The columns that ``keep`` names: 0 for all, n for the last n, or indices."""
    if isinstance(keep, int):
        return values_BT[:, -keep:] if keep else values_BT
    return values_BT[:, keep]
