"""Held-out continuations in their file: what is read is what was written, and nothing made of anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa.calibrate import Continuations, continuations
from medusa.testing import tiny_trunk
from medusa.train import continued
from medusa.train.continued import Continued, key_of
from medusa.train.record import HELD, sweep
from medusa.trunk import Trunk

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8]]
CPU = torch.device("cpu")


def assert_same(found: Continuations, wanted: Continuations) -> None:
    assert (found.ids, found.starts) == (wanted.ids, wanted.starts)
    for one, other in zip(found.hidden, wanted.hidden, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes() == one.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_read_is_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    held = continuations(tiny_trunk("llama", dtype=dtype), PROMPTS, 5)
    continued.write(tmp_path / HELD, "key", Continued(held, 3))
    found = continued.read(tmp_path / HELD, "key", CPU)
    assert found is not None and found.threads == 3
    assert_same(found.held, held)
    assert [path.name for path in tmp_path.iterdir()] == [HELD]


def test_the_key_names_all_that_continuations_depend_on() -> None:
    trunk, other = tiny_trunk("llama"), tiny_trunk("llama", seed=1)
    half = Trunk(tiny_trunk("llama").model.to(torch.bfloat16))
    key = key_of(trunk, PROMPTS, 5)
    assert key == key_of(tiny_trunk("llama"), [list(prompt) for prompt in PROMPTS], 5)
    changed = [key_of(other, PROMPTS, 5), key_of(half, PROMPTS, 5), key_of(trunk, PROMPTS, 6)]
    changed += [key_of(trunk, PROMPTS[:2], 5), key_of(trunk, [[1, 2], [3, 4, 5], [6, 7, 8]], 5)]
    assert len({key, *changed}) == 6


def test_another_key_or_half_a_file_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / HELD
    assert continued.read(path, "key", CPU) is None
    continued.write(path, "key", Continued(continuations(tiny_trunk("llama"), PROMPTS, 5), 1))
    assert continued.read(path, "other", CPU) is None
    path.write_bytes(path.read_bytes()[:-9])
    assert continued.read(path, "key", CPU) is None


def test_what_a_killed_process_was_writing_is_swept(tmp_path: Path) -> None:
    (tmp_path / f".{HELD}.01234567").touch()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
