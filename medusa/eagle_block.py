"""The parts of an EAGLE layer: one decoder layer of the Llama kind, whatever the trunk's family is.

The papers' own layers are of this kind for every trunk (Li et al. 2024, EAGLE, section 4.1; EAGLE-3, section 3.1), and
published weights are. So a layer attends fully and by rotary positions, even where the trunk has windows or learned
positions: it guesses, and what it lacks costs acceptance alone.

Dimensions: B batch, T pairs, H query heads, h key and value heads, G = H / h, S head size, D hidden, F fused features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medusa.errors import UserError
from medusa.head_parts import Linear

THETA = 10000.0  # the base of rotary frequencies where the trunk has none
# Frequencies that do not depend on how long the text is: what is cached stays right.
ROPES = ("default", "linear", "llama3", "yarn")

# New queries [B, H, T, S], keys and values [B, h, T, S] -> what each query gathers from all that it sees: [B, H, T, S].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class EagleSizes:
    """What a layer's tensors look like.

    ``bare``: without norms on what it reads and on the way out, as EAGLE-1 was published. ``fused``: numbers in the
    fused features F, 0 where a layer reads the trunk's last state. ``rope``: the rotary frequencies, as transformers'
    configs have them.
    """

    hidden: int
    embedding: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    fused: int = 0
    eps: float = 1e-6
    bare: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": THETA})

    def __post_init__(self) -> None:
        if self.head_size % 2 or self.heads % self.kv_heads:
            raise UserError(
                f"an EAGLE layer of {self.heads} heads of size {self.head_size} and {self.kv_heads} key and value heads"
                " can't be made: the size must be even, and the first number a multiple of the second"
            )
        if self.rope.get("rope_type", "default") not in ROPES:
            raise UserError(
                f"rotary frequencies of type {self.rope['rope_type']!r} change with the length of the text: an EAGLE"
                f" layer takes {', '.join(ROPES)}"
            )

    def as_json(self) -> dict[str, Any]:
        """For ``eagle.json``."""
        return asdict(self) | {"rope": dict(self.rope)}


class RMSNorm(nn.Module):
    """Root-mean-square norm that computes in the precision of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Queries, keys and values of what is read; the gathered values' projection."""

    def __init__(self, reads: int, sizes: EagleSizes) -> None:
        super().__init__()
        self.size, bias = sizes.head_size, sizes.qkv_bias
        self.q_proj = Linear(reads, sizes.heads * sizes.head_size, bias=bias)
        self.k_proj = Linear(reads, sizes.kv_heads * sizes.head_size, bias=bias)
        self.v_proj = Linear(reads, sizes.kv_heads * sizes.head_size, bias=bias)
        self.o_proj = Linear(sizes.heads * sizes.head_size, sizes.hidden, bias=False)

    def forward(self, read_BTD: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        parts = (each(read_BTD) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        gathered = attend(_turned(q, *turn), _turned(k, *turn), v)
        return self.o_proj(gathered.transpose(1, 2).flatten(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), the halves of a head as pairs, as Llama has them."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class Rotary:
    """Cosines and sines of positions, from a table that grows with the texts: of a step little is left to compute.

    No module: the frequencies stay in fp32 whatever a layer is cast to. The table alone is kept, so threads don't meet.
    """

    def __init__(self, sizes: EagleSizes) -> None:
        config = LlamaConfig(
            hidden_size=sizes.hidden,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_size,
            rope_parameters=dict(sizes.rope),
        )
        self._table = LlamaRotaryEmbedding(config)
        self._known: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions_BT: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, S] in the precision of ``like``, for positions below ``end``."""
        known = self._known
        if known is None or len(known[0]) < end or known[0].dtype != like.dtype or known[0].device != like.device:
            with torch.inference_mode(False):  # or it could not be trained with
                every_1P = torch.arange(max(512, 1 << end.bit_length()), device=like.device)[None]
                cos_1PS, sin_1PS = self._table(torch.empty(0, dtype=like.dtype, device=like.device), every_1P)
            known = self._known = (cos_1PS[0], sin_1PS[0])
        return known[0][positions_BT], known[1][positions_BT]


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__()
        self.gate_proj = Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """The decoder layer. Of version 3 it reads [embedding; hidden], each normed, and adds to the hidden state."""

    def __init__(self, sizes: EagleSizes, wide: bool) -> None:
        super().__init__()
        self.self_attn = Attention(sizes.hidden + (sizes.embedding if wide else 0), sizes)
        self.mlp = MLP(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.input_layernorm = RMSNorm(sizes.embedding, sizes.eps) if wide else _norm(sizes)
        self.hidden_norm = RMSNorm(sizes.hidden, sizes.eps) if wide else None

    def forward(self, hidden: Tensor, embedded: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        if self.hidden_norm is not None:
            read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        else:
            read = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(read, turn, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _norm(sizes: EagleSizes, size: int | None = None) -> nn.Module:
    return nn.Identity() if sizes.bare else RMSNorm(size or sizes.hidden, sizes.eps)


class Body(nn.Module):
    """All of a layer but its vocabulary: what makes a pair's state of the embedding and the hidden state."""

    def __init__(self, sizes: EagleSizes, version: int) -> None:
        super().__init__()
        self.fc = Linear(sizes.fused or sizes.embedding + sizes.hidden, sizes.hidden, bias=sizes.fc_bias)
        self.embed_norm = _norm(sizes, sizes.embedding) if version == 1 else None
        self.layer = Block(sizes, wide=version == 3)
        self._rotary = Rotary(sizes)

    def forward(
        self, embedded_BTE: Tensor, hidden_BTD: Tensor, positions_BT: Tensor, end: int, attend: Attend
    ) -> Tensor:
        """States [B, T, D] of pairs at ``positions_BT``, all below ``end``."""
        turn = self._rotary(positions_BT, end, hidden_BTD)
        if self.embed_norm is not None:
            hidden_BTD = self.fc(torch.cat([self.embed_norm(embedded_BTE), hidden_BTD], -1))
        return self.layer(hidden_BTD, embedded_BTE, turn, attend)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """Start as the identity: the state is the hidden one that is read, of fused features the last part.

        So the first guesses are the trunk's own of one token before, as new heads' are. Zero are the projections into
        the residual stream alone, which learn from the first step on.
        """
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.copy_(noise * weight.shape[1] ** -0.5)
        for back in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            back.weight.zero_()
        size = self.fc.weight.shape[0]
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)


def attend_to(keys: Tensor, values: Tensor, queries: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of ``queries`` [B, H, T, S] to all in view, by an additive mask [B|1, 1, T, slots].

    Without one it is causal, and a single query sees all. Under a mask, query heads that share keys are laid behind
    each other, for which nothing but the mask is copied.
    """
    rows, heads, pairs, size = queries.shape
    groups = heads // keys.shape[1]
    if bias is None and pairs > 1:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=groups > 1)
    folded = queries.reshape(rows, -1, groups * pairs, size)
    if bias is not None:
        bias = bias.repeat(1, 1, groups, 1) if groups > 1 else bias
    return scaled_dot_product_attention(folded, keys, values, attn_mask=bias).reshape(queries.shape)


class Passes:
    """What the queries of one pass after another see, all positions at once (EAGLE-3, section 3.2, "training-time
    test"; Zhang et al. 2025, HASS, section 3.2).

    In pass j query u stands for a pair j tokens behind the last true one, so it sees the true pairs s <= u - j, and of
    every pass i = 1 .. j the pair at u - j + i, on the way from there to it, alone: j numbers beside a matrix of T x T
    scores, instead of j more matrices.

    ``segments_BT``: where rows hold several texts, which; nobody sees another one.
    """

    def __init__(self, pairs: int, device: torch.device, segments_BT: Tensor | None = None) -> None:
        self.behind_TT = torch.arange(pairs, device=device)[:, None] - torch.arange(pairs, device=device)
        self.same_BTT = None if segments_BT is None else segments_BT[:, :, None] == segments_BT[:, None]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One more pass."""
        depth = len(self.keys)
        self.keys.append(k)
        self.values.append(v)
        seen_BTT = (self.behind_TT >= depth)[None]
        if self.same_BTT is not None:
            seen_BTT = seen_BTT & self.same_BTT
        q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # [B, h, G, T, S]
        scores = (q @ self.keys[0][:, :, None].mT).masked_fill(~seen_BTT[:, None, None], torch.finfo(q.dtype).min)
        own = [(q * _behind(self.keys[i], depth - i)[:, :, None]).sum(-1, keepdim=True) for i in range(1, depth + 1)]
        scores = torch.cat([scores, *own], -1)
        shares = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        pairs = shares.shape[-1] - depth
        gathered = shares[..., :pairs] @ self.values[0][:, :, None]
        for i in range(1, depth + 1):
            column = shares[..., pairs + i - 1 : pairs + i]
            gathered = gathered + column * _behind(self.values[i], depth - i)[:, :, None]
        return gathered.flatten(1, 2)


def _behind(x: Tensor, places: int) -> Tensor:
    """[B, h, T, S] -> at place u what stood ``places`` before it, zeros where there is none."""
    return pad(x, (0, 0, places, 0))[:, :, : x.shape[2]] if places else x
