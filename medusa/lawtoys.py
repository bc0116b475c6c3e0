"""A toy trunk and a toy drafter for the exact-law kit: both are tables, so that a step costs next to nothing.

Dimensions: B batch, N nodes, S = V * V states (the last two tokens), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from medusa.accept import Acceptance, AcceptRule
from medusa.drafters.base import place
from medusa.drafters.children import Brood, Drafting, Picked, likeliest, pick, sampled_tree
from medusa.lawkit import decoder_run, judge, trunk_law
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput

# The signature of medusa.drafters.children.pick.
Choose = Callable[[Tensor, Brood, Chance, Drafting], Picked]


def random_laws(vocab: int, *, seed: int = 0, peak: float = 1.0, zeros: float = 0.0) -> Tensor:
    """A random table of laws [S, V]; ``peak`` scales its logits, ``zeros`` is the share of probabilities that are 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab * vocab, vocab, generator=generator, dtype=torch.float64) * peak
    gone = torch.rand(logits.shape, generator=generator) < zeros
    gone.scatter_(1, logits.argmax(-1, keepdim=True), False)  # each law keeps its likeliest token
    return logits.masked_fill(gone, -torch.inf).softmax(-1)


def perturbed(laws_SV: Tensor, strength: float, *, seed: int = 1) -> Tensor:
    """Laws in proportion to p * exp(strength * noise): at 0 the same, ever farther from them along one path.

    The path is an exponential family, in which both KL(p || q) and the total variation grow with the strength.
    """
    noise = torch.randn(laws_SV.shape, generator=torch.Generator().manual_seed(seed), dtype=laws_SV.dtype)
    return (laws_SV.log() + strength * noise).softmax(-1)


def toys(vocab: int = 3) -> dict[str, tuple[Tensor, Tensor]]:
    """A trunk's laws and a drafter's, by what they bring out."""
    holed_SV = random_laws(vocab, seed=1, zeros=0.2)
    holed_SV[1::vocab, 0] = 0  # after token 1, token 0 can't come, which the smallest number would draw
    return {
        "apart, with probabilities of 0": (holed_SV / holed_SV.sum(-1, keepdim=True), random_laws(vocab, seed=9)),
        "the drafter is right": (random_laws(vocab, seed=2), random_laws(vocab, seed=2)),
        "the drafter's laws are soon exhausted": (random_laws(vocab, seed=3), random_laws(vocab, seed=6, zeros=0.8)),
    }


def examine(
    rule: AcceptRule | None = None,
    drafting: Drafting | None = None,
    choose: Choose = pick,
    *,
    topology: Topology | None = None,
    vocab: int = 3,
) -> dict[str, str]:
    """What the exact-law kit finds wrong with a rule and a way of choosing children, by toy; empty if nothing is.

    Texts are as long as it takes for every node of the tree to be accepted.
    """
    topology = topology or Topology.full([2])
    found = {}
    for name, (laws_SV, draft_SV) in toys(vocab).items():
        trunk = ToyTrunk(laws_SV)
        truth = trunk_law(lambda text, trunk=trunk: trunk.next_law((1, *text)), topology.depth + 2)  # type: ignore[misc]
        drafter = ToyDrafter(draft_SV, topology, drafting, choose)
        fault = judge(decoder_run(cast(Trunk, trunk), drafter, [1], topology.depth + 2, rule), truth)
        if fault is not None:
            found[name] = fault
    return found


