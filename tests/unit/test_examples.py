"""Rows of every format: found by their fields, made into examples whose answers alone are learnt, or refused by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset

from medusa.data.corpus import DataConfig, load_texts
from medusa.data.examples import Example, Examples, make_examples
from medusa.data.records import format_of
from medusa.data.tokenizers import char_tokenizer, load_tokenizer
from medusa.errors import UserError

from .chats import CHATML, ENDLESS, GEMMA, STRIPS, chat_tokenizer, lines, messages

SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
SIZE = len(chat_tokenizer(CHATML))
DISTILLED = {"id": "x", "prompt_ids": [5, 6], "answer_ids": [7, 8], "finish": "eos"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def config(path: Path, **options: Any) -> DataConfig:
    return DataConfig(source=str(path), **options)


def examples_of(path: Path, tokenizer: Any = None, **options: Any) -> Examples:
    """Those of both splits."""
    settings = config(path, **options)
    train, heldout = load_texts(settings)
    tokenizer = tokenizer or chat_tokenizer(CHATML)
    first, second = (
        make_examples(split, tokenizer, settings, start) for split, start in ((train, 0), (heldout, len(train)))
    )
    return Examples(first.items + second.items, first.counts + second.counts, first.faults + second.faults)


def learnt(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(example.ids[example.supervised]))


@pytest.mark.parametrize(
    ("row", "kind", "options"),
    [
        ({"text": "hello"}, "text", {}),
        ({"messages": messages("hello", "hi")}, "messages", {}),
        ({"prompt": "hello", "completion": "hi"}, "completion", {}),
        (DISTILLED, "ids", {}),
        ({"prompt": "hello", "messages": messages("hello", "hi")}, "messages", {}),  # no completion
        ({"conversations": SHAREGPT}, "messages", {"messages_field": "conversations"}),
        ({"q": "hello", "a": "hi"}, "completion", {"prompt_field": "q", "completion_field": "a"}),
        ({"text": "hello", "messages": messages("hello", "hi")}, "messages", {"format": "messages"}),
        ({"text": "hello", "chat": messages("hello", "hi")}, "messages", {"messages_field": "chat"}),
        ({"body": "hello", "messages": messages("hello", "hi")}, "text", {"text_field": "body"}),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "folder", "stream"])
def test_the_format_shows_in_the_fields(
    row: dict[str, Any], kind: str, options: dict[str, Any], ending: str, tmp_path: Path
) -> None:
    rows, path = [row | {"other": 1}] * 4, tmp_path / f"a.{ending}"
    if ending == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif ending == "folder":
        path.mkdir()
        lines(path / "a.jsonl", *rows[:2])
        lines(path / "b.jsonl", *rows[2:])
    else:
        path = lines(tmp_path / "a.jsonl", *rows)
    more = {"streaming": True, "examples": 3} if ending == "stream" else {}
    train, heldout = load_texts(config(path, heldout=0.3, **options, **more))
    assert format_of(train) == format_of(heldout) == kind
    assert (len(train), len(heldout)) == (2, 1 if more else 2)
    if kind != "text":
        made = make_examples(train, chat_tokenizer(CHATML), config(path, **options))
        answer = [7, 8] if kind == "ids" else chat_tokenizer(None).encode("hi<|im_end|>")
        assert [example.ids[example.supervised].tolist() for example in made] == [answer] * 2


def test_a_bounded_number_of_rows_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": str(row)} for row in range(10)))
    for streaming in (False, True):
        train, heldout = load_texts(config(path, examples=4, heldout=0.25, streaming=streaming))
        assert [*train["text"], *heldout["text"]] == ["0", "1", "2", "3"] and len(heldout) == 1
    assert sum(map(len, load_texts(config(path, examples=40)))) == 10
    endless = datasets.IterableDataset.from_generator(lambda: ({"text": "x"} for _ in iter(int, 1)))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((args, options)) or endless)
    train, heldout = load_texts(DataConfig(source="some/set", streaming=True, examples=5))
    assert (len(train), len(heldout)) == (4, 1)
    assert asked == [(("some/set", None), {"split": "train", "streaming": True})]


def test_messages_and_several_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(GEMMA)
    said = messages("hi", "hi there", "hi", "the cat")
    path = lines(tmp_path / "a.jsonl", {"messages": said}, {"messages": messages("hello", "x")})
    first, second = examples_of(path, tokenizer)
    assert learnt(first, tokenizer) == "hi there<end_of_turn>the cat<end_of_turn>" and first.row == 0
    assert learnt(second, tokenizer) == "x<end_of_turn>" and second.row == 1
    assert len(first.prompts) == 2 and tokenizer.decode(first.ids[: first.prompts[1]]).endswith(
        "<start_of_turn>model\n"
    )
    labels = first.labels()
    assert torch.equal(labels != -100, first.supervised) and torch.equal(
        labels[first.supervised], first.ids[first.supervised]
    )
    (everything, _) = examples_of(path, tokenizer, supervise="all")
    assert everything.supervised.all() and everything.prompts == first.prompts and everything.ids.equal(first.ids)


def test_keys_that_only_some_messages_have_do_not_disturb(tmp_path: Path) -> None:
    said = messages("hello", "hi")
    named = [said[0] | {"name": "me"}, said[1]]
    path = tmp_path / "a.parquet"
    Dataset.from_list([{"messages": said}, {"messages": named}]).to_parquet(path)  # all get a name, which may be null
    plain, other = examples_of(path)
    assert plain.ids.equal(other.ids)
    Dataset.from_list([{"messages": said}, {"messages": SHAREGPT}]).to_parquet(path)
    plain, other = examples_of(path)
    assert plain.ids.equal(other.ids)


def test_a_completion_is_the_answer_of_a_chat_or_follows_as_it_stands(tmp_path: Path) -> None:
    rows = [{"prompt": "the cat", "completion": " sat on"}, {"prompt": "hello", "completion": " hi"}]
    path = lines(tmp_path / "a.jsonl", *rows)
    chat = chat_tokenizer(CHATML)
    assert learnt(examples_of(path, chat).items[0], chat) == " sat on<|im_end|>"
    for tokenizer, options in ((chat, {"template": "none"}), (chat_tokenizer(None), {})):
        first = examples_of(path, tokenizer, **options).items[0]
        assert tokenizer.decode(first.ids) == "the cat sat on</s>" and learnt(first, tokenizer) == " sat on</s>"
        assert first.prompts == (len(tokenizer.encode("the cat")),)
    turns = {"prompt": messages("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    (tmp_path / "b").mkdir()
    path = lines(tmp_path / "b" / "b.jsonl", turns, turns)
    assert learnt(examples_of(path, chat).items[0], chat) == "d<|im_end|>"


def test_a_completion_has_the_bos_and_the_eos_of_the_tokenizer_once(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer(None)
    marks = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    path = lines(tmp_path / "a.jsonl", *[{"prompt": "hello", "completion": " hi"}] * 2)
    for single in ("<s> $A", "<s> $A </s>"):
        tokenizer._tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=marks)
        first = examples_of(path, tokenizer).items[0]
        assert tokenizer.decode(first.ids) == "<s>hello hi</s>" and learnt(first, tokenizer) == " hi</s>"
    path = lines(tmp_path / "b.jsonl", *[{"prompt": "hello", "completion": " hi</s>"}] * 2)
    assert learnt(examples_of(path, tokenizer).items[0], tokenizer) == " hi</s>"


def test_distilled_answers_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [DISTILLED | {"id": name, "prompt_ids": [9, place]} for place, name in enumerate("cab")]
    rows[0]["finish"] = "length"
    (tmp_path / "out").mkdir()
    lines(tmp_path / "out" / "answers.jsonl", *rows)
    lines(tmp_path / "out" / "prompts.jsonl", {"number": 1, "text": "x", "ended": True})
    found = examples_of(tmp_path / "out")
    # In the order of their ids: they stand in the order in which they ended.
    assert [example.ids.tolist() for example in found] == [[9, 1, 7, 8], [9, 2, 7, 8], [9, 0, 7, 8]]
    assert [example.supervised.tolist() for example in found] == [[False, False, True, True]] * 3
    assert [example.prompts for example in found] == [(2,)] * 3 and found.counts["truncated"] == 1
    everything = examples_of(tmp_path / "out", supervise="all")
    assert all(example.supervised.all() and example.prompts == (2,) for example in everything)


BAD_ROWS = {
    "no messages": ({"messages": []}, r"messages is an empty list"),
    "no list": ({"messages": "hi"}, r"messages is 'hi': give a list"),
    "no message": ({"messages": ["hi"]}, r"messages\[0\] is 'hi': give an object"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role: the roles are system"),
    "wrong role": ({"messages": [{"role": "asistant", "content": "x"}]}, r"'asistant' \(did you mean assistant\?\)"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\] has no content"),
    "parts": ({"messages": [{"role": "user", "content": [1]}]}, r"messages\[0\] has the content \[1\]"),
    "no answer": ({"messages": messages("hello")}, "no message is the assistant's"),
    "empty completion": ({"prompt": "a", "completion": ""}, "the completion is empty"),
    "no completion": ({"prompt": "a", "completion": None}, "it has no completion: fill it in"),
    "no answer ids": (DISTILLED | {"answer_ids": []}, "answer_ids is empty"),
    "negative id": (DISTILLED | {"answer_ids": [-1]}, r"answer_ids is \[-1\]: give a list of token ids"),
    "large id": (DISTILLED | {"prompt_ids": [SIZE]}, f"token id {SIZE} is none of the {SIZE} of the tokenizer"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_or_left_out(name: str) -> None:
    row, message = BAD_ROWS[name]
    if "messages" in row:
        good: dict[str, Any] = {"messages": messages("a", "b")}
    else:
        good = DISTILLED if "prompt_ids" in row else {"prompt": "a", "completion": "b"}
    data = [good, json.loads(json.dumps(row)), good]
    settings = DataConfig(source="my.jsonl")
    mixed = Rows(data)
    with pytest.raises(UserError, match=rf"^row 8 of 'my.jsonl': .*{message}.*data\.faulty=drop$") as caught:
        make_examples(mixed, chat_tokenizer(CHATML), settings, first=7)
    assert "\n" not in str(caught.value)
    found = make_examples(mixed, chat_tokenizer(CHATML), DataConfig(source="my.jsonl", faulty="drop"), first=7)
    assert [example.row for example in found] == [7, 9] and found.counts["faulty"] == len(found.faults) == 1
    with pytest.raises(UserError, match=r"no row of 'my.jsonl' is of use, the first because: row 1 of"):
        make_examples(Rows(data[1:2]), chat_tokenizer(CHATML), DataConfig(source="my.jsonl", faulty="drop"), first=1)


class Rows(list[dict[str, Any]]):
    """Rows as a data set has them, whose types Arrow would not let differ."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"x": 1}], {}, r"has no field 'text', but x: name one with data\.text_field; text, messages, or prompt and"),
        ([{"x": 1}], {"format": "messages"}, r"has no field 'messages', but x: name one with data\.messages_field$"),
        (
            [{"prompt": "a", "completions": "b"}],
            {"format": "completion"},
            r"'completion' \(did you mean completions\?\)",
        ),
        ([{"x": 1}], {"messages_field": "chat"}, "has no field 'chat'"),
        ([{"text": "a", "messages": []}], {}, r"has the fields of text and messages: choose one by data\.format"),
        ([{"messages": messages("a", "b")}], {}, "has a single row, which can't be split: give at least 2"),
    ],
)
def test_fields_that_do_not_fit_are_named(
    rows: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_texts(config(lines(tmp_path / "a.jsonl", *rows), **options))
    assert "\n" not in str(caught.value)


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"say how many rows to take with data\.examples"):
        DataConfig(streaming=True)
    with pytest.raises(UserError, match=r"data\.examples=1 can't be split"):
        DataConfig(examples=1)
    (tmp_path / "a.txt").write_text("hello there")
    for options in ({"examples": 3}, {"format": "messages"}, {"streaming": True, "examples": 3}):
        with pytest.raises(UserError, match="is one text: streaming, examples and a format are for sources with rows"):
            load_texts(config(tmp_path / "a.txt", **options))
    chat = Dataset.from_dict({"messages": [messages("a", "b")] * 2})
    with pytest.raises(
        UserError, match=r"data\.template=none joins a prompt and its completion, but the data are messages"
    ):
        make_examples(chat, chat_tokenizer(CHATML), DataConfig(template="none"))
    with pytest.raises(UserError, match=r"no chat template: name a file with one by data\.template"):
        make_examples(chat, chat_tokenizer(None), DataConfig())
    turns = Dataset.from_dict({"prompt": [messages("a")] * 2, "completion": [messages("a", "b")[1:]] * 2})
    with pytest.raises(UserError, match=r"are messages, and there is no chat template: name one by data\.template"):
        make_examples(turns, chat_tokenizer(None), DataConfig())
    for kind in ("char", "bpe"):
        with pytest.raises(
            UserError, match=rf"'{kind}' is made from plain texts, and .* holds none: name one that exists"
        ):
            load_tokenizer(DataConfig(tokenizer=kind), chat, chat)


