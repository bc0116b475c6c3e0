"""What trains an EAGLE layer: its loss against a plain one, steps in parts, precision, and how it is judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from medusa.calibrate import Continuations, accepted_paths, continuations, grow
from medusa.data.corpus import RandomBlocks
from medusa.decoding import Decoder, Request
from medusa.drafters.eagle import EagleDrafter
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_calibrate import calibrate_layer, layer_features, layer_ranks
from medusa.errors import UserError
from medusa.testing import memorising_eagle, random_eagle, tiny_trunk
from medusa.train import eagle_loss as losses
from medusa.train.config import EagleTraining
from medusa.train.eagle import EagleEvaluation
from medusa.train.eagle_loss import EagleLoss, eagle_loss
from medusa.train.eagle_objective import EagleObjective, EagleTrainer
from medusa.train.follow import follow
from medusa.train.loss import weights
from medusa.train.pairs import IGNORE

CPU = torch.device("cpu")
CONFIGS = [EagleConfig(1), EagleConfig(1, vocab=20), EagleConfig(3), EagleConfig(3, vocab=20)]
POSITIONS = torch.tensor([[*range(6), *range(8)], [*range(14)]])  # of the tokens of inputs()
PROMPTS = [[3, 0, 41, 7], [11], [60, 2], [5, 5, 9]]


def rows(samples: int, block: int = 16, seed: int = 0) -> RandomBlocks:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(65, (400,), generator=generator)
    segments = (torch.rand(400, generator=generator) < 0.05).cumsum(0)
    return RandomBlocks(tokens, segments, block, samples, seed)


class Uneven(RandomBlocks):
    """Rows of which the first supervise little and the last much."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        kept = torch.arange(self.block) < 3 + 12 * (index % 4) // 3
        return row | {"labels": row["input_ids"].masked_fill(~kept, IGNORE)}


def uneven(samples: int) -> Uneven:
    data = rows(samples)
    return Uneven(data.tokens_T, data.segments_T, data.block, samples, 0)


def layer_of(config: EagleConfig, **trunk: Any) -> EagleLayer:
    return random_eagle(tiny_trunk("llama", **trunk), config).train()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and segments of two rows with seams."""
    ids = torch.randint(65, (2, 14), generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(torch.rand(2, 14, generator=torch.Generator().manual_seed(4)) < 0.3, IGNORE)
    return ids, labels, torch.tensor([[0] * 6 + [1] * 8, [0] * 14])


def plain_loss(layer: EagleLayer, taught: bool, passes: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Losses and distances of each counted pair, one after the other, with autograd's own gradients."""
    ids, labels, segments = inputs()
    found: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
    output = layer.trunk.forward(ids, positions_BT=POSITIONS, layers=layer.layers)
    laws = output.logits.softmax(-1) if layer.draft_ids is None else output.logits.softmax(-1)[..., layer.draft_ids]
    states = layer.unroll(ids, layer.features(output), passes, segments)
    for step, state in enumerate(states):
        tokens, distances = [], []
        for row in range(2):
            for start in range(14 - 2 - step):
                target = start + 2 + step
                if labels[row, target] == IGNORE or segments[row, start] != segments[row, target]:
                    continue
                log = layer.logits(state[row, start + step]).log_softmax(-1)
                column = int(layer.columns(ids[row, target]))
                hard = -log[column] if column >= 0 else log.sum() * 0
                tokens.append(-(laws[row, target - 1] * log).sum() if taught else hard)
                distances.append(smooth_l1_loss(state[row, start + step], output.hidden[row, target - 1]))
        found[0].append(tokens)
        found[1].append(distances)
    return found


