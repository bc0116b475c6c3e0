"""Peak memory of the loss, as torch's allocator counts it (benchmarks/loss_memory.py)."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path

import pytest
import torch

from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train.loss import multi_head_loss, weights


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    """The script benchmarks/loss_memory.py."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "loss_memory.py"
    spec = importlib.util.spec_from_file_location("loss_memory_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_peak_is_what_was_held_at_once(script: types.ModuleType) -> None:
    values = torch.ones(1000, 1000)

    def work() -> None:
        for _ in range(3):
            values.exp().sum()
        (values + 1).add_(values * 2)

    assert script.peak_allocated(work) == pytest.approx(8e6, rel=0.01)
    assert script.peak_allocated(lambda: values.logsumexp(-1)) == pytest.approx(4e6, rel=0.01)  # its scratch space


# The gradients, one of them twice, and a chunk's logits, law and own gradients: not more with more text.
@pytest.mark.parametrize(
    ("projection", "vocab", "taught"), [("own", None, False), ("shared", 1000, False), ("shared", 1000, True)]
)
def test_a_peak_does_not_grow_with_the_text(
    script: types.ModuleType, projection: str, vocab: int | None, taught: bool
) -> None:
    trunk = tiny_trunk("llama", vocab_size=4000)
    ids = None if vocab is None else torch.arange(vocab) * 3
    heads = MedusaHeads(HeadsConfig("root", 3, projection=projection, vocab=vocab), trunk, ids)
    peaks = []
    for length in (200, 800):
        ids_BT = heads.tokens(torch.randint(heads.choices, (2, length), generator=torch.Generator().manual_seed(0)))
        hidden_BTD = torch.randn(2, length, 32, dtype=torch.float64)
        states = hidden_BTD if taught else None

        def step(ids=ids_BT, hidden=hidden_BTD, states=states) -> None:  # type: ignore[no-untyped-def]
            multi_head_loss(
                heads, hidden, ids, ids, None, weights(3), 50, teacher_states=states, acceptance=taught
            ).total().backward()

        heads.zero_grad()
        peaks.append(script.peak_allocated(step))
    more = 2 * 600 * 8  # values of 8 bytes, one for each token more
    assert peaks[1] - peaks[0] < more * (2 * 32 + 10)  # two of the size of the states, and some of a token's
    assert more * heads.choices > 3 * peaks[1]  # what one head's logits would take


def test_the_script_measures_in_a_process_of_its_own(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "VOCAB", 512)
    monkeypatch.setattr(script, "HIDDEN", 72)
    script.main(["--projection", "low_rank", "--rank", "8", "--vocab", "64", "--tokens", "32", "--num", "2", "--here"])
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 2 * (72 * 72 + 72 + 8 * (72 + 64)) and found["tokens"] == 32
    assert 0 < found["allocated_MB"] < 1


def test_a_markov_bias_takes_what_it_is_itself(script: types.ModuleType) -> None:
    """Not as much as the logits once more: its gradients, one of them twice, and a chunk's rows of low rank."""
    trunk, peaks, gradients = tiny_trunk("llama", vocab_size=4000), [], []
    ids_BT = torch.randint(4000, (2, 200), generator=torch.Generator().manual_seed(0))
    hidden_BTD = torch.randn(2, 200, 32, dtype=torch.float64)
    for markov in (None, 4):
        heads = MedusaHeads(HeadsConfig("root", 3, projection="shared", markov=markov), trunk)

        def step(heads: MedusaHeads = heads) -> None:
            multi_head_loss(heads, hidden_BTD, ids_BT, ids_BT, None, weights(3), 100).total().backward()

        peaks.append(script.peak_allocated(step))
        gradients.append(sum(parameter.nbytes for parameter in heads.parameters()))
    own = gradients[1] - gradients[0]
    assert own == 3 * 2 * 4000 * 4 * 8
    assert peaks[1] - peaks[0] < 2 * own < 100 * 4000 * 8


@pytest.mark.slow
def test_four_heads_of_smollm2_size_take_less_than_400_megabytes(
    script: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--tokens", "2048", "--here"])
    found = json.loads(capsys.readouterr().out)
    assert found["gradients_MB"] == pytest.approx(458.3, abs=0.1)
    assert found["allocated_MB"] < 400
