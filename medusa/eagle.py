"""The EAGLE layer: one small decoder layer that guesses the next state, and by it the next token, from what it reads.

Papers: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).

The layer reads *pairs*. Pair s is the trunk's feature of token s and the embedding of token s+1; its state yields the
logits of token s+2, as head 0's does. While drafting, the pair behind it takes that state in place of the trunk's
feature, which is not there yet, and so on, level by level. Slot s of the layer's own cache is pair s, at position s.

* Version 1 (also EAGLE-2's): the feature is the trunk's last state; the state is projected by the trunk itself.
* Version 3: features are states of several of the trunk's layers, fused; own norm and vocabulary projection, perhaps of
  the most frequent tokens alone (:mod:`medusa.vocabulary`).

Dimensions: B batch, T pairs, D hidden, F features, V vocabulary, V' the tokens that the layer drafts from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from medusa.bound import Bound
from medusa.cache import LayerShape, PlaneShape, SlotCache
from medusa.eagle_block import THETA, Body, EagleSizes, Passes, RMSNorm, attend_to
from medusa.errors import UserError
from medusa.head_parts import Linear
from medusa.trunk import Trunk, TrunkOutput

VERSIONS = (1, 3)
PUBLISHED_FROM = 7  # layers from which the fused ones can be those of the paper


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE layer looks like.

    Args:
        version: 1 reads the trunk's last state and uses its vocabulary projection, as EAGLE and EAGLE-2 do; 3 fuses
            the states of several layers and has a projection of its own.
        vocab: how many tokens the layer drafts from, the most frequent ones of the training text; null takes all.
        layers: which of the trunk's states version 3 fuses, 1 the first layer's output; null takes one early, one in
            the middle and one late.

    Raises:
        UserError: another version, a number below 1, or layers for version 1.
    """

    version: int = 3
    vocab: int | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise UserError(f"eagle.version={self.version!r}: choose 1, which EAGLE-2 drafts with too, or 3")
        if self.vocab is not None and self.vocab < 1:
            raise UserError(f"eagle.vocab={self.vocab}: give at least 1, or null for all tokens")
        if self.layers is None:
            return
        object.__setattr__(self, "layers", tuple(self.layers))  # YAML and JSON have lists
        if self.version == 1:
            raise UserError(f"eagle.layers={list(self.layers)}: version 1 reads the last state alone; leave layers out")
        if not self.layers or min(self.layers) < 1 or len(set(self.layers)) < len(self.layers):
            raise UserError(f"eagle.layers={list(self.layers)}: give each layer once, 1 for the first")


