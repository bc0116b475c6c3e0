"""The stage that makes an EAGLE layer: what it leaves, what it rests on, what it refuses, and going on after a kill."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa.__main__ import main
from medusa.calibrate import continuations, tokens_per_step
from medusa.checkpoint import CALIBRATION, read_tree
from medusa.data.corpus import DataConfig
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_calibrate import layer_features, layer_ranks
from medusa.eagle_files import PLACE, load_eagle, read_eagle_manifest
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.testing import tiny_trunk
from medusa.train import checkpoints, eagle, follow, sizes
from medusa.train.cli import read_config, summary
from medusa.train.config import (
    CalibrationConfig,
    EagleTraining,
    EvaluationConfig,
    HeadsTraining,
    JointTraining,
    NewTrunk,
    TrainConfig,
    Training,
    TrunkConfig,
)
from medusa.train.interrupt import Interrupted
from medusa.train.plan import plan
from medusa.train.record import to_yaml
from medusa.train.report import named
from medusa.train.report_page import write_pages
from medusa.train.stages import train
from medusa.train.text import Corpus
from medusa.trunk import Trunk

TEXT = "the cat sat on the mat and a dog ran to the far end of it\n" * 60
LAYER = f"{PLACE}/eagle.safetensors"
STEPS: dict[str, Any] = {"batch": 2, "log_every": 4, "eval_every": 2, "save_every": 3, "save_minutes": None}


class Killed(BaseException):
    """Stands for SIGKILL where a process of its own would be too slow."""


def small(folder: Path, **changes: Any) -> TrainConfig:
    """A run of about a second. Neither log nor evaluation nor checkpoints come at the same steps."""
    (folder / "text.txt").write_text(TEXT)
    return TrainConfig(
        str(folder / "run"),
        threads=1,
        data=DataConfig(source=str(folder / "text.txt"), tokenizer="char", block=16),
        trunk=TrunkConfig(new=NewTrunk(layers=2, hidden=16, heads=2, kv_heads=1, intermediate=24, context=64)),
        trunk_training=Training(steps=3, batch=2, save_minutes=None),
        heads=changes.pop("heads", None),
        heads_training=HeadsTraining(steps=3, batch=2, lr=1e-2, save_minutes=None),
        eagle=changes.pop("eagle", EagleConfig(3)),
        eagle_training=EagleTraining(steps=7, warmup=3, depth=3, lr=1e-2, **(STEPS | {"passes": 2} | changes)),
        evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=8, tokens=12, nodes=4),
        calibration=CalibrationConfig(sizes=(1, 3), rounds=1),
    )


def quiet(line: str) -> None:
    """Says nothing."""


def events(config: TrainConfig) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (Path(config.run) / "train_log.jsonl").read_text().splitlines()]
    measured = ("tokens_per_second", "trunk_share", "peak_memory_mb")
    return [{key: value for key, value in event.items() if key not in measured} for event in found]


def record(config: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.run) / "run.json").read_text())["stages"]
    return found


@contextmanager
def at_step(step: int, do: Callable[[], None]) -> Iterator[None]:
    """Do something when ``step`` steps of the eagle stage are done."""
    with pytest.MonkeyPatch.context() as patch:
        before = follow.Watch.on_step_end

        def on_step_end(self: follow.Watch, args: Any, state: Any, control: Any, **more: Any) -> None:
            before(self, args, state, control, **more)
            if hasattr(self.trainer.model, "layer") and state.global_step == step:
                do()

        patch.setattr(follow.Watch, "on_step_end", on_step_end)
        yield


def kill() -> None:
    raise Killed


# With noise, whose random states have to be gone on with; in parts; with a draft vocabulary; by Muon.
MAKERS: dict[str, dict[str, Any]] = {
    "3": {},
    "1 noisy": {"eagle": EagleConfig(1), "noise": 0.1, "feature_weight": 1.0},
    "3 in parts": {"eagle": EagleConfig(3, vocab=12), "accumulate": 2, "optimizer": "muon"},
}


@pytest.fixture(scope="module", params=MAKERS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that was never stopped; beside it a copy of the folder from when the layer had just begun."""
    folder = tmp_path_factory.mktemp("whole")
    config = small(folder, **MAKERS[request.param])
    with at_step(1, kill), pytest.raises(Killed):
        train(config, report=quiet)
    shutil.copytree(config.run, folder / "begun")
    train(config, report=quiet)
    return config


