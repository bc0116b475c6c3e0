"""Logits processors: small cases by hand, what is refused, and that the device is asked for nothing."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.errors import UserError
from medusa.processors import Prefixes, Processing, Row, process
from medusa.tree import DraftTree, Shape, Topology

V = 8
INF = math.inf


def tree_of(tokens: list[list[int]], topology: Topology) -> DraftTree:
    tokens_BN = torch.tensor(tokens)
    return DraftTree(Shape.static(topology, "cpu"), tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool))


def scores_of(
    text: list[int],
    path: list[int],
    prompt: int = 1,
    logits: list[float] | None = None,
    longest: int = 99,
    **asked: Any,
) -> list[list[float]]:
    """The scores of a chain's nodes, of logits that are 1 unless given; EOS is token 7."""
    tree = tree_of([[text[-1], *path]], Topology.chain(len(path)))
    logits_BNV = torch.tensor(logits or [1.0] * V).double().expand(1, tree.size, V)
    row = Row(Processing(**asked), prompt, longest, frozenset({7}))
    return process(logits_BNV, Prefixes.of([text], tree), [row])[0].tolist()


def forbidden(scores: list[list[float]]) -> list[list[int]]:
    return [[token for token, score in enumerate(node) if score == -INF] for node in scores]


def test_repetition_divides_what_is_above_0_and_multiplies_what_is_below() -> None:
    scores = scores_of([0, 1], [2, 1], logits=[2.0, -2.0, 4.0, 4.0, 0, 0, 0, 0], repetition_penalty=2.0)
    assert [node[:4] for node in scores] == [[1.0, -4.0, 4.0, 4.0], [1.0, -4.0, 2.0, 4.0], [1.0, -4.0, 2.0, 4.0]]


def test_frequency_counts_behind_the_prompt_and_presence_is_paid_once() -> None:
    # prompt 3 3; new 4 4, then the path 4 5
    scores = scores_of([3, 3, 4, 4], [4, 5], prompt=2, frequency_penalty=0.25, presence_penalty=0.5)
    assert [node[3:6] for node in scores] == [[1.0, 0.0, 1.0], [1.0, -0.25, 1.0], [1.0, -0.25, 0.25]]


def test_the_prompts_last_token_is_a_root_that_does_not_count() -> None:
    assert scores_of([3, 4], [], prompt=2, frequency_penalty=1.0) == [[1.0] * V]
    assert scores_of([3, 4], [4], prompt=2, presence_penalty=1.0)[1][4] == 0.0


def test_ngrams_may_begin_in_the_text_and_end_in_the_path() -> None:
    # 0 1 | 2 0 1: a third of "0 1" is 2; "1 2" is followed by 0
    scores = scores_of([0, 1], [2, 0, 1], no_repeat_ngram_size=3)
    assert forbidden(scores) == [[], [], [], [2]]
    assert forbidden(scores_of([0, 1, 0], [], no_repeat_ngram_size=2)) == [[1]]
    assert forbidden(scores_of([0, 0], [], no_repeat_ngram_size=1)) == [[0]]
    assert forbidden(scores_of([0], [], no_repeat_ngram_size=2)) == [[]]


def test_bad_words_are_completed_by_text_and_path() -> None:
    words = ((5,), (1, 2), (0, 1, 3), (7,), (7, 4))
    assert forbidden(scores_of([0, 1], [7], bad_words_ids=words)) == [[2, 3, 5], [4, 5]]  # an EOS alone may come


def test_biases_of_one_token_add_up() -> None:
    bias = (((2,), 0.5), ((1, 2), 0.25), ((0, 1, 2), 1.0), ((3, 1, 2), 9.0))
    assert [node[2] for node in scores_of([0, 1], [2], sequence_bias=bias)] == [2.75, 1.5]


