"""What a benchmark is made of, a run, heads alone or a plain trunk, and where its report goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.checkpoint import CONFIG
from medusa.trunk import Trunk

from ..drafters import has_drafts
from ..source import find, is_ours, load_trunk
from .prompt_sets import HELDOUT, SPEC
from .report import check_writable

TRIAL = [0] * 16  # ids on which the number of threads is tried


@dataclass(frozen=True)
class Subject:
    """``source`` as it was named, its ``folder`` (None: a hub id without drafts), and the report's, ``target``."""

    source: str
    folder: Path | None
    target: Path

    @classmethod
    def of(cls, source: str, out: str | None, inside: str, beside: str) -> Subject:
        """Find ``source``. Its report goes to ``out``; left out, to ``inside`` in a run, else to ``beside``-NAME here.

        Raises:
            UserError: no such source, or no report can be written there, before minutes of measuring.
        """
        folder, run = find(source, None), Path(source).expanduser()
        usual = run / inside if is_ours(run) else Path(f"{beside}-{(folder or run).resolve().name}")
        target = Path(out).expanduser() if out else usual
        check_writable(target, "name another folder with --out")
        return cls(source, folder, target)

    @property
    def drafts(self) -> bool:
        """Whether it has heads or an EAGLE layer."""
        return has_drafts(self.folder)

    @property
    def prompt_set(self) -> str:
        """What it is measured on where nothing is named: a run's held-out text, else the questions."""
        return HELDOUT if self.folder is not None and (self.folder / CONFIG).is_file() else SPEC

    def load(self, **how: Any) -> Trunk:
        """Its trunk; ``how`` goes to ``Trunk.load``."""
        if self.folder is not None and self.drafts:
            return load_trunk(self.folder, **how)
        return Trunk.load(self.folder or self.source, **how)
