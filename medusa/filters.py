"""Filters on logits, which keep some tokens and forbid the others: those of transformers' sampling.

Each takes logits [.., V] and returns them with -inf for the tokens it takes away; one always stays. The arithmetic
follows transformers' step by step, so that a token on the very edge falls on the same side of it.

Dimensions: V vocabulary, X the most likely tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP_H_LOOKS_AT = 100  # tokens, as transformers does; all others go


def top_h(logits: Tensor, share: float) -> Tensor:
    """Keep the most likely tokens while their terms of the entropy sum to at most ``share`` of it.

    Entropy and law are of the 100 most likely tokens (Top-H decoding, NeurIPS 2025); a share of 1 keeps them all.
    """
    best_X, index = logits.topk(min(TOP_H_LOOKS_AT, logits.shape[-1]))
    probs, entropy = _law_and_entropy(best_X)
    spent = (-probs * probs.log()).cumsum(-1)  # NaN from the first token of probability 0 on, which is not kept
    # a sum of all terms against their sum: transformers lets rounding decide whether the last token stays
    kept = spent <= (entropy * share if share < 1 else torch.inf)
    kept[..., 0] = True
    return torch.full_like(logits, -torch.inf).scatter_(-1, index, best_X.masked_fill(~kept, -torch.inf))


def top_k(logits: Tensor, count: int) -> Tensor:
    """Keep the ``count`` most likely tokens, and those as likely as the last of them."""
    if count >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(count).values[..., -1:], -torch.inf)


def top_p(logits: Tensor, mass: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``mass``."""
    ascending, order = logits.sort(-1)
    below = ascending.softmax(-1).cumsum(-1) <= 1 - mass
    below[..., -1] = False
    return logits.masked_fill(below.scatter(-1, order, below), -torch.inf)


def min_p(logits: Tensor, share: float) -> Tensor:
    """Keep the tokens at least ``share`` times as likely as the most likely one."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < share * probs.amax(-1, keepdim=True), -torch.inf)


def typical_p(logits: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches ``mass``.

    Of locally typical sampling (Meister et al., 2022). The most typical token always stays, not the most likely.
    """
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)
    distance, order = (-log_probs - entropy).abs().sort(-1)
    reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
    last = (reached < mass).sum(-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    away = distance > distance.gather(-1, last)
    return logits.masked_fill(away.scatter(-1, order, away), -torch.inf)


def epsilon(logits: Tensor, cutoff: float) -> Tensor:
    """Keep the tokens at least as likely as ``cutoff`` (Hewitt et al., 2022)."""
    return _cut(logits, logits.softmax(-1) < cutoff)


def eta(logits: Tensor, cutoff: float) -> Tensor:
    """Keep the tokens at least as likely as ``cutoff``, or as a bound below it where the entropy is high.

    Of Hewitt et al., 2022. The cutoff is rounded to fp32, as transformers rounds it.
    """
    rounded = torch.tensor(cutoff, dtype=torch.float32)
    _, entropy = _law_and_entropy(logits)
    bound = (rounded.sqrt().item() * (-entropy).exp()).clamp(max=rounded.item())
    return _cut(logits, logits.softmax(-1) < bound)


def _cut(logits: Tensor, away: Tensor) -> Tensor:
    return logits.masked_fill(away & (logits < logits.amax(-1, keepdim=True)), -torch.inf)


def _law_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [.., V] and entropy [.., 1]."""
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    probs = log_probs.softmax(-1)
    finite = log_probs.clamp(min=torch.finfo(logits.dtype).min)  # 0 times infinity is no term of a sum
    return probs, -(finite * probs).sum(-1, keepdim=True)
