"""Kept steps: a name says all that a step depends on, and what is not whole, or not ours, is not taken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa import packages
from medusa.ahead import LIBRARY
from medusa.packed import pack, unpack
from medusa.testing import tiny_trunk
from medusa.trunk import Trunk

NAME = "0" * 32


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / LIBRARY).write_bytes(b"code")
    (folder / "step.json").write_text("{}")
    return folder


def test_what_is_kept_is_found(made: Path) -> None:
    assert packages.find(NAME) is None and not packages.is_there(NAME)
    folder = packages.keep(NAME, made, {"model": "llama"})
    assert folder == packages.find(NAME) == packages.steps_folder() / NAME and packages.is_there(NAME)
    assert sorted(file.name for file in folder.iterdir()) == ["about.json", "step.json", LIBRARY]
    packages.drop(NAME)
    assert packages.find(NAME) is None


def cut(folder: Path) -> None:
    (folder / LIBRARY).write_bytes(b"cod")


def lose(folder: Path) -> None:
    (folder / "step.json").unlink()


def undescribed(folder: Path) -> None:
    (folder / packages.ABOUT).write_text('{"files": {}}')


def misdescribed(folder: Path) -> None:
    (folder / packages.ABOUT).write_text("[]")


def half_described(folder: Path) -> None:
    (folder / packages.ABOUT).write_text('{"fi')


def open_file(folder: Path) -> None:
    (folder / LIBRARY).chmod(0o666)


def open_folder(folder: Path) -> None:
    folder.chmod(0o777)


def open_parent(folder: Path) -> None:
    folder.parent.chmod(0o777)


HARMS = [cut, lose, undescribed, misdescribed, half_described, open_file, open_folder, open_parent]


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_or_open_to_others_is_not_taken_and_made_anew(made: Path, harm: Callable[[Path], None]) -> None:
    folder = packages.keep(NAME, made, {})
    assert folder is not None
    harm(folder)
    assert packages.find(NAME) is None
    folder.parent.chmod(0o700)
    assert packages.keep(NAME, made, {}) == folder
    assert (folder / LIBRARY).read_bytes() == b"code"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="knows no users")
def test_what_others_own_is_not_taken(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.keep(NAME, made, {}) is not None
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert packages.find(NAME) is None


def test_a_folder_that_only_others_may_look_into_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> Any:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", closed)
        assert not packages.is_there(NAME) and packages.find(NAME) is None


def test_a_cache_folder_that_takes_no_files(made: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert packages.keep(NAME, made, {}) is None and packages.find(NAME) is None
    assert (made / LIBRARY).is_file()


def test_what_was_not_used_for_longest_goes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(place) * 32 for place in range(4)]
    folders = [packages.keep(name, made, {}) for name in names[:3]]
    for place, folder in enumerate(folders):
        assert folder is not None
        os.utime(folder, (1000.0 + place, 1000.0 + place))
    assert packages.find(names[0])  # uses it
    each = sum(file.stat().st_size for file in folders[0].iterdir())  # type: ignore[union-attr]
    monkeypatch.setattr(packages, "MOST_BYTES", 2 * each)
    assert packages.keep(names[3], made, {}) is not None
    assert [packages.is_there(name) for name in names] == [True, False, False, True]


def test_folders_of_processes_that_were_killed_go(made: Path) -> None:
    assert packages.keep(NAME, made, {}) is not None
    lost, fresh = packages.steps_folder() / ".lost", packages.steps_folder() / ".fresh"
    for folder in (lost, fresh):
        folder.mkdir()
        (folder / LIBRARY).write_bytes(b"co")
    long_ago = time.time() - 2 * packages.LOST_S
    os.utime(lost, (long_ago, long_ago))
    assert packages.keep(NAME, made, {}) is not None
    assert not lost.exists() and fresh.exists()


def test_a_name_goes_by_the_size_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Any] = [("a", 1, 2, ()), ("b", 1, 2, ()), ("a", 2, 2, ()), ("a", 1, 3, ()), ("a", 1, 2, (1,))]
    names = [packages.name_of(*size) for size in sizes]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({*names, packages.name_of(*sizes[0])}) == 6


def test_a_description_goes_by_no_weight() -> None:
    first, second = (tiny_trunk("llama", seed=seed) for seed in (0, 1))
    assert packages.description(first) == packages.description(second)
    first.model.config._name_or_path = "elsewhere"
    assert packages.description(first) == packages.description(second)


def a_setting(trunk: Trunk) -> None:
    trunk.model.config.rope_parameters["rope_theta"] = 5000.0


def a_number(trunk: Trunk) -> None:
    trunk.model.model.layers[1].self_attn.scaling *= 2


def a_number_in_a_table(trunk: Trunk) -> None:
    trunk.model.model.layers[1].self_attn.scales = {"default": 0.5}


def a_type(trunk: Trunk) -> None:
    trunk.model.model.layers[0].mlp.up_proj.float()


def a_layer(trunk: Trunk) -> None:
    trunk.model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def a_hook(trunk: Trunk) -> None:
    trunk.model.model.layers[0].register_forward_hook(lambda *given: None)


def a_forward(trunk: Trunk) -> None:
    trunk.model.model.layers[0].forward = a_setting


def the_order_of_memory(trunk: Trunk) -> None:
    weight = trunk.model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.T.contiguous().T


def the_copies_of_a_mask(trunk: Trunk) -> None:
    trunk.copies = 2


CHANGES = [a_setting, a_number, a_number_in_a_table, a_type, a_layer, a_hook, a_forward, the_order_of_memory]


@pytest.mark.parametrize("change", [*CHANGES, the_copies_of_a_mask])
def test_a_description_goes_by(change: Callable[[Trunk], None]) -> None:
    trunk = tiny_trunk("llama")
    before = packages.description(trunk)
    change(trunk)
    assert packages.description(trunk) != before


def test_a_description_goes_by_packed_layers() -> None:
    trunk = tiny_trunk("llama", dtype=torch.float32)
    before = packages.description(trunk)
    assert pack(trunk.model, always=True)
    assert packages.description(trunk) != before
    unpack(trunk.model)
    assert packages.description(trunk) == before


@pytest.mark.parametrize("what", ["torch", "transformers", "sources", "processor"])
def test_a_description_goes_by_what_compiled(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("llama")
    before = packages.description(trunk)
    if what == "torch":
        monkeypatch.setattr(torch.version, "git_version", "another")
    elif what == "transformers":
        monkeypatch.setattr(packages, "version", lambda name: "another")
    elif what == "sources":
        monkeypatch.setattr(packages, "_own_sources", lambda: ("another",))
    else:
        monkeypatch.setattr(packages, "processor", lambda: b"another")
    assert packages.description(trunk) != before


def test_a_description_is_the_same_after_hooks_of_others() -> None:
    """The library counts all hooks of a process: their numbers say nothing."""

    def hooked() -> str:
        trunk = tiny_trunk("llama")
        trunk.model.model.layers[0].register_forward_hook(print)
        return packages.description(trunk)

    assert hooked() == hooked()
