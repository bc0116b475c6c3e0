"""Several processes that train together: how they meet, what the first alone does, and how they end.

``torchrun`` and the ``deepspeed`` launcher start the same command once for each GPU, or as often as asked on CPUs. Each
process trains on its share of every step's rows. What is decided, evaluated, written or said is the first one's alone,
and the others are told what came of it: they need not come to the same result by themselves, only wait for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from medusa.errors import UserError
from medusa.launch import FAULT, WRONG_INPUT, Elsewhere, first_to_end, launched, speaks
from medusa.machine import pick_device

from .checkpoints import Saved
from .config import TrainConfig
from .interrupt import Interrupted
from .training import JointTraining, Training
from .zero import held_in_parts, kind_of, on_cpu, read_settings, started

Result = TypeVar("Result")

# How long one waits for another, which may be at an evaluation or a calibration. That a process is gone is noticed by
# what started it, not by this.
PATIENCE = timedelta(days=2)
SIGNAL = 128  # exit code; a signal's number is added


@dataclass
class Group:
    """The processes of a run, as one of them sees them: number ``rank`` of ``size``, ``local_rank`` on its machine.

    ``deepspeed`` are DeepSpeed's settings, None where torch alone trains.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    deepspeed: Mapping[str, Any] | None = None
    _alone: bool = False

    @property
    def leads(self) -> bool:
        """Whether this is the first process, which evaluates, writes and speaks."""
        return self.rank == 0

    @property
    def kind(self) -> str:
        """What the files of a checkpoint depend on: DeepSpeed's stage and the number of processes; empty without it."""
        return "" if self.deepspeed is None else f"with {kind_of(self.deepspeed)} and processes={self.size}"

    @property
    def several(self) -> bool:
        """Whether there are others to talk to now."""
        return self.size > 1 and not self._alone

    def first(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` on the first process, and return what came of it, which must be picklable, on all.

        Within ``work`` that process is as if it were the only one.

        Raises:
            UserError: ``work`` did, on all processes.
        """
        if not self.several:
            return work()
        outcome: list[Any] = [self._attempt(work) if self.leads else None]
        dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        result: Result = outcome[0]
        return result

    def alone(self, work: Callable[[], Result]) -> Result | None:
        """As :meth:`first`, but what came of it stays on the first process; None on the others."""
        kept: list[Result] = []
        self.first(lambda: kept.append(work()))
        return kept[0] if kept else None

    def _attempt(self, work: Callable[[], Result]) -> Result | UserError:
        self._alone = True
        try:
            return work()
        except UserError as error:
            return error
        finally:
            self._alone = False

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` on one process of each machine, then on its others, which find what it fetched or cached."""
        if not self.several:
            return work()
        try:
            if self.local_rank == 0:
                return work()
        finally:
            dist.barrier()
        return work()

    def any(self, wishes: tuple[bool, ...], device: torch.device) -> tuple[bool, ...]:
        """Which of ``wishes`` any process has: what they do together, they begin together."""
        if not self.several:
            return wishes
        counts = torch.tensor(wishes, dtype=torch.int32, device=device)
        dist.all_reduce(counts)
        return tuple(bool(count) for count in counts.tolist())

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if not self.several:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    @torch.no_grad()
    def align(self, module: nn.Module, device: torch.device) -> None:
        """Give ``module`` the first process's values everywhere: machines may differ in the last bits of a start."""
        if not self.several:
            return
        for value in module.state_dict().values():
            there = value.to(device)  # where the processes talk
            dist.broadcast(there, 0)
            value.copy_(there)

    def rows(self, training: Training) -> int:
        """How many rows of a step a process takes at a time.

        Raises:
            UserError: a step's rows can't be shared out evenly.
        """
        parts = self.size * training.accumulate
        if training.batch % parts:
            raise UserError(
                f"batch={training.batch} rows of a step can't be shared by processes={self.size} in"
                f" accumulate={training.accumulate} parts each: make batch a multiple of {parts}"
            )
        return training.batch // parts

    def check(self, stage: str, training: Training) -> None:
        """Refuse what this number of processes, or DeepSpeed, can't train.

        Raises:
            UserError: rows that can't be shared out evenly, an optimizer of whole matrices where there are none, or a
                trunk and heads that learn together and are not whole.
        """
        self.rows(training)
        if self.deepspeed is None:
            return
        if training.optimizer == "muon":
            raise UserError(
                f"{stage}: optimizer=muon with deepspeed: it needs whole matrices, and ZeRO cuts them into pieces; use"
                " optimizer=adamw, or leave deepspeed out"
            )
        if isinstance(training, JointTraining) and held_in_parts(self.deepspeed):
            raise UserError(
                f"{stage} with {kind_of(self.deepspeed)}: trunk and heads are evaluated together, which takes them"
                " whole and in their own precision; use deepspeed=zero2, or leave it out"
            )

    def check_saved(self, saved: Saved) -> None:
        """Refuse a checkpoint whose parts are for other processes than these.

        Raises:
            UserError: it was made with or without DeepSpeed, by another stage of ZeRO or another number of processes.
        """
        if saved.kind != self.kind:
            kinds = [kind or "without DeepSpeed" for kind in (saved.kind, self.kind)]
            raise UserError(
                f"{saved.folder} was made {kinds[0]}, now it goes on {kinds[1]}: start it as before, or begin the stage"
                " anew with --fresh"
            )


ALONE = Group()


@contextmanager
def joined(config: TrainConfig) -> Iterator[Group]:
    """Meet the other processes, and leave them at the end.

    Where one fails the others, whatever they wait for, end as well: with ``Elsewhere``, since only the first to fail
    may say why.

    Raises:
        UserError: DeepSpeed is asked for and not there, or its settings are wrong; a device that can't be shared.
        Elsewhere: another process has failed.
    """
    if not torch.cuda.is_available():
        on_cpu()
    if not launched() and config.deepspeed is None:
        yield ALONE
        return
    try:
        settings = None if config.deepspeed is None else read_settings(config.deepspeed)
        device = _own_device(config.trunk.device)
    except UserError as error:
        if speaks():
            raise
        raise Elsewhere(WRONG_INPUT) from error
    store = _meet(device)
    group = Group(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), settings)
    try:
        with nullcontext() if settings is None else started(device):
            yield group
    except BaseException as error:
        first = first_to_end(store, group.rank, _exit_code(error))
        if device.type == "cpu":  # gloo's threads would abort the exit; nccl may wait here for those who are gone
            dist.destroy_process_group()
        if first is None:
            raise
        raise Elsewhere(first) from error
    dist.barrier()
    dist.destroy_process_group()


def _own_device(name: str) -> torch.device:
    """The process's own device: of several GPUs the one of its number on this machine.

    Raises:
        UserError: one GPU for all processes, or more processes than GPUs.
    """
    device = pick_device(name)
    if device.type != "cuda" or not launched():
        return device
    if ":" in name:
        raise UserError(f"trunk.device={name} with several processes: use auto or cuda, each takes a GPU of its own")
    started = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", "1"))  # as torchrun, DeepSpeed say
    if started > (count := torch.cuda.device_count()):
        raise UserError(f"processes={started} on a machine of {count} GPUs: start at most {count}, one for each")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return pick_device(name)


def _meet(device: torch.device) -> dist.Store:
    """Form the group of all processes, of one where no launcher has said otherwise; its store of keys."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    store, rank, size = next(iter(dist.rendezvous("env://")))
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = device if device.type == "cuda" else None  # or nccl's barrier would guess it
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=own)
    return dist.PrefixStore("medusa", store)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return WRONG_INPUT
    return SIGNAL + error.number if isinstance(error, Interrupted) else FAULT
