"""Held-out evaluation: a trunk by its loss on held-out text, heads by the tokens per step they would bring.

Dimensions: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.calibrate import Continuations, acceptance, accuracy, grow, head_ranks, tokens_per_step
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
        inputs = (batch[name].to(device) for name in ("input_ids", "segments", "labels") if name in batch)
        loss_sum, pairs = next_token_loss(model, *inputs)
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
        """Evaluate the heads as they are after ``step`` steps.

        Returns tokens per step of a tree of so many nodes, grown anew; ``acceptance`` by depth in that tree; and the
        share of positions at which each head's first guess, or one of its first five, is right.
        """
        tree = grow(head_ranks(self.heads, self.grown_on), self.nodes)
        ranks = head_ranks(self.heads, self.judged_on)
        found = tokens_per_step(tree, ranks)
        if found > self.tokens_per_step:
            self.tokens_per_step, self.step, self.tree = found, step, tree
            self._weights = {name: value.detach().clone() for name, value in self.heads.state_dict().items()}
        return {
            "tokens_per_step": found,
            "acceptance": acceptance(tree, ranks),
            "heldout_top1": accuracy(ranks, 1),
            "heldout_top5": accuracy(ranks, 5),
        }

    def restore_best(self) -> None:
        """Put the best weights back into the heads."""
        self.heads.load_state_dict(self._weights)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The best so far, for a checkpoint: figures, and weights."""
        tree = {"parents": list(self.tree.parents), "ranks": list(self.tree.ranks)}
        return {"tokens_per_step": self.tokens_per_step, "step": self.step, "tree": tree}, self._weights

    def load_state(self, figures: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what ``state`` gave."""
        self.tokens_per_step, self.step = figures["tokens_per_step"], figures["step"]
        self.tree = Topology(tuple(figures["tree"]["parents"]), tuple(figures["tree"]["ranks"]))
        self._weights = dict(tensors)
