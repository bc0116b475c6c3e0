"""Held-out prompts: from the text the run names, spread over it, and others than training was evaluated by."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from medusa.checkpoint import save_heads
from medusa.data.prompts import cut_prompts
from medusa.data.tokenizers import char_tokenizer
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer.prompts import heldout_prompts
from medusa.testing import tiny_trunk

TEXT = "".join(f"{number:04}," for number in range(2000))  # every place is told by its digits
HELD = TEXT[9000:]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trunk = tiny_trunk("llama", vocab_size=11)
    trunk.model.save_pretrained(folder / "trunk")
    char_tokenizer(TEXT).save_pretrained(folder / "trunk")
    save_heads(folder, MedusaHeads(HeadsConfig(num=1), trunk), str(folder / "trunk"))
    (folder / "text.txt").write_text(TEXT)
    write(folder, source=str(folder / "text.txt"), tokenizer="char")
    return folder


def write(folder: Path, **data: object) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": str(folder), "data": data}))


def texts(prompts: list[list[int]]) -> list[str]:
    symbols = sorted(set(TEXT))
    return ["".join(symbols[token] for token in prompt) for prompt in prompts]


def test_prompts_are_held_out_spread_and_the_same_each_time(run: Path) -> None:
    found = texts(heldout_prompts(run, 8, 20))
    assert found == texts(heldout_prompts(str(run), 8, 20))
    places = [HELD.index(text) for text in found]  # none crosses into what was trained on
    assert [len(text) for text in found] == [20] * 8
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert all(abs(gap - (1000 - 19) / 8) <= 1 for gap in gaps)


@pytest.mark.parametrize(("measured", "judged"), [(4, 8), (8, 8), (4, 16), (16, 4)])
def test_a_benchmark_has_other_prompts_than_the_choice_of_the_tree(run: Path, measured: int, judged: int) -> None:
    own = {HELD.index(text) for text in texts(heldout_prompts(run, measured, 10))}
    other = {HELD.index(text) for text in texts(heldout_prompts(run, judged, 10, shift=0.0))}
    assert min(abs(one - two) for one in own for two in other) >= 10


def test_several_documents_are_never_joined(run: Path, tmp_path: Path) -> None:
    rows = [f'{{"text": "{number:04},{number:04},"}}' for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"text": "1"}']))
    (run / "config.yaml").rename(run / "kept.yaml")
    try:
        write(run, source=str(tmp_path / "rows.jsonl"), heldout=0.5)
        found = texts(heldout_prompts(run, 5, 9))
    finally:
        (run / "kept.yaml").replace(run / "config.yaml")
    assert all(text[:4] == text[5:] or text[1:4] == text[6:] for text in found)
    assert len(set(found)) == 5


def test_refuses_what_it_cannot_take(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.yaml does not exist"):
        heldout_prompts(tmp_path, 1, 1)
    with pytest.raises(UserError, match=r"1 places for prompts of 1000 tokens and 2"):
        heldout_prompts(run, 2, 1000)
    for content, message in [
        ("data: [", "can't be read"),
        ("run: here", "no section data"),
        ("data: {sorce: x}", r"unknown key data\.sorce \(did you mean source\?\)"),
    ]:
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(UserError, match=message) as caught:
            heldout_prompts(tmp_path, 1, 1)
        assert "\n" not in str(caught.value)


def test_prompts_are_spread_and_cross_no_seam() -> None:
    documents = [torch.arange(0, 25), torch.arange(100, 107), torch.arange(200, 203)]
    found = cut_prompts(documents, 4, 5)
    assert all(prompt == list(range(prompt[0], prompt[0] + 5)) for prompt in found)
    assert len(found) == 4 and found == sorted(found)
    assert [prompt[0] for prompt in cut_prompts(documents, 24, 5)] == [*range(21), 100, 101, 102]
    with pytest.raises(UserError, match="24 places for prompts of 5 tokens and 25"):
        cut_prompts(documents, 25, 5)
