"""The bias of the token just before: nothing at the start, of low rank, and in every law that a tree is filled from."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa.calibrate import Continuations, continuations, head_ranks, tokens_per_step
from medusa.confidence import GRID, temperatures
from medusa.decoding import Request, decode
from medusa.dialects import published_names
from medusa.drafters.children import Drafting
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.heads import PROJECTIONS, HeadsConfig, MedusaHeads
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import VOCAB, memorising_heads, plain_greedy, random_heads, random_topology, tiny_model, tiny_trunk
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk, TrunkOutput

RANK = 5
IDS = [1, 2, 5, 8, 13, 21, 34, 40, 41, 55, 63, 64]
ROOTS = torch.tensor([0, 17, 64])
PROMPTS = [[3, 0, 41, 7], [11], [60, 2]]
TOKENS = 30


@cache
def trunk_of(family: str = "llama") -> Trunk:
    return tiny_trunk(family)


def heads_of(
    kind: str = "medusa", projection: str = "own", ids: list[int] | None = None, num: int = 3, **options: Any
) -> MedusaHeads:
    """Heads with every parameter moved off its start."""
    rank = 7 if projection == "low_rank" else None
    config = HeadsConfig(kind, num, 1, projection, None if ids is None else len(ids), rank, RANK)
    heads = MedusaHeads(config, options.pop("trunk", trunk_of()), None if ids is None else torch.tensor(ids), **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return heads.eval()


def states_of(rows: int = 3) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def law_of(heads: MedusaHeads, head: int, hidden_D: Tensor, way: list[int]) -> Tensor:
    """Logits behind the tokens on a way from the root, by the definition: the head's own, and a product of matrices."""
    context = heads.context(head, heads.embed(torch.tensor(way)))
    own = heads.logits(head, heads.features(head, hidden_D, context))
    weights = heads.state_dict()
    before, after = (weights[f"heads.{head}.markov.{part}.weight"] for part in ("before", "after"))
    return own + (before @ after.T)[way[-1]]


def way_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """The tokens from the root to a node."""
    path = tree.shape.paths.expand(len(tree.tokens_BN), -1, -1)[row, node]
    return [int(tree.tokens_BN[row, each]) for each in path if each >= 0]


def chance_of(temperature: float = 1.0, seed: int = 0) -> Chance:
    params = [SamplingParams(temperature=temperature, seed=seed + row) for row in range(3)]
    return Chance(params, [7] * 3, HashDraws(), "cpu")


def opened(session: Any) -> Any:
    hidden_BD = states_of()
    session.start([[0]] * 3, hidden_BD, TrunkOutput(hidden_BD[:, None], hidden_BD[:, None]))
    return session


# What it is.


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", ["medusa", "root"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # a plain projection, one with a softcap
def test_new_heads_are_those_without_it(family: str, kind: str, projection: str) -> None:
    trunk, rank = trunk_of(family), 7 if projection == "low_rank" else None
    plain, biased = (
        MedusaHeads(HeadsConfig(kind, 3, projection=projection, rank=rank, markov=markov), trunk)
        for markov in (None, RANK)
    )
    logits = plain.logits(1, states_of())
    assert torch.equal(biased.behind(1, biased.logits(1, states_of()), ROOTS), logits)
    assert plain.behind(1, logits, ROOTS) is logits
    trees = [
        opened(MedusaDrafter(each, Topology.full([3, 2, 2])).open(trunk)).propose(ROOTS, 9) for each in (plain, biased)
    ]
    assert torch.equal(trees[0].tokens_BN, trees[1].tokens_BN)


def test_the_first_step_can_teach_it() -> None:
    """Were both matrices 0 at the start, their gradients would be as well, for ever."""
    heads = MedusaHeads(HeadsConfig("medusa", 2, markov=RANK), trunk_of())
    markov = heads.head(1).markov
    assert markov is not None and not markov.after.weight.any()
    heads.behind(1, heads.logits(1, states_of()), ROOTS)[:, 3].sum().backward()
    assert markov.after.weight.grad is not None and markov.after.weight.grad[3].any()
    lengths = markov.before.weight.square().sum(1)
    assert 0.8 < lengths.mean() < 1.2


