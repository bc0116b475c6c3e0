"""The likeliest tree of a number of nodes, grown from the laws of each depth's candidates.

A node's score is the product of the probabilities on its way. A child's never exceeds its parent's, so the nodes of the
largest scores are closed: with each node they hold its parent and its elder siblings (as OPT-Tree, Wang et al. 2024,
and EAGLE-2's reranking, Li et al. 2024, section 4.2).

Where laws depend on drafted tokens a tree grows level by level (:func:`best_first`); where they don't, it is chosen at
once from all paths that can be in one (:class:`Candidates`). Nothing asks the host, but where few trees grow on a CPU.

Dimensions: B batch, A levels, C tokens on the way, K depths, M candidates, m of them of one depth, N nodes, n nodes
below the root, R ranks, W parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.tree import Shape
from medusa.uploads import whole_numbers

STEP = 1e-9  # what a score loses per node and rank: no child ties with its parent, no token with a likelier sibling
FLOOR = -100.0  # the least log-probability that is told from others: beside a sum of these STEP still counts
FEW = 4  # rows: of so many a CPU's host sorts candidates sooner than tensor operations do

# Depth, the tokens from the root to each of its parents, int64 [B, W, C], C = 1 + depth, and where its own parent
# stood among those before, int64 [B, W]: log-probabilities and tokens of each parent's likeliest candidates, both
# [B, W, R], the likeliest first, R the same at all depths.
Expand = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Best:
    """A row's nodes below the root, the likeliest first: all int64 [B, n]. The root is node 0, the first of them 1.

    No node is deeper than ``deepest``. ``paths`` are those of :class:`medusa.tree.Shape`, where they are known.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor
    tokens: Tensor
    deepest: int
    paths: Tensor | None = None

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
        number_BN = pad(number_BN, (1, 0))  # the root's stays 0
        parents_Bn = number_BN.gather(1, self.parents).masked_fill(out_Bn, 0)
        depths_Bn = self.depths.masked_fill(out_Bn, 1)
        parts = torch.stack([parents_Bn, depths_Bn, self.ranks, self.tokens], -1)
        parts = parts.gather(1, order_Bn[..., None].expand_as(parts))
        parents_Bn, depths_Bn, ranks_Bn, tokens_Bn = parts.unbind(-1)
        kept = Best(parents_Bn, depths_Bn, ranks_Bn, tokens_Bn, min(room, self.deepest))
        return kept, ~out_Bn.gather(1, order_Bn)

    def shape(self) -> Shape:
        """The shape of the trees, the root included."""
        parents_BN, depths_BN = pad(self.parents, (1, 0)), pad(self.depths, (1, 0))
        paths = self._climbed(parents_BN, depths_BN) if self.paths is None else self.paths
        return Shape(depths_BN, parents_BN, paths)

    def _climbed(self, parents_BN: Tensor, depths_BN: Tensor) -> Tensor:
        above_BN = torch.arange(parents_BN.shape[1], device=parents_BN.device).expand_as(parents_BN)
        above = [above_BN]  # each node, its parent, the parent's, …; the root's is the root
        for _ in range(self.deepest):
            above.append(above_BN := parents_BN.gather(1, above_BN))
        up_BNA = depths_BN[..., None] - torch.arange(self.deepest + 1, device=parents_BN.device)
        return torch.stack(above, -1).gather(2, up_BNA.clamp(min=0)).masked_fill(up_BNA < 0, -1)


class Candidates:
    """Of heads that read no drafted token the paths that can be in a tree of the ``most`` likeliest, whatever they say.

    Before a path come its beginnings, and of these and of itself all that have no higher rank anywhere: a path of ranks
    r1 .. rk comes sum over j of (r1 + 1) .. (rj + 1) at the earliest. Made once, they leave a step one choice.

    Args:
        depth: of the tree, at most: as many heads.
        ranks: of each head's candidates.
        most: nodes of the tree, the root not counted.
        device: where it is chosen.
    """

    def __init__(self, depth: int, ranks: int, most: int, device: torch.device) -> None:
        paths = sorted(possible_paths(depth, ranks, most), key=len)  # a parent comes before its children
        number = {path: place for place, path in enumerate([(), *paths])}
        cells, facts, ways = [], [], [[0] + [-1] * depth]
        for path in paths:
            cells.append([head * ranks + rank for head, rank in enumerate(path)])
            facts.append([number[path[:-1]], len(path), path[-1], cells[-1][-1]])
            ways.append([*ways[facts[-1][0]][: len(path)], number[path]] + [-1] * (depth - len(path)))
            cells[-1] += [depth * ranks] * (depth - len(path))  # where a score of 0 stands
        self.most = min(most, len(paths))
        self.cell_MK = torch.tensor(cells, device=device)
        self.fact_M4 = torch.tensor(facts, device=device)  # the parent, 0 the root, depth, last rank and its cell
        self.way_MA = torch.tensor(ways, device=device) % (len(paths) + 2)  # of the root too; the last stands for none
        self.worse_R = torch.arange(1, ranks + 1, dtype=torch.float64, device=device) * STEP

    def best(self, log_BKR: Tensor, token_BKR: Tensor) -> Best:
        """The likeliest tree by each head's log-probabilities and tokens, the likeliest first."""
        score_BKR = log_BKR.clamp(min=FLOOR, max=0.0) - self.worse_R
        score_BM = pad(score_BKR.flatten(1), (0, 1))[:, self.cell_MK].sum(-1)
        order_Bn = score_BM.topk(self.most).indices
        number_BM = _numbers(order_Bn, score_BM.shape[1])
        parent_Bn, depth_Bn, rank_Bn, cell_Bn = self.fact_M4[order_Bn].unbind(-1)
        way_BNA = self.way_MA[pad(order_Bn + 1, (1, 0))]
        paths = number_BM.gather(1, way_BNA.flatten(1)).view_as(way_BNA)
        tokens_Bn = token_BKR.flatten(1).gather(1, cell_Bn)
        return Best(number_BM.gather(1, parent_Bn), depth_Bn, rank_Bn, tokens_Bn, log_BKR.shape[1], paths)


