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
from medusa.train.loss import HeadLoss, default_chunk, multi_head_loss, weights
from medusa.train.pairs import count_pairs, pair_mask
from medusa.trunk import Trunk

NUM = 3
SETTINGS = ["plain", "masked", "packed", "both"]


def make_heads(
    kind: str,
    projection: str = "own",
    trunk: Trunk | None = None,
    layers: int = 1,
    vocab: int | None = None,
    markov: int | None = None,
) -> MedusaHeads:
    trunk, rank = trunk or tiny_trunk("llama"), 7 if projection == "low_rank" else None
    config = HeadsConfig(kind, NUM, layers, projection, vocab, rank, markov)
    if vocab is None:
        return random_heads(trunk, config, scale=0.2)
    generator = torch.Generator().manual_seed(5)
    heads = MedusaHeads(config, trunk, torch.randperm(trunk.vocab_size, generator=generator)[:vocab].sort().values)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return heads


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


def naive(
    heads: MedusaHeads, batch: Batch, teacher: Tensor | None = None, acceptance: bool = False
) -> tuple[list[Tensor], list[list[int]]]:
    """Loss sums, and [count, top-1, top-5, outside] per head, pair by pair from the definition."""
    sums, numbers = [], []
    rows, length = batch.ids.shape
    known = list(range(heads.trunk.vocab_size)) if heads.draft_ids is None else heads.draft_ids.tolist()
    for head in range(NUM):
        losses, ranks = [], []
        for row in range(rows):
            for t in range(length - 2 - head):
                target = int(batch.labels[row, t + 2 + head])
                across = batch.segments is not None and len(batch.segments[row, t : t + 3 + head].unique()) > 1
                if target == -100 or across:
                    continue
                read = batch.ids[row, t + 1 : t + 1 + heads.config.reads(head)]
                context = heads.embed(read).flatten() if len(read) else None
                logits = heads.logits(head, heads.features(head, batch.hidden[row, t], context))
                if (markov := heads.head(head).markov) is not None:
                    logits = logits + markov.after.weight @ markov.before.weight[batch.ids[row, t + 1 + head]]
                law = logits.log_softmax(-1)
                ranks.append(int((law > law[known.index(target)]).sum()) if target in known else 1000)
                if teacher is not None:
                    p = teacher[row, t + 1 + head].softmax(-1)[known]
                    losses.append(-torch.minimum(p, law.exp()).sum().log() if acceptance else -(p * law).sum())
                elif target in known:
                    losses.append(-law[known.index(target)])
        sums.append(torch.stack(losses).sum() if losses else batch.hidden.new_zeros(()))
        hits = [sum(rank < best for rank in ranks) for best in (1, 5)]
        numbers.append([len(ranks), *hits, sum(rank == 1000 for rank in ranks)])
    return sums, numbers