class ToyCache:
    """Remembers each row's length and the last token that was committed."""

    def __init__(self, rows: int) -> None:
        self.lengths = [0] * rows
        self.last_B = torch.zeros(rows, dtype=torch.long)
        self.tokens_BN = self.last_B[:, None]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Take in the accepted path of the last tree."""
        end_B1 = torch.tensor([[path[-1] if path else 0] for path in paths])
        self.last_B = self.tokens_BN.gather(1, end_B1)[:, 0]
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.lengths = [self.lengths[row] for row in rows]
        self.last_B = self.last_B[list(rows)]

    def admit(self, slots: Sequence[int], other: ToyCache) -> None:
        """Take over the rows of another cache."""
        self.last_B = place(self.last_B, slots, other.last_B)
        for slot, length in zip(slots, other.lengths, strict=True):
            self.lengths[slot : slot + 1] = [length]

    def release(self, slots: Sequence[int]) -> None:
        """Free the slots of rows that have ended."""
        for slot in slots:
            self.lengths[slot] = 0


class ToyTrunk:
    """Stands in for a :class:`medusa.trunk.Trunk`: the law of a token depends on the two before it.

    A node's state is the number of its last two tokens, prev * V + token; the token before a text is 0.
    """

    device = torch.device("cpu")

    def __init__(self, laws_SV: Tensor) -> None:
        self.laws_SV = laws_SV
        self.vocab_size = laws_SV.shape[1]

    def horizon(self, length: int) -> int | None:
        """There is no limit."""
        return None

    def new_cache(self, rows: int) -> ToyCache:
        """An empty cache."""
        return ToyCache(rows)

    def prefill(
        self, ids_BT: Tensor, lengths: Sequence[int], cache: ToyCache, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, TrunkOutput]:
        """Read the prompts: the logits and the state after each."""
        rows_B, end_B = torch.arange(len(lengths)), torch.tensor(lengths) - 1
        before_B = torch.where(end_B > 0, ids_BT[rows_B, (end_B - 1).clamp(min=0)], 0)
        cache.lengths, cache.last_B = list(lengths), ids_BT[rows_B, end_B]
        output = self._output(before_B[:, None], cache.last_B[:, None])
        return output.logits[:, 0], output.hidden[:, 0], output

    def tree_forward(self, tree: DraftTree, cache: ToyCache, layers: Sequence[int] = ()) -> TrunkOutput:
        """Score every node; its hidden state is its state."""
        cache.tokens_BN = tree.tokens_BN
        before_BN = tree.shape.at_parents(tree.tokens_BN).clone()
        before_BN[:, 0] = cache.last_B
        return self._output(before_BN, tree.tokens_BN)

    def next_law(self, text: Sequence[int]) -> list[float]:
        """The law after a text of at least one token."""
        before, last = ([0, *text])[-2:]
        return self.laws_SV[before * self.vocab_size + last].tolist()

    def _output(self, before_BN: Tensor, tokens_BN: Tensor) -> TrunkOutput:
        state_BN = before_BN * self.vocab_size + tokens_BN
        return TrunkOutput(self.laws_SV[state_BN].log(), state_BN[..., None])


class ToyDrafter:
    """Drafts from a table of its own.

    Args:
        laws_SV: the drafter's law after each state.
        topology: the tree, its nodes ordered by depth.
        drafting: how children are chosen.
        choose: stands in for :func:`medusa.drafters.children.pick`, to make mistakes.
    """

    name = "toy"

    def __init__(
        self,
        laws_SV: Tensor,
        topology: Topology,
        drafting: Drafting | None = None,
        choose: Choose = pick,
    ) -> None:
        self.laws_SV = laws_SV
        self.topology = topology
        self.drafting = drafting or Drafting()
        self.choose = choose

    def open(self, trunk: object) -> ToySession:
        """A session; it reads no trunk."""
        return ToySession(self)


class ToySession:
    """Remembers the state of each row's last accepted token."""

    def __init__(self, drafter: ToyDrafter) -> None:
        self.drafter = drafter
        self.vocab = drafter.laws_SV.shape[1]
        self.state_B1 = torch.empty(0)

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Keep the state of the prompts."""
        self.state_B1 = hidden_BD

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Fill the tree level by level."""
        drafter, root_B1 = self.drafter, root_B[:, None]
        topology = drafter.topology.trim(room)
        state_BN, tokens_BN, picks = self._step(self.state_B1, root_B1), root_B1, []
        for depth in range(topology.depth):
            level = [node for node in range(topology.size) if topology.depths[node] == depth + 1]
            brood = Brood(topology, sorted({topology.parents[node] for node in level}), root_B.device)
            way_Bn = state_BN[:, brood.parent_W]
            logits_BWV = drafter.laws_SV[way_Bn].log()
            if chance is not None and drafter.drafting.draws(chance):
                picks.append(drafter.choose(logits_BWV, brood, chance, drafter.drafting))
            new_Bn = picks[-1].tokens_Bn if picks else likeliest(logits_BWV, brood)
            tokens_BN = torch.cat([tokens_BN, new_Bn], 1)
            state_BN = torch.cat([state_BN, self._step(way_Bn[:, brood.way_n], new_Bn)], 1)
        shape = Shape.static(topology, root_B.device)
        if picks:
            return sampled_tree(shape, root_B1, picks, self.vocab)
        return DraftTree(shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))

    def _step(self, state: Tensor, token: Tensor) -> Tensor:
        return state % self.vocab * self.vocab + token

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Keep the state of the last accepted node."""
        self.state_B1 = verified.hidden[..., 0].gather(1, acceptance.last_B[:, None])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.state_B1 = self.state_B1[list(rows)]

    def admit(self, slots: Sequence[int], other: ToySession) -> None:
        """Take over the states of another session's rows."""
        self.state_B1 = place(self.state_B1, slots, other.state_B1)
