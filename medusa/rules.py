"""Acceptance rules for sampled trees, and the lossy one. The plain lossless rule is in :mod:`medusa.accept`.

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.accept import Acceptance, accept_up_to
from medusa.errors import UserError
from medusa.laws import Laws
from medusa.sampling import ACCEPT, TOKEN
from medusa.tree import DraftTree


class RecursiveRule:
    """Lossless acceptance of children drawn at random without replacement: recursive rejection sampling.

    From the root downwards each node's children are tried in order against p, the trunk's law there, and q, the law
    they were drawn from (Jeon et al. 2024; Yang et al. 2024):

    * a sampled child x is accepted with probability min(1, p(x) / q(x)); else p becomes (p - q)+ and q loses x, both
      renormalised. Where p equals q nothing is left over, and p stays;
    * a deterministic child x is accepted with probability p(x); else p loses x and is renormalised.

    The token after the last accepted node is drawn from what is left of p there. A chain is the speculative sampling
    of Leviathan et al. and Chen et al. (2023). Where p is one-hot this is the greedy walk. A filler is passed over.
    """

    lossless = True

    def walk(self, tree: DraftTree, laws: Laws) -> Walk:
        """The walk that decides; a rule that decides otherwise overrides it."""
        return Walk(tree, laws)

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        walk = self.walk(tree, laws)
        for width in tree.shape.widths:
            walk.enter()
            for index in range(width):
                walk.attempt(index, index == width - 1)
        walk.arrive()
        at_B1 = walk.at_B1
        token_B1 = laws.chance.categorical(walk.p_BV[:, None], walk.depth_B1(at_B1), TOKEN)
        return Acceptance(tree.shape.paths_to(at_B1[:, 0]), at_B1[:, 0], token_B1[:, 0])


class Walk:
    """Where each row stands in its tree, with what is left there of the trunk's law and of the draft's."""

    def __init__(self, tree: DraftTree, laws: Laws) -> None:
        self.tree = tree
        self.laws = laws
        self.at_B1 = torch.zeros_like(tree.tokens_BN[:, :1])
        self.trying_B1 = torch.ones_like(self.at_B1, dtype=torch.bool)  # rows not stopped above this level
        self.moved_B1 = self.trying_B1
        self.p_BV = torch.zeros((), dtype=torch.float64, device=self.at_B1.device)  # until the root is entered
        self.q_BV: Tensor | None = None

    def enter(self) -> None:
        """Begin with the children of the nodes that were just reached; rows that moved nowhere have ended."""
        self.arrive()
        tree, shape, rows = self.tree, self.tree.shape, len(self.at_B1)
        self.trying_B1, self.moved_B1 = self.moved_B1, torch.zeros_like(self.moved_B1)
        self.level_B1 = self.depth_B1(self.at_B1)
        most = shape.children.shape[-1]
        at_B1C = self.at_B1[..., None].expand(-1, -1, most)
        self.child_BC = shape.children.expand(rows, -1, -1).gather(1, at_B1C)[:, 0]
        node_BC = self.child_BC.clamp(min=0)
        self.token_BC = tree.tokens_BN.gather(1, node_BC)
        self.usable_BC = (self.child_BC >= 0) & tree.valid_BN.gather(1, node_BC)
        if tree.sampled_BN is not None and tree.q_BNV is not None:
            self.sampled_BC = tree.sampled_BN.gather(1, node_BC)
            self.q_BV = normalised(_law(tree.q_BNV, self.at_B1))

    def arrive(self) -> None:
        """Take up the trunk's law at the nodes that were just reached."""
        law_BV = normalised(self.laws.at(self.at_B1, self.moved_B1))
        self.p_BV = torch.where(self.moved_B1, law_BV, self.p_BV)

    def attempt(self, index: int, last: bool) -> None:
        """Try each row's next child; ``last`` says that none comes after it."""
        child_B1, token_B1, usable_B1 = (
            values_BC[:, index : index + 1] for values_BC in (self.child_BC, self.token_BC, self.usable_BC)
        )
        usable_B1 = usable_B1 & self.trying_B1
        ratio_B1, sampled_B1 = self.p_BV.gather(1, token_B1), None
        if self.q_BV is not None:
            sampled_B1 = self.sampled_BC[:, index : index + 1]
            due_B1 = self.q_BV.gather(1, token_B1)
            usable_B1 = usable_B1 & (~sampled_B1 | (due_B1 > 0))
            ratio_B1 = torch.where(sampled_B1, ratio_B1 / due_B1, ratio_B1)
        ratio_B1 = torch.where(usable_B1, ratio_B1, 0.0)
        accepted_B1 = self.laws.chance.bernoulli(ratio_B1, self.level_B1, ACCEPT, index) & usable_B1
        rejected_B1 = usable_B1 & ~accepted_B1
        self.reject(rejected_B1, token_B1, sampled_B1)
        if sampled_B1 is not None and self.q_BV is not None and not last:
            self.q_BV = torch.where(rejected_B1 & sampled_B1, self.without(token_B1), self.q_BV)
        self.at_B1 = torch.where(accepted_B1, child_B1, self.at_B1)
        self.moved_B1 = self.moved_B1 | accepted_B1
        self.trying_B1 = self.trying_B1 & ~accepted_B1

    def reject(self, rejected_B1: Tensor, token_B1: Tensor, sampled_B1: Tensor | None) -> None:
        """Leave, in the rows that rejected a child, what its token does not account for."""
        rest_BV = self.p_BV.scatter(1, token_B1, 0.0)
        if sampled_B1 is not None:
            rest_BV = torch.where(sampled_B1, self.residual(), rest_BV)
        total_B1 = rest_BV.sum(-1, keepdim=True)
        self.p_BV = torch.where(rejected_B1 & (total_B1 > 0), rest_BV / total_B1, self.p_BV)

    def residual(self) -> Tensor:
        """What is left of the trunk's law after a sampled child, not normalised: (p - q)+."""
        assert self.q_BV is not None
        return (self.p_BV - self.q_BV).clamp(min=0)

    def without(self, token_B1: Tensor) -> Tensor:
        """The law of the next child: q without the token just drawn."""
        assert self.q_BV is not None
        return normalised(self.q_BV.scatter(1, token_B1, 0.0))

    def depth_B1(self, node_B1: Tensor) -> Tensor:
        """Depth of each row's node."""
        return _of_row(self.tree.shape.depths, node_B1)