def close(left: Tensor, right: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def assert_equal(
    heads: MedusaHeads,
    batch: Batch,
    teacher: Tensor | None = None,
    chunk: int | None = 5,
    acceptance: bool = False,
    states: Tensor | None = None,
) -> None:
    """Same sums, numbers, total, and gradients of every parameter and of the states."""
    batch.hidden.requires_grad_()
    learners = [batch.hidden, *heads.parameters()]
    sums, numbers = naive(heads, batch, teacher, acceptance)
    taught = {"teacher": teacher} if states is None else {"teacher_states": states}
    loss = batch.loss(heads, chunk, **taught, acceptance=acceptance)
    close(loss.loss_sums_K, torch.stack(sums))
    assert torch.stack([loss.counts_K, loss.top1_K, loss.top5_K, loss.outside_K], 1).tolist() == numbers
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


def random_teacher(batch: Batch) -> Tensor:
    return torch.randn(*batch.ids.shape, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("acceptance", [False, True])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_teacher_equals_naive(kind: str, projection: str, acceptance: bool) -> None:
    heads = make_heads(kind, projection, layers=2)
    batch = make_batch(heads)
    assert_equal(heads, batch, random_teacher(batch), acceptance=acceptance)


@pytest.mark.parametrize("objective", ["labels", "soft", "acceptance"])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_vocabulary_equals_naive(kind: str, projection: str, objective: str) -> None:
    heads = make_heads(kind, projection, vocab=24)
    batch = make_batch(heads)
    teacher = None if objective == "labels" else random_teacher(batch)
    assert_equal(heads, batch, teacher, acceptance=objective == "acceptance")
    loss = batch.loss(heads)
    assert (loss.outside_K > 0).all() and (loss.outside_K < loss.counts_K).all()


@pytest.mark.parametrize("objective", ["labels", "soft", "acceptance"])
@pytest.mark.parametrize("vocab", [None, 24])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", ["medusa", "root"])
def test_a_markov_bias_equals_naive(kind: str, projection: str, vocab: int | None, objective: str) -> None:
    heads = make_heads(kind, projection, vocab=vocab, markov=4)
    batch = make_batch(heads)
    teacher = None if objective == "labels" else random_teacher(batch)
    assert_equal(heads, batch, teacher, acceptance=objective == "acceptance")


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2", "phi"])
def test_a_markov_bias_is_added_behind_the_trunks_scale_and_softcap(family: str) -> None:
    heads = make_heads("root", "low_rank", tiny_trunk(family), vocab=24, markov=4)
    assert_equal(heads, make_batch(heads))


def test_gradients_of_a_markov_bias_are_finite_differences() -> None:
    heads, step = make_heads("medusa", "shared", vocab=24, markov=3), 1e-6
    batch = make_batch(heads)
    heads.zero_grad()
    batch.loss(heads, 5).total().backward()
    generator = torch.Generator().manual_seed(0)
    for head in range(NUM):
        markov = heads.head(head).markov
        assert markov is not None
        for weight in (markov.before.weight, markov.after.weight):
            assert weight.grad is not None and weight.grad.any()
            towards = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    weight += sign * step * towards
                    ends.append(batch.loss(heads, 5).total())
                    weight -= sign * step * towards
            close((ends[0] - ends[1]) / (2 * step), (weight.grad * towards).sum(), 1e-6)


@pytest.mark.parametrize("vocab", [None, 24])
@pytest.mark.parametrize("acceptance", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi", "gemma2"])  # a plain projection, one with a bias, a softcap
def test_a_teacher_may_be_given_by_its_states(family: str, acceptance: bool, vocab: int | None) -> None:
    trunk = tiny_trunk(family)
    heads = make_heads("root", "shared", trunk, vocab=vocab)
    batch = make_batch(heads)
    states = torch.randn(batch.hidden.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert_equal(heads, batch, trunk.project(states).detach(), acceptance=acceptance, states=states.requires_grad_())
    assert states.grad is None


def test_what_is_outside_the_draft_vocabulary_adds_nothing_to_hard_labels() -> None:
    # nor does it thin out the divisor: the pairs inside weigh what they weigh without a draft vocabulary
    heads = make_heads("medusa", vocab=24)
    batch = make_batch(heads, "plain")
    whole = batch.loss(heads)
    assert torch.equal(whole.counts_K, count_pairs(batch.labels, None, NUM))
    batch.labels[heads.columns(batch.labels) < 0] = -100
    inside = batch.loss(heads)
    close(inside.loss_sums_K, whole.loss_sums_K)
    assert torch.equal(inside.counts_K, whole.counts_K - whole.outside_K) and not inside.outside_K.any()
    assert torch.equal(inside.top5_K, whole.top5_K)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("acceptance", [False, True])
def test_chunk_size_is_of_no_account_to_a_teacher(chunk: int, acceptance: bool) -> None:
    heads = make_heads("hydra", "low_rank", vocab=24)
    batch = make_batch(heads, "packed")
    assert_equal(heads, batch, random_teacher(batch), chunk, acceptance)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2", "phi"])
def test_scale_softcap_and_bias_of_the_trunk(family: str, projection: str) -> None:
    heads = make_heads("root", projection, tiny_trunk(family), vocab=24)
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


@pytest.mark.parametrize("objective", ["labels", "soft", "acceptance"])
@pytest.mark.parametrize("length", [1, 2, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_no_supervised_token(kind: str, length: int, objective: str) -> None:
    heads = make_heads(kind, "low_rank", vocab=24)
    batch = make_batch(heads, "plain", length=length)
    batch.labels[:, 2:] = -100  # no head predicts the first two
    batch.hidden.requires_grad_()
    teacher = None if objective == "labels" else random_teacher(batch)
    loss = batch.loss(heads, teacher=teacher, acceptance=objective == "acceptance")
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


@pytest.mark.parametrize("objective", ["labels", "soft", "acceptance"])
@pytest.mark.parametrize("markov", [None, 8])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_larger_than_a_chunk_of_logits(projection: str, markov: int | None, objective: str) -> None:
    vocab, chunk = 2000, 40  # more rows than the 32 of a state: the projection's gradient is smaller then
    heads = make_heads(
        "hydra" if markov is None else "root", projection, tiny_trunk("llama", vocab_size=vocab), markov=markov
    )
    batch = make_batch(heads, rows=4, length=64)
    teacher = None if objective == "labels" else torch.randn(4, 64, vocab, dtype=torch.float64)
    pairs = int(count_pairs(batch.labels, batch.segments, NUM).max())
    assert pairs > 2 * chunk
    for size, largest in ((chunk, chunk * vocab), (1000, pairs * vocab)):
        with Sizes(teacher) as sizes:
            batch.loss(heads, size, teacher=teacher, acceptance=objective == "acceptance").total().backward()
        assert sizes.largest == largest


@pytest.mark.parametrize("vocab", [None, 500])
def test_a_teacher_of_states_makes_no_logits_larger_than_a_chunk(vocab: int | None) -> None:
    everything, chunk = 2000, 140
    heads = make_heads("root", "shared", tiny_trunk("llama", vocab_size=everything), vocab=vocab)
    batch = make_batch(heads, "plain", rows=8, length=64)
    assert count_pairs(batch.labels, batch.segments, NUM).min() > 2 * chunk
    with Sizes(None) as sizes:
        batch.loss(heads, chunk, teacher_states=batch.hidden).total().backward()
    assert sizes.largest == chunk * (vocab or everything)


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
    with pytest.raises(UserError, match="acceptance=True and no teacher"):
        batch.loss(heads, acceptance=True)
    with pytest.raises(UserError, match="2 head weights for 3 heads"):
        multi_head_loss(heads, batch.hidden, batch.ids, batch.labels, None, weights(2))