def test_new_heads_are_the_same_in_every_run() -> None:
    torch.manual_seed(1)
    one = MedusaHeads(HeadsConfig("medusa", 2, markov=RANK), trunk_of())
    torch.manual_seed(2)
    other = MedusaHeads(HeadsConfig("medusa", 2, markov=RANK), trunk_of())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("ids", [None, IDS])
def test_the_bias_is_of_low_rank_and_behind_each_token_its_own(ids: list[int] | None) -> None:
    heads = heads_of(ids=ids)
    width, every = len(ids or range(VOCAB)), torch.arange(VOCAB)
    bias = heads.behind(1, torch.zeros(VOCAB, width, dtype=torch.float64), every)
    assert torch.linalg.matrix_rank(bias) == RANK and len(bias.unique(dim=0)) == VOCAB
    assert not torch.equal(bias, heads.behind(2, torch.zeros_like(bias), every))  # each head has its own
    logits = torch.randn(2, 4, width, dtype=torch.float64)
    before = torch.tensor([[0, 3, 64, 3], [1, 1, 9, 2]])
    torch.testing.assert_close(heads.behind(1, logits, before), logits + bias[before])
    torch.testing.assert_close(heads.behind(1, logits[..., :5], before), (logits + bias[before])[..., :5])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (HeadsConfig("medusa", markov=66), r"heads\.markov=66: a bias of 65 tokens on 65 has at most rank 65"),
        (
            HeadsConfig("medusa", markov=13, vocab=12),
            r"heads\.markov=13: a bias of 65 tokens on 12 has at most rank 12",
        ),
    ],
)
def test_a_rank_beyond_the_vocabularies_is_refused(config: HeadsConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        MedusaHeads(config, trunk_of(), None if config.vocab is None else torch.tensor(IDS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "medusa", "markov": 0}, r"heads\.markov=0: give at least 1"),
        ({"kind": "hydra", "markov": 8}, r"heads\.markov=8 with heads\.kind='hydra'.*medusa or root"),
    ],
)
def test_wrong_configurations_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        HeadsConfig(**options)


def test_no_published_layout_has_one() -> None:
    with pytest.raises(UserError, match=r"heads\.markov=8: no published layout"):
        published_names(HeadsConfig("medusa", markov=8))


# Drafts.


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", ["medusa", "root"])
def test_every_node_holds_its_rank_behind_its_parent(kind: str, projection: str, ids: list[int] | None) -> None:
    heads = heads_of(kind, projection, ids)
    topology = random_topology(random.Random(len(kind)), 24, ranks=6, depth=3)
    tree = opened(MedusaDrafter(heads, topology).open(heads.trunk)).propose(ROOTS, 9)
    for row in range(3):
        for node in range(1, tree.size):
            *way, token = way_to(tree, row, node)
            order = heads.tokens(law_of(heads, len(way) - 1, states_of()[row], way).argsort(descending=True))
            assert token == order[topology.ranks[node]]


def test_nodes_in_any_order_hold_the_same_tokens() -> None:
    heads, mixed_up = heads_of(), Topology((-1, 0, 1, 2, 0, 4), (0, 1, 0, 2, 0, 3))
    tree = opened(MedusaDrafter(heads, mixed_up).open(heads.trunk)).propose(ROOTS, 9)
    for node in range(1, tree.size):
        *way, token = way_to(tree, 1, node)
        order = law_of(heads, len(way) - 1, states_of()[1], way).argsort(descending=True)
        assert token == order[mixed_up.ranks[node]]


