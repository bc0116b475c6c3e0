"""The chunked loss against a naive one that loops over pairs and holds all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa.errors import UserError
from medusa.heads import KINDS, PROJECTIONS, HeadsConfig, MedusaHeads
from medusa.testing import random_heads, tiny_trunk
from medusa.train.loss import HeadLoss, count_pairs, default_chunk, multi_head_loss, pair_mask, weights
from medusa.trunk import Trunk

NUM = 3
SETTINGS = ["plain", "masked", "packed", "both"]


def make_heads(kind: str, projection: str = "own", trunk: Trunk | None = None, layers: int = 1) -> MedusaHeads:
    return random_heads(trunk or tiny_trunk("llama"), HeadsConfig(kind, NUM, layers, projection), scale=0.2)


@dataclass
class Batch:
    hidden: Tensor
    ids: Tensor
    labels: Tensor
    segments: Tensor | None

    def loss(self, heads: MedusaHeads, chunk: int | None = None, **options: Any) -> HeadLoss:
        return multi_head_loss(heads, self.hidden, self.ids, self.labels, self.segments, weights(NUM), chunk, **options)

    def rows(self, chosen: slice, until: int) -> Batch:
        segments = None if self.segments is None else self.segments[chosen, :until]
        cut = (chosen, slice(until))
        return Batch(self.hidden[cut], self.ids[cut], self.labels[cut], segments)


def make_batch(heads: MedusaHeads, setting: str = "both", rows: int = 3, length: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(65, (rows, length), generator=generator)
    hidden = torch.randn(rows, length, heads.trunk.hidden_size, generator=generator, dtype=torch.float64)
    labels, segments = ids.clone(), None
    if setting in ("masked", "both"):
        labels[torch.rand(rows, length, generator=generator) < 0.4] = -100
    if setting in ("packed", "both"):
        segments = (torch.rand(rows, length, generator=generator) < 0.25).cumsum(1)
    return Batch(hidden.to(heads.trunk.dtype), ids, labels, segments)


def naive(heads: MedusaHeads, batch: Batch, teacher: Tensor | None = None) -> tuple[list[Tensor], list[list[int]]]:
    """Loss sums, and [count, top-1, top-5] per head, pair by pair from the definition."""
    sums, numbers = [], []
    rows, length = batch.ids.shape
    for head in range(NUM):
        losses, ranks = [], []
        for row in range(rows):
            for t in range(length - 2 - head):
                target = batch.labels[row, t + 2 + head]
                across = batch.segments is not None and len(batch.segments[row, t : t + 3 + head].unique()) > 1
                if target == -100 or across:
                    continue
                read = batch.ids[row, t + 1 : t + 1 + heads.config.reads(head)]
                context = heads.embed(read).flatten() if len(read) else None
                logits = heads.logits(head, heads.features(head, batch.hidden[row, t], context))
                law = logits.log_softmax(-1)
                if teacher is None:
                    losses.append(-law[target])
                else:
                    losses.append(-(teacher[row, t + 1 + head].softmax(-1) * law).sum())
                ranks.append(int((law > law[target]).sum()))
        sums.append(torch.stack(losses).sum() if losses else batch.hidden.new_zeros(()))
        numbers.append([len(ranks), sum(rank < 1 for rank in ranks), sum(rank < 5 for rank in ranks)])
    return sums, numbers


def close(left: Tensor, right: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def assert_equal(heads: MedusaHeads, batch: Batch, teacher: Tensor | None = None, chunk: int | None = 5) -> None:
    """Same sums, numbers, total, and gradients of every parameter and of the states."""
    batch.hidden.requires_grad_()
    learners = [batch.hidden, *heads.parameters()]
    sums, numbers = naive(heads, batch, teacher)
    loss = batch.loss(heads, chunk, teacher=teacher)
    close(loss.loss_sums_K, torch.stack(sums))
    assert torch.stack([loss.counts_K, loss.top1_K, loss.top5_K], 1).tolist() == numbers
    expected = sum(0.8**k * sums[k] / max(1, numbers[k][0]) for k in range(NUM))
    assert isinstance(expected, Tensor)
    close(loss.total(), expected)
    pairs = zip(
        torch.autograd.grad(loss.total(), learners),
        torch.autograd.grad(expected, learners),
        strict=True,
    )
    for mine, theirs in pairs:
        assert theirs.abs().max() > 0
        close(mine, theirs)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_naive(kind: str, projection: str, setting: str) -> None:
    heads = make_heads(kind, projection)
    assert_equal(heads, make_batch(heads, setting))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_teacher_equals_naive(kind: str, projection: str) -> None:
    heads = make_heads(kind, projection, layers=2)
    batch = make_batch(heads)
    teacher = torch.randn(*batch.ids.shape, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert_equal(heads, batch, teacher)


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2", "phi"])
def test_scale_softcap_and_bias_of_the_trunk(family: str) -> None:
    heads = make_heads("root", "own", tiny_trunk(family))
    assert_equal(heads, make_batch(heads))


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_chunk_size_is_of_no_account(chunk: int) -> None:
    heads = make_heads("hydra")
    assert_equal(heads, make_batch(heads, "packed"), chunk=chunk)


def test_micro_batches_add_up_to_the_batch() -> None:
    # Uneven: one row each, of different lengths, with masks; the batch holds them padded.
    heads = make_heads("hydra")
    whole = make_batch(heads, rows=4)
    lengths = [12, 5, 9, 2]
    for row, length in enumerate(lengths):
        whole.labels[row, length:] = -100
    counts = count_pairs(whole.labels, whole.segments, NUM)
    expected = whole.loss(heads)
    assert counts.tolist() == expected.counts_K.tolist()
    parts = [whole.rows(slice(row, row + 1), length).loss(heads) for row, length in enumerate(lengths)]
    for name in ("loss_sums_K", "counts_K", "top1_K", "top5_K"):
        close(torch.stack([getattr(part, name) for part in parts]).sum(0), getattr(expected, name))
    expected.total().backward()
    gradients = [p.grad.clone() for p in heads.parameters() if p.grad is not None]
    heads.zero_grad()
    for part in parts:
        part.total(counts_K=counts).backward()
    for mine, theirs in zip([p.grad for p in heads.parameters()], gradients, strict=True):
        assert mine is not None
        close(mine, theirs)


@pytest.mark.parametrize("length", [1, 2, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_no_supervised_token(kind: str, length: int) -> None:
    heads = make_heads(kind)
    batch = make_batch(heads, "plain", length=length)
    batch.labels[:, 2:] = -100  # no head predicts the first two
    batch.hidden.requires_grad_()
    loss = batch.loss(heads)
    loss.total().backward()
    assert loss.total().item() == 0
    assert loss.counts_K.tolist() == loss.top1_K.tolist() == loss.top5_K.tolist() == [0] * NUM
    for tensor in [batch.hidden, *heads.parameters()]:
        assert tensor.grad is not None and not tensor.grad.any()  # zero, not absent: other ranks wait for it


def test_short_rows_leave_out_far_heads() -> None:
    heads = make_heads("hydra")
    loss = make_batch(heads, "plain", rows=2, length=4).loss(heads)
    assert loss.counts_K.tolist() == [4, 2, 0]
    assert torch.isfinite(loss.total())


def test_only_targets_are_masked() -> None:
    # A masked token is still read and still predicted from; here only the last token is supervised.
    heads = make_heads("hydra")
    batch = make_batch(heads, "plain", rows=1)
    batch.labels[:, :-1] = -100
    assert batch.loss(heads).counts_K.tolist() == [1, 1, 1]
    assert_equal(heads, batch)


def test_left_padding_as_a_segment() -> None:
    labels = torch.tensor([[-100, -100, 5, 6, 7, 8]])
    mask = pair_mask(labels, torch.tensor([[0, 0, 1, 1, 1, 1]]), head=0)
    assert mask.tolist() == [[False, False, True, True, False, False]]


def test_frozen_parts_get_no_gradient() -> None:
    heads = make_heads("medusa")
    batch = make_batch(heads)
    frozen = heads.heads[1].projection
    assert frozen is not None
    frozen.requires_grad_(False)
    batch.loss(heads, 5).total().backward()
    assert frozen.weight.grad is None and batch.hidden.grad is None
    assert all(p.grad is not None for p in heads.parameters() if p.requires_grad)
    assert all(p.grad is None for p in heads.trunk.model.parameters())


def test_measuring_makes_no_gradients() -> None:
    heads = make_heads("hydra")
    batch = make_batch(heads)
    expected = batch.loss(heads)
    with torch.no_grad():
        loss = batch.loss(heads, 5)
    assert not loss.loss_sums_K.requires_grad and not loss.top1_K.requires_grad
    close(loss.loss_sums_K, expected.loss_sums_K.detach())
    heads.requires_grad_(False)
    assert not batch.loss(heads).loss_sums_K.requires_grad


def test_backward_twice_gives_the_same() -> None:
    heads = make_heads("root")
    total = make_batch(heads).loss(heads, 5).total()
    first = torch.autograd.grad(total, list(heads.parameters()), retain_graph=True)
    second = torch.autograd.grad(total, list(heads.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_autocast_and_half_precision_lose_no_more_than_their_logits() -> None:
    exact = make_heads("hydra")
    batch = make_batch(exact, "masked", rows=8, length=64)
    batch.loss(exact).total().backward()
    single = make_heads("hydra", trunk=tiny_trunk("llama", dtype=torch.float32))
    half = make_heads("hydra", trunk=tiny_trunk("llama", dtype=torch.bfloat16))
    batch.hidden = batch.hidden.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = batch.loss(single, 2)
    batch.hidden = batch.hidden.bfloat16()
    # So many chunks that gradients summed in bf16 would be off by 0.016.
    for heads, loss in ((single, cast), (half, batch.loss(half, 2))):
        assert loss.loss_sums_K.dtype == torch.float32
        loss.total().backward()
        for mine, theirs in zip(heads.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None and mine.grad.dtype == mine.dtype
            assert (mine.grad - theirs.grad).norm() < 0.01 * theirs.grad.norm()


class Sizes(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation made, views of ``given`` aside."""

    def __init__(self, given: Tensor | None) -> None:
        super().__init__()
        self.given = None if given is None else given.untyped_storage().data_ptr()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() != self.given:
                self.largest = max(self.largest, value.numel())
        return result


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_larger_than_a_chunk_of_logits(projection: str, soft: bool) -> None:
    vocab, chunk = 2000, 40  # more rows than the 32 of a state: the projection's gradient is smaller then
    heads = make_heads("hydra", projection, tiny_trunk("llama", vocab_size=vocab))
    batch = make_batch(heads, rows=4, length=64)
    teacher = torch.randn(4, 64, vocab, dtype=torch.float64) if soft else None
    pairs = int(count_pairs(batch.labels, batch.segments, NUM).max())
    assert pairs > 2 * chunk
    for size, largest in ((chunk, chunk * vocab), (1000, pairs * vocab)):
        with Sizes(teacher) as sizes:
            batch.loss(heads, size, teacher=teacher).total().backward()
        assert sizes.largest == largest


