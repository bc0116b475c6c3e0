"""The server over real HTTP: OpenAI's own client, what is refused and how, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from medusa.decoding import Decoder, Step
from medusa.infer.serve.app import FILES
from medusa.infer.serve.rows import make_rows
from medusa.infer.serve.scheduler import Scheduler
from medusa.infer.serve.tickets import Ticket

from .serving import CONTEXT, END, PROMPTS, engine, serving, tokenizer

MESSAGES: Any = [{"role": "user", "content": "What say you?"}]
HOLD = {"logit_bias": {str(tokenizer().eos_token_id): -100.0}}  # answers go on to their limit


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with serving() as found:
        yield found


def client_of(root: str, key: str = "none", **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{root}v1", api_key=key, max_retries=0, **options)


@pytest.fixture(scope="module")
def client(root: str) -> OpenAI:
    return client_of(root)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take a while."""
    step = Decoder.step

    def sleep(self: Decoder) -> Step:
        time.sleep(0.03)
        return step(self)

    monkeypatch.setattr(Decoder, "step", sleep)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def health(root: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{root}health").json()
    return found


def figure(root: str, name: str) -> float:
    lines = httpx.get(f"{root}metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


# Answers, by OpenAI's client.


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"max_tokens": 20}, {"max_new_tokens": 20}),
        ({"max_completion_tokens": 9, "temperature": 0}, {"max_new_tokens": 9, "temperature": 0.0}),
        ({"temperature": 0.9, "seed": 5, "max_tokens": 30}, {"temperature": 0.9, "seed": 5, "max_new_tokens": 30}),
        (
            {"temperature": 1.2, "top_p": 0.8, "seed": 6, "max_tokens": 20, "frequency_penalty": 0.5},
            {"temperature": 1.2, "top_p": 0.8, "seed": 6, "max_new_tokens": 20, "frequency_penalty": 0.5},
        ),
        ({"stop": ["e", "ou"], "max_tokens": 40}, {"stop_strings": ["e", "ou"], "max_new_tokens": 40}),
        ({"logit_bias": {"7": 3.5}, "max_tokens": 9}, {"sequence_bias": {(7,): 3.5}, "max_new_tokens": 9}),
        ({"presence_penalty": -1.5, "max_tokens": 25}, {"presence_penalty": -1.5, "max_new_tokens": 25}),
        (
            {"extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}, "temperature": 1, "seed": 1},
            {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 1.0, "seed": 1},
        ),
        ({"extra_body": {"baseline": True}, "max_tokens": 20}, {"baseline": True, "max_new_tokens": 20}),
    ],
)
def test_chats_are_answered_as_the_engine_does(client: OpenAI, asked: dict[str, Any], options: dict[str, Any]) -> None:
    solo = engine().chat(MESSAGES, include_stop=False, **options)
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, **asked)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", solo.text)
    assert choice.finish_reason == {"eos": "stop", "stop": "stop", "length": "length"}[solo.finish_reason]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(solo.prompt_ids), len(solo.token_ids))
    assert reply.usage.total_tokens == len(solo.prompt_ids) + len(solo.token_ids)
    figures = choice.model_extra["medusa"]
    assert (figures["steps"], figures["accepted"], figures["seed"]) == (solo.steps, solo.accepted, solo.seed)
    streamed = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **asked))
    assert streamed[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == solo.text
    assert [chunk.choices[0].finish_reason for chunk in streamed if chunk.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    assert len({chunk.id for chunk in streamed}) == 1 and all(chunk.usage is None for chunk in streamed)


def test_texts_are_continued_as_the_engine_does(client: OpenAI) -> None:
    solo = engine().generate(
        PROMPTS[:3], max_new_tokens=12, temperature=1.0, seed=4, num_return_sequences=2, include_stop=False
    )
    asked = {"model": "tiny", "prompt": PROMPTS[:3], "max_tokens": 12, "temperature": 1, "seed": 4, "n": 2}
    reply = client.completions.create(**asked)
    assert [(choice.index, choice.text) for choice in reply.choices] == list(enumerate(each.text for each in solo))
    assert reply.usage.prompt_tokens == sum(len(tokenizer().encode(prompt)) for prompt in PROMPTS[:3])
    assert reply.usage.completion_tokens == sum(len(each.token_ids) for each in solo)
    texts = [""] * 6
    usage = None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [each.text for each in solo] and usage == reply.usage


def test_prompts_may_be_ids(client: OpenAI) -> None:
    ids = [tokenizer().encode(prompt) for prompt in PROMPTS[:2]]
    for prompt in (ids[0], ids):
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=9)
        many = ids if prompt is ids else [prompt]
        assert [choice.text for choice in reply.choices] == [
            each.text for each in engine().generate(many, max_new_tokens=9)
        ]


def test_messages_may_come_in_parts_and_from_a_developer(client: OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "it"},
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "say you?"}]},
        {"role": "assistant", "content": "Ay", "refusal": None, "annotations": []},
        {"role": "user", "content": "Why", "name": "you"},
    ]
    reply = client.chat.completions.create(model="tiny", messages=parts, max_tokens=12)
    plain = [("system", "it"), ("user", "What say you?"), ("assistant", "Ay"), ("user", "Why")]
    solo = engine().chat([{"role": role, "content": content} for role, content in plain], max_new_tokens=12)
    assert reply.choices[0].message.content == solo.text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_are_the_engines(client: OpenAI, stream: bool) -> None:
    asked = {"max_tokens": 15, "logprobs": True, "top_logprobs": 3, "stop": "e"}
    solo = engine().chat(
        MESSAGES, max_new_tokens=15, logprobs=True, top_logprobs=3, stop_strings="e", include_stop=False
    )
    reply: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream, **asked)  # type: ignore[call-overload]
    chunks = list(reply) if stream else [reply]
    told = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    size = len(solo.token_ids) - (solo.finish_reason == "eos")
    assert solo.logprobs is not None and solo.top_logprobs is not None
    assert [each.logprob for each in told] == pytest.approx(solo.logprobs[:size])
    assert [[top.logprob for top in each.top_logprobs] for each in told] == [
        pytest.approx(list(top.values())) for top in solo.top_logprobs[:size]
    ]
    assert all(each.bytes is None or bytes(each.bytes).decode() == each.token for each in told)
    assert [each.token for each in told if each.bytes] == [
        text for text in map(tokenizer().decode, solo.token_ids[:size]) if "\ufffd" not in text
    ]


