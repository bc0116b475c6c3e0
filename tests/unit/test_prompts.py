"""Held-out prompts: from the text the run names, spread over it, and others than training was evaluated by."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from medusa.checkpoint import save_heads
from medusa.data.prompts import cut_prompts
from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer.prompts import heldout_documents, heldout_prompts
from medusa.infer.recipe import calibration_settings
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
    assert all(abs(gap - (500 - 19) / 8) <= 1 for gap in gaps)


@pytest.mark.parametrize("judged", [1, 7, 491])
@pytest.mark.parametrize("measured", [1, 8, 491])
def test_a_benchmark_shares_no_token_with_the_choice_of_the_tree(run: Path, measured: int, judged: int) -> None:
    own = {HELD.index(text) for text in texts(heldout_prompts(run, measured, 10))}
    other = {HELD.index(text) for text in texts(heldout_prompts(run, judged, 10, "judging"))}
    assert (len(own), len(other)) == (measured, judged)
    assert max(other) + 10 <= min(own)


@pytest.mark.parametrize(("measured", "judged"), [(1, 10), (10, 1), (2, 3), (10, 10)])
def test_nor_a_document_of_many(run: Path, tmp_path: Path, measured: int, judged: int) -> None:
    rows = [f"{number:04},{number:04}," for number in range(80)]
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"text": "{row}"}}' for row in rows))
    write(tmp_path / "run", source=str(tmp_path / "rows.jsonl"), heldout=0.5)
    own, other = (
        {rows.index(row) for row in rows for text in texts(prompts) if text in row}
        for prompts in (
            heldout_prompts(tmp_path / "run", measured, 9),
            heldout_prompts(tmp_path / "run", judged, 9, "judging"),
        )
    )
    assert own and other and max(other) < min(own)


def test_the_documents_are_those_of_training(run: Path, tmp_path: Path) -> None:
    # Each with its EOS, or the middle, where the halves part, would be another than training's.
    shutil.copytree(run, tmp_path / "run")
    tokenizer = train_bpe([TEXT], 300)
    tokenizer.save_pretrained(tmp_path / "run" / "trunk")
    (document,) = heldout_documents(tmp_path / "run")
    assert document.tolist() == [*tokenizer.encode(HELD), tokenizer.eos_token_id]


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
    with pytest.raises(UserError, match=r"1 places for prompts of 500 tokens and 2"):
        heldout_prompts(run, 2, 500)
    for content, message in [
        ("data: [", "can't be read"),
        ("run: here", "no section data"),
        ("data: {sorce: x}", r"unknown key data\.sorce \(did you mean source\?\)"),
    ]:
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(UserError, match=message) as caught:
            heldout_prompts(tmp_path, 1, 1)
        assert "\n" not in str(caught.value)


GIVEN = {"prompts": 4, "prompt_tokens": 5, "tokens": 6, "sizes": [1, 3], "rounds": 2}
RECIPE = {
    "evaluation": {"prompts": 40, "prompt_tokens": 50, "tokens": 60, "nodes": 16},
    "calibration": {"sizes": [1, 30], "rounds": 20},
}


def test_calibration_goes_by_the_recipe_where_nothing_is_given(tmp_path: Path) -> None:
    assert calibration_settings(tmp_path, GIVEN) == GIVEN  # no recipe is needed then
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RECIPE))
    nothing = dict.fromkeys(GIVEN)
    assert calibration_settings(tmp_path, nothing) == {
        "prompts": 40,
        "prompt_tokens": 50,
        "tokens": 60,
        "sizes": [1, 30],
        "rounds": 20,
    }
    assert calibration_settings(tmp_path, nothing | {"tokens": 7})["tokens"] == 7


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({}, r"config\.yaml has no evaluation\.prompts: give --prompts"),
        (RECIPE | {"calibration": None}, r"no calibration\.sizes: give --sizes"),
        (RECIPE | {"calibration": {"sizes": [], "rounds": 1}}, r"config\.yaml: calibration\.sizes=\[\]: give whole"),
        (RECIPE | {"calibration": {"sizes": ["x"], "rounds": 1}}, r"sizes=\['x'\]: give whole numbers of at least 1"),
        (RECIPE | {"evaluation": {"prompts": 1}}, r"evaluation\.prompts=1: give a whole number of at least 2"),
        ([], "no evaluation"),
    ],
)
def test_a_recipe_that_does_not_say_is_refused(tmp_path: Path, recipe: object, message: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=message) as caught:
        calibration_settings(tmp_path, dict.fromkeys(GIVEN))
    assert "\n" not in str(caught.value)


def test_prompts_are_spread_and_cross_no_seam() -> None:
    documents = [torch.arange(0, 25), torch.arange(100, 107), torch.arange(200, 203), torch.arange(300, 335)]
    first, second = (cut_prompts(documents, 4, 5, half) for half in ("judging", "benchmark"))
    for found in (first, second):
        assert all(prompt == list(range(prompt[0], prompt[0] + 5)) for prompt in found)
        assert len(found) == 4 and found == sorted(found)
    assert first[-1][-1] < second[0][0]
    assert [prompt[0] for prompt in cut_prompts(documents, 24, 5, "judging")] == [*range(21), 100, 101, 102]
    with pytest.raises(UserError, match="24 places for prompts of 5 tokens and 25"):
        cut_prompts(documents, 25, 5, "judging")
