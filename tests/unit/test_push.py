"""Uploading: the library's own client against a small hub in this process, and what each refusal says."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalTokenNotFoundError

from medusa.__main__ import main
from medusa.errors import UserError
from medusa.infer.export.push import push

MANIFEST = {
    "format": 1,
    "heads": {"kind": "hydra", "num": 2, "layers": 1, "projection": "own"},
    "trunk": "trunk",
    "fingerprint": "0" * 16,
    "revision": None,
    "local": True,
}


class Hub(ThreadingHTTPServer):
    """Knows the four requests that an upload of small files is made of, and who may write where."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.token = "right"
        self.fail: int | None = None
        self.commits: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request; the tests look at what it left in the hub."""

    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(404, {"error": "nothing here"})  # asked for a .gitignore, which nobody has

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.fail is not None:
            return self.answer(self.server.fail, {"error": "not today"})
        if self.headers.get("authorization") != f"Bearer {self.server.token}":
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        _, _, _, owner, name, what, *_ = self.path.split("/")
        if what == "preupload":
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            return self.answer(200, {"files": [each | {"shouldIgnore": False} for each in files]})
        assert what == "commit"
        self.commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.server.repositories:
            return self.answer(409, {"error": "You already created this model repo", "url": self.url(name)})
        self.server.repositories[name] = {"files": {}, "private": asked.get("private") or asked.get("visibility")}
        self.answer(200, {"url": self.url(name)})

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            else:
                assert line["key"] == "file" and value["encoding"] == "base64"
                self.server.repositories[name]["files"][value["path"]] = base64.b64decode(value["content"])
        answer = {"commitUrl": f"{self.url(name)}/commit/1", "commitOid": "1", "success": True, "hookOutput": ""}
        self.answer(200, answer)

    def url(self, name: str) -> str:
        return f"{self.server.address}/{name}"

    def answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path_factory.mktemp("home") / "token"))
    monkeypatch.setenv("HF_TOKEN", "right")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "someone/trunk"}))
    (folder / "README.md").write_text("---\nbase_model: someone/trunk\n---\n# Heads\n")
    (folder / "medusa_lm_head.safetensors").write_bytes(bytes(range(256)))
    (folder / ".README.md.1a2b3c4d").write_text("half a card")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trunk").mkdir(parents=True)
    (folder / "checkpoints" / "heads").mkdir(parents=True)
    (folder / "medusa.json").write_text(json.dumps(MANIFEST))
    for name in ("heads.safetensors", "tree.json", "train_log.jsonl", "trunk/config.json", "checkpoints/heads/big"):
        (folder / name).write_text(name)
    return folder


def layer(run: Path, trunk: str) -> None:
    """An EAGLE layer in the place that a run has for it."""
    place = run / "drafters" / "eagle"
    place.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden": 8, "embedding": 8, "heads": 2, "kv_heads": 2, "head_size": 4, "inner": 8}
    about = {"format": 1, "config": {"version": 1}, "sizes": sizes, "trunk": trunk, "fingerprint": "0", "local": True}
    (place / "eagle.json").write_text(json.dumps(about))
    (place / "eagle.safetensors").write_text("weights")


def refused(*words: str, folder: Path, repo: str = "me/heads", **options: Any) -> None:
    with pytest.raises(UserError) as caught:
        push(folder, repo, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 and all(word in message for word in words), message


def test_an_exported_folder_goes_up_whole(
    exported: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(exported), "--repo", "me/heads", "--private"]) == 0
    assert capsys.readouterr().out.strip() == f"{hub.address}/me/heads"
    made = hub.repositories["me/heads"]
    assert made["private"] in (True, "private")
    names = ("config.json", "README.md", "medusa_lm_head.safetensors")
    assert made["files"] == {name: (exported / name).read_bytes() for name in names}  # nothing hidden
    assert hub.commits == ["Upload heads for speculative decoding"]


def test_of_a_run_goes_up_what_decoding_reads(run: Path, hub: Hub) -> None:
    push(run, "me/run", message="my heads")
    made = hub.repositories["me/run"]
    assert set(made["files"]) == {"medusa.json", "heads.safetensors", "tree.json", "trunk/config.json"}
    assert not made["private"] and hub.commits == ["my heads"]


def test_of_a_run_goes_up_its_eagle_layer(run: Path, hub: Hub) -> None:
    layer(run, "../../trunk")
    (run / "report").mkdir()
    (run / "report" / "report.md").write_text("figures")
    push(run, "me/both")
    files = {f"drafters/eagle/{name}" for name in ("eagle.json", "eagle.safetensors")}
    heads = {"medusa.json", "heads.safetensors", "tree.json", "trunk/config.json"}
    assert set(hub.repositories["me/both"]["files"]) == heads | files
    assert hub.commits == ["Upload hydra heads and an EAGLE layer for speculative decoding"]


def test_a_repository_that_is_there_is_updated_only_when_asked(exported: Path, hub: Hub) -> None:
    push(exported, "me/heads")
    (exported / "README.md").write_text("# New\n")
    refused("me/heads exists", "--update", folder=exported)
    assert hub.repositories["me/heads"]["files"]["README.md"] != b"# New\n" and len(hub.commits) == 1
    push(exported, "me/heads", update=True)
    assert hub.repositories["me/heads"]["files"]["README.md"] == b"# New\n" and len(hub.commits) == 2


def test_a_wrong_token_or_none(exported: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refused("hf auth login", "HF_TOKEN", folder=exported)
    monkeypatch.delenv("HF_TOKEN")
    refused("hf auth login", "HF_TOKEN", folder=exported)
    assert not hub.repositories

    def none(*args: Any, **options: Any) -> None:
        raise LocalTokenNotFoundError("Token is required\nbut no token found.")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", none)
    refused("needs a token", "hf auth login", folder=exported)


@pytest.mark.parametrize(("code", "words"), [(403, "may not write to me/heads"), (400, "not today"), (422, "refuses")])
def test_what_the_hub_refuses(code: int, words: str, exported: Path, hub: Hub) -> None:
    hub.fail = code
    refused(words, folder=exported)


def test_no_network(exported: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    refused("can't be reached", "network", folder=exported)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE", folder=exported)


@pytest.mark.parametrize("repo", ["a/b/c", "..", "x y", ""])
def test_a_name_that_is_none(repo: str, exported: Path, hub: Hub) -> None:
    refused("--repo", folder=exported, repo=repo)
    assert not hub.repositories


def test_a_card_that_the_hub_does_not_take(exported: Path, hub: Hub) -> None:
    def answer(self: Handler) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        errors = [{"message": '"license" must be one of ...'}]
        self.answer(400 if self.path == "/api/validate-yaml" else 200, {"errors": errors, "url": self.url("me/heads")})

    hub.RequestHandlerClass = type("Strict", (Handler,), {"do_POST": answer})
    refused("README.md", "---", folder=exported)


def test_what_is_not_to_go_up(exported: Path, run: Path, hub: Hub, tmp_path: Path) -> None:
    refused("no folder", folder=tmp_path / "nowhere")
    (exported / "config.json").write_text(json.dumps({"base_model_name_or_path": str(run)}))
    refused("--base", str(run), folder=exported)
    (exported / "config.json").write_text(json.dumps({"base_model_name_or_path": "../run"}))
    refused("--base", folder=exported)
    (exported / "config.json").write_text("{half")
    refused("config.json", "export", folder=exported)
    (exported / "README.md").unlink()
    refused("neither", "medusa export", folder=exported)
    (run / "medusa.json").write_text(json.dumps(MANIFEST | {"trunk": "../elsewhere/trunk"}))
    refused("outside of the run", "../elsewhere/trunk", folder=run)
    (run / "medusa.json").unlink()
    layer(run, "../../../elsewhere/trunk")
    refused("outside of the run", "../elsewhere/trunk", folder=run)
    assert not hub.repositories


@pytest.mark.parametrize(("argv", "words"), [(["x"], "--repo is missing"), (["x", "--repo", "me/x"], "no folder x")])
def test_wrong_input_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
