"""A draft model: its cache follows every acceptance, its tokens are the trunk's, a cut is the trunk's own beginning."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medusa.accept import Acceptance
from medusa.cut import cut
from medusa.decoding import Decoder, Request, decode, generate_ids
from medusa.drafters.children import Drafting
from medusa.drafters.draft_model import DraftModelDrafter, DraftModelSession
from medusa.errors import UserError
from medusa.families import FAMILIES
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import noisy_copy, plain_greedy, recompute, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk, TrunkOutput

DRIVEN = ["llama", "gpt2", "mistral", "gemma3"]  # rotary, learned positions, windows, windows in some layers
TREES = {
    "chain": Topology.chain(4),
    "tree": Topology.full([3, 2, 1]),
    "odd": Topology.from_paths([[1], [0], [0, 2], [0, 0], [0, 0, 0], [1, 0], [0, 2, 1]]),
}
TEXTS = [[3], [0, 17, 0, 5], [64, 1, 2, 3, 0, 0, 9, 40], [5, 5, 0, 8, 21, 33, 60, 2, 2, 1, 7]]
NOTHING: Any = None  # hidden states and outputs of the trunk, which a draft model does not look at


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


@cache
def draft_of(family: str) -> Trunk:
    return noisy_copy(trunk_of(family), 0.05)


def drafter_of(family: str, tree: str = "chain", mode: str = "sampled") -> DraftModelDrafter:
    return DraftModelDrafter(draft_of(family), TREES[tree], Drafting(mode))


def fresh(family: str, tree: str, texts: list[list[int]]) -> DraftModelSession:
    session = drafter_of(family, tree).open(trunk_of(family))
    session.start(texts, NOTHING, NOTHING)
    return session


# The cache.


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", DRIVEN)
def test_drafts_after_any_acceptance_equal_those_of_a_fresh_prefill(family: str, tree: str) -> None:
    rng, texts = random.Random(5), [list(text) for text in TEXTS]
    session, seen = fresh(family, tree, texts), set()
    for turn in range(12):
        if turn in (4, 9):  # rows leave, and others come
            kept = [2, 0, 3] if turn == 4 else [1, 2]
            texts = [texts[row] for row in kept]
            session.select(kept)
            new = [[7, 7, 1], [40, 0, 2, 2, 9]]
            session.admit([1, len(texts)], fresh(family, tree, new))
            texts = [texts[0], new[0], *texts[2:], new[1]]
        roots = torch.tensor([rng.randrange(65) for _ in texts])
        room = rng.choice([0, 1, 2, 4, 9]) if turn % 3 == 2 else 9
        drafts = session.propose(roots, room)
        expected = fresh(family, tree, texts).propose(roots, room)
        assert drafts.tokens_BN.tolist() == expected.tokens_BN.tolist() and drafts.valid_BN.all()
        last_B = torch.tensor([rng.randrange(drafts.size) for _ in texts])  # ragged: each row accepts what it may
        if turn == 7:
            last_B = last_B * 0 + drafts.size - 1
        paths_BA = drafts.shape.paths_to(last_B)
        session.commit(drafts, NOTHING, Acceptance(paths_BA, last_B, torch.zeros_like(last_B)))
        for text, path, tokens in zip(texts, paths_BA.tolist(), drafts.tokens_BN.tolist(), strict=True):
            text += [tokens[node] for node in path if node >= 0]
            seen.add(sum(node >= 0 for node in path) - 1)
    assert seen == set(range(TREES[tree].depth + 1))


@pytest.mark.parametrize("family", DRIVEN)
def test_a_chain_is_the_draft_models_own_greedy_text(family: str) -> None:
    roots = torch.tensor([9, 0, 64, 2])
    drafts = fresh(family, "chain", TEXTS).propose(roots, 9).tokens_BN.tolist()
    for text, root, draft in zip(TEXTS, roots.tolist(), drafts, strict=True):
        assert draft == [root, *plain_greedy(draft_of(family), [*text, root], 4)]


@pytest.mark.parametrize("family", DRIVEN)
@pytest.mark.parametrize("tree", ["tree", "odd"])
def test_a_child_is_its_rank_among_what_may_follow_its_path(family: str, tree: str) -> None:
    drafts = fresh(family, tree, TEXTS).propose(torch.tensor([9, 0, 64, 2]), 9)
    topology = Topology.from_paths(TREES[tree].paths[1:])
    for text, tokens in zip(TEXTS, drafts.tokens_BN.tolist(), strict=True):
        for node in range(1, topology.size):
            line = drafts.shape.ancestors[0, topology.parents[node]].nonzero()[:, 0].tolist()
            law = recompute(draft_of(family), [*text, *(tokens[each] for each in line)])[-1]
            assert law.topk(topology.ranks[node] + 1).indices[-1] == tokens[node]


def test_each_level_costs_one_forward_and_full_acceptance_none(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, draft = trunk_of("llama"), copy.copy(trunk_of("llama"))
    read: list[int] = []

    def counted(ids_BT: Tensor, *args: Any, **options: Any) -> TrunkOutput:
        read.append(ids_BT.shape[1])
        return trunk.forward(ids_BT, *args, **options)

    monkeypatch.setattr(draft, "forward", counted)
    steps = list(decode(trunk, DraftModelDrafter(draft, Topology.chain(3)), [Request([5, 6, 7], 1 + 3 * 4)]))
    assert [len(step.tokens[0]) for step in steps] == [1, 4, 4, 4]  # the trunk drafts for itself: all is right
    assert read == [3, *(1, 1, 1), *(2, 1, 1), *(2, 1, 1)]  # prompt; root; the deepest draft and the root


def test_a_free_slot_is_not_read_on() -> None:
    decoder = Decoder(trunk_of("llama"), drafter_of("llama"))
    decoder.admit([Request(text, 40) for text in TEXTS])
    decoder.finish(3)
    for _ in range(3):
        decoder.step()
        assert decoder.session.cache.lengths[3] == 0  # type: ignore[attr-defined]
    longest = decoder.session.cache.longest  # type: ignore[attr-defined]
    assert longest < max(decoder.cache.lengths) + 2


# The context of the draft model.


@pytest.mark.parametrize(
    ("family", "short"), [("gpt2", {"n_positions": 16}), ("llama", {"max_position_embeddings": 16})]
)
def test_beyond_the_draft_models_context_nothing_is_drafted(family: str, short: dict[str, int]) -> None:
    trunk = tiny_trunk(family)
    drafter = DraftModelDrafter(tiny_trunk(family, **short), Topology.chain(3))
    prompts = [[1, 2], [index % 65 for index in range(12)], [index % 65 for index in range(40)]]
    truths = [plain_greedy(trunk, prompt, 30) for prompt in prompts]
    steps = list(decode(trunk, drafter, [Request(prompt, 30) for prompt in prompts]))
    for row, truth in enumerate(truths):
        assert [token for step in steps for token in step.tokens.get(row, [])] == truth
    assert steps[1].nodes == 4 and steps[-1].nodes == 1
    assert all(step.accepted.get(2, 0) == 0 for step in steps)


def test_what_is_not_drafted_is_filler() -> None:
    drafter = DraftModelDrafter(tiny_trunk("llama", max_position_embeddings=16), TREES["tree"])
    session = drafter.open(trunk_of("llama"))
    session.start([[1, 2], [index % 65 for index in range(40)], [5], [6]], NOTHING, NOTHING)
    chance = Chance(
        [SamplingParams(temperature=float(row == 3)) for row in range(4)], [3, 41, 1, 2], HashDraws(), "cpu"
    )
    drafts = session.propose(torch.tensor([3, 4, 5, 6]), 9, chance)  # the third slot is free: its root stands at 0
    assert drafts.valid_BN.all(1).tolist() == [True, False, False, True] and drafts.valid_BN[:, 0].all()
    assert not drafts.valid_BN[1:3, 1:].any() and drafts.size == TREES["tree"].size


# What is refused.


def test_a_draft_model_with_another_vocabulary_is_refused_with_both_numbers() -> None:
    drafter = DraftModelDrafter(tiny_trunk("llama", vocab_size=50))
    with pytest.raises(UserError, match=r"vocabulary of 50 and the trunk of 65"):
        drafter.open(trunk_of("llama"))


class Words:
    """A tokenizer as far as vocabularies go."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def test_tokenizers_are_compared_where_both_have_one() -> None:
    letters = [chr(65 + number) for number in range(60)]
    tokenizer: Any = Words(letters)
    trunk = Trunk(tiny_model("llama"), tokenizer)
    padded = Trunk(tiny_model("llama", vocab_size=64), tokenizer)  # its embedding is padded to another size
    prompt = [64, 1, 63]  # ids that the tokenizer lacks, one of which the draft model lacks too
    assert generate_ids(trunk, DraftModelDrafter(padded), [Request(prompt, 12)]) == [plain_greedy(trunk, prompt, 12)]
    other: Any = Words([*letters[:-2], letters[-1], letters[-2]])
    with pytest.raises(UserError, match=r"60 tokens and the trunk's 60, of which 58 have"):
        DraftModelDrafter(Trunk(tiny_model("llama"), other)).open(trunk)


