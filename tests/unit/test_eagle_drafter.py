"""Drafting with an EAGLE layer: its cache follows every acceptance, trees are those of its laws, text stays exact."""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.accept import Acceptance
from medusa.cache import SlotCache
from medusa.compiled import CompiledSteps, StepSize
from medusa.decoding import Decoder, Past, Request, decode, generate_ids
from medusa.drafters.base import layers_of
from medusa.drafters.children import Drafting
from medusa.drafters.eagle import EagleDrafter, EagleSession
from medusa.drafters.none import NullDrafter
from medusa.eagle import EagleConfig, EagleLayer
from medusa.errors import UserError
from medusa.infer.warmup import use_compiled
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import memorising_eagle, plain_greedy, random_eagle, tiny_model, tiny_trunk
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk

FAMILIES = ["llama", "gpt2", "mistral", "gemma3"]  # rotary, learned positions, windows, windows in some layers
CONFIGS = {"1": EagleConfig(1), "3": EagleConfig(3), "1 of 40": EagleConfig(1, 40), "3 of 40": EagleConfig(3, 40)}
TREES = {
    "chain": Topology.chain(4),
    "tree": Topology.full([3, 2, 1]),
    "odd": Topology.from_paths([[1], [0], [0, 2], [0, 0], [0, 0, 0], [1, 0], [0, 2, 1]]),
}
TEXTS = [[3], [0, 17, 0, 5], [64, 1, 2, 3, 0, 0, 9, 40], [5, 5, 0, 8, 21, 33, 60, 2, 2, 1, 7]]
COUNTS = (16, 3, 9, 12)
CLOSE: Any = {"rtol": 1e-9, "atol": 1e-9}
GREEDY = SamplingParams()


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


@cache
def texts_of(family: str) -> list[list[int]]:
    return [plain_greedy(trunk_of(family), text, count) for text, count in zip(TEXTS, COUNTS, strict=True)]


@cache
def layer_of(family: str, config: str) -> EagleLayer:
    return random_eagle(trunk_of(family), CONFIGS[config])


def drafter_of(family: str, config: str, tree: str, mode: str = "sampled") -> EagleDrafter:
    layer = layer_of(family, config)
    if tree == "grown":
        return EagleDrafter(layer, nodes=9, depth=4, width=3)
    return EagleDrafter(layer, TREES[tree], Drafting(mode))


class Run:
    """A session beside the trunk's own cache: what the decode loop does, but that acceptance is whatever is said."""

    def __init__(self, drafter: EagleDrafter, texts: list[list[int]]) -> None:
        self.trunk, self.drafter, self.texts = drafter.layer.trunk, drafter, [list(text) for text in texts]
        self.cache: SlotCache = self.trunk.new_cache(len(texts))
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        _, hidden, output = self.trunk.prefill(ids, [len(text) for text in texts], self.cache, drafter.layers)
        session = drafter.open(self.trunk)
        assert isinstance(session, EagleSession)
        self.session = session
        self.session.start(texts, hidden, output)

    def propose(self, roots: Tensor, room: int = 9) -> tuple[DraftTree, list[Tensor]]:
        """The tree, and the logits that it was filled from, level by level."""
        laws: list[Tensor] = []
        layer = self.drafter.layer

        def spy(state: Tensor) -> Tensor:
            laws.append(EagleLayer.logits(layer, state))
            return laws[-1]

        layer.__dict__["logits"] = spy
        try:
            return self.session.propose(roots, room), laws
        finally:
            del layer.__dict__["logits"]

    def accept(self, tree: DraftTree, last_B: Tensor) -> list[int]:
        """Let each row accept the way to a node; return how many drafts those are."""
        verified = self.trunk.tree_forward(tree, self.cache, layers=self.drafter.layers)
        paths_BA = tree.shape.paths_to(last_B)
        self.session.commit(tree, verified, Acceptance(paths_BA, last_B, torch.zeros_like(last_B)))
        paths = [[node for node in path if node >= 0] for path in paths_BA.tolist()]
        self.cache.commit(paths)
        for text, path, tokens in zip(self.texts, paths, tree.tokens_BN.tolist(), strict=True):
            text += [tokens[node] for node in path]
        return [len(path) - 1 for path in paths]

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.session.select(rows)
        self.cache.select(rows)

    def admit(self, slots: list[int], other: Run) -> None:
        self.session.admit(slots, other.session)
        self.cache.admit(slots, other.cache)
        for slot, text in zip(slots, other.texts, strict=True):
            self.texts[slot : slot + 1] = [text]


