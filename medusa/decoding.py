"""The one decode loop: propose, verify, accept, commit. Every drafter runs in it; the null drafter is the baseline.

Dimensions: B batch, N nodes, A accepted nodes, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.accept import AcceptRule, DeterministicRule
from medusa.cache import SlotCache
from medusa.drafters.base import Drafter, DraftSession, layers_of, place
from medusa.errors import UserError
from medusa.laws import Laws, Situation
from medusa.processors import Row
from medusa.requests import Past, Request, Step, TokenLogprob, Underway
from medusa.rules import RecursiveRule
from medusa.sampling import Chance, Draws, HashDraws, SamplingParams
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput
from medusa.uploads import upload

__all__ = ["Decoder", "Past", "Request", "Step", "TokenLogprob", "decode", "generate_ids", "joining"]


class Decoder:
    """A batch under way. Its slots serve rows; a finished row's slot is free until another request is admitted.

    Rows are numbered in the order of their admission. Slots that stay free leave once they are half of the batch.
    Without a ``rule``, trees with children drawn at random are accepted by the recursive one, others by the
    deterministic one: both are lossless.
    """

    def __init__(
        self, trunk: Trunk, drafter: Drafter, rule: AcceptRule | None = None, draws: Draws | None = None
    ) -> None:
        self.trunk = trunk
        self.drafter = drafter
        self.layers = layers_of(drafter)
        self.rule = rule
        self.draws = draws or HashDraws()
        self.rows: dict[int, Underway] = {}  # by number, until they end
        self.slots: list[int | None] = []  # the row that each slot of the batch serves, None where it is free
        self.admitted = 0
        self._single = Shape.static(Topology.root(), trunk.device)
        self._mode = torch.inference_mode()  # held: to make one takes as long as an operation

    @property
    def live(self) -> set[int]:
        """Numbers of the rows that have not ended."""
        return set(self.rows)

    def takes(self, request: Request) -> bool:
        """Whether ``request`` may join the rows under way now.

        Not while they lie on the other side of a position at which the trunk's rotary frequencies change.
        """
        horizon = self.trunk.horizon(len(request.ids))
        return all(self.trunk.horizon(len(row.text)) == horizon for row in self.rows.values())

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> Step:
        """Let requests join: read their prompts and choose each one's first token.

        A request with a past comes alone: what its cache already holds is not read again.

        Raises:
            UserError: an empty prompt, an id outside the vocabulary, a prompt that fills the context, no tokens
                asked, or a request that may not join now.
        """
        rows = [Underway(request, request.allowance(self.trunk, place)) for place, request in enumerate(requests)]
        if not all(map(self.takes, requests)) or len({self.trunk.horizon(len(each.ids)) for each in requests}) > 1:
            raise UserError(
                f"the prompts of this batch lie on both sides of position {self.trunk.horizon(0)}, where the trunk's"
                " rotary frequencies change: decode the longer ones apart"
            )
        logits_BV, hidden_BD, output, cache = self._read(requests)
        session = self.drafter.open(self.trunk)
        session.start([request.ids for request in requests], hidden_BD, output)
        last_B1 = upload([[row.text[-1]] for row in rows], logits_BV.device)
        chance = Chance([row.request.sampling for row in rows], cache.lengths, self.draws, logits_BV.device)
        tree = DraftTree(self._single, last_B1, torch.ones_like(last_B1, dtype=torch.bool))
        situation = self._situation(tree, rows) if any(row.request.processed for row in rows) else None
        root_B = Laws(logits_BV[:, None], tree.shape.depths, chance, situation).choice_BN[:, 0]
        slots = self._place(rows, root_B, cache, session)
        new = [[token] for token in root_B.tolist()]
        return self._emit(slots, new, _logprobs(rows, logits_BV[:, None], [[0]] * len(rows), new), nodes=0)

    def _read(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor, TrunkOutput, SlotCache]:
        """Prefill a cache with prompts, or with what follows the past of the only one."""
        past = requests[0].past
        assert len(requests) == 1 or all(request.past is None for request in requests), "a past comes alone"
        cache = self.trunk.new_cache(len(requests))
        known = 0 if past is None else past.known(requests[0].ids, self.trunk)
        if past is not None and known:
            cache = past.cache
            cache.set_lengths([known])
        news = [request.ids[known:] for request in requests]
        ids_BT = torch.zeros(len(news), max(map(len, news)), dtype=torch.long)
        for row, new in enumerate(news):
            ids_BT[row, : len(new)] = torch.as_tensor(new)  # pads lie behind a row's length: unwritten
        read = self.trunk.prefill(
            ids_BT.to(self.trunk.device, non_blocking=True), [len(new) for new in news], cache, self.layers
        )
        return *read, cache

    def _place(self, rows: Sequence[Underway], root_B: Tensor, cache: SlotCache, session: DraftSession) -> list[int]:
        """Give new rows their numbers, and slots: free ones first, then more; return the slots."""
        numbers = range(self.admitted, self.admitted + len(rows))
        self.admitted += len(rows)
        if not self.rows:
            self.cache, self.session, self.root_B = cache, session, root_B
            self.slots, slots = [None] * len(rows), list(range(len(rows)))
        else:
            free = [slot for slot, number in enumerate(self.slots) if number is None]
            more = range(len(self.slots), len(self.slots) + len(rows) - len(free))
            slots = [*free, *more][: len(rows)]
            self.slots += [None] * len(more)
            self.cache.admit(slots, cache)
            self.session.admit(slots, session)
            self.root_B = place(self.root_B, slots, root_B)
        for slot, number, row in zip(slots, numbers, rows, strict=True):
            self.slots[slot], self.rows[number] = number, row
        self._look_up()
        return slots

    def _look_up(self) -> None:
        """What stays the same from step to step, whenever rows come or go."""
        self._served = [None if number is None else self.rows[number] for number in self.slots]
        self._sampling = [SamplingParams() if row is None else row.request.sampling for row in self._served]
        self._processed = any(row.request.processed for row in self.rows.values())
        self._tells = any(row.request.logprobs is not None for row in self.rows.values())

    def step(self) -> Step:
        """Propose, verify, accept, commit: one forward of the trunk."""
        with self._mode:
            return self._step()

    def _step(self) -> Step:
        rows, lefts = self._served, [row.left for row in self.rows.values()]
        after = [length + 1 for length in self.cache.lengths]  # where the token after the root will stand
        chance = Chance(self._sampling, after, self.draws, self.root_B.device)
        chance.roots = [0 if row is None else row.text[-1] for row in rows]
        tree = self.session.propose(self.root_B, max(lefts) - 1, chance)
        if tree.shape.levels > min(lefts):
            tree = self._within_limits(tree, chance)
        verified = self.trunk.tree_forward(tree, self.cache, layers=self.layers)
        rule = self.rule or (DeterministicRule() if tree.sampled_BN is None else RecursiveRule())
        situation = self._situation(tree, rows) if self._processed else None
        acceptance = rule(tree, Laws(verified.logits, tree.shape.depths, chance, situation))
        self.session.commit(tree, verified, acceptance)
        self.root_B = acceptance.next_token_B
        walks = acceptance.on_host(tree)
        self.cache.commit([walk.path if row else [] for walk, row in zip(walks, rows, strict=True)])
        new, paths = [walk.tokens for walk in walks], [walk.path for walk in walks]
        logprobs = _logprobs(rows, verified.logits, paths, new) if self._tells else [[]] * len(rows)
        return self._emit(range(len(rows)), new, logprobs, tree.size)

    def _situation(self, tree: DraftTree, rows: Sequence[Underway | None]) -> Situation:
        """What the processors of these rows need to know."""
        nobody = Underway(Request((0,), 1), 1)
        each = [row or nobody for row in rows]
        texts = [row.text if row else [0] for row in rows]
        facts = [Row(row.request.processing, row.prompt, row.request.longest, row.request.eos) for row in each]
        return Situation(tree, texts, facts, [row.request.processor for row in each])

    def finish(self, row: int) -> None:
        """End a row from outside, as for a client that left; its slot is free. A row that has ended stays so."""
        if row in self.rows:
            self._release([row])

    def _within_limits(self, tree: DraftTree, chance: Chance) -> DraftTree:
        """Nodes beyond a row's own limit become fillers: what it draws depends on no other row's room."""
        if chance.greedy and all(row.request.processor is None for row in self.rows.values()):
            return tree
        least = min(row.left for row in self.rows.values())
        lefts = [least if row is None else row.left for row in self._served]
        room_B1 = upload(lefts, tree.tokens_BN.device)[:, None] - 1
        return replace(tree, valid_BN=tree.valid_BN & (tree.shape.depths <= room_B1))

    def _emit(
        self,
        slots: Sequence[int],
        tokens: Sequence[list[int]],
        logprobs: Sequence[list[TokenLogprob]],
        nodes: int,
    ) -> Step:
        """Hand out each live row's new tokens up to where it ends, and let finished rows go."""
        step = Step({}, {}, {}, nodes)
        for slot, new, chances in zip(slots, tokens, logprobs, strict=True):
            number = self.slots[slot]
            if number is None:
                continue
            step.accepted[number] = len(new) - 1
            kept, reason = self.rows[number].take(new)
            step.tokens[number] = kept
            if chances:
                step.logprobs[number] = chances[: len(kept)]
            if reason:
                step.finished[number] = reason
        self._release(list(step.finished))
        return step

    def _release(self, numbers: Sequence[int]) -> None:
        """Free the slots of rows that end. The last ones' stay as they are: a conversation may go on from there."""
        for number in numbers:
            self.last = self.rows.pop(number)
        if not self.rows or not numbers:
            return
        freed = [slot for slot, number in enumerate(self.slots) if number in numbers]
        self.slots = [None if slot in freed else number for slot, number in enumerate(self.slots)]
        self._look_up()
        kept = [slot for slot, number in enumerate(self.slots) if number is not None]
        if 2 * len(kept) > len(self.slots):
            self.cache.release(freed)
            return
        # half of the batch is free: the others close up; copies stay rare, and batches halve
        self.cache.select(kept)
        self.session.select(kept)
        self.root_B = self.root_B[kept]
        self.slots = [self.slots[slot] for slot in kept]
        self._look_up()

    def past(self) -> Past:
        """What the only row, which has ended, leaves in the cache."""
        assert len(self.slots) == 1 and not self.rows, "a past is taken from a batch of one row that has ended"
        return Past.of(self.last.text, self.cache)