def test_ids_that_the_tokenizer_lacks_are_not_drafted() -> None:
    tokenizer: Any = Words([chr(65 + number) for number in range(9)])
    trunk = Trunk(tiny_model("llama"), tokenizer)
    drafter = DraftModelDrafter(trunk, Topology.full([9, 2]))
    session = drafter.open(trunk)
    session.start([[1, 2]], NOTHING, NOTHING)
    chance = Chance([SamplingParams(temperature=2.0)], [3], HashDraws(), "cpu")
    for drafts in (session.propose(torch.tensor([3]), 9), session.propose(torch.tensor([3]), 9, chance)):
        assert drafts.tokens_BN.amax() < 9 and sorted(drafts.tokens_BN[0, 1:10].tolist()) == list(range(9))
    with pytest.raises(UserError, match="rank 9 of 9 tokens"):
        DraftModelDrafter(trunk, Topology.full([10]))


def test_a_tree_of_the_root_alone_is_refused() -> None:
    with pytest.raises(UserError, match="drafts nothing"):
        DraftModelDrafter(trunk_of("llama"), Topology.root())


# Sampling.


@pytest.mark.parametrize(
    ("tree", "mode"),  # an only child is drawn in both modes
    [("chain", "sampled"), ("chain", "top"), ("tree", "sampled"), ("tree", "mixed"), ("tree", "top"), ("odd", "mixed")],
)
def test_a_sampling_row_of_a_batch_equals_its_solo_run(tree: str, mode: str) -> None:
    params = [SamplingParams(temperature=0.5 * row, top_k=30, seed=row) for row in range(4)]  # the first is greedy
    requests = [
        Request(text, count, sampling=each) for text, count, each in zip(TEXTS, (16, 3, 9, 12), params, strict=True)
    ]
    drafter = drafter_of("llama", tree, mode)
    together = generate_ids(trunk_of("llama"), drafter, requests)
    assert together[0] == plain_greedy(trunk_of("llama"), TEXTS[0], 16)
    assert together == [generate_ids(trunk_of("llama"), drafter, [request])[0] for request in requests]
    assert together == generate_ids(trunk_of("llama"), drafter, requests, most=2)


