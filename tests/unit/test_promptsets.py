"""Questions for benchmarks: our own, files of several fields, and how they become token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa.data.promptsets import CATEGORIES, Question, choose, read_questions, spec_questions
from medusa.errors import UserError
from medusa.infer.bench.prompt_sets import check_set, prompt_set
from medusa.infer.engine import Engine
from medusa.testing import tiny_trunk
from medusa.trunk import Trunk

from .chats import CHATML, chat_tokenizer, lines


def test_our_own_questions_fill_the_six_categories() -> None:
    found = spec_questions()
    assert list(dict.fromkeys(question.category for question in found)) == list(CATEGORIES)
    for category in CATEGORIES:
        mine = [question for question in found if question.category == category]
        assert 6 <= len(mine) <= 8
        assert {len(question.turns) for question in mine} == {2 if category == "conversation" else 1}
        if category in ("summarisation", "rag"):
            assert all(120 <= len(question.turns[0].split()) <= 260 for question in mine)
    assert len({question.turns for question in found}) == len(found)


def test_categories_take_turns() -> None:
    questions = [Question(category, (f"{category}{number}",)) for category in "abc" for number in range(3)]
    del questions[-2:]  # c has one alone
    chosen = [question.turns[0] for question in choose(questions, 6)]
    assert chosen == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert [question.turns[0] for question in choose(questions, 9, ["b"])] == ["b0", "b1", "b2"]


def test_files_are_read_by_their_fields(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = lines(
        tmp_path / "q.jsonl",
        {"prompt": "one"},
        {"messages": [*asked, {"role": "assistant", "content": "left out"}], "category": "chat"},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["sum"], "reference": ["4"]},
        {"prompt": ["first", "second"], "category": "rag"},  # as some copies of MT-bench have it
    )
    assert read_questions(path) == [
        Question("all", ("one",)),
        Question("chat", ("c",), tuple(asked[:2])),
        Question("conversation", ("first", "second")),
        Question("mathematics", ("sum",)),
        Question("rag", ("first", "second")),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "x", "category": "qa"}', r"line 1 has question, category, and none of turns, messages, prompt:"),
        ('{"prompt": "x"}\n{"turns": "x"}', r"line 2 has turns='x': give a list of texts"),
        ('{"turns": ["x", " "]}', r"line 1 has an empty turn: give what the user says"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1 asks nothing"),
        ('{"messages": [{"role": "usr", "content": "x"}]}', r"messages\[0\] is from 'usr' \(did you mean user\?\)"),
        ("\n{broken", "line 2 is no JSON"),
        ("[1]", r"line 1 is \[1\]: give a JSON object on each line"),
        ("\n", "holds no line"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says) as raised:
        read_questions(tmp_path / "q.jsonl")
    assert "\n" not in str(raised.value)


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"category 'translatoin' \(did you mean translation\?\): these questions have"):
        choose(spec_questions(), 3, ["translatoin"])
    with pytest.raises(UserError, match=r"prompt set 'spek' \(did you mean spec\?\): choose from heldout, tinys"):
        check_set("spek")
    check_set("mine.jsonl")


def trunk_with(template: str | None) -> Trunk:
    tokenizer = chat_tokenizer(template)
    trunk = tiny_trunk("llama", vocab_size=len(tokenizer), seed=1, max_position_embeddings=256)
    return Trunk(trunk.model, tokenizer)


def make(trunk: Trunk, path: Path, **changes) -> list:
    return prompt_set(str(path), trunk, None, **({"count": 9, "length": 8, "tokens": 5} | changes)).prompts


@pytest.fixture
def two_turns(tmp_path: Path) -> Path:
    return lines(tmp_path / "q.jsonl", {"turns": ["hello", "what is it?"], "category": "qa"}, {"prompt": "the cat"})


def test_a_later_turn_holds_the_models_own_answer(two_turns: Path) -> None:
    trunk = trunk_with(CHATML)
    first, second, third = make(trunk, two_turns)
    assert [(each.category, each.turn) for each in (first, second, third)] == [("qa", 0), ("qa", 1), ("all", 0)]
    answer = Engine(trunk).chat([{"role": "user", "content": "hello"}], max_new_tokens=5, do_sample=False)
    assert first.ids == answer.prompt_ids
    conversation = [("user", "hello"), ("assistant", answer.text), ("user", "what is it?")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in conversation)
    assert trunk.tokenizer is not None
    assert trunk.tokenizer.decode(second.ids) == text + "<|im_start|>assistant\n"
    assert answer.text  # else nothing was shown


def test_a_trunk_without_template_reads_text(two_turns: Path) -> None:
    trunk = trunk_with(None)
    first, second, third = make(trunk, two_turns)
    assert trunk.tokenizer is not None
    texts = [trunk.tokenizer.decode(each.ids) for each in (first, second, third)]
    answer = Engine(trunk).generate(first.ids, max_new_tokens=5, do_sample=False).text
    assert texts == ["hello\n\n", f"hello\n\n{answer.rstrip()}\n\nwhat is it?\n\n", "the cat"]


def test_prompts_that_do_not_fit_are_refused(two_turns: Path) -> None:
    trunk = trunk_with(CHATML)
    with pytest.raises(UserError, match=r"prompt set '.*q.jsonl': its longest prompt has \d+ tokens, and with max_new"):
        make(trunk, two_turns, tokens=250)


def test_held_out_prompts_need_a_run() -> None:
    with pytest.raises(UserError, match=r"prompt set 'heldout': it is cut from the text that a run's config"):
        prompt_set("heldout", trunk_with(None), None, count=1, length=1, tokens=1)
