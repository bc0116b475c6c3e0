"""From logits to the law that is sampled, and the draws from it.

Temperature 0 is the one-hot limit of sampling: :func:`to_probs` returns one-hot laws there, so that one acceptance
theorem serves greedy decoding and sampling alike.

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from medusa.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How one row's next token is chosen from the trunk's logits.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
        seed: the row's own seed: the same seed gives the same tokens in any batch.

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1] (1 keeps all)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1) (0 keeps all)"),
            "seed": (0 <= self.seed < 1 << 63, "in 0..2**63-1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UserError(f"{name}={getattr(self, name)}: it must be {rule}")


def to_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each node's law: ``logits`` [B, N, V] -> probabilities of the same shape, one-hot where temperature is 0.

    The filters act in the order of Hugging Face's warpers: temperature, top-k, top-p, min-p.
    """
    greedy = [param.temperature == 0 for param in params]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # sums of half-precision laws are far off
    if all(greedy):
        return _one_hot(logits)
    laws = torch.empty_like(logits)
    for row, param in enumerate(params):
        laws[row] = _one_hot(logits[row]) if greedy[row] else _soft(logits[row], param)
    return laws


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _soft(logits: Tensor, param: SamplingParams) -> Tensor:
    logits = (logits - logits.amax(-1, keepdim=True)) / param.temperature  # at most 0: nothing overflows to inf
    if 0 < param.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(param.top_k).values[..., -1:], -torch.inf)
    if param.top_p < 1:
        ascending, order = logits.sort(-1)
        below = ascending.softmax(-1).cumsum(-1) <= 1 - param.top_p
        below[..., -1] = False  # the most likely token always stays
        logits = logits.masked_fill(below.scatter(-1, order, below), -torch.inf)
    if param.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < param.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.softmax(-1)


class Draws(Protocol):
    """Where randomness comes from: uniform numbers keyed by what they are for, never by the order of calls."""

    def uniform(self, seed_B: Tensor, position_BN: Tensor, purpose: int) -> Tensor:
        """Uniform numbers in [0, 1), float64 [B, N], for the row's seed, the token's position and the purpose."""
        ...


TOKEN = 0  # purpose: the choice of the token that follows a position
_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64


class HashDraws:
    """Counter-based uniforms (splitmix64 finaliser; Steele, Lea and Flood, 2014): vectorised, on the device.

    A row of a batch gets the same numbers as when it runs alone, which no stream of a ``torch.Generator`` can give.
    """

    def uniform(self, seed_B: Tensor, position_BN: Tensor, purpose: int) -> Tensor:
        state = _mix(seed_B.long()[:, None] * _GOLDEN + purpose)
        bits = _mix(state + (position_BN.long() + 1) * _GOLDEN)
        return ((bits >> 11) & ((1 << 53) - 1)).double() / (1 << 53)  # 53 bits fill a double's mantissa


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # logical shift: int64's own is arithmetic


def draw(probs_BNV: Tensor, uniform_BN: Tensor) -> Tensor:
    """Draw one token per node by inverting the cumulative law: int64 [B, N].

    A token of probability 0 is never drawn: the comparison is strict, and the target stays below the sum reached.
    """
    cumulative = probs_BNV.double().cumsum(-1)
    total = cumulative[..., -1:]
    target = torch.minimum(uniform_BN[..., None] * total, total.nextafter(torch.zeros_like(total)))  # < total
    return (cumulative <= target).sum(-1)


class Laws:
    """The laws of the token after each node, and the trunk's own draws from them; nothing is computed unasked.

    Args:
        logits_BNV: the trunk's logits.
        params: how each row is sampled.
        uniform: gives the uniforms [B, N] of each node's position for a purpose; not asked while all rows are greedy.
    """

    def __init__(
        self, logits_BNV: Tensor, params: Sequence[SamplingParams], uniform: Callable[[int], Tensor] | None = None
    ) -> None:
        self._logits_BNV = logits_BNV
        self._params = params
        self.uniform = uniform
        self.greedy = all(param.temperature == 0 for param in params)

    @classmethod
    def given(cls, p_BNV: Tensor, uniform_BN: Tensor | None = None) -> Laws:
        """Laws that are known, with one set of uniforms for every purpose; one-hot ones need none."""
        laws = cls(p_BNV, [SamplingParams() if uniform_BN is None else SamplingParams(temperature=1.0)] * len(p_BNV))
        laws.uniform = None if uniform_BN is None else lambda purpose: uniform_BN
        laws.__dict__["p_BNV"] = p_BNV
        return laws

    @cached_property
    def p_BNV(self) -> Tensor:
        """Probabilities after temperature and filters, one-hot in greedy rows."""
        return to_probs(self._logits_BNV, self._params)

    @cached_property
    def choice_BN(self) -> Tensor:
        """The trunk's own token after each node: a draw of its law, int64 [B, N]."""
        if self.greedy:
            return self._logits_BNV.argmax(-1)
        assert self.uniform is not None
        return draw(self.p_BNV, self.uniform(TOKEN))
