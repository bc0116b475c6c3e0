"""Our own attention: the sum in fp64 but for rounding, each query for itself, and what is hidden has no part in it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from medusa import native, tree_attention
from medusa.tree_attention import MOST, MOST_GROUP, MOST_SIZE, available, fits

if not available():
    pytest.skip("there is no C++ compiler here", allow_module_level=True)

FULL, HALF = torch.float32, torch.bfloat16
LEAST = torch.finfo(FULL).min
SPAN = 256  # slots that threads share out
# what compilers make of it for processors with vectors of 4, 8 and 16 numbers, and what this one has beside
PROCESSORS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl", "native": ""}
SIZES = [1, 6, 16, 24, 64, 80, 128]
Problem = tuple[Tensor, Tensor, Tensor, Tensor | None]


def problem(
    rows: int = 1,
    shared: int = 1,
    group: int = 1,
    nodes: int = 1,
    slots: int = 1,
    size: int = 16,
    *,
    hidden: float | None = LEAST,
    one_mask: bool = False,
    seed: int = 0,
    dtype: torch.dtype = FULL,
) -> Problem:
    """Queries as a projection leaves them, planes of a slot cache in view, and a random mask; ``hidden`` None: none,
    :data:`LEAST`: the least number of the dtype."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden = torch.finfo(dtype).min if hidden == LEAST else hidden
    query = drawn(rows, nodes, shared * group, size).transpose(1, 2)
    key, value = drawn(2, 3, rows, shared, slots + 5, size)[:, 1, :, :, :slots]
    if hidden is None:
        return query, key, value, None
    whole = drawn(1 if one_mask else rows, 1, nodes, slots + 3) * 2
    whole = whole.masked_fill(torch.rand(whole.shape, generator=generator) < 0.5, hidden)
    whole[..., 0] = 0.0  # each sees one at least
    return query, key, value, whole[..., :slots]


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The library's, in fp64, [B, N, heads, D]."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(each.double().repeat_interleave(group, 1) for each in (key, value))
    mask = None if mask is None else mask.double()
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float = 0.25) -> Tensor:
    assert fits(query, key, value, mask)
    return tree_attention.tree_attention(query, key, value, mask, scale)


def same(found: Tensor, wanted: Tensor) -> None:
    """But for rounding: in bf16 that of the output alone."""
    half = 2**-8 if found.dtype is HALF else 0.0
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5 + half)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 3),
    shared=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    nodes=st.integers(1, 15),
    slots=st.one_of(st.integers(1, 40), st.integers(SPAN - 3, 2 * SPAN + 40)),
    size=st.sampled_from(SIZES),
    hidden=st.sampled_from([LEAST, -torch.inf]),
    one_mask=st.booleans(),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([FULL, HALF]),
)
def test_it_is_the_sum_but_for_rounding(
    rows: int, shared: int, group: int, nodes: int, slots: int, size: int, dtype: torch.dtype, **options: Any
) -> None:
    given = problem(rows, shared, group, nodes, slots, size, dtype=dtype, **options)
    found = attend(*given)
    assert found.shape == (rows, nodes, shared * group, size) and found.is_contiguous() and found.dtype is dtype
    same(found, exact(*given, 0.25))


@settings(deadline=None)
@given(rows=st.integers(1, 2), group=st.integers(1, 4), slots=st.integers(1, 2 * SPAN), size=st.sampled_from(SIZES))
def test_one_token_sees_all_without_a_mask(rows: int, group: int, slots: int, size: int) -> None:
    given = problem(rows, 2, group, 1, slots, size, hidden=None)
    same(attend(*given), exact(*given, 0.25))
    zeros = torch.zeros(1, 1, 1, slots)
    assert torch.equal(attend(*given), attend(*given[:3], zeros))


@pytest.mark.parametrize(("nodes", "group"), [(MOST, 1), (97, 2), (3, MOST_GROUP), (1, MOST_GROUP)])
def test_more_queries_than_one_task_takes(nodes: int, group: int) -> None:
    given = problem(1, 2, group, nodes, SPAN + 9, 32)
    same(attend(*given), exact(*given, 0.25))


def test_large_scores_are_softened_as_they_should() -> None:
    query, key, value, mask = problem(1, 2, 2, 4, SPAN + 30)
    same(attend(query * 30, key * 5, value, mask), exact(query * 30, key * 5, value, mask, 0.25))
    assert (attend(query, key, torch.ones_like(value), mask) - 1).abs().max() < 1e-6


