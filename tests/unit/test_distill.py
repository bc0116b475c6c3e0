"""Distillation: what is stored is what the trunk says, whatever the company, the order and the moment of a kill."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from medusa import __main__ as cli
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.decoding import Decoder
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.testing import plain_greedy, random_heads, tiny_trunk
from medusa.train import distill as answering
from medusa.train import prompts as prompting
from medusa.train.chatform import chat_ids, user_turn
from medusa.train.distill import DistillConfig, Example, distill, repeated_share
from medusa.train.distill_run import Distillation, Places
from medusa.train.lines import Lines, keep_settings
from medusa.train.prompts import Draft, OwnPrompts, Prompt, next_numbers, prompt_of, read_prompts, sift, write_drafts
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz[]/<>|_"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM = "<|im_start|>system\nYou are a help<|im_end|>\n"
CHATML_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a help<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no system turns') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + (message['role'] if message['role'] != 'assistant' else 'model') + '\\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
PLAIN = "{% for message in messages %}{{ 'Q:' + message['content'] + ';' }}{% endfor %}"
MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
# Around a user's turn: the whole header, that without a system turn, what ends it, whether that is one token.
SHAPES = {
    "chatml": (CHATML, "<|im_start|>user\n", "<|im_start|>user\n", "<|im_end|>", True),
    "system": (CHATML_SYSTEM, SYSTEM + "<|im_start|>user\n", "<|im_start|>user\n", "<|im_end|>", True),
    "llama2": (LLAMA2, "<s>[INST] ", "<s>[INST] ", "[/INST]", False),
    "gemma": (GEMMA, "<s><start_of_turn>user\n", "<s><start_of_turn>user\n", "<end_of_turn>", True),
    "vicuna": (VICUNA, "USER: ", "USER: ", "ASSISTANT:", False),
}
ONCE = "Apples and pears"


@cache
def tokenizer_of(template: str | None, kind: str = "chars") -> PreTrainedTokenizerFast:
    texts = ["[INST] what is it Apples and pears Is that so [/INST] USER: ASSISTANT: 3 men"] * 3
    tokenizer = char_tokenizer(ALPHABET) if kind == "chars" else train_bpe(texts, 400)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": MARKS})
    tokenizer.chat_template = template
    return tokenizer


@cache
def trunk_of(template: str | None = CHATML_SYSTEM, end: str = "<|im_end|>") -> Trunk:
    """A tiny trunk that ends some of its turns."""
    tokenizer = tokenizer_of(template)
    trunk = tiny_trunk("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    trunk.tokenizer = tokenizer
    final = tokenizer.convert_tokens_to_ids(end)
    trunk.model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        trunk.model.get_output_embeddings().weight[final] *= 2.0
    return trunk


def drafter_of(kind: str, trunk: Trunk) -> Drafter:
    if kind == "none":
        return NullDrafter()
    return MedusaDrafter(random_heads(trunk, HeadsConfig(kind, num=3)), Topology.full([3, 2, 1]))


def asked(count: int = 9) -> list[Prompt]:
    texts = [f"{'What ' * (1 + place % 3)}say you{'?' * place}" for place in range(count)]
    return [prompt_of(trunk_of(), text) for text in texts]


def by_id(examples: Sequence[Example]) -> dict[str, Example]:
    return {example.id: example for example in examples}


# Turns, found in the template.


@pytest.mark.parametrize("kind", ["chars", "bpe"])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_header_and_the_end_of_a_turn_are_found(shape: str, bare: bool, kind: str) -> None:
    template, whole, without, end, special = SHAPES[shape]
    tokenizer = tokenizer_of(template, kind)
    turn = user_turn(tokenizer, bare=bare)
    text = tokenizer.decode(turn.header)
    # a space that merges with the word after it is the word's
    assert text == (without if bare else whole).rstrip(" ") + (" " if kind == "chars" and whole.endswith(" ") else "")
    assert turn.end == end
    assert turn.end_id == (tokenizer.convert_tokens_to_ids(end) if special else None)
    assert turn.header.count(tokenizer.bos_token_id) == whole.startswith("<s>")
    if not bare:
        for said in ("Apples", "what is it", "3 men"):
            ids = chat_ids(tokenizer, [{"role": "user", "content": said}])
            assert ids[: len(turn.header)] == turn.header


def test_a_given_system_turn_stands_in_the_header() -> None:
    turn = user_turn(tokenizer_of(CHATML_SYSTEM), system="Be brief")
    text = tokenizer_of(CHATML_SYSTEM).decode(turn.header)
    assert text == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("{{ messages[0]['content'] | upper }}", {}, "word for word"),
        ("{{ bos_token + messages[0]['content'] }}", {}, "does not mark the end"),
        ("{{ messages[0]['content'] + ';' }}", {}, "puts nothing before"),
        (LLAMA2, {"system": "Be brief"}, r"refuses messages of system, user \(no system turns\)"),
        ("{{ 'Q:' + messages[-1]['content'] + ';' }}", {"bare": True}, "word for word"),
        ("{% for m in messages %}{{ m['content'] + ';' }}{% endfor %}", {"bare": True}, "where a later turn"),
    ],
)
def test_a_template_that_does_not_show_its_turns_is_refused(
    template: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        user_turn(tokenizer_of(template), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_are_the_templates_own_ids_with_one_bos(shape: str) -> None:
    tokenizer = tokenizer_of(SHAPES[shape][0], "bpe")
    messages = [{"role": "user", "content": "what is it"}]
    ids = chat_ids(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == SHAPES[shape][1].startswith("<s>")


def test_two_bos_and_unknown_characters_are_refused() -> None:
    with pytest.raises(UserError, match="BOS '<s>' twice"):
        chat_ids(tokenizer_of("{{ bos_token + bos_token + messages[0]['content'] }}"), [{"content": "Ay"}])
    with pytest.raises(UserError, match="nothing for a prompt"):
        chat_ids(tokenizer_of("{{ '' }}"), [{"role": "user", "content": "Ay"}])
    with pytest.raises(UserError, match=r"character 'é' \(U\+00E9\)"):
        chat_ids(tokenizer_of(CHATML), [{"role": "user", "content": "né"}])


# Prompts from files.


def test_prompts_are_read_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("What say you?\n\n  Ay  \nWhat say you?\n")
    (tmp_path / "p.jsonl").write_text(
        '{"id": 7, "prompt": "What say you?"}\n{"prompt": "Ay"}\n'
        '{"messages": [{"role": "user", "content": "Ay"}, {"role": "assistant", "content": "No"}]}\n'
        '{"messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Ay"}]}\n'
    )
    texts, dropped = read_prompts(tmp_path / "p.txt", trunk_of())
    assert [prompt.ids for prompt in texts] == [prompt_of(trunk_of(), said).ids for said in ("What say you?", "Ay")]
    assert dropped == {"duplicate": 1}
    lines, dropped = read_prompts(tmp_path / "p.jsonl", trunk_of())
    assert lines[0].id == "7" and lines[0].ids == texts[0].ids
    assert lines[1] == texts[1]  # the id is of what is said, whatever file it stands in
    assert len(lines) == 3 and dropped == {"duplicate": 1}  # what was answered to a turn is left out
    assert "Be<|im_end|>" in tokenizer_of(CHATML_SYSTEM).decode(lines[2].ids)
    told, _ = read_prompts(tmp_path / "p.jsonl", trunk_of(), system="Do")
    assert ["Do" in tokenizer_of(CHATML_SYSTEM).decode(prompt.ids) for prompt in told] == [True, True, False]
    assert told[1].id != lines[1].id


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n", "holds no prompt"),
        ("{\n", r"p.jsonl:1 is no JSON"),
        ('"Ay"\n', "one of prompt and messages"),
        ('{"text": "Ay"}\n', "one of prompt and messages"),
        ('{"prompt": "Ay", "messages": [1]}\n', "one of prompt and messages"),
        ('{"prompt": 3}\n', "prompt is 3: give a text"),
        ('{"messages": [3]}\n', "list of objects with role and content"),
        ('{"messages": [{"role": "system", "content": "Ay"}]}\n', "no message is the user's"),
        ('{"id": 1, "prompt": "Ay"}\n{"id": 1, "prompt": "No"}\n', "p.jsonl:2: the id '1' names an earlier"),
        ('{"prompt": "Ay"}\n{"prompt": "né"}\n', "p.jsonl:2: character"),
    ],
)
def test_wrong_prompts_are_refused_by_their_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_prompts(tmp_path / "p.jsonl", trunk_of())
    assert "\n" not in str(caught.value)


def test_a_trunk_without_a_template_continues_texts(tmp_path: Path) -> None:
    trunk = trunk_of(None)
    (tmp_path / "p.txt").write_text("What say\n")
    (prompt,), _ = read_prompts(tmp_path / "p.txt", trunk)
    assert trunk.tokenizer is not None
    assert prompt.ids == trunk.tokenizer.encode("What say")
    for said, system in (([{"role": "user", "content": "Ay"}], None), ("Ay", "Be brief")):
        with pytest.raises(UserError, match="no chat template"):
            prompt_of(trunk, said, system)  # type: ignore[arg-type]


# Prompts that the trunk writes.


@pytest.mark.parametrize("end", ["<|im_end|>", ";"])
def test_drafts_end_where_the_turn_does_and_depend_on_their_number_alone(end: str) -> None:
    trunk = trunk_of(CHATML_SYSTEM if end != ";" else PLAIN, end)
    assert trunk.tokenizer is not None
    turn, config = user_turn(trunk.tokenizer), OwnPrompts(max_tokens=24)
    assert (turn.end_id is None) == (end == ";")
    drafts = {
        each.number: each for each in write_drafts(trunk, NullDrafter(), turn, config, range(12), seed=1, rows=12)
    }
    alone = [*write_drafts(trunk, NullDrafter(), turn, config, [9, 2], seed=1, rows=1)]
    assert alone == [drafts[9], drafts[2]]
    assert len({draft.text for draft in drafts.values()}) > 6
    others = [*write_drafts(trunk, NullDrafter(), turn, config, [9, 2], seed=2, rows=1)]
    assert others[0].text != alone[0].text
    assert {draft.ended for draft in drafts.values()} == {True, False}
    for draft in drafts.values():
        assert end not in draft.text
        ids = trunk.tokenizer.encode(draft.text, add_special_tokens=False)
        assert draft.ended or len(ids) <= config.max_tokens


def test_an_end_in_several_tokens_is_found_in_the_tail() -> None:
    tokenizer = tokenizer_of(LLAMA2, "bpe")
    ids = tokenizer.encode("what is it, 3 men? é€ [/INST] Is", add_special_tokens=False)
    until = prompting._Until(tokenizer, "[/INST]")
    flags = [until(token) for token in ids]
    assert True in flags
    first = flags.index(True) + 1
    assert "[/INST]" in tokenizer.decode(ids[:first]) and "[/INST]" not in tokenizer.decode(ids[: first - 1])


def drafts_of(*texts: str) -> dict[int, Draft]:
    return {number: Draft(number, text, True) for number, text in enumerate(texts)}


def test_sifting_keeps_the_first_of_those_that_say_the_same() -> None:
    tokenizer, config = tokenizer_of(CHATML), OwnPrompts(count=3, min_chars=4)
    drafts = drafts_of(
        "What now?", "", "Ay", "what  NOW", "...!", "\ufffd what", "so <|im_start|>", "Where?", "Who is it"
    )
    drafts[9] = Draft(9, "and then", False)
    drafts |= {10: Draft(10, "Why me", True), 11: Draft(11, "How so", True)}
    kept, dropped = sift(drafts, config, tokenizer)
    assert kept == ["What now?", "Where?", "Who is it"]  # no more than asked for
    assert dropped == {"empty": 2, "short": 1, "duplicate": 1, "garbled": 2}
    kept, dropped = sift(drafts, replace(config, count=9), tokenizer)
    assert kept[3:] == ["Why me", "How so"] and dropped["truncated"] == 1
    shuffled = dict(random.Random(1).sample(sorted(drafts.items()), len(drafts)))
    assert sift(shuffled, config, tokenizer) == sift(drafts, config, tokenizer)
    del shuffled[7]  # until it is there nobody knows what counts after it
    assert sift(shuffled, config, tokenizer)[0] == ["What now?"]


def test_more_drafts_are_written_until_there_are_enough() -> None:
    config = OwnPrompts(count=10)
    assert next_numbers({}, config, 0) == list(range(10))
    drafts = drafts_of(*"abcdefghij")
    assert next_numbers(drafts, config, 5) == list(range(10, 20))  # half of them are of use
    del drafts[4]
    assert next_numbers(drafts, config, 4) == [4]  # what was not finished comes first
    with pytest.raises(UserError, match="of 64 prompts that the trunk wrote itself, 1 are of use"):
        next_numbers(drafts_of(*"x" * 64), config, 1)
    assert next_numbers(drafts_of(*"x" * 64), config, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "own.count=0"),
        ({"temperature": 0.0}, "own.temperature=0.0: give more than 0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"min_chars": 0}, "own.min_chars=0"),
    ],
)
def test_wrong_settings_of_own_prompts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OwnPrompts(**options)


# Answers.


@pytest.mark.parametrize("kind", ["none", "medusa"])
def test_greedy_answers_are_generates_ids_to_the_eos(kind: str) -> None:
    trunk, config = trunk_of(), DistillConfig(max_new_tokens=20)
    found = by_id([*distill(trunk, asked(), config, drafter=drafter_of(kind, trunk), rows=4)])
    (eos,), ends = trunk.eos_ids, set()
    for prompt in asked():
        ids = torch.tensor([prompt.ids])
        mask = torch.ones_like(ids)  # id 0 is no pad here
        text = trunk.model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        example = found[prompt.id]
        assert example.prompt_ids == prompt.ids
        assert example.answer_ids == text[0, len(prompt.ids) :].tolist()
        assert example.finish == ("eos" if example.answer_ids[-1] == eos else "length")
        assert len(example.answer_ids) == 20 or example.finish == "eos"
        assert example.temperature == 0 and example.top is None and "top" not in example.line()
        ends.add(example.finish)
    assert ends == {"eos", "length"}


def test_an_answer_depends_on_its_id_and_not_on_company_or_order() -> None:
    trunk, config = trunk_of(), DistillConfig(max_new_tokens=16, temperature=(0.0, 0.9), seed=3)
    prompts = asked(12)
    found = by_id([*distill(trunk, prompts, config, rows=12)])
    assert {example.temperature for example in found.values()} == {0.0, 0.9}
    shuffled = random.Random(5).sample(prompts, len(prompts))
    assert by_id([*distill(trunk, shuffled, config, rows=5)]) == found
    for prompt in prompts[:4]:
        assert [*distill(trunk, [prompt], config)] == [found[prompt.id]]
    assert len({example.seed for example in found.values()}) == 12
    other = by_id([*distill(trunk, prompts, replace(config, seed=4))])
    sampled = [name for name, example in found.items() if example.temperature]
    assert any(found[name].answer_ids != other[name].answer_ids for name in sampled if other[name].temperature)
    renamed = [*distill(trunk, [replace(each, id=f"{each.id}x") for each in prompts], config)]
    assert any(each.answer_ids != found[each.id[:-1]].answer_ids for each in renamed)


def test_rows_join_as_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[int] = []
    step = Decoder.step

    def watched(self: Decoder) -> Any:
        busy.append(len(self.rows))
        return step(self)

    monkeypatch.setattr(Decoder, "step", watched)
    trunk = trunk_of()
    ended = [example.id for example in distill(trunk, asked(), DistillConfig(max_new_tokens=20), rows=3)]
    assert max(busy) == 3 and ended != [prompt.id for prompt in asked()]
    assert sum(each == 3 for each in busy) > len(busy) / 2


def test_soft_labels_are_the_trunks_own_law() -> None:
    trunk, (prompt,) = trunk_of(), asked(1)
    config = DistillConfig(max_new_tokens=6, temperature=(1.3,), top_p=0.5, soft_labels=4)
    (example,) = distill(trunk, [prompt], config, drafter=drafter_of("medusa", trunk))
    assert example.top is not None and example.line()["top"] == example.top
    with torch.no_grad():
        logits = trunk.model(torch.tensor([prompt.ids + example.answer_ids])).logits[0, len(prompt.ids) - 1 : -1]
    top = logits.float().log_softmax(-1).topk(4)
    assert example.top["ids"] == top.indices.tolist()
    assert torch.allclose(torch.tensor(example.top["logprobs"]), top.values, atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "share"),
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4, 5], 0), ([1] * 5, 0.5), ([1, 2, 3, 4] * 3, 1 - 4 / 9), ([7] * 103, 0.99)],
)
def test_the_share_of_repeated_runs(ids: list[int], share: float) -> None:
    assert repeated_share(ids) == pytest.approx(share)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"soft_labels": -1}, "soft_labels=-1"),
        ({"temperature": ()}, "give at least one"),
        ({"temperature": (0.0, -1.0)}, "temperature=-1.0"),
        ({"top_p": 2.0}, "top_p=2.0"),
    ],
)
def test_wrong_settings_of_answers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DistillConfig(**options)


# Files.


def test_a_torn_last_line_is_cut_off_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with Lines(path) as lines:
        assert [*lines.read()] == []
        lines.append({"id": "né"})
    whole = path.read_bytes()
    for torn in (b'{"id": "b', b'{"id": "b"}', b"\xc3"):
        path.write_bytes(whole + torn)
        with Lines(path) as lines:
            assert [*lines.read()] == [{"id": "né"}]
            assert path.read_bytes() == whole
            lines.append({"id": 2})
        with Lines(path) as lines:
            assert [*lines.read()] == [{"id": "né"}, {"id": 2}]
    for wrong in (b"{\n", b"3\n"):
        path.write_bytes(wrong + whole)
        with Lines(path) as lines, pytest.raises(UserError, match=r"x\.jsonl:1 .*mend or remove that line"):
            [*lines.read()]


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    with Lines(tmp_path / "x.jsonl"), pytest.raises(UserError, match="being written by another process"):
        Lines(tmp_path / "x.jsonl")
    Lines(tmp_path / "x.jsonl").close()
    with pytest.raises(UserError, match=r"can't be used \(.*directory"):
        Lines(tmp_path)


def test_a_line_goes_out_in_full_or_is_refused(tmp_path: Path) -> None:
    class Disk:
        """Takes three bytes at a time, so many times."""

        def __init__(self, times: int) -> None:
            self.times, self.held = times, b""

        def write(self, content: bytes) -> int:
            self.times -= 1
            if self.times < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.held += bytes(content[:3])
            return min(3, len(content))

        def close(self) -> None:
            pass

    lines = Lines(tmp_path / "x.jsonl")
    lines.close()
    lines._file = disk = Disk(9)  # type: ignore[assignment]
    lines.append({"id": "abcdef"})
    assert disk.held == b'{"id":"abcdef"}\n'
    with pytest.raises(UserError, match=r"No space left on device.*go on with the same command"):
        lines.append({"id": "abcdefghi"})


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    meta, data = tmp_path / "m.json", tmp_path / "d.jsonl"
    keep_settings(meta, {"a": (1, 2), "own": {"b": 1}}, {"rows": 3}, data)
    keep_settings(meta, {"a": [1, 2], "own": {"b": 1}}, {"rows": 4}, data)
    assert json.loads(meta.read_text())["rows"] == 4
    before = meta.read_bytes()
    for settings, named in (
        ({"a": [1, 3], "own": {"b": 1}}, r"a=\[1, 2\], now it is \[1, 3\]"),
        ({"a": [1, 2], "own": {"b": 2}}, "own.b=1, now it is 2"),
        ({"a": [1, 2]}, "own.b=1, now it is None"),
        ({"a": [1, 2], "own": {"b": 1}, "c": 5}, "c=None, now it is 5"),
    ):
        with pytest.raises(UserError, match=named):
            keep_settings(meta, settings, {}, data)
        assert meta.read_bytes() == before
    for content, message in (
        ("{", "can't be read"),
        ("[]", "tells no settings"),
        ('{"settings": {}}', "has format None"),
    ):
        meta.write_text(content)
        with pytest.raises(UserError, match=message):
            keep_settings(meta, {}, {}, data)
    meta.unlink()
    data.write_text("{}\n")
    with pytest.raises(UserError, match=r"has no m\.json that tells how it was made"):
        keep_settings(meta, {}, {}, data)


def test_where_things_lie(tmp_path: Path) -> None:
    folder = Places.at(tmp_path / "set")
    assert [each.name for each in vars(folder).values()] == ["answers.jsonl", "prompts.jsonl", "meta.json"]
    file = Places.at(tmp_path / "set.jsonl")
    assert [each.name for each in vars(file).values()] == ["set.jsonl", "set.prompts.jsonl", "set.meta.json"]
    (tmp_path / "set.txt").write_text("x")
    with pytest.raises(UserError, match="is a file: name a folder"):
        Places.at(tmp_path / "set.txt")


# A whole distillation, and what may end it.

OWN = OwnPrompts(count=14, max_tokens=24, min_chars=1)
ANSWERS = DistillConfig(max_new_tokens=14, temperature=(0.0, 1.0), seed=1)


def work_at(
    out: Path, source: Path | OwnPrompts = OWN, config: DistillConfig = ANSWERS, **options: Any
) -> Distillation:
    return Distillation(trunk_of(), out, source, config, rows=4, **options)


def stored(path: Path) -> list[str]:
    """Lines in an order of their own: which came first is nobody's business."""
    return sorted(path.read_text().splitlines())


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Places:
    out = tmp_path_factory.mktemp("whole")
    work_at(out).run()
    return Places.at(out)


