"""The trunk's states kept from one epoch to the next: the same training, whatever happens to the file."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.data.corpus import RandomBlocks
from medusa.data.packing import TiledBlocks
from medusa.eagle import EagleConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import random_eagle, tiny_trunk
from medusa.train import states as module
from medusa.train.config import EagleTraining, HeadsTraining, TrainConfig
from medusa.train.eagle_objective import EagleObjective, EagleTrainer
from medusa.train.follow import follow
from medusa.train.loop import HeadsObjective, HeadsTrainer
from medusa.train.stages import train
from medusa.train.states import DIGEST, FOLDER, Numbered, States, wanted
from medusa.trunk import Trunk

from .test_train_resume import MAKERS, Killed, assert_same, at_step, kill, quiet, small

BLOCK, COUNT = 8, 5


def tiled(samples: int, seed: int = 0) -> TiledBlocks:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(65, (BLOCK * COUNT + 3,), generator=generator)
    segments = (torch.rand(len(tokens), generator=generator) < 0.1).cumsum(0)
    return TiledBlocks(tokens, segments, BLOCK, samples, seed)


class Reader:
    """Reads rows by number, counting the forwards."""

    def __init__(self, trunk: Trunk, states: States) -> None:
        self.trunk, self.states, self.forwards = trunk, states, 0
        self.objective = HeadsObjective(MedusaHeads(HeadsConfig(num=1), trunk), HeadsTraining())

    def __call__(self, *numbers: int, rows: TiledBlocks | None = None) -> Tensor:
        made = [(rows or tiled(1)).build(number) for number in numbers]
        ids, segments = (torch.stack([row[name] for row in made]) for name in ("input_ids", "segments"))

        def forward() -> Tensor:
            self.forwards += 1
            return self.objective.read(ids, segments)

        return self.states.of(torch.tensor(numbers), ids, segments, forward)


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def trunk(request: pytest.FixtureRequest) -> Trunk:
    return tiny_trunk("llama", dtype=request.param)


def opened(folder: Path, trunk: Trunk, keep: bool = True) -> Reader:
    return Reader(trunk, States(folder / FOLDER / "0.bin", trunk, COUNT, BLOCK, keep=keep))


def test_a_row_is_read_once_and_has_the_same_states_ever_after(tmp_path: Path, trunk: Trunk) -> None:
    read = opened(tmp_path, trunk)
    first, second = read(0, 3), read(4, 1)
    assert read.forwards == 2 and first.dtype == trunk.dtype
    assert read(1, 0).equal(torch.stack([second[1], first[0]])) and read.forwards == 2
    assert read(3, 2)[0].equal(first[1]) and read.forwards == 3  # a row known, one not
    read.states.close()
    again = opened(tmp_path, trunk)
    assert again(0, 3, 4).equal(torch.stack([*first, second[0]])) and again.forwards == 0
    afresh = opened(tmp_path, trunk, keep=False)
    assert afresh(0, 3).equal(first) and afresh.forwards == 1


def test_a_row_twice_in_a_batch_is_read_as_it_was_used(tmp_path: Path) -> None:
    """Also where a forward's last bits depend on the place in the batch."""
    read = opened(tmp_path, tiny_trunk("llama"))
    exact = read.objective.read

    def placed(ids: Tensor, segments: Tensor) -> Tensor:
        return exact(ids, segments) * (1 + 1e-12 * torch.arange(len(ids), dtype=torch.float64)[:, None, None])

    read.objective.read = placed  # type: ignore[method-assign]
    used = read(2, 0, 2, 2)
    assert used[0].equal(used[2]) and used[0].equal(used[3])
    assert read(2, 0, 2, 2).equal(used) and read.forwards == 1
    assert read(0, 3)[0].equal(used[1]) and read.forwards == 2  # beside a row that is not known yet


@pytest.mark.parametrize("harm", ["digest", "state", "half", "cut", "empty"])
def test_a_record_that_is_not_whole_is_made_again(tmp_path: Path, trunk: Trunk, harm: str) -> None:
    read = opened(tmp_path, trunk)
    whole = read(0, 1, 2)
    read.states.close()
    path = read.states.path
    content, record = bytearray(path.read_bytes()), len(path.read_bytes()) // COUNT
    if harm in ("digest", "state"):
        content[record + (3 if harm == "digest" else DIGEST + 40)] ^= 1
    elif harm == "half":
        content[record + record // 2 : 2 * record] = bytes(record - record // 2)
    elif harm == "empty":
        content.clear()
    path.write_bytes(content[: record + 9] if harm == "cut" else content)
    again = opened(tmp_path, trunk)
    assert again(0).equal(whole[:1]) and again.forwards == (1 if harm == "empty" else 0)
    made = again(0, 1, 2)
    assert again.forwards == (2 if harm == "empty" else 1)
    torch.testing.assert_close(made, whole)


def test_states_of_another_text_or_trunk_are_not_taken(tmp_path: Path) -> None:
    trunk, other = tiny_trunk("llama"), tiny_trunk("llama", seed=1)
    first = opened(tmp_path, trunk)(0, 1)
    another = opened(tmp_path, other)
    assert not torch.allclose(another(1), first[1]) and another.forwards == 1
    opened(tmp_path, trunk)(1)
    seams = tiled(1)
    seams.segments_T = torch.arange(len(seams.tokens_T)) // 2
    again = opened(tmp_path, trunk)
    torch.testing.assert_close(again(0, rows=seams), again.objective.read(*(v[None] for v in seams.build(0).values())))
    assert again.forwards == 1
    assert again(1, rows=tiled(1, seed=7)) is not None and again.forwards == 2


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    read = opened(tmp_path, tiny_trunk("llama"))

    class Full:
        def seek(self, place: int) -> None: ...
        def read(self, size: int) -> bytes:
            return bytes(size)

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    read.states.close()
    read.states._file = Full()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"trunk's states can't be written .*No space left .*cache_states=false"):
        read(0)


