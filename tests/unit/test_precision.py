"""Heads kept more precisely than they compute: small updates last, and what is trained is what decodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa.checkpoint import load_heads, save_heads
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train.config import HeadsTraining
from medusa.train.loop import HeadsObjective
from medusa.train.loss import multi_head_loss
from medusa.train.stages import train

from .test_train_resume import MAKERS, quiet, small

HALF = [torch.bfloat16, torch.float16]
CONFIGS = [
    HeadsConfig("medusa", num=2),
    HeadsConfig("root", num=2, projection="shared", vocab=20),
    HeadsConfig("medusa", num=2, projection="shared", vocab=20, markov=4),
    HeadsConfig("hydra", num=2, layers=2, projection="low_rank", vocab=20, rank=4),
]


def made(config: HeadsConfig, dtype: torch.dtype, kept: torch.dtype | None, noise: float = 0.1) -> MedusaHeads:
    """Heads that have learnt something, on a trunk in ``dtype``."""
    draft_ids = None if config.vocab is None else torch.arange(config.vocab) * 3
    heads = MedusaHeads(config, tiny_trunk("llama", dtype=dtype), draft_ids, dtype=kept)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


def logits(heads: MedusaHeads) -> torch.Tensor:
    ids = torch.randint(60, (1, 9), generator=torch.Generator().manual_seed(2))
    hidden, embedded = heads.trunk.forward(ids).hidden, heads.embed(ids)[:, None].expand(-1, 9, -1, -1)
    features = [heads.features(head, hidden, heads.context(head, embedded)) for head in range(heads.config.num)]
    return torch.stack([heads.behind(head, heads.logits(head, each), ids) for head, each in enumerate(features)])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_heads_compute_in_the_trunks_precision_whatever_they_are_kept_in(
    config: HeadsConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    heads = made(config, dtype, torch.float32)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
    found = logits(heads)
    assert found.dtype == dtype
    save_heads(tmp_path, heads, "hub/id")
    assert {value.dtype for value in load_file(tmp_path / "heads.safetensors").values()} <= {dtype, torch.int64}
    loaded = load_heads(tmp_path, heads.trunk)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert logits(loaded).equal(found)
    assert logits(heads.to(dtype)).equal(found)


def test_heads_may_be_saved_and_loaded_as_they_are_kept(tmp_path: Path) -> None:
    heads = made(CONFIGS[0], torch.bfloat16, torch.float32)
    save_heads(tmp_path, heads, "hub/id", dtype=torch.float32)
    loaded = load_heads(tmp_path, heads.trunk, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), heads.parameters(), strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_new_heads_are_the_trunks_own_projection_in_either(config: HeadsConfig) -> None:
    kept = [made(config, torch.bfloat16, dtype, noise=0) for dtype in (torch.bfloat16, torch.float32)]
    if config.rank is None:
        assert logits(kept[0]).equal(logits(kept[1]))
    torch.testing.assert_close(logits(kept[0]), logits(kept[1]), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_gradients_of_both_are_those_of_full_precision(config: HeadsConfig) -> None:
    ids = torch.arange(0, 60, 3)[torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(3))]
    found = []
    for dtype, kept in ((torch.float64, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        heads = made(config, dtype, kept)
        hidden = torch.randn(2, 12, heads.trunk.hidden_size, generator=torch.Generator().manual_seed(4))
        multi_head_loss(heads, hidden.to(dtype), ids, ids, None, torch.ones(2), chunk=5).total().backward()
        found.append([parameter.grad for parameter in heads.parameters()])
    for exact, kept_grad, half in zip(*found, strict=True):
        assert (exact.dtype, kept_grad.dtype, half.dtype) == (torch.float64, torch.float32, torch.bfloat16)
        for grad in (kept_grad, half):
            assert (grad.double() - exact).norm() < 0.03 * exact.norm() + 1e-6


@pytest.mark.parametrize(
    ("trunk", "asked", "kept"),
    [
        ("bfloat16", "auto", "float32"),
        ("float16", "auto", "float32"),
        ("float32", "auto", "float32"),
        ("float64", "auto", "float64"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float64", "float32", "float32"),
    ],
)
def test_what_heads_are_kept_in(trunk: str, asked: Any, kept: str) -> None:
    assert HeadsTraining(dtype=asked).kept_in(getattr(torch, trunk)) == getattr(torch, kept)


def test_small_updates_last() -> None:
    """In steps far below the spacing of half precision: kept in float32 they add up, kept in bfloat16 they are lost."""
    losses = {}
    for kept in (torch.bfloat16, torch.float32):
        heads = made(HeadsConfig("medusa", num=1), torch.bfloat16, kept)
        objective = HeadsObjective(heads, HeadsTraining())
        ids = torch.randint(65, (2, 16), generator=torch.Generator().manual_seed(5))
        optimizer = torch.optim.SGD(heads.parameters(), lr=1e-3)
        course = []
        for _ in range(60):
            loss = objective(ids, torch.zeros_like(ids)).total()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            course.append(loss.item())
        losses[kept] = course[0] - course[-1]
    assert losses[torch.float32] > 2 * max(losses[torch.bfloat16], 0) and losses[torch.float32] > 1e-3, losses


def test_a_run_on_a_trunk_in_half_precision(tmp_path: Path) -> None:
    config = small(tmp_path, MAKERS[0], steps=3)
    config = replace(config, trunk=replace(config.trunk, dtype="bfloat16"))
    train(config, report=quiet)
    weights = load_file(tmp_path / "run" / "heads.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
