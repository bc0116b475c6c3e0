"""What drafting with heads takes whatever the tree: the heads bound to a trunk, and the state that they read.

Dimensions: B batch, C tokens on the way, D hidden, E embedding, K heads, V vocabulary, W parents (nodes with children).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.drafters.base import place
from medusa.drafters.children import Drafting
from medusa.errors import UserError
from medusa.heads import MedusaHeads
from medusa.tree import DraftTree
from medusa.trunk import Trunk, TrunkOutput

# A head, and the tokens from the root on of W ways int64 [B, W, C]: its logits behind each way [B, W, V'].
Behind = Callable[[int, Tensor], Tensor]

SMALL_TABLE = 1 << 22  # values of an embedding: 16 MiB in fp32


class HeadsDrafter:
    """Heads, and how they choose their tokens in rows that sample."""

    def __init__(self, heads: MedusaHeads, drafting: Drafting) -> None:
        self.heads = heads
        self.drafting = drafting
        self._table: Tensor | None = None
        if heads.trunk.embedding_values <= SMALL_TABLE:  # scaled once instead of at each use
            with torch.no_grad():
                self._table = heads.embed(torch.arange(heads.trunk.vocab_size, device=heads.trunk.device))

    def check(self, trunk: Trunk) -> None:
        """UserError for another trunk than the heads are bound to."""
        if trunk.model is not self.heads.trunk.model:
            raise UserError("these heads are bound to another trunk than the one that decodes: load heads for it")

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [.., E] as the heads read them."""
        return self.heads.embed(ids) if self._table is None else torch.nn.functional.embedding(ids, self._table)


class HeadsSession:
    """Remembers each row's state of the last *accepted* token, which is what the heads read."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        self.heads = drafter.heads
        self.drafting = drafter.drafting
        self.embed = drafter.embed
        self.at_once = not drafter.heads.config.stepwise
        self.hidden_BD = torch.empty(0)

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Keep the last state of the prompts."""
        self.hidden_BD = hidden_BD

    def logits_at_once(self, root_B1: Tensor, heads: int) -> Tensor:
        """Logits [B, K, V'] of the first so many heads, which read no drafted token; without a Markov bias."""
        embedded_B1E = self.embed(root_B1)
        features = [
            self.heads.features(head, self.hidden_BD, self.heads.context(head, embedded_B1E)) for head in range(heads)
        ]
        if self.heads.config.projection == "shared":  # which is read once for all heads
            return self.heads.draftable(self.heads.logits(0, torch.stack(features, 1)))
        logits = [self.heads.draftable(self.heads.logits(head, each_BD)) for head, each_BD in enumerate(features)]
        return torch.stack(logits, 1)

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
        context_BW = self.heads.context(head, self.embed(ids_BWC))
        hidden_BWD = self.hidden_BD[:, None].expand(-1, ids_BWC.shape[1], -1)
        return self.heads.draftable(self.heads.logits(head, self.heads.features(head, hidden_BWD, context_BW)))

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Keep the state of the last accepted node."""
        last_B11 = acceptance.last_B[:, None, None]
        self.hidden_BD = verified.hidden.gather(1, last_B11.expand(-1, 1, verified.hidden.shape[-1]))[:, 0]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.hidden_BD = self.hidden_BD[list(rows)]

    def admit(self, slots: Sequence[int], other: HeadsSession) -> None:
        """Take over the states of another session's rows."""
        self.hidden_BD = place(self.hidden_BD, slots, other.hidden_BD)
