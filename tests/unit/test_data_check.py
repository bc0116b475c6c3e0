"""The check before the first step names each fault, and the prompts that heads are judged by are those of decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from medusa.data.check import check_documents, check_examples, shared, warnings
from medusa.data.corpus import DataConfig
from medusa.data.examples import Example, Examples, make_examples
from medusa.data.packing import lay_out
from medusa.data.prompts import chat_prompts, heldout_documents, heldout_prompts
from medusa.errors import UserError

from .chats import CHATML, GEMMA, STRIPS, chat_tokenizer, messages

TOKENIZER = chat_tokenizer(CHATML)
BOS, EOS, PAD = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def example(*ids: int, supervised: bool = True, row: int = 0) -> Example:
    ids_T = torch.tensor(ids)
    return Example(ids_T, torch.full_like(ids_T, supervised, dtype=torch.bool), (1,), row)


FAULTS = {
    "nothing supervised": ([example(20, 21, supervised=False)], r"none of the examples has a supervised token"),
    "two BOS": ([example(20, 21), example(BOS, BOS, 21, row=1)], "row 1 begins with the BOS '<s>' twice .the chat"),
    "pads behind": ([example(20, PAD, row=3)], "row 3 is padded: it holds the pad token '<pad>' 1 times"),
    "pads before": ([example(PAD, PAD, 20)], "row 0 is padded: it holds the pad token '<pad>' 2 times"),
    "all the same": ([example(20, 21), example(20, 21), example(20, 21)], "all 3 examples of training are the same"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    items, message = FAULTS[name]
    with pytest.raises(UserError, match=message) as caught:
        check_examples(Examples(items), TOKENIZER)
    assert "\n" not in str(caught.value)
    if name != "nothing supervised":  # plain texts are learnt whole
        with pytest.raises(UserError, match=message.replace("row", "document").replace("examples", "documents")[:24]):
            check_documents([torch.tensor([30])] * items[0].row + [each.ids for each in items], TOKENIZER)


def test_what_is_right_passes() -> None:
    fine = [example(BOS, 20, EOS), example(20, BOS, PAD, 21), example(20, EOS, EOS), example(20, 21, supervised=False)]
    check_examples(Examples(fine), TOKENIZER)
    check_documents([each.ids for each in fine], TOKENIZER)
    check_documents([torch.tensor([20, 20])], TOKENIZER)
    for same in ("eos_token", "bos_token", "unk_token"):
        tokenizer = chat_tokenizer(CHATML)
        setattr(tokenizer, same, "<pad>")  # the end of an answer is no padding
        check_examples(Examples([example(20, PAD), example(21, PAD, 22, PAD)]), tokenizer)
    with pytest.raises(UserError, match="the training text has no tokens"):
        check_documents([torch.tensor([], dtype=torch.int64)], TOKENIZER)


def test_a_template_that_writes_two_bos_is_found() -> None:
    chat = Dataset.from_dict({"messages": [messages("a", "b"), messages("a", "c")]})
    tokenizer = chat_tokenizer("{{ bos_token }}" + GEMMA)
    with pytest.raises(UserError, match=r"row 0 begins with the BOS '<s>' twice .the chat template writes it twice"):
        check_examples(make_examples(chat, tokenizer, DataConfig()), tokenizer)


def test_what_training_bears_is_said() -> None:
    found = Examples([example(*range(20, 45)), example(20, 21)])
    assert warnings(found) == [] == warnings(found, lay_out(found.items, 40))
    found.counts.update(faulty=2, open_ended=3, truncated=4, repeated=5)
    found.faults.append("row 1: no")
    said = warnings(found, lay_out(found.items, 10))
    for part in (
        "2 rows are of no use and left out, the first because: row 1: no",
        "3 answers are not ended",
        "4 answers were cut off",
        "5 examples more",
        "1 examples are longer than data.block=10 and split into 3 pieces",
    ):
        assert any(part in line for line in said)
    assert "1 examples are longer than data.block=10 and dropped" in warnings(found, lay_out(found.items, 10, "drop"))
    late = [Example(torch.arange(20), torch.arange(20) > 15, (16,), 0)]
    assert warnings(Examples(late), lay_out(late, 10))[-1].startswith("1 pieces of them hold no supervised token")


def test_examples_of_both_splits_are_counted() -> None:
    train, heldout = Examples([example(1, 2), example(1, 3)]), Examples([example(1, 2), example(1), example(1, 2, 3)])
    assert shared(train, heldout) == 1 and shared(heldout, train) == 1


CHATS = [messages(f"hello {word}", "hi", "and?", f"the {word}") for word in "abcdefgh"]


def test_prompts_are_what_decoding_is_given_from_halves_that_share_no_row() -> None:
    config = DataConfig()
    documents = heldout_documents(Dataset.from_dict({"messages": CHATS}), TOKENIZER, config, first=10)
    first, second = (heldout_prompts(documents, 8, 100, half) for half in ("judging", "benchmark"))  # type: ignore[arg-type]
    wanted = [
        TOKENIZER.apply_chat_template(chat[:end], add_generation_prompt=True, return_dict=False)
        for chat in CHATS
        for end in (1, 3)
    ]
    assert sorted(first) == sorted(wanted[:8]) and sorted(second) == sorted(wanted[8:])
    assert heldout_prompts(documents, 3, 100, "judging") == [first[0], first[2], first[5]]
    assert heldout_prompts(documents, 4, len(wanted[0]), "judging") == wanted[:8:2]  # no long one is cut
    with pytest.raises(
        UserError, match=r"have 4 different prompts of at most .* .and 4 longer ones. and 5 are asked for"
    ):
        heldout_prompts(documents, 5, len(wanted[0]), "judging")


def test_prompts_of_texts_are_cut_as_before() -> None:
    texts = Dataset.from_dict({"text": ["hello there " * 30]})
    documents = heldout_documents(texts, TOKENIZER, DataConfig())
    assert isinstance(documents[0], torch.Tensor)
    (prompt,) = heldout_prompts(documents, 1, 7, "judging")
    assert prompt == documents[0][:7].tolist()


@pytest.mark.parametrize("supervise", ["answers", "all"])
def test_examples_of_one_conversation_are_in_one_half(supervise: Any) -> None:
    thoughts = [messages(f"{word}", "<think>a</think>b", "so", "<think>c</think>d") for word in "abcd"]
    documents = heldout_documents(
        Dataset.from_dict({"messages": thoughts}), chat_tokenizer(STRIPS), DataConfig(supervise=supervise)
    )
    count = 4 if supervise == "answers" else 2  # of an example that is learnt whole, the prompts that it still holds
    first, second = (chat_prompts(documents, count, 100, half) for half in ("judging", "benchmark"))  # type: ignore[arg-type]
    assert len(documents) == (8 if supervise == "answers" else 4)
    texts = [{chat_tokenizer(None).decode(prompt).split("\n")[1] for prompt in half} for half in (first, second)]
    assert texts == [{"a<|im_end|>", "b<|im_end|>"}, {"c<|im_end|>", "d<|im_end|>"}]


def test_the_halves_are_of_rows_not_of_examples() -> None:
    uneven = [example(20, 30 + place, row=row) for place, row in enumerate([0, 0, 0, 0, 0, 1, 2, 3])]
    uneven = [Example(each.ids, each.supervised, (2,), each.row) for each in uneven]
    assert [prompt[1] for prompt in chat_prompts(uneven, 6, 9, "judging")] == [*range(30, 36)]
    assert [prompt[1] for prompt in chat_prompts(uneven, 2, 9, "benchmark")] == [36, 37]
