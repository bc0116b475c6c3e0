"""The one decode loop: propose, verify, accept, commit. Every drafter runs in it; the null drafter is the baseline.

Dimensions: B batch, N nodes, A accepted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from medusa.accept import AcceptRule, DeterministicRule
from medusa.drafters.base import Drafter
from medusa.errors import UserError
from medusa.rules import RecursiveRule
from medusa.sampling import Chance, Draws, HashDraws, Laws, SamplingParams
from medusa.tree import DraftTree
from medusa.trunk import Trunk


@dataclass(frozen=True)
class Request:
    """One row's prompt and limits.

    Args:
        ids: the prompt's token ids, at least one.
        max_new_tokens: the row ends after exactly so many tokens, if nothing ends it before.
        eos: ids that end the row; the one that did is its last token.
        sampling: how its tokens are chosen.
    """

    ids: Sequence[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Step:
    """What one verifier forward brought: ``tokens[row]`` for the rows it served, ``finished[row]`` why a row ended.

    ``finished`` is ``"eos"`` or ``"length"``. ``accepted[row]`` counts drafted tokens that the trunk agreed to, before
    any limit cut them. ``nodes`` is the size of the tree, 0 for the prefill.
    """

    tokens: dict[int, list[int]]
    finished: dict[int, str]
    accepted: dict[int, int]
    nodes: int


class Decoder:
    """A batch under way. Rows are slots: a finished row goes quiet, and leaves when half of the batch has finished.

    Without a ``rule``, trees with children drawn at random are accepted by the recursive one, others by the
    deterministic one: both are lossless.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, a prompt that fills the context, or no tokens asked.
    """

    def __init__(
        self,
        trunk: Trunk,
        drafter: Drafter,
        requests: Sequence[Request],
        rule: AcceptRule | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.trunk = trunk
        self.requests = list(requests)
        self.rule = rule
        self.draws = draws or HashDraws()
        self.session = drafter.open(trunk)
        if len({trunk.horizon(len(request.ids)) for request in self.requests}) > 1:
            raise UserError(
                f"the prompts of this batch lie on both sides of position {trunk.horizon(0)}, where the trunk's rotary"
                " frequencies change: decode the longer ones apart"
            )
        self.left = [_allowance(trunk, request, row) for row, request in enumerate(self.requests)]
        self.live = set(range(len(self.requests)))
        self._serve(list(self.live))

    @torch.inference_mode()
    def prefill(self) -> Step:
        """Read the prompts and choose each row's first token."""
        lengths = [len(request.ids) for request in self.requests]
        ids_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, request in enumerate(self.requests):
            ids_BT[row, : lengths[row]] = torch.as_tensor(request.ids)  # pads lie behind a row's length: unwritten
        self.cache = self.trunk.new_cache(len(lengths))
        logits_BV, hidden_BD, output = self.trunk.prefill(ids_BT.to(self.trunk.device), lengths, self.cache)
        self.session.start([request.ids for request in self.requests], hidden_BD, output)
        depths = torch.zeros(1, 1, dtype=torch.long, device=logits_BV.device)
        chance = Chance(self.sampling, lengths, self.draws, logits_BV.device)
        self.root_B = Laws(logits_BV[:, None], depths, chance).choice_BN[:, 0]
        return self._emit([[token] for token in self.root_B.tolist()], nodes=0)

    @torch.inference_mode()
    def step(self) -> Step:
        """Propose, verify, accept, commit: one forward of the trunk."""
        room = max(self.left[row] for row in self.live) - 1
        after = [length + 1 for length in self.cache.lengths]  # where the token after the root will stand
        chance = Chance(self.sampling, after, self.draws, self.root_B.device)
        tree = self._within_limits(self.session.propose(self.root_B, room, chance), chance)
        verified = self.trunk.tree_forward(tree, self.cache)
        rule = self.rule or (DeterministicRule() if tree.sampled_BN is None else RecursiveRule())
        acceptance = rule(tree, Laws(verified.logits, tree.shape.depths, chance))
        self.session.commit(tree, verified, acceptance)
        self.root_B = acceptance.next_token_B
        # the step's one transfer: the trees' tokens, the token after each accepted path, and the path
        packed = torch.cat([tree.tokens_BN, self.root_B[:, None], acceptance.path_BA], 1).tolist()
        paths = [[node for node in row[tree.size + 1 :] if node >= 0] for row in packed]
        self.cache.commit(acceptance.path_BA, [len(path) for path in paths])
        new = [[*(row[node] for node in path[1:]), row[tree.size]] for row, path in zip(packed, paths, strict=True)]
        return self._emit(new, tree.size)

    def finish(self, row: int) -> None:
        """End a row from outside, for a stop string or a client that left."""
        self.live.discard(row)

    def _within_limits(self, tree: DraftTree, chance: Chance) -> DraftTree:
        """Nodes beyond a row's own limit become fillers: what it draws depends on no other row's room."""
        if chance.greedy or len({self.left[row] for row in self.slots}) == 1:
            return tree
        room_B1 = torch.tensor([[self.left[row] - 1] for row in self.slots], device=tree.tokens_BN.device)
        return replace(tree, valid_BN=tree.valid_BN & (tree.shape.depths <= room_B1))

    def _emit(self, tokens: list[list[int]], nodes: int) -> Step:
        """Cut each live row's new tokens at its limit and at the first EOS, and let finished rows go."""
        step = Step({}, {}, {}, nodes)
        for row, new in zip(self.slots, tokens, strict=True):
            if row not in self.live:
                continue
            step.accepted[row] = len(new) - 1
            eos = self.requests[row].eos
            stop = next((index for index, token in enumerate(new) if token in eos), None)
            new = new[: self.left[row] if stop is None else min(stop + 1, self.left[row])]
            step.tokens[row] = new
            self.left[row] -= len(new)
            if new[-1] in eos:
                step.finished[row] = "eos"
            elif self.left[row] == 0:
                step.finished[row] = "length"
        self.live -= step.finished.keys()
        self._close_up()
        return step

    def _close_up(self) -> None:
        """Drop finished rows once they are half of the batch: copies stay rare, and batches halve."""
        if not self.live or 2 * len(self.live) > len(self.slots):
            return
        kept = [slot for slot, row in enumerate(self.slots) if row in self.live]
        self.cache.select(kept)
        self.session.select(kept)
        self.root_B = self.root_B[kept]
        self._serve([self.slots[slot] for slot in kept])

    def _serve(self, slots: list[int]) -> None:
        """Note which request each slot of the batch serves."""
        self.slots = slots
        self.sampling = [self.requests[row].sampling for row in slots]


