"""The Trainer's subclasses: seams, losses, what is trained and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.data.corpus import RandomBlocks
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import tiny_trunk
from medusa.train import heldout, loop
from medusa.train.config import HeadsTraining, Training
from medusa.train.follow import Pace, follow
from medusa.train.heldout import HeadsEvaluation, text_loss
from medusa.train.loop import (
    HeadsObjective,
    HeadsTrainer,
    TrunkTrainer,
    checkpoint_activations,
    next_token_loss,
    positions_of,
)
from medusa.trunk import Trunk

CPU = torch.device("cpu")


def rows(samples: int, block: int = 16, seed: int = 0) -> RandomBlocks:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(65, (400,), generator=generator)
    segments = (torch.rand(400, generator=generator) < 0.05).cumsum(0)
    return RandomBlocks(tokens, segments, block, samples, seed)


def test_positions_count_from_each_seam() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    assert positions_of(segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_a_packed_document_has_the_states_it_has_alone(family: str) -> None:
    trunk = tiny_trunk(family)
    ids = torch.randint(65, (1, 12), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[0] * 5 + [1] * 7])
    packed = trunk.forward(ids, positions_BT=positions_of(segments)).hidden
    alone = torch.cat([trunk.forward(ids[:, :5]).hidden, trunk.forward(ids[:, 5:]).hidden], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9)
    assert not torch.allclose(trunk.forward(ids).hidden[:, 5:], alone[:, 5:])


def test_nothing_is_predicted_across_a_seam() -> None:
    model = tiny_trunk("llama").model
    ids = torch.randint(65, (1, 12), generator=torch.Generator().manual_seed(1))
    first, second = ids[:, :5], ids[:, 5:]
    whole, count = next_token_loss(model, ids, torch.tensor([[0] * 5 + [1] * 7]))
    parts = [next_token_loss(model, part, torch.zeros_like(part))[0] for part in (first, second)]
    assert int(count) == 4 + 6
    torch.testing.assert_close(whole, sum(parts[1:], parts[0]))


@pytest.mark.parametrize(
    ("most", "batches"), [(heldout.MOST_LOGITS, [16, 16, 8]), (1950, [3] * 13 + [1]), (1, [1] * 40)]
)
def test_heldout_loss_is_that_of_the_model_itself(
    most: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    sizes: list[int] = []
    monkeypatch.setattr(heldout, "MOST_LOGITS", most)
    monkeypatch.setattr(
        heldout,
        "next_token_loss",
        lambda model, ids, *more: sizes.append(len(ids)) or next_token_loss(model, ids, *more),
    )
    model = tiny_trunk("llama").model
    ids = torch.randint(65, (40, 10), generator=torch.Generator().manual_seed(2))
    data = Dataset.from_dict({"input_ids": ids.numpy(), "segments": torch.zeros_like(ids).numpy()}).with_format("torch")
    assert text_loss(model, data) == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    assert sizes == batches  # rows of 10 tokens and 65 symbols
    assert text_loss(model, data, limit=4) == pytest.approx(
        model(input_ids=ids[::10], labels=ids[::10]).loss.item(), rel=1e-6
    )


def train_heads(trunk: Trunk, training: HeadsTraining, written: list[dict[str, Any]]) -> MedusaHeads:
    heads = MedusaHeads(HeadsConfig("hydra", num=2), trunk)
    trainer = HeadsTrainer(
        HeadsObjective(heads, training), rows(training.steps * training.batch), training, seed=0, device=CPU
    )
    follow(trainer, "heads", lambda step: {"at": float(step)}, lambda step, f: written.append({"step": step, **f}))
    return heads


def test_heads_learn_and_the_trunk_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trunk = tiny_trunk("llama", dtype=torch.float32)
    before = {name: value.clone() for name, value in trunk.model.state_dict().items()}
    written: list[dict[str, Any]] = []
    training = HeadsTraining(steps=6, batch=2, lr=1e-2, warmup=0, log_every=2, eval_every=4)
    heads = train_heads(trunk, training, written)
    assert all(torch.equal(before[name], value) for name, value in trunk.model.state_dict().items())
    assert not trunk.model.training and all(not p.requires_grad for p in trunk.model.parameters())
    assert heads.heads[1].blocks[0].linear.weight.abs().max() > 0
    losses = [event for event in written if "loss" in event]
    assert [event["step"] for event in losses] == [2, 4, 6]
    assert [event["step"] for event in written if "at" in event] == [4, 6]
    for event in losses:
        assert {len(event[name]) for name in ("head_loss", "top1", "top5")} == {2}
        assert event["loss"] == pytest.approx(event["head_loss"][0] + 0.8 * event["head_loss"][1], rel=1e-2)
        assert event["tokens_per_second"] > 0
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert list(tmp_path.iterdir()) == []  # the Trainer leaves nothing behind


def test_the_same_seed_gives_the_same_losses() -> None:
    curves = []
    for _ in range(2):
        written: list[dict[str, Any]] = []
        train_heads(tiny_trunk("llama", dtype=torch.float32), HeadsTraining(steps=3, batch=2, log_every=1), written)
        curves.append([event["loss"] for event in written if "loss" in event])
    assert curves[0] == curves[1]


def test_a_teacher_changes_the_targets() -> None:
    heads = MedusaHeads(HeadsConfig("medusa", num=1), tiny_trunk("llama"))
    row = rows(1)[0]
    inputs = {name: value[None] for name, value in row.items()}
    plain = HeadsObjective(heads, HeadsTraining(targets="text"))(**inputs)
    taught = HeadsObjective(heads, HeadsTraining(targets="trunk"))(**inputs)
    assert plain.counts_K.equal(taught.counts_K) and plain.total() != taught.total()


def test_timing_a_step_leaves_nothing_behind() -> None:
    heads = MedusaHeads(HeadsConfig("hydra", num=2), tiny_trunk("llama", dtype=torch.float32))
    training = HeadsTraining(steps=2, batch=2)
    trainer = HeadsTrainer(HeadsObjective(heads, training), rows(4), training, seed=0, device=CPU)
    trainer.try_step()
    assert all(parameter.grad is None for parameter in heads.parameters())
    assert trainer._sums == []


def test_a_trunk_learns() -> None:
    model = tiny_trunk("llama", dtype=torch.float32).model.requires_grad_(True)
    training = Training(steps=8, batch=2, warmup=0, log_every=4, lr=1e-3)
    written: list[dict[str, Any]] = []
    trainer = TrunkTrainer(model, rows(16), training, seed=0, device=CPU)
    follow(trainer, "trunk", lambda step: {}, lambda step, figures: written.append(figures))
    losses = [event["loss"] for event in written if "loss" in event]
    assert losses[-1] < losses[0]


def test_gradient_checkpointing_changes_nothing_but_what_is_computed_twice() -> None:
    found = []
    for wanted in (False, True):
        model, runs = tiny_trunk("llama").model.requires_grad_(True), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        training = Training(steps=3, batch=2, log_every=1, gradient_checkpointing=wanted)
        trainer = TrunkTrainer(model, rows(6), training, seed=0, device=CPU)
        losses: list[Any] = []
        follow(trainer, "trunk", lambda step: {}, lambda step, figures, to=losses: to.append(figures.get("loss")))
        found.append((losses, len(runs), model.state_dict()))
    (losses, once, weights), (same, twice, same_weights) = found
    assert losses == same and all(value.equal(same_weights[name]) for name, value in weights.items())
    assert twice == 2 * once


def test_gradient_checkpointing_is_refused_where_a_model_has_no_blocks_for_it() -> None:
    model = tiny_trunk("llama").model
    model.model.layers = torch.nn.ModuleList()
    checkpoint_activations(model, Training())
    with pytest.raises(UserError, match="gradient_checkpointing=true: llama models can't do it; leave it out"):
        checkpoint_activations(model, Training(gradient_checkpointing=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_gradient_checkpointing_acts_on_a_trunk_that_is_in_no_training_mode(family: str) -> None:
    found = []
    for wanted in (False, True):
        trunk, kept = tiny_trunk(family), [0]
        checkpoint_activations(trunk.model, Training(gradient_checkpointing=wanted))
        trunk.model.get_input_embeddings().weight.requires_grad_(True)

        def keep(value: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept[0] += value.numel()
            return value

        ids = torch.arange(40).reshape(2, 20)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            hidden = trunk.forward_with_gradients(ids).hidden
        hidden.square().sum().backward()
        found.append((hidden, trunk.model.get_input_embeddings().weight.grad, kept[0]))
        assert trunk.forward(ids).hidden.equal(hidden)
    assert found[0][0].equal(found[1][0]) and found[0][1].equal(found[1][1])
    assert found[1][2] < found[0][2] / 2


def test_the_log_tells_memory_and_the_share_of_the_trunks_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(HeadsTrainer, "trunk_speed", lambda self: 1e3)
    train_heads(tiny_trunk("llama", dtype=torch.float32), HeadsTraining(steps=2, batch=2, log_every=1), written)
    lines = [event for event in written if "loss" in event]
    assert len(lines) == 2
    for event in lines:
        assert event["trunk_share"] == pytest.approx(event["tokens_per_second"] / 1e3, abs=1e-3)
        assert 10 < event["peak_memory_mb"] < 1e6  # of a process that has imported torch, in MB


def test_a_trunks_own_speed_is_that_of_its_bare_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    training = HeadsTraining(steps=2, batch=4, accumulate=2)
    heads = MedusaHeads(HeadsConfig(num=1), tiny_trunk("llama"))
    trainer = HeadsTrainer(HeadsObjective(heads, training), rows(8), training, seed=0, device=CPU)
    times = iter([9.0, 0.5, 0.25, 2.0])  # the first warms up
    shapes: list[Any] = []
    monkeypatch.setattr(HeadsObjective, "read", lambda self, ids, segments: shapes.append(ids.shape))
    monkeypatch.setattr(loop, "seconds", lambda work: (work(), next(times))[1])
    assert trainer.trunk_speed() == 2 * 16 / 0.5 and shapes == [(2, 16)] * 4


def test_divergence_is_told_and_ends_the_training() -> None:
    trunk = tiny_trunk("llama", dtype=torch.float32)
    training = HeadsTraining(steps=8, batch=2, warmup=0, log_every=1, lr=1e30)
    with pytest.raises(UserError, match="diverged; lower lr"):
        train_heads(trunk, training, [])


class FixedHeads:
    """Stands in for heads whose worth follows a script."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def test_the_best_heads_are_kept_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa.calibrate import Continuations
    from medusa.train import heldout

    script = [[[0, 0]] * 4, [[0, 0], [0, 0], [0, 0], [0, -1]], [[5, 5]] * 4]
    heads: Any = FixedHeads()
    evaluation = HeadsEvaluation(heads, Continuations([], [], []), nodes=3)
    monkeypatch.setattr(heldout, "head_ranks", lambda heads, held: [torch.tensor(script[int(heads.value)])])
    monkeypatch.setattr(heldout, "grow", lambda ranks, nodes: heldout.Topology.chain(2 if int(heads.value) < 2 else 1))
    found = []
    for step in range(3):
        heads.value = torch.tensor([float(step)])
        found.append(evaluation(step)["tokens_per_step"])
    assert evaluation.tokens_per_step == max(found) and evaluation.step == found.index(max(found)) < 2
    evaluation.restore_best()
    assert heads.value == evaluation.step


