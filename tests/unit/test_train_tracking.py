"""The log of a run, and Weights & Biases and TensorBoard beside it, read back from their files."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from medusa.errors import UserError
from medusa.plots import acceptance
from medusa.train.config import TrackingConfig
from medusa.train.tracking import RunLog, run_log

from .wandb_records import config_of, is_whole, read_records, rows_of, run_of


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]


def test_each_event_is_on_disk_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("heads", 5, {"loss": 1.5, "top1": [0.1, 0.2]})
    assert lines(tmp_path) == [{"stage": "heads", "step": 5, "loss": 1.5, "top1": [0.1, 0.2]}]
    log.write("heads", 10, {"loss": 1.25})
    assert [event["step"] for event in lines(tmp_path)] == [5, 10]


def test_a_stage_begun_again_drops_its_own_lines_only(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.begin("trunk")
    log.write("trunk", 1, {})
    log.write("heads", 1, {})
    log.begin("heads")
    assert lines(tmp_path) == [{"stage": "trunk", "step": 1}]


def test_off_does_not_import_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    with run_log(tmp_path, TrackingConfig(), {}) as log:
        log.write("heads", 1, {})


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = r"tracking.wandb=offline needs the package 'wandb': pip install 'medusa-decoding\[train\]'"
    with pytest.raises(UserError, match=message), run_log(tmp_path / "run", TrackingConfig("offline"), {}):
        pass
    assert not (tmp_path / "run").exists()


def test_online_without_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with (
        pytest.raises(UserError, match="online finds no key: run `wandb login`"),
        run_log(tmp_path / "run", TrackingConfig("online"), {}),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_stage_gone_on_with_keeps_its_lines_up_to_that_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for stage, step in (("trunk", 9), ("heads", 2), ("heads", 4), ("heads", 4), ("heads", 5)):
        log.write(stage, step, {})
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"stage": "heads", "step"')  # a kill in the middle of a line
    log.begin("heads", 4)
    assert [(event["stage"], event["step"]) for event in lines(tmp_path)] == [
        ("trunk", 9),
        ("heads", 2),
        ("heads", 4),
        ("heads", 4),
    ]
    log.write("heads", 5, {"loss": 1.0})
    assert lines(tmp_path)[-1] == {"stage": "heads", "step": 5, "loss": 1.0}
    log.begin("heads")
    assert [event["stage"] for event in lines(tmp_path)] == ["trunk"]


def identity(folder: Path) -> str:
    found: str = json.loads((folder / "tracking.json").read_text())["wandb"]
    return found


def spread(event: dict[str, Any]) -> dict[str, float]:
    """The figures of a line of the log, as the trackers name them."""
    flat = {}
    for key in event.keys() - {"stage", "step"}:
        parts = event[key] if isinstance(event[key], list) else None
        named = {f"{key}/{index}": part for index, part in enumerate(parts)} if parts is not None else {key: event[key]}
        flat |= {f"{event['stage']}/{name}": value for name, value in named.items()}
    return flat


def logged(folder: Path) -> list[tuple[str, int, float]]:
    """Every figure of the log: its name, the step of its stage, and its value."""
    return sorted((name, event["step"], value) for event in lines(folder) for name, value in spread(event).items())


def wandb_files(folder: Path, last: int = 0) -> list[Path]:
    """The files of all processes, oldest first, once they are whole, or once the ``last`` ones are."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 30
    while not all(map(is_whole, files[-last:])):
        assert time.monotonic() < deadline, files
        time.sleep(0.05)
    return files


def in_wandb(files: list[Path]) -> list[tuple[str, int, float]]:
    """Every figure in the files, with the step of its stage."""
    found = []
    for file in files:
        for row in rows_of(read_records(file, torn=True)):
            steps = {key.partition("/")[0]: value for key, value in row.items() if key.endswith("/step")}
            for name, value in row.items():
                if name != "_step" and not name.endswith("/step"):
                    found.append((name, steps[name.partition("/")[0]], value))
    return sorted(found)


def in_tensorboard(folder: Path) -> list[tuple[str, int, float]]:
    """Every figure that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for stage in (folder / "tensorboard").iterdir():
        events = EventAccumulator(str(stage), size_guidance={"scalars": 0}).Reload()
        found += [(tag, each.step, each.value) for tag in events.Tags()["scalars"] for each in events.Scalars(tag)]
    return sorted(found)


def rounded(figures: list[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """As single precision has them, in which TensorBoard's are kept."""
    return [(name, step, struct.unpack("f", struct.pack("f", value))[0]) for name, step, value in figures]


