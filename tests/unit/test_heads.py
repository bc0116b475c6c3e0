"""Heads and their drafts: exact at the start, each rank from the right head, read off the last accepted token."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import transformers

from medusa.accept import DeterministicRule
from medusa.drafters.heads import Unrolled
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.head_parts import Linear, bare
from medusa.heads import KINDS, PROJECTIONS, HeadsConfig, MedusaHeads
from medusa.laws import Laws
from medusa.sampling import SamplingParams, to_probs
from medusa.testing import VOCAB, plain_greedy, random_heads, random_topology, tiny_model, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

PROMPT = [3, 0, 41, 7]


@cache
def trunk_of(family: str = "llama") -> Trunk:
    return tiny_trunk(family)


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family",
    # a plain projection; one with a bias (phi, gptj), a scale (cohere), a divisor (granite), a softcap (gemma2)
    ["llama", "gpt2", "phi", "gptj", "cohere", "granite", "gemma2"],
)
def test_a_new_head_is_the_trunks_own(family: str, kind: str, projection: str) -> None:
    trunk, ids = trunk_of(family), torch.tensor([PROMPT])
    heads = MedusaHeads(HeadsConfig(kind, num=3, layers=2, projection=projection), trunk)
    output = trunk.forward(ids)
    embedded = torch.randn(1, len(PROMPT), 3, 32, dtype=torch.float64)
    for head in range(3):
        features = heads.features(head, output.hidden, heads.context(head, embedded))
        assert torch.equal(features, output.hidden)
        torch.testing.assert_close(heads.logits(head, features), output.logits, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("family", ["phi", "cohere", "granite", "gemma2"])
def test_a_trained_head_keeps_the_trunks_scale_and_softcap(family: str, projection: str) -> None:
    trunk, rank = trunk_of(family), 6 if projection == "low_rank" else None
    heads = random_heads(trunk, HeadsConfig("medusa", num=1, projection=projection, rank=rank))
    features = heads.features(0, torch.randn(5, 32, dtype=torch.float64), None)
    made = heads.heads[0].projection
    weight, bias = (
        (made.weight, made.bias) if made is not None else (trunk.model.lm_head.weight, trunk.model.lm_head.bias)
    )
    if rank is not None:
        weight = weight @ made.down.weight
    expected = features @ weight.T + (0 if bias is None else bias)
    expected = {
        "phi": expected,
        "cohere": expected * 0.25,
        "granite": expected / 4.0,
        "gemma2": 5.0 * torch.tanh(expected / 5.0),
    }[family]
    torch.testing.assert_close(heads.logits(0, features), expected)


def test_embeddings_are_read_at_one_scale() -> None:
    # whatever the size of the trunk's own: a root mean square of 1 per token
    trunk = trunk_of()
    read = MedusaHeads(HeadsConfig("root"), trunk).embed(torch.arange(VOCAB))
    torch.testing.assert_close(read.square().mean(-1), torch.ones(VOCAB).double(), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        read[7] * trunk.embed(torch.tensor(7)).square().mean().sqrt(), trunk.embed(torch.tensor(7))
    )


def test_drafting_leaves_heads_as_they_were_and_trainable() -> None:
    # drafters may be made in mid-training, to measure, and under inference mode
    heads = random_heads(trunk_of(), HeadsConfig("root", num=1))
    ids = torch.arange(VOCAB)
    before = heads.embed(ids)
    with torch.inference_mode():
        MedusaDrafter(heads, Topology.chain(1))
    assert torch.equal(heads.embed(ids), before)
    states = torch.randn(VOCAB, 32, dtype=torch.float64)
    heads.logits(0, heads.features(0, states, heads.context(0, heads.embed(ids[:, None])))).sum().backward()
    assert all(parameter.grad is not None for parameter in heads.parameters())
    assert all(name.startswith("heads.") for name in heads.state_dict())


def test_heads_share_nothing_with_each_other_nor_own_the_trunk() -> None:
    trunk = trunk_of()
    heads = MedusaHeads(HeadsConfig("hydra", num=3, layers=3), trunk)
    places = [parameter.data_ptr() for parameter in heads.parameters()]
    assert len(set(places)) == len(places) == 3 * (3 * 2 + 1)
    assert not set(places) & {parameter.data_ptr() for parameter in trunk.model.parameters()}
    assert all(name.startswith("heads.") for name in heads.state_dict())
    assert sum(parameter.numel() for parameter in heads.parameters()) == sum(
        32 * (32 + 32 * (head + 1)) + 32 + 2 * (32 * 32 + 32) + VOCAB * 32 for head in range(3)
    )
    first, second, third = heads.heads[0].blocks
    with torch.no_grad():
        second.linear.weight += 1
    assert (
        not first.linear.weight.any()
        and not third.linear.weight.any()
        and not heads.heads[1].blocks[1].linear.weight.any()
    )


def test_shared_projections_hold_no_vocabulary() -> None:
    heads = MedusaHeads(HeadsConfig("medusa", num=2, projection="shared"), trunk_of())
    assert all(VOCAB not in parameter.shape for parameter in heads.parameters())


# Low rank.


def low_rank(family: str, rank: int, **options: object) -> MedusaHeads:
    config = HeadsConfig("root", num=2, projection="low_rank", rank=rank)
    return MedusaHeads(config, trunk_of(family), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "phi", "gemma2"])
@pytest.mark.parametrize("rank", [1, 5, 32])
def test_a_low_rank_head_starts_as_near_to_the_trunk_as_its_rank_allows(family: str, rank: int) -> None:
    # Eckart and Young: the truncated singular value decomposition; of the whole rank it is the trunk's own
    heads, output = low_rank(family, rank), trunk_of(family).model.get_output_embeddings()
    left, values, right = torch.linalg.svd(output.weight, full_matrices=False)
    nearest = (left[:, :rank] * values[:rank]) @ right[:rank]
    for head in heads.heads:
        torch.testing.assert_close(head.projection.weight @ head.projection.down.weight, nearest, rtol=1e-9, atol=1e-9)
        assert output.bias is None or torch.equal(head.projection.bias, output.bias)
    hidden = trunk_of(family).forward(torch.tensor([PROMPT])).hidden
    expected = trunk_of(family).project(hidden, nearest, output.bias)
    torch.testing.assert_close(heads.logits(1, hidden), expected, rtol=1e-9, atol=1e-9)


def test_a_low_rank_projection_is_two_thin_matrices_per_head() -> None:
    heads = low_rank("llama", 5)
    shapes = {name: tuple(p.shape) for name, p in heads.heads[1].projection.named_parameters()}
    assert shapes == {"weight": (VOCAB, 5), "down.weight": (5, 32)}
    assert len({p.data_ptr() for p in heads.parameters()}) == 2 * (2 + 2)
    assert all(p.requires_grad for p in heads.parameters())


def test_low_rank_starts_do_not_depend_on_the_library() -> None:
    # a singular vector's sign is free: its largest value is positive
    for head in low_rank("llama", 9).heads:
        down = head.projection.down.weight
        assert (down.gather(1, down.abs().argmax(1, keepdim=True)) > 0).all()
    one, other = low_rank("llama", 9), low_rank("llama", 9)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_weights_that_are_loaded_next_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(matrix: torch.Tensor) -> None:
        raise AssertionError("a decomposition")

    monkeypatch.setattr(torch.linalg, "eigh", never)
    low_rank("llama", 5, initialise=False)
    with pytest.raises(AssertionError, match="a decomposition"):
        low_rank("llama", 5)


def test_a_rank_beyond_the_projections_is_refused() -> None:
    with pytest.raises(UserError, match=r"heads\.rank=33: a projection of 32 to 65 has at most 32"):
        low_rank("llama", 33)
    with pytest.raises(UserError, match="at most 3"):
        config = HeadsConfig("root", projection="low_rank", rank=4, vocab=3)
        MedusaHeads(config, trunk_of(), torch.tensor([1, 2, 3]))


def test_what_each_kind_reads() -> None:
    assert [HeadsConfig("medusa").reads(head) for head in range(3)] == [0, 0, 0]
    assert [HeadsConfig("root").reads(head) for head in range(3)] == [1, 1, 1]
    assert [HeadsConfig("hydra").reads(head) for head in range(3)] == [1, 2, 3]


def test_heads_take_the_trunks_type() -> None:
    trunk = Trunk(tiny_model("llama", dtype=torch.bfloat16))
    heads = MedusaHeads(HeadsConfig("hydra", num=2), trunk)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "hydr"}, ["heads.kind='hydr'", "did you mean hydra?"]),
        ({"kind": "zzz"}, ["heads.kind='zzz'", "medusa, root, hydra"]),
        ({"projection": "share"}, ["heads.projection='share'", "did you mean shared?"]),
        ({"num": 0}, ["heads.num=0"]),
        ({"layers": -1}, ["heads.layers=-1"]),
        ({"vocab": 0}, ["heads.vocab=0"]),
        ({"projection": "low_rank", "rank": 0}, ["heads.rank=0"]),
        ({"projection": "low_rank"}, ["heads.rank=None", "'low_rank'", "64"]),
        ({"projection": "shared", "rank": 8}, ["heads.rank=8", "'shared'", "leave rank out"]),
        ({"rank": 8}, ["heads.rank=8", "'own'", "low_rank"]),
    ],
)
def test_wrong_configurations_are_named(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        HeadsConfig(**options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_states_that_are_projected_out_are_read_after_that() -> None:
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        do_layer_norm_before=False,
    )
    trunk = Trunk(transformers.OPTForCausalLM(config).double())
    heads, output = MedusaHeads(HeadsConfig("root"), trunk), trunk.forward(torch.tensor([PROMPT]))
    features = heads.features(0, output.hidden, heads.context(0, torch.ones(1, len(PROMPT), 1, 16).double()))
    assert features.shape == (1, len(PROMPT), 16)
    torch.testing.assert_close(heads.logits(0, features), output.logits, rtol=1e-13, atol=1e-13)


def test_heads_can_not_repeat_an_unknown_last_step() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 0.9)  # nothing in its config says so
    trunk = Trunk(model)
    with pytest.raises(UserError, match="'llama'"):
        MedusaHeads(HeadsConfig(), trunk)


# Drafts.


def naive_draft(heads: MedusaHeads, topology: Topology, hidden: torch.Tensor, root: int) -> list[int]:
    """Each node by its definition: the head of its depth, reading the tokens on its way, its rank there."""
    tokens = [root]
    for node in range(1, topology.size):
        head, line = topology.depths[node] - 1, [topology.parents[node]]
        while line[-1] != 0:
            line.append(topology.parents[line[-1]])
        read = torch.tensor([tokens[each] for each in reversed(line)])
        context = heads.context(head, heads.embed(read))
        logits = heads.logits(head, heads.features(head, hidden, context))
        tokens.append(int(logits.argsort(descending=True)[topology.ranks[node]]))
    return tokens


def drafted(heads: MedusaHeads, topology: Topology, hidden_BD: torch.Tensor, root_B: torch.Tensor) -> torch.Tensor:
    session = MedusaDrafter(heads, topology).open(heads.trunk)
    session.start([[0]] * len(root_B), hidden_BD, heads.trunk.forward(root_B[:, None]))
    tree = session.propose(root_B, 99)
    assert tree.valid_BN.all() and tree.shape.depths[0].tolist() == list(topology.depths)
    return tree.tokens_BN


@pytest.mark.parametrize("kept", [torch.float64, torch.float32])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["phi", "gemma2"])  # a projection with a bias, a softcap
def test_unrolled_heads_are_the_heads_to_the_bit(family: str, kind: str, projection: str, kept: torch.dtype) -> None:
    """Also where their weights are kept in another precision than the trunk computes in."""
    trunk, rank = trunk_of(family), 6 if projection == "low_rank" else None
    heads = random_heads(trunk, HeadsConfig(kind, num=3, layers=2, projection=projection, rank=rank)).to(kept)
    unrolled = Unrolled(heads)
    hidden = torch.randn(2, 4, 32, dtype=torch.float64)
    embedded = torch.randn(2, 4, 3, 32, dtype=torch.float64)
    for head in range(3):
        context = heads.context(head, embedded)
        features = heads.features(head, hidden, context)
        read = hidden if context is None else torch.cat([hidden, context], -1)
        assert torch.equal(unrolled.features(head, hidden, read), features)
        assert torch.equal(unrolled.logits(head, features), heads.draftable(heads.logits(head, features)))


@pytest.mark.parametrize("what", ["hook", "hook before", "forward", "kind", "call"])
def test_a_layer_that_does_more_is_called_whole(what: str) -> None:
    layer, called = Linear(4, 3), []
    assert bare(layer, torch.float32) is not layer
    if what == "forward":
        layer.forward = lambda x: called.append(x) or x  # type: ignore[method-assign,func-returns-value,return-value]
    elif what == "kind":
        layer.__class__ = type("More", (Linear,), {"forward": lambda self, x: called.append(x) or x})
    elif what == "call":
        layer.__class__ = type("More", (Linear,), {"__call__": lambda self, x: called.append(x) or x})
    else:
        register = layer.register_forward_hook if what == "hook" else layer.register_forward_pre_hook
        register(lambda *_: called.append(1))
    bare(layer, torch.float32)(torch.zeros(4))
    assert called and (what == "kind" or bare(layer, torch.float32) is layer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_node_holds_its_rank_of_its_head(kind: str, seed: int) -> None:
    trunk = trunk_of()
    heads = random_heads(trunk, HeadsConfig(kind, num=4, layers=2), seed=seed)
    topology = random_topology(random.Random(seed), 24, ranks=VOCAB if seed % 2 else 4, depth=4)
    hidden_BD = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    root_B = torch.tensor([0, 17, 64])
    tokens = drafted(heads, topology, hidden_BD, root_B)
    for row in range(3):
        assert tokens[row].tolist() == naive_draft(heads, topology, hidden_BD[row], int(root_B[row]))


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_in_any_order_hold_the_same_tokens(kind: str) -> None:
    # a topology need only name parents before children; this one is ordered by branch, not by depth
    heads = random_heads(trunk_of(), HeadsConfig(kind, num=3))
    topology = Topology((-1, 0, 1, 2, 0, 4), (0, 1, 0, 2, 0, 3))
    hidden_BD = torch.randn(1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = drafted(heads, topology, hidden_BD, torch.tensor([9]))
    assert tokens[0].tolist() == naive_draft(heads, topology, hidden_BD[0], 9)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_reach_to_the_end_of_the_vocabulary(kind: str) -> None:
    heads = random_heads(trunk_of(), HeadsConfig(kind, num=2))
    topology = Topology.from_paths([[rank] for rank in range(VOCAB)] + [[3, rank] for rank in range(VOCAB)])
    hidden_BD = torch.randn(2, 32, dtype=torch.float64)
    tokens = drafted(heads, topology, hidden_BD, torch.tensor([1, 2]))
    for level in (tokens[:, 1 : VOCAB + 1], tokens[:, VOCAB + 1 :]):
        assert level.sort(-1).values.tolist() == [list(range(VOCAB))] * 2
    assert tokens[0].tolist() == naive_draft(heads, topology, hidden_BD[0], 1)
    with pytest.raises(UserError, match=f"rank {VOCAB} of {VOCAB}"):
        MedusaDrafter(heads, Topology.from_paths([[VOCAB]]))


def test_a_tree_deeper_than_the_heads_names_both_numbers() -> None:
    heads = MedusaHeads(HeadsConfig("medusa", num=2), trunk_of())
    with pytest.raises(UserError, match=r"3 deep.* 2 heads"):
        MedusaDrafter(heads, Topology.chain(3))
    assert MedusaDrafter(heads, Topology.chain(3).trim(2)).topology == Topology.chain(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", range(5))
def test_no_deeper_than_there_is_room(kind: str, room: int) -> None:
    heads = random_heads(trunk_of(), HeadsConfig(kind, num=3))
    session = MedusaDrafter(heads, Topology.full([2, 2, 1])).open(trunk_of())
    session.start([PROMPT], torch.randn(1, 32, dtype=torch.float64), trunk_of().forward(torch.tensor([PROMPT])))
    tree = session.propose(torch.tensor([5]), room)
    assert tree.shape.depths.max() == min(room, 3)
    whole = session.propose(torch.tensor([5]), 99).tokens_BN
    assert torch.equal(tree.tokens_BN, whole[:, : tree.size])  # nodes stand in order of depth


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_heads_read_the_last_accepted_token(family: str, kind: str) -> None:
    # row a accepts a drafts of a chain of four; then its next drafts are those of a fresh prefill of the same text
    trunk, depth = trunk_of(family), 4
    heads = random_heads(trunk, HeadsConfig(kind, num=depth))
    drafter = MedusaDrafter(heads, Topology.full([3, 2, 1, 1]))
    prompts = [[*PROMPT[: 1 + row % 4], row] for row in range(depth + 1)]
    truths = [plain_greedy(trunk, prompt, depth + 2) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    padded = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
    cache = trunk.new_cache(depth + 1)
    _, hidden_BD, output = trunk.prefill(padded, lengths, cache)
    session = drafter.open(trunk)
    session.start(prompts, hidden_BD, output)
    session.propose(torch.tensor([truth[0] for truth in truths]), 99)
    tokens_BN = torch.tensor([truth[: depth + 1] for truth in truths])
    for row in range(depth):
        tokens_BN[row, row + 1] = (tokens_BN[row, row + 1] + 1) % VOCAB  # the first wrong draft of the row
    tree = DraftTree(Shape.static(Topology.chain(depth), "cpu"), tokens_BN, torch.ones_like(tokens_BN).bool())
    verified = trunk.tree_forward(tree, cache)
    acceptance = DeterministicRule()(tree, Laws.given(to_probs(verified.logits, [SamplingParams()] * len(prompts))))
    assert acceptance.length_B.tolist() == [1, 2, 3, 4, 5]
    session.commit(tree, verified, acceptance)
    again_BN = session.propose(acceptance.next_token_B, 99).tokens_BN
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        text = prompt + truth[: row + 1]
        _, state_BD, output = trunk.prefill(torch.tensor([text]), [len(text)], trunk.new_cache(1))
        torch.testing.assert_close(session.hidden_BD[row], state_BD[0], rtol=1e-11, atol=1e-11)
        fresh = drafter.open(trunk)
        fresh.start([text], state_BD, output)
        assert again_BN[row].tolist() == fresh.propose(torch.tensor([truth[row + 1]]), 99).tokens_BN[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_stay_keep_their_states(kind: str) -> None:
    trunk = trunk_of()
    drafter = MedusaDrafter(random_heads(trunk, HeadsConfig(kind, num=2)), Topology.full([2, 2]))
    session = drafter.open(trunk)
    session.start([PROMPT] * 4, torch.randn(4, 32, dtype=torch.float64), trunk.forward(torch.tensor([PROMPT])))
    roots = torch.tensor([1, 2, 3, 4])
    before = session.propose(roots, 9).tokens_BN
    session.select([3, 1])
    assert torch.equal(session.propose(roots[[3, 1]], 9).tokens_BN, before[[3, 1]])


def test_sessions_of_one_drafter_are_apart() -> None:
    trunk = trunk_of()
    drafter = MedusaDrafter(random_heads(trunk, HeadsConfig("root", num=2)), Topology.full([2, 2]))
    output = trunk.forward(torch.tensor([PROMPT]))
    one, other = drafter.open(trunk), drafter.open(trunk)
    one.start([PROMPT], torch.randn(1, 32, dtype=torch.float64), output)
    before = one.propose(torch.tensor([1]), 9).tokens_BN
    other.start([PROMPT], torch.randn(1, 32, dtype=torch.float64), output)
    other.propose(torch.tensor([1]), 9)
    assert torch.equal(one.propose(torch.tensor([1]), 9).tokens_BN, before)
