"""The joint stage: the adapter, its loss, its two rates, and what it leaves of the stage before it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa import __main__ as cli
from medusa.checkpoint import load_heads, read_manifest
from medusa.data.corpus import DataConfig, RandomBlocks
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.infer import Engine
from medusa.testing import plain_greedy, random_heads, tiny_trunk
from medusa.train import joint
from medusa.train.config import (
    CalibrationConfig,
    EvaluationConfig,
    HeadsTraining,
    NewTrunk,
    TrainConfig,
    Training,
    TrunkConfig,
)
from medusa.train.joint import JointEvaluation, JointObjective, JointTrainer, rebound
from medusa.train.joint_loss import heads_weight
from medusa.train.loop import checkpoint_activations, next_token_loss, positions_of
from medusa.train.lora import Adapter, linear_layers, targets
from medusa.train.newtrunk import digest_weights
from medusa.train.plan import plan
from medusa.train.record import to_yaml
from medusa.train.stages import train
from medusa.train.training import JointTraining
from medusa.tree import Topology
from medusa.trunk import Trunk

IDS = torch.randint(65, (2, 12), generator=torch.Generator().manual_seed(1))
SEGMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
LABELS = IDS.clone()
LABELS[0, 2:4] = LABELS[1, 7] = -100


def moved(adapter: Adapter, scale: float = 0.1) -> Adapter:
    """Every parameter off its start, as after some training."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return adapter


def logits(trunk: Trunk) -> Tensor:
    return trunk.forward(IDS, positions_BT=positions_of(SEGMENTS)).logits


def objective(training: JointTraining, kind: str = "hydra", family: str = "llama") -> JointObjective:
    trunk = tiny_trunk(family)
    heads = random_heads(trunk, HeadsConfig(kind, 3))
    return JointObjective(heads, moved(Adapter(trunk, training, 0)), HeadsTraining(), training)


