"""Held-out evaluation: a trunk by its loss on held-out text, heads by the tokens per step they would bring.

Dimensions: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa.calibrate import Continuations, acceptance, accuracy, grow, head_ranks, tokens_per_step
from medusa.heads import MedusaHeads
from medusa.tree import Topology

from .loop import next_token_loss

if TYPE_CHECKING:
    import datasets

EVAL_BATCH = 16  # rows at a time
MOST_LOGITS = 2**28  # at a time: 1 GiB in fp32


@torch.no_grad()
def text_loss(model: Any, rows: datasets.Dataset, limit: int | None = None) -> float:
    """Mean loss of the next token, in nats, over ``rows`` (see medusa.data.corpus.pack) or ``limit`` of them.

    Fewer than 16 rows are taken at a time where they would have more than 2^28 logits.
    """
    if limit is not None and limit < len(rows):
        rows = rows.select([index * len(rows) // limit for index in range(limit)])
    training = model.training
    model.eval()
    device = model.device
    total, count = 0.0, 0
    logits = len(rows[0]["input_ids"]) * model.get_output_embeddings().weight.shape[0]
    for batch in rows.iter(max(1, min(EVAL_BATCH, MOST_LOGITS // logits))):
        inputs = (batch[name].to(device) for name in ("input_ids", "segments", "labels") if name in batch)
        loss_sum, pairs = next_token_loss(model, *inputs)
        total, count = total + loss_sum.item(), count + int(pairs)
    model.train(training)
    return total / max(count, 1)


class Best:
    """The state of ``module`` that brought the most tokens per step so far, with its tree and step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tokens_per_step = 0.0
        self.step = 0
        self.tree = Topology.root()
        self._weights: dict[str, Tensor] = {}

    def offer(self, step: int, found: float, tree: Topology) -> None:
        """Keep the module as it is after ``step`` steps, if it brings more than what is kept."""
        if found > self.tokens_per_step:
            self.tokens_per_step, self.step, self.tree = found, step, tree
            state = self.module.state_dict()
            self._weights = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def restore_best(self) -> None:
        """Put the best weights back into the module."""
        self.module.load_state_dict(self._weights)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The best so far, for a checkpoint: figures, and weights."""
        tree = {"parents": list(self.tree.parents), "ranks": list(self.tree.ranks)}
        return {"tokens_per_step": self.tokens_per_step, "step": self.step, "tree": tree}, self._weights

    def load_state(self, figures: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what ``state`` gave."""
        self.tokens_per_step, self.step = figures["tokens_per_step"], figures["step"]
        self.tree = Topology(tuple(figures["tree"]["parents"]), tuple(figures["tree"]["ranks"]))
        self._weights = dict(tensors)


def judge(heads: MedusaHeads, held: Continuations, nodes: int) -> tuple[Topology, dict[str, Any]]:
    """A tree of ``nodes`` nodes, grown on one half of the continuations, and what it brings on the other.

    The figures are tokens per step; ``acceptance`` by depth in that tree; and the share of positions at which each
    head's first guess, or one of its first five, is right.
    """
    grown_on, judged_on = held.halves()
    return judge_ranks(head_ranks(heads, grown_on), head_ranks(heads, judged_on), nodes)


def judge_ranks(grown_on: Sequence[Tensor], ranks: Sequence[Tensor], nodes: int) -> tuple[Topology, dict[str, Any]]:
    """:func:`judge` by the ranks of true tokens in both halves, whatever drafts."""
    tree = grow(grown_on, nodes)
    return tree, {
        "tokens_per_step": tokens_per_step(tree, ranks),
        "acceptance": acceptance(tree, ranks),
        "heldout_top1": accuracy(ranks, 1),
        "heldout_top5": accuracy(ranks, 5),
    }


class DraftEvaluation(Best):
    """Counts tokens per step on the trunk's own continuations, and keeps what drafted the most.

    Args:
        module: what drafts.
        held: the continuations.
        nodes: size of the tree.
    """

    def __init__(self, module: nn.Module, held: Continuations, nodes: int) -> None:
        super().__init__(module)
        self.held, self.nodes = held, nodes

    def ranks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of both halves of the continuations where the true tokens stand: what grows a tree, and what judges it."""
        raise NotImplementedError

    def __call__(self, step: int) -> dict[str, Any]:
        """Evaluate what drafts as it is after ``step`` steps (see :func:`judge`)."""
        tree, figures = judge_ranks(*self.ranks(), self.nodes)
        self.offer(step, figures["tokens_per_step"], tree)
        return figures


class HeadsEvaluation(DraftEvaluation):
    """The heads' own."""

    module: MedusaHeads

    def ranks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Head by head."""
        first, second = (head_ranks(self.module, half) for half in self.held.halves())
        return first, second
