"""Held-out evaluation of heads: acceptance by depth, and the best heads kept."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest
import torch

from medusa.calibrate import acceptance, accepted_paths, continuations, grow, head_ranks, node_shares, tokens_per_step
from medusa.decoding import Decoder, Request
from medusa.drafters.medusa import MedusaDrafter
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.testing import memorising_heads, tiny_trunk
from medusa.train.heldout import HeadsEvaluation
from medusa.tree import Topology

PROMPTS = [[3, 0, 41, 7], [11], [60, 2], [5, 5, 9]]


def accepted_lengths(tree: Topology, ranks: list[torch.Tensor]) -> list[int]:
    return [len(path) for path in accepted_paths(tree, ranks)]


def test_acceptance_by_hand() -> None:
    chain = Topology.chain(2)
    # steps at 0 (both accepted), 3 (none), 4 (one), 6 (both), 9 (none)
    ranks = torch.tensor([[0, 0], [9, 9], [9, 9], [1, 0], [0, 2], [9, 9], [0, 0], [9, 9], [9, 9], [4, -1]])
    assert accepted_lengths(chain, [ranks]) == [2, 0, 1, 2, 0]
    assert acceptance(chain, [ranks]) == [3 / 5, 2 / 3]
    assert acceptance(Topology.from_paths([[0]]), [ranks]) == [3 / 7]  # steps at 0, 2, 3, 4, 6, 8, 9
    assert acceptance(Topology.root(), [ranks]) == []
    assert acceptance(chain, [ranks[:0]]) == [0.0, 0.0]


def test_depths_without_children_are_not_accepted() -> None:
    ranks = torch.tensor([[0, 0], [9, 9], [1, 0], [9, 9]])
    forked = Topology.from_paths([[0], [1], [0, 0]])  # no child of the path [1]
    assert accepted_lengths(forked, [ranks]) == [2, 0]
    assert accepted_lengths(forked, [ranks[2:]]) == [1]
    assert acceptance(forked, [ranks[2:], ranks]) == [2 / 3, 1 / 2]


def test_node_shares_by_hand() -> None:
    forked = Topology.from_paths([[0], [1], [0, 0], [0, 2]])
    ranks = torch.tensor([[0, 2], [9, 9], [9, 9], [1, 0], [9, 9], [0, 0], [9, 9], [9, 9], [0, 1]])
    assert accepted_paths(forked, [ranks]) == [(0, 2), (1,), (0, 0), (0,)]
    shares = dict(zip(forked.paths, node_shares(forked, [ranks]), strict=True))
    assert shares == {(): 1.0, (0,): 3 / 4, (1,): 1 / 4, (0, 0): 1 / 4, (0, 2): 1 / 4}
    assert node_shares(forked, [ranks[:0]]) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    trunk = tiny_trunk("llama")
    known = continuations(trunk, PROMPTS[:2], 30).ids
    heads, generator = memorising_heads(trunk, HeadsConfig("root", 3), known), torch.Generator().manual_seed(0)
    with torch.no_grad():  # tokens that no text has tie
        for parameter in heads.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


def test_shares_are_those_of_the_real_loop(heads: MedusaHeads) -> None:
    held = continuations(heads.trunk, PROMPTS, 30)
    ranks = head_ranks(heads, held)
    tree = grow(ranks, 10)
    for prompt, ids, row in zip(PROMPTS, held.ids, ranks, strict=True):
        decoder, lengths = Decoder(heads.trunk, MedusaDrafter(heads, tree)), []
        decoder.admit([Request(prompt, len(ids) - len(prompt))])
        while decoder.rows:
            lengths.append(decoder.step().accepted[0])
        walked = accepted_lengths(tree, [row])
        assert len(walked) >= 5 and lengths[: len(walked) - 1] == walked[:-1]  # the limit cuts the last one
    shares = acceptance(tree, ranks)
    assert len(shares) == tree.depth and min(shares) > 0 and max(shares) < 1
    mean = sum(accepted_lengths(tree, ranks)) / len(accepted_lengths(tree, ranks))
    assert sum(accumulate(shares, mul)) == pytest.approx(mean)
    assert sum(node_shares(tree, ranks)) == pytest.approx(1 + mean)


def test_the_best_heads_are_kept_with_their_figures(heads: MedusaHeads) -> None:
    held = continuations(heads.trunk, PROMPTS, 30)
    evaluation = HeadsEvaluation(heads, held, nodes=6)
    found = evaluation(3)
    _, judged = held.halves()
    assert set(found) == {"tokens_per_step", "acceptance", "heldout_top1", "heldout_top5"}
    assert found["tokens_per_step"] == tokens_per_step(evaluation.tree, head_ranks(heads, judged)) > 1
    assert found["acceptance"] == acceptance(evaluation.tree, head_ranks(heads, judged))
    best, tree = {name: value.clone() for name, value in heads.state_dict().items()}, evaluation.tree
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    worse = evaluation(4)
    assert worse["tokens_per_step"] < found["tokens_per_step"] and (evaluation.step, evaluation.tree) == (3, tree)
    evaluation.restore_best()
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in best.items())