def possible_paths(depth: int, ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """The paths that at least one tree of the ``most`` likeliest has (see :class:`Candidates`)."""
    ways: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]  # with how many come no later at this depth, and above
    for path, wide, above in ways:  # which grows
        for rank in range(ranks if len(path) < depth else 0):
            if above + wide * (rank + 1) > most:
                break
            ways.append(((*path, rank), wide * (rank + 1), above + wide * (rank + 1)))
            yield ways[-1][0]


def _numbers(order_Bn: Tensor, candidates: int) -> Tensor:
    """The numbers of the root and of the candidates in the tree of those chosen, and -1: int64 [B, candidates + 2]."""
    place_n = torch.arange(1, order_Bn.shape[1] + 1, device=order_Bn.device)
    number_BM = order_Bn.new_zeros(len(order_Bn), candidates + 2)
    number_BM[:, -1] = -1
    return number_BM.scatter_(1, order_Bn + 1, place_n.expand_as(order_Bn))


def best_first(expand: Expand, root_B1: Tensor, depth: int, most: int, width: int | None = None) -> Best:
    """The ``most`` likeliest nodes at most ``depth`` deep behind each root, fewer where there are not as many.

    Of a depth's nodes no more are expanded than can have children in the tree: above them lies a node of each depth,
    and where the host may look, on a CPU for few rows, it is known how many of all nodes so far are likelier. Where
    expanding is dear, ``width`` says how many are, the likeliest (EAGLE-2, section 4.1); then a node of a wide depth
    may be missed.
    """
    width = most if width is None else width
    if root_B1.device.type == "cpu" and len(root_B1) <= FEW:
        return grown_by_host(expand, root_B1, depth, most, width)
    return grown_on_device(expand, root_B1, depth, most, width)


def grown_on_device(expand: Expand, root_B1: Tensor, depth: int, most: int, width: int) -> Best:
    """:func:`best_first` without a look from the host."""
    way_BWC, from_BW = root_B1[..., None], torch.zeros_like(root_B1)
    score_BW = from_BW.double()
    levels: list[tuple[Tensor, ...]] = []
    above = 0  # the number of the level's first parent among all candidates, the root's being 0
    for level in range(depth):
        log_BWR, token_BWR = expand(level, way_BWC, from_BW)
        ranks = log_BWR.shape[-1]
        worse_R = torch.arange(1, ranks + 1, dtype=torch.float64, device=root_B1.device) * STEP
        score_BWR = score_BW[..., None] + log_BWR.clamp(min=FLOOR, max=0.0) - worse_R
        found_Bm, cell_Bm = score_BWR.flatten(1).topk(min(most - level, score_BWR[0].numel()))
        token_Bm = token_BWR.flatten(1).gather(1, cell_Bm)
        levels.append((found_Bm, cell_Bm + above * ranks, token_Bm))
        wide = min(width, most - level - 1, found_Bm.shape[1])
        if not wide or level + 1 == depth:
            break
        above = 1 if level == 0 else above + levels[-2][0].shape[1]
        score_BW, from_BW = found_Bm[:, :wide], cell_Bm[:, :wide] // ranks  # the likeliest come first
        way_BWC = way_BWC.gather(1, from_BW[..., None].expand(-1, -1, level + 1))
        way_BWC = torch.cat([way_BWC, token_Bm[:, :wide, None]], -1)
    return _chosen(levels, ranks, most)