def test_a_draft_model_that_is_the_trunk_is_always_right() -> None:
    # p equals q: every drawn chain is accepted whole
    drafter = DraftModelDrafter(trunk_of("llama"), Topology.chain(3))
    for temperature in (0.0, 0.7, 2.0):
        request = Request(TEXTS[2], 21, sampling=SamplingParams(temperature=temperature, top_p=0.9, seed=3))
        steps = list(decode(trunk_of("llama"), drafter, [request]))
        assert [len(step.tokens[0]) for step in steps] == [1, 4, 4, 4, 4, 4]


# Cuts.


def beginning(trunk: Trunk, layers: int, ids: Tensor) -> Tensor:
    """Logits of the whole model whose later layers return what they are given."""

    def skip(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return given if isinstance(output, Tensor) else (given, *output[1:])

    lists = [each for each in trunk.model.modules() if isinstance(each, nn.ModuleList)]
    later = next(each for each in lists if len(each) == trunk.config.num_hidden_layers)[layers:]
    hooks = [layer.register_forward_hook(skip, with_kwargs=True) for layer in later]
    try:
        with torch.no_grad():
            return trunk.model(input_ids=ids).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_is_the_trunk_without_its_later_layers(family: str) -> None:
    trunk = trunk_of(family)
    ids = torch.tensor([[1, 60, 3, 0, 5, 6, 33, 8, 9, 10, 11, 2]])  # beyond a window of 8
    whole = trunk.forward(ids, layers=(0, 1, 2))
    short = cut(trunk, 1)
    assert len(short.layers) == 1 and len(trunk.layers) == 2
    torch.testing.assert_close(short.forward(ids).logits, beginning(trunk, 1, ids), rtol=1e-12, atol=1e-12)
    for state, own in zip(short.forward(ids, layers=(0,)).states, whole.states, strict=False):
        assert torch.equal(state, own)
    again = trunk.forward(ids, layers=(0, 1, 2))  # the trunk is as it was
    assert torch.equal(again.logits, whole.logits) and len(again.states) == len(whole.states) == 3
    assert {id(each) for each in short.model.parameters()} < {id(each) for each in trunk.model.parameters()}


def test_a_cut_of_several_layers_with_types_of_their_own() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    trunk = tiny_trunk("gemma3", num_hidden_layers=4, layer_types=types)
    ids = torch.arange(14)[None]
    for layers in (1, 2, 3):
        short = cut(trunk, layers)
        assert short.config.layer_types == types[:layers] and trunk.config.layer_types == types
        torch.testing.assert_close(short.forward(ids).logits, beginning(trunk, layers, ids), rtol=1e-12, atol=1e-12)
        drafter = DraftModelDrafter(short, Topology.full([2, 1]))
        assert generate_ids(trunk, drafter, [Request(text, 20) for text in TEXTS]) == [
            plain_greedy(trunk, text, 20) for text in TEXTS
        ]


@pytest.mark.parametrize("layers", [0, 2, -1, 9, True, 1.0])
def test_cuts_that_are_none_are_refused(layers: Any) -> None:
    with pytest.raises(UserError, match=rf"a cut of {layers} layers: the trunk has 2, give 1 to 1"):
        cut(trunk_of("llama"), layers)


def shared_twice(model: Any) -> None:
    model.model.also = nn.ModuleList(model.model.layers)


def in_no_list(model: Any) -> None:
    model.model.layers = nn.Sequential(*model.model.layers)


def dispatched(model: Any) -> None:
    model.model.forward = SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "words"),
    [(shared_twice, "model.layers and model.also"), (in_no_list, "but none"), (dispatched, "device_map")],
)
def test_models_that_can_not_be_cut_are_refused_by_name(change: Callable[[Any], None], words: str) -> None:
    trunk = copy.copy(trunk_of("llama"))
    trunk.model = tiny_model("llama")
    change(trunk.model)
    with pytest.raises(UserError, match=f"'llama'.*{words}") as caught:
        cut(trunk, 1)
    assert "\n" not in str(caught.value)
