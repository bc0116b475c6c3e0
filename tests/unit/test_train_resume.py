"""A stage that was broken off, in whatever way, goes on as if it had not been."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa.data.corpus import DataConfig, RandomBlocks
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.testing import tiny_trunk
from medusa.train import checkpoints, cli, follow, job, resumable
from medusa.train.config import (
    CalibrationConfig,
    EvaluationConfig,
    HeadsTraining,
    NewTrunk,
    TrainConfig,
    Training,
    TrunkConfig,
)
from medusa.train.interrupt import Interrupted
from medusa.train.loop import TrunkTrainer
from medusa.train.record import HELD, difference, to_yaml
from medusa.train.stages import train

TEXT = "the cat sat on the mat and a dog ran to the far end of it\n" * 60
MAKERS = {"trunk": "adamw", "heads": "muon"}, {"trunk": "muon", "heads": "adamw"}
WEIGHTS = {"trunk": "trunk/model.safetensors", "heads": "heads.safetensors"}


class Killed(BaseException):
    """Stands for SIGKILL where a process of its own would be too slow."""


def small(folder: Path, optimizers: dict[Any, Any], steps: int = 7, **common: Any) -> TrainConfig:
    """A run of about a second. Neither log nor evaluation nor checkpoints come at the same steps."""
    (folder / "text.txt").write_text(TEXT)
    common = {
        "steps": steps,
        "batch": 2,
        "log_every": 4,
        "eval_every": 2,
        "save_every": 3,
        "save_minutes": None,
    } | common
    return TrainConfig(
        str(folder / "run"),
        threads=1,
        data=DataConfig(source=str(folder / "text.txt"), tokenizer="char", block=16),
        trunk=TrunkConfig(new=NewTrunk(layers=1, hidden=16, heads=2, kv_heads=1, intermediate=24, context=64)),
        trunk_training=Training(optimizer=optimizers["trunk"], warmup=3, **common),
        heads=HeadsConfig(num=2),
        heads_training=HeadsTraining(optimizer=optimizers["heads"], lr=1e-2, warmup=3, **common),
        evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=8, tokens=12, nodes=4),
        calibration=CalibrationConfig(sizes=(1,), rounds=1),
    )


def quiet(line: str) -> None:
    """Says nothing."""


def events(config: TrainConfig) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (Path(config.run) / "train_log.jsonl").read_text().splitlines()]
    measured = ("tokens_per_second", "trunk_share", "peak_memory_mb")
    return [{key: value for key, value in event.items() if key not in measured} for event in found]


def saved(config: TrainConfig, stage: str) -> list[int]:
    """Steps of the checkpoints there are."""
    folder = Path(config.run) / checkpoints.FOLDER / stage
    return [int(path.name.partition("-")[2]) for path in checkpoints.Checkpoints(folder, 1).all()]


def assert_same(found: TrainConfig, wanted: TrainConfig) -> None:
    """The same log, to the bit and each line once; the same weights, tree and results; and nothing left lying about."""
    assert events(found) == events(wanted)
    for name in WEIGHTS.values():
        assert (Path(found.run) / name).read_bytes() == (Path(wanted.run) / name).read_bytes(), name
    results = [json.loads((Path(config.run) / "run.json").read_text())["stages"] for config in (found, wanted)]
    for stage in WEIGHTS:
        assert results[0][stage]["result"] == results[1][stage]["result"]
    names = [sorted(path.name for path in Path(config.run).iterdir()) for config in (found, wanted)]
    assert names[0] == names[1] and not any(name.startswith((".", "checkpoints")) for name in names[0])


@contextmanager
def at_step(stage: str, step: int, do: Callable[[], None]) -> Iterator[None]:
    """Do something when ``step`` steps of ``stage`` are done."""
    with pytest.MonkeyPatch.context() as patch:
        before = follow.Watch.on_step_end

        def on_step_end(self: follow.Watch, args: Any, state: Any, control: Any, **more: Any) -> None:
            before(self, args, state, control, **more)
            trains = "heads" if hasattr(self.trainer.model, "heads") else "trunk"
            if (trains, state.global_step) == (stage, step):
                do()

        patch.setattr(follow.Watch, "on_step_end", on_step_end)
        yield


def kill() -> None:
    raise Killed


def make(folder: Path, optimizers: dict[Any, Any]) -> TrainConfig:
    """A run that was never stopped in a stage; beside it a copy of the folder from when the heads had just begun."""
    config = small(folder, optimizers)
    with at_step("heads", 1, kill), pytest.raises(Killed):
        train(config, report=quiet)
    shutil.copytree(config.run, folder / "begun")
    train(config, report=quiet)
    return config


@pytest.fixture(scope="module", params=MAKERS, ids=lambda makers: f"{makers['trunk']}-{makers['heads']}")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that was never stopped."""
    return make(tmp_path_factory.mktemp("whole"), request.param)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The same for tests to which the optimizer doesn't matter."""
    return make(tmp_path_factory.mktemp("whole"), MAKERS[1])