def decode(
    trunk: Trunk,
    drafter: Drafter,
    requests: Sequence[Request],
    rule: AcceptRule | None = None,
    draws: Draws | None = None,
) -> Iterator[Step]:
    """Decode a batch to its end, step by step; the first step is the prefill."""
    if not requests:
        return
    decoder = Decoder(trunk, drafter, requests, rule, draws)
    yield decoder.prefill()
    while decoder.live:
        yield decoder.step()


def generate_ids(trunk: Trunk, drafter: Drafter, requests: Sequence[Request]) -> list[list[int]]:
    """The new token ids of each row: batched generation for calibration and distillation."""
    ids: list[list[int]] = [[] for _ in requests]
    for step in decode(trunk, drafter, requests):
        for row, tokens in step.tokens.items():
            ids[row] += tokens
    return ids


def _allowance(trunk: Trunk, request: Request, row: int) -> int:
    """How many tokens a row may emit: what was asked, or what the context leaves."""
    size = len(request.ids)
    if not size:
        raise UserError(f"prompt {row} has no tokens: give at least one")
    worst = max(request.ids, key=lambda token: token if token >= 0 else trunk.vocab_size - token)
    if not 0 <= worst < trunk.vocab_size:
        raise UserError(f"prompt {row} has token id {worst}: ids lie in 0..{trunk.vocab_size - 1}")
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens={request.max_new_tokens}: ask for at least 1")
    horizon = trunk.horizon(size)
    if horizon is None:
        return request.max_new_tokens
    if size >= horizon:
        raise UserError(
            f"prompt {row} has {size} tokens and a text may reach {horizon} with this trunk: shorten it to at most"
            f" {horizon - 1}"
        )
    return min(request.max_new_tokens, horizon - size)