def test_eos_waits_for_the_new_tokens_or_the_length_asked() -> None:
    assert forbidden(scores_of([0, 1], [2, 3], prompt=2, min_new_tokens=2)) == [[7], [7], []]
    assert forbidden(scores_of([0, 1], [2, 3], prompt=2, min_length=3)) == [[7], [], []]
    assert forbidden(scores_of([0, 1], [2, 3], prompt=2, min_length=3, min_new_tokens=2)) == [[7], [7], []]
    assert forbidden(scores_of([0, 1], [2], prompt=2, min_length=9, min_new_tokens=1)) == [[7], []]


def test_suppressed_at_the_beginning_and_throughout() -> None:
    assert forbidden(scores_of([0, 1], [2], prompt=2, begin_suppress_tokens=(3,), suppress_tokens=(4,))) == [
        [3, 4],
        [4],
    ]
    # a forced token behind a prompt of one is no beginning
    scores = scores_of([0], [1, 2], prompt=1, begin_suppress_tokens=(3,), forced_bos_token_id=1)
    assert forbidden(scores) == [[0, 2, 3, 4, 5, 6, 7], [3], []]
    # which a longer prompt does not get
    assert forbidden(scores_of([0, 1], [2], prompt=2, begin_suppress_tokens=(3,), forced_bos_token_id=1)) == [[3], []]


def test_forced_at_both_ends() -> None:
    scores = scores_of([0], [1, 2], longest=3, forced_bos_token_id=1, forced_eos_token_id=(6, 7))
    assert [[token for token, score in enumerate(node) if score != -INF] for node in scores] == [
        [1],
        [6, 7],
        [*range(V)],
    ]
    assert scores[0][1] == scores[1][6] == scores[1][7] == 0.0


def test_the_eos_grows_by_the_factor() -> None:
    logits = [1.0] * 7 + [-2.0]
    scores = scores_of([0, 1], [2, 3], prompt=1, logits=logits, exponential_decay_length_penalty=(1, 2.0))
    assert [node[7] for node in scores] == [-2.0, 0.0, 4.0]  # |-2| x (2**late - 1) is added
    assert all(node[:7] == [1.0] * 7 for node in scores)


def test_an_eos_that_grew_beyond_all_numbers_is_certain() -> None:
    for first in (3.0, -3.0, 0.0):
        [[*_, score]] = scores_of([0] * 5000, [], logits=[first] * V, exponential_decay_length_penalty=(0, 9.0))
        assert score == (torch.finfo(torch.float64).max if first else 0.0)


def test_invalid_values_become_numbers() -> None:
    limit = torch.finfo(torch.float64).max
    scores = scores_of([0], [], logits=[math.nan, INF, -INF, 1.0, 0, 0, 0, 0], remove_invalid_values=True)
    assert scores[0][:4] == [0.0, limit, -limit, 1.0]


def test_ids_beyond_the_logits_change_nothing() -> None:
    # an embedding may be larger than the head: such a token stands in a text but cannot come
    scores = scores_of(
        [V, V + 5, 1, V],
        [V],
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        no_repeat_ngram_size=1,
        suppress_tokens=(V, V + 1),
        begin_suppress_tokens=(V,),
    )
    assert scores == [[1.0, -INF, *[1.0] * 6]] * 2
    assert scores_of([V], [], repetition_penalty=2.0, no_repeat_ngram_size=1) == [[1.0] * V]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_new_and_at_least_fp32(dtype: torch.dtype) -> None:
    tree = tree_of([[1, 2]], Topology.chain(1))
    logits = torch.full((1, 2, V), 0.75, dtype=dtype)
    for asked in (Processing(), Processing(suppress_tokens=(3,))):
        scores = process(logits, Prefixes.of([[0, 1]], tree), [Row(asked, 1, 9)])
        assert scores.dtype == torch.promote_types(dtype, torch.float32)
        assert (logits == 0.75).all()
        assert (scores is logits) == (asked.idle and scores.dtype == dtype)


