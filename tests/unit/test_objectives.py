"""What guesses are scored by: closed gradients against numerical ones, and what each loss means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.train.objectives import hard, overlap, soft

C, V = 4, 6


def random_laws(seed: int, mass: float = 1.0, rows: int = C) -> Tensor:
    logits = 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.softmax(-1) * mass


class Closed(torch.autograd.Function):
    """A loss with its own gradient, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Any) -> Tensor:
        value, gradient = loss(logits.log_softmax(-1))
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        return scale * ctx.saved_tensors[0], None


COLUMNS = torch.tensor([[0], [5], [2], [2]])


# p may have mass on tokens that the head does not draft: 0.6 of it is left
@pytest.mark.parametrize("mass", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["hard", "soft", "overlap"])
def test_gradients_are_those_of_the_value(name: str, seed: int, mass: float) -> None:
    p_CV = random_laws(seed + 50, mass)
    losses: dict[str, Any] = {
        "hard": lambda law: hard(law, COLUMNS),
        "soft": lambda law: soft(law, p_CV),
        "overlap": lambda law: overlap(law, p_CV.clone()),
    }
    logits = torch.randn(C, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Closed.apply(x, losses[name]), (logits,), eps=1e-7, atol=1e-7)


def test_each_value_by_its_definition() -> None:
    q_CV, p_CV = random_laws(1), random_laws(2, 0.7)
    assert hard(q_CV.log(), COLUMNS)[0] == pytest.approx(-sum(q_CV[row, COLUMNS[row]].log().item() for row in range(C)))
    assert soft(q_CV.log(), p_CV)[0] == pytest.approx(-float((p_CV * q_CV.log()).sum()))
    shared = [
        sum(min(p, q) for p, q in zip(*laws, strict=True)) for laws in zip(p_CV.tolist(), q_CV.tolist(), strict=True)
    ]
    assert overlap(q_CV.log(), p_CV.clone())[0] == pytest.approx(-sum(torch.tensor(a).log().item() for a in shared))


def test_of_one_hot_laws_all_three_are_one() -> None:
    q_CV = random_laws(1)
    one_hot_CV = torch.zeros_like(q_CV).scatter_(1, COLUMNS, 1.0)
    value, gradient_CV = hard(q_CV.log(), COLUMNS)
    for other, other_CV in (soft(q_CV.log(), one_hot_CV), overlap(q_CV.log(), one_hot_CV.clone())):
        torch.testing.assert_close(other, value)
        torch.testing.assert_close(other_CV, gradient_CV)


def test_the_soft_loss_is_the_mean_of_the_hard_one() -> None:
    # over the draft vocabulary too: a label outside it adds nothing, and mass outside it neither
    q_CV, p_CV = random_laws(1), random_laws(2, 0.7)
    value, gradient_CV = soft(q_CV.log(), p_CV)
    parts = [[hard(q_CV[[row]].log(), torch.tensor([[column]])) for column in range(V)] for row in range(C)]
    mean = sum(p_CV[row, column] * parts[row][column][0] for row in range(C) for column in range(V))
    torch.testing.assert_close(value, mean)
    rows = [sum(p_CV[row, column] * parts[row][column][1][0] for column in range(V)) for row in range(C)]
    torch.testing.assert_close(gradient_CV, torch.stack(rows))  # type: ignore[arg-type]


def test_a_head_that_has_the_teachers_law_is_at_the_least() -> None:
    # the overlap has a kink there, as the absolute value at 0: its gradient is that of either side
    p_CV = random_laws(3)
    assert soft(p_CV.log(), p_CV)[1].abs().max() < 1e-12
    assert overlap(p_CV.log(), p_CV.clone())[0].abs() < 1e-12
    for seed in range(5):
        q_CV = random_laws(seed + 20)
        assert soft(q_CV.log(), p_CV)[0] > soft(p_CV.log(), p_CV)[0] and overlap(q_CV.log(), p_CV.clone())[0] > 0.01


def test_laws_that_hardly_meet_give_finite_gradients() -> None:
    law_CV = torch.tensor([[0.0, -200.0, -200.0], [0.0, -40.0, -200.0]]).log_softmax(-1)
    p_CV = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    value, gradient_CV = overlap(law_CV.clone(), p_CV)
    assert value.isfinite() and gradient_CV.isfinite().all() and gradient_CV.abs().max() <= 2
    assert gradient_CV[1].tolist() == pytest.approx([1.0, -1.0, 0.0])
