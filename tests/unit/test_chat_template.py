"""Chat templates: exactly what the assistant writes is marked, whatever the template's shape."""

from __future__ import annotations

from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from medusa.data.chat import ChatTemplate, Rendered, TemplateFault
from medusa.errors import UserError

from .chats import (
    CHATML,
    ENDLESS,
    GEMMA,
    LAST_EOS,
    LLAMA2,
    SHAPES,
    STRIPS,
    TAGGED,
    chat_tokenizer,
    messages,
)

CHATS = {
    "one turn": ("hello", "hi there"),
    "several turns": ("hello", "hi", "what is it?", "it is this", "and?", "the cat"),
    "an answer that repeats the question": ("the cat sat", "the cat sat", "the cat sat", "the cat sat"),
    "an answer that repeats the template": ("say user", "user\nassistant\nsystem", "model", "model"),
    "an answer within a question": ("is hi there the answer", "hi there"),
    "an empty answer": ("hello", "", "and?", "hi"),
}


def marked(tokenizer: Any, rendered: Rendered) -> list[str]:
    """The text of each run of written tokens."""
    runs = groupby(zip(rendered.ids, rendered.written, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for written, run in runs if written]


@pytest.mark.parametrize(("shape", "chat", "words"), list(product(SHAPES, CHATS, (False, True))))
def test_what_is_marked_are_the_answers_and_their_ends(shape: str, chat: str, words: bool) -> None:
    template, end, bos = SHAPES[shape]
    tokenizer = chat_tokenizer(template, words)
    said = messages(*CHATS[chat])
    if shape.startswith("tagged") and not all(message["content"] for message in said):
        said = [message | {"content": message["content"] or "x"} for message in said]
    (rendered,) = ChatTemplate(tokenizer).answers(said)
    answers = [message["content"] for message in said[1::2]]
    got = marked(tokenizer, rendered)
    assert [text.replace(" ", "") for text in got] == [(answer + end).replace(" ", "") for answer in answers]
    if not words:
        assert [text.strip() for text in got] == [(answer + end).strip() for answer in answers]
    assert rendered.ids == tokenizer.apply_chat_template(said, return_dict=False)
    starts = [
        tokenizer.apply_chat_template(said[:turn], add_generation_prompt=True, return_dict=False)
        for turn in range(1, len(said), 2)
    ]
    if shape != "no generation prompt":
        assert [rendered.ids[:start] for start in rendered.prompts] == starts
    assert rendered.ids.count(tokenizer.bos_token_id) == (len(answers) if shape == "llama 2" else int(bos))
    assert rendered.ids[:2].count(tokenizer.bos_token_id) == int(bos)
    assert rendered.open_ended == 0


def test_the_header_is_no_part_of_an_answer_where_the_template_opens_none() -> None:
    tokenizer = chat_tokenizer(SHAPES["no generation prompt"][0])
    (rendered,) = ChatTemplate(tokenizer).answers(messages("hello", "hi"))
    assert tokenizer.decode(rendered.ids[: rendered.prompts[0]]).endswith("<|im_start|>assistant\n")


def test_answers_are_learnt_as_they_were_written_where_the_template_rewrites_them() -> None:
    tokenizer = chat_tokenizer(STRIPS)
    thought = ["<think>a</think>hi", "it is", "<think>b</think>it"]
    said = messages("hello", thought[0], "what is it?", thought[1], "and?", thought[2])
    found = ChatTemplate(tokenizer).answers(said)
    assert [marked(tokenizer, each) for each in found] == [
        [f"{thought[0]}<|im_end|>"],
        [f"{thought[1]}<|im_end|>", f"{thought[2]}<|im_end|>"],
    ]
    assert "<think>a" not in tokenizer.decode(found[1].ids) and len(found[1].prompts) == 2


def test_an_answer_that_nothing_ends_is_marked_alone_and_counted() -> None:
    tokenizer = chat_tokenizer(ENDLESS)
    (rendered,) = ChatTemplate(tokenizer).answers(messages("hello", "hi", "and?", "it is"))
    assert marked(tokenizer, rendered) == ["hi", "it is"] and rendered.open_ended == 2


def test_an_end_that_only_the_last_answer_has_is_learnt_with_each() -> None:
    tokenizer = chat_tokenizer(LAST_EOS)
    found = ChatTemplate(tokenizer).answers(messages("hello", "hi", "and?", "it is"))
    assert [marked(tokenizer, each) for each in found] == [["hi\n</s>"], ["it is\n</s>"]]


def test_an_end_that_merges_with_what_follows_is_learnt_where_it_is_the_last() -> None:
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    found = ChatTemplate(tokenizer).answers(messages("hello\n", "th", "e cat\n", "sat"))
    assert [marked(tokenizer, each) for each in found] == [["th"], ["sat"]]


THINKS = "assistant\n' + ('' if thinking is defined else '<think>') }}"


def test_a_template_has_variables_of_its_own_and_tags_outrank_the_prompt() -> None:
    prompts_thought = CHATML.replace("assistant\n' }}", THINKS)
    said = messages("hello", "hi")
    with pytest.raises(UserError, match=r"the prompt has '<think>', .*data\.template_options may change that"):
        ChatTemplate(chat_tokenizer(prompts_thought)).answers(said)
    (rendered,) = ChatTemplate(chat_tokenizer(prompts_thought), options={"thinking": False}).answers(said)
    assert marked(chat_tokenizer(CHATML), rendered) == ["hi<|im_end|>"]
    (tagged,) = ChatTemplate(chat_tokenizer(TAGGED.replace("assistant\n' }}", THINKS))).answers(said)
    assert marked(chat_tokenizer(CHATML), tagged) == ["hi<|im_end|>"] and tagged.prompts == rendered.prompts


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_an_earlier_turn_is_context_where_only_later_ones_are_wanted(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    (rendered,) = ChatTemplate(tokenizer).answers(messages("hello", "hi", "and?", "it is", "so"), first=2)
    assert marked(tokenizer, rendered) == ["it is<|im_end|>"]
    assert tokenizer.decode(rendered.ids).endswith("it is<|im_end|>\n")  # what the user says last teaches nothing


def test_calls_of_tools_are_part_of_an_answer() -> None:
    calls = "{% for c in m.get('tool_calls') or [] %}{{ '\n<start_of_turn>' + c + '<end_of_turn>' }}{% endfor %}"
    tokenizer = chat_tokenizer(
        CHATML.replace("m['content'] + '<|im_end|>\n' }}", "m['content'] }}" + calls + "{{ '<|im_end|>\n' }}")
    )
    said = messages("hello", "hi")
    said[1]["tool_calls"] = ["the cat"]
    said.append({"role": "tool", "content": "sat"})
    (rendered,) = ChatTemplate(tokenizer).answers([*said, {"role": "assistant", "content": "it"}])
    assert marked(tokenizer, rendered) == ["hi\n<start_of_turn>the cat<end_of_turn><|im_end|>", "it<|im_end|>"]


def test_a_template_comes_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    tokenizer = chat_tokenizer(None)
    (rendered,) = ChatTemplate(tokenizer, str(tmp_path / "t.jinja")).answers(messages("hello", "hi"))
    assert marked(tokenizer, rendered) == ["hi<|im_end|>"]
    (other,) = ChatTemplate(chat_tokenizer(GEMMA), str(tmp_path / "t.jinja")).answers(messages("hello", "hi"))
    assert other == rendered


SPLIT = CHATML.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant: ' }}")
MERGES = ENDLESS.replace("## assistant:\n' }}", "## assistant: th' }}").replace("':' + '\n'", "': th'")


@pytest.mark.parametrize(
    ("template", "said", "message"),
    [
        (SPLIT, messages("a", "b"), r"does not begin an answered conversation with the prompt .* the prompt has ': '"),
        (MERGES, messages("a", "e cat"), r"lets tokens reach across the end of .*## assistant: th' into 'e cat"),
        (
            LLAMA2,
            [{"role": "system", "content": "x"}, *messages("a", "b")],
            "refuses messages of system.*only user and",
        ),
        (CHATML, messages("a"), "no message is the assistant's"),
        (CHATML.replace("m['content']", "'x'"), messages("a", "b"), "does not write the answer 'b' as it stands"),
        (
            CHATML.replace("m['content'] +", "m['content'] + m['content'] | length | string +"),
            messages("a", "b"),
            "does not write the answer 'b' as it stands",
        ),
        (CHATML.replace("m['content']", "m['nothing']"), messages("a", "b"), "refuses messages"),
        ("{% generation %}{% endgeneration %}" + CHATML, messages("a", "b"), "marks nothing of the answer 'b'"),
        ("{% for", messages("a", "b"), "the tokenizer's chat template refuses messages of user, assistant"),
        (CHATML, messages("a", "b")[1:], "no message is the assistant's"),  # it answers nothing
    ],
)
def test_a_fault_of_the_template_is_named(template: str, said: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate(chat_tokenizer(template)).answers(said)
    assert "\n" not in str(caught.value)


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the tokenizer has no chat template: name a file with one by data\.template"):
        ChatTemplate(chat_tokenizer(None))
    with pytest.raises(UserError, match=r"data\.template='chatml' is no file: give one that holds a chat template"):
        ChatTemplate(chat_tokenizer(CHATML), "chatml")
    assert issubclass(TemplateFault, UserError)