# The cache.


@pytest.mark.parametrize(
    ("family", "config", "tree"),
    [
        *(("llama", "1", tree) for tree in (*TREES, "grown")),
        *(("llama", "3 of 40", tree) for tree in ("tree", "grown")),
        *(("gpt2", "3", tree) for tree in ("chain", "odd")),
        *(("mistral", "1 of 40", tree) for tree in ("odd", "grown")),
        *(("gemma3", "3", tree) for tree in ("tree", "grown")),
    ],
)
def test_laws_after_any_acceptance_are_those_of_a_fresh_session(family: str, config: str, tree: str) -> None:
    rng, drafter, seen = random.Random(5), drafter_of(family, config, tree), set()
    run = Run(drafter, TEXTS)
    for turn in range(12):
        if turn in (4, 9):  # rows leave, and others come
            run.keep([2, 0, 3] if turn == 4 else [1, 2])
            run.admit([1, len(run.texts)], Run(drafter, [[7, 7, 1], [40, 0, 2, 2, 9]]))
        roots = torch.tensor([rng.randrange(65) for _ in run.texts])
        room = rng.choice([0, 1, 2, 4, 9]) if turn % 3 == 2 else 9
        drafts, laws = run.propose(roots, room)
        expected, own = Run(drafter, run.texts).propose(roots, room)
        assert drafts.tokens_BN.tolist() == expected.tokens_BN.tolist()
        assert drafts.shape.parents.tolist() == expected.shape.parents.tolist() and drafts.valid_BN.all()
        assert len(laws) == len(own)
        for mine, theirs in zip(laws, own, strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)
        last_B = torch.tensor([rng.randrange(drafts.size) for _ in run.texts])  # ragged: each row accepts what it may
        if turn == 7:
            last_B = last_B * 0 + drafts.size - 1
        seen |= set(run.accept(drafts, last_B))
    assert seen >= set(range(drafter.topology.depth + 1 if drafter.topology else 3))


def test_drafted_pairs_are_forgotten() -> None:
    run = Run(drafter_of("llama", "3", "tree"), TEXTS)
    for _ in range(3):
        drafts, _ = run.propose(torch.tensor([1, 2, 3, 4]))
        assert run.session.cache.lengths == [
            len(text) for text in run.texts
        ]  # a pair for each feature, true ones alone
        run.accept(drafts, torch.tensor([0, 1, 5, 4]))


def test_a_free_slot_is_not_read_on() -> None:
    decoder = Decoder(trunk_of("llama"), drafter_of("llama", "3", "chain"))
    decoder.admit([Request(text, 40) for text in TEXTS])
    decoder.finish(3)
    for _ in range(3):
        decoder.step()
        assert decoder.session.cache.lengths[3] == 1  # type: ignore[attr-defined]
    assert decoder.session.cache.longest < max(decoder.cache.lengths) + 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", ["1", "3"])
def test_a_text_that_goes_on_from_a_past_is_exact(config: str) -> None:
    trunk, drafter = trunk_of("llama"), drafter_of("llama", config, "tree")
    decoder = Decoder(trunk, drafter)
    decoder.admit([Request(TEXTS[3], 9)])
    while decoder.rows:
        decoder.step()
    past, text = decoder.past(), [*TEXTS[3], *plain_greedy(trunk, TEXTS[3], 9)]
    longer = [*text, 5, 6, 7]
    again = Decoder(trunk, drafter)
    step = again.admit([Request(longer, 12, past=Past(past.ids, past.cache))])
    new = list(step.tokens[0])
    while again.rows:
        new += again.step().tokens.get(0, [])
    assert new == plain_greedy(trunk, longer, 12)
    assert again.session.cache.longest < 3 + 2 + 12  # type: ignore[attr-defined]  # pairs of what was read anew


def test_each_level_costs_one_forward_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pairs = layer_of("llama", "1"), list[int]()

    def counted(ids_BT: Tensor, *rest: Any) -> Tensor:
        pairs.append(ids_BT.shape[1])
        return EagleLayer.read(layer, ids_BT, *rest)

    monkeypatch.setitem(layer.__dict__, "read", counted)
    run = Run(EagleDrafter(layer, Topology.full([3, 2, 1])), [[5, 6, 7]])
    drafts, _ = run.propose(torch.tensor([8]))
    run.accept(drafts, torch.tensor([drafts.size - 1]))
    run.propose(torch.tensor([9]))
    assert pairs == [2, *(1, 3, 6), *(4, 3, 6)]  # the prompt; root, levels; root and three drafts, levels