def next_second() -> None:
    """Wandb names its folders by the second; two processes of one run are always further apart."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.02)


def some_steps(log: RunLog, stage: str, steps: range) -> None:
    for step in steps:
        if step % 2 == 0:
            log.write(stage, step, {"tokens_per_step": 1 + step / 7, "acceptance": [0.5, step / 100]})
        log.write(stage, step, {"loss": 1 / step, "top1": [step / 9, step / 11]})


SETTINGS = {
    "config": {"seed": 17, "heads": {"num": 4}},
    "git": {"commit": "abc", "dirty": True},
    "versions": {"x": "1"},
}


def test_offline_leaves_the_configuration_and_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with run_log(tmp_path / "run", TrackingConfig("offline", "proj"), SETTINGS) as log:
        log.begin("trunk")
        some_steps(log, "trunk", range(1, 6))
        log.tell("fingerprint", "f00")
        log.begin("heads")
        some_steps(log, "heads", range(1, 400))  # more than a block of the file
    (file,) = wandb_files(tmp_path / "run")
    records = read_records(file)
    assert file.stat().st_size > 32 * 1024
    assert config_of(records) == {
        "seed": 17,
        "heads": {"num": 4},
        "git": {"commit": "abc", "dirty": True},
        "versions": {"x": "1"},
        "fingerprint": "f00",
    }
    assert (run_of(records).project, run_of(records).display_name) == ("proj", "run")
    assert in_wandb([file]) == logged(tmp_path / "run")
    steps = [row["_step"] for row in rows_of(records)]
    assert steps == sorted(set(steps)) and steps[-1] == 5 + 399  # the stages follow each other


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_gone_on_with_is_one_run_with_each_step_once(tmp_path: Path, killed: bool) -> None:
    pytest.importorskip("wandb")
    config = TrackingConfig("offline", tensorboard=True)
    with pytest.raises(KeyboardInterrupt), run_log(tmp_path, config, SETTINGS) as log:
        log.begin("trunk")
        some_steps(log, "trunk", range(1, 5))
        log.begin("heads")
        some_steps(log, "heads", range(1, 8))
        raise KeyboardInterrupt
    (first,) = wandb_files(tmp_path)
    if killed:  # what the process had not written yet is missing, from the middle of a record on
        content = first.read_bytes()
        first.write_bytes(content[: content.index(b"heads/top1/1") + 5])
        assert 0 < len(in_wandb([first])) < len(logged(tmp_path))
    next_second()
    with run_log(tmp_path, config, SETTINGS) as log:
        log.begin("heads", 4)  # the last checkpoint: 5, 6 and 7 are made again
        some_steps(log, "heads", range(5, 11))
        log.begin("calibration")
    files = wandb_files(tmp_path, last=1)
    assert len(files) == 2 and {run_of(read_records(file, torn=True)).run_id for file in files} == {identity(tmp_path)}
    assert in_wandb(files) == logged(tmp_path)
    steps = [row["_step"] for row in rows_of(read_records(files[1]))]
    assert steps == sorted(set(steps)) and steps[-1] == 4 + 10
    assert in_tensorboard(tmp_path) == rounded(logged(tmp_path))


def test_a_stage_made_anew_is_another_run_that_has_the_stages_before_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = TrackingConfig("offline", tensorboard=True)
    with run_log(tmp_path, config, SETTINGS) as log:
        log.begin("trunk")
        some_steps(log, "trunk", range(1, 5))
        log.begin("heads")
        some_steps(log, "heads", range(1, 8))
        log.begin("calibration")
        log.pictures("calibration", 0, lambda: {"by_depth": acceptance([0.5])})
    before = identity(tmp_path)
    with run_log(tmp_path, config, SETTINGS) as log:
        log.begin("heads")
        some_steps(log, "heads", range(1, 4))
    assert identity(tmp_path) != before
    (file,) = (file for file in wandb_files(tmp_path) if identity(tmp_path) in file.name)
    assert in_wandb([file]) == logged(tmp_path)
    assert in_tensorboard(tmp_path) == rounded(logged(tmp_path))
    assert {path.name for path in (tmp_path / "tensorboard").iterdir()} == {"trunk", "heads"}


def test_tracking_that_begins_late_catches_up(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with run_log(tmp_path, TrackingConfig(), SETTINGS) as log:
        log.begin("trunk")
        some_steps(log, "trunk", range(1, 5))
        log.begin("heads")
        some_steps(log, "heads", range(1, 8))
    with run_log(tmp_path, TrackingConfig("offline", tensorboard=True), SETTINGS) as log:
        log.begin("heads", 4)
        some_steps(log, "heads", range(5, 8))
    assert in_wandb(wandb_files(tmp_path)) == logged(tmp_path)
    assert in_tensorboard(tmp_path) == rounded(logged(tmp_path))


def test_where_no_stage_begins_nothing_is_left(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with run_log(tmp_path / "run", TrackingConfig("offline", tensorboard=True), SETTINGS):
        pass
    assert not (tmp_path / "run").exists()


def test_pictures_go_to_both_and_are_drawn_for_them_alone(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drawn: list[str] = []

    def draw() -> dict[str, Any]:
        drawn.append("once")
        return {"by_depth": acceptance([0.5, 0.25])}

    RunLog(tmp_path).pictures("heads", 3, draw)
    assert drawn == []
    with run_log(tmp_path, TrackingConfig("offline", tensorboard=True), SETTINGS) as log:
        log.begin("heads")
        some_steps(log, "heads", range(1, 4))
        log.pictures("heads", 3, draw)
    assert drawn == ["once"]
    (file,) = wandb_files(tmp_path)
    (row,) = (row for row in rows_of(read_records(file)) if "heads/by_depth/path" in row)
    assert row["heads/step"] == 3 and (file.parent / "files" / row["heads/by_depth/path"]).is_file()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "heads")).Reload()
    (image,) = events.Images("heads/by_depth")
    assert image.step == 3 and image.encoded_image_string.startswith(b"\x89PNG")
    assert {"config/text_summary", "git/text_summary"} <= set(events.Tags()["tensors"])
    assert b"abc" in events.Tensors("git/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.parametrize("package", ["tensorboard", "matplotlib"])
def test_tensorboard_without_a_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or "utils.tensorboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"tracking.tensorboard=true needs the package '{package}': pip install 'medusa-decoding\[train\]'"
    with pytest.raises(UserError, match=message), run_log(tmp_path / "run", TrackingConfig(tensorboard=True), {}):
        pass
    assert not (tmp_path / "run").exists()


def test_a_stage_begun_anew_drops_the_lines_of_later_ones(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for stage in ("trunk", "heads", "a stage of another version"):
        log.write(stage, 1, {})
    log.begin("trunk")
    assert [event["stage"] for event in lines(tmp_path)] == ["a stage of another version"]