def test_own_prompts_are_written_sifted_and_answered(tmp_path: Path) -> None:
    said: list[str] = []
    work = work_at(tmp_path, report=said.append)
    tally = work.run()
    lines = [json.loads(line) for line in work.places.answers.read_text().splitlines()]
    drafts = [json.loads(line) for line in work.places.drafts.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == tally.examples == OWN.count
    assert tally.tokens == sum(len(line["answer_ids"]) for line in lines)
    assert tally.cut == sum(line["finish"] == "length" for line in lines) > 0
    assert len(drafts) > OWN.count  # some were of no use
    texts = {draft["text"] for draft in drafts if draft["ended"]}
    asked_for = {prompt_of(trunk_of(), text).id for text in texts if text}
    assert {line["id"] for line in lines} <= asked_for
    assert said[0].startswith("14 prompts of the trunk's own; dropped: ") and "truncated" in said[0]
    meta = json.loads(work.places.settings.read_text())
    assert meta["settings"]["fingerprint"] == trunk_of().fingerprint()
    assert "count" not in meta["settings"]["own"]
    assert work_at(tmp_path, report=said.append).run().text() == tally.text()  # nothing is left to do
    assert said[-1].startswith("there already: 14 answers")


class _Stop(Exception):
    pass


def test_stopped_at_any_example_and_resumed_it_is_as_if_never_stopped(
    tmp_path: Path, never_stopped: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, left = Lines.append, [0]

    def counted(self: Lines, content: Any) -> None:
        if not left[0]:
            raise _Stop
        left[0] -= 1
        append(self, content)

    monkeypatch.setattr(Lines, "append", counted)
    stops = 0
    for count in (0, 1, 3, 5, 2, 7, 1, 100):
        left[0] = count
        try:
            work_at(tmp_path).run()
        except _Stop:
            stops += 1
    assert stops == 7
    places = Places.at(tmp_path)
    assert stored(places.answers) == stored(never_stopped.answers)


def test_more_prompts_extend_what_is_there(tmp_path: Path, never_stopped: Places) -> None:
    work_at(tmp_path, replace(OWN, count=6)).run()
    few = stored(Places.at(tmp_path).answers)
    work_at(tmp_path).run()
    assert stored(Places.at(tmp_path).answers) == stored(never_stopped.answers)
    assert set(few) < set(stored(never_stopped.answers)) and len(few) == 6


def test_what_does_not_fit_is_refused_or_told(tmp_path: Path) -> None:
    prompts, said = tmp_path / "p.jsonl", []
    prompts.write_text('{"id": "a", "prompt": "Ay"}\n{"id": "long", "prompt": "' + "A" * 220 + '"}\n')
    assert work_at(tmp_path / "out", prompts, report=said.append).run().examples == 1
    assert "1 prompts dropped: with 14 tokens of an answer they are longer than the trunk's context" in said
    prompts.write_text('{"id": "a", "prompt": "No"}\n')
    with pytest.raises(UserError, match="answers another prompt of the id 'a'"):
        work_at(tmp_path / "out", prompts).run()
    with pytest.raises(UserError, match="no prompt leaves room for max_new_tokens=250"):
        work_at(tmp_path / "other", prompts, DistillConfig(max_new_tokens=250)).run()
    for name, config in (
        ("temperature", replace(ANSWERS, temperature=(0.5,))),
        ("seed", replace(ANSWERS, seed=9)),
        ("max_new_tokens", replace(ANSWERS, max_new_tokens=15)),
        ("soft_labels", replace(ANSWERS, soft_labels=2)),
    ):
        with pytest.raises(UserError, match=f"was begun with {name}="):
            work_at(tmp_path / "out", prompts, config)
    with pytest.raises(UserError, match=r"was begun with system=None, now it is Be"):
        work_at(tmp_path / "out", prompts, system="Be")
    with pytest.raises(UserError, match="was begun with prompts=file, now it is own"):
        work_at(tmp_path / "out")
    Places.at(tmp_path / "out").answers.write_text('{"id": "a"}\n')
    with pytest.raises(UserError, match="holds a line that is no answer"):
        work_at(tmp_path / "out", prompts).run()


def test_files_without_their_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    work_at(tmp_path, replace(OWN, count=2)).run()
    places = Places.at(tmp_path)
    places.drafts.write_text('{"id": 1}\n')
    with pytest.raises(UserError, match=r"prompts\.jsonl holds a line that is no prompt"):
        work_at(tmp_path).run()
    places.settings.unlink()
    with pytest.raises(UserError, match=r"answers\.jsonl has no meta\.json"):
        work_at(tmp_path)
    places.answers.unlink()
    with pytest.raises(UserError, match=r"prompts\.jsonl has no meta\.json"):
        work_at(tmp_path)


# The command.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the trunk and heads for it."""
    folder, trunk = tmp_path_factory.mktemp("run"), trunk_of()
    trunk.model.save_pretrained(folder / "trunk")
    assert trunk.tokenizer is not None
    trunk.tokenizer.save_pretrained(folder / "trunk")
    heads = random_heads(trunk, HeadsConfig("medusa", num=2))
    save_heads(folder, heads, str(folder / "trunk"))
    save_tree(folder, Topology.full([2, 1]))
    return folder


ARGV = ["--own.count=14", "--own.max-tokens=24", "--own.min-chars=1", "--max-new-tokens=14", "--temperature=[0,1]"]
ARGV += ["--seed=1", "--rows=4", "--threads=1"]


def test_the_command_makes_the_same_set(
    saved: Path, tmp_path: Path, never_stopped: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["distill", str(saved / "trunk"), "--out", str(tmp_path / "a.jsonl"), *ARGV]) == 0
    assert stored(tmp_path / "a.jsonl") == stored(never_stopped.answers)
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path / 'a.jsonl'}\n  14 answers, ") and "of 4-grams repeated" in out
    (tmp_path / "p.txt").write_text("What say you?\nAy\n")
    argv = ["distill", str(saved), "--heads", str(saved), "--prompts", str(tmp_path / "p.txt"), "--out"]
    (tmp_path / "options.yaml").write_text("max_new_tokens: 9\nrows: 2\n")
    assert cli.main([*argv, str(tmp_path / "b"), "--config", str(tmp_path / "options.yaml")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "b" / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["answer_ids"] == plain_greedy(trunk_of(), line["prompt_ids"], 9)[: len(line["answer_ids"])]
    assert json.loads((tmp_path / "b" / "meta.json").read_text())["drafter"] == "medusa"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_finished(
    number: signal.Signals,
    code: int,
    saved: Path,
    tmp_path: Path,
    never_stopped: Places,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step, left = Decoder.step, [0]

    def signalled(self: Decoder) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), number)
        return step(self)

    monkeypatch.setattr(Decoder, "step", signalled)
    argv = ["distill", str(saved / "trunk"), "--out", str(tmp_path), *ARGV]
    kept = 0
    while not kept:
        left[0] = 25
        assert cli.main(argv) == code
        told = capsys.readouterr().err.splitlines()[-1]
        answers = Places.at(tmp_path).answers
        kept = len(answers.read_text().splitlines()) if answers.is_file() else 0
        assert told.startswith(f"medusa: stopped; {kept or 'no'} answers")
        assert told.endswith("are kept, go on with the same command")
    assert kept < OWN.count and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    left[0] = 0
    assert cli.main(argv) == 0
    assert stored(Places.at(tmp_path).answers) == stored(never_stopped.answers)


KILLED = """
import os, random, signal, sys, time
import torch
from medusa import __main__ as cli
from medusa.decoding import Decoder
from medusa.train import distill_cli, distill_run  # once, for all children
from medusa.train.lines import Lines
from medusa.trunk import Trunk

out, argv, rng = sys.argv[1], sys.argv[2:], random.Random(7)
step, append = Decoder.step, Lines.append

def slow(self):
    time.sleep(0.004)
    return step(self)

def torn(self, content):
    # what a kill in mid-write leaves
    if content.get("number") == 8 or content.get("finish") == "eos":
        self._file.write(b'{"id":"torn')
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, content)

Decoder.step = slow
torch.set_num_threads(1)
trunk = Trunk.load(argv[0])
Trunk.load = lambda *args, **options: trunk
died = 0
for trial in range(6):
    child = os.fork()
    if not child:
        if trial in (1, 3):
            Lines.append = torn
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(cli.main(["distill", *argv, "--out", out]))
    if trial not in (1, 3, 5):
        size = lambda: sum(os.path.getsize(f"{out}/{name}") for name in os.listdir(out) if name.endswith("jsonl"))
        end, start = rng.randrange(100, 1200), size()
        while size() < start + end and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.002)
        time.sleep(rng.random() / 50)
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    died += os.waitpid(child, 0)[1] == signal.SIGKILL
print(died)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children of a process that has imported everything")
def test_killed_at_random_moments_and_in_mid_write_it_ends_as_if_never_stopped(
    saved: Path, tmp_path: Path, never_stopped: Places
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(saved / "trunk"), *ARGV]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4
    places = Places.at(tmp_path)
    assert stored(places.answers) == stored(never_stopped.answers)
    numbers = [json.loads(line)["number"] for line in places.drafts.read_text().splitlines()]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts=nowhere.txt"], "no file nowhere.txt: give one with a prompt per line by --prompts"),
        (["--rows=0"], "rows=0"),
        (["--prompts=p.txt", "--own.count=3"], "--prompts and --own"),
        (["--threads=0"], "threads=0: give at least 1"),
        (["--own.cuont=3"], "unknown option 'own.cuont' (did you mean own.count?)"),
        (["--temperature=x"], "temperature=x is not valid"),
        (["--temperature=[]"], "temperature=[]: give at least one"),
        (["--own.temperature=0"], "own.temperature=0.0: give more than 0"),
        (["--heads=nowhere"], "nowhere"),
        (["--out=p.txt"], "p.txt is a file: name a folder"),
    ],
)
def test_wrong_input_is_one_line(
    options: list[str],
    message: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("Ay\n")
    assert cli.main(["distill", str(saved / "trunk"), "--out=out", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_base_model_is_told_to_bring_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trunk = trunk_of(None)
    trunk.model.save_pretrained(tmp_path / "base")
    assert trunk.tokenizer is not None
    trunk.tokenizer.save_pretrained(tmp_path / "base")
    assert cli.main(["distill", str(tmp_path / "base"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "has no chat template, so it can't write prompts of its own: give them by --prompts" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Modules that tests patch are whole again."""
    yield
    assert answering.decode is prompting.decode
