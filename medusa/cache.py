"""The slot cache: keys and values of a batch of rows with different lengths, under trees that come and go.

One of the two files that know transformers' caches. Every layer, sliding-window layers too, keeps its full length
in one storage: slot s of row b is position s of that row's text. A tree step writes its N nodes behind the row's
length; *commit* moves the accepted path down and advances the length; *rollback* is doing nothing, since what lies
beyond a length is masked and overwritten. For the same reason *release* is setting a length to 0, and *admit* is
copying another cache's rows over slots of the batch that are free.

Dimensions: B rows, N new tokens, A accepted nodes, S slots; layers' own: heads and head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa.uploads import upload

FEW = 8  # nodes that are moved one by one in less time than together
BLOCK = 256  # slots the storage grows by: a few copies over a long answer, little unused memory on a short one


@dataclass(frozen=True)
class PlaneShape:
    """One key or value plane of a layer: heads, head size, and where it lives."""

    heads: int
    size: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, states: Tensor) -> PlaneShape:
        """That of a layer's keys or values [B, heads, T, size]."""
        return cls(states.shape[1], states.shape[3], states.device, states.dtype)


@dataclass(frozen=True)
class LayerShape:
    """The two planes of a layer."""

    keys: PlaneShape
    values: PlaneShape


class _LayerView(CacheLayerMixin):
    """What transformers' mask code asks of a layer; the tensors live in the cache's storages."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: Any) -> None:  # or a proxy of it
        super().__init__()
        self.cache: SlotCache | StepCache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("slot cache layers are allocated by the cache")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("slot cache layers are written through their cache's update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1


class StepCache(Cache):
    """A slot cache within one traced forward, which may hold nothing but tensors.

    ``planes``: each layer's keys and values [B, heads, S, size]. New states go to ``slots_BN``, and the first ``total``
    slots are in view; in a trace that is a size of a tensor, so that it may change between calls.
    """

    def __init__(self, planes: Sequence[Sequence[Tensor]], slots_BN: Tensor, total: int) -> None:
        super().__init__(layers=[_LayerView(self) for _ in planes])
        self.planes, self.slots_BN, self.total = planes, slots_BN, total

    @property
    def longest(self) -> int:
        """Committed length of the longest row."""
        return self.total - self.slots_BN.shape[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new states ``[B, heads, N, size]``; return all slots in view."""
        keys, values = self.planes[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, plane: Tensor, states: Tensor) -> Tensor:
        if self.slots_BN.shape[0] == 1:
            plane.index_copy_(2, self.slots_BN[0], states)
        else:
            plane.scatter_(2, self.slots_BN[:, None, :, None].expand_as(states), states)
        return plane.narrow(2, 0, self.total)