class TypicalRule:
    """Lossy acceptance of what is typical enough (Cai et al. 2024, section 2.3.1): opt-in, it changes the output.

    A child x of a node with law p is accepted if p(x) > min(epsilon, delta * exp(-H(p))), H in nats. The longest
    accepted path is taken, the likeliest one of equal length; the token after it is the trunk's own. At temperature 0
    it is the greedy walk.

    Args:
        epsilon: a probability that is always enough.
        delta: how far below a typical probability, exp(-H), a token may lie.

    Raises:
        UserError: a number out of range, or a row with a processor that can't be asked about all nodes at once.
    """

    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0 < value <= 1:
                raise UserError(f"{name}={value}: typical acceptance takes a number in (0, 1]")
        self.epsilon = epsilon
        self.delta = delta

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        if not laws.at_once:
            raise UserError(
                "typical acceptance weighs all nodes at once, and a logits_processor is called along one walk: leave"
                " one of the two out"
            )
        shape, p_BNV = tree.shape, laws.p_BNV
        entropy_BN = torch.special.entr(p_BNV).sum(-1)
        threshold_BN = shape.at_parents((self.delta * (-entropy_BN).exp()).clamp(max=self.epsilon))
        parents_BN = shape.parents.expand_as(tree.tokens_BN)
        rows_B1 = torch.arange(len(p_BNV), device=p_BNV.device)[:, None]
        p_BN = p_BNV[rows_B1, parents_BN, tree.tokens_BN]
        typical_BN = (p_BN > threshold_BN) & tree.valid_BN
        reached_BN = (typical_BN[:, None] | shape.off_path).all(-1)
        deepest_BN = reached_BN & (shape.depths == (reached_BN * shape.depths).amax(-1, keepdim=True))
        below_root = shape.ancestors.to(p_BN.dtype).clone()
        below_root[..., 0] = 0  # the root was chosen before
        log_BN = torch.where(typical_BN, p_BN, 1.0).log()
        likelihood_BN = (below_root @ log_BN[..., None])[..., 0]
        last_B = likelihood_BN.masked_fill(~deepest_BN, -torch.inf).argmax(-1)
        return accept_up_to(tree, last_B, laws.choice_BN)


def normalised(weights_BV: Tensor) -> Tensor:
    """Laws [.., V] in proportion to ``weights_BV``; zeros stay zeros."""
    return weights_BV / weights_BV.sum(-1, keepdim=True).clamp(min=torch.finfo(weights_BV.dtype).tiny)


def _law(laws_BNV: Tensor, node_B1: Tensor) -> Tensor:
    """The law at each row's node, float64 [B, V]."""
    return laws_BNV.gather(1, node_B1[..., None].expand(-1, -1, laws_BNV.shape[-1]))[:, 0].double()


def _of_row(values_BN: Tensor, node_B1: Tensor) -> Tensor:
    """The value [B, 1] of each row's node, where [1, N] serves all rows."""
    return values_BN.expand(node_B1.shape[0], -1).gather(1, node_B1)