def test_what_is_kept_for_the_backward_does_not_grow_with_the_text() -> None:
    heads = make_heads("hydra")
    for length in (12, 60):
        sums = make_batch(heads, length=length).loss(heads).loss_sums_K
        nodes = [node for node, _ in sums.grad_fn.next_functions]
        kept = sum(tensor.numel() for node in nodes for tensor in node.saved_tensors)
        assert kept == sum(p.numel() for p in heads.parameters())


def test_a_nan_is_a_miss_and_a_tie_too() -> None:
    heads = make_heads("medusa")
    batch = make_batch(heads, "plain")
    batch.hidden.fill_(float("nan"))
    assert batch.loss(heads).top5_K.tolist() == [0] * NUM
    with torch.no_grad():
        for head in heads.heads:
            head.projection.weight.zero_()
    batch.hidden.fill_(1.0)
    assert batch.loss(heads).top5_K.tolist() == [0] * NUM


def test_weights() -> None:
    assert weights(4).tolist() == pytest.approx([1, 0.8, 0.64, 0.512])
    heads = make_heads("medusa")
    loss = make_batch(heads).loss(heads)
    means = loss.loss_sums_K / loss.counts_K
    close(loss.total(torch.tensor([0.0, 1.0, 0.0])), means[1])


@pytest.mark.parametrize(("vocab", "chunk"), [(65, 4096), (4096, 4096), (32000, 512), (49152, 256), (10**7, 64)])
def test_default_chunk(vocab: int, chunk: int) -> None:
    assert default_chunk(vocab) == chunk


def test_bad_arguments() -> None:
    heads = make_heads("medusa")
    batch = make_batch(heads)
    with pytest.raises(UserError, match="chunk=0: give at least 1"):
        batch.loss(heads, 0)
    with pytest.raises(UserError, match="2 head weights for 3 heads"):
        multi_head_loss(heads, batch.hidden, batch.ids, batch.labels, None, weights(2))