def elsewhere(config: TrainConfig, folder: Path, stage: str = "trunk") -> TrainConfig:
    """The same run in another folder, in which the stages before ``stage`` are made."""
    if stage == "heads":
        shutil.copytree(Path(config.run).with_name("begun"), folder / "run")
    return replace(config, run=str(folder / "run"))


@pytest.mark.parametrize("stage", ["trunk", "heads"])
def test_killed_at_any_step_and_resumed_is_never_stopped(whole: TrainConfig, tmp_path: Path, stage: str) -> None:
    config = elsewhere(whole, tmp_path, stage)
    lines: list[str] = []
    for step in (2, 4, 5, 7):
        with at_step(stage, step, kill), pytest.raises(Killed):
            train(config, report=lines.append)
        assert saved(config, stage) == [at for at in (3, 6) if at < step]
    train(config, report=lines.append)
    assert sum(f"{stage}: goes on from step 6" in line for line in lines) == 1
    assert sum(f"{stage}: goes on from step 3" in line for line in lines) == 2
    assert_same(config, whole)


def test_continuations_are_made_once_and_kept_until_all_is_made(
    first: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = elsewhere(first, tmp_path, "heads")
    monkeypatch.setattr(job, "continuations", None)
    assert (Path(config.run) / HELD).is_file()
    train(config, report=quiet)
    assert_same(config, first)
    assert not (Path(config.run) / HELD).exists()


def test_accumulated_steps_resume_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    config = small(tmp_path / "a", MAKERS[1], accumulate=2)
    train(config, report=quiet)
    other = replace(config, run=str(tmp_path / "b" / "run"))
    for stage in WEIGHTS:
        with at_step(stage, 5, kill), pytest.raises(Killed):
            train(other, report=quiet)
    train(other, report=quiet)
    assert_same(other, config)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The usual ones, also where the tests run in the background, where Ctrl-C is ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("stage", ["trunk", "heads"])
def test_a_signal_saves_and_the_same_command_goes_on(
    first: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, number: int, code: int
) -> None:
    config = elsewhere(first, tmp_path, stage)
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text(to_yaml(config))
    before = signal.getsignal(number)
    with at_step(stage, 4, lambda: os.kill(os.getpid(), number)):
        assert cli.run("train", [str(recipe), "--fresh", stage, "--seed=0"]) == code
    assert signal.getsignal(number) is before
    # Asked at the end of step 4, hence after that step's say: the next one is finished.
    assert saved(config, stage)[-1] == 5
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"medusa: interrupted in stage {stage}, saved at step 5; go on with: medusa train '")
    assert last.endswith(" --seed=0") and "fresh" not in last
    assert cli.run("train", [str(recipe), "--resume"]) == 0
    assert_same(config, first)