def test_exponentials_are_good_to_the_last_places() -> None:
    """The share of a second key whose score is x below the first one's: e^x / (1 + e^x)."""
    scores = torch.linspace(-86.0, 0.0, 999)
    key = torch.stack([torch.zeros_like(scores), scores], 1)[:, None, :, None]
    value = torch.tensor([0.0, 1.0])[None, None, :, None].expand(999, -1, -1, -1)
    found = attend(torch.ones(999, 1, 1, 1), key, value, None, 1.0).flatten()
    torch.testing.assert_close(found.double(), scores.double().sigmoid(), atol=0.0, rtol=4 * 2**-23)


def test_keys_and_values_may_lie_anyhow() -> None:
    query, key, value, mask = problem(2, 3, 2, 4, 50, 24)
    assert mask is not None
    wanted = attend(query, key, value, mask)
    turned = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (query, key, value, mask)]
    assert all(each.stride(3) != 1 for each in turned)
    assert torch.equal(attend(*turned), wanted)
    by_slot = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (key, value)]
    assert torch.equal(attend(query.contiguous(), *by_slot, mask.contiguous()), wanted)


@settings(deadline=None)
@given(
    rows=st.integers(1, 3),
    group=st.integers(1, 4),
    nodes=st.integers(1, 20),
    slots=st.integers(1, 2 * SPAN),
    size=st.sampled_from(SIZES),
    more=st.integers(1, SPAN),
    dtype=st.sampled_from([FULL, HALF]),
    data=st.data(),
)
def test_a_query_s_bits_are_its_own(
    rows: int, group: int, nodes: int, slots: int, size: int, more: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    query, key, value, mask = problem(rows, 2, group, nodes, slots, size, dtype=dtype)
    assert mask is not None
    together = attend(query, key, value, mask)
    row, node = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, nodes - 1))
    alone = (query[row, None, :, node, None], key[row, None], value[row, None], mask[row, None, :, node, None])
    found = attend(*alone)
    assert torch.equal(found[0, 0], together[row, node])
    hidden = torch.full(
        (1, 1, 1, more), torch.finfo(dtype).min, dtype=dtype
    )  # behind its end, as in a batch with a longer row
    junk = torch.full((1, 2, more, size), 3e37, dtype=dtype)
    longer = torch.cat([alone[1], junk], 2), torch.cat([alone[2], junk], 2), torch.cat([alone[3], hidden], 3)
    assert torch.equal(attend(alone[0], *longer), found)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_don_t_show(threads: int) -> None:
    given = [problem(2, 3, 3, 5, slots, 64) for slots in (7, SPAN, 3 * SPAN + 8)]
    alone, before = [attend(*each) for each in given], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(attend(*each), one) for each, one in zip(given, alone, strict=True))
        assert torch.equal(tree_attention.tree_attention(*given[2], 0.25, threads), alone[2])
    finally:
        torch.set_num_threads(before)


@settings(deadline=None)
@given(
    nodes=st.integers(1, 6),
    slots=st.integers(2, 2 * SPAN),
    hidden=st.sampled_from([LEAST, -torch.inf]),
    dtype=st.sampled_from([FULL, HALF]),
)
def test_what_is_hidden_has_no_part_in_it(nodes: int, slots: int, hidden: float, dtype: torch.dtype) -> None:
    query, key, value, mask = problem(1, 2, 2, nodes, slots, hidden=hidden, dtype=dtype)
    assert mask is not None
    mask[:, :, :, 1:] = mask[:, :, :1, 1:]  # hidden from all of them
    unseen = mask[0, 0, 0] <= torch.finfo(dtype).min
    wanted = attend(query, key, value, mask)
    for junk in (3e38, -3e38):
        key[:, :, unseen], value[:, :, unseen] = junk, -junk
        assert torch.equal(attend(query, key, value, mask), wanted)
    if unseen.any():
        mask[:, :, :, unseen] = 0.0
        assert not torch.equal(attend(query, key, value, mask), wanted)


def test_a_chain_is_one_token_after_the_other() -> None:
    """To the bit, in fp32: what a step verifies is what plain decoding would compute."""
    query, key, value, _ = problem(2, 2, 3, SPAN + 20, SPAN + 20, 32)
    prefix, nodes = SPAN - 6, 12
    chain = torch.full((1, 1, nodes, prefix + nodes), LEAST).triu(prefix + 1)
    view = slice(prefix + nodes)
    at_once = attend(query[:, :, prefix : prefix + nodes], key[:, :, view], value[:, :, view], chain)
    for node in range(nodes):
        seen = slice(prefix + node + 1)
        one = query[:, :, prefix + node, None]
        assert torch.equal(attend(one, key[:, :, seen], value[:, :, seen], None)[:, 0], at_once[:, node])


