"""Medusa heads: extra language-modelling heads on the trunk's last hidden state.

Head k = 0, 1, … at position t reads the state of token t and predicts token t+2+k (the trunk's own head predicts
t+1). Three kinds share one body, residual blocks and a projection, and differ in what the first block reads beside
the state:

* ``medusa`` (Cai et al. 2024, section 2.1.1): nothing;
* ``root``: the embedding of token t+1, which has just been chosen when heads draft, so it costs no extra step;
* ``hydra`` (Ankner et al. 2024): the embeddings of tokens t+1 … t+1+k, those drafted before it.

Dimensions: D hidden, E embedding, K heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medusa.errors import UserError, nearest
from medusa.selfcheck import check_projection
from medusa.trunk import Trunk

KINDS = ("medusa", "root", "hydra")
PROJECTIONS = ("own", "shared")


@dataclass(frozen=True)
class HeadsConfig:
    """What the heads look like.

    Args:
        kind: what a head reads: ``medusa`` the state, ``root`` also the token just chosen, ``hydra`` also the tokens
            drafted before it.
        num: number of heads K, the depth that a tree can have.
        layers: residual blocks per head.
        projection: ``own`` gives each head its own copy of the vocabulary projection to train, ``shared`` uses the
            trunk's.

    Raises:
        UserError: an unknown kind or projection, or a number below 1.
    """

    kind: str = "hydra"
    num: int = 6
    layers: int = 1
    projection: str = "own"

    def __post_init__(self) -> None:
        for name, value, options in (("kind", self.kind, KINDS), ("projection", self.projection, PROJECTIONS)):
            if value not in options:
                raise UserError(f"heads.{name}={value!r}: choose from {', '.join(options)}{nearest(value, options)}")
        for name, number in (("num", self.num), ("layers", self.layers)):
            if number < 1:
                raise UserError(f"heads.{name}={number}: give at least 1")

    def reads(self, head: int) -> int:
        """How many tokens after t head ``head`` reads: t+1 … t+reads."""
        return {"medusa": 0, "root": 1, "hydra": head + 1}[self.kind]


class ResBlock(nn.Module):
    """``x + SiLU(W [x; context] + b)`` with W = b = 0 at the start, hence exactly the identity there."""

    def __init__(self, size: int, extra: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(size + extra, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        read = x if context is None else torch.cat([x, context], -1)
        return x + nn.functional.silu(self.linear(read))


class Head(nn.Module):
    """Residual blocks of distinct parameters, and a projection unless the trunk's is shared."""

    def __init__(self, layers: int, hidden: int, extra: int, vocab: int | None, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(hidden, extra if layer == 0 else 0) for layer in range(layers))
        self.projection = nn.Linear(hidden, vocab, bias=bias) if vocab is not None else None

    def forward(self, hidden: Tensor, context: Tensor | None) -> Tensor:
        for block in self.blocks:
            hidden, context = block(hidden, context), None
        return hidden


class MedusaHeads(nn.Module):
    """K heads bound to a trunk, whose embedding and projection they use but neither own, save nor train."""

    def __init__(self, config: HeadsConfig, trunk: Trunk) -> None:
        super().__init__()
        check_projection(trunk)
        self.config = config
        self._trunk = (trunk,)  # in a tuple: a module attribute would be registered and saved
        output = trunk.model.get_output_embeddings()
        extra = trunk.embed(torch.zeros(1, dtype=torch.long, device=trunk.device)).shape[-1]
        self.heads = nn.ModuleList()
        for head in range(config.num):
            vocab = trunk.vocab_size if config.projection == "own" else None
            made = Head(config.layers, trunk.hidden_size, extra * config.reads(head), vocab, output.bias is not None)
            made.to(output.weight.device, trunk.dtype)  # before copying: a detour by fp32 would round fp64 weights
            if made.projection is not None:
                made.projection.weight.data.copy_(output.weight)  # a head starts as the trunk's own
                if output.bias is not None:
                    made.projection.bias.data.copy_(output.bias)
            self.heads.append(made)

    @property
    def trunk(self) -> Trunk:
        """The trunk these heads draft for."""
        return self._trunk[0]

    def head(self, index: int) -> Head:
        """Head ``index``, 0 for the nearest token."""
        head = self.heads[index]
        assert isinstance(head, Head)
        return head

    def features(self, head: int, hidden: Tensor, context: Tensor | None) -> Tensor:
        """State [.., D] -> the head's own state [.., D].

        ``context`` [.., reads * E] holds the embeddings of the tokens after t that the head reads, in order; None for
        a head that reads none.
        """
        return self.head(head)(hidden, context)

    def logits(self, head: int, features: Tensor) -> Tensor:
        """Features [.., D] -> logits [.., V], with the trunk's own scale and softcap."""
        projection = self.head(head).projection
        if projection is None:
            return self.trunk.project(features)
        return self.trunk.project(features, projection.weight, projection.bias)

    def context(self, head: int, embedded: Tensor) -> Tensor | None:
        """Flatten embeddings [.., n, E] of the tokens t+1 … t+n, n >= reads, to what head ``head`` reads."""
        reads = self.config.reads(head)
        return embedded[..., :reads, :].flatten(-2) if reads else None

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [.., E] as heads read them: the trunk's, each scaled to a root mean square of 1.

        A trunk's raw embeddings are often a hundred times smaller than its states, and would be learnt slowly beside
        them.
        """
        embedded = self.trunk.embed(ids)
        return nn.functional.rms_norm(embedded, embedded.shape[-1:])

    def draftable(self, logits: Tensor) -> Tensor:
        """Logits without the vocabulary rows that the tokenizer lacks: [.., V] -> [.., draftable]."""
        return logits[..., : self.trunk.draftable]
