"""Chats: answers equal ``model.generate`` on the templated ids, a conversation equals a chat without a cache and reads
only what is new, and what ends early, or is wrong, leaves a known state.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.infer import Engine
from medusa.infer.chat import Conversation, chat, stream_chat
from medusa.infer.messages import OURS, ROLES, Message
from medusa.testing import random_heads, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk, TrunkOutput

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
START, END, BOS = "<|start|>", "<|end|>", "<|begin|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}{% if shout %}{{ 'LOUD ' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
# As templates do that leave out what a model thought: of earlier answers only what follows the last "z" is kept.
FORGETFUL = TEMPLATE.replace(
    "message['content']",
    "(message['content'].split('z')[-1] if message['role'] == 'assistant' else message['content'])",
)
TURNS = ["What say you, my lord?", "Ay", "No more. I will not hear it", "Why?"]
KINDS = ["none", "medusa", "hydra"]
# Rotary and learned positions, sliding windows; tokens that come back as they were emitted, and others.
MODELS = [
    *[("llama", tokens, kind) for tokens in ("chars", "bpe") for kind in KINDS],
    ("gpt2", "chars", "medusa"),
    ("gemma3", "chars", "none"),
    ("gemma3", "bpe", "hydra"),
]


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Characters, which are always tokenised as they were emitted; or bytes with merges, which often are not."""
    if name == "chars":
        tokenizer = char_tokenizer(ALPHABET)
    else:
        tokenizer = train_bpe(["What say you, my lord? I will not hear it\n"] * 3, 290)
    special = {"bos_token": BOS, "eos_token": END, "additional_special_tokens": [START]}
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@cache
def trunk_of(family: str, tokens: str) -> Trunk:
    """A tiny trunk that ends some of its answers."""
    tokenizer = tokenizer_of(tokens)
    size = {"n_positions": 1024} if family == "gpt2" else {"max_position_embeddings": 1024}
    trunk = tiny_trunk(family, vocab_size=len(tokenizer), **size)
    trunk.tokenizer = tokenizer
    trunk.model.generation_config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad():
        trunk.model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 3.0
    return trunk


@cache
def drafter_of(family: str, tokens: str, kind: str) -> Drafter:
    if kind == "none":
        return NullDrafter()
    heads = random_heads(trunk_of(family, tokens), HeadsConfig(kind, num=3))
    return MedusaDrafter(heads, Topology.full([3, 2, 1]))


def engine_of(family: str = "llama", tokens: str = "chars", kind: str = "medusa") -> Engine:
    return Engine(trunk_of(family, tokens), drafter_of(family, tokens, kind))


