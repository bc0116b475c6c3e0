"""The usual mistakes of speculative sampling, as rules and drafters that make them: the exact-law kit catches each.

Dimensions: B batch, N nodes, V vocabulary, W parents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.accept import Acceptance, AcceptRule, DeterministicRule, accept_up_to
from medusa.drafters.children import Brood, Drafting, Picked, likeliest, pick
from medusa.laws import Laws
from medusa.rules import RecursiveRule, Walk
from medusa.sampling import ACCEPT, DRAFT, Chance, Draws, HashDraws, Key
from medusa.tree import DraftTree

Choose = Callable[[Tensor, Brood, Chance, Drafting], Picked]


@dataclass(frozen=True)
class Broken:
    """One mistake: a rule that makes it, or a way of choosing children that does, under the right rule."""

    rule: AcceptRule
    choose: Choose = pick
    mode: str = "sampled"


class Wrong(RecursiveRule):
    """Recursive rejection with another walk."""

    lossless = False

    def __init__(self, walk: type[Walk]) -> None:
        self.wrong = walk

    def walk(self, tree: DraftTree, laws: Laws) -> Walk:
        """The wrong walk."""
        return self.wrong(tree, laws)


class RawRemainder(Walk):
    """q loses the rejected token but is not renormalised."""

    def without(self, token_B1: Tensor) -> Tensor:
        """What is left, as it is."""
        assert self.q_BV is not None
        return self.q_BV.scatter(1, token_B1, 0.0)


class SameDraft(Walk):
    """q stays what it was, as if siblings were drawn with replacement."""

    def without(self, token_B1: Tensor) -> Tensor:
        """The same law."""
        assert self.q_BV is not None
        return self.q_BV


class NoResidual(Walk):
    """After a rejection the token is drawn from p, not from what q left of it."""

    def residual(self) -> Tensor:
        """The trunk's law."""
        return self.p_BV


class BlindResidual(Walk):
    """The residual is normalised whatever it holds, and blended in: 0 / 0 where p equals q."""

    def reject(self, rejected_B1: Tensor, token_B1: Tensor, sampled_B1: Tensor | None) -> None:
        """Without a look at the sum."""
        p_BV, rest_BV = self.p_BV, self.residual()
        super().reject(rejected_B1, token_B1, sampled_B1)
        self.p_BV = _blend(rejected_B1, rest_BV / rest_BV.sum(-1, keepdim=True), p_BV)

    def arrive(self) -> None:
        """Blends too: what is not a number stays so."""
        p_BV = self.p_BV
        super().arrive()
        self.p_BV = _blend(self.moved_B1, self.p_BV, p_BV)


def _blend(first_B1: Tensor, one_BV: Tensor, other_BV: Tensor) -> Tensor:
    return first_B1.double() * one_BV + (~first_B1).double() * other_BV


class AtMost:
    """Compares with <=, so that a number of 0 lets probability 0 pass."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def categorical(self, p_BNV: Tensor, key: Key) -> Tensor:
        """As it should be."""
        return self.draws.categorical(p_BNV, key)

    def bernoulli(self, prob_BN: Tensor, key: Key) -> Tensor:
        """Not strict where there is a number to compare."""
        if isinstance(self.draws, HashDraws):
            return self.draws.uniform(key) <= prob_BN
        return self.draws.bernoulli(prob_BN, key)


class OneNumber(AtMost):
    """One number decides on all siblings."""

    def bernoulli(self, prob_BN: Tensor, key: Key) -> Tensor:
        """The first sibling's."""
        return self.draws.bernoulli(prob_BN, replace(key, index=0))


class DraftsNumber(AtMost):
    """The number that drew a child decides on it too."""

    def bernoulli(self, prob_BN: Tensor, key: Key) -> Tensor:
        """The draft's."""
        return self.draws.bernoulli(prob_BN, replace(key, purpose=DRAFT))


class Misdrawn(RecursiveRule):
    """Recursive rejection whose random choices go through ``draws``."""

    lossless = False

    def __init__(self, draws: type[AtMost]) -> None:
        self.wrong = draws

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        own = laws.chance
        chance = Chance(own.params, own.after, self.wrong(own.draws), own.device)
        return super().__call__(tree, Laws.given(laws.p_BNV, laws.depths, chance))