# Its trees.


@pytest.mark.parametrize("config", CONFIGS)
def test_a_static_tree_holds_each_nodes_candidates_by_rank(config: str) -> None:
    layer, topology = layer_of("llama", config), Topology.from_paths(TREES["odd"].paths[1:])
    drafts, laws = Run(EagleDrafter(layer, TREES["odd"]), TEXTS).propose(torch.tensor([9, 0, 64, 2]))
    parents = sorted(set(topology.parents[1:]))  # as they are asked for, level by level
    by_parent = dict(zip(parents, torch.cat(laws, 1).unbind(1), strict=True))
    for row, (text, tokens) in enumerate(zip(TEXTS, drafts.tokens_BN.tolist(), strict=True)):
        for node in range(1, topology.size):
            line = drafts.shape.ancestors[0, topology.parents[node]].nonzero()[:, 0].tolist()
            logits = law(layer, text, [tokens[each] for each in line])
            torch.testing.assert_close(by_parent[topology.parents[node]][row], logits, **CLOSE)
            assert layer.tokens(logits.topk(5).indices)[topology.ranks[node]] == tokens[node], (row, node)


def law(layer: EagleLayer, text: list[int], line: list[int]) -> Tensor:
    """Logits behind ``text`` and a line of drafts, root first: by unrolling along it, without any cache."""
    output = layer.trunk.forward(torch.tensor([text]), layers=layer.layers)
    features = layer.features(output)
    features = torch.nn.functional.pad(features, (0, 0, 0, len(line)))  # of drafts there are none
    states = layer.unroll(torch.tensor([[*text, *line]]), features, len(line))
    return layer.logits(states[-1][0, -1])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("width", [2, 8])
def test_a_grown_tree_is_the_likeliest_of_what_was_expanded(config: str, width: int) -> None:
    layer, nodes, depth, warmth = layer_of("llama", config), 9, 3, [1.0, 0.7, 1.5]
    drafter = EagleDrafter(layer, nodes=nodes, depth=depth, width=width, temperatures=warmth)
    roots = torch.tensor([9, 0, 64, 2])
    drafts, laws = Run(drafter, TEXTS).propose(roots)
    assert drafts.size == nodes and drafts.sampled_BN is None
    for row, text in enumerate(TEXTS):
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        level: list[tuple[int, ...]] = [()]
        inner = {way[:-1] for way in ways_of(drafts, row)}  # others need not have been expanded
        for at in range(depth):
            found: dict[tuple[int, ...], float] = {}
            for place, way in enumerate(level):
                logits = law(layer, text, [int(roots[row]), *way])
                if way in inner:
                    torch.testing.assert_close(laws[at][row, place], logits, **CLOSE)
                logs = (logits / warmth[at]).log_softmax(-1)
                best = logs.topk(width)
                for value, column in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    longer = (*way, int(layer.tokens(torch.tensor(column))))
                    found[longer] = scores[way] + value
            scores |= found
            level = sorted(found, key=lambda way: -found[way])[:width]
        del scores[()]
        expected = sorted(scores, key=lambda way: -scores[way])[: nodes - 1]
        assert sorted(ways_of(drafts, row)) == sorted(expected)


