"""The law of the token after each node of a tree: the trunk's logits after all processors, for that node's own prefix.

Built-in processors (:mod:`medusa.processors`) act on all nodes at once. Any other is called along the accepted walk
alone, once per emitted token and in order, exactly as plain decoding would call it, so that it may keep a state.

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa.largest import largest
from medusa.processors import Prefixes, Row, process
from medusa.sampling import TOKEN, Chance, HashDraws, SamplingParams, to_probs
from medusa.tree import DraftTree

Processor = Callable[[Tensor, Tensor], Tensor]  # transformers' protocol: (input_ids [1, T], scores [1, V]) -> scores


@dataclass(frozen=True)
class Situation:
    """What the processors of a step may look at, of each row.

    ``tree`` is what was verified (of the root alone after a prefill). ``texts`` hold each row's ids up to its root.
    ``processors`` are called along the walk, after the built-in ones that ``rows`` ask for; None where a row has none.
    """

    tree: DraftTree
    texts: Sequence[Sequence[int]]
    rows: Sequence[Row]
    processors: Sequence[Processor | None]


class Laws:
    """The laws of the token after each node, and the trunk's own draws from them; nothing is computed unasked.

    Args:
        logits_BNV: the trunk's logits.
        depths: the nodes' depths, int64 [B|1, N].
        chance: how each row is sampled, and the step's random choices.
        situation: what processors need; None where no row has any.
    """

    def __init__(self, logits_BNV: Tensor, depths: Tensor, chance: Chance, situation: Situation | None = None) -> None:
        self._raw_BNV = logits_BNV
        self.depths = depths
        self.chance = chance
        self._situation = situation
        processors = [] if situation is None else situation.processors
        self._along = [row for row, processor in enumerate(processors) if processor is not None]

    @classmethod
    def given(cls, p_BNV: Tensor, depths: Tensor | None = None, chance: Chance | None = None) -> Laws:
        """Laws that are known; one-hot ones need no chance."""
        rows, nodes = p_BNV.shape[:2]
        chance = chance or Chance([SamplingParams()] * rows, [0] * rows, HashDraws(), p_BNV.device)
        depths = p_BNV.new_zeros(1, nodes, dtype=torch.long) if depths is None else depths
        laws = cls(p_BNV, depths, chance)
        laws.__dict__["p_BNV"] = p_BNV
        return laws

    @property
    def at_once(self) -> bool:
        """Whether the laws of all nodes can be had together: no row has a processor that is called along the walk."""
        return not self._along

    @cached_property
    def _logits_BNV(self) -> Tensor:
        """Logits after the built-in processors."""
        situation = self._situation
        if situation is None or all(row.processing.idle for row in situation.rows):
            return self._raw_BNV
        return process(self._raw_BNV, Prefixes.of(situation.texts, situation.tree), situation.rows)

    @cached_property
    def p_BNV(self) -> Tensor:
        """Probabilities after built-in processors, temperature and filters; one-hot in greedy rows."""
        return to_probs(self._logits_BNV, self.chance.params)

    def at(self, node_B1: Tensor, wanted_B1: Tensor) -> Tensor:
        """The law at each row's node, float64 [B, V], where ``wanted_B1``; other rows get any numbers.

        To be asked once for every node of the walk, from the root downwards: processors are called here.
        """
        index_B1V = node_B1[..., None].expand(-1, -1, self._raw_BNV.shape[-1])
        p_BV = self.p_BNV.gather(1, index_B1V)[:, 0].double()
        for row in self._along:
            if wanted_B1[row, 0]:
                p_BV[row] = self._law_along(row, int(node_B1[row, 0])).double()
        return p_BV

    @cached_property
    def choice_BN(self) -> Tensor:
        """The trunk's own token after each node: a draw of its law, int64 [B, N].

        In rows with a processor that is called along the walk it is -1 off the path that their own choices make.
        """
        if self.chance.greedy:
            choice_BN = largest(self._logits_BNV)
        else:
            choice_BN = self.chance.categorical(self.p_BNV, self.depths, TOKEN)
        for row in self._along:
            self._choose_along(row, choice_BN)
        return choice_BN

    @property
    def greedy_BNV(self) -> Tensor | None:
        """What the trunk's tokens are the largest of, where that is all there is to them; else None."""
        return self._logits_BNV if self.chance.greedy and not self._along else None

    def _choose_along(self, row: int, choice_BN: Tensor) -> None:
        """Fill in one row's choices from the root down to where no child agrees."""
        assert self._situation is not None
        tree = self._situation.tree
        parents, depths = (values.expand_as(choice_BN)[row].tolist() for values in (tree.shape.parents, self.depths))
        tokens, valid = tree.tokens_BN[row].tolist(), tree.valid_BN[row].tolist()
        chance, choice_BN[row] = self.chance.only(row), -1
        node: int | None = 0
        while node is not None:
            depth_11 = torch.tensor([[depths[node]]], device=choice_BN.device)
            choice = int(chance.categorical(self._law_along(row, node)[None, None], depth_11, TOKEN))
            choice_BN[row, node] = choice
            agree = (n for n in range(1, tree.size) if parents[n] == node and tokens[n] == choice and valid[n])
            node = next(agree, None)

    def _law_along(self, row: int, node: int) -> Tensor:
        """The law [V] at one node of a row with a processor of its own."""
        assert self._situation is not None
        situation, logits_1V = self._situation, self._logits_BNV[row, node][None]
        tree = situation.tree
        way = tree.shape.ancestors.expand(len(tree.tokens_BN), -1, -1)[row, node].nonzero()[1:, 0]  # below the root
        path = tree.tokens_BN[row, way].tolist()
        processor, ends = situation.processors[row], situation.rows[row].eos
        if processor is not None and ends.isdisjoint(path):  # behind an EOS plain decoding calls nothing
            ids_1T = torch.tensor([[*situation.texts[row], *path]], device=logits_1V.device)
            scores_1V = logits_1V.to(torch.promote_types(logits_1V.dtype, torch.float32), copy=True)
            logits_1V = processor(ids_1T, scores_1V)  # which may write into what it gets
        return to_probs(logits_1V[None], [self.chance.params[row]])[0, 0]
