"""The report of runs: what is there is shown, in pictures and tables that stand on their own."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from medusa.__main__ import main
from medusa.train.config import TrackingConfig
from medusa.train.report import Run, named
from medusa.train.report_bench import read_markdown, read_pictures, read_words
from medusa.train.report_page import file_name, write_pages
from medusa.train.stages import train

from .test_plots import ROWS
from .test_train_stages import small
from .test_train_tracking import in_tensorboard, in_wandb, logged, rounded, wandb_files
from .wandb_records import config_of, read_records, rows_of

VOID = {"meta", "img", "br"}
EVIL = '<script>alert("1")</script>'
EVENTS = [
    {"stage": "trunk", "step": 10, "loss": 3.0, "learning_rate": 0.1, "tokens_per_second": 900.0},
    {"stage": "trunk", "step": 20, "loss": 2.0, "heldout_loss": 2.25, "peak_memory_mb": 12.5},
    {"stage": "heads", "step": 10, "head_loss": [2.0, 3.0], "top1": [0.5, 0.25], "top5": [0.9, 0.8]},
    {"stage": "heads", "step": 10, "tokens_per_step": 1.75, "acceptance": [0.5, 0.5]},
    {"stage": "heads", "step": 20, "tokens_per_step": 1.5, "acceptance": [0.4, 0.25]},
    {"stage": EVIL, "step": 1, EVIL: 1.0},
]
RECORD = {
    "versions": {"medusa": "0.0"},
    "machine": {"processor": "a & b", "threads": 1},
    "git": {"commit": "c0ffee", "dirty": False},
    "config": {"run": EVIL, "seed": 3, "trunk_training": {"steps": 20}, "heads_training": {"steps": 40, "lr": 0.125}},
    "stages": {"trunk": {"seconds": 65.2, "finished": "2026-01-02T03:04:05+0000", "result": {"parameters": 99}}},
}
CALIBRATION = {"rows": ROWS, "chosen": ROWS[2], "node_share": [1.0, 0.5, 0.25, 0.125]}
BENCH = """# Benchmark

## Speed & more

|  | tokens/s | x generate |
| --- | ---: | ---: |
| generate | 100.0 | 1 |
| hydra, 16 nodes | 213.0 | 2.13 [2.00, 2.20] |

## One step

|  | nodes |
| --- | ---: |
| none | 1 |

* Outputs identical to generate: 2 of 2 prompts.
* Trunk: <script>alert("1")</script>, 0.87 M parameters.
"""


def put(folder: Path, name: str, content: Any) -> None:
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def made_run(folder: Path) -> Path:
    """A run that has everything."""
    put(folder, "train_log.jsonl", "".join(json.dumps(event) + "\n" for event in EVENTS))
    put(folder, "run.json", RECORD)
    put(folder, "calibration.json", CALIBRATION)
    put(folder, "tree.json", {"paths": [[0], [1], [0, 0]]})
    put(folder, "report/report.md", BENCH)
    for name in ("tree", "speedup", "training"):
        put(folder, f"report/{name}.png", f"{name} of the benchmark")
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are made but not drawn, which takes longest."""
    monkeypatch.setattr("medusa.plots.png", lambda figure: figure.get_suptitle().encode())


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a page holds."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.titles: list[str] = []
        self.cells: list[str] = []
        self.content = path.read_text(encoding="utf-8")
        self.feed(self.content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, *each) for each in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.titles.append("")
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles[-1] += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data

    def tags(self) -> set[str]:
        return {tag for tag, *_ in self.attributes} | set(self.open)


