"""Twenty steps of head training, to six digits: whatever changes the curve must be meant.

`python -m tests.golden.test_loss_curve` writes the curve anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train.loss import multi_head_loss, weights

GOLDEN = Path(__file__).with_name("loss_curve.json")


def curve() -> list[float]:
    """Losses of 20 steps of SGD on one batch with masks and seams, in fp64."""
    trunk = tiny_trunk("llama")
    heads = MedusaHeads(HeadsConfig("hydra", num=3), trunk)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(65, (4, 32), generator=generator)
    labels = ids.masked_fill(torch.rand(4, 32, generator=generator) < 0.3, -100)
    segments = (torch.rand(4, 32, generator=generator) < 0.1).cumsum(1)
    hidden = trunk.forward(ids).hidden
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = multi_head_loss(heads, hidden, ids, labels, segments, weights(3), chunk=16).total()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_curve_is_the_golden_one() -> None:
    assert curve() == pytest.approx(json.loads(GOLDEN.read_text(encoding="utf-8")), abs=1e-6)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps([round(loss, 9) for loss in curve()], indent=1) + "\n", encoding="utf-8")
