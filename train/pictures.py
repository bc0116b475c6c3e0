"""What trackers are shown when a stage has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from medusa import plots
from medusa.calibrate import Calibration, head_ranks, node_shares
from medusa.tree import Topology

from .heldout import HeadsEvaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def of_heads(evaluation: HeadsEvaluation) -> dict[str, Figure]:
    """The tree that the heads were judged by, and what its depths add; to be called with the best heads restored."""
    _, judged_on = evaluation.held.halves()
    return of_ranks(evaluation.tree, head_ranks(evaluation.heads, judged_on))


def of_ranks(tree: Topology, ranks: Sequence[Tensor]) -> dict[str, Figure]:
    """A tree, and what its depths add by the ranks of true tokens."""
    shares = node_shares(tree, ranks)
    return {"tree": plots.tree(tree, shares), "by_depth": plots.acceptance(plots.depth_shares(tree, shares))}


def of_calibration(found: Calibration) -> dict[str, Figure]:
    """The tree that was chosen, what its depths add, and what the others would have cost and brought."""
    depths = plots.depth_shares(found.topology, found.node_share)
    return {
        "tree": plots.tree(found.topology, found.node_share),
        "by_depth": plots.acceptance(depths),
        "cost_curve": plots.cost_curve(found.as_json()),
    }
