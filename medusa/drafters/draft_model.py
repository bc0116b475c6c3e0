"""Drafting with a second, smaller language model: speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

The draft model reads what was accepted into a cache of its own and fills a static tree level by level, one forward
each. In rows that sample, children are drawn from its laws without replacement (:mod:`medusa.drafters.children`).

Dimensions: B batch, N nodes, T time, V vocabulary, W parents (nodes with children).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.drafters.base import free, place_each, roots
from medusa.drafters.children import Drafting
from medusa.drafters.levels import Level, Plans, fill
from medusa.errors import UserError
from medusa.sampling import Chance
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk, TrunkOutput

DEPTH = 4  # tokens of the chain that is drafted where no tree is given


class DraftModelDrafter:
    """A draft model, the tree it fills, and how it chooses tokens in rows that sample.

    Args:
        draft: the model, perhaps one cut from the trunk (:func:`medusa.cut.cut`).
        topology: which of its candidates are taken: rank r is its r-th likeliest; left out, a chain of 4.
        drafting: how children are chosen in rows that sample.

    Raises:
        UserError: a tree of the root alone, or one that takes a rank beyond the vocabulary.
    """

    name = "draft model"

    def __init__(self, draft: Trunk, topology: Topology | None = None, drafting: Drafting | None = None) -> None:
        self.draft = draft
        topology = Topology.chain(DEPTH) if topology is None else topology
        if topology.size == 1:
            raise UserError("a draft model with a tree of the root alone drafts nothing: give a deeper tree")
        self.topology = Topology.from_paths(topology.paths[1:])  # ordered by depth, as it is when trimmed
        if max(self.topology.ranks) >= draft.draftable:
            raise UserError(
                f"the tree takes rank {max(self.topology.ranks)} of {draft.draftable} tokens: ranks count from 0 and"
                " end below the number of tokens that the draft model knows"
            )
        self.drafting = drafting or Drafting()

    def open(self, trunk: Trunk) -> DraftModelSession:
        """A session of one batch. UserError if the draft model's tokens or device are not those of ``trunk``."""
        check_vocabulary(trunk, self.draft)
        if trunk.device != self.draft.device:
            raise UserError(
                f"the draft model is on {self.draft.device} and the trunk on {trunk.device}: load both on one"
            )
        return DraftModelSession(self, trunk)


def check_vocabulary(trunk: Trunk, draft: Trunk) -> None:
    """Raise UserError unless an id means the same token to both.

    Tokenizers are compared where both have one: embeddings are often padded to different sizes. Else sizes must agree.
    """
    if trunk.tokenizer is not None and draft.tokenizer is not None:
        mine, other = trunk.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        if mine == other:
            return
        same = sum(other.get(token) == number for token, number in mine.items())
        raise UserError(
            f"the draft model's tokenizer has {len(other)} tokens and the trunk's {len(mine)}, of which {same} have the"
            " same id in both: give a draft model with the trunk's own tokenizer"
        )
    if trunk.vocab_size != draft.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} and the trunk of {trunk.vocab_size}: give a draft"
            " model with the trunk's own tokenizer"
        )


@dataclass
class _Row:
    """``unread``: what the cache lacks of the row's text, but for the next root. ``lost``: drafted for no more."""

    unread: list[int]
    lost: bool = False
    idle: bool = False  # lost, or a slot that serves no row


class DraftModelSession:
    """The draft model's cache, and what of each row's text it lacks.

    Where all drafts of a row were accepted that is the deepest of them, from which nothing was drafted: it is read
    with the next root.
    """

    def __init__(self, drafter: DraftModelDrafter, trunk: Trunk) -> None:
        self.draft = drafter.draft
        self.drafting = drafter.drafting
        self.topology = drafter.topology
        self.columns = trunk.vocab_size
        self.vocab = min(trunk.draftable, self.draft.draftable)  # ids that both have
        self.cache = self.draft.new_cache(0)
        self.rows: list[_Row] = []
        self.inner = 0  # nodes of the last tree that the draft model has read
        self._plans = Plans(drafter.topology)

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Read the prompts."""
        self.rows = [_Row([], lost=not self._fits(len(prompt))) for prompt in prompts]
        self.cache = self.draft.new_cache(len(prompts))
        self._read([prompt[:1] if row.lost else prompt for row, prompt in zip(self.rows, prompts, strict=True)])

    def _fits(self, length: int) -> bool:
        """Whether a tree may follow ``length`` tokens: the draft model's context may be shorter than the trunk's.

        Where its rotary frequencies change it ends too, so that all rows lie on one side.
        """
        end = self.draft.horizon(0)
        return end is None or length + self.topology.depth <= end

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read more of each row behind what the cache holds; return the logits [B, V] after it."""
        ids_BT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in enumerate(texts):
            ids_BT[row, : len(text)] = torch.as_tensor(text)
        ids_BT = self._readable(ids_BT.to(self.draft.device, non_blocking=True))
        return self.draft.prefill(ids_BT, [len(text) for text in texts], self.cache)[0]

    def _readable(self, ids: Tensor) -> Tensor:
        """Ids that the draft model has: one that only pads the trunk's vocabulary is read as another."""
        return ids.clamp(max=self.draft.vocab_size - 1)

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
        """Fill the tree, trimmed to ``room``, with the draft model's candidates: drawn in rows that sample."""
        for number, (row, root) in enumerate(zip(self.rows, roots(root_B, chance), strict=True)):
            row.lost = row.lost or not self._fits(self.cache.lengths[number] + len(row.unread) + 1)
            row.idle = row.lost or free(chance, number)
            row.unread = [root] if row.idle else [*row.unread, root]
        idle = [number for number, row in enumerate(self.rows) if row.idle]
        self.cache.release(idle)
        depth = 0 if len(idle) == len(self.rows) else min(room, self.topology.depth)
        plan = self._plans.of(depth, root_B.device)
        self.inner = plan.inner
        tree = fill(plan, root_B[:, None], self._laws, chance, self.drafting, self.columns)
        if not idle:
            return tree
        valid_BN = tree.valid_BN.clone()
        for number in idle:
            valid_BN[number, 1:] = False
        return replace(tree, valid_BN=valid_BN)

    def _laws(self, level: Level, tokens_BN: Tensor) -> Tensor:
        """Logits [B, W, V] of a level's parents, of the tokens that both models have; the level above was read."""
        if level.start:
            read = DraftTree(level.beginning, self._readable(tokens_BN), torch.ones_like(tokens_BN, dtype=torch.bool))
            keep = level.parent_W - level.start
            return self.draft.tree_forward(read, self.cache, keep, known=level.start).logits[..., : self.vocab]
        logits_BV = self._read([row.unread for row in self.rows])
        # the root was read as text, and is node 0 of the tree: it stays where it is and counts as not committed
        self.cache.set_lengths([length - 1 for length in self.cache.lengths])
        return logits_BV[:, None, : self.vocab]

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Keep what was read of each accepted path; what was not is read with the next root."""
        if not self.inner:
            return
        kept = []
        for row, (path, tokens) in zip(self.rows, acceptance.on_host(tree), strict=True):
            kept.append([] if row.idle else [node for node in path if node < self.inner])
            row.unread = (
                [] if row.idle else [token for node, token in zip(path[1:], tokens, strict=False) if node >= self.inner]
            )
        self.cache.commit(kept)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.cache.select(rows)
        self.rows = [self.rows[row] for row in rows]

    def admit(self, slots: Sequence[int], other: DraftModelSession) -> None:
        """Take over another session's rows, with what their cache holds."""
        self.cache.admit(slots, other.cache)
        place_each(self.rows, slots, other.rows)
