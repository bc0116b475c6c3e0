"""Drafters that need no training, or take heads at random, for any tiny trunk: what every drafter's tests take from."""

from __future__ import annotations

from medusa.cut import cut
from medusa.drafters.base import Drafter
from medusa.drafters.children import MODES, Drafting
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.lookahead import Lookahead, LookaheadDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.prompt_lookup import Lookup, PromptLookupDrafter
from medusa.drafters.sized import SizedDrafter
from medusa.eagle import EagleConfig
from medusa.heads import HeadsConfig
from medusa.testing import noisy_copy, random_eagle, random_heads
from medusa.tree import Topology
from medusa.trunk import Trunk

UNTRAINED = (
    "draft model",
    "draft tree",
    "cut",
    "prompt lookup",
    "lookahead",
    "sized",
    "dynamic",
    "dynamic hydra",
    "mixed",
    "markov",
    "dynamic markov",
    "mixed markov",
    "eagle",
    "eagle grown",
    "eagle 3",
    "eagle 3 grown",
)
# The modes in which a drafter's trees differ: some never draw, an only child is drawn in two, and so on: see below.
_MODES = {
    **dict.fromkeys(("prompt lookup", "lookahead", "eagle 3 grown"), ("sampled",)),
    **dict.fromkeys(("draft model", "dynamic", "dynamic hydra", "dynamic markov", "mixed markov"), ("sampled", "top")),
}
MODED = tuple((name, mode) for name in UNTRAINED for mode in _MODES.get(name, MODES))


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
    if name in ("eagle", "eagle grown"):
        layer = random_eagle(trunk, EagleConfig(1), scale=0.02)
        return EagleDrafter(layer, tree, drafting, nodes=tree.size if "grown" in name else None, depth=tree.depth)
    if name in ("eagle 3", "eagle 3 grown"):  # of all tokens but one, and always the likeliest where trees are grown
        layer = random_eagle(trunk, EagleConfig(3, trunk.vocab_size - 1), scale=0.02)
        if "grown" in name:
            return EagleDrafter(layer, nodes=tree.size, depth=tree.depth, width=2)
        return EagleDrafter(layer, tree, drafting)
    if name == "markov":
        return MedusaDrafter(random_heads(trunk, HeadsConfig("medusa", num=tree.depth, markov=2)), tree, drafting)
    if name in ("dynamic hydra", "dynamic markov", "mixed markov"):
        config = HeadsConfig("hydra", tree.depth) if "hydra" in name else HeadsConfig("root", tree.depth, markov=2)
        part = Topology(tree.parents[:-1], tree.ranks[:-1]) if "mixed" in name else tree  # beside what is looked up
        heads = random_heads(trunk, config, scale=0.1)
        dynamic = DynamicDrafter(heads, tree.size, sampling=part if mode == "sampled" else None)
        if "mixed" not in name:
            return dynamic
        return MixedDrafter(dynamic, Lookup(least=1, tokens=tree.depth, branches=2, nodes=tree.size // 2))
    heads = random_heads(trunk, HeadsConfig("root", num=tree.depth), scale=0.1)
    if name == "sized":  # another tree for each number of slots up to 4, the root alone among them
        trees = [Topology(tree.parents[:size], tree.ranks[:size]) for size in (1, 2, tree.size - 1, tree.size)]
        return SizedDrafter(MedusaDrafter(heads, tree, drafting), trees, lambda slots: -slots % len(trees))
    dynamic = DynamicDrafter(heads, tree.size, Drafting("top" if mode == "top" else "sampled"))
    if name == "dynamic":
        return dynamic
    if name == "mixed":
        if mode == "mixed":  # heads that draw a part of the tree as it is given, and lookup beside it
            part = Topology(tree.parents[: 1 + tree.size // 2], tree.ranks[: 1 + tree.size // 2])
            dynamic = DynamicDrafter(heads, tree.size, sampling=part)
        return MixedDrafter(dynamic, Lookup(least=1, tokens=tree.depth, branches=2, nodes=tree.size // 2))
    raise AssertionError(name)
