"""From logits to the law that is sampled, and the draws from it.

Temperature 0 is the one-hot limit of sampling: :func:`to_probs` returns one-hot laws there, so that one acceptance
theorem serves greedy decoding and sampling alike.

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from medusa import filters
from medusa.errors import UserError
from medusa.largest import largest
from medusa.uploads import upload


@dataclass(frozen=True)
class SamplingParams:
    """How one row's next token is chosen from the trunk's logits.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
        top_h: keep most likely tokens up to this share of the entropy (Top-H decoding); 0 keeps all.
        typical_p: keep tokens of typical surprise whose mass reaches p; 1 keeps all.
        epsilon_cutoff: keep tokens at least so likely; 0 keeps all.
        eta_cutoff: the same, with less asked where the entropy is high; 0 keeps all.
        seed: the row's own seed: the same seed gives the same tokens in any batch.

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_h: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1] (1 keeps all)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1) (0 keeps all)"),
            "top_h": (0 <= self.top_h <= 1, "in [0, 1] (0 keeps all)"),
            "typical_p": (0 < self.typical_p <= 1, "in (0, 1] (1 keeps all)"),
            "epsilon_cutoff": (0 <= self.epsilon_cutoff < 1, "in [0, 1) (0 keeps all)"),
            "eta_cutoff": (0 <= self.eta_cutoff < 1, "in [0, 1) (0 keeps all)"),
            "seed": (0 <= self.seed < 1 << 63, "in 0..2**63-1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UserError(f"{name}={getattr(self, name)}: it must be {rule}")

    @cached_property
    def law(self) -> SamplingParams:
        """The same without what does not change a law: two rows that agree in this are treated as one."""
        return replace(self, seed=0) if self.seed else self


def to_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return each node's law: ``logits`` [B, N, V] -> probabilities of the same shape, one-hot where temperature is 0.

    The filters act in the order of Hugging Face's warpers: temperature, top-h, top-k, top-p, min-p, typical, epsilon,
    eta.
    """
    greedy = [param.temperature == 0 for param in params]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # sums of half-precision laws are far off
    if all(greedy):
        return _one_hot(logits)
    if len({param.law for param in params}) == 1:
        return _soft(logits, params[0])
    laws = torch.empty_like(logits)
    for row, param in enumerate(params):
        laws[row] = _one_hot(logits[row]) if greedy[row] else _soft(logits[row], param)
    return laws


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, largest(logits)[..., None], 1.0)


def _soft(logits: Tensor, param: SamplingParams) -> Tensor:
    logits = (logits - logits.amax(-1, keepdim=True)) / param.temperature  # at most 0: nothing overflows to inf
    if param.top_h > 0:
        logits = filters.top_h(logits, param.top_h)
    if param.top_k > 0:
        logits = filters.top_k(logits, param.top_k)
    if param.top_p < 1:
        logits = filters.top_p(logits, param.top_p)
    if param.min_p > 0:
        logits = filters.min_p(logits, param.min_p)
    if param.typical_p < 1:
        logits = filters.typical_p(logits, param.typical_p)
    if param.epsilon_cutoff > 0:
        logits = filters.epsilon(logits, param.epsilon_cutoff)
    if param.eta_cutoff > 0:
        logits = filters.eta(logits, param.eta_cutoff)
    return logits.softmax(-1)


# What a random choice is for.
TOKEN = 0  # the token that follows a position
DRAFT = 1  # a child drawn by a drafter; the index is its place among the siblings drawn
ACCEPT = 2  # whether a child is accepted; the index is its place among its siblings


@dataclass(frozen=True)
class Key:
    """What a random choice is for, which is all that it depends on.

    ``seed_B`` int64 [B] is each row's seed, ``position_BN`` int64 [B, N] the position of the token that the choice
    decides on, ``index`` tells apart the choices of one purpose at one position. Nodes of one tree that decide on one
    position share their randomness: only one of them can lie on the accepted path, so that the text never sees a
    choice twice, and it depends neither on how nodes are numbered nor on how deep a tree is trimmed.
    """

    seed_B: Tensor
    position_BN: Tensor
    purpose: int
    index: int = 0


class Draws(Protocol):
    """Where randomness comes from: two kinds of choice, keyed by what they are for, never by the order of calls."""

    def categorical(self, p_BNV: Tensor, key: Key) -> Tensor:
        """One token per node, int64 [B, N], of laws that need not be normalised; never one of probability 0.

        A law that is 0 throughout gives any token.
        """
        ...

    def bernoulli(self, prob_BN: Tensor, key: Key) -> Tensor:
        """True with the probability given, bool [B, N]: never at 0, always at 1."""
        ...


_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64, as int64


_MASK = (1 << 64) - 1
FEW = 64  # up to so many numbers are computed one by one on the CPU


class HashDraws:
    """Counter-based uniforms (splitmix64 finaliser; Steele, Lea and Flood, 2014): vectorised, on the device.

    A row of a batch gets the same numbers as when it runs alone, which no stream of a ``torch.Generator`` can give.
    """

    def categorical(self, p_BNV: Tensor, key: Key) -> Tensor:
        """By inverting the cumulative law."""
        return draw(p_BNV, self.uniform(key).to(p_BNV.device))

    def bernoulli(self, prob_BN: Tensor, key: Key) -> Tensor:
        """By a strict comparison: a uniform of 0 does not let probability 0 pass."""
        return self.uniform(key).to(prob_BN.device) < prob_BN

    def uniform(self, key: Key) -> Tensor:
        """Uniform numbers in [0, 1), float64 [B, N]."""
        if key.position_BN.numel() <= FEW and key.position_BN.device.type == "cpu":
            return _few(key)
        state = _mix(key.seed_B.long()[:, None] * _GOLDEN + (key.purpose + (key.index << 8)))
        bits = _mix(state + (key.position_BN.long() + 1) * _GOLDEN)
        return ((bits >> 11) & ((1 << 53) - 1)).double() / (1 << 53)  # 53 bits fill a double's mantissa


def _few(key: Key) -> Tensor:
    """The same numbers in whole numbers of Python: thirty tensor operations cost more than a few of them."""
    rows, purpose = [], key.purpose + (key.index << 8)
    for seed, positions in zip(key.seed_B.tolist(), key.position_BN.tolist(), strict=True):
        state = _mix_one(seed * _GOLDEN + purpose)
        known = {position: _mix_one(state + (position + 1) * _GOLDEN) >> 11 for position in set(positions)}
        rows.append([known[position] / (1 << 53) for position in positions])
    return torch.tensor(rows, dtype=torch.float64, device=key.position_BN.device)


def _mix_one(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * _MIX_1 & _MASK
    z = (z ^ (z >> 27)) * _MIX_2 & _MASK
    return z ^ (z >> 31)


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
    if cumulative.device.type != "cpu":
        return _drawn_apart(cumulative, probs_BNV, uniform_BN)
    total = cumulative[..., -1:]
    target = _below(total, uniform_BN)
    return (cumulative <= target).sum(-1).clamp_(max=probs_BNV.shape[-1] - 1)  # the limit: a law of zeros


def _drawn_apart(cumulative: Tensor, probs_BNV: Tensor, uniform_BN: Tensor) -> Tensor:
    """The same where sums are made in parallel, so that they rise and fall by rounding where nothing is added too."""
    cumulative = cumulative.masked_fill(probs_BNV <= 0, 0.0)  # beyond no target
    target = _below(cumulative.amax(-1, keepdim=True), uniform_BN)
    return (cumulative > target).byte().argmax(-1)  # the first


def _below(total: Tensor, uniform_BN: Tensor) -> Tensor:
    """Where a uniform number falls in [0, total): [B, N, 1]."""
    return torch.minimum(uniform_BN[..., None] * total, total.nextafter(torch.zeros_like(total)))


class Chance:
    """The random choices of one step of a batch. ``roots`` are the rows' root tokens, where the host knows them.

    Args:
        params: how each row is sampled.
        after: the position of the token that follows each row's root.
        draws: where the choices come from.
        device: where they are needed.
    """

    roots: Sequence[int] | None = None

    def __init__(
        self, params: Sequence[SamplingParams], after: Sequence[int], draws: Draws, device: torch.device | str
    ) -> None:
        self.params = params
        self.after = after
        self.draws = draws
        self.device = device

    @cached_property
    def greedy(self) -> bool:
        """Whether no row has any choice."""
        return all(param.temperature == 0 for param in self.params)

    @cached_property
    def some_greedy(self) -> bool:
        """Whether some row has none."""
        return any(param.temperature == 0 for param in self.params)

    @cached_property
    def greedy_B(self) -> Tensor:
        """Bool [B]: the rows without any choice."""
        return upload([param.temperature == 0 for param in self.params], self.device)

    @cached_property
    def _seed_B(self) -> Tensor:
        return upload([param.seed for param in self.params], self.device)

    @cached_property
    def _after_B1(self) -> Tensor:
        return upload(self.after, self.device)[:, None]

    def only(self, row: int) -> Chance:
        """The choices of one row alone, which are the same."""
        return Chance([self.params[row]], [self.after[row]], self.draws, self.device)

    def categorical(self, p_BNV: Tensor, depth_BN: Tensor, purpose: int, index: int = 0) -> Tensor:
        """One token per node, which follows a node of depth ``depth_BN`` [B|1, N]: int64 [B, N]."""
        return self.draws.categorical(p_BNV, self._key(depth_BN, purpose, index))

    def bernoulli(self, prob_BN: Tensor, depth_BN: Tensor, purpose: int, index: int = 0) -> Tensor:
        """True with the probability given, about a token that follows a node of depth ``depth_BN``: bool [B, N]."""
        return self.draws.bernoulli(prob_BN, self._key(depth_BN, purpose, index))

    def _key(self, depth_BN: Tensor, purpose: int, index: int) -> Key:
        return Key(self._seed_B, self._after_B1 + depth_BN, purpose, index)