def fused_layers(config: EagleConfig, total: int) -> tuple[int, ...]:
    """The states that a layer fuses on a trunk of ``total`` layers, as :meth:`Trunk.forward` takes their numbers.

    By default those of the paper's own code (2, the middle, the third from the end) where they differ, else the
    first, the middle and the last. None for version 1.

    Raises:
        UserError: layers that the trunk lacks.
    """
    if config.version == 1:
        return ()
    if config.layers is not None:
        if max(config.layers) > total:
            raise UserError(f"eagle.layers={list(config.layers)}: the trunk has {total} layers; give 1 to {total}")
        return config.layers
    if total >= PUBLISHED_FROM:
        return 2, total // 2, total - 3
    return tuple(sorted({1, (total + 1) // 2, total}))


def eagle_sizes(config: EagleConfig, trunk: Trunk) -> EagleSizes:
    """Those of a new layer: the heads, their size and the inner size that the trunk's layers have."""
    own, hidden = trunk.config, trunk.hidden_size
    heads = own.num_attention_heads
    size = getattr(own, "head_dim", None) or hidden // heads
    inner = getattr(own, "intermediate_size", None)
    rope = getattr(own, "rope_parameters", None) or {}
    return EagleSizes(
        hidden=hidden,
        embedding=trunk.embed(torch.zeros(1, dtype=torch.long, device=trunk.device)).shape[-1],
        heads=heads,
        kv_heads=getattr(own, "num_key_value_heads", None) or heads,
        head_size=size,
        inner=inner if isinstance(inner, int) else -(-hidden * 8 // 3 // 8) * 8,
        fused=len(fused_layers(config, own.num_hidden_layers)) * own.hidden_size,
        rope={"rope_type": "default", "rope_theta": rope.get("rope_theta") or THETA},
    )


class EagleLayer(Bound):
    """A layer bound to a trunk, whose embedding it uses, and in version 1 its projection, but neither owns nor saves.

    A new layer guesses what the trunk itself does, one token late: in version 1 exactly.

    Args:
        config: what it looks like.
        trunk: whose it is.
        draft_ids: the ``config.vocab`` tokens to draft from (see :func:`medusa.vocabulary.draft_vocabulary`).
        sizes: of its tensors; left out, they are made by the trunk's (:func:`eagle_sizes`).
        initialise: False leaves weights as they come, for those that are loaded next.
        dtype: what its weights are kept in; None for the trunk's. It computes in the precision of what it reads, which
            is the trunk's: a wider one is for training, where half precision would round small updates away.
        seed: of the random part of a new layer.

    Raises:
        UserError: a trunk whose projection can't be repeated, draft ids that are missing, wrong or not asked for, or
            layers or sizes that the trunk lacks.
    """

    def __init__(
        self,
        config: EagleConfig,
        trunk: Trunk,
        draft_ids: Tensor | None = None,
        *,
        sizes: EagleSizes | None = None,
        initialise: bool = True,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(trunk, draft_ids, config.vocab, "eagle.vocab")
        self.config = config
        self.layers = fused_layers(config, trunk.config.num_hidden_layers)
        self.sizes = _fitting(sizes, eagle_sizes(config, trunk))
        device, kept = trunk.device, dtype or trunk.dtype
        self.body = Body(self.sizes, config.version).to(device, kept)
        self.norm: RMSNorm | None = None
        self.lm_head: nn.Linear | None = None
        weight, bias = self.projection_rows()
        if config.version == 3:
            self.norm = RMSNorm(self.sizes.hidden, self.sizes.eps).to(device, kept)
            self.lm_head = Linear(self.sizes.hidden, len(weight), bias=bias is not None).to(device, kept)
        elif self.draft_ids is not None:
            self.share(weight, bias)
        if initialise:
            self.body.start(torch.Generator().manual_seed(seed))
            if self.lm_head is not None:
                self.lm_head.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))

    def features(self, output: TrunkOutput) -> Tensor:
        """What pairs read of a forward that returned the states of :attr:`layers`: [B, T, F], in version 1 F is D."""
        if self.config.version == 1:
            return output.hidden
        assert len(output.states) == len(self.layers), "the trunk was not asked for the states of these layers"
        return torch.cat(output.states, -1)

    def fuse(self, features: Tensor) -> Tensor:
        """Features [.., F] of true pairs -> hidden [.., D], as :meth:`read` takes it. Version 1 takes them as they are.

        A drafted pair takes the state of the pair before it, which is not fused.
        """
        return features if self.config.version == 1 else self.body.fc(features)

    @torch.no_grad()
    def read(
        self, ids_BT: Tensor, hidden_BTD: Tensor, positions_BT: Tensor, mask: Tensor | None, cache: SlotCache
    ) -> Tensor:
        """Read pairs into the cache, which has reserved room for them, and return their states [B, T, D].

        ``ids_BT``: the later token of each pair. ``hidden_BTD``: its fused features, or the state of the pair before.
        ``mask``: additive, [B|1, 1, T, slots in view]; None for a plain text in an empty cache, or one pair that sees
        all that is in view.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_to(*cache.update(k, v, 0), q, mask)

        end = cache.longest + ids_BT.shape[1]  # a pair stands at its slot, or before it where others branch off
        return self.body(self.embed(ids_BT, hidden_BTD), hidden_BTD, positions_BT, end, attend)

    def logits(self, state: Tensor) -> Tensor:
        """States [.., D] -> logits [.., V'], with the trunk's own scale and softcap. :meth:`tokens` names them."""
        return self.projected(state if self.norm is None else self.norm(state), self.lm_head)

    def embed(self, ids: Tensor, beside: Tensor) -> Tensor:
        """The trunk's embeddings [.., E] of ``ids``, where ``beside`` is and in its precision."""
        return self.trunk.embed(ids.to(self.trunk.device)).to(beside)

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache of pairs for ``rows`` rows."""
        plane = PlaneShape(self.sizes.kv_heads, self.sizes.head_size, self.trunk.device, self.trunk.dtype)
        return SlotCache([LayerShape(plane, plane)], rows)

    def unroll(
        self, ids_BT: Tensor, features_BTF: Tensor, depth: int, segments_BT: Tensor | None = None
    ) -> list[Tensor]:
        """The states of ``depth`` passes, each [B, T-1, D], as drafting along the text itself would get them.

        ``ids_BT`` are the rows' tokens and ``features_BTF`` the trunk's of each; ``segments_BT`` tells the texts of a
        row apart. Pass 0 reads true pairs alone. Pass j reads at pair u the state of pass j-1 at u-1 in place of the
        feature, and sees what a draft j tokens deep sees: true pairs up to u-j, and those drafted from there
        (EAGLE-3, section 3.2). Its state there yields the logits of token u+2, drafted at depth j+1 when u-j+1 was the
        root: there is none for u < j, nor where token u-j is of another text than token u+2, and what stands there has
        no meaning. Features may be noised before (EAGLE, section 4.1). Gradients flow through all passes.
        """
        pairs = ids_BT.shape[1] - 1
        positions_BT = torch.arange(pairs, device=ids_BT.device)[None]
        passes = Passes(pairs, ids_BT.device, None if segments_BT is None else segments_BT[:, :-1])
        embedded_BTE = self.embed(ids_BT[:, 1:], features_BTF)
        hidden_BTD = self.fuse(features_BTF[:, :-1])
        states: list[Tensor] = []
        for _ in range(depth):
            states.append(self.body(embedded_BTE, hidden_BTD, positions_BT, pairs, passes))
            hidden_BTD = pad(states[-1], (0, 0, 1, 0))[:, :-1]  # of the pair before
        return states


def _fitting(sizes: EagleSizes | None, own: EagleSizes) -> EagleSizes:
    """The sizes asked for. UserError if they are not of what a trunk with sizes of its ``own`` gives."""
    for name in ("hidden", "embedding", "fused"):
        if sizes is not None and getattr(sizes, name) != getattr(own, name):
            raise UserError(
                f"an EAGLE layer of {name} size {getattr(sizes, name)}, and the trunk's is {getattr(own, name)}: give a"
                " layer that was trained for this trunk"
            )
    return sizes or own