def ways_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens on the way to each node below the root."""
    ancestors, tokens = tree.shape.ancestors[row], tree.tokens_BN[row]
    depths = tree.shape.depths[row]
    ways = []
    for node in range(1, tree.size):
        line = ancestors[node].nonzero()[:, 0]
        line = line[depths[line].argsort()][1:]
        ways.append(tuple(tokens[line].tolist()))
    return ways


def test_rows_that_sample_take_the_static_tree() -> None:
    layer = layer_of("llama", "3")
    drafter = EagleDrafter(layer, TREES["tree"], nodes=20)
    run = Run(drafter, TEXTS[1:3])
    after = [len(text) + 1 for text in run.texts]
    roots = torch.tensor([5, 6])
    warm = Chance([SamplingParams(temperature=1.0), GREEDY], after, HashDraws(), "cpu")
    cold = Chance([GREEDY, GREEDY], after, HashDraws(), "cpu")
    drawn = run.session.propose(roots, 9, warm)
    assert drawn.size == TREES["tree"].size and drawn.sampled_BN is not None
    assert Run(drafter, TEXTS[1:3]).session.propose(roots, 9, cold).size == 20


# The text.


@pytest.mark.parametrize(
    ("family", "config", "tree"),  # every pair of two of them
    [
        (family, config, ("tree", "grown")[(row + column) % 2])
        for row, family in enumerate(FAMILIES)
        for column, config in enumerate(CONFIGS)
    ],
)
def test_greedy_text_is_the_trunks_own(family: str, config: str, tree: str) -> None:
    requests = [Request(text, count) for text, count in zip(TEXTS, COUNTS, strict=True)]
    expected, drafter = texts_of(family), drafter_of(family, config, tree)
    assert generate_ids(trunk_of(family), drafter, requests) == expected
    assert generate_ids(trunk_of(family), drafter, requests, most=2) == expected


# An only child is drawn in both modes; a grown tree knows none.
SAMPLED = [("tree", "sampled"), ("tree", "mixed"), ("tree", "top"), ("odd", "sampled"), ("odd", "mixed")]


@pytest.mark.parametrize(("tree", "mode"), [*SAMPLED, ("chain", "sampled"), ("chain", "top"), ("grown", "sampled")])
def test_a_sampling_row_of_a_batch_equals_its_solo_run(tree: str, mode: str) -> None:
    params = [SamplingParams(temperature=0.5 * row, top_k=30, seed=row) for row in range(4)]  # the first is greedy
    requests = [Request(text, count, sampling=each) for text, count, each in zip(TEXTS, COUNTS, params, strict=True)]
    drafter = drafter_of("llama", "3", tree, mode)
    together = generate_ids(trunk_of("llama"), drafter, requests)
    assert together[0] == plain_greedy(trunk_of("llama"), TEXTS[0], 16)
    assert together == [generate_ids(trunk_of("llama"), drafter, [request])[0] for request in requests]
    assert together == generate_ids(trunk_of("llama"), drafter, requests, most=2)


@pytest.mark.parametrize("config", ["1", "3"])
@pytest.mark.parametrize("tree", ["chain", "grown"])
def test_a_layer_that_knows_the_text_is_accepted_whole(config: str, tree: str) -> None:
    if config == "1":
        layer, prompt = knowing(forgetful()), [4]
    else:
        trunk, prompt = tiny_trunk("llama", hidden_size=128), [5, 6, 7]
        layer = memorising_eagle(trunk, EagleConfig(3), [[*prompt, *plain_greedy(trunk, prompt, 21)]], depth=3)
    drafter = (
        EagleDrafter(layer, Topology.chain(3)) if tree == "chain" else EagleDrafter(layer, nodes=4, depth=3, width=1)
    )
    steps = list(decode(layer.trunk, drafter, [Request(prompt, 21)]))
    assert [len(step.tokens[0]) for step in steps] == [1, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_drafts_drawn_from_the_trunks_own_law_are_all_accepted(temperature: float) -> None:
    layer = knowing(forgetful())  # p equals q
    request = Request([4], 21, sampling=SamplingParams(temperature=temperature, top_p=0.9, seed=3))
    steps = list(decode(layer.trunk, EagleDrafter(layer, Topology.chain(3)), [request]))
    assert [len(step.tokens[0]) for step in steps] == [1, 4, 4, 4, 4, 4]


def forgetful() -> Trunk:
    """A trunk whose law depends on the last token alone: its layers add nothing."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Trunk(model)


@torch.no_grad()
def knowing(trunk: Trunk) -> EagleLayer:
    """The layer that is such a trunk: its state is the final norm of the embedding that it reads."""
    layer = EagleLayer(EagleConfig(1), trunk)
    assert layer.body.embed_norm is not None
    layer.body.embed_norm.weight.copy_(trunk.model.model.norm.weight)  # type: ignore[operator]
    layer.body.fc.weight.copy_(torch.eye(trunk.hidden_size, 2 * trunk.hidden_size))
    return layer


