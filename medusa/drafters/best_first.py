"""The likeliest tree of a number of nodes, grown from the laws of each depth's candidates.

A node's score is the product of the probabilities on its way. A child's never exceeds its parent's, so the nodes of the
largest scores are closed: with each node they hold its parent and its elder siblings (as OPT-Tree, Wang et al. 2024,
and EAGLE-2's reranking, Li et al. 2024, section 4.2).

Dimensions: B batch, C tokens on the way, M candidates, m of them of one depth, n nodes below the root, R ranks,
W parents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 1e-9  # what a score loses per node and rank: no child ties with its parent, no token with a likelier sibling
FLOOR = -100.0  # the least log-probability that is told from others: beside a sum of these STEP still counts

# Depth, the tokens on the ways to its parents below the root, int64 [B, W, C], C = depth, and of each parent which of
# the parents before it is its own, int64 [B, W]: log-probabilities and tokens of each parent's likeliest candidates,
# both [B, W, R], the likeliest first.
Expand = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Best:
    """A row's nodes below the root, the likeliest first: all int64 [B, n]. The root is node 0, the first of them 1."""

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    tokens: Tensor

    def keep(self, most_B1: Tensor | None, room: int) -> tuple[Best, Tensor]:
        """The first ``most_B1`` nodes that are at most ``room`` deep, and bool [B, n], which those are.

        The others follow behind them, below the root: to be scored without harm, as fillers.
        """
        place_Bn = torch.arange(self.parents.shape[1], device=self.parents.device).expand_as(self.parents)
        out_Bn = self.depths > room
        if most_B1 is not None:
            out_Bn = out_Bn | (place_Bn >= most_B1)
        order_Bn = out_Bn.long().argsort(dim=1, stable=True)
        number_BN = torch.zeros_like(place_Bn).scatter(1, order_Bn, place_Bn + 1)
        number_BN = torch.nn.functional.pad(number_BN, (1, 0))  # the root's stays 0
        parents_Bn = number_BN.gather(1, self.parents).masked_fill(out_Bn, 0)
        depths_Bn = self.depths.masked_fill(out_Bn, 1)
        parts = (part.gather(1, order_Bn) for part in (parents_Bn, depths_Bn, self.ranks, self.tokens))
        return Best(*parts), ~out_Bn.gather(1, order_Bn)


def best_first(
    expand: Expand, rows: int, depth: int, most: int, device: torch.device, width: int | None = None
) -> Best:
    """The ``most`` likeliest nodes at most ``depth`` deep, fewer where there are not as many.

    A depth's nodes among them are among its own ``most`` likeliest, so that no more are expanded. Where that is dear,
    ``width`` says how many are, the likeliest (EAGLE-2, section 4.1); then a node of a wide depth may be missed.
    """
    width = most if width is None else width
    score_BW = torch.zeros(rows, 1, dtype=torch.float64, device=device)
    way_BWC = torch.zeros(rows, 1, 0, dtype=torch.long, device=device)
    from_BW = torch.zeros(rows, 1, dtype=torch.long, device=device)
    levels: list[tuple[Tensor, ...]] = []
    first = -1  # of the candidates: the number of the level's first parent
    for level in range(depth):
        log_BWR, token_BWR = expand(level, way_BWC, from_BW)
        ranks = log_BWR.shape[-1]
        worse_R = torch.arange(1, ranks + 1, device=device) * STEP
        score_BWR = score_BW[..., None] + log_BWR.double().clamp(min=FLOOR, max=0.0) - worse_R
        found_Bm, best_Bm = score_BWR.flatten(1).topk(min(most, score_BWR[0].numel()))
        from_Bm, token_Bm = best_Bm // ranks, token_BWR.flatten(1).gather(1, best_Bm)
        levels.append((found_Bm, first + from_Bm, torch.full_like(from_Bm, level + 1), best_Bm % ranks, token_Bm))
        first += 1 if level == 0 else levels[-2][0].shape[1]
        score_BW, from_BW = found_Bm[:, :width], from_Bm[:, :width]  # the likeliest come first
        way_BWC = way_BWC.gather(1, from_BW[..., None].expand(-1, -1, level))
        way_BWC = torch.cat([way_BWC, token_Bm[:, :width, None]], -1)
    score_BM, parent_BM, *others = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    order_Bn = score_BM.topk(min(most, score_BM.shape[1])).indices
    place_Bn = torch.arange(1, order_Bn.shape[1] + 1, device=device).expand_as(order_Bn)
    number_BM = torch.zeros_like(parent_BM).scatter(1, order_Bn, place_Bn)
    number_BM = torch.nn.functional.pad(number_BM, (1, 0))  # a parent of -1 is the root
    parents_Bn = number_BM.gather(1, parent_BM.gather(1, order_Bn) + 1)
    return Best(parents_Bn, *(part.gather(1, order_Bn) for part in others))