def _chosen(levels: Sequence[tuple[Tensor, ...]], ranks: int, most: int) -> Best:
    """The likeliest nodes of all levels: of each, scores, where its candidates stood among all [B, m], and tokens."""
    score_BM, cell_BM, token_BM = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    depth_K = torch.arange(1, len(levels) + 1, device=cell_BM.device)
    depth_M = torch.cat([depth_K[level].expand(each[0].shape[1]) for level, each in enumerate(levels)])
    order_Bn = score_BM.topk(min(most, score_BM.shape[1])).indices
    cell_Bn = cell_BM.gather(1, order_Bn)
    parents_Bn = _numbers(order_Bn, score_BM.shape[1]).gather(1, cell_Bn // ranks)
    return Best(parents_Bn, depth_M[order_Bn], cell_Bn % ranks, token_BM.gather(1, order_Bn), len(levels))


def grown_by_host(expand: Expand, root_B1: Tensor, depth: int, most: int, width: int) -> Best:
    """:func:`best_first` with a heap per row: a few dozen numbers are sooner sorted there than by tensor operations."""
    rows = [_Row(root, most) for root in root_B1[:, 0].tolist()]
    way_BWC, from_BW = root_B1[..., None], torch.zeros_like(root_B1)
    for level in range(depth):
        log_BWR, token_BWR = expand(level, way_BWC, from_BW)
        for row, log_WR, token_WR in zip(rows, log_BWR.tolist(), token_BWR.tolist(), strict=True):
            row.take(log_WR, token_WR, width)
        wide = max(len(row.parents) for row in rows)
        if not wide or level + 1 == depth:
            break
        ways = whole_numbers([row.ways(wide, level + 2) for row in rows], len(rows), wide, level + 3)
        from_BW, way_BWC = ways[..., 0], ways[..., 1:]
    nodes, paths = zip(*(row.tree(level + 1) for row in rows), strict=True)
    parents_Bn, depths_Bn, ranks_Bn, tokens_Bn = whole_numbers(nodes, len(rows), 4, -1).unbind(1)
    paths_BNA = whole_numbers(paths, len(rows), -1, level + 2)
    return Best(parents_Bn, depths_Bn, ranks_Bn, tokens_Bn, level + 1, paths_BNA)


class _Row:
    """One row's tree under way, on the host."""

    def __init__(self, root: int, most: int) -> None:
        self.most = most
        self.best: list[float] = []  # a heap: the scores of the likeliest candidates so far
        self.found: list[tuple[float, int, int, int]] = []  # score, parent among these or -1, rank, token
        # of the nodes to be expanded: score, place among these, where the parent stood in the level above, way
        self.parents: list[tuple[float, int, int, list[int]]] = [(0.0, -1, 0, [root])]

    def take(self, log_WR: Sequence[Sequence[float]], token_WR: Sequence[Sequence[int]], width: int) -> None:
        """Look at the candidates behind ``parents``, and choose those of the next level: at most ``width``."""
        level = []
        for place, ((above, *_), log_R) in enumerate(zip(self.parents, log_WR, strict=False)):
            for rank, log in enumerate(log_R):
                score = above + min(max(log, FLOOR), 0.0) - (rank + 1) * STEP
                if len(self.best) < self.most:
                    heappush(self.best, score)
                elif heappushpop(self.best, score) == score:
                    break  # so many others are likelier, also than what follows here
                level.append((score, place, rank))
        level.sort(key=itemgetter(0), reverse=True)
        parents: list[tuple[float, int, int, list[int]]] = []
        for score, place, rank in level:
            if len(parents) < width and (len(self.best) < self.most or score > self.best[0]):
                way = [*self.parents[place][3], token_WR[place][rank]]
                parents.append((score, len(self.found), place, way))
            self.found.append((score, self.parents[place][1], rank, token_WR[place][rank]))
        self.parents = parents

    def ways(self, wide: int, length: int) -> list[int]:
        """Of each parent where its own stood, and the tokens on its way; zeros up to ``wide`` parents."""
        numbers: list[int] = []
        for _, _, place, way in self.parents:
            numbers.append(place)
            numbers += way
        return numbers + [0] * ((wide - len(self.parents)) * (length + 1))

    def tree(self, deepest: int) -> tuple[list[int], list[int]]:
        """All parents, then depths, ranks and tokens of the likeliest nodes; the paths to the root and these."""
        order = sorted(range(len(self.found)), key=lambda each: self.found[each][0], reverse=True)[: self.most]
        number, ways = {-1: 0}, [[0]]
        for place, each in enumerate(order, start=1):
            number[each] = place
            ways.append([*ways[number[self.found[each][1]]], place])
        parents, depths = [way[-2] for way in ways[1:]], [len(way) - 1 for way in ways[1:]]
        ranks, tokens = [self.found[each][2] for each in order], [self.found[each][3] for each in order]
        paths = [way + [-1] * (deepest + 1 - len(way)) for way in ways]
        return parents + depths + ranks + tokens, [node for path in paths for node in path]
