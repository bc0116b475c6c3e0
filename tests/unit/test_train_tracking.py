"""The log of a run, and Weights & Biases beside it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from medusa.errors import UserError
from medusa.train.config import TrackingConfig
from medusa.train.tracking import RunLog, run_log


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


def test_offline_leaves_a_file_that_holds_the_events(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with run_log(tmp_path, TrackingConfig("offline", "proj"), {"seed": 17}) as log:
        log.begin("heads")
        log.write("heads", 3, {"tokens_per_step": 2.125, "top1": [0.5, 0.25]})
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    parts = (b"heads/tokens_per_step", b"2.125", b"heads/top1/1", b"0.25", b"seed")
    deadline = time.monotonic() + 30  # wandb's own process writes the file, shortly after the run has ended here
    while not all(part in file.read_bytes() for part in parts):
        assert time.monotonic() < deadline, file.read_bytes()
        time.sleep(0.05)
    assert lines(tmp_path) == [{"stage": "heads", "step": 3, "tokens_per_step": 2.125, "top1": [0.5, 0.25]}]


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
