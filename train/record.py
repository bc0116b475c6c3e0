"""The run folder's memory: run.json, which stages are made and with which settings, and what they were made by."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import medusa
from medusa.checkpoint import CALIBRATION, CONFIG, LOG, MANIFEST, RUN, TREE, WEIGHTS, read_manifest
from medusa.eagle import EagleConfig
from medusa.eagle_files import EAGLE, EAGLE_WEIGHTS, PLACE
from medusa.errors import UserError
from medusa.files import read_json, write_json, write_text
from medusa.machine import describe

from .checkpoints import FOLDER, Checkpoints, Saved, vanish, writing
from .config import TrainConfig, flatten
from .training import JointTraining

TRUNK = "trunk"  # the folder of a trunk made here
MEDUSA_1 = "medusa-1"  # that of the heads as they were before a joint stage, a checkpoint by itself
MERGED = "merged"  # that of the trunk as a joint stage leaves it
HELD = "continuations.safetensors"  # of held-out prompts, until the run is made
OWN = "own-text"  # the folder of the trunk's own text, as one of `medusa distill`
AGAIN = "make room there, and run the same command again"

LEFT = re.compile(r"\.(.+)\.[0-9a-f]{8}")  # how medusa.files names what is not whole yet

# In the order in which they run, with the files that each one leaves.
STAGES: dict[str, tuple[str, ...]] = {
    "trunk": (f"{TRUNK}/config.json", f"{TRUNK}/model.safetensors"),
    "text": (f"{OWN}/answers.jsonl", f"{OWN}/meta.json"),
    "heads": (MANIFEST, WEIGHTS, TREE),
    "joint": (f"{MERGED}/config.json", MANIFEST, WEIGHTS, TREE),
    "eagle": (f"{PLACE}/{EAGLE}", f"{PLACE}/{EAGLE_WEIGHTS}", f"{PLACE}/{TREE}"),
    "calibration": (TREE, CALIBRATION),
}
OPTIONAL = {
    "text": "--own_text.prompts",
    "heads": "--heads.kind",
    "joint": "--joint.steps",
    "eagle": "--eagle.version",
}
APART = {"heads": ("eagle",), "joint": ("eagle",)}  # stages that come later and do not rest on these


def resting(stage: str) -> list[str]:
    """A stage, and those after it that rest on it."""
    order = list(STAGES)
    return [later for later in order[order.index(stage) :] if later not in APART.get(stage, ())]


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
        for stage, way in OPTIONAL.items():
            if fresh == stage and getattr(config, way.removeprefix("--").partition(".")[0]) is None:
                raise UserError(f"`--fresh {stage}`: this recipe has no {stage} stage: give one by {way}, say")
        self._anew = set(resting(fresh)) if fresh else set[str]()

    def is_made(self, stage: str, settings: Mapping[str, Any]) -> bool:
        """Whether the stage's result is there and valid.

        Raises:
            UserError: it is there, but was made with other settings.
        """
        done = self.stages.get(stage)
        if stage in self._anew or done is None:
            return False
        if not (self._has(self._files(stage)) or self._has(STAGES[stage])):
            return False
        if stage == "calibration" and not self._covers(done["result"]):
            return False
        if change := difference(done["settings"], settings):
            raise UserError(
                f"{self.folder}: its {stage} stage was made with {change}: add `--fresh {stage}` to make it anew, or"
                " choose another folder with --run"
            )
        return self._has(self._files(stage))

    def is_anew(self, stage: str) -> bool:
        """Whether the stage is to be made anew, whatever is there."""
        return stage in self._anew

    @property
    def heads_folder(self) -> Path:
        """Where the heads stage's result goes: apart, if a joint stage follows it."""
        return self.folder if self.config.joint is None else self.folder / MEDUSA_1

    def _files(self, stage: str) -> tuple[str, ...]:
        """What the stage leaves in this run."""
        if stage == "calibration":
            of_heads = () if self.config.heads is None else STAGES[stage]
            return of_heads + (() if self.config.eagle is None else (f"{PLACE}/{TREE}", f"{PLACE}/{CALIBRATION}"))
        apart = stage == "heads" and self.config.joint is not None
        return tuple(f"{MEDUSA_1}/{name}" for name in STAGES[stage]) if apart else STAGES[stage]

    def _covers(self, trees: Mapping[str, Any]) -> bool:
        """Whether a calibration chose trees for all that drafts in this run."""
        config = self.config
        return (config.heads is None or "nodes" in trees) and (config.eagle is None or "eagle" in trees)

    def _has(self, files: tuple[str, ...]) -> bool:
        return all((self.folder / name).is_file() for name in files)

    def checkpoints(self, stage: str, keep: int = 1) -> Checkpoints:
        """Those of a stage that is under way."""
        return Checkpoints(self.folder / FOLDER / stage, keep)

    def resumable(self, stage: str, settings: Mapping[str, Any]) -> Saved | None:
        """The checkpoint to go on from; None if there is none, or the stage is to be made anew.

        Raises:
            UserError: it was made with other settings, or can't be read.
        """
        if stage in self._anew:
            return None
        saved = self.checkpoints(stage).newest()
        if saved is not None and (change := difference(saved.settings, settings)):
            raise UserError(
                f"{self.folder}: its {stage} stage was left at step {saved.step} with {change}: set that back to go on,"
                f" add `--fresh {stage}` to begin it anew, or choose another folder with --run"
            )
        return saved

    def begin(self, stage: str, saved: Saved | None = None) -> None:
        """Forget this stage, unless it goes on from ``saved``, and those that rest on it.

        Also writes down who makes it now, and clears what a killed process was writing.
        """
        self._anew.update(resting(stage))
        with self._writing():
            for later in resting(stage):
                self.stages.pop(later, None)
                if later != stage or saved is None:
                    self.checkpoints(later).remove()
            if stage == "trunk":
                vanish(self.folder / OWN)
            if stage == "eagle":
                (self.folder / PLACE).mkdir(parents=True, exist_ok=True)
                sweep(self.folder / PLACE)
            for folder in {self.folder, self.heads_folder}:
                folder.mkdir(parents=True, exist_ok=True)
                sweep(folder)
                write_text(folder / CONFIG, to_yaml(_anywhere(self.config)))
            self._write()

    def done(self, stage: str, settings: Mapping[str, Any], start: float, result: Mapping[str, Any]) -> None:
        """Note that the stage, begun at ``start`` of the performance counter, is made; from now on it is skipped."""
        self.stages[stage] = {
            "settings": _plain(settings),
            "seconds": round(time.perf_counter() - start, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "result": _plain(result),
        }
        with self._writing():
            self._write()
            self.checkpoints(stage).remove()

    def result(self, stage: str) -> dict[str, Any]:
        """What the stage found, for a stage that is made."""
        found: dict[str, Any] = self.stages[stage]["result"]
        return found

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"the run folder {self.folder}", "make room there, or choose another with --run")

    def content(self) -> dict[str, Any]:
        """What makes the run: versions, machine, git state and the configuration."""
        return {
            "versions": {"medusa": medusa.__version__},
            "machine": describe(),
            "git": git_state(Path(medusa.__file__).resolve().parent),
            "config": _plain(asdict(self.config)),
        }

    def _write(self) -> None:
        write_json(self.folder / RUN, self.content() | {"stages": self.stages})


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first setting that differs, with both values; empty if none does.

    One that ``old`` lacks came later than the result, which was made as by its default.
    """
    was, now = flatten(_plain(old)), flatten(_plain(new))
    was = {key: value for key, value in _defaults().items() if key in now} | was
    for key in [*now, *(key for key in was if key not in now)]:
        if was.get(key) != now.get(key):
            return f"{key}={was.get(key)}, now it is {now.get(key)}"
    return ""


def _defaults() -> dict[str, Any]:
    optional = {"joint": JointTraining(), "eagle": EagleConfig()}
    parts = {each.name: each.default_factory() for each in fields(TrainConfig) if each.default_factory is not MISSING}
    return flatten(_plain({name: asdict(part) for name, part in (parts | optional).items()}))


def sweep(folder: Path) -> None:
    """Remove what killed processes were writing when they were killed (see medusa.files)."""
    names = {CONFIG, RUN, LOG, HELD, *(Path(name).name for files in STAGES.values() for name in files)}
    for path in folder.glob(".*"):
        found = LEFT.fullmatch(path.name)
        if found and found[1] in names and path.is_file():
            path.unlink()


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
    """The configuration with absolute paths to its files, so that they can be found from any folder."""
    data = config.data
    source, tokenizer = _absolute(data.source), _absolute(data.tokenizer)
    path, template = data.path and _absolute(data.path), data.template and _absolute(data.template)
    data = replace(data, source=source, path=path, tokenizer=tokenizer, template=template)
    return replace(config, data=data, deepspeed=config.deepspeed and _absolute(config.deepspeed))


def _absolute(name: str) -> str:
    """A file's or folder's whole path; any other name, such as a hub id, stays."""
    place = Path(name).expanduser()
    return str(place.resolve()) if place.exists() else name


def _plain(value: Any) -> Any:
    """The value as JSON and YAML have it: tuples are lists."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
