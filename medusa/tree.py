"""Token trees: one type for every drafter.

A tree holds guesses for the next tokens. Node 0 is the *root*: the last token chosen, known but not yet in the
cache. A chain is a tree with one child per node; plain autoregressive decoding is the tree of the root alone.

Dimensions: B batch, N nodes (the root included), R ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa.biases import Biases
from medusa.errors import UserError
from medusa.uploads import upload


@dataclass(frozen=True)
class Topology:
    """The shape of a tree, without tokens: hashable, so that buffers made from it can be cached.

    ``parents[0] == -1`` and ``parents[i] < i``: parents come before children. ``ranks[i]`` says which candidate of
    the drafter's list node ``i`` takes (0 is the most likely); the root's rank is 0 and unused.

    Raises:
        UserError: lengths differ, a parent does not come before its child, or two siblings share a rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise UserError(f"a tree's first parent is -1 (node 0 is the root), not {list(self.parents[:1])}")
        if len(self.parents) != len(self.ranks):
            raise UserError(f"a tree of {len(self.parents)} parents has {len(self.ranks)} ranks: give one per node")
        seen: set[tuple[int, int]] = set()
        for node, (parent, rank) in enumerate(zip(self.parents[1:], self.ranks[1:], strict=True), start=1):
            if not 0 <= parent < node:
                raise UserError(f"node {node} has parent {parent}: a parent's number lies in 0..{node - 1}")
            if rank < 0:
                raise UserError(f"node {node} has rank {rank}: ranks count from 0")
            if (parent, rank) in seen:
                raise UserError(f"node {node} repeats rank {rank} under parent {parent}: siblings need distinct ranks")
            seen.add((parent, rank))

    @classmethod
    def root(cls) -> Topology:
        """The tree of the root alone: autoregressive decoding."""
        return cls((-1,), (0,))

    @classmethod
    def chain(cls, depth: int) -> Topology:
        """The most likely token at every depth: ``depth`` nodes below the root."""
        return cls(tuple(range(-1, depth)), (0,) * (depth + 1))

    @classmethod
    def full(cls, widths: Sequence[int]) -> Topology:
        """Every combination of the ``widths[d]`` best candidates at depth ``d + 1``."""
        paths: list[tuple[int, ...]] = [()]
        level = paths
        for width in widths:
            if width < 1:
                raise UserError(f"tree width {width} in {list(widths)}: each level keeps at least 1 candidate")
            level = [(*path, rank) for path in level for rank in range(width)]
            paths = paths + level
        return cls._from_closed(paths)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Topology:
        """Build from paths of ranks: all nodes (prefix-closed), or the leaves alone.

        Raises:
            UserError: a path is empty or given twice, or the list is neither of the two forms.
        """
        given = [tuple(path) for path in paths]
        for path in given:
            if not all(isinstance(rank, int) and rank >= 0 for rank in path):
                raise UserError(f"path {list(path)} in the tree: ranks are whole numbers from 0")
        unique = set(given)
        for index, path in enumerate(given):
            if not path:
                raise UserError("an empty path in the tree: the root is implied, list only what is below it")
            if path in given[:index]:
                raise UserError(f"path {list(path)} stands twice in the tree: list each node once")
        missing = {path[:n] for path in unique for n in range(1, len(path))} - unique
        inner = {path[:n] for path in unique for n in range(1, len(path))} & unique
        if missing and inner:  # neither prefix-closed nor leaves only: a node was forgotten
            gap = min(missing, key=lambda path: (len(path), path))
            raise UserError(f"the tree has nodes below {list(gap)} but not that node: list all nodes, or leaves only")
        return cls._from_closed([(), *unique, *missing])

    @classmethod
    def from_choices(cls, choices: Sequence[Any]) -> Topology:
        """Read the three published spellings of ``medusa_choices``.

        ``[1, 7, 6]`` counts candidates per level, the first being the root's (always 1); ``[[0], [0, 0], [1]]`` lists
        every node; ``[[0, 0], [1]]`` lists the leaves.
        """
        if choices and all(isinstance(choice, int) for choice in choices):
            if choices[0] != 1:
                raise UserError(f"tree widths {list(choices)} begin with {choices[0]}: the first level is the root, 1")
            return cls.full(choices[1:])
        if not all(isinstance(choice, (list, tuple)) for choice in choices):
            raise UserError(
                f"tree {list(choices)!r} mixes numbers and paths: give widths [1, 7, 6] or paths [[0], [1]]"
            )
        return cls.from_paths(choices)

    @classmethod
    def _from_closed(cls, paths: Iterable[tuple[int, ...]]) -> Topology:
        ordered = sorted(paths, key=lambda path: (len(path), path))  # by depth: a level is a run of nodes
        index = {path: node for node, path in enumerate(ordered)}
        parents = tuple(index[path[:-1]] if path else -1 for path in ordered)
        return cls(parents, tuple(path[-1] if path else 0 for path in ordered))

    @property
    def size(self) -> int:
        """Number of nodes N, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's is 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node: the number of heads the tree needs."""
        return max(self.depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The path of ranks that leads to each node."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    def by_depth(self) -> tuple[Topology, list[int]]:
        """The same tree with its nodes ordered by depth, and where each of this tree's nodes stands in it."""
        order = sorted(range(self.size), key=lambda node: self.depths[node])  # stable: parents stay first
        place = [0] * self.size
        for new, node in enumerate(order):
            place[node] = new
        parents = tuple(place[self.parents[node]] if node else -1 for node in order)
        return Topology(parents, tuple(self.ranks[node] for node in order)), place

    def trim(self, depth: int) -> Topology:
        """The same tree without the nodes deeper than ``depth``."""
        if depth >= self.depth:
            return self
        return Topology._from_closed([path for path in self.paths if len(path) <= depth])


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Bool ``[.., N, N]``: entry ``(i, j)`` says that ``j`` is ``i`` or an ancestor of ``i``.

    ``parents`` is int ``[.., N]``, -1 for the root. Squaring doubles the reach, so the closure takes log2(N)
    products and never asks the host for the depth.
    """
    size = parents.shape[-1]
    nodes = torch.arange(size, device=parents.device)
    reach = (parents.unsqueeze(-1) == nodes) | (nodes.unsqueeze(-1) == nodes)
    for _ in range((size - 1).bit_length()):
        as_float = reach.float()
        reach = as_float @ as_float > 0
    return reach


@dataclass(frozen=True)
class Shape:
    """What verification needs of a tree's shape; the leading dimension is 1 where all rows share it.

    ``depths`` int64 [B|1, N], ``parents`` int64 [B|1, N] with the root its own parent, so that it can be used to
    gather; ``paths`` int64 [B|1, N, A] lists the way from the root to each node, -1 beyond it, where A is a bound on
    depth + 1 known to the host. ``topology`` is given where that knows it. ``biases`` holds the masks of shapes that
    follow each other, one at a time; left out, the shape has its own.
    """

    depths: Tensor
    parents: Tensor
    paths: Tensor
    topology: Topology | None = None
    biases: Biases = field(default_factory=Biases)

    @classmethod
    def of(cls, parents: Tensor, levels: int | None = None) -> Shape:
        """Compute from int ``parents`` [B|1, N]; ``levels`` is A if it is known to be less than N."""
        ancestors = ancestor_matrix(parents)
        depths = ancestors.sum(-1) - 1
        levels = levels or parents.shape[-1]
        # each node's ancestors scattered to their depth; all others go to a column that is dropped
        column = torch.where(ancestors, depths[:, None, :], levels)
        nodes = torch.arange(parents.shape[-1], device=parents.device).expand_as(column)
        paths = column.new_full((*parents.shape, levels + 1), -1).scatter_(2, column, nodes)[..., :-1]
        return cls(depths, parents.clamp(min=0), paths)

    @classmethod
    def static(cls, topology: Topology, device: torch.device | str) -> Shape:
        """The shape shared by all rows of a static tree: made once per topology and device."""
        return replace(cls.of(upload([topology.parents], device), topology.depth + 1), topology=topology)

    @cached_property
    def levels(self) -> int:
        """A: no node is deeper than this less one."""
        return self.paths.shape[-1]

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool [B|1, N, N]: entry ``(i, j)`` says that ``j`` is ``i`` or an ancestor of ``i``."""
        rows, size, _ = self.paths.shape
        ancestors = torch.zeros(rows, size, size + 1, dtype=torch.bool, device=self.paths.device)
        return ancestors.scatter_(2, self.paths + 1, True)[..., 1:]  # -1 falls into a column that is dropped

    @cached_property
    def off_path(self) -> Tensor:
        """Bool [B|1, N, N]: the nodes whose token a node does not depend on: all but its ancestors below the root."""
        off_path = ~self.ancestors
        off_path[..., 0] = True  # the root was chosen before
        return off_path

    def at_parents(self, values_BN: Tensor) -> Tensor:
        """Each node's parent's value; the root's own at the root."""
        if self.parents.shape[0] == 1:
            return values_BN.index_select(1, self.parents[0])
        return values_BN.gather(1, self.parents)

    @cached_property
    def children(self) -> Tensor:
        """Int64 [B|1, N, C]: each node's children by their numbers, -1 beyond the last; C is the most of any node."""
        nodes = torch.arange(self.parents.shape[-1], device=self.parents.device).expand_as(self.parents)
        below = torch.where(nodes > 0, self.parents, -1)
        place = (below[..., None] == below[:, None, :]).tril(-1).sum(-1)  # elder siblings
        most = max(self.widths, default=1)
        children = nodes.new_full((nodes.shape[0], (nodes.shape[1] + 1) * most), -1)  # the first row takes the root
        children.scatter_(1, (below + 1) * most + place, nodes)
        return children.unflatten(1, (-1, most))[:, 1:]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The most children of any node of each depth, asked of the device: once, as a static tree has one shape."""
        below, depths = self.parents[:, 1:], self.depths.expand_as(self.parents)
        counts = torch.zeros_like(self.parents).scatter_add(1, below, torch.ones_like(below))
        most = counts.new_zeros(self.levels).scatter_reduce(0, depths.flatten(), counts.flatten(), "amax")
        return tuple(width for width in most.tolist() if width)

    def paths_to(self, last_B: Tensor) -> Tensor:
        """The way from the root to each row's node: int64 [B, A], -1 beyond it."""
        if self.paths.shape[0] == 1:
            return self.paths[0].index_select(0, last_B)
        return self.paths[torch.arange(len(last_B), device=last_B.device), last_B]


class Row(NamedTuple):
    """A row's nodes as the host knows them: parents (the root's is any number), tokens, and which are no fillers."""

    parents: Sequence[int]
    tokens: Sequence[int]
    valid: Sequence[int]


@dataclass(frozen=True)
class DraftTree:
    """Guesses of a drafter for every row of a batch.

    ``tokens_BN`` int64, ``valid_BN`` bool: a node that is not valid is a filler: it cannot be accepted, whatever token
    stands there, and so neither can what hangs below it. ``sampled_BN`` marks children drawn at random; ``q_BNV`` then
    is, per *parent*, the very law they were drawn from without replacement, in the order of their numbers. A child not
    marked sampled is deterministic.
    """

    shape: Shape
    tokens_BN: Tensor
    valid_BN: Tensor
    sampled_BN: Tensor | None = None
    q_BNV: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of nodes N, the root and fillers included."""
        return self.tokens_BN.shape[1]
