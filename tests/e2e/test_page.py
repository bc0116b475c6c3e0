"""The page in a headless Chromium, driven by WebDriver as a person would: typed into, clicked, read."""

from __future__ import annotations

import copy
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from medusa.decoding import Decoder, Step
from medusa.infer import Engine

from ..unit.serving import PROMPTS, drafter, engine, serving, tokenizer, trunk

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DRIVER is None or BROWSER is None, reason="no Chromium here, or no chromedriver"),
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name of an element's id (W3C WebDriver, section 12)


class Browser:
    """A session of WebDriver."""

    def __init__(self, driver: str) -> None:
        options = {
            "binary": BROWSER,
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--window-size=1000,800",
            ],
        }
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._web = httpx.Client(base_url=driver, timeout=120)
        self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})["sessionId"]

    def __call__(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self._ask("POST", self._path("execute/sync"), {"script": script, "args": args})

    def open(self, url: str) -> None:
        self._ask("POST", self._path("url"), {"url": url})

    def click(self, where: str) -> None:
        self._ask("POST", self._path(f"element/{self._find(where)}/click"), {})

    def type(self, where: str, text: str) -> None:
        self._ask("POST", self._path(f"element/{self._find(where)}/value"), {"text": text})

    def text(self, where: str) -> list[str]:
        """The texts of all elements there, as they are written."""
        found: list[str] = self("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", where)
        return found

    def complaints(self) -> list[str]:
        """What the console was told of."""
        return [each["message"] for each in self._ask("POST", self._path("se/log"), {"type": "browser"})]

    def close(self) -> None:
        self._ask("DELETE", self._path(""), None)

    def _path(self, what: str) -> str:
        return f"/session/{self._session}/{what}".rstrip("/")

    def _find(self, where: str) -> str:
        found: str = self._ask("POST", self._path("element"), {"using": "css selector", "value": where})[ELEMENT]
        return found

    def _ask(self, method: str, path: str, body: Any) -> Any:
        reply = self._web.request(method, path, json=body) if body is not None else self._web.request(method, path)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]


@pytest.fixture(scope="module")
def driver() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _ready(url))
        yield url
        process.terminate()


def _ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/status").json()["value"]["ready"])
    except httpx.TransportError:
        return False


@pytest.fixture
def browser(driver: str) -> Iterator[Browser]:
    session = Browser(driver)
    yield session
    session.close()


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def say(browser: Browser, text: str) -> tuple[str, str]:
    """Say something; return what is answered, once it is whole, and the note below it."""
    before = len(browser.text(".assistant .note"))
    browser.type("#text", text)
    browser.click("#send")
    until(lambda: len(browser.text(".assistant .note")) > before)
    until(lambda: not browser("return document.getElementById('send').disabled"))
    return browser.text(".assistant .said")[-1], browser.text(".assistant .note")[-1]


def opened(browser: Browser, root: str, most: int = 30) -> None:
    browser.open(root)
    until(lambda: browser.text("#model")[0].startswith("tiny"))
    browser("document.getElementById('most').value = arguments[0]", most)


def depths(browser: Browser) -> dict[str, str]:
    """The text at each depth of the last answer."""
    parts = "document.querySelectorAll('.assistant:last-child .said span')"
    found: list[list[str]] = browser(f"return [...{parts}].map(e => [e.className, e.textContent])")
    texts: dict[str, str] = {}
    for name, text in found:
        texts[name] = texts.get(name, "") + text
    return texts