# The adapter


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2"])
def test_an_adapter_changes_nothing_until_it_is_trained_and_nothing_when_it_is_off(family: str) -> None:
    trunk = tiny_trunk(family)
    before, weights = logits(trunk), digest_weights(trunk.model.state_dict())
    adapter = Adapter(trunk, JointTraining(rank=2), 0)
    assert torch.equal(logits(trunk), before)
    moved(adapter)
    assert not torch.allclose(logits(trunk), before, atol=1e-3)
    with adapter.off():
        assert torch.equal(logits(trunk), before)
    assert not torch.equal(logits(trunk), before)
    assert digest_weights(adapter.base_weights()) == weights
    assert all(parameter.requires_grad for parameter in adapter.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_every_linear_layer_is_adapted_but_the_vocabulary_projection(family: str) -> None:
    trunk = tiny_trunk(family)
    named = linear_layers(trunk.model)
    assert not any("lm_head" in name for name in named) and len(named) > 3
    adapter = Adapter(trunk, JointTraining(rank=2), 0)
    adapted = [name for name, module in trunk.model.named_modules() if hasattr(module, "base_layer")]
    assert sorted(adapted) == sorted(named) and len(adapter.parts) == len(named)
    assert trunk.model.get_output_embeddings() is trunk._head and not hasattr(trunk._head, "base_layer")


def test_layers_are_chosen_by_the_end_of_their_names() -> None:
    trunk = tiny_trunk("llama")
    depth = trunk.config.num_hidden_layers
    found = targets(trunk, JointTraining(modules=("q_proj", "mlp.up_proj", "model.layers.0.self_attn.o_proj")))
    assert len(found) == 2 * depth + 1 and not any("down_proj" in name for name in found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_is_adapted_and_an_ordinary_model(family: str) -> None:
    trunk = tiny_trunk(family)
    names = [name for name, _ in trunk.model.named_parameters()]
    adapter = moved(Adapter(trunk, JointTraining(rank=3, alpha=5.0, dropout=0.2), 0))
    adapter.eval()
    adapted = logits(trunk)
    adapter.merge()
    torch.testing.assert_close(logits(trunk), adapted, rtol=0, atol=1e-12)
    assert [name for name, _ in trunk.model.named_parameters()] == names


def test_training_mode_switches_on_the_adapters_dropout_alone() -> None:
    made = objective(JointTraining(rank=2, dropout=0.5))
    made.train()
    training = {name for name, module in made.heads.trunk.model.named_modules() if module.training}
    assert training and all("lora_" in name for name in training)
    first, second = logits(made.heads.trunk), logits(made.heads.trunk)
    assert not torch.equal(first, second)
    made.eval()
    assert torch.equal(logits(made.heads.trunk), logits(made.heads.trunk))


def test_gradient_checkpointing_changes_no_gradient_with_dropout_in_it() -> None:
    found = []
    for wanted in (False, True):
        training = JointTraining(rank=2, dropout=0.3, gradient_checkpointing=wanted)
        made = objective(training)
        checkpoint_activations(made.heads.trunk.model, training)
        made.train()
        torch.manual_seed(3)
        made(IDS, SEGMENTS, LABELS).total(0.5).backward()
        found.append([parameter.grad for parameter in made.parameters()])
    assert all(plain.equal(again) for plain, again in zip(*found, strict=True))


def test_half_precision_is_adapted_in_fp32() -> None:
    trunk = tiny_trunk("llama", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in Adapter(trunk, JointTraining(), 0).parameters()} == {torch.float32}
    assert logits(trunk).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "joint.rank=0: give at least 1"),
        ({"alpha": 0.0}, "joint.alpha=0.0: give more than 0"),
        ({"heads_lr": 0.0}, "joint.heads_lr=0.0: give more than 0"),
        ({"heads_weight": -0.1}, "joint.heads_weight=-0.1: it may not be negative"),
        ({"loss_tolerance": -1.0}, "joint.loss_tolerance=-1.0: it may not be negative"),
        ({"dropout": 1.0}, "joint.dropout=1.0: it is a share"),
        ({"optimizer": "muon"}, "joint.optimizer='muon': .* adamw"),
        ({"modules": ()}, r"joint.modules=\(\): give a list of names"),
        ({"modules": "q_proj"}, "joint.modules='q_proj': give a list of names"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        JointTraining(**change)
    assert "\n" not in str(caught.value)


def test_names_of_no_layer_are_refused_with_those_there_are() -> None:
    trunk = tiny_trunk("llama")
    with pytest.raises(UserError, match=r"called 'q_prj' \(did you mean q_proj.*choose from down_proj, .*, or all-lin"):
        targets(trunk, JointTraining(modules=("v_proj", "q_prj")))
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(UserError, match=f"no linear layer of the trunk's body is called '{name}'"):
            targets(trunk, JointTraining(modules=(name,)))


def test_a_trunk_that_can_take_up_no_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("llama")
    Adapter(trunk, JointTraining(), 0)
    with pytest.raises(UserError, match="has an adapter already: merge that into it first"):
        targets(trunk, JointTraining())
    trunk = tiny_trunk("llama")
    monkeypatch.setattr(trunk.model, "hf_quantizer", object(), raising=False)
    with pytest.raises(UserError, match="this trunk is quantised"):
        targets(trunk, JointTraining())


# The loss


def direct(trunk: Trunk, teacher: Tensor | None) -> Tensor:
    """The trunk's mean loss by definition: a loop over pairs of neighbours in a segment, of which the second counts."""
    law = logits(trunk).log_softmax(-1)
    losses = []
    for row in range(2):
        for at in range(11):
            if SEGMENTS[row, at] != SEGMENTS[row, at + 1] or LABELS[row, at + 1] == -100:
                continue
            if teacher is None:
                losses.append(-law[row, at, IDS[row, at + 1]])
            else:
                old = teacher[row, at].log_softmax(-1)
                losses.append((old.exp() * (old - law[row, at])).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("kind", ["text", "teacher"])
def test_the_trunks_loss_is_the_mean_over_supervised_tokens(kind: str, chunk: int) -> None:
    made = objective(JointTraining(rank=2, trunk_loss=kind))  # type: ignore[arg-type]
    made.chunk, trunk = chunk, made.heads.trunk
    with made.adapter.off():
        before = logits(trunk)
    found = made(IDS, SEGMENTS, LABELS)
    wanted = direct(trunk, before if kind == "teacher" else None)
    torch.testing.assert_close(found.trunk_sum / found.count, wanted, rtol=1e-12, atol=1e-12)
    if kind == "text":
        summed, count = next_token_loss(trunk.model, IDS, SEGMENTS, LABELS)
        torch.testing.assert_close(found.trunk_sum, summed.double(), rtol=1e-5, atol=0)
        assert count == found.count


def test_the_divergence_is_zero_at_the_start_and_so_are_its_gradients() -> None:
    training = JointTraining(rank=2, trunk_loss="teacher", dropout=0.3)
    trunk = tiny_trunk("llama")
    made = JointObjective(
        random_heads(trunk, HeadsConfig("medusa", 2)), Adapter(trunk, training, 0), HeadsTraining(), training
    )
    made.train()
    found = made(IDS, SEGMENTS, LABELS)
    assert found.trunk_sum.item() == 0
    found.total(0.0).backward()
    assert max(parameter.grad.abs().max().item() for parameter in made.adapter.parameters()) < 1e-12  # type: ignore[union-attr]


def test_no_supervised_token_is_no_loss() -> None:
    made = objective(JointTraining(rank=2))
    found = made(IDS, SEGMENTS, torch.full_like(IDS, -100))
    total = found.total(0.5)
    total.backward()
    assert total.item() == 0 and found.count == 0
    assert all(not parameter.grad.any() for parameter in made.parameters() if parameter.grad is not None)


def gradients(made: JointObjective, weight: float) -> dict[str, Tensor]:
    made.zero_grad()
    made(IDS, SEGMENTS, LABELS).total(weight).backward()
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


def test_the_heads_loss_reaches_the_trunk_by_its_weight() -> None:
    made = objective(JointTraining(rank=2), family="gpt2")  # Llama's norms are in fp32, whatever the model is in
    none, half, full = (gradients(made, weight) for weight in (0.0, 0.5, 1.0))
    for name, gradient in full.items():
        torch.testing.assert_close(half[name], 0.5 * (none[name] + gradient), rtol=1e-10, atol=1e-12)
    heads = [name for name in full if name.startswith("heads.")]
    assert heads and not any(none[name].any() for name in heads) and all(full[name].any() for name in heads)
    adapter = [name for name in full if name.startswith("adapter.")]
    assert all((full[name] - none[name]).abs().max() > 1e-6 for name in adapter)
    assert len(heads) + len(adapter) == len(full)  # nothing else is trained
    assert all(parameter.grad is None for parameter in made.heads.trunk.model.get_output_embeddings().parameters())


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    made = objective(JointTraining(rank=2, trunk_loss="teacher"), kind, "gpt2")
    found = gradients(made, 0.7)
    generator, size = torch.Generator().manual_seed(3), 1e-6
    names = {name: parameter for name, parameter in made.named_parameters() if parameter.requires_grad}
    ways = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in names.items()}
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in names.items():
                parameter += sign * size * ways[name]
            sides.append(made(IDS, SEGMENTS, LABELS).total(0.7))
            for name, parameter in names.items():
                parameter -= sign * size * ways[name]
    slope = sum((found[name] * ways[name]).sum() for name in names)
    torch.testing.assert_close((sides[0] - sides[1]) / (2 * size), slope, rtol=1e-5, atol=1e-6)


def test_parts_of_a_step_add_up_to_the_step() -> None:
    made = objective(JointTraining(rank=2))
    whole = made(IDS, SEGMENTS, LABELS)
    counts = torch.cat([whole.count[None], whole.heads.counts_K])
    parts = [made(IDS[row], SEGMENTS[row], LABELS[row]).total(0.3, counts) for row in (slice(1), slice(1, 2))]
    torch.testing.assert_close(sum(parts), whole.total(0.3), rtol=1e-12, atol=0)


def test_the_heads_weight_rises_as_a_quarter_of_a_sine() -> None:
    training = JointTraining(heads_weight=0.4, heads_warmup=4)
    found = [heads_weight(step, training) for step in range(6)]
    assert found == pytest.approx([0.4 * value for value in (0.38268, 0.70711, 0.92388, 1, 1, 1)], rel=1e-4)
    assert heads_weight(0, replace(training, heads_warmup=0)) == 0.4


def test_each_part_is_trained_at_its_own_rate() -> None:
    training = JointTraining(
        steps=1, batch=1, rank=2, lr=1e-3, heads_lr=7e-3, warmup=0, weight_decay=0.0, schedule="constant"
    )
    made = objective(training)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    rows = RandomBlocks(IDS.flatten().repeat(4), torch.zeros(96, dtype=torch.long), 12, 1, 0)
    trainer = JointTrainer(made, rows, training, seed=0, device=torch.device("cpu"))
    trainer.train()
    # The first step of AdamW moves each weight by its rate, whatever the gradient.
    for name, parameter in made.named_parameters():
        step = (parameter.detach() - before[name]).abs().max().item()
        assert step == pytest.approx(1e-3 if name.startswith("adapter.") else 7e-3, rel=1e-2), name


# The stage

TEXT = "the cat sat on the mat and a dog ran to the far end of it\n" * 60


def small(folder: Path, **changes: Any) -> TrainConfig:
    """A run of two seconds, in which the joint stage finds something better."""
    (folder / "text.txt").write_text(TEXT)
    common: dict[str, Any] = {"batch": 2, "log_every": 4, "eval_every": 2, "save_every": 3, "save_minutes": None}
    own = {"steps": 7, "dropout": 0.1, "warmup": 2, "heads_warmup": 2, "loss_tolerance": 0.5, "heads_lr": 2e-2}
    return TrainConfig(
        str(folder / "run"),
        threads=1,
        data=DataConfig(source=str(folder / "text.txt"), tokenizer="char", block=16),
        trunk=TrunkConfig(new=NewTrunk(layers=1, hidden=16, heads=2, kv_heads=1, intermediate=24, context=64)),
        trunk_training=Training(steps=20, **common),
        heads=HeadsConfig("root", num=2),
        heads_training=HeadsTraining(steps=4, **common),
        joint=JointTraining(**(common | own | {"lr": 2e-2} | changes)),
        evaluation=EvaluationConfig(rows=2, prompts=4, prompt_tokens=8, tokens=12, nodes=4),
        calibration=CalibrationConfig(sizes=(1, 3), rounds=2),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run; tests that change it work on a copy."""
    config = small(tmp_path_factory.mktemp("made"))
    train(config, report=quiet)
    return config


@pytest.fixture
def copied(made: TrainConfig, tmp_path: Path) -> TrainConfig:
    shutil.copytree(made.run, tmp_path / "run")
    return replace(made, run=str(tmp_path / "run"))


def quiet(line: str) -> None:
    """Says nothing."""


def events(config: TrainConfig, stage: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(config.run) / "train_log.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "trunk_share", "peak_memory_mb")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines if line["stage"] == stage]


def result(config: TrainConfig, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config.run) / "run.json").read_text())["stages"][stage]["result"]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_stage_begins_where_the_heads_ended(made: TrainConfig) -> None:
    best = max((e for e in events(made, "heads") if "tokens_per_step" in e), key=lambda e: e["tokens_per_step"])
    first, *later = events(made, "joint")
    assert first["step"] == 0 and all(event["step"] > 0 for event in later)
    for name in ("tokens_per_step", "acceptance", "heldout_top1", "heldout_top5"):
        assert first[name] == best[name], name
    assert first["heldout_loss"] == first["heldout_loss_before"]
    assert result(made, "joint")["tokens_per_step_before"] == result(made, "heads")["tokens_per_step"]


def test_continuations_made_anew_through_an_untrained_adapter_are_the_trunks(made: TrainConfig) -> None:
    trunk = Trunk.load(f"{made.run}/trunk")
    heads = load_heads(Path(made.run) / "medusa-1", trunk)
    assert made.joint is not None and trunk.tokenizer is not None
    both = JointObjective(heads, Adapter(trunk, made.joint, 0), made.heads_training, made.joint)
    rows = [trunk.tokenizer(TEXT)["input_ids"][at : at + 8] for at in (0, 13, 30, 41)]
    evaluation = JointEvaluation(both, rows, _rows(rows), made.evaluation, made.joint)
    both.train()
    with both.adapter.off():
        wanted = evaluation(0)
    both.train()
    assert evaluation(1) == wanted
    moved(both.adapter, 1.0)
    both.train()
    found = evaluation(2)
    assert found["heldout_loss"] != wanted["heldout_loss"] == found["heldout_loss_before"]
    both.train()
    assert evaluation(3) == found  # without dropout


def test_the_best_within_the_tolerance_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    training = JointTraining(rank=2, loss_tolerance=0.01)
    both = objective(training)
    evaluation = JointEvaluation(both, [[1, 2]], _rows([[1, 2]]), EvaluationConfig(tokens=4), training)
    weight = both.adapter.parts[0]["a"].weight  # type: ignore[index]
    for step, (gain, loss, kept) in enumerate(
        [(2.0, 1.0, 0), (3.0, 1.011, 0), (2.5, 1.009, 2), (2.4, 0.5, 2), (2.5, 0.9, 2), (2.6, 0.9, 5), (9.0, 1.1, 5)]
    ):
        with torch.no_grad():
            weight.fill_(step)
        figures = Topology.chain(step + 1), {"tokens_per_step": gain}
        monkeypatch.setattr(joint, "judge", lambda *_, _figures=figures: _figures)
        monkeypatch.setattr(evaluation, "_loss", lambda _loss=loss: _loss)
        assert evaluation(step)["tokens_per_step"] == gain
        assert (evaluation.step, evaluation.tree.depth) == (kept, kept + 1), step
    found = evaluation.result()
    assert (found["tokens_per_step"], found["heldout_loss"], found["step"], found["nodes"]) == (2.6, 0.9, 5, 7)
    assert (found["tokens_per_step_before"], found["heldout_loss_before"]) == (2.0, 1.0)
    other = JointEvaluation(both, [[1, 2]], _rows([[1, 2]]), EvaluationConfig(tokens=4), training)
    other.load_state(json.loads(json.dumps(evaluation.state()[0])), evaluation.state()[1])
    assert other.result() == found
    other.restore_best()
    assert bool((weight == 5).all())


def _rows(ids: list[list[int]]) -> Any:
    import datasets

    rows = {"input_ids": ids, "segments": [[0] * len(row) for row in ids]}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def test_the_result_is_the_merged_trunk_with_heads_of_its_own(made: TrainConfig) -> None:
    run = Path(made.run)
    manifest = read_manifest(run)
    assert (manifest.trunk, manifest.local) == ("merged", True)
    merged, first = Trunk.load(run / "merged"), Trunk.load(run / "trunk")
    assert manifest.fingerprint == merged.fingerprint() != first.fingerprint()
    assert result(made, "joint")["step"] > 0
    model = AutoModelForCausalLM.from_pretrained(run / "merged")
    assert AutoTokenizer.from_pretrained(run / "merged").get_vocab() == first.tokenizer.get_vocab()  # type: ignore[union-attr]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in first.model.named_parameters()]
    same = {n for n, p in model.named_parameters() if torch.equal(p, first.model.get_parameter(n))}
    assert same == {n for n, p in model.named_parameters() if "proj" not in n}  # every linear layer, and no other


@pytest.mark.parametrize(("place", "trunk"), [(".", "merged"), ("medusa-1", "trunk")])
def test_both_results_load_and_decode_as_their_own_trunk(made: TrainConfig, place: str, trunk: str) -> None:
    engine = Engine.load(Path(made.run) / place)
    prompt = engine.trunk.tokenizer("the cat sat")["input_ids"]  # type: ignore[misc]
    found = engine.generate(prompt, max_new_tokens=24)
    assert found.token_ids == plain_greedy(Trunk.load(f"{made.run}/{trunk}"), prompt, 24)
    assert sum(found.accepted) > 0


def test_the_record_tells_both_losses(made: TrainConfig) -> None:
    found = result(made, "joint")
    log = {event["step"]: event for event in events(made, "joint") if "heldout_loss" in event}
    assert found["tokens_per_step"] == log[found["step"]]["tokens_per_step"] > found["tokens_per_step_before"]
    assert found["repeated"] == log[found["step"]]["repeated"] and 0 <= found["repeated"] <= 1
    assert found["heldout_loss"] != found["heldout_loss_before"] == result(made, "trunk")["heldout_loss"]
    trained = [event for event in events(made, "joint") if "trunk_loss" in event]
    assert all(len(event["head_loss"]) == 2 and event["heads_weight"] == 0.2 for event in trained) and trained


def test_a_run_without_the_stage_has_no_folders_for_it(made: TrainConfig, tmp_path: Path) -> None:
    config = replace(made, run=str(tmp_path / "run"), joint=None)
    train(config, report=quiet)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "heads.safetensors" in names and not names & {"medusa-1", "merged"}
    first, second = (load_file(f"{place}/heads.safetensors") for place in (config.run, f"{made.run}/medusa-1"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for other, now, before in ((config, made, None), (copied_to(made, tmp_path), replace(made, joint=None), True)):
        with pytest.raises(UserError, match=f"heads stage was made with joint={before}, now it is .*--fresh heads"):
            train(replace(now, run=other.run), report=quiet)


def copied_to(made: TrainConfig, folder: Path) -> TrainConfig:
    shutil.copytree(made.run, folder / "copy")
    return replace(made, run=str(folder / "copy"))


def test_a_finished_run_is_left_as_it_is(copied: TrainConfig) -> None:
    before, lines = contents(Path(copied.run)), list[str]()
    train(copied, report=lines.append)
    assert contents(Path(copied.run)) == before
    assert [line.partition(":")[0] for line in lines] == ["trunk", "heads", "joint", "calibration"]


def test_fresh_joint_keeps_the_stages_before_it(copied: TrainConfig) -> None:
    run = Path(copied.run)
    before, kept = contents(run), events(copied, "heads")
    assert copied.joint is not None
    changed = replace(copied, joint=replace(copied.joint, rank=2, steps=2, heads_lr=5e-2))
    with pytest.raises(UserError, match=r"joint stage was made with joint\.steps=7, now it is 2: add `--fresh joint`"):
        train(changed, report=quiet)
    assert contents(run) == before
    train(changed, "joint", quiet)
    after = contents(run)
    for name in before:
        if name.startswith(("medusa-1/", "trunk/")) and not name.endswith("config.yaml"):
            assert after[name] == before[name], name
    assert after["heads.safetensors"] != before["heads.safetensors"]
    assert events(changed, "heads") == kept
    assert {event["step"] for event in events(changed, "joint")} == {0, 2}


def test_new_heads_make_the_joint_stage_anew(copied: TrainConfig) -> None:
    lines = list[str]()
    train(replace(copied, heads=HeadsConfig("medusa", 2)), "heads", lines.append)
    assert [line for line in lines if "is there" in line] == [line for line in lines if line.startswith("trunk:")]
    assert read_manifest(Path(copied.run)).heads.kind == read_manifest(Path(copied.run) / "medusa-1").heads.kind


def test_fresh_joint_needs_a_joint_stage(made: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`--fresh joint`: this recipe has no joint stage"):
        train(replace(made, joint=None, run=str(tmp_path / "run")), "joint", quiet)


@pytest.mark.parametrize("name", ["medusa-1/heads.safetensors", "merged/config.json", "heads.safetensors"])
def test_a_stage_whose_files_are_gone_is_made_again(copied: TrainConfig, name: str) -> None:
    (Path(copied.run) / name).unlink()
    train(copied, report=quiet)
    assert (Path(copied.run) / name).is_file()
    Engine.load(copied.run)


def test_where_nothing_better_is_found_the_start_is_kept(copied: TrainConfig) -> None:
    assert copied.joint is not None
    lines, run = list[str](), Path(copied.run)
    config = replace(copied, joint=replace(copied.joint, lr=3.0, steps=2, warmup=0, loss_tolerance=0.0))
    train(config, "joint", lines.append)
    assert result(config, "joint")["step"] == 0
    assert any("no step brought more within the tolerance: the trunk stays as it was" in line for line in lines)
    for first, second in (("trunk/model", "merged/model"), ("medusa-1/heads", "heads")):
        was, now = (load_file(run / f"{name}.safetensors") for name in (first, second))
        assert was.keys() == now.keys() and all(torch.equal(was[name], now[name]) for name in was), first


def test_a_trunk_that_changes_under_the_adapter_is_a_fault(
    copied: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaky(JointTrainer):
        def train(self, *args: Any, **options: Any) -> Any:
            found = super().train(*args, **options)
            with torch.no_grad():
                self.model.heads.trunk.model.model.layers[0].mlp.up_proj.weight[-1, -1] += 1e-6
            return found

    monkeypatch.setattr(joint, "JointTrainer", Leaky)
    with pytest.raises(RuntimeError, match="the trunk's own weights changed"):
        train(copied, "joint", quiet)


class Killed(BaseException):
    """Stands for SIGKILL where a process of its own would be too slow."""


def test_killed_at_any_step_and_resumed_is_never_stopped(
    made: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copied_to(made, tmp_path)
    before = JointTrainer.training_step
    fresh: str | None = "joint"
    for stop in (2, 4, 6):

        def step(self: JointTrainer, *args: Any, _stop: int = stop, **options: Any) -> Any:
            if self.state.global_step == _stop:
                raise Killed
            return before(self, *args, **options)

        monkeypatch.setattr(JointTrainer, "training_step", step)
        with pytest.raises(Killed):
            train(config, fresh, quiet)
        fresh = None
    monkeypatch.setattr(JointTrainer, "training_step", before)
    lines = list[str]()
    train(config, report=lines.append)
    assert any("joint: goes on from step 6" in line for line in lines)
    assert events(config, "joint") == events(made, "joint")
    assert result(config, "joint") == result(made, "joint")
    for name in ("merged/model.safetensors", "heads.safetensors", "tree.json"):
        first, second = (Path(each.run) / name for each in (config, made))
        assert name == "tree.json" or first.read_bytes() == second.read_bytes(), name
    assert contents(Path(config.run)).keys() == contents(Path(made.run)).keys()


def test_dropout_is_drawn_and_the_trial_step_draws_nothing(made: TrainConfig) -> None:
    training = JointTraining(steps=1, batch=2, rank=2, dropout=0.5)
    both = objective(training)
    rows = RandomBlocks(IDS.flatten().repeat(4), torch.zeros(96, dtype=torch.long), 12, 2, 0)
    trainer = JointTrainer(both, rows, training, seed=0, device=torch.device("cpu"))
    both.train()
    state = torch.get_rng_state()
    trainer.try_step()
    assert torch.equal(torch.get_rng_state(), state)
    both(IDS, SEGMENTS, LABELS)
    assert not torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in both.parameters())


def test_rebound_heads_give_the_same_on_an_equal_trunk() -> None:
    heads = random_heads(tiny_trunk("llama"), HeadsConfig("hydra", 2))
    other = rebound(heads, tiny_trunk("llama"))
    assert other.trunk is not heads.trunk
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in other.state_dict().items())


# The command line


def test_the_plan_and_the_summary_tell_of_it(made: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    told = "\n".join(plan(made))
    assert "joint        the heads, and the trunk through an adapter of rank 16" in told and "7 steps of 2 x 16" in told
    recipe = Path(made.run).parent / "recipe.yaml"
    recipe.write_text(to_yaml(made))
    assert cli.main(["train", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert f"exact to the merged trunk, {made.run}/merged: the model was changed" in out
    assert f"are in {made.run}/medusa-1" in out


def test_options_of_the_stage_are_read_from_the_command_line(tmp_path: Path) -> None:
    from medusa.train.cli import read_config

    argv = ["tinyshakespeare", "--joint.steps=5", "--joint.modules=[q_proj,v_proj]", "--joint.trunk_loss=teacher"]
    found = read_config(argv)[0].joint
    assert found is not None and (found.steps, found.modules, found.trunk_loss) == (5, ("q_proj", "v_proj"), "teacher")
    assert read_config(["tinyshakespeare"])[0].joint is None
    (tmp_path / "config.yaml").write_text(to_yaml(read_config(argv)[0]))
    assert read_config([str(tmp_path / "config.yaml")])[0].joint == found


def test_without_peft_the_extra_is_named_before_heads_are_trained(
    copied: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "peft", None)
    recipe = Path(copied.run).parent / "recipe.yaml"
    recipe.write_text(to_yaml(copied))
    assert cli.main(["train", str(recipe), "--fresh", "heads"]) == 2
    err = capsys.readouterr().err
    assert "this needs the package 'peft': pip install 'medusa-decoding[train]'" in err.splitlines()[-1]
    assert "heads:" not in err
