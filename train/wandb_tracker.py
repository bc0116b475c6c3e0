"""The log in Weights & Biases, as one run however often it was interrupted.

Its rows have a step that only grows: the optimizer steps of all stages, one after the other. Each process of a run
writes a file of its own, in blocks of 32 KiB, so one that is killed loses the last of them. What the files hold is
therefore read, not remembered: the next process sends what they lack, and nothing that they have.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medusa.curves import Event, stages
from medusa.errors import UserError
from medusa.files import read_json, write_json
from medusa.plots import pixels

from .config import TrackingConfig
from .tracking import needed, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IDENTITY = "tracking.json"  # the run's id there, in the run folder
HEADER, BLOCK, WHOLE, LAST = 7, 32768, 1, 4  # of its files: LevelDB's log format behind a header of seven bytes


class WandbTracker:
    """Begins when the first stage does: a run of which all is made adds nothing.

    Raises:
        UserError: the package is missing, or the key.
    """

    def __init__(self, folder: Path, config: TrackingConfig, settings: Mapping[str, Any]) -> None:
        self.folder, self.config = folder, config
        # The configuration as such, for its keys to be sorted by and compared; the rest beside it.
        self.settings = {**settings.get("config", {}), **{key: settings[key] for key in settings if key != "config"}}
        self._run: Any = None
        self._identity = ""
        self._known: set[tuple[str, int]] = set()  # figures that were sent: name and step there
        self._before: dict[str, int] = {}  # steps of the stages before each
        self._check()

    def _check(self) -> None:
        with needed("wandb", f"tracking.wandb={self.config.wandb}"):
            import wandb
        if self.config.wandb == "online" and not wandb.api.api_key:  # it would stop the training to ask, or fail
            raise UserError("tracking.wandb=online finds no key: run `wandb login`, or use tracking.wandb=offline")

    def begin(self, stage: str, step: int, kept: Sequence[Event]) -> None:
        """Go on with the run, or begin another where rows that were sent hold no longer: none can be taken back."""
        if not self._identity:
            self._recall()
        still = {*stages(kept), *([stage] if step >= 0 else [])}
        if {name.partition("/")[0] for name, _ in self._known} - still:
            self.close(failed=False)
            self._identity, self._known = "", set()
        if self._run is None:
            self._run = self._start()
        self._before = _offsets([*stages(kept), stage], kept)
        for name in self._before:  # each stage counts its own steps
            self._run.define_metric(f"{name}/*", step_metric=f"{name}/step")
        for event in kept:
            self.write(
                event["stage"], event["step"], {key: event[key] for key in event if key not in ("stage", "step")}
            )

    def _recall(self) -> None:
        if (self.folder / IDENTITY).is_file():
            self._identity = read_json(self.folder / IDENTITY).get("wandb", "")
            for path in self.folder.glob(f"wandb/*run-*-{self._identity}/run-{self._identity}.wandb"):
                self._known |= sent(path)

    def _start(self) -> Any:
        import wandb

        mode: Literal["offline", "online"] = "online" if self.config.wandb == "online" else "offline"
        self._identity = self._identity or secrets.token_hex(4)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / IDENTITY, {"wandb": self._identity})
            return wandb.init(
                project=self.config.project,
                name=self.folder.name,
                dir=str(self.folder),
                id=self._identity,
                resume="allow",
                mode=mode,
                config=self.settings,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except (OSError, wandb.errors.Error) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"tracking.wandb={mode} can't start ({reason}): use offline or off") from error

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Send what the run does not have."""
        named = {f"{stage}/{key}": value for key, value in spread({"step": step, **values})}
        self._send(named, self._before[stage] + step)

    def picture(self, stage: str, step: int, name: str, figure: Figure) -> None:
        """Beside the last row."""
        import wandb

        self._send({f"{stage}/{name}": wandb.Image(pixels(figure))}, self._before[stage] + step)

    def _send(self, named: Mapping[str, Any], at: int) -> None:
        new = {name: value for name, value in named.items() if (name, at) not in self._known}
        if new:
            self._known |= {(name, at) for name in new}
            self._run.log(new, step=at)

    def tell(self, name: str, value: str) -> None:
        """A setting more."""
        self.settings[name] = value
        if self._run is not None:
            self._run.config.update({name: value}, allow_val_change=True)

    def close(self, failed: bool) -> None:
        """Finish; what is written may reach the disk a moment later."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


def _offsets(order: Sequence[str], kept: Sequence[Event]) -> dict[str, int]:
    """How many steps the stages before each have taken."""
    before, total = {}, 0
    for stage in dict.fromkeys(order):
        before[stage] = total
        total += max((event["step"] for event in kept if event["stage"] == stage), default=0)
    return before


def sent(path: Path) -> set[tuple[str, int]]:
    """The figures that a file of Weights & Biases holds: their names and steps."""
    from wandb.proto import wandb_internal_pb2

    found = set()
    for content in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or item.nested_key[0]  # below it, of a picture, are its parts
                found.add((name, record.history.step.num))
    return {(name, step) for name, step in found if not name.startswith("_")}  # wandb's own


def records(content: bytes) -> Iterator[bytes]:
    """The whole records of such a file, up to where a killed process broke off."""
    at, record = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # too little room for another: filled with zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        part = content[at + HEADER : at + HEADER + length]
        if not kind or len(part) < length:
            return
        record += part
        if kind in (WHOLE, LAST):
            yield record
            record = b""
        at += HEADER + length