def test_merging_tokens_and_unknown_characters_are_faults_of_the_row() -> None:
    merging = Dataset.from_dict({"prompt": ["th"], "completion": ["e cat"]})
    with pytest.raises(UserError, match=r"row 0 .*the prompt's end 'th' and the completion's beginning 'e cat' merge"):
        make_examples(merging, chat_tokenizer(None), DataConfig())
    unknown = Dataset.from_dict({"prompt": ["ab"], "completion": ["c"]})
    with pytest.raises(UserError, match=r"row 0 of .*character 'c' .* at offset 2"):
        make_examples(unknown, char_tokenizer("ab"), DataConfig())


def test_what_was_noticed_is_counted() -> None:
    thoughts = messages("hello", "<think>a</think>hi", "and?", "it")
    chat = Dataset.from_dict({"messages": [thoughts, messages("a", "b")]})
    found = make_examples(chat, chat_tokenizer(STRIPS), DataConfig())
    assert len(found) == 3 and found.counts["repeated"] == 1
    assert [example.row for example in found] == [0, 0, 1] and found.counts["open_ended"] == 0
    assert make_examples(chat, chat_tokenizer(ENDLESS), DataConfig()).counts["open_ended"] == 3
    whole = make_examples(chat, chat_tokenizer(STRIPS), DataConfig(supervise="all"))
    assert len(whole) == 2 and whole.counts["repeated"] == 0 and all(example.supervised.all() for example in whole)
