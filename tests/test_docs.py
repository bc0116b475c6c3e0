"""What README and guides show is run: Python blocks, commands and recipes, on a tiny model for a trained one."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from medusa.__main__ import main
from medusa.data.corpus import DataConfig
from medusa.heads import HeadsConfig
from medusa.train import TrainConfig, train
from medusa.train.config import CalibrationConfig, EvaluationConfig, HeadsTraining, NewTrunk, Training, TrunkConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("tour", "training", "serving", "exercises", "speed")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Added to a command so that it ends soon; what was given before is overridden.
SHORTER = {
    "train": ["--dry-run"],
    "bench": ["--prompts", "1", "--repeats", "1", "--max-new-tokens", "8"],
    "calibrate": ["--prompts", "2", "--tokens", "8", "--rounds", "1", "--sizes", "1", "3"],
    "serve": ["--port", "0"],
}
NEEDS_THE_WORLD = ("data", "trunk", "chat", "distill", "warmup")  # the web, a package index, a C++ compiler


def blocks(language: str) -> list[str]:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return [text for kind, text in BLOCK.findall(pages) if kind == language]


def commands() -> list[str]:
    lines = [line for text in blocks("") for line in text.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("medusa ")]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it after `make demo`, but with a model trained for a moment."""
    folder = tmp_path_factory.mktemp("readme")
    text = "".join(f"ROMEO:\nThe {number}th line of my text.\n\n" for number in range(400))
    (folder / "my-text.txt").write_text(text, encoding="utf-8")
    train(
        TrainConfig(
            run=str(folder / "runs" / "tinyshakespeare"),
            data=DataConfig(source=str(folder / "my-text.txt"), tokenizer="char", block=32),
            trunk=TrunkConfig(new=NewTrunk(layers=3, hidden=16, heads=2, kv_heads=2, intermediate=32, context=512)),
            trunk_training=Training(steps=4, batch=2),
            heads=HeadsConfig(num=2),
            heads_training=HeadsTraining(steps=4, batch=2),
            evaluation=EvaluationConfig(rows=2, prompts=2, prompt_tokens=8, tokens=8, nodes=4),
            calibration=CalibrationConfig(sizes=(1, 3), rounds=1),
        ),
        report=lambda line: None,
    )
    shutil.copytree(folder / "runs" / "tinyshakespeare", folder / "runs" / "three")  # of the exercises
    return folder


@pytest.fixture
def inside(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in."""
    shutil.copytree(workshop, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr("medusa.plots.png", lambda figure: b"")  # drawing takes longest
    return tmp_path / "copy"


def test_there_is_something_to_run() -> None:
    assert len(commands()) >= 8 and len(blocks("python")) >= 2 and len(blocks("yaml")) >= 1


def test_python_blocks_run(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for text in blocks("python"):
        exec(compile(text, "<docs>", "exec"), names)
    assert "length" in capsys.readouterr().out  # the first one prints why decoding ended


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_commands_run(command: str, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # it would not end; how it serves is tested apart
    monkeypatch.setattr("medusa.infer.serve.app.serve", lambda *_: None)
    _, name, *rest = shlex.split(command)
    if name in NEEDS_THE_WORLD or (name == "serve" and "smollm2" in rest):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        return
    assert main([name, *rest, *SHORTER.get(name, [])]) == 0


def test_recipes_are_read(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, text in enumerate(blocks("yaml")):
        Path(f"recipe-{number}.yaml").write_text(text, encoding="utf-8")
        assert main(["train", f"recipe-{number}.yaml", "--dry-run"]) == 0
        assert "heads" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_and_links_are_there(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing
