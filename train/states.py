"""The trunk's last states of a stage's rows, kept in a file: the trunk is frozen, so each epoch would make them again.

A file holds a record for each distinct row: a digest, then the states as they are in memory. The digest is of the
trunk, the row's tokens and seams, and the states, so a record vouches for itself: one that was never written, that a
killed process or a power cut left in halves, or that belongs to another trunk or text is made again, and no order of
writing has to be kept. Records are read and written by position rather than mapped: a full disk is then an error that
can be told, where a map would end the process.

States are computed with the batch in which their row comes first, and only there. In the first epoch they are thus, to
the bit, those without a cache. In later epochs a row stands among others, and a forward's sums may depend on that in
their last bits: with and without a cache training is equal within rounding. A run that was killed and goes on reads
what it wrote, and is equal to the bit to one that was not.

Dimensions: B batch, T time, D hidden.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from medusa.data.packing import Epochs
from medusa.errors import UserError
from medusa.trunk import Trunk

from .checkpoints import told

FOLDER = "states"  # in the run folder, while what drafts is trained; a file for each process
DIGEST = 8  # bytes: by chance a wrong record passes once in 2^64
ROOM = 0.9  # share of the free space that the file may take: checkpoints and the log are written beside it


class Numbered(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that also tell which they are: ``row``, int64 []."""

    def __init__(self, rows: Epochs) -> None:
        self.rows, self.block = rows, rows.block

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index] | {"row": torch.tensor(self.rows.row(index))}


def record_bytes(block: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of the record of a row of ``block`` tokens."""
    return DIGEST + block * hidden * dtype.itemsize


class States:
    """States [T, D] of ``count`` rows of ``block`` tokens in the file ``path``. ``keep``: go on with what is there.

    Raises:
        UserError: the file can't be made.
    """

    def __init__(self, path: Path, trunk: Trunk, count: int, block: int, *, keep: bool) -> None:
        probe = trunk.forward(torch.zeros(1, 1, dtype=torch.long, device=trunk.device)).hidden
        self.path, self.device = path, probe.device
        self._empty_TD = torch.empty(block, probe.shape[-1], dtype=probe.dtype)
        self._record = record_bytes(block, probe.shape[-1], probe.dtype)
        self._trunk = f"{trunk.fingerprint()} {probe.dtype}".encode()
        self._checked: set[int] = set()  # rows whose digest was compared, or written, by this process
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("r+b" if keep and path.exists() else "w+b", buffering=0)
            self._file.truncate(count * self._record)  # takes no room yet, and reads as zeros, which no digest is

    def of(self, row_B: Tensor, ids_BT: Tensor, segments_BT: Tensor, forward: Callable[[], Tensor]) -> Tensor:
        """States [B, T, D] of the rows ``row_B``; ``forward`` makes those of the whole batch, if any is missing.

        Raises:
            UserError: the disk takes no more.
        """
        rows, texts_B2T = row_B.tolist(), torch.stack([ids_BT, segments_BT], 1).cpu()
        held = [self._read(row, text_2T) for row, text_2T in zip(rows, texts_B2T, strict=True)]
        known = [states for states in held if states is not None]
        if len(known) == len(held):
            return torch.stack(known).to(self.device)
        made_BTD = forward()
        first: dict[int, int] = {}
        for place, row in enumerate(rows):
            old_TD, twin = held[place], first.setdefault(row, place)
            if old_TD is not None:
                made_BTD[place] = old_TD
            elif twin != place:  # as it will be read, should this step be taken again
                made_BTD[place] = made_BTD[twin]
            else:
                self._write(row, texts_B2T[place], made_BTD[place])
        return made_BTD

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._file.close()

    def _told(self) -> AbstractContextManager[None]:
        way = "make room there and run the same command again, or set cache_states=false"
        return told("the trunk's states", self.path.parent, way)

    def _digest(self, text_2T: Tensor, states: memoryview) -> bytes:
        digest = hashlib.blake2b(self._trunk, digest_size=DIGEST)
        digest.update(_bytes(text_2T))
        digest.update(states)
        return digest.digest()

    def _read(self, row: int, text_2T: Tensor) -> Tensor | None:
        """States [T, D] of a row of these tokens and seams, if the file has them."""
        states_TD = torch.empty_like(self._empty_TD)
        view = _bytes(states_TD)
        self._file.seek(row * self._record)
        mark = self._file.read(DIGEST)
        if mark == bytes(DIGEST) or self._file.readinto(view) != len(view):
            return None
        if row not in self._checked and mark != self._digest(text_2T, view):
            return None
        self._checked.add(row)
        return states_TD

    def _write(self, row: int, text_2T: Tensor, states_TD: Tensor) -> None:
        view = _bytes(states_TD.contiguous().cpu())
        record = memoryview(self._digest(text_2T, view) + view)
        with self._told():
            self._file.seek(row * self._record)
            while record:
                record = record[self._file.write(record) :]
        self._checked.add(row)


def _bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    view: memoryview = values.flatten().view(torch.uint8).numpy().data
    return view


@contextmanager
def kept(wanted: bool, rows: Epochs, trunk: Trunk, run: Path, process: int, again: bool) -> Iterator[States | None]:
    """The states of ``rows``, if they are ``wanted``, in a file of ``process`` in the folder ``run``.

    ``again``: the stage goes on, and so does its file. Where the stage is broken off the file stays.
    """
    folder = run / FOLDER
    states = States(folder / f"{process}.bin", trunk, rows.count, rows.block, keep=again) if wanted else None
    try:
        yield states
    finally:
        if states is not None:
            states.close()
    if states is not None:
        states.path.unlink(missing_ok=True)  # on this machine; the first process removes what else is on its own
    if process == 0:  # the last step is done, here and hence in all processes
        shutil.rmtree(folder, ignore_errors=True)  # mostly there is none


def wanted(
    choice: bool | Literal["auto"],
    rows: Any,
    trunk: Trunk,
    run: Path,
    report: Callable[[str], None],
    processes: int = 1,
) -> bool:
    """Whether to keep states: as chosen, or "auto" where each row comes twice or more and the disk has room.

    Raises:
        UserError: it is chosen, and no row comes twice or the disk lacks room.
    """
    if choice is False:
        return False
    if not isinstance(rows, Epochs):
        if choice == "auto":
            return False
        raise UserError("cache_states=true with data.windows=random: no window comes twice; set data.windows=tiled")
    if choice == "auto" and len(rows) < 2 * rows.count:
        return False
    need = processes * rows.count * record_bytes(rows.block, trunk.hidden_size, trunk.dtype)
    if need <= ROOM * (free := _free(run)):
        return True
    lack = (
        f"the trunk's states of {rows.count:,} rows take {need / 2**20:,.0f} MiB, and of {free / 2**20:,.0f} MiB free"
        f" in {run} they may take {ROOM:.0%}"
    )
    if choice is True:
        raise UserError(f"{lack}: make room there, choose another --run, or set cache_states=false")
    report(f"states: {lack}: the trunk computes them in each epoch")
    return False


def _free(run: Path) -> int:
    """Bytes free where ``run`` is or will be; what an interrupted run has kept counts as free."""
    place = next(parent for parent in (run, *run.absolute().parents) if parent.exists())
    kept = sum(path.stat().st_blocks * 512 for path in (run / FOLDER).glob("*"))
    return shutil.disk_usage(place).free + kept
