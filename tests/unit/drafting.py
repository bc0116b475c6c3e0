"""Drafters that need no training, or take heads at random, for any tiny trunk: what every drafter's tests take from."""

from __future__ import annotations

from medusa.cut import cut
from medusa.drafters.base import Drafter
from medusa.drafters.children import Drafting
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.lookahead import Lookahead, LookaheadDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.prompt_lookup import Lookup, PromptLookupDrafter
from medusa.heads import HeadsConfig
from medusa.testing import noisy_copy, random_heads
from medusa.tree import Topology
from medusa.trunk import Trunk

UNTRAINED = ("draft model", "draft tree", "cut", "prompt lookup", "lookahead", "dynamic", "dynamic hydra", "mixed")


def untrained(trunk: Trunk, name: str, mode: str = "sampled", tree: Topology | None = None) -> Drafter:
    """A drafter that is right now and then, with trees of its own or as given; its chain is as deep."""
    tree, drafting = tree or Topology.full([3, 2, 1]), Drafting(mode)
    if name == "draft model":
        return DraftModelDrafter(noisy_copy(trunk), Topology.chain(tree.depth), drafting)
    if name == "draft tree":
        return DraftModelDrafter(noisy_copy(trunk, 0.05), tree, drafting)
    if name == "cut":
        return DraftModelDrafter(cut(trunk, 1), tree, drafting)
    if name == "prompt lookup":
        return PromptLookupDrafter(
            Lookup(tokens=2 * tree.depth, branches=max(map(tree.parents.count, range(tree.size))))
        )
    if name == "lookahead":
        return LookaheadDrafter(Lookahead(window=1 + tree.depth, ngram=1 + tree.depth, guesses=3))
    if name == "dynamic hydra":
        hydra = random_heads(trunk, HeadsConfig("hydra", num=tree.depth), scale=0.1)
        return DynamicDrafter(hydra, tree.size, sampling=tree if mode == "sampled" else None)
    heads = random_heads(trunk, HeadsConfig("root", num=tree.depth), scale=0.1)
    dynamic = DynamicDrafter(heads, tree.size, Drafting("top" if mode == "top" else "sampled"))
    if name == "dynamic":
        return dynamic
    if name == "mixed":
        if mode == "mixed":  # heads that draw a part of the tree as it is given, and lookup beside it
            part = Topology(tree.parents[: 1 + tree.size // 2], tree.ranks[: 1 + tree.size // 2])
            dynamic = DynamicDrafter(heads, tree.size, sampling=part)
        return MixedDrafter(dynamic, Lookup(least=1, tokens=tree.depth, branches=2, nodes=tree.size // 2))
    raise AssertionError(name)