def test_logprobs_of_a_continuation(client: OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="O", max_tokens=12, logprobs=2)
    solo = engine().generate("O", max_new_tokens=12, logprobs=True, top_logprobs=2)
    table = reply.choices[0].logprobs
    assert table is not None and table.tokens is not None and table.text_offset is not None
    assert table.token_logprobs == pytest.approx(solo.logprobs)
    assert table.tokens == [tokenizer().decode([token]) for token in solo.token_ids]
    assert table.text_offset == [sum(map(len, table.tokens[:place])) for place in range(len(table.tokens))]
    assert table.top_logprobs is not None and all(1 <= len(top) <= 2 for top in table.top_logprobs)
    none: Any = client.completions.create(model="tiny", prompt="O", max_tokens=2, logprobs=0).choices[0].logprobs
    assert len(none.tokens) == 2 and none.top_logprobs == [{}, {}]


def test_a_stream_tells_what_was_guessed_where(root: str) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 30, "stream": True, "drafts": True, **HOLD}
    asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 30}
    for plain in (False, True):
        text, depths = "", set()
        last: dict[str, Any] = {}
        with httpx.stream("POST", root + TEXT, json=body | {"baseline": plain}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for chunk in (json.loads(line.removeprefix("data: ")) for line in lines[:-1]):
            (choice,) = chunk["choices"]
            told = choice.get("medusa", {})
            if "drafts" in told:
                assert "".join(part["text"] for part in told["drafts"]) == choice["text"]
                assert last.get("tokens", 0) < told["tokens"] and last.get("steps", 0) <= told["steps"]
                depths |= {part["depth"] for part in told["drafts"]}
                text, last = text + choice["text"], told
        assert depths == ({0} if plain else {0, 1, 2, 3})
        assert last["tokens"] == 30 and (last["steps"] == 29 if plain else last["steps"] < 29)
        assert text == client_of(root).completions.create(**asked, extra_body=HOLD).choices[0].text


def test_an_answer_that_is_sampled_says_its_seed(client: OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 20}
    first = client.chat.completions.create(**ask)
    seed = first.choices[0].model_extra["medusa"]["seed"]
    again = client.chat.completions.create(**ask, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content and seed < 1 << 53


def test_answers_at_once_are_each_what_they_are_alone(root: str) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        reply = client_of(root).completions.create(
            model="tiny", prompt=PROMPTS[number % 8], max_tokens=20, temperature=number % 2, seed=number
        )
        found[number] = reply.choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        number: engine()
        .generate(PROMPTS[number % 8], max_new_tokens=20, temperature=float(number % 2), seed=number)
        .text
        for number in range(24)
    }


def test_the_examples_of_the_guide_work(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    told = guide.replace("http://127.0.0.1:8000/", root).replace('model="smollm2"', 'model="tiny"')
    asked: Any = [{"role": "user", "content": "Why is the sky blue?"}]
    (python,) = re.findall(r"```py\n(.*?)```", told, re.DOTALL)
    exec(compile(python, "<guide>", "exec"), {})
    assert capsys.readouterr().out == engine().chat(asked).text
    (curl,) = re.findall(r"```sh\n(.*?)```", told, re.DOTALL)
    if shutil.which("curl"):
        reply = json.loads(subprocess.run(["sh", "-c", f"{curl.rstrip()} -s"], capture_output=True, check=True).stdout)
        assert reply["choices"][0]["message"]["content"] == engine().chat(asked, max_new_tokens=60).text


# Facts.


def test_the_one_model_is_listed(client: OpenAI) -> None:
    (listed,) = client.models.list().data
    assert listed == client.models.retrieve("tiny")
    extra = listed.model_extra
    assert extra == {"context": CONTEXT, "chat": True, "drafter": "medusa"} and listed.owned_by == "medusa"
    with pytest.raises(openai.NotFoundError, match=r"no model 'tini' here \(did you mean tiny\?\)"):
        client.models.retrieve("tini")


def test_metrics_and_health(root: str, client: OpenAI) -> None:
    before = figure(root, "medusa_tokens_total")
    client.completions.create(model="tiny", prompt="O", max_tokens=10, extra_body=HOLD)
    assert figure(root, "medusa_tokens_total") == before + 10
    assert health(root) == {"status": "ok", "rows": 0, "waiting": 0}
    assert httpx.get(f"{root}metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_page_is_served_and_asks_nobody_else(root: str) -> None:
    for path, (_, kind) in FILES.items():
        reply = httpx.get(root + path.removeprefix("/"))
        assert reply.status_code == 200 and reply.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "://" not in reply.text.replace("http://www.w3.org/2000/svg", "")


def test_the_description_says_what_is_so(root: str) -> None:
    described = httpx.get(f"{root}openapi.json").json()
    assert set(described["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/metrics",
    }
    assert all("422" not in method["responses"] for path in described["paths"].values() for method in path.values())
    assert "HTTPValidationError" not in described["components"]["schemas"]


# Errors.

CHAT, TEXT = "v1/chat/completions", "v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (TEXT, {}, "prompt", "prompt is missing"),
        (TEXT, {"promt": "O"}, "promt", r"unknown parameter 'promt' \(did you mean prompt\?\)"),
        (TEXT, {"prompt": "O", "temperature": -1}, "temperature", "temperature=-1: input should be greater"),
        (TEXT, {"prompt": "O", "temperature": "1"}, "temperature", "temperature='1': input should be a valid number"),
        (TEXT, {"prompt": "O", "max_tokens": True}, "max_tokens", "max_tokens=True"),
        (TEXT, {"prompt": "O", "n": 2}, "n", "n=2, and greedy decoding has one answer"),
        (TEXT, {"prompt": "O", "n": 65, "temperature": 1}, "n", "65 answers asked for: this server takes 64"),
        (TEXT, {"prompt": ["O"] * 65}, "prompt", "65 answers asked for: this server takes 64"),
        (TEXT, {"prompt": "O", "stop": ""}, "stop", "stop=''"),
        (TEXT, {"prompt": "O", "stop": ["a", ""]}, "stop", "stop='': string should have at least 1"),
        (TEXT, {"prompt": "O", "top_p": 0.5}, "top_p", "top_p=0.5 has no effect on greedy decoding"),
        (TEXT, {"prompt": "O", "echo": True}, "echo", "echo=True: not supported here, leave it out"),
        (TEXT, {"prompt": "O", "echo": 0}, "echo", "echo=0: input should be a valid boolean"),
        (TEXT, {"prompt": "O", "best_of": True}, "best_of", "best_of=True: input should be a valid integer"),
        (TEXT, {"prompt": "O", "suffix": "x"}, "suffix", "suffix='x'"),
        (TEXT, {"prompt": "O", "logit_bias": {"x": 1}}, "logit_bias", "string should match pattern"),
        (TEXT, {"prompt": "O", "logit_bias": {"9999": 1}}, "logit_bias", "9999"),
        (TEXT, {"prompt": []}, "prompt", "prompt="),
        (TEXT, {"prompt": [9999]}, "prompt", "prompt 0 has token id 9999"),
        (TEXT, {"prompt": [5] * CONTEXT}, "prompt", f"{CONTEXT} tokens and a text may reach {CONTEXT}"),
        (TEXT, {"prompt": "O", "stream_options": {"include_usage": True}}, "stream_options", "without stream"),
        (CHAT, {"messages": []}, "messages", "messages="),
        (CHAT, {"messages": [{"role": "you", "content": "O"}]}, "messages[0].role", r"messages\[0\].role='you'"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages", "has an empty content"),
        (CHAT, {"messages": [{"role": "assistant", "content": "O"}]}, "messages", "the last of 1 messages is from"),
        (CHAT, {"messages": [{"role": "tool", "content": "O"}]}, "messages", "no tools here"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "input should be 'text'",
        ),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "tools="),
        (CHAT, {"messages": MESSAGES, "functions": []}, "functions", "functions is not supported here"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format", "'text'"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "top_logprobs=2 without logprobs"),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3},
            "max_completion_tokens",
            "max_completion_tokens=3 and max_tokens=2",
        ),
    ],
)
def test_wrong_requests_are_refused_by_name(root: str, path: str, body: dict[str, Any], param: str, said: str) -> None:
    for stream in (False, True):
        more = {} if "stream_options" in body else {"stream": stream}
        reply = httpx.post(root + path, json=body | more)
        error = reply.json()["error"]
        assert reply.status_code == 400 and set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error" and error["param"] == param
        assert re.search(said, error["message"]) and "\n" not in error["message"]
        assert (error["code"] == "context_length_exceeded") == (body.get("prompt") == [5] * CONTEXT)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "O", "temperature": NaN}',
        b'{"prompt": "O", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "O", "stop": "\\ud800"}',
        b'{"prompt": "O", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 20000 + b"}",
    ],
)
def test_bodies_that_are_none_are_refused(root: str, content: bytes) -> None:
    reply = httpx.post(root + TEXT, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_other_paths_and_methods_are_errors_of_the_same_shape(root: str) -> None:
    assert httpx.post(root + TEXT, content=b'{"prompt": "O"}').status_code == 400  # no JSON by its header
    for reply, status in ((httpx.get(f"{root}v2"), 404), (httpx.get(root + CHAT), 405)):
        assert reply.status_code == status and "Not" in reply.json()["error"]["message"]
    assert httpx.get(root + CHAT).headers["allow"] == "POST"


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


# Limits.


def test_large_bodies_are_refused_however_they_come() -> None:
    with serving(body=1000) as root:
        large = json.dumps({"prompt": "O" * 2000}).encode()
        reply = httpx.post(root + TEXT, content=large)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        chunks = iter([large[:500], large[500:]])  # no length is said beforehand
        reply = httpx.post(root + TEXT, content=chunks, headers={"content-type": "application/json"})
        assert reply.status_code == 413
        assert httpx.post(root + TEXT, json={"prompt": "O", "max_tokens": 2}).status_code == 200


def test_a_key_is_asked_for() -> None:
    with serving(key="sesame") as root:
        assert client_of(root, "sesame").models.list().data
        for wrong in ("open", "sesam", "sesamee"):
            with pytest.raises(openai.AuthenticationError, match="no valid key"):
                client_of(root, wrong).completions.create(model="tiny", prompt="O")
        bare = httpx.post(root + TEXT, content=b"{")
        assert bare.status_code == 401 and bare.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{root}metrics").status_code == 401
        assert httpx.get(f"{root}metrics", headers={"authorization": "bearer sesame"}).status_code == 200
        assert httpx.get(f"{root}health").status_code == httpx.get(root).status_code == 200
        described = httpx.get(f"{root}openapi.json").json()
        assert described["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}]


def test_only_its_own_names_are_served() -> None:
    with serving(hosts=("127.0.0.1", "localhost", "::1")) as root:
        port = root.rstrip("/").rpartition(":")[2]
        for host in (f"127.0.0.1:{port}", "LOCALHOST", "[::1]", f"[::1]:{port}"):
            assert httpx.get(f"{root}health", headers={"host": host}).status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example"):
            assert httpx.get(f"{root}health", headers={"host": host}).status_code == 403


def test_a_lower_context_is_kept() -> None:
    with serving(context=30) as root:
        reply = client_of(root).completions.create(model="tiny", prompt="O", extra_body=HOLD)
        assert reply.usage is not None and reply.usage.total_tokens == 30
        assert reply.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="a text may reach 30 here") as caught:
            client_of(root).completions.create(model="tiny", prompt=[5] * 30)
        assert caught.value.code == "context_length_exceeded"
        assert httpx.get(f"{root}v1/models").json()["data"][0]["context"] == 30


def test_a_full_queue_refuses(slow: None) -> None:
    with serving(rows=1, queue=1) as root:
        client = client_of(root)
        long: Any = {"model": "tiny", "prompt": "O", "max_tokens": 200, "stream": True, "extra_body": HOLD}
        with client.completions.create(**long) as first:
            next(iter(first))
            until(lambda: health(root)["rows"] == 1)
            with client.completions.create(**long):
                until(lambda: health(root)["waiting"] == 1)
                with pytest.raises(openai.RateLimitError, match="1 rows wait") as caught:
                    client.completions.create(model="tiny", prompt="O")
                assert caught.value.response.headers["retry-after"] == "1"
        until(lambda: health(root) == {"status": "ok", "rows": 0, "waiting": 0})


def test_time_runs_out(slow: None) -> None:
    with serving(timeout=0.4) as root:
        client = client_of(root)
        long: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "extra_body": HOLD}
        with pytest.raises(openai.InternalServerError, match=r"no whole answer within 0\.4 seconds") as caught:
            client.chat.completions.create(**long)
        assert caught.value.status_code == 504 and caught.value.response.headers["x-should-retry"] == "false"
        text = ""
        with pytest.raises(openai.APIError, match=r"no whole answer within 0\.4 seconds"):
            for chunk in client.chat.completions.create(**long, stream=True):
                text += chunk.choices[0].delta.content or ""
        assert text
        assert figure(root, 'medusa_requests_total{outcome="timeout"}') == 2
        assert health(root)["rows"] == 0