@pytest.mark.parametrize("mode", ["sampled", "mixed"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_the_law_of_drawn_children_is_that_behind_their_parent(ids: list[int] | None, mode: str) -> None:
    heads, topology = heads_of("root", "shared", ids), Topology((-1, 0, 1, 2, 0, 4, 1), (0, 1, 0, 2, 0, 3, 1))
    session = opened(MedusaDrafter(heads, topology, Drafting(mode, 1.5)).open(heads.trunk))
    drawn = set()
    for seed in range(4):
        tree = session.propose(ROOTS, 9, chance_of(0.8, seed))
        drawn.add(tuple(tree.tokens_BN.flatten().tolist()))
        for row in range(3):
            for node in sorted(set(topology.parents[1:])):
                way = way_to(tree, row, node)
                p = (law_of(heads, len(way) - 1, states_of()[row], way) / 1.2).softmax(-1)
                whole = torch.zeros(VOCAB, dtype=torch.float64)
                whole[heads.tokens(torch.arange(len(p)))] = p
                for child in (child for child in range(1, tree.size) if topology.parents[child] == node):
                    if not tree.sampled_BN[row, child]:
                        whole[tree.tokens_BN[row, child]] = 0  # of mode mixed
                torch.testing.assert_close(tree.q_BNV[row, node], whole)
    assert len(drawn) == 4


def test_rows_the_tokenizer_lacks_are_never_drafted() -> None:
    class Words:
        def __len__(self) -> int:
            return 9

    trunk = Trunk(tiny_model("llama", vocab_size=12), Words(), check=False)
    heads = random_heads(trunk, HeadsConfig("medusa", 3, markov=4))
    roots = torch.tensor([1, 2, 8])
    with torch.no_grad():
        for head in range(3):
            heads.head(head).markov.before.weight.fill_(1.0)  # type: ignore[union-attr]
            heads.head(head).markov.after.weight[9:] = 9.0  # type: ignore[union-attr]
    session = opened(MedusaDrafter(heads, Topology.full([3, 2, 2])).open(trunk))
    for chance in (None, chance_of()):
        assert session.propose(roots, 9, chance).tokens_BN.max() < 9
    assert opened(DynamicDrafter(heads, 12).open(trunk)).propose(roots, 9).tokens_BN.max() < 9


@pytest.mark.parametrize("kind", ["medusa", "root"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_a_dynamic_tree_is_scored_by_the_laws_behind_each_parent(kind: str, ids: list[int] | None) -> None:
    heads, heat = heads_of(kind, ids=ids), (0.5, 1.0, 2.0)
    tree = opened(DynamicDrafter(heads, 14, temperatures=heat).open(heads.trunk)).propose(ROOTS, 9)
    for row in range(3):
        score = [0.0]
        for node in range(1, tree.size):
            *way, token = way_to(tree, row, node)
            log = (law_of(heads, len(way) - 1, states_of()[row], way) / heat[len(way) - 1]).log_softmax(-1)
            score.append(
                score[int(tree.shape.parents[row, node])] + float(log[int(heads.columns(torch.tensor(token)))])
            )
        assert score == pytest.approx(sorted(score, reverse=True))


def test_a_dynamic_tree_draws_nothing_of_its_own() -> None:
    """Its shape would depend on what was drawn."""
    heads = heads_of("root")
    with pytest.raises(UserError, match=r"drafting\.mode='sampled'.*takes top"):
        DynamicDrafter(heads, 8, Drafting("sampled"))
    given = Topology.full([2, 1])
    dynamic, static = DynamicDrafter(heads, 8, sampling=given), MedusaDrafter(heads, given)
    one, other = (opened(each.open(heads.trunk)).propose(ROOTS, 9, chance_of()) for each in (dynamic, static))
    assert torch.equal(one.tokens_BN, other.tokens_BN) and torch.equal(one.q_BNV, other.q_BNV)
    top = opened(DynamicDrafter(heads, 8).open(heads.trunk)).propose(ROOTS, 9, chance_of())
    assert top.size == 8 and top.sampled_BN is None


@pytest.mark.parametrize("mode", ["greedy", "sampled", "dynamic"])
def test_heads_stay_parallel(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states and own logits are made once for each head, however many parents there are."""
    heads, calls = heads_of("root"), []
    drafter = DynamicDrafter(heads, 20) if mode == "dynamic" else MedusaDrafter(heads, Topology.full([3, 3, 2]))
    session = opened(drafter.open(heads.trunk))
    real = session.unrolled.logits

    def counted(head: int, features: Tensor) -> Tensor:
        calls.append((head, features.shape))
        return real(head, features)

    monkeypatch.setattr(session.unrolled, "logits", counted)
    session.propose(ROOTS, 9, chance_of() if mode == "sampled" else None)
    assert calls == [(head, (3, 32)) for head in range(3)]


# Calibration.


@cache
def held_of() -> Continuations:
    return continuations(trunk_of(), PROMPTS, TOKENS)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("kind", ["medusa", "root"])
def test_ranks_are_those_behind_the_true_token(kind: str, ids: list[int] | None) -> None:
    heads, held, found = heads_of(kind, ids=ids), held_of(), 0
    for row, text, start, hidden_TD in zip(head_ranks(heads, held), held.ids, held.starts, held.hidden, strict=True):
        for place in range(len(row)):
            for head in range(3):
                state = start - 1 + place
                answer = text[state + 2 + head] if state + 2 + head < len(text) else None
                if answer is None or answer not in (ids or range(VOCAB)):
                    continue
                order = law_of(heads, head, hidden_TD[state], text[state + 1 : state + 2 + head])
                token = heads.tokens(order.argsort(descending=True))[int(row[place, head])]
                assert token == answer
                found += 1
    assert found > 10


@pytest.mark.parametrize("kind", ["medusa", "root"])
def test_tokens_per_step_are_those_of_the_real_loop(kind: str) -> None:
    config = HeadsConfig(kind, 3, markov=RANK)
    heads = memorising_heads(trunk_of(), config, held_of().ids[:2])
    ranks = head_ranks(heads, held_of())
    for topology in (Topology.chain(3), Topology.full([2, 2, 1]), random_topology(random.Random(0), 12, 3, 3)):
        emitted = steps = 0
        for prompt in PROMPTS:
            done = list(decode(trunk_of(), MedusaDrafter(heads, topology), [Request(prompt, TOKENS)]))
            emitted, steps = emitted + sum(len(step.tokens[0]) for step in done) - 1, steps + len(done) - 1
        assert tokens_per_step(topology, ranks) == emitted / steps > 1.2


def test_temperatures_are_fitted_to_the_laws_with_it() -> None:
    trunk = tiny_trunk("llama", vocab_size=11, seed=3)
    heads = random_heads(trunk, HeadsConfig("medusa", num=2, markov=RANK), scale=0.05)
    ids = [1, 2, *plain_greedy(trunk, [1, 2], 60)]
    hidden = trunk.forward(torch.tensor([ids])).hidden[0]
    first = temperatures(heads, [ids], [2], [hidden])
    with torch.no_grad():
        for head in range(2):
            heads.head(head).projection.weight *= 2  # type: ignore[union-attr]
            heads.head(head).markov.after.weight *= 2  # type: ignore[union-attr]
    then = temperatures(heads, [ids], [2], [hidden])
    assert then == pytest.approx([before * 2 for before in first])
    assert GRID[0] < min(first + then) and max(first + then) < GRID[-1]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 30), st.integers(1, 8))
def test_any_tree_of_a_row_is_that_of_the_row_alone(seed: int, size: int, ranks: int) -> None:
    heads, topology = heads_of("root"), random_topology(random.Random(seed), size, ranks + size, 3)
    roots = torch.randint(VOCAB, (3,), generator=torch.Generator().manual_seed(seed))
    session = opened(MedusaDrafter(heads, topology).open(heads.trunk))
    together = session.propose(roots, 9).tokens_BN
    session.select([1])
    assert torch.equal(session.propose(roots[1:2], 9).tokens_BN, together[1:2])
