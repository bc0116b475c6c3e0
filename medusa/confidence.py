"""How far the heads' probabilities can be trusted: a temperature per head, fitted on what the trunk goes on to say.

Dimensions: S steps, K heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from medusa.eagle import EagleLayer
from medusa.heads import MedusaHeads

GRID = tuple(2 ** (power / 4) for power in range(-8, 9))  # a quarter of the way to the next doubling is near enough
AMONG = 4  # a token this far up is one that trees hold: deeper nodes matter behind such alone


@torch.no_grad()
def judged(heads: MedusaHeads, ids: Sequence[int], start: int, hidden_TD: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each head's logits [S, V'] at the states that a step could start at, and the columns [S] of the true tokens.

    The states are the last of the prompt, whose length is ``start``, then those of the continuation up to the one that
    has a token left to emit after its root; a later head has fewer. -1 for a token that the heads never draft.
    """
    first = start - 1  # a step at state t has the root t+1 and emits t+2 at least
    text = torch.tensor(ids, device=hidden_TD.device)
    embedded_TE = heads.embed(text)
    for head in range(heads.config.num):
        states = torch.arange(first, max(first, len(ids) - 2 - head), device=text.device)
        reads = torch.arange(1, heads.config.reads(head) + 1, device=text.device)
        context = heads.context(head, embedded_TE[states[:, None] + reads]) if len(reads) else None
        logits = heads.logits(head, heads.features(head, hidden_TD[states], context))
        logits = heads.behind(head, logits, text[states + 1 + head])
        yield logits, heads.columns(text[states + 2 + head])


@torch.no_grad()
def temperatures(
    heads: MedusaHeads, texts: Sequence[Sequence[int]], starts: Sequence[int], hidden: Sequence[Tensor]
) -> list[float]:
    """For each head the temperature of :data:`GRID` under which the true tokens are likeliest (Guo et al. 2017).

    Counted where the heads before it have the truth among their first few. The texts are continuations, as
    :class:`medusa.calibrate.Continuations` holds them; 1 for a head that none of them says anything about.
    """
    return fitted(heads, (judged(heads, *each) for each in zip(texts, starts, hidden, strict=True)), heads.config.num)


def fitted(
    drafts: MedusaHeads | EagleLayer, texts: Iterable[Iterable[tuple[Tensor, Tensor]]], depths: int
) -> list[float]:
    """:func:`temperatures` of ``depths`` depths, of what :func:`judged` tells of each text, whatever drafts."""
    lost_KG = torch.zeros(depths, len(GRID), dtype=torch.float64)
    for text in texts:
        reached_S: Tensor | None = None
        for depth, (logits_SV, answer_S) in enumerate(text):
            wide_SV = drafts.draftable(logits_SV).double()
            known_S = (answer_S >= 0) & (answer_S < drafts.choices)
            if reached_S is not None:
                known_S = known_S & reached_S[: len(known_S)]
            own_S1 = wide_SV.gather(1, answer_S.clamp(0, drafts.choices - 1)[:, None])
            for place, temperature in enumerate(GRID):
                log_S = (own_S1 / temperature)[:, 0] - (wide_SV / temperature).logsumexp(-1)
                lost_KG[depth, place] -= log_S[known_S].sum().cpu()
            reached_S = known_S & ((wide_SV > own_S1).sum(-1) < AMONG)
    best = lost_KG.argmin(-1).tolist()
    return [GRID[place] if lost_KG[depth].any() else 1.0 for depth, place in enumerate(best)]
