"""What drafting with heads takes whatever the tree: the heads bound to a trunk, and the state that they read.

Dimensions: B batch, C tokens on the way, D hidden, E embedding, K heads, V vocabulary, W parents (nodes with children).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from medusa.accept import Acceptance
from medusa.drafters.base import place
from medusa.drafters.children import Drafting
from medusa.drafters.filled import serves
from medusa.errors import UserError
from medusa.head_parts import LowRank, bare, residual
from medusa.heads import MedusaHeads
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput

# A head, and the tokens from the root on of W ways int64 [B, W, C]: its logits behind each way [B, W, V'].
Behind = Callable[[int, Tensor], Tensor]

SMALL_TABLE = 1 << 23  # values of an embedding: 32 MiB in fp32


class HeadsDrafter:
    """Heads, and how they choose their tokens in rows that sample."""

    def __init__(self, heads: MedusaHeads, drafting: Drafting) -> None:
        self.heads = heads
        self.drafting = drafting

    @cached_property
    def _table(self) -> Tensor | None:
        """Of every token, where the heads read any."""
        trunk = self.heads.trunk
        return self._scaled(torch.arange(trunk.vocab_size, device=trunk.device))

    @cached_property
    def drafted(self) -> Tensor | None:
        """Of those that can be drafted."""
        return self._table if self.heads.draft_ids is None else self._scaled(self.heads.draft_ids)

    @cached_property
    def column_of(self) -> dict[int, int] | None:
        """By a token's id its place among those that can be drafted, on the host; None if these are all."""
        ids = self.heads.draft_ids
        return None if ids is None else {token: column for column, token in enumerate(ids.tolist())}

    @torch.inference_mode(False)
    @torch.no_grad()
    def _scaled(self, ids: Tensor) -> Tensor | None:
        """Embeddings of some tokens, scaled once instead of at each use; None where they would take much memory."""
        trunk = self.heads.trunk
        size = trunk.embedding_values // trunk.vocab_size
        return self.heads.embed(ids) if len(ids) * size <= SMALL_TABLE else None

    def check(self, trunk: Trunk) -> None:
        """UserError for another trunk than the heads are bound to."""
        if trunk.model is not self.heads.trunk.model:
            raise UserError("these heads are bound to another trunk than the one that decodes: load heads for it")

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [.., E] as the heads read them."""
        return self.heads.embed(ids) if self._table is None else torch.nn.functional.embedding(ids, self._table)

    def embed_drafted(self, columns: Tensor) -> Tensor:
        """The same of the tokens that ``columns`` of the heads' logits stand for."""
        if self.drafted is None:
            return self.embed(self.heads.tokens(columns))
        return torch.nn.functional.embedding(columns, self.drafted)


class Unrolled:
    """Heads as a step calls them: their layers are looked up once, and what a block reads comes in one piece.

    It computes what they do (:class:`medusa.heads.MedusaHeads`), with less around it: half of a small head's time goes
    into finding its parts.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        each = [heads.head(index) for index in range(heads.config.num)]
        dtype = heads.trunk.dtype
        self._blocks = [[bare(block.linear, dtype) for block in head.residuals] for head in each]
        self._projections = [_projection(heads, head.projection) for head in each]
        self._choices = heads.choices

    def law(self, head: int, hidden: Tensor, read: Tensor) -> Tensor:
        """Its logits, by what :meth:`features` takes."""
        return self.logits(head, self.features(head, hidden, read))

    def features(self, head: int, hidden: Tensor, read: Tensor) -> Tensor:
        """State [.., D] -> the head's own state; ``read`` [.., D + reads * E] is the state and what else it reads."""
        for linear in self._blocks[head]:
            hidden = read = residual(hidden, read, linear)
        return hidden

    def logits(self, head: int, features: Tensor) -> Tensor:
        """Features [.., D] -> logits [.., choices] of the tokens that can be drafted."""
        logits = features
        for layer in self._projections[head]:
            logits = layer(logits)
        return logits if logits.shape[-1] == self._choices else logits[..., : self._choices]


def _projection(heads: MedusaHeads, own: nn.Linear | None) -> list[Callable[[Tensor], Tensor]]:
    """A head's projection, layer by layer."""
    if own is None:
        return [heads.projected]
    layers = [own.down, own] if isinstance(own, LowRank) else [own]
    calls: list[Callable[[Tensor], Tensor]] = [bare(layer, heads.trunk.dtype) for layer in layers]
    return [*calls, heads.trunk.scaled.__call__]