def chunked(layer: EagleLayer, taught: bool, passes: int, chunk: int | None) -> EagleLoss:
    ids, labels, segments = inputs()
    training = EagleTraining(
        passes=passes, targets="trunk" if taught else "text", feature_weight=2.0, chunk=chunk, decay=0.5
    )
    found: EagleLoss = EagleObjective(layer, training)(ids, segments, labels)
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_loss_and_its_gradients_are_those_of_a_plain_one(
    config: EagleConfig, taught: bool, chunk: int | None
) -> None:
    layer = layer_of(config)
    tokens, distances = plain_loss(layer, taught, 3)
    total = torch.zeros((), dtype=torch.float64)
    for step, (of_tokens, of_states) in enumerate(zip(tokens, distances, strict=True)):
        total = total + 0.5**step * (torch.stack(of_tokens).mean() + 2.0 * torch.stack(of_states).mean())
    parameters = list(layer.parameters())
    wanted = torch.autograd.grad(total, parameters)
    found = chunked(layer, taught, 3, chunk)
    assert found.tokens.counts_K.tolist() == [len(each) for each in tokens]
    torch.testing.assert_close(found.tokens.loss_sums_K, torch.stack([torch.stack(each).sum() for each in tokens]))
    torch.testing.assert_close(found.total(2.0), total)
    for gradient, expected in zip(torch.autograd.grad(found.total(2.0), parameters), wanted, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_hits_and_what_is_outside_the_vocabulary_are_counted(config: EagleConfig) -> None:
    layer, (ids, labels, segments) = layer_of(config), inputs()
    found = chunked(layer, False, 2, None).tokens
    output = layer.trunk.forward(ids, positions_BT=POSITIONS, layers=layer.layers)
    states = layer.unroll(ids, layer.features(output), 2, segments)
    for step, state in enumerate(states):
        places = [(row, t) for row in range(2) for t in range(12 - step) if labels[row, t + 2 + step] != IGNORE]
        places = [(row, t) for row, t in places if segments[row, t] == segments[row, t + 2 + step]]
        columns = [int(layer.columns(ids[row, t + 2 + step])) for row, t in places]
        laws = [layer.logits(state[row, t + step]) for row, t in places]
        firsts = [column >= 0 and int((law >= law[column]).sum()) for law, column in zip(laws, columns, strict=True)]
        assert int(found.outside_K[step]) == columns.count(-1)
        assert int(found.top1_K[step]) == sum(first is not False and first <= 1 for first in firsts)
        assert int(found.top5_K[step]) == sum(first is not False and first <= 5 for first in firsts)


def test_logits_exist_for_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, sizes = layer_of(EagleConfig(3)), list[int]()
    inner = layer.logits

    def logits(state: Tensor) -> Tensor:
        sizes.append(len(state))
        return inner(state)

    monkeypatch.setattr(layer, "logits", logits)
    chunked(layer, True, 3, 4).total(0.0).backward()
    counted = sum(chunked(layer, True, 3, 4).tokens.counts_K.tolist())
    assert max(sizes) == 4 and sum(sizes) >= 2 * counted  # made again for the gradients
    kept: list[int] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value.shape[-1] if value.ndim else 0)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        chunked(layer, True, 3, 4)
    assert 65 not in kept  # no logits wait for the backward


def test_a_new_layer_of_version_1_starts_with_the_trunks_own_guess_one_token_late() -> None:
    trunk = tiny_trunk("llama")
    layer = EagleLayer(EagleConfig(1), trunk)
    ids = inputs()[0]
    output = trunk.forward(ids)
    (state,) = layer.unroll(ids, layer.features(output), 1, None)
    torch.testing.assert_close(layer.logits(state), output.logits[:, :-1])


def trained(
    config: EagleConfig, data: RandomBlocks, parts: int = 1, steps: int = 3, **options: Any
) -> tuple[list[Any], EagleLayer]:
    """What is logged in ``steps`` steps of 4 rows, each taken in ``parts``, and the layer after them, in fp64."""
    options = {"passes": 2, "feature_weight": 0.5} | options
    training = EagleTraining(steps=steps, batch=4, accumulate=parts, log_every=1, warmup=0, clip=0.5, **options)
    layer = EagleLayer(config, tiny_trunk("llama"))
    trainer = EagleTrainer(EagleObjective(layer, training), data, training, seed=0, device=CPU)
    written: list[Any] = []
    follow(trainer, "eagle", lambda step: {}, lambda step, figures: written.append(figures))
    names = ("depth_loss", "feature_loss", "top1")
    logged = [
        [event["loss"], event["grad_norm"], *(part for name in names for part in event.get(name, []))]
        for event in written
        if "loss" in event
    ]
    return logged, layer


