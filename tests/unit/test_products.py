"""Products by weights that are laid out anew: the usual product but for rounding, and each row for itself."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from medusa import native, products
from medusa.products import FewRows, Way

FULL, HALF = torch.float32, torch.bfloat16
DTYPES = [FULL, HALF]
CASES = [(way, dtype) for way in products.WAYS for dtype in DTYPES if way.fits(torch.ones(1, 2, dtype=dtype))]
# processors with vectors of 4, 8 and 16 words, with instructions for bf16, and this one
PROCESSORS = ["-march=x86-64", "-march=x86-64-v3", "-march=x86-64-v4", "-march=cooperlake", "-march=native"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = FULL) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None)
@given(
    case=st.sampled_from(CASES),
    shape=st.lists(st.integers(0, 9), max_size=2),
    inner=st.integers(1, 70),
    outer=st.integers(1, 70),
    bias=st.booleans(),
    strided=st.booleans(),
)
def test_a_product_is_the_usual_one_but_for_rounding(
    case: tuple[Way, torch.dtype], shape: list[int], inner: int, outer: int, bias: bool, strided: bool
) -> None:
    way, dtype = case
    inner += inner % 2 if dtype is HALF else 0  # two neighbours of bf16 go together
    rows, weight = drawn(*shape, inner, dtype=dtype), drawn(outer, inner, seed=1, dtype=dtype)
    rows = rows.flip(0).mT.contiguous().mT if strided and rows.ndim > 1 else rows
    added = drawn(2 * outer, seed=2, dtype=dtype)[::2] if bias else None
    found, wanted = way.product(rows, way.pack(weight), added, outer), linear(rows, weight, added)
    assert found.shape == wanted.shape and found.dtype is dtype and found.is_contiguous()
    full = dtype is FULL
    torch.testing.assert_close(found, wanted, atol=1e-5 if full else 2e-2, rtol=1e-5 if full else 1e-2)


few = pytest.mark.skipif(not FewRows().fits(torch.ones(1, 1)), reason="there is no C++ compiler here")


@few
@settings(deadline=None)
@given(count=st.integers(1, 60), half=st.integers(1, 150), outer=st.integers(1, 80), dtype=st.sampled_from(DTYPES))
def test_a_row_s_bits_are_its_own(count: int, half: int, outer: int, dtype: torch.dtype) -> None:
    inner = 2 * half
    way, rows, weight = FewRows(), drawn(count, inner, dtype=dtype), drawn(outer, inner, seed=1, dtype=dtype)
    packed = way.pack(weight)
    alone = torch.cat([way.product(row[None], packed, None, outer) for row in rows])
    assert torch.equal(way.product(rows, packed, None, outer), alone)


@few
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    way, rows, weight = FewRows(), drawn(70, 64, dtype=dtype), drawn(100, 64, seed=1, dtype=dtype)
    packed, found, threads = way.pack(weight), list[Tensor](), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(way.product(rows, packed, None, 100))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@few
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [0, 4, 16])
def test_an_input_of_another_width_is_refused(inner: int, dtype: torch.dtype) -> None:
    packed = FewRows().pack(drawn(64, 8, dtype=dtype))
    with pytest.raises(RuntimeError, match=f"{inner} columns"):
        FewRows().product(drawn(2, inner, dtype=dtype), packed, None, 64)


@few
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_go_in_pieces(dtype: torch.dtype) -> None:
    """More numbers than a processor holds at hand: 131,072 words."""
    way, rows, weight = FewRows(), drawn(700, 1000, dtype=dtype), drawn(33, 1000, seed=1, dtype=dtype)
    packed = way.pack(weight)
    found, wanted = way.product(rows, packed, None, 33), linear(rows, weight)
    torch.testing.assert_close(found, wanted, atol=1e-3 if dtype is FULL else 0.3, rtol=1e-4 if dtype is FULL else 1e-2)
    assert torch.equal(found[::97], torch.cat([way.product(row[None], packed, None, 33) for row in rows[::97]]))


@few
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_stay_where_they_are(dtype: torch.dtype) -> None:
    way, rows, weight = FewRows(), drawn(20, 44, dtype=dtype), drawn(40, 44, seed=1, dtype=dtype)
    rows[1, 2], weight[3, 4] = float("nan"), float("inf")
    found, wanted = way.product(rows, way.pack(weight), None, 40), linear(rows, weight)
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())


@few
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_bf16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    """A product with one, of numbers whose sum is exact in fp32, is that sum in bf16."""
    row = torch.tensor([values]).to(HALF)
    row[row.abs() < 1e-30] = 0  # instructions for bf16 take numbers below the normal ones as zeros
    row[0, 1] = row[0, 0] * 2**-9  # the bits that are lost in rounding
    found = FewRows().product(row, FewRows().pack(torch.ones(1, 2, dtype=HALF)), None, 1)
    assert torch.equal(found, row.double().sum(-1, keepdim=True).to(HALF))


@few
def test_a_row_that_begins_in_the_middle_of_a_word() -> None:
    way, weight, long = FewRows(), drawn(3, 8, seed=1, dtype=HALF), drawn(9, dtype=HALF)
    assert torch.equal(
        way.product(long[1:], way.pack(weight), None, 3), way.product(long[1:].clone(), way.pack(weight), None, 3)
    )


def test_dtypes() -> None:
    assert not FewRows().fits(torch.ones(1, 3, dtype=HALF))
    for dtype in (torch.float16, torch.float64, torch.int8):
        assert not any(way.fits(torch.ones(1, 2, dtype=dtype)) for way in products.WAYS)


def test_without_a_compiler_there_is_no_such_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_few_rows", lambda: None)
    assert not FewRows().fits(torch.ones(1, 1))


@pytest.fixture(scope="module", params=PROCESSORS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The source as compiled for a kind of processor."""
    compiler, made = native.find_compiler(), tmp_path_factory.mktemp("made") / "made.so"
    source = Path(native.__file__).with_name("few_rows.cpp")
    if request.param == "-march=cooperlake" and b"avx512_bf16" not in native.processor():
        pytest.skip("this processor has no such instructions")
    if compiler is None or not native.build(source, compiler, made, [request.param]):
        pytest.skip("no compiler for that here")
    held = ctypes.CDLL(str(made))
    held.product.argtypes, held.product.restype = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int] * 2, None
    return held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [38, 256])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 16, 17, 24, 33, 50])
def test_every_width_of_vectors(
    compiled: Any, rows: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled.columns() > FewRows().pack(torch.ones(1, 1)).shape[-1]:
        pytest.skip("this processor has no such vectors")
    monkeypatch.setattr(products, "_few_rows", lambda: compiled)
    way, given, weight = FewRows(), drawn(rows, inner, dtype=dtype), drawn(45, inner, seed=1, dtype=dtype)
    bias, close = drawn(45, seed=2, dtype=dtype), 1e-4 if dtype is FULL else 2e-2
    packed = way.pack(weight)
    found = way.product(given, packed, bias, 45)
    torch.testing.assert_close(found, linear(given, weight, bias), atol=close, rtol=close)
    alone = way.product(given[-1:], packed, bias, 45)
    assert torch.equal(found[-1:], alone), "a row's bits are its own"
