"""A trunk whose weights are shared out over several processes: tensor parallelism, as transformers does it.

``torchrun`` starts the same program once for each device. Every process holds a part of each large matrix (Shoeybi et
al. 2019, "Megatron-LM", section 3) and of the cache, and all take every step together: each ends a layer with the same
states, and the logits are put together on all. So each drafts, accepts and draws for itself, and comes to the same
tokens; heads are whole on each. What hangs on a clock or on chance is decided by the first process for all.

One of the files that know transformers' models.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from medusa.errors import UserError
from medusa.family import text_config
from medusa.launch import FAULT, WRONG_INPUT, Elsewhere, first_to_end, launched, leave, own_end, processes, speaks

Result = TypeVar("Result")

START = "torchrun --nproc-per-node 2 -m -- medusa generate RUN --tp-plan auto"
# What the library's plan cuts by heads: where a number of heads can't be divided, a head would be cut in two.
BY_HEADS = {
    "num_attention_heads": ("q_proj", "qkv_proj", "query_key_value"),
    "num_key_value_heads": ("k_proj", "v_proj", "qkv_proj", "query_key_value"),
}
APART = ("device_map", "distributed_config", "tp_size", "device_mesh")  # options that say where parts are, too
PATIENCE = timedelta(hours=2)  # one waits so long for another, which may be loading; torchrun ends who waits for a dead
CHECK = 1_000_003  # a prime: ids in another order, or shifted by one, have another sum


def spread(model: Any) -> bool:
    """Whether a model's weights are shared out over several processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def whole(weight: Tensor) -> Tensor:
    """A weight, put together where the processes hold a part each: all of them must ask for it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def agreed(model: Any, value: Result) -> Result:
    """The first process's ``value`` on all, where ``model`` is shared out; elsewhere one's own."""
    if not spread(model):
        return value
    outcome = [value]
    dist.broadcast_object_list(outcome)
    return outcome[0]


def placement(name: str, config: Any, device: Any, adapter: bool, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of ``from_pretrained`` with what it wants to know in the place of ``tp_plan``.

    Raises:
        UserError: a plan that is neither "auto" nor a dict, options that say otherwise where the model is, processes
            that no launcher has started, or a model without a plan or whose heads can't be shared out evenly.
    """
    plan = options["tp_plan"]
    if plan != "auto" and not isinstance(plan, dict):
        raise UserError(f"tp_plan={plan!r}: give 'auto', for the model's own plan, or a dict of modules and styles")
    if "RANK" not in os.environ:
        raise UserError(f"tp_plan={plan!r} in one process alone: start several by torchrun, such as `{START}`")
    others = [key for key in APART if options.get(key) is not None]
    if device != "auto" or others:
        other = others[0] if others else f"device={str(device)!r}"
        raise UserError(f"tp_plan={plan!r} and {other}: leave the second out, each process takes a device of its own")
    if adapter:
        raise UserError(f"tp_plan={plan!r} and an adapter: merge it into the trunk first, by peft's merge_and_unload")
    own = {key: value for key, value in options.items() if key != "tp_plan"}
    if not launched():
        return own
    if plan == "auto":
        _refuse_plan(name, text_config(config))
    return own | {"distributed_config": DistributedConfig(tp_plan=plan)}


def _refuse_plan(name: str, config: Any) -> None:
    plan, count = getattr(config, "base_model_tp_plan", None), processes()
    if not plan:
        raise UserError(
            f"trunk {name}: model type {config.model_type!r} has no plan for tensor parallelism in transformers: use"
            " device_map='auto' in one process"
        )
    by_head = {key.rpartition(".")[2] for key, style in plan.items() if style == "colwise"}
    cut = {field: getattr(config, field, None) for field, parts in BY_HEADS.items() if by_head.intersection(parts)}
    heads = {field: number for field, number in cut.items() if isinstance(number, int)}
    for field, number in heads.items():
        if number % count:
            most = math.gcd(*heads.values())
            even = [str(each) for each in range(2, most + 1) if most % each == 0]
            raise UserError(
                f"trunk {name}: {field}={number} can't be shared out evenly over processes={count}: start"
                f" {' or '.join(even) or 'one'}"
            )


def keep_together(model: Any) -> None:
    """Have the processes compare what they read, before each forward of a model that is shared out.

    They compute drafts and draws each for itself, and come to the same where their processors do. Where one does not,
    this tells, before they wait for each other or mix what belongs to different texts.
    """
    if spread(model):
        model.base_model.register_forward_pre_hook(_compare, with_kwargs=True)


def _compare(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    ids = (args[0] if args else given["input_ids"]).flatten()  # some models hand them to their body by position
    places = torch.arange(1, len(ids) + 1, device=ids.device) * CHECK
    total = ((ids + 1) * places % (1 << 40)).sum()  # of few enough bits that sums stay in range
    extremes = torch.stack([total, -total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    most, least = extremes.tolist()
    if most != -least:
        raise UserError(
            "the processes have come to different tokens, which equal processors don't: run all of them on the same"
            " kind of processor, with the same versions and options"
        )


def together(work: Callable[[], int]) -> int:
    """Run a command in each of the processes that a launcher started: one voice, one exit code.

    The first process alone prints. Where one fails all end, and the first to fail says why. Of one process it is
    ``work`` alone.

    Raises:
        UserError: more processes on this machine than it has accelerators, or of ``work``.
    """
    if not launched():
        return work()
    try:
        with own_end(), _met():
            code = work()
    except Elsewhere as end:
        code = end.code
    return leave(code)


@contextmanager
def _met() -> Iterator[None]:
    try:
        device = _own_device()
    except UserError as error:
        if speaks():
            raise
        raise Elsewhere(WRONG_INPUT) from error
    store, rank, size = next(iter(dist.rendezvous("env://")))
    backend = dist.get_default_backend_for_device(device)
    own = device if backend == "nccl" else None  # or its barrier would guess it
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=own)
    try:
        with nullcontext() if rank == 0 else _silence():
            yield
    except BaseException as error:
        first = first_to_end(dist.PrefixStore("medusa", store), rank, _exit_code(error))
        if device.type == "cpu":  # gloo's threads would abort the exit; nccl may wait here for those who are gone
            dist.destroy_process_group()
        if first is None and _of_the_line(error):
            print("medusa: error: another process has gone; the launcher tells how it ended", file=sys.stderr)
            first = FAULT
        if first is None:
            raise
        raise Elsewhere(first) from error
    dist.barrier()
    dist.destroy_process_group()


def _own_device() -> torch.device:
    """What transformers will take: the accelerator of the process's number on its machine, or the processor."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return torch.device("cpu")
    number, started = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if started > (count := torch.accelerator.device_count()):
        raise UserError(f"processes={started} on a machine of {count} accelerators: start at most {count}")
    torch.accelerator.set_device_index(number)
    return torch.device(kind.type, number)


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _of_the_line(error: BaseException) -> bool:
    """Whether it says that what connects the processes is broken."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):  # of --help
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return WRONG_INPUT if isinstance(error, UserError) else FAULT