@pytest.mark.parametrize("config", [EagleConfig(1), EagleConfig(3)], ids=str)
@pytest.mark.parametrize("data", [rows(12), uneven(12)], ids=["even", "uneven"])
def test_a_step_in_parts_is_the_step(config: EagleConfig, data: RandomBlocks) -> None:
    whole, layer = trained(config, data)
    assert len(whole) == 3 and len(whole[0]) == 2 + 3 * 2
    logged, found = trained(config, data, parts=4)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(whole), rtol=1e-6, atol=1e-6)
    for (name, value), other in zip(layer.state_dict().items(), found.state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("config", [EagleConfig(1), EagleConfig(3)], ids=str)
def test_a_layer_learns_and_the_trunk_does_not(config: EagleConfig) -> None:
    data = rows(48)
    logged, layer = trained(config, data, steps=12, lr=1e-2)
    assert logged[-1][0] < logged[0][0]
    for name, value in tiny_trunk("llama").model.state_dict().items():
        assert value.equal(layer.trunk.model.state_dict()[name]), name
    assert not layer.trunk.model.training and all(p.grad is None for p in layer.trunk.model.parameters())


def test_a_step_that_supervises_nothing_changes_nothing() -> None:
    class Nothing(RandomBlocks):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = super().__getitem__(index)
            return row | {"labels": torch.full_like(row["input_ids"], IGNORE)}

    data = Nothing(rows(4).tokens_T, rows(4).segments_T, 16, 4, 0)
    for config in (EagleConfig(1), EagleConfig(3)):
        logged, layer = trained(config, data, parts=2, steps=1)
        assert logged[0][:2] == [0.0, 0.0]
        assert all(value.isfinite().all() for value in layer.state_dict().values())


@pytest.mark.parametrize("config", [EagleConfig(1), EagleConfig(3)], ids=str)
def test_small_steps_are_not_rounded_away_on_a_trunk_in_half_precision(config: EagleConfig) -> None:
    trunk, training = tiny_trunk("llama", dtype=torch.bfloat16), EagleTraining(steps=2, batch=2, warmup=0, lr=1e-6)
    layer = EagleLayer(config, trunk, dtype=training.kept_in(trunk.dtype))
    before = {name: value.clone() for name, value in layer.named_parameters()}
    trainer = EagleTrainer(EagleObjective(layer, training), rows(4), training, seed=0, device=CPU)
    follow(trainer, "eagle", lambda step: {}, lambda step, figures: None)
    for name, value in layer.named_parameters():
        assert value.dtype is torch.float32
        if value.ndim > 1 and before[name].abs().min() > 1e-3:
            assert value.ne(before[name]).any() and value.bfloat16().equal(before[name].bfloat16())
    moved = [name for name, value in layer.named_parameters() if value.ne(before[name]).any()]
    assert "body.layer.self_attn.o_proj.weight" in moved and "body.fc.weight" in moved
    assert (config.version == 3) == ("lm_head.weight" in moved)
    assert trunk.forward(torch.tensor([[1, 2]])).hidden.dtype is torch.bfloat16


def test_noise_is_bounded_repeats_with_the_seed_and_is_undone_after_a_trial() -> None:
    layer = layer_of(EagleConfig(1))
    training = EagleTraining(steps=2, batch=2, noise=0.25)
    objective, features = EagleObjective(layer, training), torch.zeros(3, 50, 16, dtype=torch.float64)
    noise = objective.noised(features)
    assert 0.2 < noise.max() <= 0.25 and -0.25 <= noise.min() < -0.2
    assert EagleObjective(layer, EagleTraining()).noised(features) is features
    trainer = EagleTrainer(objective, rows(4), training, seed=0, device=CPU)
    state = torch.get_rng_state()
    trainer.try_step()
    assert torch.get_rng_state().equal(state) and trainer._sums == []
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.fixture(scope="module")
def known() -> EagleLayer:
    """A layer that is right where the trunk's text is known to it, and often wrong elsewhere."""
    trunk = tiny_trunk("llama")
    return memorising_eagle(trunk, EagleConfig(3), continuations(trunk, PROMPTS[:2], 30).ids, 3)


def ranks_of(layer: EagleLayer, held: Continuations, depth: int) -> list[Tensor]:
    return layer_ranks(layer, held, layer_features(layer, held), depth)


@pytest.mark.parametrize("version", [1, 3])
def test_ranks_tell_what_the_real_loop_accepts(known: EagleLayer, version: int) -> None:
    layer = known if version == 3 else random_eagle(known.trunk, EagleConfig(1), scale=0.02)
    held = continuations(layer.trunk, PROMPTS, 30)
    ranks = ranks_of(layer, held, 3)
    tree, deepest = grow(ranks, 10), 0
    for prompt, ids, row in zip(PROMPTS, held.ids, ranks, strict=True):
        assert row.shape == (len(ids) - 1 - len(prompt), 3)
        decoder, lengths = Decoder(layer.trunk, EagleDrafter(layer, tree)), []
        decoder.admit([Request(prompt, len(ids) - len(prompt))])
        while decoder.rows:
            lengths.append(decoder.step().accepted[0])
        walked = [len(path) for path in accepted_paths(tree, [row])]
        assert lengths[: len(walked) - 1] == walked[:-1]  # the limit cuts the last one
        deepest = max(deepest, *walked)
    assert deepest >= (3 if version == 3 else 1)


def test_the_best_layer_is_kept_with_its_tree(known: EagleLayer) -> None:
    held = continuations(known.trunk, PROMPTS, 30)
    evaluation = EagleEvaluation(known, held, depth=3, nodes=6)
    found = evaluation(3)
    assert set(found) == {"tokens_per_step", "acceptance", "heldout_top1", "heldout_top5"}
    assert len(found["heldout_top1"]) == 3 and evaluation.tree.depth <= 3 and evaluation.tree.size == 6
    best = {name: value.clone() for name, value in known.state_dict().items()}
    with torch.no_grad():
        for parameter in known.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert evaluation(4)["tokens_per_step"] < found["tokens_per_step"] and evaluation.step == 3
    evaluation.restore_best()
    assert all(value.equal(known.state_dict()[name]) for name, value in best.items())


def test_calibration_chooses_a_tree_of_the_layers_own(known: EagleLayer) -> None:
    held = continuations(known.trunk, PROMPTS, 30)
    seen: list[tuple[int, int]] = []
    found = calibrate_layer(known, held, 3, sizes=(1, 3, 6), rounds=2, progress=lambda *at: seen.append(at))
    assert [row.nodes for row in found.rows] == [1, 3, 6] and seen == [(1, 2), (2, 2)]
    assert found.rows[0].tokens_per_step == 1 and all(row.step_ms > 0 < row.forward_ms for row in found.rows)
    assert len(found.temperatures) == len(found.accuracy["top1"]) == 3
    assert found.topology == grow(ranks_of(known, held.halves()[0], 3), found.chosen.nodes)
    gains = [row.tokens_per_step for row in found.rows]
    assert gains == sorted(gains) and len(found.node_share) == found.chosen.nodes
    with pytest.raises(UserError, match="1 held-out prompts: calibration needs 2"):
        calibrate_layer(known, Continuations(held.ids[:1], held.starts[:1], held.hidden[:1]), 3)


def test_weights_fall_with_the_pass() -> None:
    objective = EagleObjective(layer_of(EagleConfig(1)), EagleTraining(passes=3, decay=0.5))
    assert objective.weights_K.equal(weights(3, 0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"passes": 0}, "eagle_training.passes=0: give at least 1"),
        ({"passes": 4, "depth": 3}, "eagle_training.depth=3, passes=4"),
        ({"chunk": 0}, "eagle_training.chunk=0"),
        ({"decay": 1.5}, "eagle_training.decay=1.5"),
        ({"noise": -0.1}, "eagle_training.noise=-0.1: it may not be negative"),
        ({"feature_weight": float("nan")}, "eagle_training.feature_weight=nan"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EagleTraining(**values)


def test_the_loss_alone_needs_no_segments() -> None:
    layer = layer_of(EagleConfig(3))
    ids = inputs()[0]
    output = layer.trunk.forward(ids, layers=layer.layers)
    states = layer.unroll(ids, layer.features(output), 2)
    found = eagle_loss(layer, states, output.hidden, ids, None, weights(2))
    whole = EagleObjective(layer, EagleTraining(passes=2, targets="text"))(ids, torch.zeros_like(ids))
    torch.testing.assert_close(found.tokens.loss_sums_K, whole.tokens.loss_sums_K)
    assert found.feature_sums_K.tolist() == [0.0, 0.0] and losses.FIRST == 2
