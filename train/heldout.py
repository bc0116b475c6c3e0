"""Held-out evaluation: a trunk by its loss on held-out text, heads by the tokens per step they would bring.

Dimensions: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.calibrate import Continuations, accuracy, grow, head_ranks, tokens_per_step
from medusa.heads import MedusaHeads
from medusa.tree import Topology

from .loop import next_token_loss

if TYPE_CHECKING:
    import datasets

EVAL_BATCH = 16


@torch.no_grad()
def text_loss(model: Any, rows: datasets.Dataset, limit: int | None = None) -> float:
    """Mean loss of the next token, in nats, over ``rows`` (see medusa.data.corpus.pack) or ``limit`` of them."""
    if limit is not None and limit < len(rows):
        rows = rows.select([index * len(rows) // limit for index in range(limit)])
    training = model.training
    model.eval()
    device = model.device
    total, count = 0.0, 0
    for batch in rows.iter(EVAL_BATCH):
        loss_sum, pairs = next_token_loss(model, batch["input_ids"].to(device), batch["segments"].to(device))
        total, count = total + loss_sum.item(), count + int(pairs)
    model.train(training)
    return total / max(count, 1)


class HeadsEvaluation:
    """Counts tokens per step on the trunk's own continuations, and keeps the heads that brought the most.

    The tree is grown on one half of the continuations and judged on the other.
    """

    def __init__(self, heads: MedusaHeads, held: Continuations, nodes: int) -> None:
        self.heads = heads
        self.nodes = nodes
        self.grown_on, self.judged_on = held.halves()
        self.tokens_per_step = 0.0
        self.step = 0
        self.tree = Topology.root()
        self._weights: dict[str, Tensor] = {}

    def __call__(self, step: int) -> dict[str, Any]:
        """Evaluate the heads as they are after ``step`` steps."""
        tree = grow(head_ranks(self.heads, self.grown_on), self.nodes)
        ranks = head_ranks(self.heads, self.judged_on)
        found = tokens_per_step(tree, ranks)
        if found > self.tokens_per_step:
            self.tokens_per_step, self.step, self.tree = found, step, tree
            self._weights = {name: value.detach().clone() for name, value in self.heads.state_dict().items()}
        return {"tokens_per_step": found, "heldout_top1": accuracy(ranks, 1), "heldout_top5": accuracy(ranks, 5)}

    def restore_best(self) -> None:
        """Put the best weights back into the heads."""
        self.heads.load_state_dict(self._weights)
