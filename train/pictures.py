"""What trackers are shown when a stage has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from medusa import plots
from medusa.calibrate import Calibration, node_shares
from medusa.tree import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