def test_rows_with_their_own_wishes_in_any_arrangement() -> None:
    asked = {"a": Processing(suppress_tokens=(1,)), "b": Processing(suppress_tokens=(2,)), ".": Processing()}
    for arrangement in ("a", "aa", "ab", "aab", "aba", "a.a", ".aa", "b.ab."):
        tree = tree_of([[0]] * len(arrangement), Topology.root())
        rows = [Row(asked[which], 1, 9) for which in arrangement]
        scores = process(torch.ones(len(rows), 1, V), Prefixes.of([[0]] * len(rows), tree), rows)
        wanted = [{"a": [1], "b": [2], ".": []}[which] for which in arrangement]
        assert forbidden(scores[:, 0].tolist()) == wanted


def test_rows_that_ask_for_the_same_keep_their_own_lengths() -> None:
    asked = Processing(min_new_tokens=2, begin_suppress_tokens=(3,), forced_eos_token_id=(7,))
    texts = [[0, 1], [0, 1, 2], [0] * 5, [0, 1]]
    tree = tree_of([[text[-1]] for text in texts], Topology.root())
    rows = [Row(asked, prompt, longest, frozenset({7})) for prompt, longest in ((2, 9), (2, 9), (2, 6), (1, 9))]
    scores = process(torch.ones(4, 1, V), Prefixes.of(texts, tree), [*rows])
    assert forbidden(scores[:, 0].tolist()) == [[3, 7], [7], [*range(7)], [7]]