@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("hidden", [LEAST, -torch.inf])
def test_a_query_that_sees_nothing_gets_what_the_library_gives(hidden: float, dtype: torch.dtype) -> None:
    query, key, value, mask = problem(2, 2, 2, 3, SPAN + 5, dtype=dtype)
    assert mask is not None
    mask[1, 0, 1] = torch.finfo(dtype).min if hidden == LEAST else hidden
    found, wanted = attend(query, key, value, mask), exact(query, key, value, mask, 0.25)
    if hidden == LEAST:  # in fp64 scores add to it
        wanted[1, 1] = value[1].double().mean(1).repeat_interleave(2, 0)
    assert wanted.isfinite().all()
    same(found, wanted)


def test_a_query_that_sees_nothing_looks_at_what_is_hidden_least() -> None:
    query, key, value, mask = problem(1, 1, 1, 1, 2 * SPAN)
    assert mask is not None
    mask[:] = -torch.inf
    mask[..., 3::7] = LEAST
    same(attend(query, key, value, mask), value[0, 0, 3::7].double().mean(0)[None, None, None])


@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_what_is_no_number_is_not_lost(dtype: torch.dtype) -> None:
    query, key, value, _ = problem(1, 1, 2, 1, SPAN + 5, dtype=dtype)
    query[:, 1] = torch.nan
    assert attend(query, key, value, None).isnan().all(-1).flatten().tolist() == [False, True]
    key[0, 0, 7] = torch.nan
    assert attend(query, key, value, None).isnan().all()


def test_no_number_of_any_bits_is_lost() -> None:
    query, key, value, _ = problem(1, 1, 1, 1, 20)
    for bits in (-1, 0x7F800001, 0x7FC001FF, -0x400000 + 3):
        key[0, 0, 7].view(torch.int32)[:] = bits
        assert key[0, 0, 7].isnan().all() and attend(query, key, value, None).isnan().all()


def test_what_it_does_not_serve() -> None:
    query, key, value, mask = problem(2, 2, 2, 3, 8)
    assert mask is not None and fits(query, key, value, mask)
    assert not fits(query, key, value, None)  # of several tokens without a mask, each sees less than the next
    assert not fits(query, key, value, mask == 0)
    assert not fits(query, key, value, mask.double())
    assert not fits(query, key, value, mask[..., :-1])
    assert not fits(query, key, value, mask.expand(-1, 4, -1, -1))
    assert not fits(query, key, value, mask.repeat(1, 1, 2, 1))
    assert not fits(query, key, value[..., :-1], mask)
    assert not fits(query, key.bfloat16(), value, mask) and not fits(query, key, value.bfloat16(), mask)
    assert not fits(*(each.double() for each in (query, key, value, mask)))
    assert not fits(*(each.to("meta") for each in (query, key, value, mask)))
    assert not fits(query[:, :3], key, value, mask)
    assert not fits(query[:0], key[:0], value[:0], mask[:0]) and not fits(query[:, :0], key[:, :0], value[:, :0], mask)
    assert not fits(query[:, :, :1], key[:, :, :0], value[:, :, :0], None)
    assert not fits(query[:1], key, value, mask[:1])
    assert not fits(*problem(nodes=MOST + 1)) and not fits(*problem(group=MOST_GROUP + 1))
    assert not fits(*problem(size=MOST_SIZE + 1)) and fits(*problem(size=MOST_SIZE))


def test_the_limits_are_those_of_the_source() -> None:
    limits = native.library("tree_attention")
    assert limits is not None
    assert (limits.most_rows(), limits.most_size()) == (MOST_GROUP, MOST_SIZE)


def test_without_a_compiler_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "library", lambda _: None)
    tree_attention._native.cache_clear()
    try:
        assert not available()
    finally:
        tree_attention._native.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "needed"), PROCESSORS.items())
def test_every_width_of_vectors(processor: str, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, made = native.find_compiler(), tmp_path / "made.so"
    source = Path(native.__file__).with_name("tree_attention.cpp")
    info = Path("/proc/cpuinfo")
    known = info.read_text() if info.is_file() else ""
    if compiler is None or needed not in known or not native.build(source, compiler, made, [f"-march={processor}"]):
        pytest.skip(f"no compiler or no processor for {processor} here")
    other: Any = ctypes.CDLL(str(made))
    other.attention.argtypes = tree_attention._native().argtypes
    monkeypatch.setattr(tree_attention, "_native", lambda: other.attention)
    for size in SIZES:
        for group, dtype in ((1, FULL), (3, FULL), (3, HALF)):
            query, key, value, mask = problem(2, 2, group, 7, SPAN + 21, size, dtype=dtype)
            assert mask is not None
            found = attend(query, key, value, mask)
            same(found, exact(query, key, value, mask, 0.25))
            assert torch.equal(attend(query[:, :, 4, None], key, value, mask[:, :, 4, None])[:, 0], found[:, 4])
