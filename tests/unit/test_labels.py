"""From data to the loss: neither what is not supervised nor a seam has a part in it; a run on chats from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from medusa.data.corpus import DataConfig, RandomBlocks
from medusa.data.examples import make_examples
from medusa.data.packing import PackedRows
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import random_heads, tiny_model, tiny_trunk
from medusa.train.config import CalibrationConfig, EvaluationConfig, HeadsTraining, TrainConfig, Training, TrunkConfig
from medusa.train.loop import HeadsObjective, HeadsTrainer, TrunkTrainer, next_token_loss
from medusa.train.stages import train
from medusa.train.text import Corpus

from .chats import CHATML, chat_tokenizer, lines, messages

TOKENIZER = chat_tokenizer(CHATML)
CHATS = [messages(f"hello {word}", f"hi {word} the cat", "and?", f"it is {word}") for word in "abcdefghijklmnop"]


def packed(block: int = 64, samples: int = 6, seed: int = 0) -> PackedRows:
    examples = make_examples(Dataset.from_dict({"messages": CHATS}), TOKENIZER, DataConfig())
    return PackedRows(examples.items, block, samples, seed, filler=0)


def batch(rows: Any, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in names or ("input_ids", "segments", "labels")}


@pytest.fixture(scope="module")
def trunk() -> Any:
    return tiny_trunk("llama", vocab_size=len(TOKENIZER))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_the_heads_loss_is_that_of_the_answers_alone(trunk: Any, kind: Any) -> None:
    heads = random_heads(trunk, HeadsConfig(kind, num=2))
    found = HeadsObjective(heads, HeadsTraining())(**batch(packed()))
    # The same by hand, each segment by itself.
    sums, counts = torch.zeros(2, dtype=torch.float64), [0, 0]
    with torch.no_grad():
        for row in packed():
            for segment in row["segments"].unique():
                mine = row["segments"] == segment
                ids, labels = row["input_ids"][mine][None], row["labels"][mine]
                hidden = trunk.forward(ids).hidden
                for head in range(2):
                    reads = heads.config.reads(head)
                    for place in range(len(labels) - 2 - head):
                        if labels[place + 2 + head] == -100:
                            continue
                        context = (
                            heads.context(head, heads.embed(ids[:, place + 1 : place + 1 + reads])) if reads else None
                        )
                        logits = heads.logits(head, heads.features(head, hidden[:, place], context))[0]
                        sums[head] -= logits.log_softmax(-1)[labels[place + 2 + head]]
                        counts[head] += 1
    assert found.counts_K.tolist() == counts and min(counts) > 50
    torch.testing.assert_close(found.loss_sums_K, sums)


def test_the_next_tokens_loss_is_that_of_the_answers_alone(trunk: Any) -> None:
    inputs = batch(packed())
    ids, segments, labels = inputs.values()
    loss, count = next_token_loss(trunk.model, ids, segments, labels)
    total, pairs = 0.0, 0
    for row in packed():
        for segment in row["segments"].unique():
            mine = row["segments"] == segment
            if (row["labels"][mine][1:] != -100).any():
                one = trunk.model(input_ids=row["input_ids"][mine][None], labels=row["labels"][mine][None]).loss
                number = int((row["labels"][mine][1:] != -100).sum())
                total, pairs = total + one.item() * number, pairs + number
    assert int(count) == pairs and loss.item() == pytest.approx(total, rel=1e-5)
    everything = next_token_loss(trunk.model, ids, segments)
    assert int(everything[1]) > pairs and everything[0].item() == pytest.approx(
        next_token_loss(trunk.model, ids, segments, ids)[0].item()
    )


def test_the_trainers_hand_the_labels_on(trunk: Any) -> None:
    model, inputs = tiny_model("llama", vocab_size=len(TOKENIZER), dtype=torch.float32), batch(packed())
    of_trunk = TrunkTrainer(model, packed(), Training(steps=1, batch=2), seed=0, device=torch.device("cpu"))
    loss, count = next_token_loss(model, *inputs.values())
    assert of_trunk.compute_loss(model, inputs).item() == pytest.approx(loss.item() / int(count))
    heads = MedusaHeads(HeadsConfig("medusa", num=2), trunk)
    objective = HeadsObjective(heads, HeadsTraining())
    of_heads = HeadsTrainer(objective, packed(), HeadsTraining(steps=1, batch=2), seed=0, device=torch.device("cpu"))
    found = of_heads.compute_loss(objective, inputs).item()
    assert found == pytest.approx(objective(**inputs).total().item())
    assert found != pytest.approx(objective(**batch(packed(), "input_ids", "segments")).total().item())


@pytest.mark.parametrize("targets", ["text", "trunk"])
def test_a_batch_without_supervised_tokens_costs_nothing(trunk: Any, targets: Any) -> None:
    inputs = batch(packed())
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    heads = MedusaHeads(HeadsConfig("hydra", num=2), trunk)
    loss = HeadsObjective(heads, HeadsTraining(targets=targets))(**inputs).total()
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in heads.parameters() if p.requires_grad)
    model = tiny_model("llama", vocab_size=len(TOKENIZER), dtype=torch.float32)
    trainer = TrunkTrainer(model, packed(), Training(steps=1, batch=2), seed=0, device=torch.device("cpu"))
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    assert loss.item() == 0 and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trunk with a chat tokenizer, and chats."""
    folder = tmp_path_factory.mktemp("chat")
    tiny_model("llama", vocab_size=len(TOKENIZER), dtype=torch.float32).save_pretrained(folder / "trunk")
    TOKENIZER.save_pretrained(folder / "trunk")
    lines(folder / "chat.jsonl", *({"messages": chat} for chat in CHATS))
    return folder


