"""The optimizer that joins Muon and AdamW, and the schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train.config import Training
from medusa.train.optim import BETAS, Joined, make_optimizer, matrices, rate

TRAINING = Training(steps=100, lr=1e-2, muon_lr=5e-2, weight_decay=0.1, warmup=10, floor=0.1)


class Net(nn.Module):
    """An embedding, a matrix with a bias, and a projection to the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)

    def vocabulary(self) -> list[torch.Tensor]:
        return [self.embed.weight, self.output.weight]

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.output(torch.tanh(self.inner(self.embed(ids[:-1]))))
        return nn.functional.cross_entropy(logits, ids[1:])


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def steps(model: Net, optimizers: list[torch.optim.Optimizer], count: int, start: int = 0) -> list[float]:
    losses = []
    for index in range(start, start + count):
        ids = torch.randint(7, (12,), generator=torch.Generator().manual_seed(index))
        loss = model.loss(ids)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_vocabulary_and_vectors_are_not_matrices_inside() -> None:
    model = net()
    inside, rest = matrices(model, model.vocabulary())
    assert [id(weight) for weight in inside] == [id(model.inner.weight)]
    assert {id(weight) for weight in rest} == {
        id(w) for w in (model.embed.weight, model.inner.bias, model.output.weight)
    }


def test_of_heads_the_blocks_are_inside_and_the_projections_are_not() -> None:
    heads = MedusaHeads(HeadsConfig("hydra", num=2), tiny_trunk("llama"))
    projections = [head.projection.weight for head in heads.heads]
    inside, rest = matrices(heads, projections)
    assert len(inside) == 2 and {id(weight) for weight in projections} < {id(weight) for weight in rest}


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model.inner.requires_grad_(False)
    inside, rest = matrices(model, model.vocabulary())
    assert not inside and len(rest) == 2


def test_joined_does_what_its_parts_do_alone() -> None:
    model, twin = net(), net()
    joined = make_optimizer(model, model.vocabulary(), TRAINING)
    assert isinstance(joined, Joined)
    rest = [twin.embed.weight, twin.inner.bias, twin.output.weight]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.Muon([twin.inner.weight], lr=5e-2, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=BETAS, weight_decay=0.0),
    ]
    assert steps(model, [joined], 5) == steps(twin, parts, 5)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_loaded_state_goes_on_exactly(kind: str) -> None:
    training = Training(steps=100, optimizer=kind, lr=1e-2)  # type: ignore[arg-type]
    model = net()
    optimizer = make_optimizer(model, model.vocabulary(), training)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, training))
    steps(model, [optimizer], 3)
    schedule.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = steps(model, [optimizer], 4, start=3)

    other = net(seed=1)
    resumed = make_optimizer(other, other.vocabulary(), training)
    steps(other, [resumed], 2)  # a state of its own, to be replaced
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert steps(other, [resumed], 4, start=3) == expected


def test_a_schedule_reaches_both_parts() -> None:
    model = net()
    optimizer = make_optimizer(model, model.vocabulary(), TRAINING)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(model.state_dict())
    steps(model, [optimizer], 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_matrices_inside_decay() -> None:
    model = net()
    adamw = make_optimizer(model, model.vocabulary(), Training(optimizer="adamw", weight_decay=0.3))
    decays = {id(weight): group["weight_decay"] for group in adamw.param_groups for weight in group["params"]}
    assert decays.pop(id(model.inner.weight)) == 0.3 and set(decays.values()) == {0.0}


def test_rate_rises_then_falls_to_the_floor() -> None:
    rates = [rate(step, TRAINING) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, rel=1e-2) and rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
    assert rate(55, Training(steps=110, schedule="linear", warmup=0, floor=0.0)) == pytest.approx(0.5)
    assert rate(99, Training(steps=100, schedule="constant", warmup=0)) == 1.0
