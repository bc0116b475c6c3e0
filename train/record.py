"""The run folder's memory: run.json, which stages are made and with which settings, and what they were made by."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import medusa
from medusa.checkpoint import CALIBRATION, CONFIG, MANIFEST, RUN, TREE, WEIGHTS, read_manifest
from medusa.errors import UserError
from medusa.files import read_json, write_json, write_text
from medusa.machine import describe

from .config import TrainConfig, flatten

TRUNK = "trunk"  # the folder of a trunk made here

# In the order in which they run, with the files that each one leaves.
STAGES: dict[str, tuple[str, ...]] = {
    "trunk": (f"{TRUNK}/config.json", f"{TRUNK}/model.safetensors"),
    "heads": (MANIFEST, WEIGHTS, TREE),
    "calibration": (TREE, CALIBRATION),
}


class RunRecord:
    """What has been made in a run folder.

    Args:
        config: the run's configuration.
        fresh: make this stage and those after it anew, whatever is there.

    Raises:
        UserError: the folder can't be made, or its run.json can't be read.
    """

    def __init__(self, config: TrainConfig, fresh: str | None = None) -> None:
        self.config = config
        self.folder = Path(config.run).expanduser()
        self.stages: dict[str, dict[str, Any]] = {}
        if (self.folder / RUN).exists():
            self.stages = read_json(self.folder / RUN).get("stages", {})
        elif (self.folder / MANIFEST).exists() and not fresh:
            raise UserError(
                f"{self.folder} holds heads for trunk {read_manifest(self.folder).trunk} that no {RUN} tells the making"
                " of: choose another folder with --run, or replace them with `--fresh heads`"
            )
        self._order = list(STAGES)
        self._anew = self._order.index(fresh) if fresh else len(STAGES)

    def is_made(self, stage: str, settings: Mapping[str, Any]) -> bool:
        """Whether the stage's result is there and valid.

        Raises:
            UserError: it is there, but was made with other settings.
        """
        done = self.stages.get(stage)
        if self._order.index(stage) >= self._anew or done is None:
            return False
        if not all((self.folder / name).is_file() for name in STAGES[stage]):
            return False
        old, new = flatten(done["settings"]), flatten(_plain(settings))
        for key in [*new, *(key for key in old if key not in new)]:
            if old.get(key) != new.get(key):
                raise UserError(
                    f"{self.folder}: its {stage} stage was made with {key}={old.get(key)}, now it is {new.get(key)}:"
                    f" add `--fresh {stage}` to make it anew, or choose another folder with --run"
                )
        return True

    def begin(self, stage: str) -> None:
        """Forget this stage and those after it, which rest on it, and write down who makes it now."""
        start = self._order.index(stage)
        self._anew = min(self._anew, start)
        for later in self._order[start:]:
            self.stages.pop(later, None)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / CONFIG, to_yaml(_anywhere(self.config)))
            self._write()
        except OSError as error:
            raise UserError(
                f"the run folder {self.folder} can't be written ({error.strerror}): choose another with --run"
            ) from error

    def done(self, stage: str, settings: Mapping[str, Any], start: float, result: Mapping[str, Any]) -> None:
        """Note that the stage, begun at ``start`` of the performance counter, is made; from now on it is skipped."""
        self.stages[stage] = {
            "settings": _plain(settings),
            "seconds": round(time.perf_counter() - start, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "result": _plain(result),
        }
        self._write()

    def result(self, stage: str) -> dict[str, Any]:
        """What the stage found, for a stage that is made."""
        found: dict[str, Any] = self.stages[stage]["result"]
        return found

    def _write(self) -> None:
        content = {
            "versions": {"medusa": medusa.__version__},
            "machine": describe(),
            "git": git_state(Path(medusa.__file__).resolve().parent),
            "config": _plain(asdict(self.config)),
            "stages": self.stages,
        }
        write_json(self.folder / RUN, content)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether files differ from it, of the checkout that ``folder`` is in; None outside of one."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None  # no git, no checkout, or one without a commit: nothing to record


def _git(folder: Path, *args: str) -> str:
    command = ["git", "-C", str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def to_yaml(config: TrainConfig) -> str:
    """The whole configuration as a recipe that gives it again."""
    import yaml

    text: str = yaml.safe_dump(_plain(asdict(config)), sort_keys=False)
    return text


def _anywhere(config: TrainConfig) -> TrainConfig:
    """The configuration with absolute paths to the text, so that it can be found from any folder."""
    data = config.data
    path = data.path and _absolute(data.path)
    return replace(
        config, data=replace(data, source=_absolute(data.source), path=path, tokenizer=_absolute(data.tokenizer))
    )


def _absolute(name: str) -> str:
    """A file's or folder's whole path; any other name, such as a hub id, stays."""
    place = Path(name).expanduser()
    return str(place.resolve()) if place.exists() else name


def _plain(value: Any) -> Any:
    """The value as JSON and YAML have it: tuples are lists."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