def test_a_signal_that_is_ignored_stays_so(first: TrainConfig, tmp_path: Path, handlers: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and a shell's background do
    config = elsewhere(first, tmp_path, "heads")
    with at_step("heads", 4, lambda: os.kill(os.getpid(), signal.SIGINT)):
        train(config, report=quiet)
    assert_same(config, first)


@pytest.mark.parametrize(("step", "saved_at"), [(6, 7), (7, 6)], ids=["in it", "behind it"])
def test_a_signal_at_the_last_step_loses_nothing(first: TrainConfig, tmp_path: Path, step: int, saved_at: int) -> None:
    config = elsewhere(first, tmp_path)
    with at_step("trunk", step, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(Interrupted) as caught:
        train(config, report=quiet)
    assert (caught.value.stage, caught.value.step) == ("trunk", saved_at)
    train(config, report=quiet)
    assert_same(config, first)


def test_the_second_signal_does_not_wait(first: TrainConfig, tmp_path: Path) -> None:
    config = elsewhere(first, tmp_path)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with at_step("trunk", 4, twice), pytest.raises(Interrupted) as caught:
        train(config, report=quiet)
    assert caught.value.step is None and saved(config, "trunk") == [3]


def test_outside_of_the_steps_a_signal_ends_at_once(
    first: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("went on")

    config = elsewhere(first, tmp_path)
    monkeypatch.setattr("medusa.train.stages.new_model", stop)
    (tmp_path / "r.yaml").write_text(to_yaml(config))
    assert cli.run("train", [str(tmp_path / "r.yaml")]) == 143
    assert "between the steps of training; what is made is kept; go on with" in capsys.readouterr().err


DISK: dict[str, tuple[Any, str, Exception, str]] = {
    "weights": (resumable, "save_file", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
    "state": (resumable, "write_json", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
    "fsync": (os, "fsync", OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"),
    "rename": (os, "replace", OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system"),
    "optimizer": (
        torch,
        "save",
        RuntimeError("[enforce fail at inline_container.cc:1] . unexpected pos"),
        "unexpected",
    ),
}


# Both stages save by the same code.
@pytest.mark.parametrize(("stage", "fault"), [*(("heads", fault) for fault in DISK), ("trunk", "weights")])
def test_a_full_disk_is_told_and_what_was_saved_stays(
    first: TrainConfig, tmp_path: Path, stage: str, fault: str
) -> None:
    place, name, error, reason = DISK[fault]
    config = elsewhere(first, tmp_path, stage)
    with pytest.MonkeyPatch.context() as patch:

        def fail(*args: Any, **options: Any) -> None:
            raise error

        with at_step(stage, 5, lambda: patch.setattr(place, name, fail)), pytest.raises(UserError) as caught:
            train(config, report=quiet)
    message = str(caught.value)
    assert "\n" not in message and reason in message and "the checkpoint of step 6 can't be written to " in message
    assert "MiB are free" in message and "run the same command again" in message
    assert [path.name for path in (Path(config.run) / "checkpoints" / stage).iterdir()] == ["checkpoint-3"]
    train(config, report=quiet)
    assert_same(config, first)


def test_a_file_that_the_system_cuts_off_is_told(first: TrainConfig, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    config = elsewhere(first, tmp_path, "heads")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            at_step("heads", 5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))),
            pytest.raises(UserError, match="checkpoint of step 6 can't be written"),
        ):
            train(config, report=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saved(config, "heads") == [3]
    train(config, report=quiet)
    assert_same(config, first)


@pytest.mark.parametrize(
    ("stage", "name", "what"),
    [
        ("trunk", "stages.save_model", "the trunk"),
        ("heads", "heads.save_heads", "the heads"),
        ("heads", "draft_stage.save_tree", "the heads"),
        ("calibration", "stages.recalibrate", "the tree"),
    ],
)
def test_a_result_that_can_t_be_saved_is_told_and_the_checkpoint_stays(
    first: TrainConfig, tmp_path: Path, stage: str, name: str, what: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = elsewhere(first, tmp_path, stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"medusa.train.{name}", fail)
        message = rf"{what} can't be written to .*/run.* \(No space left on device; .*: make room there, and run"
        with pytest.raises(UserError, match=message):
            train(config, report=quiet)
    assert saved(config, stage) == ([] if stage == "calibration" else [3, 6])
    train(config, report=quiet)
    assert_same(config, first)


def test_a_line_of_the_log_cut_off_by_a_full_disk_is_dropped(first: TrainConfig, tmp_path: Path) -> None:
    config = elsewhere(first, tmp_path)
    log = Path(config.run) / "train_log.jsonl"
    with at_step("trunk", 5, kill), pytest.raises(Killed):
        train(config, report=quiet)
    with log.open("a") as file:
        file.write('{"stage": "trunk", "st')
    train(config, report=quiet)
    assert_same(config, first)


def test_a_log_that_can_t_be_written_is_told(first: TrainConfig, tmp_path: Path) -> None:
    config = elsewhere(first, tmp_path)
    log = Path(config.run) / "train_log.jsonl"

    def block() -> None:
        log.unlink()
        log.mkdir()

    message = r"train_log\.jsonl can't be written \(Is a directory\): make room and run the same command again"
    with at_step("trunk", 3, block), pytest.raises(UserError, match=message):
        train(config, report=quiet)
    with pytest.raises(UserError, match=message):  # nor can it be cut back
        train(config, report=quiet)


@pytest.fixture(scope="module")
def left(first: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run killed in the heads' stage, with two checkpoints."""
    config = elsewhere(first, tmp_path_factory.mktemp("left"), "heads")
    with at_step("heads", 7, kill), pytest.raises(Killed):
        train(config, report=quiet)
    assert saved(config, "heads") == [3, 6] and not saved(config, "trunk")
    return config


@pytest.fixture
def broken_off(left: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A copy of it."""
    shutil.copytree(left.run, tmp_path / "run")
    return replace(left, run=str(tmp_path / "run"))


def change(config: TrainConfig, **values: Any) -> TrainConfig:
    return replace(config, heads_training=replace(config.heads_training, **values))


def test_other_settings_than_the_checkpoint_s_are_refused_by_name(broken_off: TrainConfig) -> None:
    message = (
        r"run: its heads stage was left at step 6 with heads_training.lr=0.01, now it is 0.5: set that back to go on,"
        r" add `--fresh heads` to begin it anew, or choose another folder with --run$"
    )
    with pytest.raises(UserError, match=message):
        train(change(broken_off, lr=0.5), report=quiet)
    assert saved(broken_off, "heads") == [3, 6]


def test_a_setting_that_came_later_counts_as_its_default() -> None:
    old = {"heads_training": {"lr": 0.5}, "trunk": "abc"}
    assert difference(old, {"heads_training": {"lr": 0.5, "accumulate": 1}, "trunk": "abc"}) == ""
    assert difference(old, {"heads_training": {"lr": 0.5, "accumulate": 2}, "trunk": "abc"}) == (
        "heads_training.accumulate=1, now it is 2"
    )
    assert difference(old, {"heads_training": {}, "trunk": "abc"}) == "heads_training.lr=0.5, now it is None"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: give at least 1"),
        ({"accumulate": 3, "batch": 8}, "accumulate=3 does not divide batch=8"),
        ({"keep": 0}, "keep=0: give at least 1"),
        ({"save_every": 0}, "save_every=0: give at least 1, or null"),
        ({"save_minutes": 0}, "save_minutes=0: give more than 0, or null"),
    ],
)
def test_impossible_settings_are_told(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Training(**values)


def test_how_often_to_save_may_change(broken_off: TrainConfig, first: TrainConfig) -> None:
    lines: list[str] = []
    train(change(broken_off, save_every=1, save_minutes=1.0, keep=5), report=lines.append)
    assert any("goes on from step 6" in line for line in lines)
    train(change(broken_off, save_every=None, save_minutes=None), report=quiet)  # nor does it make a result another
    assert_same(broken_off, first)


@pytest.mark.parametrize("stage", ["trunk", "heads"])
def test_fresh_begins_anew(broken_off: TrainConfig, first: TrainConfig, stage: str) -> None:
    lines: list[str] = []
    train(broken_off, stage, report=lines.append)
    assert not any("goes on" in line for line in lines)
    assert_same(broken_off, first)


def test_a_trunk_made_anew_takes_no_old_heads(broken_off: TrainConfig) -> None:
    shutil.rmtree(Path(broken_off.run) / "trunk")
    with at_step("trunk", 1, kill), pytest.raises(Killed):
        train(broken_off, report=quiet)
    assert not saved(broken_off, "heads")


def test_a_checkpoint_holds_what_is_trained_and_no_more(broken_off: TrainConfig) -> None:
    folder = Path(broken_off.run) / "checkpoints" / "heads" / "checkpoint-6"
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "best.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "stage.json",
    }
    heads = load_file(Path(broken_off.run) / "checkpoints" / "heads" / "checkpoint-6" / "best.safetensors")
    assert load_file(folder / "model.safetensors").keys() == {f"heads.{name}" for name in heads}
    torch.load(folder / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "stage.json",
            "{",
            "stage.json is missing or broken: remove .*checkpoint-6 to go on from the checkpoint before",
        ),
        ("stage.json", '{"format": 99}', "checkpoint-6 is not of format 1"),
        ("stage.json", '{"format": 1, "steps": 2}', "other fields than this version writes"),
        ("model.safetensors", "x", "model.safetensors can't be read"),
    ],
)
def test_a_damaged_checkpoint_is_told_not_passed_over(
    broken_off: TrainConfig, first: TrainConfig, name: str, content: str, message: str
) -> None:
    folder = Path(broken_off.run) / "checkpoints" / "heads" / "checkpoint-6"
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        train(broken_off, report=quiet)
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    train(broken_off, report=quiet)
    assert_same(broken_off, first)


def test_weights_of_another_shape_are_told(broken_off: TrainConfig) -> None:
    path = Path(broken_off.run) / "checkpoints" / "heads" / "checkpoint-6" / "model.safetensors"
    weights = load_file(path)
    name = next(iter(weights))
    for wrong in (weights | {name: torch.zeros(1)}, weights | {"more": torch.zeros(1)}, {name: weights[name]}):
        save_file(wrong, path)
        with pytest.raises(UserError, match=r"model\.safetensors holds other weights than are trained here: remove"):
            train(broken_off, report=quiet)


def test_the_newest_is_the_one_with_most_steps(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-x1").mkdir()
    found = checkpoints.Checkpoints(tmp_path, 1).all()
    assert [path.name for path in found] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


def test_the_number_of_threads_and_the_time_taken_go_on(
    broken_off: TrainConfig, first: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(broken_off.run) / "checkpoints" / "heads" / "checkpoint-6" / "stage.json"
    content = json.loads(path.read_text())
    assert content["threads"] == {"steps": 1, "before": 1} and 0 <= content["seconds"] < 1000
    path.write_text(json.dumps(content | {"seconds": 1000.0}))
    timed: list[int] = []
    monkeypatch.setattr("medusa.train.job.pick_threads", lambda work: timed.append(1))
    train(replace(broken_off, threads="auto"), report=quiet)
    assert len(timed) == 1  # before calibration, which no checkpoint holds
    assert json.loads((Path(broken_off.run) / "run.json").read_text())["stages"]["heads"]["seconds"] >= 1000
    assert_same(broken_off, first)


def test_random_states_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    def run(folder: Path, stop: int | None, saved: checkpoints.Saved | None = None) -> list[float]:
        torch.manual_seed(1)
        model = tiny_trunk("llama", dtype=torch.float32).model.requires_grad_(True)
        for layer in model.model.layers:
            layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
        training = Training(steps=4, batch=2, log_every=1, save_every=2)
        tokens = torch.randint(65, (99,), generator=torch.Generator().manual_seed(0))
        rows = RandomBlocks(tokens, torch.zeros_like(tokens), 8, 8, 0)
        trainer = TrunkTrainer(model, rows, training, seed=0, device=torch.device("cpu"))
        trainer.store = checkpoints.Checkpoints(folder, 1)
        trainer.notes = lambda: {"settings": {}, "seconds": 0.0, "threads": {}}
        written: list[float] = []

        def write(step: int, figures: dict[str, Any]) -> None:
            if "loss" in figures:
                written.append(figures["loss"])
            if step == stop:
                raise Killed

        if stop is None:
            follow.follow(trainer, "trunk", lambda step: {}, write, saved=saved)
        else:
            with pytest.raises(Killed):
                follow.follow(trainer, "trunk", lambda step: {}, write)
        return written

    whole = run(tmp_path / "a", None)
    part = run(tmp_path / "b", 3)
    assert whole[:3] == part
    rest = run(tmp_path / "b", None, checkpoints.Checkpoints(tmp_path / "b", 1).newest())
    assert rest == whole[2:]


def test_the_last_n_are_kept(first: TrainConfig, tmp_path: Path) -> None:
    config = elsewhere(change(first, save_every=1, keep=3), tmp_path, "heads")
    with at_step("heads", 7, kill), pytest.raises(Killed):
        train(config, report=quiet)
    assert saved(config, "heads") == [4, 5, 6]


def test_killed_while_old_checkpoints_are_removed(
    first: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = elsewhere(change(first, save_every=1, keep=1), tmp_path, "heads")
    folder = Path(config.run) / "checkpoints" / "heads"
    real = shutil.rmtree

    def half(path: Path, *args: Any, **options: Any) -> None:
        if "checkpoint-2" in path.name:
            (path / "stage.json").unlink()
            raise Killed
        real(path, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", half)
        train(config, report=quiet)
    assert saved(config, "heads") == [3] and len(list(folder.iterdir())) == 2
    with at_step("heads", 5, kill), pytest.raises(Killed):
        train(config, report=quiet)
    assert [path.name for path in folder.iterdir()] == ["checkpoint-4"]
    (folder.parent / ".old.heads" / "x").mkdir(parents=True)  # killed while all were being removed
    train(config, report=quiet)
    assert_same(config, first)


def test_minutes_alone_bring_checkpoints(first: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))  # minutes: each look at the clock is one later, and a save looks too
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr(follow, "time", clock)
    config = elsewhere(change(first, save_every=None, save_minutes=2.0, keep=9), tmp_path, "heads")
    with at_step("heads", 7, kill), pytest.raises(Killed):
        train(config, report=quiet)
    assert saved(config, "heads") == [2, 4, 6]


def test_files_have_the_user_s_mode_and_killed_processes_leave_nothing(first: TrainConfig, tmp_path: Path) -> None:
    config = elsewhere(first, tmp_path)
    run = Path(config.run)
    (run / ".trunk.new" / "made").mkdir(parents=True)
    (run / ".heads.safetensors.0123abcd").touch()
    own = [run / ".own", run / ".own.0123abcd"]
    for path in own:
        path.touch()
    before = os.umask(0o027)
    try:
        with at_step("heads", 5, kill), pytest.raises(Killed):
            train(config, report=quiet)
        (run / "checkpoints" / "heads" / ".new" / "checkpoint-5").mkdir(parents=True)
        found = [path for path in run.rglob("*") if path.name != ".heads.safetensors.0123abcd"]
        wrong = [path for path in found if path.stat().st_mode & 0o777 != (0o750 if path.is_dir() else 0o640)]
        assert sorted(wrong) == own
        train(config, report=quiet)
    finally:
        os.umask(before)
    assert sorted(run.glob(".*")) == own
    for path in own:
        path.unlink()
    assert_same(config, first)


def test_checkpoints_left_by_a_kill_at_the_very_end_are_removed(first: TrainConfig, tmp_path: Path) -> None:
    shutil.copytree(first.run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "heads" / "checkpoint-6").mkdir(parents=True)
    config = replace(first, run=str(tmp_path / "run"))
    train(config, report=quiet)
    assert_same(config, first)


def test_resume_refuses_to_begin(first: TrainConfig, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(to_yaml(first))
    with pytest.raises(UserError, match=r"--resume: .*/elsewhere holds no run\.json, hence no run: give its folder"):
        cli.read_config([str(recipe), f"--run={tmp_path / 'elsewhere'}", "--resume"])
    with pytest.raises(UserError, match="--resume goes on and `--fresh heads` begins anew: give one of them"):
        cli.read_config([str(recipe), "--resume", "--fresh", "heads"])


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["x", "--fresh", "heads", "--seed", "1"], "medusa train x --seed 1"),
        (["x", "--fresh=heads"], "medusa train x"),
        (["x", "--fresh", "--run", "heads"], "medusa train x --run heads"),
        (["a b.yaml", "--resume"], "medusa train 'a b.yaml' --resume"),
    ],
)
def test_the_command_that_goes_on(argv: list[str], command: str) -> None:
    assert cli.again(argv) == command


# SIGKILL itself, in processes of their own. The server that they are forked from imports once, and runs nothing.


def process(config: TrainConfig, *doom: float | int | None) -> Any:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["medusa.train.stages"])
    started = context.Process(target=doomed if doom else train_quietly, args=(config, *doom))
    started.start()
    return started


def train_quietly(config: TrainConfig) -> None:
    train(config, report=quiet)


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(config: TrainConfig, delay: float | None, files: int | None) -> None:
    """Train until SIGKILL, which comes ``delay`` seconds after the first step, or when the next checkpoint's folder is
    full and so many of its files are on the disk. It comes from within, hence on a busy machine too, and at the last
    step at the latest: such a process can't end by itself."""
    left = itertools.count(files, -1) if files is not None else None
    to_disk, on_step_end = checkpoints.to_disk, follow.Watch.on_step_end
    begun = threading.Event()

    def counted(path: Path) -> None:
        if left is not None and next(left) == 0:
            sigkill()
        to_disk(path)

    def timed(self: follow.Watch, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        if delay is not None and not begun.is_set():
            begun.set()
            threading.Timer(delay, sigkill).start()

    checkpoints.to_disk, follow.Watch.on_step_end = counted, timed  # type: ignore[assignment, method-assign]
    with at_step("heads", config.heads_training.steps, sigkill):
        train_quietly(config)


@pytest.mark.slow
def test_sigkill_at_random_moments_and_in_the_middle_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where the processes find this file as ``tests.unit``
    (tmp_path / "a").mkdir()
    wanted = small(tmp_path / "a", MAKERS[1], steps=40)
    train(wanted, report=quiet)
    config = replace(wanted, run=str(tmp_path / "b"))
    chance, in_mid_save = random.Random(0), []
    for kills in range(6):
        timed = kills % 2 == 0
        child = process(config, chance.uniform(0, 0.1) if timed else None, None if timed else chance.randrange(5))
        child.join()
        assert child.exitcode == -signal.SIGKILL, f"ended by itself after {kills} kills"
        in_mid_save.append(any((Path(config.run) / checkpoints.FOLDER).glob("*/.new/checkpoint-*")))
    assert any(in_mid_save[1::2])
    last = process(config)
    last.join()
    assert last.exitcode == 0
    assert_same(config, wanted)