def _logprobs(
    rows: Sequence[Underway | None], logits_BNV: Tensor, paths: Sequence[list[int]], tokens: Sequence[list[int]]
) -> list[list[TokenLogprob]]:
    """Of rows that asked, the trunk's own log-probabilities of ``tokens``, each of which follows a node of its path."""
    found: list[list[TokenLogprob]] = []
    for slot, row in enumerate(rows):
        if row is None or row.request.logprobs is None:
            found.append([])
            continue
        logits_AV = logits_BNV[slot, paths[slot]]
        log_AV = logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32)).log_softmax(-1)
        most = log_AV.topk(min(row.request.logprobs, log_AV.shape[-1]))
        own = log_AV.gather(1, torch.tensor(tokens[slot], device=log_AV.device)[:, None])[:, 0].tolist()
        tops = zip(most.indices.tolist(), most.values.tolist(), strict=True)
        pairs = zip(own, tops, strict=True)
        found.append([TokenLogprob(each, dict(zip(*top, strict=True))) for each, top in pairs])
    return found


def decode(
    trunk: Trunk,
    drafter: Drafter,
    requests: Sequence[Request],
    rule: AcceptRule | None = None,
    draws: Draws | None = None,
    most: int | None = None,
) -> Generator[Step, None, None]:
    """Decode requests to their end, step by step; the first step is a prefill. Rows are numbered as ``requests``.

    ``most`` limits the rows under way at once: the others are admitted in order as rows end. So are those that have to
    wait until a batch has ended (:meth:`Decoder.takes`).

    Raises:
        UserError: a request that can't be decoded, before anything is.
    """
    for row, request in enumerate(requests):
        request.allowance(trunk, row)
    decoder, waiting = Decoder(trunk, drafter, rule, draws), deque(requests)
    while waiting or decoder.rows:
        ready = [waiting.popleft() for _ in range(joining(decoder, waiting, most))]
        yield decoder.admit(ready) if ready else decoder.step()


def joining(decoder: Decoder, waiting: Iterable[Request], most: int | None) -> int:
    """How many of ``waiting`` may join now, in order and in one admission, so that at most ``most`` are under way."""
    ready: list[Request] = []
    for request in waiting:
        if (most is not None and len(decoder.rows) + len(ready) >= most) or not decoder.takes(request):
            break
        sides = {decoder.trunk.horizon(len(each.ids)) for each in (*ready[:1], request)}
        if len(sides) > 1 or (ready and (ready[0].past or request.past)):
            break
        ready.append(request)
    return len(ready)


def generate_ids(
    trunk: Trunk, drafter: Drafter, requests: Sequence[Request], most: int | None = None
) -> list[list[int]]:
    """The new token ids of each row: batched generation for calibration and distillation."""
    ids: list[list[int]] = [[] for _ in requests]
    for step in decode(trunk, drafter, requests, most=most):
        for row, tokens in step.tokens.items():
            ids[row] += tokens
    return ids