def begun(config: TrainConfig, folder: Path) -> TrainConfig:
    """The same run in another folder, with a trunk and nothing else."""
    shutil.copytree(Path(config.run).with_name("begun"), folder / "run")
    return replace(config, run=str(folder / "run"))


def assert_same(found: TrainConfig, wanted: TrainConfig) -> None:
    """The same log, to the bit and each line once; the same weights, tree and results; and nothing left lying about."""
    assert events(found) == events(wanted)
    for name in (LAYER, f"{PLACE}/eagle.json", "trunk/model.safetensors"):
        assert (Path(found.run) / name).read_bytes() == (Path(wanted.run) / name).read_bytes(), name
    assert record(found)["eagle"]["result"] == record(wanted)["eagle"]["result"]
    for folder in (Path(), PLACE):
        names = [sorted(path.name for path in (Path(config.run) / folder).iterdir()) for config in (found, wanted)]
        assert names[0] == names[1] and not any(name.startswith((".", "checkpoints")) for name in names[0])


def test_killed_at_any_step_and_resumed_is_never_stopped(whole: TrainConfig, tmp_path: Path) -> None:
    config, lines = begun(whole, tmp_path), list[str]()
    for step in (2, 4, 5, 7):
        with at_step(step, kill), pytest.raises(Killed):
            train(config, report=lines.append)
        folder = Path(config.run) / checkpoints.FOLDER / "eagle"
        steps = [int(path.name.partition("-")[2]) for path in checkpoints.Checkpoints(folder, 1).all()]
        assert steps == [at for at in (3, 6) if at < step]
    train(config, report=lines.append)
    assert sum("eagle: goes on from step 6" in line for line in lines) == 1
    assert sum("eagle: goes on from step 3" in line for line in lines) == 2
    assert_same(config, whole)


def test_a_signal_saves_and_the_same_run_goes_on(whole: TrainConfig, tmp_path: Path) -> None:
    config = begun(whole, tmp_path)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # also where the tests run in the background
    try:
        with at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(Interrupted) as caught:
            train(config, report=quiet)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (caught.value.stage, caught.value.step) == ("eagle", 5)
    train(config, report=quiet)
    assert_same(config, whole)


def test_the_layer_loads_and_brings_what_the_record_says(whole: TrainConfig) -> None:
    folder = Path(whole.run) / PLACE
    manifest = read_eagle_manifest(folder)
    assert manifest.local and (folder / manifest.trunk).resolve() == (Path(whole.run) / "trunk").resolve()
    trunk = Trunk.load(Path(whole.run) / "trunk")
    layer = load_eagle(folder, trunk)
    assert layer.config == whole.eagle
    found = record(whole)
    judged = [event for event in events(whole) if "tokens_per_step" in event]
    best = max(judged, key=lambda event: event["tokens_per_step"])
    assert found["eagle"]["result"]["tokens_per_step"] == best["tokens_per_step"]
    assert found["eagle"]["result"]["step"] == best["step"]
    assert found["eagle"]["result"]["parameters"] == sizes.count(layer)
    corpus = Corpus(whole, quiet)
    corpus.take_tokenizer(trunk)
    held = continuations(trunk, corpus.heldout_prompts(whole.evaluation), whole.evaluation.tokens)
    second = held.halves()[1]
    tree = read_tree(folder)
    assert tree.size == found["calibration"]["result"]["eagle"]["nodes"]
    ranks = layer_ranks(layer, second, layer_features(layer, second), 3)
    assert tokens_per_step(tree, ranks) == found["calibration"]["result"]["eagle"]["tokens_per_step"]
    assert not (Path(whole.run) / "medusa.json").exists() and not (Path(whole.run) / "heads.safetensors").exists()


