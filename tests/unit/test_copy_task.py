"""Shifts, by learning: a text in which each head's target is known exactly, and a wrong shift is mere chance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train.loss import multi_head_loss, weights

NUM = 3
SYMBOLS = 8
LENGTH = 15
PERIOD = 5  # head k at t predicts t+2+k = t+2+k-PERIOD, one of the last PERIOD tokens: another one for each head


def text(rows: int, seed: int) -> Tensor:
    """Random words of PERIOD different symbols, each repeated along its row: [rows, LENGTH]."""
    noise = torch.rand(rows, SYMBOLS, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(1)[:, :PERIOD].repeat(1, LENGTH // PERIOD)


def states(ids_BT: Tensor) -> Tensor:
    """The last PERIOD tokens, one-hot beside each other, the newest first: [B, T, PERIOD * SYMBOLS]."""
    past = [torch.nn.functional.one_hot(ids_BT.roll(back, 1), SYMBOLS) for back in range(PERIOD)]
    return torch.cat(past, -1).double()


def train(kind: str, off: int = 0) -> MedusaHeads:
    """Heads trained on fresh words each step, with labels ``off`` places from where they belong."""
    trunk = tiny_trunk("llama", hidden_size=PERIOD * SYMBOLS, num_attention_heads=2)
    heads = MedusaHeads(HeadsConfig(kind, NUM), trunk)
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.05)
    for step in range(80):
        ids = text(16, seed=step + 1)
        optimizer.zero_grad()
        multi_head_loss(heads, states(ids), ids, ids.roll(off, 1), None, weights(NUM)).total().backward()
        optimizer.step()
    return heads


@torch.no_grad()
def predictions(heads: MedusaHeads, head: int, ids_BT: Tensor) -> Tensor:
    """The head's first choice at every t where all it reads exists: [B, T - reads], without the loss's own shifts."""
    reads = heads.config.reads(head)
    length = ids_BT.shape[1] - reads
    read = torch.stack([ids_BT[:, after : after + length] for after in range(1, reads + 1)], -1) if reads else None
    context = None if read is None else heads.embed(read).flatten(-2)
    features = heads.features(head, states(ids_BT)[:, :length], context)
    return heads.logits(head, features).argmax(-1)


def right(chosen_BT: Tensor, ids_BT: Tensor, ahead: int) -> float:
    """Share of t at which the choice is token t+ahead."""
    length = min(chosen_BT.shape[1], ids_BT.shape[1] - ahead)
    return (chosen_BT[:, :length] == ids_BT[:, ahead : ahead + length]).double().mean().item()


@pytest.mark.parametrize("kind", ["medusa", "root", "hydra"])
def test_each_head_learns_its_own_token(kind: str) -> None:
    held = text(32, seed=0)
    heads = train(kind)
    measured = multi_head_loss(heads, states(held), held, held, None, weights(NUM))
    assert measured.top1_K.tolist() == measured.counts_K.tolist() == [32 * (LENGTH - 2 - head) for head in range(NUM)]
    for head in range(NUM):
        chosen = predictions(heads, head, held)
        assert right(chosen, held, head + 2) == 1
        assert right(chosen, held, head + 1) == right(chosen, held, head + 3) == 0  # the letters of a word differ


@pytest.mark.parametrize("off", [-1, 1])
def test_a_shifted_head_does_not(off: int) -> None:
    held = text(32, seed=0)
    heads = train("medusa", off)
    measured = multi_head_loss(heads, states(held), held, held, None, weights(NUM))
    assert (measured.top1_K / measured.counts_K).max() < 0.05


def test_exchanged_heads_do_not() -> None:
    held = text(32, seed=0)
    heads = train("medusa")
    heads.heads[0], heads.heads[1] = heads.heads[1], heads.heads[0]
    measured = multi_head_loss(heads, states(held), held, held, None, weights(NUM))
    assert (measured.top1_K / measured.counts_K)[:2].max() < 0.05
    assert measured.top1_K[2] == measured.counts_K[2]
