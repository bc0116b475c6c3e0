"""The machine that figures were measured on, and the number of threads that suits it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from medusa.errors import UserError
from medusa.files import write_json

Key = TypeVar("Key")


def describe() -> dict[str, str | int]:
    """What a reader of a measurement wants to know: processor, cores, threads in use, versions."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "accelerator": accelerator,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    on_gpu = torch.cuda.is_initialized()  # asks no driver: this is called within timed work too
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def own_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes where nothing else runs, as far as that can be told.

    On one thread of a processor the time that the thread was running: on a busy machine a call of some milliseconds
    may wait as long again for its turn, or not, so that a median of wall-clock times says little. Else the wall clock.
    """
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return seconds(work)
    start = time.thread_time()
    work()
    return time.thread_time() - start


ROUNDS = 9


def in_turns(
    works: Mapping[Key, Callable[[], object]], device: torch.device, clock: Callable[..., float] = own_seconds
) -> dict[Key, list[float]]:
    """Seconds of each work, tried in turns, :data:`ROUNDS` times each."""
    times: dict[Key, list[float]] = {key: [] for key in works}
    for _ in range(ROUNDS):
        for key, work in works.items():
            times[key].append(clock(work, device))
    return times


def peak_memory_mb(device: torch.device) -> float | None:
    """The most memory that this process has held so far, in MB of 10^6 bytes: what torch allocated on a GPU, else all.

    None where the system doesn't tell.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


@dataclass(frozen=True)
class Rates:
    """What a device does at best: bytes that it reads and operations that it does per second.

    An operation is a product or a sum. ``read_bytes`` is the size of what was read for it: what fits into a processor's
    own memory is read faster. ``dtype`` is that of the products.
    """

    bytes_per_second: float
    operations_per_second: float
    read_bytes: int
    dtype: str
    measured: str  # the day

    def seconds(self, bytes_: float, operations: float) -> float:
        """The least time for work that reads so much and does so much, both at once."""
        return max(bytes_ / self.bytes_per_second, operations / self.operations_per_second)


KEPT = "rates.json"
LEAST_READ, MOST_READ = 1 << 20, 1 << 29  # bytes
MUCH = 1 << 24  # bytes: a millisecond's
COLUMNS = 1024
WHOLE = "whole, by sum or product"  # as kept measurements say
SQUARE = {"cpu": 512, "cuda": 8192}  # rows of the matrices that are multiplied: some milliseconds
MEASURED_S = 1.0  # for each of the two rates


def rates(device: torch.device, dtype: torch.dtype, bytes_: int, kept: Path | None = None) -> Rates:
    """The rates of this machine with torch's threads as they are, for weights of ``bytes_`` in all.

    Measured once, in some seconds, and kept in ``kept`` with the machine's description: another machine, or another
    number of threads, measures its own. Where that file can't be written it is measured each time.
    """
    kept = kept or cache_folder() / KEPT
    size = min(max(1 << (bytes_ - 1).bit_length(), LEAST_READ), MOST_READ)
    key = setting(device, dtype) | {"read_bytes": size, "read": WHOLE}
    entries = _kept(kept)
    for entry in entries:
        if entry.get("machine") == key:
            return Rates(**entry["rates"])
    found = Rates(_reading(device, size), _computing(device, dtype), size, key["dtype"], time.strftime("%Y-%m-%d"))
    with suppress(OSError):
        write_json(kept, {"entries": [*entries, {"machine": key, "rates": asdict(found)}]})
    return found


