"""Prompts in every form are the same prompts; what is none is refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from medusa.data.tokenizers import char_tokenizer
from medusa.errors import UserError
from medusa.infer import Engine
from medusa.infer.inputs import Prompts, read_prompts
from medusa.testing import tiny_trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TOKENIZER = char_tokenizer(ALPHABET)
TEXTS = ["ROMEO:", "O", "What say you"]
IDS = [TOKENIZER.encode(text) for text in TEXTS]


def read(prompt: Any, mask: Any = None) -> Prompts:
    return read_prompts(prompt, mask, TOKENIZER, 65)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts in a rectangle, with pads that would be read if they were taken for tokens."""
    width = max(map(len, IDS))
    ids, mask = torch.full((3, width), 7), torch.zeros(3, width, dtype=torch.long)
    for row, prompt in enumerate(IDS):
        start = width - len(prompt) if side == "left" else 0
        ids[row, start : start + len(prompt)], mask[row, start : start + len(prompt)] = torch.tensor(prompt), 1
    return ids, mask


def forms() -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {
        "texts": (TEXTS, None),
        "tuple of texts": (tuple(TEXTS), None),
        "ids": (IDS, None),
        "tuples": ([tuple(ids) for ids in IDS], None),
        "tensors": ([torch.tensor(ids) for ids in IDS], None),
        "arrays": ([np.array(ids) for ids in IDS], None),
        "numbers of numpy": ([list(np.array(ids)) for ids in IDS], None),
        "encoding": (TOKENIZER(TEXTS), None),
    }
    for side in ("left", "right"):
        ids, mask = padded(side)
        found |= {
            f"{side} mapping": ({"input_ids": ids, "attention_mask": mask}, None),
            f"{side} encoding": (BatchEncoding({"input_ids": ids, "attention_mask": mask}), None),
            f"{side} tensor and mask": (ids, mask),
            f"{side} bool mask": (ids.int(), mask.bool()),
            f"{side} lists": (ids.tolist(), mask.tolist()),
            f"{side} arrays": (ids.numpy(), mask.numpy()),
            f"{side} types": ({"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}, None),
        }
    return found


@pytest.mark.parametrize("form", forms())
def test_every_form_of_a_batch_is_the_same_prompts(form: str) -> None:
    assert read(*forms()[form]) == Prompts(IDS, single=False)


@pytest.mark.parametrize(
    ("prompt", "mask", "single"),
    [
        (TEXTS[0], None, True),
        (IDS[0], None, True),
        (tuple(IDS[0]), None, True),
        (torch.tensor(IDS[0]), None, True),
        (np.array(IDS[0]), None, True),
        ([*torch.tensor(IDS[0])], None, True),
        ([7, *IDS[0]], [0, *[1] * 6], True),
        (torch.tensor([*IDS[0], 7]), torch.tensor([*[1] * 6, 0]), True),
        (torch.tensor(IDS[:1]), None, False),
        ([TEXTS[0]], None, False),
        (TOKENIZER(TEXTS[0]), None, False),
        (TOKENIZER(TEXTS[0], return_tensors="pt"), None, False),
    ],
)
def test_one_prompt_is_alone_or_in_a_list(prompt: Any, mask: Any, single: bool) -> None:
    assert read(prompt, mask) == Prompts(IDS[:1], single)


def test_without_a_mask_nothing_is_a_pad() -> None:
    ids, _ = padded("left")
    assert read(ids).rows == ids.tolist()


def test_the_engine_continues_all_forms_alike() -> None:
    trunk = tiny_trunk("llama")
    trunk.tokenizer = TOKENIZER
    engine = Engine(trunk)
    expected = [row.token_ids for row in engine.generate(TEXTS, max_new_tokens=6)]
    for form, (prompt, mask) in forms().items():
        assert [row.token_ids for row in engine.generate(prompt, attention_mask=mask, max_new_tokens=6)] == expected, (
            form
        )
    ids, mask = padded("left")
    for named in ({"input_ids": ids}, {"inputs": ids}):
        rows = engine.generate(**named, attention_mask=mask, max_new_tokens=6)
        assert [row.token_ids for row in rows] == expected
    assert [row.prompt_ids for row in rows] == IDS
    pieces = engine.stream(torch.tensor(IDS[0]), max_new_tokens=6)
    assert "".join(pieces) == TOKENIZER.decode(expected[0])


@pytest.mark.parametrize(
    ("prompt", "mask", "message"),
    [
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, None, "of prompt 0 has a hole"),
        ({"input_ids": [[1, 2], [1, 2]], "attention_mask": [[1, 1], [0, 0]]}, None, "of prompt 1 is all zeros"),
        ([[1, 2]], [[1]], "another shape than the ids"),
        ([[1, 2]], [1, 1], "another shape than the ids"),
        ([[1, 2]], [[1, 1], [1, 1]], "another shape than the ids"),
        ([1, 2], [1, 2], "something else than 0 and 1"),
        ("O", [1], "attention_mask beside texts"),
        ({"input_ids": [[1]], "attention_mask": [[1]]}, [[1]], "given twice"),
        ({"attention_mask": [[1]]}, None, "input_ids is missing"),
        ({"input_idds": [[1]]}, None, r"did you mean input_ids\?"),
        ({"input_ids": [[1]], "pixel_values": 3}, None, "reads ids alone"),
        ({"input_ids": [[1]], "token_type_ids": [[1]]}, None, "token_type_ids"),
        (torch.ones(1, 2, 3).long(), None, r"shape \(1, 2, 3\)"),
        (torch.tensor(3), None, r"shape \(\)"),
        (torch.ones(3), None, "torch.float32 numbers"),
        (np.ones(3), None, "float64 numbers"),
        (torch.zeros(0).long(), None, "not empty"),
        ([[1, 2], [1, 65]], None, "prompt 1 has token id 65: ids lie in 0..64"),
        ([[1, -3]], None, "token id -3"),
        (["O", [1]], None, "texts alone or lists of token ids alone"),
        ([[1], torch.tensor([True])], None, "texts alone"),
        (b"bytes", None, "give a text"),
        (None, None, "give a text"),
        ("", None, "prompt 0 is empty"),
        ([[1], []], None, "prompt 1 is empty"),
    ],
)
def test_refuses_in_one_line(prompt: Any, mask: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(prompt, mask)
    assert "\n" not in str(caught.value)


def test_a_prompt_is_given_once() -> None:
    trunk = tiny_trunk("llama")
    for options in ({"input_ids": [[1]]}, {"inputs": [[1]], "input_ids": [[1]]}):
        with pytest.raises(UserError, match=r"a prompt is given \d times"):
            Engine(trunk).generate([1], **options)
    with pytest.raises(UserError, match="give a text"):
        Engine(trunk).generate(max_new_tokens=3)
    with pytest.raises(UserError, match="token_type_ids beside a prompt"):
        Engine(trunk).generate([1], token_type_ids=[0])