def from_generate(trunk: Trunk, messages: Sequence[Message], tokens: int) -> list[int]:
    """What transformers does with messages."""
    assert trunk.tokenizer is not None
    given = trunk.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_tensors="pt")
    text = trunk.model.generate(**given, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return text[0, given["input_ids"].shape[1] :].tolist()


def user(*texts: str) -> list[Message]:
    """Turns, the user's first."""
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the forwards of the plain trunk of characters."""
    trunk = engine_of().trunk
    forward, sizes = trunk.forward, []

    def counted(ids_BT: Tensor, *args: Any, **options: Any) -> TrunkOutput:
        sizes.append(ids_BT.numel())
        return forward(ids_BT, *args, **options)

    monkeypatch.setattr(trunk, "forward", counted)
    return sizes


# One answer.


@pytest.mark.parametrize(("family", "tokens", "kind"), MODELS)
def test_an_answer_is_what_generate_says_to_the_templated_ids(family: str, tokens: str, kind: str) -> None:
    engine, reasons = engine_of(family, tokens, kind), set()
    for count in (1, 3):
        messages = user(*TURNS[:count])
        out = chat(engine, messages, max_new_tokens=40)
        assert out.token_ids == from_generate(engine.trunk, messages, 40)
        assert END not in out.text and START not in out.text
        stream = stream_chat(engine, messages, max_new_tokens=40)
        assert stream.completion is None
        assert "".join(stream) == out.text
        assert stream.completion is not None and stream.completion.token_ids == out.token_ids
        reasons.add(out.finish_reason)
    assert reasons <= {"eos", "length"}


def test_answers_end_with_the_eos_and_without_its_text() -> None:
    trunk = engine_of().trunk
    assert trunk.tokenizer is not None
    ended = 0
    for turn in TURNS:
        out = chat(engine_of(), user(turn), max_new_tokens=40)
        assert (out.finish_reason == "eos") == (out.token_ids[-1] == trunk.tokenizer.eos_token_id)
        ended += out.finish_reason == "eos"
    assert ended >= 2


def test_the_template_brings_the_only_bos() -> None:
    """Though the tokenizer, too, would put one before a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"bos_token": BOS, "eos_token": END, "additional_special_tokens": [START]})
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, bos)])
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.encode("Ay")[0] == bos
    trunk = tiny_trunk("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    trunk.tokenizer = tokenizer
    conversation = Conversation(Engine(trunk), "Ay.")
    for turn in TURNS[:2]:
        assert conversation.say(turn, max_new_tokens=3).prompt_ids.count(bos) == 1
    assert chat(Engine(trunk), user("Ay"), max_new_tokens=1).prompt_ids.count(bos) == 1


def test_an_eos_that_is_no_special_token_is_not_in_the_text() -> None:
    engine = engine_of()
    whole = chat(engine, user("Why?"), max_new_tokens=20, eos_token_id=[])
    letter = next(i for i in whole.token_ids[2:] if i < 65 and i not in whole.token_ids[:2])
    size = whole.token_ids.index(letter) + 1
    out = chat(engine, user("Why?"), max_new_tokens=20, eos_token_id=letter)
    stream = stream_chat(engine, user("Why?"), max_new_tokens=20, eos_token_id=letter)
    assert engine.trunk.tokenizer is not None
    text = engine.trunk.tokenizer.decode(whole.token_ids[: size - 1], skip_special_tokens=True)
    assert (out.text, out.token_ids, out.finish_reason) == (text, whole.token_ids[:size], "eos")
    assert "".join(stream) == text and stream.completion is not None and stream.completion.text == text
    # cut at a limit just there, it is a letter
    assert chat(engine, user("Why?"), max_new_tokens=size, eos_token_id=[]).text == text + ALPHABET[letter]


def test_tools_and_variables_reach_the_template() -> None:
    def moon(phase: str) -> None:
        """Ask the moon.

        Args:
            phase: which one
        """

    engine = engine_of()
    decode = engine.trunk.tokenizer.decode  # type: ignore[union-attr]
    out = chat(engine, user("Ay"), max_new_tokens=1, tools=[moon], chat_template_kwargs={"shout": True})
    assert decode(out.prompt_ids).endswith(f"{END}\nmoonLOUD {START}assistant\n")
    stream = stream_chat(engine, user("Ay"), max_new_tokens=1, chat_template_kwargs={"shout": True})
    conversation = Conversation(engine, tools=[moon], chat_template_kwargs={"shout": True}, max_new_tokens=1)
    assert list(stream) and stream.completion is not None and "LOUD" in decode(stream.completion.prompt_ids)
    assert conversation.say("Ay").prompt_ids == out.prompt_ids


def test_a_template_may_be_given_in_place_of_the_tokenizers() -> None:
    trunk = tiny_trunk("llama")
    trunk.tokenizer = char_tokenizer(ALPHABET)
    given = {"chat_template": "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"}
    out = chat(Engine(trunk), user("Ay"), max_new_tokens=5, chat_template_kwargs=given)
    assert out.prompt_ids == trunk.tokenizer.encode("Ay\n")


def test_the_engine_has_them_all() -> None:
    engine, options = engine_of(), {"max_new_tokens": 9, "chat_template_kwargs": {"shout": True}}
    out = chat(engine, user("Ay"), **options)
    said = engine.chat(user("Ay"), **options)
    stream = engine.stream_chat(user("Ay"), **options)
    conversation = engine.conversation("Be brief", **options)
    assert said.token_ids == out.token_ids and "".join(stream) == out.text
    assert conversation.messages == [{"role": "system", "content": "Be brief"}]
    asked = [*conversation.messages, *user("Ay")]
    assert conversation.say("Ay").token_ids == engine.chat(asked, **options).token_ids


# Conversations.


@pytest.mark.parametrize(("family", "tokens", "kind"), MODELS)
@pytest.mark.parametrize(
    ("template", "options"),
    [(TEMPLATE, {}), (TEMPLATE, {"temperature": 1.0, "seed": 5}), (FORGETFUL, {"temperature": 1.0, "seed": 5})],
    ids=["plain", "plain sampled", "forgetful"],
)
def test_every_turn_equals_a_chat_without_a_cache(
    family: str, tokens: str, kind: str, options: dict[str, Any], template: str
) -> None:
    engine = engine_of(family, tokens, kind)
    variables = {"chat_template": template}
    conversation = Conversation(engine, "Be brief", chat_template_kwargs=variables, max_new_tokens=20, **options)
    for turn in TURNS[:3]:
        messages = [*conversation.messages, {"role": "user", "content": turn}]
        out = conversation.say(turn)
        fresh = chat(engine, messages, chat_template_kwargs=variables, max_new_tokens=20, **options)
        assert (out.text, out.token_ids, out.prompt_ids) == (fresh.text, fresh.token_ids, fresh.prompt_ids)
        assert (out.steps, out.accepted, out.finish_reason) == (fresh.steps, fresh.accepted, fresh.finish_reason)
        assert conversation.messages == [*messages, {"role": "assistant", "content": out.text}]
    assert conversation.reused > 0


def test_only_what_is_new_is_read(read: list[int]) -> None:
    """Counted in tokens that went through the trunk, without drafts: each once, but for the last of an answer."""
    conversation = Conversation(engine_of(kind="none"), "Be brief", max_new_tokens=25, suppress_tokens=special_tokens())
    total = 0
    for number, turn in enumerate(TURNS):
        before = total
        read.clear()
        out = conversation.say(turn)
        assert read[0] == len(out.prompt_ids) - conversation.reused and read[1:] == [1] * out.steps
        total = len(out.prompt_ids) + out.steps  # what the cache holds now
        assert conversation.reused == before > (0 if number else -1)
        assert read[0] == total - out.steps - before
        assert sum(read) == total - before


def special_tokens() -> list[int]:
    """Tokens that leave no text: an answer without them is tokenised as it was emitted."""
    return list(range(65, 68))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_read_no_more_of_the_prompt(kind: str, read: list[int]) -> None:
    conversation = Conversation(engine_of(kind=kind), max_new_tokens=25, suppress_tokens=special_tokens())
    known = 0
    for turn in TURNS:
        read.clear()
        out = conversation.say(turn)
        # a cut answer's last token never went through the trunk; nor, with a tree, may those accepted beside it
        assert read[0] == len(out.prompt_ids) - conversation.reused <= len(out.prompt_ids) - known
        known = len(out.prompt_ids) + len(out.token_ids) - 1


def test_an_answer_that_the_template_changes_is_read_again_from_there(read: list[int]) -> None:
    engine = engine_of(kind="none")
    conversation = Conversation(engine, chat_template_kwargs={"chat_template": FORGETFUL}, max_new_tokens=30)
    first = conversation.say(TURNS[0], suppress_tokens=special_tokens())
    assert "z" in first.text[:-1]
    read.clear()
    second = conversation.say(TURNS[1])
    text = first.prompt_ids + first.token_ids
    same = next(place for place, token in enumerate(text) if token != second.prompt_ids[place])
    assert conversation.reused == same < len(text) - 1
    assert read[0] == len(second.prompt_ids) - same


def test_undo_and_reset() -> None:
    engine = engine_of()
    conversation = Conversation(engine, "Be brief", max_new_tokens=12)
    first = conversation.say(TURNS[0])
    second = conversation.say(TURNS[1])
    assert conversation.undo() == TURNS[1]
    assert [message["content"] for message in conversation.messages] == ["Be brief", TURNS[0], first.text]
    again = conversation.say(TURNS[1])
    assert again.token_ids == second.token_ids
    assert conversation.reused == len(again.prompt_ids) - 1  # all but the token whose state is asked for
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief"}]
    assert (
        conversation.say(TURNS[2]).token_ids
        == chat(engine, [*conversation.messages[:1], *user(TURNS[2])], max_new_tokens=12).token_ids
    )
    assert conversation.reused >= len("Be brief")  # the system's message was still there
    conversation.undo()
    with pytest.raises(UserError, match="no turn to undo"):
        conversation.undo()


def test_messages_are_a_copy() -> None:
    conversation = Conversation(engine_of(), max_new_tokens=3)
    out = conversation.say("Ay")
    conversation.messages.clear()
    conversation.messages[0]["content"] = "x"
    assert conversation.messages == user("Ay", out.text)


def test_a_turns_options_count_before_the_conversations() -> None:
    conversation = Conversation(engine_of(), max_new_tokens=5, eos_token_id=[])
    assert len(conversation.say("Ay").token_ids) == 5
    assert len(conversation.say("Ay", max_new_tokens=7).token_ids) == 7
    assert len(conversation.say("Ay").token_ids) == 5
    plain = conversation.say("Ay", baseline=True)
    assert plain.steps == 4


def test_two_conversations_with_one_engine_do_not_meet() -> None:
    engine = engine_of()
    apart = []
    for turns in (TURNS, TURNS[::-1]):
        alone = Conversation(engine, max_new_tokens=15)
        apart.append([alone.say(turn).token_ids for turn in turns])
    pair = [Conversation(engine, max_new_tokens=15) for _ in range(2)]
    for number in range(len(TURNS)):
        streams = [pair[0].stream(TURNS[number]), pair[1].stream(TURNS[-1 - number])]
        alive = list(streams)
        while alive:  # piece by piece, in turns
            alive = [stream for stream in alive if next(stream, None) is not None]
        for stream, texts in zip(streams, apart, strict=True):
            assert stream.completion is not None and stream.completion.token_ids == texts[number]


def test_conversations_in_threads_do_not_meet() -> None:
    engine, found = engine_of(), {}

    def talk(number: int) -> None:
        conversation = Conversation(engine, "Be brief", max_new_tokens=15, temperature=1.0, seed=number)
        found[number] = [conversation.say(turn).token_ids for turn in TURNS[number % 2 :]]

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(found)
    for number in range(4):
        talk(number)
    assert found == together


@pytest.mark.parametrize("original", [60, 90, 120])
def test_turns_across_a_change_of_the_rotary_frequencies(original: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": original, "factor": 8.0}
    tokenizer = tokenizer_of("chars")
    trunk = tiny_trunk("llama", vocab_size=len(tokenizer), rope_parameters=rope, max_position_embeddings=1024)
    trunk.tokenizer = tokenizer
    engine = Engine(trunk)
    conversation = Conversation(engine, max_new_tokens=15)
    prefill, read = trunk.prefill, [0]

    def counted(ids_BT: Tensor, *args: Any) -> Any:
        read.append(ids_BT.numel())
        return prefill(ids_BT, *args)

    monkeypatch.setattr(trunk, "prefill", counted)
    for number, turn in enumerate(["Ay", "No", *TURNS, "Why?", "Ay"]):
        messages = [*conversation.messages, *user(turn)]
        out = conversation.say(turn)
        assert read[-1] == len(out.prompt_ids) - conversation.reused
        assert out.token_ids == chat(engine, messages, max_new_tokens=15).token_ids
        if number in (4, 6):  # back, to the other side or across it in one step
            while len(conversation.messages) > (2 if number == 4 else 4):
                conversation.undo()


# The context's end.


def small(positions: int = 100) -> Engine:
    tokenizer = tokenizer_of("chars")
    trunk = tiny_trunk("llama", vocab_size=len(tokenizer), max_position_embeddings=positions)
    trunk.tokenizer = tokenizer
    return Engine(trunk)


def test_a_full_context_is_an_error_that_says_what_to_do() -> None:
    conversation = Conversation(small(), max_new_tokens=10)
    done = 0
    with pytest.raises(UserError) as caught:
        while True:
            conversation.say("Ay, ay.")
            done += 1
    message = str(caught.value)
    assert "may reach 100" in message and "undo" in message and "reset" in message and "\n" not in message
    assert done and len(conversation.messages) == 2 * done
    conversation.undo()
    conversation.say("Ay, ay.")
    conversation.reset()
    conversation.say("Ay, ay.")
    with pytest.raises(UserError, match=r"messages come to 1.. tokens and a text may reach 100 .* leave some out"):
        chat(small(), user("Ay" * 60))


def test_there_must_be_room_for_one_token() -> None:
    size = len(chat(engine_of(), user("Ay"), max_new_tokens=1).prompt_ids)
    with pytest.raises(UserError, match=f"messages come to {size} tokens"):
        chat(small(size), user("Ay"))
    assert len(chat(small(size + 1), user("Ay")).token_ids) == 1


def test_an_answer_at_the_contexts_end_says_that_it_was_cut() -> None:
    conversation = Conversation(small(50), max_new_tokens=100)
    out = conversation.say("Ay")
    assert out.finish_reason == "length" and len(out.prompt_ids) + len(out.token_ids) == 50


# Streams that end early, and faults.


@pytest.mark.parametrize("how", ["close", "drop", "with", "next turn"])
def test_a_stream_that_ends_early_leaves_what_was_taken(how: str) -> None:
    engine = engine_of()
    conversation = Conversation(engine, "Be brief", max_new_tokens=30, eos_token_id=[])
    conversation.say(TURNS[0], max_new_tokens=5)
    before = conversation.messages
    stream = conversation.stream(TURNS[1])
    taken = next(stream) + next(stream)
    assert conversation.messages == before and stream.completion is None
    if how == "drop":
        del stream
        gc.collect()
    elif how == "with":
        with stream:
            pass
    elif how == "close":
        stream.close()
        stream.close()
    if how in ("close", "drop", "with"):
        assert conversation.messages == [*before, *user(TURNS[1], taken)]
    asked = [*before, *user(TURNS[1], taken, TURNS[2])]
    out = conversation.say(TURNS[2])
    assert out.token_ids == chat(engine, asked, max_new_tokens=30, eos_token_id=[]).token_ids
    assert conversation.messages == [*asked, {"role": "assistant", "content": out.text}]
    assert conversation.reused >= len(out.prompt_ids) - 60  # the cache came through
    if how == "next turn":
        assert list(stream) == [] and stream.completion is None
        assert len(conversation.messages) == len(asked) + 1


@pytest.mark.parametrize("how", ["close", "drop", "next turn"])
def test_a_stream_of_which_nothing_was_taken_leaves_no_turn(how: str) -> None:
    conversation = Conversation(engine_of(), max_new_tokens=1)  # whole at once, but not taken
    stream = conversation.stream(TURNS[0])
    assert stream.completion is None
    if how == "close":
        stream.close()
    elif how == "drop":
        del stream
    out = conversation.say(TURNS[1])
    assert conversation.messages == user(TURNS[1], out.text)
    assert out.token_ids == chat(engine_of(), user(TURNS[1]), max_new_tokens=1).token_ids


def test_reset_and_undo_end_a_stream() -> None:
    conversation = Conversation(engine_of(), max_new_tokens=30, eos_token_id=[])
    stream = conversation.stream(TURNS[0])
    next(stream)
    assert conversation.undo() == TURNS[0]
    stream = conversation.stream(TURNS[0])
    next(stream)
    conversation.reset()
    assert conversation.messages == [] == list(stream)


class Fault(Exception):
    """What no one foresaw."""


@pytest.mark.parametrize("forward", [1, 2, 4])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_fault_spoils_no_later_turn(
    forward: int, streamed: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may have been written to when a step broke off: it is not used again."""
    engine = engine_of()
    conversation = Conversation(engine, max_new_tokens=30, eos_token_id=[])
    conversation.say(TURNS[0])
    before, taken = conversation.messages, ""
    original, calls = engine.trunk.forward, 0

    def broken(*args: Any, **options: Any) -> TrunkOutput:
        nonlocal calls
        calls += 1
        output = original(*args, **options)
        if calls == forward:
            raise error
        return output

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(engine.trunk, "forward", broken)
        if streamed:
            for piece in conversation.stream(TURNS[1]):
                taken += piece
        else:
            conversation.say(TURNS[1])
    assert bool(taken) == (streamed and forward > 1)
    assert conversation.messages == [*before, *(user(TURNS[1], taken) if taken else [])]
    messages = [*conversation.messages, *user(TURNS[2])]
    out = conversation.say(TURNS[2])
    assert conversation.reused == 0
    assert out.token_ids == chat(engine, messages, max_new_tokens=30, eos_token_id=[]).token_ids


def test_a_fault_before_the_first_piece_leaves_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream has begun, but what was decoded may be a stop string and is held back."""
    engine = engine_of()
    conversation = Conversation(engine, max_new_tokens=30, eos_token_id=[])
    (first, *_) = chat(engine, user(TURNS[0]), max_new_tokens=1).text
    stream = conversation.stream(TURNS[0], stop_strings=first + "%", include_stop=False)

    def broken(*args: Any, **options: Any) -> TrunkOutput:
        raise Fault

    monkeypatch.setattr(engine.trunk, "forward", broken)
    with pytest.raises(Fault):
        next(stream)
    assert conversation.messages == []


def test_a_refused_turn_leaves_everything_as_it_was() -> None:
    engine = engine_of()
    conversation = Conversation(engine, max_new_tokens=10)
    conversation.say(TURNS[0])
    before = conversation.messages
    for call in (
        lambda: conversation.say(""),
        lambda: conversation.say("naïve"),
        lambda: conversation.say("Ay", max_new_token=3),
        lambda: conversation.stream("Ay", temperature=-1),
        lambda: conversation.stream("Ay", num_return_sequences=2, temperature=1),
        lambda: conversation.say("A" * 2000),
    ):
        with pytest.raises(UserError):
            call()
        assert conversation.messages == before
    conversation.say(TURNS[1])
    assert conversation.reused > 0


# What is refused.

WRONG: list[tuple[Any, str]] = [
    ("Ay", "messages 'Ay': give a list of dicts with role and content"),
    ({"role": "user", "content": "Ay"}, "give a list of dicts"),
    (None, "messages None"),
    (7, "messages 7"),
    ([], "messages is an empty list"),
    (["Ay"], r"messages\[0\] is 'Ay': give a dict"),
    ([{"content": "Ay"}], r"messages\[0\] has no role: the roles are system, developer, user, assistant, tool"),
    ([{"role": "usr", "content": "Ay"}], r"messages\[0\] is from 'usr' \(did you mean user\?\): the roles"),
    ([{"role": ["user"], "content": "Ay"}], "the roles are"),
    ([*user("Ay"), {"role": "assistant"}, *user("Ay")], r"messages\[1\] has no content: give a text"),
    ([{"role": "user", "contnt": "Ay"}], r"messages\[0\] has no content but 'contnt'"),
    ([{"role": "user", "content": ["Ay"]}], r"messages\[0\] has the content \['Ay'\]"),
    ([{"role": "user", "content": ""}], r"messages\[0\] has an empty content"),
    (user("Ay", "Ay"), "the last of 2 messages is from 'assistant'"),
    ([{"role": "system", "content": "Ay"}], "the last of 1 messages is from 'system'"),
    (user("naïve"), r"messages\[0\]: character 'ï' \(U\+00EF\) at offset 2"),
    (user("Ay\ud800"), r"messages\[0\] is no Unicode text at offset 2"),
    ([*user("Ay", "Ay"), {"role": "tool", "content": "Ay"}], r"refuses these messages \(no tools here\)"),
]


@pytest.mark.parametrize(("messages", "says"), WRONG)
def test_wrong_messages_are_refused_in_one_line(messages: Any, says: str) -> None:
    for call in (chat, stream_chat):
        with pytest.raises(UserError, match=says) as caught:
            call(engine_of(), messages)
        assert "\n" not in str(caught.value)


def test_what_is_not_wrong() -> None:
    messages = [{"role": "system", "content": ""}, *user("Ay", "", "Ay")]
    assert chat(engine_of(), messages, max_new_tokens=1).token_ids
    assert chat(engine_of(), tuple(messages), max_new_tokens=1).token_ids
    assert set(ROLES) >= {"system", "user", "assistant", "tool"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "moon"}]}
    template = {"chat_template": "{% for m in messages %}{{ m.content or m.tool_calls[0].name }}{% endfor %}"}
    out = chat(
        engine_of(),
        [*user("A"), called, {"role": "tool", "content": "B"}],
        chat_template_kwargs=template,
        max_new_tokens=1,
    )
    assert engine_of().trunk.tokenizer.decode(out.prompt_ids) == "AmoonB"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"system": 7}, "system has the content 7"),
        ({"system": "naïve"}, "system: character 'ï'"),
        ({"max_new_token": 3}, r"unknown option 'max_new_token' \(did you mean max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": "moon"}, "tools='moon': give a list"),
        ({"tools": {"name": "moon"}}, "tools="),
        ({"chat_template_kwargs": ["shout"]}, r"chat_template_kwargs=\['shout'\]: give a dict"),
        *[({"chat_template_kwargs": {name: True}}, f"chat_template_kwargs has '{name}'") for name in OURS],
        (
            {"system": "Ay", "chat_template_kwargs": {"chat_template": "{{ raise_exception('no system') }}"}},
            r"refuses these messages \(no system\)",
        ),
        ({"system": "Ay", "chat_template_kwargs": {"chat_template": "{% if %}"}}, "refuses these messages"),
        ({"system": "Ay", "chat_template_kwargs": {"chat_template": " {{- '' }}"}}, "writes nothing"),
    ],
)
def test_a_wrong_conversation_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        Conversation(engine_of(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tokenizer", [None, char_tokenizer(ALPHABET)], ids=["no tokenizer", "no template"])
def test_a_base_model_is_sent_to_generate(tokenizer: Any) -> None:
    trunk = tiny_trunk("llama")
    trunk.tokenizer = tokenizer
    for call in (lambda: chat(Engine(trunk), user("Ay")), lambda: Conversation(Engine(trunk))):
        with pytest.raises(UserError, match=r"has no (tokenizer|chat template).*`medusa generate`") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_config_that_asks_for_several_answers_is_refused() -> None:
    trunk = tiny_trunk("llama", vocab_size=68, max_position_embeddings=256)
    trunk.tokenizer = tokenizer_of("chars")
    trunk.model.generation_config.num_return_sequences = 3
    with pytest.raises(UserError, match="num_return_sequences=3: a chat goes on from one answer"):
        chat(Engine(trunk), user("Ay"), temperature=1.0)
