"""Streams and streamers: what is told is what the whole answer holds, in generate's order, and never too early."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer

from medusa.data.tokenizers import char_tokenizer
from medusa.decoding import Step
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.testing import ScriptedDrafter, plain_greedy, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PROMPT = [38, 37, 15, 42, 26]
NEW = 20


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    trunk = tiny_trunk("llama")
    trunk.tokenizer = char_tokenizer(ALPHABET)
    return trunk


@pytest.fixture(scope="module")
def greedy(trunk: Trunk) -> list[int]:
    return plain_greedy(trunk, PROMPT, NEW)


@pytest.fixture(params=["null", "heads", "truth"])
def engine(request: pytest.FixtureRequest, trunk: Trunk, greedy: list[int]) -> Engine:
    tree = Topology.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
    drafters = {
        "null": NullDrafter(),
        "heads": MedusaDrafter(MedusaHeads(HeadsConfig("root", num=3), trunk), tree),
        "truth": ScriptedDrafter([[*greedy, *[0] * NEW]], honesty=1.0, size=12),
    }
    return Engine(trunk, drafters[request.param])


class Recorder:
    """A streamer that writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.dtype == torch.long and value.device.type == "cpu"
        self.calls.append((tuple(value.shape), value.flatten().tolist()))

    def end(self) -> None:
        self.calls.append("end")


def from_generate(trunk: Trunk, streamer: Any, **options: Any) -> None:
    ids_1T = torch.tensor([PROMPT])
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "tokenizer": trunk.tokenizer} | options
    trunk.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), streamer=streamer, **options)


def text_of(trunk: Trunk, ids: Sequence[int]) -> str:
    assert trunk.tokenizer is not None
    return str(trunk.tokenizer.decode(ids))


def test_a_streamer_is_called_as_by_generate(engine: Engine, trunk: Trunk, greedy: list[int]) -> None:
    for options in (
        {},
        {"max_new_tokens": 1},
        {"eos_token_id": greedy[7]},
        {"stop_strings": text_of(trunk, greedy[5:8])},
        {"repetition_penalty": 1.8},
    ):
        expected, found = Recorder(), Recorder()
        from_generate(trunk, expected, **options)
        out = engine.generate(PROMPT, streamer=found, **{"max_new_tokens": NEW, **options})
        assert found.calls == expected.calls
        assert found.calls == [((1, 5), PROMPT), *[((1,), [token]) for token in out.token_ids], "end"]