class Asked(TorchDispatchMode):
    """Notes what waits for a device: numbers read by the host, and shapes that depend on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(wait in str(func) for wait in self.WAITS):
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": ((1, 2), (3,)),
    "sequence_bias": (((1,), 0.5), ((2, 3), -1.0)),
    "suppress_tokens": (4,),
    "begin_suppress_tokens": (5,),
    "min_length": 3,
    "min_new_tokens": 2,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": (7,),
    "exponential_decay_length_penalty": (0, 1.1),
    "remove_invalid_values": True,
}


def test_the_host_waits_for_nothing() -> None:
    tree = tree_of([[1, 2, 3], [0, 2, 3]], Topology.full([2]))
    rows = [Row(Processing(**EVERYTHING), 1, 4, frozenset({7})), Row(Processing(**EVERYTHING), 1, 3, frozenset({6}))]
    with Asked() as asked:
        process(torch.ones(2, 3, V), Prefixes.of([[0, 1], [0]], tree), rows)
    assert asked.waits == []
    with asked:
        assert torch.ones(1).item() == 1.0  # the test's own eyes are open
    assert asked.waits


def test_fillers_do_no_harm() -> None:
    tree = tree_of([[1, 2, 0]], Topology.full([2]))
    tree = DraftTree(tree.shape, tree.tokens_BN, torch.tensor([[True, True, False]]))
    row = Row(Processing(**EVERYTHING), 1, 9, frozenset({7}))
    logits = torch.ones(1, 3, V)
    full = process(logits, Prefixes.of([[0, 1]], tree), [row])
    alone = process(logits[:, :2], Prefixes.of([[0, 1]], tree_of([[1, 2]], Topology.chain(1))), [row])
    assert torch.equal(full[:, :2], alone)


def test_idle_is_when_nothing_is_asked_for() -> None:
    assert Processing().idle
    assert Processing(repetition_penalty=1, bad_words_ids=[], sequence_bias={}, forced_eos_token_id=[]).idle  # type: ignore[arg-type]
    for name, value in EVERYTHING.items():
        assert not Processing(**{name: value}).idle, name


def test_lists_mappings_and_numpys_numbers_are_read() -> None:
    read = Processing(
        bad_words_ids=[[1, 2], [3]],
        sequence_bias={(1,): 1, (2, 3): -INF},
        suppress_tokens=numpy.array([4, 5]),
        forced_eos_token_id=7,
        exponential_decay_length_penalty=[3, 2],
    )  # type: ignore[arg-type]
    plain = Processing(
        bad_words_ids=((1, 2), (3,)),
        sequence_bias=(((1,), 1.0), ((2, 3), -INF)),
        suppress_tokens=(4, 5),
        forced_eos_token_id=(7,),
        exponential_decay_length_penalty=(3, 2.0),
    )
    assert read == plain and hash(read) == hash(plain)
    assert Processing(forced_eos_token_id=numpy.array([1, 2])).forced_eos_token_id == (1, 2)  # type: ignore[arg-type]
    assert Processing(sequence_bias=[[[1], 1.0], [[1], 2.0]]).sequence_bias == (((1,), 2.0),)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(read)) == read


WRONG: list[tuple[str, Any]] = [
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", INF),
    ("repetition_penalty", None),
    ("frequency_penalty", math.nan),
    ("frequency_penalty", "1"),
    ("presence_penalty", INF),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", 2.0),
    ("no_repeat_ngram_size", True),
    ("bad_words_ids", [1, 2]),
    ("bad_words_ids", [[1], []]),
    ("bad_words_ids", [[-1]]),
    ("bad_words_ids", 3),
    ("bad_words_ids", ["ab"]),
    ("sequence_bias", [[1], [2]]),
    ("sequence_bias", {(): 1.0}),
    ("sequence_bias", {(1,): INF}),
    ("sequence_bias", {(1,): math.nan}),
    ("sequence_bias", {(1,): None}),
    ("sequence_bias", 1.0),
    ("suppress_tokens", [-1]),
    ("suppress_tokens", 5),
    ("begin_suppress_tokens", [1.5]),
    ("min_length", -1),
    ("min_new_tokens", 1.0),
    ("forced_bos_token_id", -1),
    ("forced_eos_token_id", [-1]),
    ("forced_eos_token_id", -1),
    ("exponential_decay_length_penalty", (1,)),
    ("exponential_decay_length_penalty", (-1, 1.1)),
    ("exponential_decay_length_penalty", (1, 0.0)),
    ("exponential_decay_length_penalty", 1.1),
    ("remove_invalid_values", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_cannot_be_is_named_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        Processing(**{name: value})
    said = str(caught.value)
    assert said.startswith(f"{name}={value!r}: it must be ") and "\n" not in said


def test_forcing_what_is_suppressed_is_refused() -> None:
    with pytest.raises(UserError, match=r"forced_bos_token_id=3: suppress_tokens"):
        Processing(forced_bos_token_id=3, suppress_tokens=(2, 3))
    with pytest.raises(UserError, match=r"forced_eos_token_id=\(2, 3\): suppress_tokens"):
        Processing(forced_eos_token_id=(2, 3), suppress_tokens=(2, 3))
    Processing(forced_eos_token_id=(2, 4), suppress_tokens=(2, 3))


def test_a_growing_eos_needs_one() -> None:
    with pytest.raises(UserError, match=r"exponential_decay_length_penalty=\(3, 1\.5\) without an EOS"):
        Row(Processing(exponential_decay_length_penalty=(3, 1.5)), 1, 9)


@pytest.mark.parametrize(
    "asked",
    [
        {"bad_words_ids": ((1, V),)},
        {"sequence_bias": (((V, 1), 1.0),)},
        {"forced_bos_token_id": V},
        {"forced_eos_token_id": (1, V)},
    ],
)
def test_ids_outside_the_vocabulary_are_named(asked: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"{next(iter(asked))} names token {V}: .* 0\.\.{V - 1}"):
        scores_of([0], [], **asked)
    Processing(**asked).check(V + 1)


def test_prefixes_of_ragged_texts() -> None:
    tree = tree_of([[3, 5, 6], [0, 1, 2]], Topology((-1, 0, 1), (0, 0, 0)))
    prefixes = Prefixes.of([[3], [4, 0, 0]], tree)
    expected: list[list[list[int]]] = [
        [[-1, -1, -1, -1, 3], [-1, -1, -1, 3, 5], [-1, -1, 3, 5, 6]],
        [[-1, -1, 4, 0, 0], [-1, 4, 0, 0, 1], [4, 0, 0, 1, 2]],
    ]
    assert prefixes.ids_BNL.tolist() == expected
    assert prefixes.length_BN.tolist() == [[1, 2, 3], [3, 4, 5]]
    only: Tensor = prefixes.rows([1]).ids_BNL
    assert only.tolist() == expected[1:]
