"""What training takes, told from a configuration alone: equal to what real modules and tensors take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train import sizes
from medusa.train.config import JointTraining, TrainConfig, TrunkConfig
from medusa.train.lora import Adapter
from medusa.train.optim import adamw
from medusa.train.plan import plan
from medusa.trunk import Trunk

LLAMA = Path(__file__).parent / "llama-8b"


def config_of(folder: Path, heads: HeadsConfig | None = None, **parts: Any) -> TrainConfig:
    return TrainConfig(str(folder / "run"), trunk=TrunkConfig(str(folder)), heads=heads or HeadsConfig(), **parts)


def folder_of(trunk: Trunk, folder: Path) -> Path:
    """A folder with the trunk's configuration and nothing else."""
    trunk.model.config.save_pretrained(folder)
    return folder


def test_a_llama_of_8_billion_parameters_by_its_configuration_alone(tmp_path: Path) -> None:
    trunk = sizes.read_trunk(TrunkConfig(str(LLAMA)))
    assert trunk is not None and trunk.parameters == 8_030_261_248 and trunk.dtype is torch.bfloat16
    assert all(parameter.is_meta for parameter in trunk.model.parameters())
    heads = HeadsConfig("medusa", num=2)
    own = 4096 * 4096 + 4096 + 128_256 * 4096
    assert sizes.head_parameters(config_of(LLAMA, heads), trunk) == [own, own]
    assert [path.name for path in LLAMA.iterdir()] == ["config.json"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi"])
@pytest.mark.parametrize("kind", ["medusa", "root", "hydra"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocab": 10},
        {"projection": "shared"},
        {"projection": "low_rank", "rank": 3, "layers": 2},
    ],
    ids=str,
)
def test_sizes_are_those_of_real_heads(family: str, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    trunk, heads = tiny_trunk(family), HeadsConfig(kind, num=3, **options)
    real = MedusaHeads(heads, trunk, torch.arange(heads.vocab) if heads.vocab else None)
    found = sizes.read_trunk(TrunkConfig(str(folder_of(trunk, tmp_path))))
    assert found is not None and found.parameters == sum(each.numel() for each in trunk.model.parameters())
    assert sizes.head_parameters(config_of(tmp_path, heads), found) == [sizes.count(head) for head in real.heads]


def test_sizes_have_a_markov_bias_in_them(tmp_path: Path) -> None:
    trunk, heads = tiny_trunk("llama"), HeadsConfig("medusa", 2, projection="shared", vocab=10, markov=4)
    real = MedusaHeads(heads, trunk, torch.arange(10))
    found = sizes.read_trunk(TrunkConfig(str(folder_of(trunk, tmp_path))))
    assert found is not None
    each = sizes.head_parameters(config_of(tmp_path, heads), found)
    assert each == [sizes.count(head) for head in real.heads] == [32 * 32 + 32 + (65 + 10) * 4] * 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_adapter_is_that_of_a_joint_stage(family: str, tmp_path: Path) -> None:
    trunk, joint = tiny_trunk(family), JointTraining(rank=3)
    found = sizes.read_trunk(TrunkConfig(str(folder_of(trunk, tmp_path))))
    assert found is not None
    assert sizes.adapter_parameters(config_of(tmp_path, joint=joint), found) == sizes.count(Adapter(trunk, joint, 0))


def test_what_is_kept_is_what_adamw_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module = torch.nn.Linear(30, 20)
    module(torch.ones(1, 30)).sum().backward()
    optimizer = adamw([(module, 1e-3)], [], 0.0)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    tensors: list[Tensor | None] = [*module.parameters(), *(each.grad for each in module.parameters()), *moments]
    real = sum(each.nbytes for each in tensors if each is not None)
    assert sizes.memory(sizes.count(module), 4, None).kept == real


def test_a_trunk_that_is_not_here_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", None)
    for name in ("nobody/such-a-model", str(tmp_path)):
        assert sizes.read_trunk(TrunkConfig(name)) is None
    assert any(line.startswith("memory       unknown until") for line in plan(config_of(tmp_path)))


@pytest.mark.parametrize(("name", "kept", "step"), [("zero2", 4 + 16 / 8, 4), ("zero3", 20 / 8 + 4, 8)])
def test_zero_shares_out_what_it_says(name: str, kept: float, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = sizes.memory(1000, 4, name)
    assert (found.kept, found.step) == (1000 * kept, 1000 * step)