def learn_alike(tmp_path: Path, stage: str, make: Callable[[Trunk, Numbered], Any]) -> None:
    """The trainer that ``make`` makes learns the same with kept states as without, and asks the trunk once for each."""
    curves, forwards = [], []
    for cached in (False, True):
        trunk, losses = tiny_trunk("llama"), []
        trainer = make(trunk, Numbered(tiled(18)))
        objective = trainer.model
        objective.states = States(tmp_path / "0.bin", trunk, COUNT, BLOCK, keep=False) if cached else None
        trainer.trunk_speed = lambda: None
        counted: Counter[str] = Counter()
        read = objective.read

        def counting(*inputs: Tensor, read: Any = read, counted: Counter[str] = counted) -> Any:
            counted["forwards"] += 1
            return read(*inputs)

        objective.read = counting
        follow(trainer, stage, lambda step: {}, lambda step, found, losses=losses: losses.append(found.get("loss")))
        curves.append([loss for loss in losses if loss is not None])
        forwards.append(counted["forwards"])
    assert forwards == [18, COUNT]
    assert curves[0][:2] == curves[1][:2]  # the first epoch: to the bit
    assert curves[0] == pytest.approx(curves[1], rel=1e-12) and curves[0][-1] < curves[0][0]


@pytest.mark.parametrize("targets", ["text", "trunk", "acceptance"])
def test_training_is_the_same_with_and_without(tmp_path: Path, targets: Any) -> None:
    training = HeadsTraining(steps=9, batch=2, lr=1e-2, warmup=0, log_every=1, targets=targets, accumulate=2)

    def make(trunk: Trunk, rows: Numbered) -> HeadsTrainer:
        objective = HeadsObjective(MedusaHeads(HeadsConfig(num=2), trunk), training)
        return HeadsTrainer(objective, rows, training, seed=0, device=torch.device("cpu"))

    learn_alike(tmp_path, "heads", make)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_an_eagle_layer_learns_the_same_with_and_without(tmp_path: Path, noise: float) -> None:
    training = EagleTraining(steps=9, batch=2, passes=2, warmup=0, log_every=1, accumulate=2, noise=noise)

    def make(trunk: Trunk, rows: Numbered) -> EagleTrainer:
        objective = EagleObjective(random_eagle(trunk, EagleConfig(1)).train(), training)
        return EagleTrainer(objective, rows, training, seed=0, device=torch.device("cpu"))

    learn_alike(tmp_path, "eagle", make)


def cached(folder: Path) -> TrainConfig:
    config = small(folder, MAKERS[0], steps=7)
    data, heads = replace(config.data, windows="tiled", block=64), replace(config.heads_training, batch=24)
    return replace(config, data=data, heads_training=replace(heads, cache_states=True))


def test_a_run_that_was_killed_goes_on_with_the_states_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    train(cached(whole), report=quiet)
    with at_step("heads", 5, kill), pytest.raises(Killed):
        train(cached(broken), report=quiet)
    assert (broken / "run" / FOLDER / "0.bin").stat().st_blocks
    writes: list[int] = []
    write = States._write
    monkeypatch.setattr(States, "_write", lambda self, row, *more: (writes.append(row), write(self, row, *more)))
    train(cached(broken), report=quiet)
    assert writes == []
    assert_same(cached(broken), cached(whole))
    assert not (broken / "run" / FOLDER).exists()


def test_when_states_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, said = tiny_trunk("llama"), []
    random = RandomBlocks(torch.arange(65), torch.zeros(65), BLOCK, 99, 0)

    def keeps(choice: Any, rows: Any) -> bool:
        return wanted(choice, rows, trunk, tmp_path / "run", said.append)

    assert not keeps(False, tiled(99)) and not keeps("auto", random) and not keeps("auto", tiled(2 * COUNT - 1))
    assert keeps(True, tiled(3)) and keeps("auto", tiled(2 * COUNT)) and said == []
    with pytest.raises(UserError, match=r"cache_states=true with data.windows=random: .*set data.windows=tiled"):
        keeps(True, random)
    need = COUNT * (BLOCK * trunk.hidden_size * 8 + DIGEST)
    for free, enough in ((int(need / 0.9) + 1, True), (int(need / 0.9) - 1, False)):
        monkeypatch.setattr(module, "_free", lambda run, free=free: free)
        assert keeps("auto", tiled(99)) == enough
    assert len(said) == 1 and "MiB free" in said[0]
    with pytest.raises(UserError, match=r"make room there, choose another --run, or set .*cache_states=false"):
        keeps(True, tiled(99))
