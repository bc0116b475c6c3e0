"""``medusa serve`` as a process: under load from another one, asked what its own description allows, and stopped."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from medusa.__main__ import main
from medusa.infer import Engine

from ..unit.serving import END, save_run, tokenizer

HOLD = {str(tokenizer().convert_tokens_to_ids(END)): -100.0}
# Limits that lie in no schema: a prompt may fill the context, options contradict each other, a chat be unanswerable.
LEFT_OUT = ("positive_data_acceptance",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "tiny")


@contextmanager
def served(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the address that it tells."""
    command = [sys.executable, "-m", "medusa", "serve", str(run), "--port", "0", "--threads", "1", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+/(?= is a page)", line):
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    yield process, found[0]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            process.terminate()
            process.wait(60)


# What is refused before anything is loaded.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "{taken}"], "can't be listened at .*: give another; port 0 takes a free one"),
        (["--port", "65616"], "--port 65616: give one in 0..65535"),
        (["--rows", "0"], "rows=0: give at least 1"),
        (["--timeout", "0"], "timeout=0.0: give seconds above 0"),
        (["--grace", "-1"], "grace=-1.0: give seconds from 0 up"),
        (["--api-key-file", "nowhere"], "nowhere can't be read"),
        (["--api-key-file", "{empty}"], "is empty: give a file that holds the key"),
        (["--prot", "1"], "unknown option 'prot' .did you mean port"),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid --port 0 can't be listened at"),
        (["--baseline", "--drafter", "lookahead"], "one drafts nothing"),
    ],
)
def test_wrong_options_are_one_line(
    run: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"taken": taken.getsockname()[1], "empty": tmp_path / "empty"}
        options = [option.format(**places) for option in options]
        assert main(["serve", str(run), *(["--port", "0"] if "--port" not in options else []), *options]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1


# As a process.


@pytest.mark.slow
def test_under_load_every_answer_equals_its_solo_run(run: Path) -> None:
    engine = Engine.load(run, dtype="float64")
    with served(run, "--dtype", "float64", "--rows", "4", "--queue", "100") as (process, root):
        client = [sys.executable, str(Path(__file__).with_name("load.py")), root]
        loads = [
            subprocess.Popen([*client, str(seed), "60", "12", "tiny"], stdout=subprocess.PIPE, text=True)
            for seed in range(2)
        ]
        lines = [line for load in loads for line in load.communicate(timeout=500)[0].splitlines()]
        assert [load.returncode for load in loads] == [0, 0]
        told = [json.loads(line) for line in lines]
        end = time.monotonic() + 30
        while httpx.get(f"{root}health").json() != {"status": "ok", "rows": 0, "waiting": 0}:
            assert time.monotonic() < end
        outcomes = dict(re.findall(r'medusa_requests_total\{outcome="(\w+)"\} (\d+)', httpx.get(f"{root}metrics").text))
        check_that_it_stops(process, root, signal.SIGTERM, engine)
    assert len(told) == 120
    left = sum(not each["whole"] for each in told)
    assert 10 < left < 110
    # one that is left just as it ends may have been done
    assert set(outcomes) == {"done", "cancelled"} and sum(map(int, outcomes.values())) == 120
    assert int(outcomes["cancelled"]) <= left
    for each in told:
        for text, solo in zip(each["texts"], solo_texts(engine, each), strict=True):
            assert text == solo if each["whole"] else solo.startswith(text)


def solo_texts(engine: Engine, asked: dict[str, Any]) -> list[str]:
    names = {"max_tokens": "max_new_tokens", "n": "num_return_sequences", "stop": "stop_strings"}
    options = {names.get(name, name): value for name, value in asked["body"].items()} | asked["extra"]
    options["include_stop"] = False
    if not asked["chat"]:
        found = engine.generate(asked["prompt"], **options)
        return [each.text for each in found] if isinstance(found, list) else [found.text]
    seeds = (
        [options["seed"] + turn for turn in range(options.pop("num_return_sequences", 1))] if "seed" in options else [0]
    )
    chats = [{**options, "seed": seed} for seed in seeds]
    return [engine.chat([{"role": "user", "content": asked["prompt"]}], **own).text for own in chats]


def check_that_it_stops(process: subprocess.Popen[str], root: str, number: signal.Signals, engine: Engine) -> None:
    """Told to, it ends when the answer under way is whole."""
    client = openai.OpenAI(base_url=f"{root}v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="tiny", prompt="O", max_tokens=240, logit_bias=HOLD, stream=True)
    text = next(stream).choices[0].text
    process.send_signal(number)
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{root}health")
    assert text == engine.generate("O", max_new_tokens=240, sequence_bias={(int(*HOLD),): -100.0}).text


@pytest.mark.slow
def test_a_trunk_without_heads_is_served_without_drafts(run: Path) -> None:
    with served(run / "trunk", "--name", "tiny", "--dtype", "float64") as (process, root):
        (model,) = httpx.get(f"{root}v1/models").json()["data"]
        assert (model["id"], model["drafter"]) == ("tiny", "none")
        check_that_it_stops(process, root, signal.SIGINT, Engine.load(run, dtype="float64"))


@pytest.mark.slow
def test_it_does_what_its_description_says(run: Path, tmp_path: Path) -> None:
    with served(run, "--context", "60", "--rows", "4") as (_, root):
        checks = ["--exclude-checks", ",".join(LEFT_OUT), "--max-examples", "15", "--seed", "0", "--no-color"]
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{root}openapi.json", *checks]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout
        assert re.search(r"Tested: 6\b", done.stdout) and int(re.findall(r"(\d+) generated", done.stdout)[0]) > 200
        assert httpx.get(f"{root}health").json()["rows"] == 0