def test_a_finished_run_shows_all_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f"Report: {run / 'report' / 'index.html'}\n")
    page = Page(run / "report" / "index.html")
    assert page.titles == [
        "Stages",
        "Training: trunk",
        "Training: heads",
        f"Training: {EVIL}",
        "Tree",
        "Benchmark",
        "Settings",
    ]
    images = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    written = {path.stem for path in (run / "report").glob("run-*.png")}
    assert len(images) == len(written) + 2 == 4 + 5 + 1 + 3 + 2
    assert {"run-heads-tokens_per_step", "run-calibration-tree", "run-calibration-cost"} <= written
    for name, shown in (("tree", True), ("speedup", True), ("training", False)):
        content = (run / "report" / f"{name}.png").read_bytes()
        assert content == f"{name} of the benchmark".encode()
        assert any(image.endswith(b64encode(content).decode()) for image in images) == shown
    for cell in (
        "20 of 20",
        "1:05",
        "2026-01-02 03:04",
        "parameters 99",
        "20 of 40",
        "c0ffee",
        "heads_training.lr",
        "0.125",
    ):
        assert any(cell in each for each in page.cells), cell
    place = page.cells.index("hydra, 16 nodes")
    assert page.cells[place : place + 3] == ["hydra, 16 nodes", "213.0", "2.13 [2.00, 2.20]"]
    assert "Speed &amp; more" in page.content and "Outputs identical to generate: 2 of 2" in page.content


@pytest.mark.usefixtures("undrawn")
def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    page = Page(write_pages([Run.read(run, EVIL)], tmp_path / "out"))
    assert "<script" not in page.content and EVIL in page.cells
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "srcset"):
            assert tag == "img" and value is not None and value.startswith("data:image/png;base64,")
    style = page.content[page.content.index("<style>") : page.content.index("</style>")]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    assert any((tag, name) == ("meta", "name") and value == "viewport" for tag, name, value in page.attributes)
    assert "$" not in page.content.replace(EVIL, "")


@pytest.mark.usefixtures("undrawn")
def test_the_curves_are_written_as_they_were_logged(tmp_path: Path) -> None:
    write_pages(named([made_run(tmp_path / "run")]), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "curves.json").read_text())
    heads = content["runs"]["run"]["heads"]
    assert content["format"] == 1
    assert heads["tokens_per_step"][""] == {
        "steps": [10, 20],
        "values": [1.75, 1.5],
        "best": {"step": 10, "value": 1.75},
    }
    assert heads["head_loss"]["head 1"] == {"steps": [10], "values": [3.0]}


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_killed_shows_what_is_there(tmp_path: Path) -> None:
    lines = "".join(json.dumps(event) + "\n" for event in EVENTS[:1])
    put(tmp_path / "run", "train_log.jsonl", lines + '{"stage": "trunk", "st')
    page = Page(write_pages(named([tmp_path / "run"]), tmp_path / "out"))
    assert page.titles == ["Stages", "Training: trunk", "Tree", "Settings"]
    assert "not finished: stage trunk, step 10, " in page.content
    assert "can&#x27;t be read, and are left out: 1." in page.content
    put(tmp_path / "run", "run.json", RECORD | {"stages": {}})
    put(tmp_path / "run", "medusa-1/tree.json", {"paths": [[0], [0, 0]]})  # heads made, a joint stage under way
    put(tmp_path / "run", "train_log.jsonl", "".join(json.dumps(event) + "\n" for event in EVENTS))
    page = Page(write_pages(named([tmp_path / "run"]), tmp_path / "out"))
    assert "A step yields 1.75 tokens" in page.content  # 1 + 0.5 + 0.5 * 0.5, of the best evaluation
    assert "The tree: 3 nodes, 2 deep" in page.content


