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
from medusa.products import FewRows, OneDNN, Way

FULL, HALF = torch.float32, torch.bfloat16
CASES = [(FewRows(), FULL), (OneDNN(), FULL), (OneDNN(), HALF)]
CASES = [case for case in CASES if case[0].fits(torch.ones(1, dtype=case[1]))]
# what compilers make of it for processors with vectors of 4, 8 and 16 numbers
PROCESSORS = ["-march=x86-64", "-march=x86-64-v3", "-march=native"]


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
    rows, weight = drawn(*shape, inner, dtype=dtype), drawn(outer, inner, seed=1, dtype=dtype)
    rows = rows.flip(0).mT.contiguous().mT if strided and rows.ndim > 1 else rows
    added = drawn(2 * outer, seed=2, dtype=dtype)[::2] if bias else None
    found, wanted = way.product(rows, way.pack(weight), added, outer), linear(rows, weight, added)
    assert found.shape == wanted.shape and found.dtype is dtype and found.is_contiguous()
    full = dtype is FULL
    torch.testing.assert_close(found, wanted, atol=1e-5 if full else 2e-2, rtol=1e-5 if full else 1e-2)


few = pytest.mark.skipif(not FewRows().fits(torch.ones(1)), reason="there is no C++ compiler here")


@few
@settings(deadline=None)
@given(count=st.integers(1, 60), inner=st.integers(1, 300), outer=st.integers(1, 80))
def test_a_row_s_bits_are_its_own(count: int, inner: int, outer: int) -> None:
    way, rows, weight = FewRows(), drawn(count, inner), drawn(outer, inner, seed=1)
    packed = way.pack(weight)
    alone = torch.cat([way.product(row[None], packed, None, outer) for row in rows])
    assert torch.equal(way.product(rows, packed, None, outer), alone)


@few
def test_threads_change_no_bit() -> None:
    way, rows, weight, threads = FewRows(), drawn(9, 64), drawn(100, 64, seed=1), torch.get_num_threads()
    packed, found = way.pack(weight), list[Tensor]()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(way.product(rows, packed, None, 100))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@few
def test_many_rows_go_in_pieces() -> None:
    """More numbers than a processor holds at hand: 131,072."""
    way, rows, weight = FewRows(), drawn(700, 1000), drawn(33, 1000, seed=1)
    torch.testing.assert_close(
        way.product(rows, way.pack(weight), None, 33), linear(rows, weight), atol=1e-3, rtol=1e-4
    )


@few
def test_numbers_that_are_none_stay_where_they_are() -> None:
    way, rows, weight = FewRows(), drawn(5, 7), drawn(40, 7, seed=1)
    rows[1, 2], weight[3, 4] = float("nan"), float("inf")
    found = way.product(rows, way.pack(weight), None, 40)
    assert torch.equal(found.isnan(), linear(rows, weight).isnan()) and torch.equal(
        found.isinf(), linear(rows, weight).isinf()
    )


def test_dtypes() -> None:
    assert not FewRows().fits(torch.ones(1, dtype=HALF))
    for dtype in (torch.float16, torch.float64, torch.int8):
        assert not any(way.fits(torch.ones(1, dtype=dtype)) for way in products.WAYS)


def test_without_a_compiler_there_is_no_such_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_few_rows", lambda: None)
    assert not FewRows().fits(torch.ones(1))


@pytest.fixture(scope="module", params=PROCESSORS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The source as compiled for a kind of processor."""
    compiler, made = native.find_compiler(), tmp_path_factory.mktemp("made") / "made.so"
    source = Path(native.__file__).with_name("few_rows.cpp")
    if compiler is None or not native.build(source, compiler, made, [request.param]):
        pytest.skip("no compiler for that here")
    held = ctypes.CDLL(str(made))
    held.product.argtypes, held.product.restype = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int], None
    return held


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 24, 50])
def test_every_width_of_vectors(compiled: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled.columns() > FewRows().pack(torch.ones(1, 1)).shape[-1]:
        pytest.skip("this processor has no such vectors")
    monkeypatch.setattr(products, "_few_rows", lambda: compiled)
    way, given, weight, bias = FewRows(), drawn(rows, 37), drawn(45, 37, seed=1), drawn(45, seed=2)
    torch.testing.assert_close(
        way.product(given, way.pack(weight), bias, 45), linear(given, weight, bias), atol=1e-5, rtol=1e-5
    )