class TakesFillers(RecursiveRule):
    """Fillers count as drafted, at a probability that is small instead of 0."""

    lossless = False

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        q_BNV = None if tree.q_BNV is None else tree.q_BNV.clamp(min=1e-9)
        return super().__call__(replace(tree, valid_BN=torch.ones_like(tree.valid_BN), q_BNV=q_BNV), laws)


class FreshDraws:
    """Each node draws the trunk's token anew, and a child whose draw comes true is taken: several chances for one."""

    lossless = False

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        depths = laws.depths.expand_as(tree.tokens_BN)
        agrees = [torch.ones_like(tree.valid_BN[:, 0])]
        for node in range(1, tree.size):
            parent_B1 = tree.shape.parents.expand_as(tree.tokens_BN)[:, node : node + 1]
            p_B1V = laws.p_BNV.gather(1, parent_B1[..., None].expand(-1, -1, laws.p_BNV.shape[-1]))
            drawn_B1 = laws.chance.categorical(p_B1V, depths.gather(1, parent_B1), ACCEPT, node)
            agrees.append((drawn_B1[:, 0] == tree.tokens_BN[:, node]) & tree.valid_BN[:, node])
        reached_BN = (torch.stack(agrees, 1)[:, None] | tree.shape.off_path).all(-1)
        return accept_up_to(tree, (reached_BN * tree.shape.depths).argmax(-1), laws.choice_BN)


class ArgmaxRoot:
    """The token after the root is the likeliest one, whatever the temperature."""

    lossless = False

    def __call__(self, tree: DraftTree, laws: Laws) -> Acceptance:
        p_BNV = laws.p_BNV.clone()
        p_BNV[:, 0] = torch.nn.functional.one_hot(p_BNV[:, 0].argmax(-1), p_BNV.shape[-1]).to(p_BNV)
        return DeterministicRule()(tree, Laws.given(p_BNV, laws.depths, laws.chance))


def argmax_as_sampled(logits_BWV: Tensor, brood: Brood, chance: Chance, drafting: Drafting) -> Picked:
    """The likeliest tokens, marked as drawn from the soft law."""
    picked = pick(logits_BWV, brood, chance, drafting)
    return replace(picked, tokens_Bn=likeliest(logits_BWV, brood), valid_Bn=torch.ones_like(picked.valid_Bn))


def low_dropped(logits_BWV: Tensor, brood: Brood, chance: Chance, drafting: Drafting) -> Picked:
    """Drawn tokens of low probability are dropped: the tree's shape depends on what was drawn."""
    picked = pick(logits_BWV, brood, chance, drafting)
    own_Bn = picked.q_BWV[:, brood.way_n].gather(-1, picked.tokens_Bn[..., None])[..., 0]
    return replace(picked, valid_Bn=picked.valid_Bn & (own_Bn >= 0.25))


def other_temperature(logits_BWV: Tensor, brood: Brood, chance: Chance, drafting: Drafting) -> Picked:
    """Drawn at one temperature, scored at another."""
    picked = pick(logits_BWV / 2, brood, chance, drafting)
    return replace(picked, q_BWV=drafting.law(logits_BWV, chance))


BROKEN: dict[str, Broken] = {
    "q not renormalised": Broken(Wrong(RawRemainder)),
    "q keeps the rejected token": Broken(Wrong(SameDraft)),
    "no residual": Broken(Wrong(NoResidual)),
    "residual not a number": Broken(Wrong(BlindResidual)),
    "not strict": Broken(Misdrawn(AtMost)),
    "one number for all siblings": Broken(Misdrawn(OneNumber)),
    "the draft's number used again": Broken(Misdrawn(DraftsNumber)),
    "fillers accepted": Broken(TakesFillers()),
    "fresh draws": Broken(FreshDraws(), mode="top"),
    "argmax root": Broken(ArgmaxRoot(), mode="top"),
    "argmax scored with a soft q": Broken(RecursiveRule(), argmax_as_sampled),
    "low q dropped": Broken(RecursiveRule(), low_dropped),
    "q of another temperature": Broken(RecursiveRule(), other_temperature),
}
