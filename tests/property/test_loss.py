"""Seams: for any packing and any mask, packed documents teach exactly what they teach one by one."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import random_heads, tiny_trunk
from medusa.train.loss import multi_head_loss, weights
from medusa.train.pairs import count_pairs, pair_mask

NUM = 3


@cache
def heads_once() -> MedusaHeads:
    return random_heads(tiny_trunk("llama"), HeadsConfig("hydra", NUM), scale=0.2)


@st.composite
def packed_rows(draw: st.DrawFn, rows: int) -> tuple[Tensor, Tensor]:
    """Labels with holes and segments of random lengths, [rows, T] each."""
    length = draw(st.integers(1, 14))
    flags = st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)
    starts = torch.tensor(draw(flags)).view(rows, length)
    hidden = torch.tensor(draw(flags)).view(rows, length)
    labels = torch.randint(65, (rows, length), generator=torch.Generator().manual_seed(length))
    return labels.masked_fill(hidden, -100), starts.cumsum(1)


@given(packed_rows(rows=2), st.integers(0, 4))
def test_no_pair_spans_a_seam(packed: tuple[Tensor, Tensor], head: int) -> None:
    labels, segments = packed
    rows, length = labels.shape
    mask = pair_mask(labels, segments, head)
    for row in range(rows):
        for t in range(length):
            target = t + 2 + head
            counts = target < length and labels[row, target] != -100
            counts = counts and len(set(segments[row, t : target + 1].tolist())) == 1
            assert mask[row, t].item() == counts


@settings(deadline=None, max_examples=50)
@given(packed_rows(rows=1), st.integers(1, 20))
def test_packed_documents_equal_documents_alone(packed: tuple[Tensor, Tensor], chunk: int) -> None:
    labels, segments = packed
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(65, labels.shape, generator=generator)
    hidden = torch.randn(*labels.shape, 32, generator=generator, dtype=torch.float64)
    heads = heads_once()
    counts = count_pairs(labels, segments, NUM)
    sides = []
    whole = multi_head_loss(heads, hidden, ids, labels, segments, weights(NUM), chunk).total()
    sides.append([whole, *torch.autograd.grad(whole, list(heads.parameters()))])
    alone = torch.zeros((), dtype=torch.float64)
    for segment in segments.unique():
        at = (segments[0] == segment).nonzero()[:, 0]
        part = multi_head_loss(heads, hidden[:, at], ids[:, at], labels[:, at], None, weights(NUM), chunk)
        alone = alone + part.total(counts_K=counts)
    sides.append([alone, *torch.autograd.grad(alone, list(heads.parameters()))])
    for left, right in zip(*sides, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