class HeadsSession:
    """Remembers each row's state of the last *accepted* token, which is what the heads read."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        self.heads = drafter.heads
        self.unrolled = Unrolled(drafter.heads)
        self.drafting = drafter.drafting
        self.embed, self.embed_drafted = drafter.embed, drafter.embed_drafted
        self.table: Tensor | None = None
        if drafter.heads.config.kind == "hydra" and drafter.drafted is not None and serves(drafter.drafted):
            self.table = drafter.drafted.contiguous()  # in one piece, where C++ may read it
        self._column_of = None if self.table is None else drafter.column_of
        self._ids = None if self._column_of is None else list(self._column_of)
        self._first_11C: Tensor | None = None
        self.at_once = not drafter.heads.config.stepwise
        self.hidden_BD = torch.empty(0)

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Keep the last state of the prompts."""
        self.hidden_BD = hidden_BD

    def first_read(self, root_B1: Tensor) -> tuple[Tensor, Tensor]:
        """The state [B, 1, D], and what Hydra's first head reads [B, 1, C]: that and the root's embedding."""
        hidden_B1D = self.hidden_BD[:, None]
        return hidden_B1D, torch.cat([hidden_B1D, self.embed(root_B1)], -1)

    def first_read_of(self, root_B: Tensor, root: int) -> tuple[Tensor, Tensor]:
        """The same of one row where there is a table: two copies, where the root is in it."""
        hidden_BD, table, read_11C = self.hidden_BD, self.table, self._first_11C
        column = root if self._column_of is None else self._column_of.get(root)
        if column is None or table is None:
            return self.first_read(root_B[:, None])
        assert hidden_BD.dtype is table.dtype and hidden_BD.stride(1) == 1, "states of a kind that embeddings aren't of"
        if read_11C is None:
            read_11C = self._first_11C = table.new_empty(1, 1, hidden_BD.shape[1] + table.shape[1])
        bytes_ = table.element_size()
        wide, to = hidden_BD.shape[1] * bytes_, read_11C.data_ptr()
        piece = table.shape[1] * bytes_
        ctypes.memmove(to, hidden_BD.data_ptr(), wide)
        ctypes.memmove(to + wide, table.data_ptr() + column * piece, piece)
        return hidden_BD.unsqueeze(1), read_11C

    def ids(self, columns: list[int]) -> list[int]:
        """The tokens that columns of the logits stand for, on the host."""
        ids = self._ids
        return columns if ids is None else [ids[column] for column in columns]

    def logits_at_once(self, root_B1: Tensor, heads: int) -> Tensor:
        """Logits [B, K, V'] of the first so many heads, which read no drafted token; without a Markov bias."""
        read_BC, unrolled = self.hidden_BD, self.unrolled
        if self.heads.config.kind == "root":
            read_BC = torch.cat([self.hidden_BD, self.embed(root_B1)[:, 0]], -1)
        features = [unrolled.features(head, self.hidden_BD, read_BC) for head in range(heads)]
        if self.heads.config.projection == "shared":  # which is read once for all heads
            return unrolled.logits(0, torch.stack(features, 1))
        return torch.stack([unrolled.logits(head, each_BD) for head, each_BD in enumerate(features)], 1)

    def laws_behind(self, root_B1: Tensor, heads: int) -> Behind:
        """Logits of the first so many heads where they depend on drafted tokens, to be asked for level by level.

        What they don't take from those tokens is computed here, for all heads at once.
        """
        if self.heads.config.kind == "hydra":
            return self._hydra
        logits_BKV = self.logits_at_once(root_B1, heads)

        def behind(head: int, ids_BWC: Tensor) -> Tensor:
            logits_BWV = logits_BKV[:, head, None].expand(-1, ids_BWC.shape[1], -1)
            return self.heads.behind(head, logits_BWV, ids_BWC[..., -1])

        return behind

    def _hydra(self, head: int, ids_BWC: Tensor) -> Tensor:
        hidden_BWD = self.hidden_BD[:, None].expand(-1, ids_BWC.shape[1], -1)
        read_BWC = torch.cat([hidden_BWD, self.embed(ids_BWC).flatten(2)], -1)
        return self.unrolled.law(head, hidden_BWD, read_BWC)

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Keep the state of the last accepted node."""
        hidden_BND, walks = verified.hidden, acceptance.walks
        if walks is not None and len(walks) == 1:
            self.hidden_BD = hidden_BND[:, walks[0].path[-1]]  # a view
        else:
            last_B = acceptance.last_B
            self.hidden_BD = hidden_BND[torch.arange(len(last_B), device=last_B.device), last_B]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.hidden_BD = self.hidden_BD[list(rows)]

    def admit(self, slots: Sequence[int], other: HeadsSession) -> None:
        """Take over the states of another session's rows."""
        self.hidden_BD = place(self.hidden_BD, slots, other.hidden_BD)