def setting(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a kept measurement holds for: processor, threads, accelerator, torch, and the type of the values."""
    own = {key: value for key, value in describe().items() if key in ("processor", "cores", "threads", "accelerator")}
    name = str(dtype).removeprefix("torch.")
    return own | {"torch": torch.__version__, "device": device.type, "dtype": name}


def cache_folder() -> Path:
    """Where what can be made anew is kept: by the XDG base directory specification."""
    # unlike Path.home, this raises nothing for a user who has no home
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "medusa"


def _kept(file: Path) -> list[dict[str, Any]]:
    """What is in the file; nothing where it is not there, or not as it was written."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["entries"]
        return [entry for entry in entries if isinstance(entry["machine"], dict) and Rates(**entry["rates"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


@torch.inference_mode()
def _reading(device: torch.device, size: int) -> float:
    """Bytes per second: numbers of fp32 that are summed, or multiplied by a vector, whichever reads them faster.

    As a model's weights are: all are read before any is read again, so that what a processor's own memory gives is what
    it can hold of them.
    """
    numbers = torch.ones(size // 4 // COLUMNS, COLUMNS, device=device)
    vector = torch.ones(COLUMNS, device=device)
    times = max(1, MUCH // size)  # few are read several times in a row
    ways: list[Callable[[Tensor], Tensor]] = [torch.sum, lambda matrix: torch.mv(matrix, vector)]
    return times * size / _best([partial(_repeated, way, numbers, times) for way in ways])


def _repeated(way: Callable[[Tensor], Tensor], values: Tensor, times: int) -> None:
    for _ in range(times):
        way(values)


@torch.inference_mode()
def _computing(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product of matrices in ``dtype``."""
    side = SQUARE.get(device.type, SQUARE["cpu"])
    left = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _best([lambda: torch.mm(left, left)])


def _best(works: Sequence[Callable[[], object]]) -> float:
    """The least seconds of any of the works, in rounds after one that warms up: others' work makes them slower only."""
    for work in works:
        work()
    best, end = float("inf"), time.perf_counter() + MEASURED_S
    while True:
        best = min([best, *map(seconds, works)])
        if time.perf_counter() > end:
            return best


LOST = 20  # times slower at once: waiting for each other, and no outlier
ENOUGH_S = 2.0  # seconds spent on finding out


def pick_threads(work: Callable[[], object], repeats: int = 5) -> int:
    """Time ``work`` on one thread and on all of them, in turns, and keep torch at the faster; return that number.

    More threads are not always faster: two on a machine that is busy otherwise can be tens of times slower than one.
    Work that takes long is timed less often, and only once where that is so.
    """
    counts = [1, torch.get_num_threads()]
    if counts[1] == 1:
        return 1
    times: dict[int, list[float]] = {count: [] for count in counts}
    best = counts[1]
    try:
        for turn in range(repeats):
            for count in counts:
                torch.set_num_threads(count)
                times[count].append(seconds(work))
            one, all_ = times[1], times[counts[1]]
            if all_[0] > LOST * one[0] or (turn and sum(one) + sum(all_) > ENOUGH_S):
                break
        best = min(counts, key=lambda count: median(times[count][1:] or times[count]))  # the first call warms up
    finally:
        torch.set_num_threads(best)
    return best


def bfloat16_pays(device: torch.device) -> bool:
    """Whether bf16 is clearly faster than fp32 there: on a GPU that knows it, on a processor with tiles of it (AMX).

    Elsewhere on processors both come to about the same, and fp32 to the text of ``generate``: in bf16 the best two
    logits are often equal, and how a forward of several tokens rounds then decides.
    """
    if device.type == "cpu":
        return bool(torch.cpu._is_amx_tile_supported())
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """The dtype a name stands for; "auto" stays. Raises UserError for a name torch doesn't have."""
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"dtype={dtype!r}: give auto, float32, bfloat16, float16 or float64")
    return found


def pick_device(name: str | torch.device) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one. UserError if this machine or torch lacks it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    known = "auto, cpu, or another that this build of torch knows"
    try:
        # a value, not an empty tensor: some devices only fail when asked for memory
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:  # torch without CUDA asserts
        raise UserError(f"device={str(name)!r} is not there: use {known}") from error
    if device.type == "meta":
        raise UserError(f"device={str(name)!r} holds no values: use {known}")
    return device