def test_what_is_logged(whole: TrainConfig) -> None:
    log = [event for event in events(whole) if event["stage"] == "eagle"]
    losses = [event for event in log if "loss" in event]
    assert [event["step"] for event in losses] == [4]
    assert {len(event[name]) for event in losses for name in ("depth_loss", "top1", "top5")} == {2}
    assert all(("feature_loss" in event) == (whole.eagle_training.feature_weight > 0) for event in losses)
    assert all(("outside" in event) == (whole.eagle is not None and whole.eagle.vocab == 12) for event in losses)
    judged = [event for event in log if "tokens_per_step" in event]
    assert [event["step"] for event in judged] == [2, 4, 6, 7]
    assert all(len(event["heldout_top1"]) == 3 for event in judged)


def test_a_run_that_is_made_is_left_alone(whole: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(whole.run).rglob("*")}
    monkeypatch.setattr(eagle, "EagleTrainer", None)
    lines: list[str] = []
    train(whole, report=lines.append)
    assert before == {path: path.stat().st_mtime_ns for path in Path(whole.run).rglob("*")}
    assert [line for line in lines if line.startswith("eagle:")] == [f"eagle: {Path(whole.run) / LAYER} is there"]
    assert [line for line in lines if line.startswith("calibration:")] == [
        f"calibration: {Path(whole.run) / PLACE / 'calibration.json'} is there"
    ]