def test_a_busy_machine_is_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    pace = Pace(watched=True)
    assert not any(pace.is_lost(1.0) for _ in range(20))
    assert [pace.is_lost(seconds) for seconds in (6.0, 6.0, 4.0, 6.0, 6.0, 6.0)] == [False] * 5 + [True]
    fixed = Pace(watched=False)
    assert not any(fixed.is_lost(1.0) for _ in range(20)) and not any(fixed.is_lost(99.0) for _ in range(9))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = Pace(watched=True)
    assert not any(alone.is_lost(1.0) for _ in range(20)) and not any(alone.is_lost(99.0) for _ in range(9))


NAMES = ("input_ids", "segments", "labels")


class Uneven(RandomBlocks):
    """Rows of which the first supervise little and the last much."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        kept = torch.arange(self.block) < 3 + 12 * (index % 4) // 3
        return row | {"labels": row["input_ids"].masked_fill(~kept, -100)}


def accumulated(kind: str, parts: int, rows: RandomBlocks, steps: int = 3) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What is logged in ``steps`` steps of 4 rows, each taken in ``parts``, and the weights after them, in fp64."""
    options: dict[str, Any] = {
        "steps": steps,
        "batch": 4,
        "accumulate": parts,
        "log_every": 1,
        "warmup": 0,
        "clip": 0.5,
    }
    trunk = tiny_trunk("llama")
    trainer: TrunkTrainer | HeadsTrainer
    if kind == "trunk":
        model = trunk.model.requires_grad_(True)
        trainer = TrunkTrainer(model, rows, Training(optimizer="adamw", **options), seed=0, device=CPU)
    else:
        training = HeadsTraining(**options)
        objective = HeadsObjective(MedusaHeads(HeadsConfig("hydra", num=3), trunk), training)
        trainer = HeadsTrainer(objective, rows, training, seed=0, device=CPU)
    written: list[Any] = []
    follow(trainer, kind, lambda step: {}, lambda step, figures: written.append(figures))
    logged = [
        [event["loss"], event["grad_norm"], *event.get("head_loss", []), *event.get("top1", [])]
        for event in written
        if "loss" in event
    ]
    return logged, {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("kind", ["trunk", "heads"])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_step_in_parts_is_the_step(kind: str, uneven: bool) -> None:
    data = rows(12)
    if uneven:
        data = Uneven(data.tokens_T, data.segments_T, data.block, 12, 0)
    whole, weights = accumulated(kind, 1, data)
    for parts in (2, 4):
        logged, found = accumulated(kind, parts, data)
        torch.testing.assert_close(torch.tensor(logged), torch.tensor(whole), rtol=1e-6, atol=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_the_divisor_is_what_the_losses_count() -> None:
    whole = rows(4)
    data = Uneven(whole.tokens_T, whole.segments_T, whole.block, 4, 0)
    trunk, training = tiny_trunk("llama"), HeadsTraining()
    objective = HeadsObjective(MedusaHeads(HeadsConfig("hydra", num=3), trunk), training)
    for source in (whole, data):
        parts = [{name: value[None] for name, value in source[index].items()} for index in range(4)]
        losses = [next_token_loss(trunk.model, *(part.get(name) for name in NAMES)) for part in parts]
        of_trunk = TrunkTrainer(trunk.model, source, training, seed=0, device=CPU)
        assert int(of_trunk.whole(parts)) == sum(int(count) for _, count in losses)
        of_heads = HeadsTrainer(objective, source, training, seed=0, device=CPU)
        assert of_heads.whole(parts).equal(torch.stack([objective(**part).counts_K for part in parts]).sum(0))


def test_the_uneven_rows_would_show_a_mean_of_means() -> None:
    data = Uneven(rows(4).tokens_T, rows(4).segments_T, 16, 4, 0)
    model = tiny_trunk("llama").model
    parts = [next_token_loss(model, *(data[index][name][None] for name in NAMES)) for index in range(4)]
    whole = sum(float(loss) for loss, _ in parts) / sum(int(count) for _, count in parts)
    assert abs(sum(float(loss / count) for loss, count in parts) / 4 - whole) > 1e-3


def test_a_step_that_supervises_nothing_changes_nothing_and_counts_zero() -> None:
    class Nothing(RandomBlocks):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = super().__getitem__(index)
            return row | {"labels": torch.full_like(row["input_ids"], -100)}

    data = Nothing(rows(4).tokens_T, rows(4).segments_T, 16, 4, 0)
    for kind in ("trunk", "heads"):
        logged, weights = accumulated(kind, 2, data, steps=1)
        assert logged[0][:2] == [0.0, 0.0]
        assert all(value.isfinite().all() for value in weights.values())