@pytest.mark.usefixtures("undrawn")
def test_what_was_kept_is_the_best_even_if_another_was_higher(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    done = {"seconds": 1.0, "finished": "2026-01-02T03:04:05+0000", "result": {"step": 20}}
    put(run, "run.json", RECORD | {"stages": {"heads": done}})
    (read,) = named([run])
    best = read.drafts[0].best
    assert best is not None and best["step"] == 20
    write_pages([read], tmp_path / "out")
    content = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert content["runs"]["run"]["heads"]["tokens_per_step"][""]["best"] == {"step": 20, "value": 1.5}


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    first, second = made_run(tmp_path / "a" / "run"), made_run(tmp_path / "b")
    put(second, "run.json", RECORD | {"config": RECORD["config"] | {"seed": 4}})
    page = Page(write_pages(named([first, second]), tmp_path / "out"))
    assert page.titles.count("Training: heads") == 1 and "Tree: run" in page.titles and "Tree: b" in page.titles
    place = page.cells.index("seed")
    assert page.cells[place : place + 3] == ["seed", "3", "4"] and "heads_training.lr" not in page.cells
    runs = json.loads((tmp_path / "out" / "curves.json").read_text())["runs"]
    assert list(runs) == ["run", "b"] and runs["run"]["heads"] == runs["b"]["heads"]
    alike = named([first, made_run(tmp_path / "c" / "run")])
    assert [each.name for each in alike] == [str(first), str(tmp_path / "c" / "run")]


@pytest.mark.usefixtures("undrawn")
def test_what_is_no_run_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*argv: str) -> str:
        assert main(["report", *argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("medusa: error: ") and error.count("\n") == 1
        return error

    (tmp_path / "empty").mkdir()
    assert "holds neither run.json nor train_log.jsonl: give a folder made by `medusa train`" in said(str(tmp_path))
    put(tmp_path / "empty", "train_log.jsonl", "")
    assert "has logged nothing yet: a first line comes after log_every steps" in said(str(tmp_path / "empty"))
    put(tmp_path / "begun", "run.json", RECORD)
    assert "has logged nothing yet" in said(str(tmp_path / "begun"))
    run = str(made_run(tmp_path / "run"))
    assert "2 runs are compared outside of their folders: say where with --out" in said(run, run)
    put(tmp_path, "file", "")
    assert "can't be written" in said(run, "--out", str(tmp_path / "file"))
    put(tmp_path / "run", "run.json", "{")
    assert "run.json can't be read as JSON" in said(run)


def test_the_benchmarks_words_are_read_as_they_were_written(tmp_path: Path) -> None:
    tables, notes = read_markdown(BENCH)
    again = "\n\n".join(
        f"## {table.title}\n\n"
        + "\n".join(
            f"| {' | '.join(line)} |"
            for line in (table.heads, ["---", *["---:"] * (len(table.heads) - 1)], *table.rows)
        )
        for table in tables
    )
    assert f"# Benchmark\n\n{again}\n\n" + "".join(f"* {note}\n" for note in notes) == BENCH
    assert read_words(tmp_path) is None and read_pictures(tmp_path) == {}


def test_names_in_a_log_are_no_paths() -> None:
    assert file_name("../../etc/passwd") == "_etc_passwd"
    assert file_name("heads-top1") == "heads-top1"


@pytest.mark.slow
def test_a_whole_run_is_tracked_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = replace(small(tmp_path), tracking=TrackingConfig("offline", "p", tensorboard=True))
    train(config, report=lambda line: None)
    folder = Path(config.run)
    (file,) = wandb_files(folder)
    shown = [each for each in in_wandb([file]) if isinstance(each[2], float | int) and "/" in each[0]]
    pictures = ("heads/tree", "heads/by_depth", "calibration/tree", "calibration/by_depth", "calibration/cost_curve")
    assert [each for each in shown if not each[0].startswith(pictures)] == logged(folder)
    assert in_tensorboard(folder) == rounded(logged(folder))
    drawn = {name.rpartition("/")[0] for row in rows_of(read_records(file)) for name in row if name.endswith("/path")}
    assert drawn == set(pictures)
    told = config_of(read_records(file))
    record = json.loads((folder / "run.json").read_text())
    assert told == record["config"] | {key: record[key] for key in ("versions", "machine", "git")} | {
        "fingerprint": json.loads((folder / "medusa.json").read_text())["fingerprint"]
    }
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    train(config, report=lambda line: None)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    Page(write_pages(named([folder]), folder / "report"))