def test_the_report_and_the_summary_tell_of_the_layer(
    whole: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa.plots.png", lambda figure: b"")  # drawing takes longest
    page = write_pages(named([Path(whole.run)]), tmp_path / "report").read_text()
    assert "Training: eagle" in page and "Tree of the EAGLE layer" in page and "No heads" not in page
    curves = json.loads((tmp_path / "report" / "curves.json").read_text())["runs"]["run"]["eagle"]
    assert set(curves["depth_loss"]) == {"depth 1", "depth 2"} and set(curves["heldout_top1"]) == {
        "depth 1",
        "depth 2",
        "depth 3",
    }
    told = summary(train(whole, report=quiet))
    assert f"a layer of version {whole.eagle.version if whole.eagle else 0}" in told and "heads" not in told
    assert "drafters/eagle/calibration.json has all sizes" in told


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run with heads and a layer."""
    config = small(tmp_path_factory.mktemp("both"), heads=HeadsConfig(num=2))
    train(config, report=quiet)
    return config


@pytest.fixture
def copied(both: TrainConfig, tmp_path: Path) -> TrainConfig:
    shutil.copytree(both.run, tmp_path / "run")
    return replace(both, run=str(tmp_path / "run"))


def test_heads_and_a_layer_stand_beside_each_other(
    both: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa.plots.png", lambda figure: b"")
    found = record(both)
    assert list(found) == ["trunk", "heads", "eagle", "calibration"]
    result = found["calibration"]["result"]
    assert result["nodes"] == read_tree(Path(both.run)).size
    assert result["eagle"]["nodes"] == read_tree(Path(both.run) / PLACE).size
    page = write_pages(named([Path(both.run)]), tmp_path / "report").read_text()
    assert ">Tree<" in page and "Tree of the EAGLE layer" in page
    told = summary(train(both, report=quiet))
    assert "2 of kind hydra" in told and "a layer of version 3" in told and told.count("  tree  ") == 2


def test_a_layer_is_the_same_with_and_without_heads(both: TrainConfig, tmp_path: Path) -> None:
    shutil.copytree(both.run, tmp_path / "run")
    alone = replace(both, run=str(tmp_path / "run"), heads=None)
    train(alone, fresh="eagle", report=quiet)
    weights, wanted = (load_file(Path(config.run) / LAYER) for config in (alone, both))
    assert all(value.equal(wanted[name]) for name, value in weights.items())


def lines_of(config: TrainConfig, fresh: str | None = None) -> str:
    lines: list[str] = []
    train(config, fresh, report=lines.append)
    return "\n".join(lines)


def test_what_comes_new_leaves_the_other_alone(copied: TrainConfig) -> None:
    weights = {name: (Path(copied.run) / name).read_bytes() for name in ("heads.safetensors", LAYER)}
    told = lines_of(copied, "heads")
    assert "eagle: " + str(Path(copied.run) / LAYER) + " is there" in told and "heads: 2 of kind" in told
    assert list(dict.fromkeys(event["stage"] for event in events(copied))) == ["trunk", "eagle", "heads"]
    told = lines_of(copied, "eagle")
    assert "heads.safetensors is there" in told and "eagle: a layer" in told and "calibration of eagle: of" in told
    assert {name: (Path(copied.run) / name).read_bytes() for name in weights} == weights  # the same, made again
    assert "eagle: a layer" in lines_of(copied, "trunk")


def test_a_calibration_covers_all_that_drafts(copied: TrainConfig) -> None:
    assert "calibration: of" in lines_of(replace(copied, eagle=None), "calibration")
    assert (
        set(record(copied)["calibration"]["result"]) > {"nodes"}
        and "eagle" not in record(copied)["calibration"]["result"]
    )
    assert "calibration of eagle: of" in lines_of(copied)
    assert "calibration: of" not in lines_of(replace(copied, heads=None), "calibration")
    assert set(record(copied)["calibration"]["result"]) == {"eagle"}
    assert "calibration: of" in lines_of(copied) and summary(train(copied, report=quiet)).count("  tree  ") == 2


def test_a_layer_can_be_added_to_a_run_with_heads(copied: TrainConfig) -> None:
    shutil.rmtree(Path(copied.run) / "drafters")
    before = (Path(copied.run) / "heads.safetensors").stat().st_mtime_ns
    assert "eagle" not in lines_of(replace(copied, eagle=None))
    told = lines_of(copied)
    assert "eagle: a layer of version 3" in told and "calibration of eagle: of" in told
    assert (Path(copied.run) / "heads.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle": EagleConfig(1)}, "its eagle stage was made with eagle.version=3, now it is 1: add `--fresh eagle`"),
        (
            {"eagle_training": EagleTraining(steps=7)},
            "its eagle stage was made with eagle_training.batch=2, now it is 8",
        ),
    ],
)
def test_other_settings_are_refused(copied: TrainConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        train(replace(copied, **changes), report=quiet)


def test_saving_more_often_is_no_other_setting(copied: TrainConfig) -> None:
    training = replace(copied.eagle_training, save_every=2, keep=3)
    assert f"eagle: {Path(copied.run) / LAYER} is there" in lines_of(replace(copied, eagle_training=training))


def test_a_changed_trunk_is_found_out(copied: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = EagleLayer.unroll

    def unroll(self: EagleLayer, *args: Any) -> Any:
        with torch.no_grad():
            next(self.trunk.model.parameters()).add_(1e-3)
        return inner(self, *args)

    monkeypatch.setattr(EagleLayer, "unroll", unroll)
    with pytest.raises(RuntimeError, match="the trunk's weights changed"):
        train(copied, "eagle", report=quiet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle": None}, "heads=null and eagle=null: nothing would draft"),
        ({"joint": JointTraining()}, "joint with heads=null: it trains trunk and heads together"),
        (
            {"joint": JointTraining(), "heads": HeadsConfig()},
            "eagle with joint: .*own with trunk.name=RUN/merged",
        ),
        ({"data": DataConfig(tokenizer="char", block=4)}, "data.block=4 and eagle_training.passes=3: .* at least 5"),
        ({"eagle_training": EagleTraining(feature_weight=1.0)}, "feature_weight=1.0 with eagle.version=3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {
        "data": DataConfig(tokenizer="char"),
        "trunk": TrunkConfig(new=NewTrunk()),
        "heads": None,
        "eagle": EagleConfig(3),
    }
    with pytest.raises(UserError, match=message) as caught:
        TrainConfig("runs/x", **(whole | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fresh", "changes", "message"),
    [
        ("heads", {"heads": None}, "`--fresh heads`: this recipe has no heads stage"),
        ("eagle", {"eagle": None}, "`--fresh eagle`: this recipe has no eagle stage: give one by --eagle.version"),
    ],
)
def test_a_stage_that_is_not_there_is_not_made_anew(
    copied: TrainConfig, fresh: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(replace(copied, **changes), fresh, report=quiet)


def test_a_draft_vocabulary_that_does_not_fit_names_its_own_setting(copied: TrainConfig) -> None:
    with pytest.raises(UserError, match=r"eagle\.vocab=99: the tokenizer has"):
        train(replace(copied, eagle=EagleConfig(3, vocab=99)), "eagle", report=quiet)


def test_heads_null_and_a_layer_on_the_command_line(tmp_path: Path) -> None:
    config = read_config(["tinyshakespeare", "--heads", "null", "--eagle.version", "1", "--eagle_training.passes=2"])[0]
    assert config.heads is None and config.eagle == EagleConfig(1) and config.eagle_training.passes == 2
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config([str(tmp_path / "config.yaml")])[0] == config
    with pytest.raises(UserError, match=r"unknown option 'heads\.knd'.*heads\.kind"):
        read_config(["tinyshakespeare", "--heads.knd", "medusa"])
    for option, message in (
        ("eagle.version=2", "eagle.version=2: choose 1, which EAGLE-2 drafts with too, or 3"),
        ("heads.num=0", "heads.num=0: give at least 1"),
        ("joint.rank=0", "joint.rank=0: give at least 1"),
    ):
        with pytest.raises(UserError) as caught:
            read_config(["tinyshakespeare", f"--{option}"])
        assert str(caught.value) == message


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi"])
@pytest.mark.parametrize("eagle_config", [EagleConfig(1), EagleConfig(3), EagleConfig(3, vocab=9)], ids=str)
def test_planned_sizes_are_those_of_a_real_layer(family: str, eagle_config: EagleConfig, tmp_path: Path) -> None:
    trunk = tiny_trunk(family)
    trunk.model.config.save_pretrained(tmp_path)
    found = sizes.read_trunk(TrunkConfig(str(tmp_path)))
    assert found is not None
    config = TrainConfig(str(tmp_path / "run"), trunk=TrunkConfig(str(tmp_path)), heads=None, eagle=eagle_config)
    config = replace(config, data=DataConfig(tokenizer="trunk"))
    real = EagleLayer(eagle_config, trunk, None if eagle_config.vocab is None else torch.arange(9))
    assert sum(sizes.layer_parameters(config, found)) == sizes.count(real)
    told = "\n".join(plan(config))
    assert f"eagle        a layer of version {eagle_config.version}, 3 passes, {sizes.count(real):,} parameters" in told
    assert "heads" not in told and "loss 0." in told and "passes " in told
    assert "heads" in "\n".join(plan(replace(config, heads=HeadsConfig())))


def test_a_run_of_a_layer_alone_is_calibrated_and_benchmarked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    train(config, report=quiet)
    kept = Path(config.run) / PLACE / CALIBRATION
    kept.unlink()
    monkeypatch.chdir(tmp_path)
    machine = ["--threads", "1", "--rounds", "1"]
    assert main(["calibrate", config.run, *machine, "--sizes", "1", "3"]) == 0
    assert kept.is_file() and "trees of the EAGLE layer" in capsys.readouterr().out
    short = ["--prompts", "1", "--repeats", "1", "--max-new-tokens", "4", "--prompt-length", "4", "--threads", "1"]
    assert main(["bench", config.run, *short, "--drafters", "none", "auto", "eagle:3"]) == 0
    assert (Path(config.run) / "benchmark" / "report.json").is_file()
