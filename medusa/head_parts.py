"""What heads are made of: linear layers, residual blocks, projections, and the bias of the token just before.

They know sizes alone, neither a configuration nor a trunk.

Dimensions: D hidden, R rank, V vocabulary, V' the tokens that heads draft from, W tokens that stood before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer that computes in the precision of its input, whatever its weights are kept in."""

    packs = True  # see medusa.packed

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *like(x, self))


def like(x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the precision of ``x``."""
    weight, bias = linear.weight, linear.bias
    if weight.dtype == x.dtype:  # asked in each step: to convert to the same is not free
        return weight, bias
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


def bare(layer: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What a layer computes for inputs of ``dtype``, without what a module does around it: on a small one that is half.

    The layer itself where there is more to it: hooks, a forward or a call of its own.
    """
    own = "forward" in vars(layer) or type(layer).__call__ is not nn.Module.__call__
    if own or layer._forward_hooks or layer._forward_pre_hooks:
        return layer
    if type(layer) not in (nn.Linear, Linear, LowRank) or layer.weight.dtype != dtype:
        return lambda x: type(layer).forward(layer, x)  # asked each time: what is packed may be unpacked
    weight, bias = layer.weight, layer.bias
    return lambda x: nn.functional.linear(x, weight, bias)


def residual(x: Tensor, read: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
    """What a block makes of its input, by the layer that reads it."""
    return x + nn.functional.silu(linear(read))


class ResBlock(nn.Module):
    """``x + SiLU(W [x; context] + b)`` with W = b = 0 at the start, hence exactly the identity there."""

    def __init__(self, size: int, extra: int = 0) -> None:
        super().__init__()
        self.linear = Linear(size + extra, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        read = x if context is None else torch.cat([x, context], -1)
        return residual(x, read, self.linear)


class LowRank(Linear):
    """A projection in two steps, D to R and R to V': ``down.weight`` [R, D], ``weight`` [V', R], ``bias`` [V']."""

    def __init__(self, hidden: int, rank: int, vocab: int, bias: bool) -> None:
        super().__init__(rank, vocab, bias=bias)
        self.down = Linear(hidden, rank, bias=False)


class Markov(nn.Module):
    """What the token just before adds to logits: its row of ``before`` [V, R] times ``after`` [V', R], of low rank.

    ``after`` is 0 at the start, so nothing is added. ``before`` is as random for every head and in every run: rows of
    length 1 or so, which is what the gradient of ``after`` then is made of.
    """

    def __init__(self, vocab: int, rank: int, choices: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab, rank)
        self.after = Linear(rank, choices, bias=False)
        nn.init.zeros_(self.after.weight)

    @torch.no_grad()
    def start(self) -> None:
        """Draw ``before``, from nothing that a run's other choices depend on."""
        weight = self.before.weight
        drawn_VR = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        weight.copy_(drawn_VR * weight.shape[1] ** -0.5)

    def forward(self, logits: Tensor, before: Tensor) -> Tensor:
        """Logits [.., V'], or the first columns of them -> the same behind the tokens ``before`` [..]."""
        weight = self.after.weight[: logits.shape[-1]].to(logits.dtype)
        read = self.before(before).to(logits.dtype)
        # In one operation: the bias of its own would be as large as the logits.
        flat = torch.addmm(logits.reshape(-1, logits.shape[-1]), read.reshape(-1, read.shape[-1]), weight.T)
        return flat.view(logits.shape)


class Head(nn.Module):
    """Residual blocks of distinct parameters, a projection unless the trunk's is shared, and a bias if there is one."""

    def __init__(
        self, layers: int, hidden: int, extra: int, projection: nn.Linear | None, markov: Markov | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(hidden, extra if layer == 0 else 0) for layer in range(layers))
        self.projection = projection
        self.markov = markov

    @property
    def residuals(self) -> list[ResBlock]:
        """Its blocks, in order."""
        return [block for block in self.blocks if isinstance(block, ResBlock)]

    def forward(self, hidden: Tensor, context: Tensor | None) -> Tensor:
        for block in self.blocks:
            hidden, context = block(hidden, context), None
        return hidden