def user(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def test_a_chat_is_answered_tinted_and_measured(browser: Browser) -> None:
    with serving() as root:
        opened(browser, root)
        assert browser.text("#model") == ["tiny: drafts by medusa, texts up to 256 tokens"]
        answer, said = say(browser, PROMPTS[0])
        solo = engine().chat(user(PROMPTS[0]), max_new_tokens=30)
        assert answer == solo.text and browser.text(".user .said") == [PROMPTS[0]]
        found = depths(browser)
        assert "".join(sorted("".join(found.values()))) == "".join(sorted(solo.text))
        assert {"", "d1"} <= set(found) <= {"", "d1", "d2", "d3"}
        tint = "return getComputedStyle(document.querySelector('.assistant .d1')).backgroundColor"
        coloured = browser(tint)
        browser.click("#tint")
        assert browser(tint) != coloured
        assert browser.text("#tokens") == [str(len(solo.token_ids))] and browser.text("#steps") == [str(solo.steps)]
        assert browser.text("#per-step") == [f"{solo.tokens_per_step:.2f}"]
        rate = float(browser.text("#rate")[0])
        assert rate > 0 and re.fullmatch(
            rf"drafts: {len(solo.token_ids)} tokens in [\d.]+ s, {rate:.1f} tokens/s, {solo.tokens_per_step:.2f} tokens"
            r" per step(, cut at the limit)?",
            said,
        )
        second, _ = say(browser, "Why <b>not</b>")
        solo = engine().chat(user(PROMPTS[0], answer, "Why <b>not</b>"), max_new_tokens=30)
        assert second == solo.text and browser.text("#log b") == []
        assert browser.complaints() == []


def test_the_baseline_says_the_same_in_more_steps(browser: Browser) -> None:
    with serving() as root:
        opened(browser, root)
        answer, _ = say(browser, PROMPTS[0])
        browser.click("#clear")
        assert browser.text(".turn") == []
        browser.click("#baseline")
        plain, said = say(browser, PROMPTS[0])
        assert plain == answer and said.startswith("no drafts: ") and "1.00 tokens per step" in said
        assert set(depths(browser)) == {""} and browser.text("#per-step") == ["1.00"]


def test_a_sampled_answer_says_a_seed_that_gives_it_again(browser: Browser) -> None:
    with serving() as root:
        opened(browser, root)
        browser("document.getElementById('temperature').value = 1")
        answer, said = say(browser, PROMPTS[1])
        (seed,) = re.findall(r"seed (\d+)", said)
        options: Any = {"max_new_tokens": 30, "temperature": 1.0, "seed": int(seed)}
        assert answer == engine().chat(user(PROMPTS[1]), **options).text


def test_an_answer_is_stopped_and_its_row_is_free(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Decoder.step

    def slow(self: Decoder) -> Step:
        time.sleep(0.1)
        return step(self)

    monkeypatch.setattr(Decoder, "step", slow)
    with serving() as root:
        opened(browser, root, 200)
        browser("document.getElementById('temperature').value = 1.5")
        browser("document.getElementById('seed').value = 1")
        browser.type("#text", PROMPTS[2])
        browser.click("#send")
        until(lambda: browser.text(".assistant .said")[0])
        assert httpx.get(f"{root}health").json()["rows"] == 1 and float(browser.text("#rate")[0] or 1) > 0
        browser.click("#stop")
        until(lambda: browser.text(".assistant .note"))
        assert browser.text(".assistant .note") == ["stopped; this turn is forgotten"]
        until(lambda: httpx.get(f"{root}health").json()["rows"] == 0)
        assert browser("return document.getElementById('text').value") == PROMPTS[2]


def test_what_is_refused_is_said(browser: Browser) -> None:
    with serving(context=40) as root:
        opened(browser, root)
        answer, said = say(browser, "What say you, my lord? " * 20)
        assert answer == "" and "a text may reach 40 here" in said
        assert browser.text(".note.wrong") == [said]


def test_a_key_is_asked_for(browser: Browser) -> None:
    with serving(key="sesame") as root:
        browser.open(root)
        until(lambda: browser.text("#model") == ["this server asks for a key"])
        browser.type("#key", "sesame\t")
        until(lambda: browser.text("#model")[0].startswith("tiny"))
        assert say(browser, PROMPTS[0])[0] == engine().chat(user(PROMPTS[0])).text


def test_a_model_that_does_not_chat_continues_texts(browser: Browser) -> None:
    base = copy.copy(trunk())
    base.tokenizer = copy.deepcopy(tokenizer())
    base.tokenizer.chat_template = None
    own = Engine(base, drafter("medusa"))
    with serving(own) as root:
        opened(browser, root)
        text, _ = say(browser, PROMPTS[0])
        assert text == PROMPTS[0] + own.generate(PROMPTS[0], max_new_tokens=30).text
        assert {"prompt", "d1", "d2", "d3"} <= set(depths(browser)) and browser.text(".user") == []