@torch.inference_mode()
def test_compiled_steps_return_the_states_that_eager_ones_do() -> None:
    trunk, outputs = tiny_trunk("llama"), []
    steps = CompiledSteps(trunk, [StepSize(1, 6)], layers=[2], backend="eager")
    tree = Run(EagleDrafter(random_eagle(trunk, EagleConfig(3)), TREES["chain"]), [TEXTS[2]]).propose(
        torch.tensor([5])
    )[0]
    for trunk.compiled in (None, steps):
        cache = trunk.new_cache(1)
        trunk.prefill(torch.tensor([TEXTS[2]]), [len(TEXTS[2])], cache)
        outputs += [trunk.tree_forward(tree, cache, layers=layers).states for layers in ((2, 1), (2,), ())]
        assert len(steps.compiled) == (trunk.compiled is not None)  # without layer 1 the first one was eager
    steps.add([], [1])
    assert steps.layers == (1, 2) and not steps.compiled  # to be traced anew
    outputs.append(trunk.tree_forward(tree, cache, layers=(2, 1)).states)
    assert [len(states) for states in outputs] == [2, 1, 0, 2, 1, 0, 2] and len(steps.compiled) == 1
    for states in outputs:
        for state, own in zip(states, outputs[0], strict=False):
            torch.testing.assert_close(state, own, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_what_is_read_on_are_those_of_one_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa.prefill.CHUNK", 3)
    trunk, text = trunk_of(family), TEXTS[3]
    cache, ids = trunk.new_cache(1), torch.tensor([text])
    trunk.prefill(ids[:, :2], [2], cache)
    _, _, output = trunk.prefill(ids[:, 2:], [len(text) - 2], cache, layers=(2, 1))
    with torch.no_grad():
        whole = trunk.model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(output.states) == 2
    for state, layer in zip(output.states, (2, 1), strict=True):
        torch.testing.assert_close(state, whole[layer][:, 2:], rtol=1e-6, atol=1e-6)


def test_decoding_asks_for_the_layers_of_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa.infer.warmup.CompiledSteps", partial(CompiledSteps, backend="eager"))
    trunk = Trunk(tiny_model("llama"))
    drafter = EagleDrafter(random_eagle(trunk, EagleConfig(3)), TREES["chain"])
    assert layers_of(drafter) == (1, 2) and layers_of(NullDrafter()) == ()
    steps = use_compiled(trunk, drafter)
    assert steps.layers == (1, 2) and steps.sizes == [(1, 1), (1, 5)]
    expected = plain_greedy(trunk, TEXTS[2], 12)
    assert generate_ids(trunk, drafter, [Request(TEXTS[2], 12)]) == [expected] and steps.compiled
    assert generate_ids(trunk, NullDrafter(), [Request(TEXTS[2], 12)]) == [expected]


# What is refused.


def test_a_layer_of_another_trunk_is_refused() -> None:
    with pytest.raises(UserError, match="bound to another trunk"):
        drafter_of("llama", "1", "chain").open(trunk_of("mistral"))


def test_a_calibrated_tree_of_the_root_alone_drafts_nothing() -> None:
    layer = layer_of("llama", "1")
    steps = list(decode(trunk_of("llama"), EagleDrafter(layer, Topology.root()), [Request([1, 2], 5)]))
    assert [step.nodes for step in steps] == [0, 1, 1, 1, 1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tree": ({}, "without a tree: give topology, or the nodes"),
    "one node": ({"nodes": 1}, "a tree of 1 nodes in every step: give a whole number from 2"),
    "not a number": ({"nodes": True}, "a tree of True nodes"),
    "tree beyond nodes": (
        {"nodes": 4, "topology": Topology.chain(4)},
        "a tree of 5 nodes to sample from, and 4 in all",
    ),
    "no depth": ({"nodes": 4, "depth": 0}, "depth 0 with 10 nodes expanded"),
    "no width": ({"nodes": 4, "width": 0}, "depth 6 with 0 nodes expanded"),
    "temperatures": ({"nodes": 4, "temperatures": [1.0]}, "give one above 0 for each of 6 levels"),
    "cold": ({"nodes": 4, "depth": 1, "temperatures": [0.0]}, r"temperatures=\[0.0\]"),
    "nothing to draw": ({"nodes": 4, "drafting": Drafting()}, "drafting.mode='sampled': a tree of each step takes top"),
    "rank": ({"topology": Topology.full([41])}, "rank 40 of 40 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case: str) -> None:
    options, words = BAD[case]
    with pytest.raises(UserError, match=words) as caught:
        EagleDrafter(layer_of("llama", "3 of 40"), **options)
    assert "\n" not in str(caught.value)