def recipe(folder: Path, **data: Any) -> TrainConfig:
    settings: dict[str, Any] = {"source": str(folder / "chat.jsonl"), "heldout": 0.5, "block": 64}
    return TrainConfig(
        str(folder / "run"),
        data=DataConfig(**settings | data),
        trunk=TrunkConfig(name=str(folder / "trunk")),
        heads=HeadsConfig(num=2),
        heads_training=HeadsTraining(steps=4, batch=2, log_every=2, eval_every=2, lr=1e-2, warmup=0),
        evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=40, tokens=6, nodes=4),
        calibration=CalibrationConfig(sizes=(1, 3), rounds=1),
    )


def test_heads_are_trained_on_chats_and_judged_by_their_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    real = Corpus.heldout_prompts
    monkeypatch.setattr(Corpus, "heldout_prompts", lambda self, e: prompts.extend(found := real(self, e)) or found)
    train(recipe(folder), report=lambda line: None)
    log = [json.loads(line) for line in (folder / "run" / "train_log.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in log if "loss" in event]
    assert losses[-1] < losses[0]
    asked = [
        TOKENIZER.apply_chat_template(chat[:end], add_generation_prompt=True, return_dict=False)
        for chat in CHATS[8:12]  # of the second half, which is held out, the first one judges
        for end in (1, 3)
    ]
    assert len(prompts) == 4 and all(prompt in asked and len(prompt) <= 40 for prompt in prompts)
    assert all(TOKENIZER.decode(prompt).endswith("<|im_start|>assistant\n") for prompt in prompts)


def corpus(config: TrainConfig, lines: list[str]) -> Corpus:
    made = Corpus(config, lines.append)
    made.tokenizer = TOKENIZER
    return made


def test_the_data_are_checked_before_the_first_step_and_what_is_odd_is_said(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    chats = corpus(recipe(folder, block=24), said)
    rows = chats.training_rows(3, 2)
    chats.training_rows(1, 2)
    assert isinstance(rows, PackedRows) and len(rows) == 6 and rows.block == 24
    assert len(said) == 1 and said[0].startswith("data: 8 examples are longer than data.block=24 and split into")
    same = lines(tmp_path / "same.jsonl", *({"messages": CHATS[0]} for _ in range(4)))
    with pytest.raises(UserError, match="all 2 examples of training are the same"):
        corpus(recipe(folder, source=str(same)), said).training_rows(1, 1)
    shared = lines(tmp_path / "shared.jsonl", *({"messages": CHATS[place]} for place in (0, 1, 1, 2)))
    corpus(recipe(folder, source=str(shared)), said).training_rows(1, 1)
    assert said[-1] == "data: 1 of 2 held-out examples are also trained on"
    unanswered = lines(tmp_path / "bad.jsonl", *({"messages": chat} for chat in [*CHATS[:3], messages("hello")]))
    with pytest.raises(UserError, match=r"^row 3 of .*bad\.jsonl': no message is the assistant's"):
        corpus(recipe(folder, source=str(unanswered)), said).training_rows(1, 1)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_answers_of_another_trunk_are_noticed(folder: Path, tmp_path: Path, trunk: Any, kind: str) -> None:
    source, meta = tmp_path / "a.jsonl", tmp_path / "a.meta.json"
    if kind == "folder":
        source, meta = tmp_path / "answers.jsonl", tmp_path / "meta.json"
    lines(
        source,
        *({"id": str(row), "prompt_ids": [20], "answer_ids": [21, 22 + row], "finish": "eos"} for row in range(4)),
    )
    config = recipe(folder, source=str(tmp_path if kind == "folder" else source))
    trunk.tokenizer = TOKENIZER
    for made_by, count in ((None, 0), (trunk.fingerprint(), 0), ("another", 1)):
        if made_by:
            meta.write_text(json.dumps({"format": 1, "settings": {"fingerprint": made_by}}))
        said: list[str] = []
        made = Corpus(config, said.append)
        made.take_tokenizer(trunk)
        rows = made.training_rows(1, 1)
        assert len(said) == count and all("another trunk" in line for line in said)
        assert sorted(token for token in rows[0]["labels"].tolist() if token != -100) == [21, 21, 22, 23]


def test_held_out_rows_hold_what_is_held_out(folder: Path) -> None:
    made = corpus(recipe(folder), [])
    rows = made.heldout_rows()
    texts = TOKENIZER.decode([token for row in rows["labels"][:].tolist() for token in row if token != -100])
    answers = [message["content"] for chat in CHATS[8:] for message in chat[1::2]]
    assert sorted(texts.removesuffix("<|im_end|>").split("<|im_end|>")) == sorted(answers)


def test_the_rows_of_plain_text_are_the_windows_they_were(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat and it is there " * 40)
    made = corpus(recipe(tmp_path, source=str(tmp_path / "a.txt"), heldout=0.1, block=16), [])
    rows = made.training_rows(2, 2)
    assert isinstance(rows, RandomBlocks) and set(rows[0]) == {"input_ids", "segments"}
    text = "the cat sat on the mat and it is there " * 36
    ids = torch.tensor([*TOKENIZER.encode(text), TOKENIZER.eos_token_id])
    again = RandomBlocks(ids, torch.zeros_like(ids), 16, 4, 0)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(rows, again, strict=True))
    assert made.heldout_rows().column_names == ["input_ids", "segments"]
    (tmp_path / "b.txt").write_text("<s><s>hello there, what is it? " * 9)
    with pytest.raises(UserError, match=r"document 0 begins with the BOS '<s>' twice"):
        corpus(recipe(tmp_path, source=str(tmp_path / "b.txt"), block=8), []).training_rows(1, 1)
