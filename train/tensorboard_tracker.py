"""The log for TensorBoard: event files in a folder per stage, so that each counts its own steps.

A stage that is gone on with says so in its file: TensorBoard then drops what is there of later steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.curves import Event, is_number, stages
from medusa.plots import pixels

from .tracking import needed, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = "tensorboard"  # in the run folder


class TensorBoardTracker:
    """Writes with torch's own writer.

    Raises:
        UserError: the package is missing.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder / FOLDER, dict(settings)
        self._writer: Any = None
        with needed("tensorboard", "tracking.tensorboard=true"):
            from torch.utils.tensorboard import SummaryWriter
        self._open = SummaryWriter

    def begin(self, stage: str, step: int, kept: Sequence[Event]) -> None:
        """Clear what holds no longer, and write what was logged while nothing went here."""
        self.close(failed=False)
        there = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        for gone in there - {*stages(kept), *([stage] if step >= 0 else [])}:
            shutil.rmtree(self.folder / gone)
            there.remove(gone)
        for other in [*(each for each in stages(kept) if each != stage), stage]:
            if other in there and other != stage:
                continue
            self.close(failed=False)
            self._writer = self._open(str(self.folder / other), purge_step=step + 1 if other in there else None)
            if other not in there:
                self._catch_up(other, kept)
        for name, value in self.settings.items():
            self._text(name, value, step)

    def _catch_up(self, stage: str, kept: Sequence[Event]) -> None:
        for event in kept:
            if event["stage"] == stage:
                self.write(stage, event["step"], {key: event[key] for key in event if key not in ("stage", "step")})

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Add numbers, and see that they are in the file."""
        for key, value in spread(values):
            if is_number(value):
                self._writer.add_scalar(f"{stage}/{key}", value, step)
        self._writer.flush()

    def picture(self, stage: str, step: int, name: str, figure: Figure) -> None:
        """Add a picture."""
        self._writer.add_image(f"{stage}/{name}", pixels(figure), step, dataformats="HWC")
        self._writer.flush()

    def tell(self, name: str, value: str) -> None:
        """A text more, from the next stage on."""
        self.settings[name] = value

    def _text(self, name: str, value: Any, step: int) -> None:
        content = value if isinstance(value, str) else json.dumps(value, indent=2)
        self._writer.add_text(name, f"```\n{content}\n```", max(step, 0))

    def close(self, failed: bool) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