def test_a_client_that_leaves_frees_its_rows(slow: None) -> None:
    with serving() as root:
        long = {"prompt": ["O", "Ay"], "max_tokens": 240, **HOLD}
        with httpx.stream("POST", root + TEXT, json=long | {"stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            until(lambda: health(root)["rows"] == 2)
        until(lambda: health(root)["rows"] == 0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(root + TEXT, json=long, timeout=0.3)
        until(lambda: health(root)["rows"] == 0)
        assert figure(root, 'medusa_requests_total{outcome="cancelled"}') == 2
        assert figure(root, 'medusa_tokens_total{drafts="on"}') < 2 * 2 * 240
        assert client_of(root).completions.create(model="tiny", prompt="O", max_tokens=3).choices[0].text


def test_one_who_leaves_the_queue_is_not_served(slow: None) -> None:
    with serving(rows=1) as root:
        long = {"prompt": "O", "max_tokens": 240, "stream": True, **HOLD}
        with httpx.stream("POST", root + TEXT, json=long) as first:
            lines = first.iter_lines()
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(root + TEXT, json=long | {"stream": False}, timeout=0.3)
            until(lambda: health(root)["waiting"] == 0)
            assert health(root)["rows"] == 1


def test_one_who_leaves_before_anything_is_told_is_not_served() -> None:
    async def leave() -> bool:
        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        scheduler = Scheduler(engine())
        ticket = Ticket(scheduler, make_rows(engine(), [[5]], {}), receive)
        await asyncio.sleep(0)
        scheduler.turn()
        return scheduler.waiting == scheduler.serving == 0 and ticket._watch.done()

    assert asyncio.run(leave())


def test_a_failed_step_is_an_error_and_the_server_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Decoder) -> Step:
        raise RuntimeError("out of memory")

    with serving() as root:
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "step", fail)
            with pytest.raises(openai.InternalServerError, match=r"decoding failed \(RuntimeError\)"):
                client_of(root).completions.create(model="tiny", prompt="O", extra_body=HOLD)
        assert client_of(root).completions.create(model="tiny", prompt="O", max_tokens=3).choices


def test_what_is_under_way_ends_before_the_server_does(slow: None) -> None:
    texts: list[str] = []

    def ask(root: str) -> None:
        stream = client_of(root).completions.create(
            model="tiny", prompt="O", max_tokens=40, stream=True, extra_body=HOLD
        )
        texts.append("".join(chunk.choices[0].text for chunk in stream))

    with serving() as root:
        thread = threading.Thread(target=ask, args=(root,))
        thread.start()
        until(lambda: health(root)["rows"] == 1)
    thread.join()
    options = {"max_new_tokens": 40, "sequence_bias": {(tokenizer().eos_token_id,): -100.0}}
    assert texts == [engine().generate("O", **options).text] and END not in texts[0]
