"""The machine: timing, the number of threads, and the names of types and devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from medusa import machine
from medusa.errors import UserError
from medusa.machine import Rates, as_dtype, cache_folder, describe, pick_device, pick_threads, rates, seconds


class FakeThreads:
    """Torch's setting, and a clock whose calls last as long as ``lasts[threads]`` says, in 1/128 s per call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lasts: dict[int, list[float]], threads: int) -> None:
        self.threads = threads
        self.calls: list[int] = []
        self._lasts = {count: iter([time / 128 for time in times]) for count, times in lasts.items()}
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", self._set)
        self._now = 0.0
        monkeypatch.setattr(machine.time, "perf_counter", lambda: self._now)

    def _set(self, count: int) -> None:
        self.threads = count

    def work(self) -> None:
        self.calls.append(self.threads)
        self._now += next(self._lasts[self.threads])


@pytest.mark.parametrize(("one", "all_", "best"), [(2.0, 1.0, 4), (1.0, 2.0, 1)])
def test_the_faster_number_of_threads_is_kept(
    monkeypatch: pytest.MonkeyPatch, one: float, all_: float, best: int
) -> None:
    fake = FakeThreads(monkeypatch, {1: [one] * 5, 4: [all_] * 5}, threads=4)
    assert pick_threads(fake.work) == best == fake.threads
    assert fake.calls == [1, 4] * 5  # in turns: a machine that slows down for a while slows both


def test_the_first_call_and_an_outlier_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    # one thread: a slow start; four: one call that another job held up
    fake = FakeThreads(monkeypatch, {1: [9.0, 2.0, 2.0, 2.0, 2.0], 4: [1.0, 1.0, 50.0, 1.0, 1.0]}, threads=4)
    assert pick_threads(fake.work) == 4 == fake.threads
    # without the first calls the medians are 1.5 and 2, with them 2 and 1.5
    fake = FakeThreads(monkeypatch, {1: [9.0, 1.0, 2.0], 4: [0.1, 1.5, 2.5]}, threads=4)
    assert pick_threads(fake.work, repeats=3) == 1 == fake.threads


def test_threads_that_wait_for_each_other_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeThreads(monkeypatch, {1: [10.0], 4: [201.0]}, threads=4)
    assert pick_threads(fake.work) == 1 == fake.threads
    fake = FakeThreads(monkeypatch, {1: [10.0] * 5, 4: [199.0, *[9.0] * 4]}, threads=4)
    assert pick_threads(fake.work) == 4 and len(fake.calls) == 8  # a slow start; then two seconds are enough


def test_long_work_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeThreads(monkeypatch, {1: [900.0, 120.0], 4: [100.0, 110.0]}, threads=4)
    assert pick_threads(fake.work) == 4 and fake.calls == [1, 4, 1, 4]


def test_one_thread_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeThreads(monkeypatch, {}, threads=1)
    assert pick_threads(fake.work) == 1 == fake.threads
    assert fake.calls == []


def test_equally_fast_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeThreads(monkeypatch, {1: [1.0] * 5, 4: [1.0] * 5}, threads=4)
    assert pick_threads(fake.work) == 1


def test_work_that_fails_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeThreads(monkeypatch, {1: [], 4: []}, threads=4)

    def fails() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        pick_threads(fails)
    assert fake.threads == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="its clock waits for the GPU")
def test_seconds_are_those_of_the_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter([10.0, 10.25])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks))
    calls: list[int] = []
    assert seconds(lambda: calls.append(1)) == 0.25
    assert calls == [1]


def test_the_gpus_work_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: events.append("read") or float(len(events)))
    assert seconds(lambda: events.append("work")) == 3
    assert events == ["wait", "read", "work", "wait", "read"]


def test_a_description_is_what_a_reader_wants_and_json() -> None:
    found = describe()
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert all(found[key] not in ("", None, 0) for key in found)
    assert {"processor", "cores", "accelerator", "system", "python", "transformers"} <= found.keys()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
        (torch.float64, torch.float64),
        ("auto", "auto"),
    ],
)
def test_types_by_name(name: str | torch.dtype, dtype: str | torch.dtype) -> None:
    assert as_dtype(name) == dtype