class SlotCache(Cache):
    """Keys and values of ``rows`` rows.

    ``lengths`` are the committed lengths, known to the host. Planes of equal shape share one storage
    ``[planes, B, heads, S, size]``, so that a commit is one gather and one scatter, whatever the number of layers.
    """

    def __init__(self, layers: Sequence[LayerShape], rows: int) -> None:
        super().__init__(layers=[_LayerView(proxy(self)) for _ in layers])  # no cycle: memory goes with the cache
        self.shapes = tuple(layers)
        self.lengths: list[int] = [0] * rows
        planes = [(layer.keys, layer.values) for layer in layers]
        kinds = list(dict.fromkeys(plane for pair in planes for plane in pair))
        count = dict.fromkeys(kinds, 0)
        self._places: list[list[tuple[int, int]]] = []  # of each layer's keys and values: storage, plane in it
        for pair in planes:
            self._places.append([])
            for plane in pair:
                self._places[-1].append((kinds.index(plane), count[plane]))
                count[plane] += 1
        self._storages: list[Tensor] = []
        self._planes: list[list[Tensor]] = []  # views of the storages, in the order of the layers
        self._hold(
            [
                torch.zeros(count[plane], rows, plane.heads, 0, plane.size, dtype=plane.dtype, device=plane.device)
                for plane in kinds
            ]
        )
        self._total = 0
        self._slots: dict[torch.device, Tensor] = {}

    @property
    def longest(self) -> int:
        """Committed length of the longest row."""
        return max(self.lengths, default=0)

    @property
    def storages(self) -> Sequence[Tensor]:
        """[planes, B, heads, S, size] of each kind of plane."""
        return self._storages

    @property
    def capacity(self) -> int:
        """Slots allocated per row."""
        return self._storages[0].shape[3]

    def reserve(self, tokens: int) -> int:
        """Make room for ``tokens`` more slots behind every row; return the number of slots in view, T.

        To be called before each forward. The storage grows by whole blocks.
        """
        self._total = self.longest + tokens
        self._grow(len(self.lengths), self._total)
        self._slots = {}
        if len(set(self.lengths)) > 1:
            slots = torch.tensor(self.lengths)[:, None] + torch.arange(tokens)
            self._slots = {
                each.device: slots.to(each.device, non_blocking=True)[:, None, :, None] for each in self._storages
            }
        return self._total

    def planes(self, tokens: int) -> tuple[list[list[Tensor]], Tensor]:
        """What :class:`StepCache` takes: every layer's keys and values, and the slots [B, N] of ``tokens`` new ones.

        :meth:`reserve` made room for them. There is always a slot beyond those in view, so that a view is never the
        whole plane: traces tell the two apart.
        """
        self._grow(len(self.lengths), self._total + 1)
        at = self._storages[0].device
        slots_BN = upload(self.lengths, at)[:, None] + torch.arange(tokens, device=at)
        return self._planes, slots_BN

    def _grow(self, rows: int, slots: int) -> None:
        """Have ``rows`` rows of at least ``slots`` slots."""
        more_rows = rows - len(self.lengths)
        more_slots = max(-(-slots // BLOCK) * BLOCK - self.capacity, 0)
        if more_rows or more_slots:
            # zeros, not empty: a masked slot still meets a weight of 0, and 0 x NaN would be NaN
            pads = (0, 0, 0, more_slots, 0, 0, 0, more_rows)
            self._hold([torch.nn.functional.pad(old, pads) for old in self._storages])

    def _hold(self, storages: list[Tensor]) -> None:
        self._storages = storages
        self._planes = [[storages[storage][plane] for storage, plane in places] for places in self._places]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new states ``[B, heads, N, size]`` behind each row; return all slots in view."""
        keys, values = self._planes[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _write(self, plane: Tensor, states: Tensor) -> Tensor:
        if self._slots:
            plane.scatter_(2, self._slots[states.device].expand_as(states), states)
        else:
            plane.narrow(2, self.lengths[0], states.shape[2]).copy_(states)
        return plane.narrow(2, 0, self._total)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Declare the rows' lengths after a right-padded prefill: what lies beyond them counts as unwritten."""
        self.lengths = list(lengths)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's accepted nodes: move slot ``length + path[i]`` to slot ``length + i`` and advance the length.

        A path begins at node 0 and its ids ascend; an empty one leaves what its row holds as it is. Paths are asked of
        the host, which knows their lengths anyway: nodes that lie where they belong, often all of them, aren't moved.
        None is overwritten before it is read.
        """
        still = min((_in_place(path) for path in paths if path), default=0)  # of every row that keeps any
        width = max(map(len, paths)) - still
        if width > 0:
            move = self._move_one if len(paths) == 1 else self._move_rows
            move(paths, still, width)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def _move_one(self, paths: Sequence[Sequence[int]], still: int, width: int) -> None:
        """One row: node by node, or where they are more than a few a selection of slots and a copy."""
        start = self.lengths[0] + still
        sources = [self.lengths[0] + node for node in paths[0][still:]]
        for stored in self._storages:
            if width > FEW:
                moved = stored.index_select(3, upload(sources, stored.device))
                stored.narrow(3, start, width).copy_(moved)
                continue
            for target, source in enumerate(sources, start):  # ascending: none is overwritten before it is read
                stored.narrow(3, target, 1).copy_(stored.narrow(3, source, 1))

    def _move_rows(self, paths: Sequence[Sequence[int]], still: int, width: int) -> None:
        """Rows of different lengths; beyond a row's path its slots are written back as they are."""
        sources, targets = [], []
        for length, path in zip(self.lengths, paths, strict=True):
            targets.append([length + still + place for place in range(width)])
            moved = [length + node for node in path[still:]]
            sources.append(moved + targets[-1][len(moved) :])
        slots_2BA = torch.tensor([sources, targets])
        placed = {each.device: slots_2BA.to(each.device, non_blocking=True) for each in self._storages}
        for stored in self._storages:
            shape = (*stored.shape[:3], width, stored.shape[4])
            source, target = (each[None, :, None, :, None].expand(shape) for each in placed[stored.device])
            stored.scatter_(3, target, stored.gather(3, source))

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``, in that order: finished rows leave, the others close up."""
        index = torch.tensor(list(rows), dtype=torch.long)
        self._hold([stored[:, index.to(stored.device)] for stored in self._storages])
        self.lengths = [self.lengths[row] for row in rows]

    def release(self, slots: Sequence[int]) -> None:
        """Free the slots of finished rows: what they hold counts as unwritten, and lengthens no other row's view."""
        lengths = list(self.lengths)  # whoever read them before keeps what was read
        for slot in slots:
            lengths[slot] = 0
        self.lengths = lengths

    def admit(self, slots: Sequence[int], other: SlotCache) -> None:
        """Copy what ``other``'s rows hold, in their order, to ``slots``, whose own rows are gone then.

        ``other`` is a cache of the same layers with as many rows as there are ``slots``. Slots from the present number
        of rows on are appended; none may be left out between.
        """
        rows = len(self.lengths)
        added = max(max(slots, default=0) + 1 - rows, 0)
        assert other is not self and other.shapes == self.shapes, "rows of a cache of other layers"
        assert len(set(slots)) == len(slots) == len(other.lengths), "one slot per row"
        assert sum(slot >= rows for slot in slots) == added, "appended slots leave none out"
        self._grow(rows + added, other.longest)
        self.lengths = [*self.lengths, *[0] * added]
        for mine, theirs in zip(self._storages, other._storages, strict=True):
            for row, (slot, length) in enumerate(zip(slots, other.lengths, strict=True)):
                mine[:, slot, :, :length].copy_(theirs[:, row, :, :length])
        for slot, length in zip(slots, other.lengths, strict=True):
            self.lengths[slot] = length

    def move_to(self, storages: Sequence[Tensor]) -> None:
        """Hold what the rows hold in ``storages`` from now on: as its own, with room for it. All beyond becomes 0."""
        for new, old in zip(storages, self.storages, strict=True):
            new[:, :, :, : self.longest].copy_(old[:, :, :, : self.longest])
            new[:, :, :, self.longest :].zero_()
        self._hold(list(storages))

    def read(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor]:
        """A row's committed keys and values of one layer: ``[heads, length, size]`` each."""
        keys, values = self._planes[layer_idx]
        return keys[row, :, : self.lengths[row]], values[row, :, : self.lengths[row]]


def _in_place(path: Sequence[int]) -> int:
    """How many nodes of a path, from the root on, lie where it wants them."""
    return next((place for place, node in enumerate(path) if node != place), len(path))
