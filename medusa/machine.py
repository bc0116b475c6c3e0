"""The machine that figures were measured on, and the number of threads that suits it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from medusa.errors import UserError


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


LOST = 20  # times slower at once: waiting for each other, and no outlier
ENOUGH_S = 2.0  # seconds spent on finding out
HALF_OR_FULL = (torch.bfloat16, torch.float32)


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


def bfloat16_pays(device: torch.device, repeats: int = 20) -> bool:
    """Whether a small model's products are faster in bf16 here: timed in turns on a processor, a few ms in all."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    sides = {dtype: [torch.ones(rows, 576, dtype=dtype) for rows in (8, 1536)] for dtype in HALF_OR_FULL}
    times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in sides}
    for _ in range(repeats):
        for dtype, (states, weight) in sides.items():
            times[dtype].append(seconds(lambda s=states, w=weight: torch.nn.functional.linear(s, w)))  # type: ignore[misc]
    half, full = (median(times[dtype]) for dtype in HALF_OR_FULL)
    return half < full


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