@pytest.mark.parametrize("name", ["bf61", "fp32", "", "nn", "Tensor", "__name__", "Auto"])
def test_types_that_do_not_exist(name: str) -> None:
    with pytest.raises(UserError, match=f"dtype='{name}'") as caught:
        as_dtype(name)
    assert "bfloat16" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_devices_that_are_there(device: str | torch.device) -> None:
    assert pick_device(device).type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["nowhere", "", "cuda:99", "cpu ", "xpu:7", "hpu", "privateuseone", "meta"])
def test_devices_that_are_not_there(device: str) -> None:
    # torch says so by errors of several kinds, some of them long; meta holds no values
    with pytest.raises(UserError, match=f"device='{device}'") as caught:
        pick_device(device)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 0)])
def test_a_gpu_that_is_not_there(device: str | torch.device) -> None:
    with pytest.raises(UserError, match="cuda"):
        pick_device(device)


# The machine's rates.

CPU = torch.device("cpu")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measuring that takes no time; each entry is a call timed."""
    calls: list[int] = []

    def take(work: object) -> float:
        calls.append(1)
        return 0.5

    monkeypatch.setattr(machine, "seconds", take)
    monkeypatch.setattr(machine, "MEASURED_S", 0.0)
    return calls


def test_rates_are_measured_once_and_kept(rounds: list[int], tmp_path: Path) -> None:
    kept = tmp_path / "made" / "rates.json"
    found = rates(CPU, torch.float32, 3 << 20, kept)
    assert found.bytes_per_second == (16 << 20) / 0.5  # four times the 4 MiB
    assert found.operations_per_second == 2 * 512**3 / 0.5
    assert (found.read_bytes, found.dtype) == (4 << 20, "float32")
    count = len(rounds)
    assert rates(CPU, torch.float32, (4 << 20) - 5, kept) == found and len(rounds) == count
    rates(CPU, torch.bfloat16, 3 << 20, kept)
    rates(CPU, torch.float32, 30 << 20, kept)
    assert len(rounds) > count and len(json.loads(kept.read_text())["entries"]) == 3
    assert rates(CPU, torch.float32, 1 << 40, kept).read_bytes == 1 << 29


def test_another_machine_measures_its_own(rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "rates.json"
    rates(CPU, torch.float32, 1, kept)
    count, own = len(rounds), describe()
    monkeypatch.setattr(machine, "describe", lambda: own | {"python": "another"})
    rates(CPU, torch.float32, 1, kept)
    assert len(rounds) == count
    for change in ({"processor": "another"}, {"threads": 99}, {"accelerator": "another"}):
        monkeypatch.setattr(machine, "describe", lambda more=change: own | more)
        rates(CPU, torch.float32, 1, kept)
        assert len(rounds) > count
        count = len(rounds)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"entries": [1]}', '{"entries": [{"machine": {}, "rates": {}}]}'])
def test_what_is_kept_may_be_broken(rounds: list[int], tmp_path: Path, content: str) -> None:
    kept = tmp_path / "rates.json"
    kept.write_text(content)
    found = rates(CPU, torch.float32, 1, kept)
    count = len(rounds)
    assert rates(CPU, torch.float32, 1, kept) == found and len(rounds) == count


def test_where_nothing_can_be_kept_it_is_measured_each_time(rounds: list[int], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = rates(CPU, torch.float32, 1, tmp_path / "file" / "rates.json")
    count = len(rounds)
    assert rates(CPU, torch.float32, 1, tmp_path / "file" / "rates.json") == found and len(rounds) > count


def test_real_rates_are_a_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MEASURED_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = rates(CPU, torch.float32, 1 << 24)
    assert 1e8 < found.bytes_per_second < 1e13 and 1e8 < found.operations_per_second < 1e14
    assert cache_folder() == tmp_path / "medusa" and (tmp_path / "medusa" / "rates.json").is_file()


def test_the_least_time_is_the_larger_limits() -> None:
    found = Rates(100.0, 10.0, 1, "float32", "")
    assert found.seconds(200, 10) == 2 and found.seconds(200, 30) == 3


@pytest.mark.parametrize("tiles", [True, False])
def test_bf16_on_a_processor_needs_its_tiles(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert machine.bfloat16_pays(torch.device("cpu")) is tiles
    assert not machine.bfloat16_pays(torch.device("meta"))


def test_the_cache_folder_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    pwd = pytest.importorskip("pwd")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert cache_folder().parts[-2:] == (".cache", "medusa")
