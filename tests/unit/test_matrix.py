"""The first promise: every drafter, on every family, gives token for token what the trunk alone gives."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import pytest
import torch

from medusa.decoding import Request, decode, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import (
    VOCAB,
    ScriptedDrafter,
    memorising_heads,
    plain_greedy,
    random_heads,
    tiny_trunk,
)
from medusa.tree import Topology
from medusa.trunk import Trunk

from .drafting import UNTRAINED, untrained

FAMILIES = ("gpt2", "llama", "neox")
WINDOWED = ("mistral", "gemma3")  # tiny windows of 8 tokens: some prompts lie inside, some beyond
KINDS = ("medusa", "root", "hydra")
TREES = ("chain", 16, 64, 256)
TOKENS = 24
PROMPTS = [  # ragged; the first is one token, id 0 is one of the text's own
    [3],
    [0, 17, 0, 5],
    [64, 1, 2, 3, 0, 0, 9, 40],
    [5, 5, 0, 8, 21, 33, 60, 2, 2, 1, 7],
    [11, 0, 52, 4, 4, 19, 27, 35, 0, 61, 50, 6, 1],
]


@cache
def trunk_of(family: str) -> Trunk:
    return tiny_trunk(family)


@cache
def texts_of(family: str) -> list[list[int]]:
    return [plain_greedy(trunk_of(family), prompt, TOKENS) for prompt in PROMPTS]


def tree_of(name: str | int) -> Topology:
    """A chain, or the so many likeliest paths: a path is the less likely the longer it is and the higher its ranks."""
    if isinstance(name, str):
        return Topology.chain(4)
    paths = [path for depth in range(1, 5) for path in product(range(8), repeat=depth)]
    return Topology.from_paths(sorted(paths, key=lambda path: sum(path) + len(path))[: name - 1])


@cache
def heads_of(family: str, kind: str, learnt: bool, projection: str) -> MedusaHeads:
    trunk, config = trunk_of(family), HeadsConfig(kind, num=4, layers=2, projection=projection)
    if not learnt:
        return random_heads(trunk, config)
    known = [prompt + text for prompt, text in zip(PROMPTS[:2], texts_of(family), strict=False)]
    return memorising_heads(trunk, config, known)


def heads_drafter(family: str, kind: str, tree: str | int, learnt: bool, projection: str = "own") -> Drafter:
    return MedusaDrafter(heads_of(family, kind, learnt, projection), tree_of(tree))


def scripted(family: str, rows: list[int], honesty: float, size: int = 8) -> Drafter:
    return ScriptedDrafter([texts_of(family)[row] for row in rows], honesty=honesty, size=size, seed=size)


def check(family: str, drafter: Drafter, rows: list[int]) -> float:
    """Decode these prompts as one batch, compare with plain greedy; return the tokens per step."""
    emitted: dict[int, list[int]] = {index: [] for index in range(len(rows))}
    shares = []
    for step in decode(trunk_of(family), drafter, [Request(PROMPTS[row], TOKENS) for row in rows]):
        for index, tokens in step.tokens.items():
            emitted[index] += tokens
            if step.nodes:
                shares.append(len(tokens))
    assert [emitted[index] for index in range(len(rows))] == [texts_of(family)[row] for row in rows]
    return sum(shares) / len(shares)


ALL = list(range(len(PROMPTS)))
# Tokens per step: half of the layers guess little where layers are random, and random texts repeat little.
LEAST = {"draft model": 1.5, "draft tree": 1.5}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_a_hard_one(family: str) -> None:
    # were it one token over and over, or never id 0, equality would prove little
    texts = texts_of(family)
    assert sum(len(set(text)) for text in texts) >= 5 * len(texts)
    assert sum(text.count(0) for text in texts) >= 0.05 * len(texts) * TOKENS
    assert trunk_of(family).vocab_size == VOCAB == 65


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[2], ALL], ids=["solo", "batch"])
def test_null(family: str, rows: list[int]) -> None:
    assert check(family, NullDrafter(), rows) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_heads(family: str, kind: str) -> None:
    assert check(family, heads_drafter(family, kind, 16, learnt=True), ALL) > 1.3
    assert check(family, heads_drafter(family, kind, 16, learnt=True), [1]) > 1.3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", UNTRAINED)
def test_untrained(family: str, name: str) -> None:
    drafter = untrained(trunk_of(family), name)
    assert check(family, drafter, ALL) > LEAST.get(name, 1.0)
    check(family, drafter, [(UNTRAINED.index(name) + FAMILIES.index(family)) % len(ALL)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("honesty", [0.5, 1.0], ids=["adversary", "oracle"])
def test_scripted(family: str, honesty: float) -> None:
    assert check(family, scripted(family, ALL, honesty), ALL) > 1.5
    assert check(family, scripted(family, [3], honesty), [3]) > 1.5


@pytest.mark.parametrize("family", WINDOWED)
def test_past_a_sliding_window(family: str) -> None:
    assert check(family, NullDrafter(), ALL) == 1.0
    assert check(family, heads_drafter(family, "hydra", 16, learnt=True), ALL) > 1.3
    assert check(family, scripted(family, ALL, 0.7, size=16), ALL) > 1.5
    for name in UNTRAINED:
        check(family, untrained(trunk_of(family), name), ALL)


def test_changing_the_tree_does_not_change_the_text() -> None:
    for tree in TREES:
        check("llama", heads_drafter("llama", "root", tree, learnt=True), [0, 4])


def test_rows_in_another_order_and_company() -> None:
    orders = ([4, 0], [0, 4, 2], [2, 2, 2], [3, 1, 0, 4])
    for rows in orders:
        check("llama", heads_drafter("llama", "hydra", 16, learnt=True), rows)
        check("llama", scripted("llama", rows, 0.8), rows)
    for place, name in enumerate(UNTRAINED):
        check("llama", untrained(trunk_of("llama"), name), orders[place % len(orders)])


# Whether heads are fitted to the texts, and their projections: only own ones can be.
MADE = {"fitted": (True, "own"), "random": (False, "own"), "shared": (False, "shared")}
# Every kind, tree and way to make heads, on a family in turn: each family meets each of them.
HEADS = [((FAMILIES + WINDOWED)[number % 5], *case) for number, case in enumerate(product(KINDS, TREES, MADE))]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "tree", "made"), HEADS)
def test_every_head_and_tree(family: str, kind: str, tree: str | int, made: str) -> None:
    for rows in (ALL, [0], [4]):
        check(family, heads_drafter(family, kind, tree, *MADE[made]), rows)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8, 64, 256])
@pytest.mark.parametrize("family", FAMILIES + WINDOWED)
def test_every_script(family: str, size: int) -> None:
    for honesty, rows in ((0.0, ALL), (0.5, ALL), (1.0, ALL), (0.5, [0]), (0.5, [4])):
        check(family, scripted(family, rows, honesty, size), rows)


# Five hundred prompts, every drafter, batches of 1 to 32 with rows joining as others end.

CROWD = random.Random(17)
MANY = [[CROWD.randrange(VOCAB) for _ in range(CROWD.choice([1, 2, 3, 5, 8, 13, 21]))] for _ in range(500)]
LIMITS = [CROWD.randint(1, 24) for _ in MANY]
BATCHES = (1, 2, 3, 8, 17, 32)


@cache
def plain_texts(family: str) -> dict[tuple[int, ...], list[int]]:
    """Greedy texts by whole forwards without a cache, prompts of one length at once."""
    texts: dict[tuple[int, ...], list[int]] = {}
    for size in sorted({len(prompt) for prompt in MANY}):
        ids_BT = torch.tensor(sorted({tuple(prompt) for prompt in MANY if len(prompt) == size}))
        for _ in range(max(LIMITS)):
            with torch.no_grad():
                next_B = trunk_of(family).model(input_ids=ids_BT).logits[:, -1].argmax(-1)
            ids_BT = torch.cat([ids_BT, next_B[:, None]], 1)
        texts |= {tuple(row[:size]): row[size:] for row in ids_BT.tolist()}
    return texts


def crowd_drafter(family: str, name: str) -> Drafter:
    if name == "none":
        return NullDrafter()
    if name in ("oracle", "adversary"):
        return ScriptedDrafter(plain_texts(family), honesty=1.0 if name == "oracle" else 0.6, size=9, seed=1)
    if name in UNTRAINED:
        return untrained(trunk_of(family), name)
    return heads_drafter(family, name, 16, learnt=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ["none", "oracle", "adversary", *KINDS, *UNTRAINED])
def test_five_hundred_prompts(family: str, name: str) -> None:
    trunk, drafter, truth = trunk_of(family), crowd_drafter(family, name), plain_texts(family)
    requests = [Request(prompt, limit) for prompt, limit in zip(MANY, LIMITS, strict=True)]
    start, turn = 0, 0
    while start < len(requests):  # each batch of its own size; every row once
        most = BATCHES[turn % len(BATCHES)]
        some = requests[start : start + 3 * most]
        for request, ids in zip(some, generate_ids(trunk, drafter, some, most=most), strict=True):
            assert ids == truth[tuple(request.ids)][: request.max_new_tokens]
        start, turn = start + len(some), turn + 1