def test_transformers_own_streamers(engine: Engine, trunk: Trunk, capsys: pytest.CaptureFixture[str]) -> None:
    from_generate(trunk, TextStreamer(trunk.tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    engine.generate(PROMPT, max_new_tokens=NEW, streamer=TextStreamer(trunk.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected != ""
    streamer = TextIteratorStreamer(trunk.tokenizer, timeout=30)
    thread = threading.Thread(
        target=engine.generate, kwargs={"prompt": PROMPT, "max_new_tokens": NEW, "streamer": streamer}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == text_of(trunk, PROMPT) + expected.removesuffix("\n")


def test_a_streamer_gets_ids_as_soon_as_they_are_certain(trunk: Trunk, greedy: list[int]) -> None:
    stop = text_of(trunk, greedy[9:12])
    engine, recorder, seen = Engine(trunk), Recorder(), []

    def criterion(ids: torch.Tensor, scores: object) -> bool:
        seen.append(len(recorder.calls) - 1)  # tokens told before this one
        return False

    out = engine.generate(
        PROMPT,
        max_new_tokens=NEW,
        stop_strings=stop,
        include_stop=False,
        stopping_criteria=criterion,
        streamer=recorder,
    )
    assert out.token_ids == greedy[:9]
    assert recorder.calls == [((1, 5), PROMPT), *[((1,), [token]) for token in greedy[:9]], "end"]
    assert seen == [*range(10), 9, 9]  # the stop's first two tokens are held back, all others told at once


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([PROMPT, PROMPT], {}, "takes one text, and this call makes 2"),
        (PROMPT, {"num_return_sequences": 2, "do_sample": True}, "this call makes 2"),
    ],
)
def test_a_streamer_takes_one_text(trunk: Trunk, prompt: Any, options: dict[str, Any], message: str) -> None:
    recorder = Recorder()
    with pytest.raises(UserError, match=message):
        Engine(trunk).generate(prompt, streamer=recorder, **options)
    assert recorder.calls == []
    assert len(Engine(trunk).generate([PROMPT], max_new_tokens=2, streamer=recorder)) == 1


def test_a_streamer_has_put_and_end(trunk: Trunk) -> None:
    with pytest.raises(UserError, match="has no put"):
        Engine(trunk).generate(PROMPT, streamer=print)  # type: ignore[arg-type]


@pytest.mark.parametrize("include", [True, False])
def test_a_stream_ends_where_the_text_ends(engine: Engine, trunk: Trunk, greedy: list[int], include: bool) -> None:
    for first in (0, 1, 2, 3, 5, 8, 13):
        for size in (1, 2, 4):
            stop = text_of(trunk, greedy[first : first + size])
            options: dict[str, Any] = {"max_new_tokens": NEW, "stop_strings": [stop, "zq"], "include_stop": include}
            stream = engine.stream(PROMPT, **options)
            pieces = list(stream)
            whole = engine.generate(PROMPT, **options, logprobs=True)
            done = stream.completion
            assert done is not None and all(pieces)
            assert "".join(pieces) == done.text == whole.text == text_of(trunk, whole.token_ids)
            assert done.token_ids == whole.token_ids == greedy[: len(whole.token_ids)]
            assert (whole.finish_reason, whole.stop) == ("stop", stop)
            assert whole.text.endswith(stop) if include else stop not in whole.text
            assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
            assert sum(whole.accepted) == whole.steps
            assert done.steps == whole.steps


def test_no_piece_goes_beyond_what_may_be_a_stop(trunk: Trunk, greedy: list[int]) -> None:
    stop = text_of(trunk, greedy[6:10])
    stream = Engine(trunk).stream(PROMPT, max_new_tokens=NEW, stop_strings=stop, include_stop=False)
    assert list(stream) == [text_of(trunk, [token]) for token in greedy[:6]]
    late = stop[:3] + "\n"  # begins as the text does, and is not what comes
    stream = Engine(trunk).stream(PROMPT, max_new_tokens=NEW, stop_strings=late, include_stop=False)
    held = text_of(trunk, greedy[6:10])
    assert list(stream)[6] == held
    assert stream.completion is not None and stream.completion.text == text_of(trunk, greedy)


def test_what_was_held_back_comes_at_the_end(trunk: Trunk, greedy: list[int]) -> None:
    late = text_of(trunk, greedy[NEW - 3 :]) + "zz"
    stream = Engine(trunk).stream(PROMPT, max_new_tokens=NEW, stop_strings=late, include_stop=False)
    pieces = list(stream)
    assert "".join(pieces) == text_of(trunk, greedy) and pieces[-1] == text_of(trunk, greedy[NEW - 3 :])
    recorder = Recorder()
    Engine(trunk).generate(PROMPT, max_new_tokens=NEW, stop_strings=late, include_stop=False, streamer=recorder)
    assert len(recorder.calls) == NEW + 2


@pytest.mark.parametrize("way", ["close", "with", "drop", "unread"])
def test_an_abandoned_stream_stops_decoding(trunk: Trunk, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    from medusa.infer import engine as module

    ended: list[str] = []
    decode = module.decode

    def spy(*args: Any, **options: Any) -> Iterator[Step]:
        try:
            yield from decode(*args, **options)
        finally:
            ended.append("freed")

    monkeypatch.setattr(module, "decode", spy)
    stream = Engine(trunk).stream(PROMPT, max_new_tokens=NEW)
    if way != "unread":
        next(stream), next(stream)
    assert ended == []
    if way in ("close", "unread"):
        stream.close()
    elif way == "with":
        with stream:
            pass
    else:
        del stream
        assert ended == ["freed"]
        return
    assert ended == ["freed"]
    assert stream.completion is None
    assert list(stream) == []


def test_a_stream_takes_one_prompt(trunk: Trunk) -> None:
    for prompt in (["O", "P"], [PROMPT, PROMPT]):
        with pytest.raises(UserError, match="stream takes one prompt and not 2"):
            Engine(trunk).stream(prompt)
    with pytest.raises(UserError, match="one prompt"):
        Engine(trunk).stream(PROMPT, num_return_sequences=2, do_sample=True)
    assert len(list(Engine(trunk).stream([PROMPT], max_new_tokens=3))) == 3
    assert len(list(Engine(trunk).stream(input_ids=torch.tensor([PROMPT]), max_new_tokens=3))) == 3


def test_an_eos_that_completes_a_stop_string_is_a_stop(trunk: Trunk, greedy: list[int]) -> None:
    stop = text_of(trunk, greedy[6:8])
    for include, count in ((True, 8), (False, 6)):
        out = Engine(trunk).generate(
            PROMPT, max_new_tokens=NEW, stop_strings=stop, include_stop=include, eos_token_id=greedy[7]
        )
        assert (out.finish_reason, out.stop, out.token_ids) == ("stop", stop, greedy[:count])
    out = Engine(trunk).generate(PROMPT, max_new_tokens=NEW, stop_strings="zq", eos_token_id=greedy[7])
    assert (out.finish_reason, out.stop) == ("eos", None)


def test_a_stop_before_any_text_leaves_nothing(trunk: Trunk, greedy: list[int]) -> None:
    stop = text_of(trunk, [PROMPT[-1], greedy[0]])
    out = Engine(trunk).generate(PROMPT, max_new_tokens=NEW, stop_strings=stop, include_stop=False, logprobs=True)
    assert (out.text, out.token_ids, out.logprobs, out.stop, out.tokens_per_step) == ("", [], [], stop, 0.0)
    assert list(Engine(trunk).stream(PROMPT, max_new_tokens=NEW, stop_strings=stop, include_stop=False)) == []
    stop = text_of(trunk, [PROMPT[-1], *greedy[:3]])
    out = Engine(trunk).generate(PROMPT, max_new_tokens=NEW, stop_strings=stop, include_stop=False)
    assert (out.token_ids, out.steps, out.tokens_per_step) == ([], 2, 0.0)
