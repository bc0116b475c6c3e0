"""Trees of Hydra's heads that C++ fills and grows for one row: node by node those that torch makes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import medusa.drafters.heads as module
from medusa.drafters.base import Drafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.filled import Filling
from medusa.drafters.grown import Growing
from medusa.drafters.medusa import MedusaDrafter
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.largest import native
from medusa.sampling import Chance, HashDraws, SamplingParams
from medusa.testing import random_heads, random_topology, tiny_trunk
from medusa.tree import DraftTree, Topology
from medusa.trunk import TrunkOutput

V, HEADS = 41, 4
pytestmark = pytest.mark.skipif(native() is None, reason="no compiler")


def heads_of(vocab: int | None, seed: int, dtype: torch.dtype = torch.float64) -> MedusaHeads:
    trunk = tiny_trunk("llama", vocab_size=V, dtype=dtype)
    if vocab is None:
        return random_heads(trunk, HeadsConfig("hydra", num=HEADS), seed=seed, scale=0.4)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:vocab].sort().values
    heads = MedusaHeads(HeadsConfig("hydra", num=HEADS, vocab=vocab), trunk, ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((0.4 * noise).to(parameter))
    return heads.eval()


def trees_of(drafter: Drafter, heads: MedusaHeads, room: int, chance: Chance | None = None) -> list[DraftTree]:
    """Of some steps in one session."""
    session: Any = drafter.open(heads.trunk)
    generator, trees = torch.Generator().manual_seed(3), []
    for root in range(0, V, 5):
        hidden_1D = torch.randn(1, heads.trunk.hidden_size, generator=generator, dtype=torch.float64)
        hidden_1D = hidden_1D.to(heads.trunk.dtype)
        session.start([[1]], hidden_1D, TrunkOutput(hidden_1D[:, None], hidden_1D[:, None]))
        trees.append(session.propose(torch.tensor([root]), room, chance))
    return trees


def parts(tree: DraftTree) -> list[Tensor]:
    shape = tree.shape
    return [tree.tokens_BN, tree.valid_BN, shape.parents, shape.depths, shape.ancestors, shape.paths]


def same(drafter: Any, heads: MedusaHeads, room: int, monkeypatch: pytest.MonkeyPatch, used: Any) -> None:
    """By C++, which is really ``used`` by this method of a class, and by torch."""
    calls, (kind, name) = [], used
    work = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *given: (calls.append(1), work(*given))[1])
    found = trees_of(drafter, heads, room)
    assert calls
    monkeypatch.setattr(module, "serves", lambda table: False)
    calls.clear()
    expected = trees_of(drafter, heads, room)
    assert not calls
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(parts(one), parts(other), strict=False):
            assert torch.equal(mine, theirs[..., : mine.shape[-1]])


@pytest.mark.parametrize("vocab", [None, 23])
@pytest.mark.parametrize("seed", range(6))
def test_a_static_tree(seed: int, vocab: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = random_topology(random.Random(seed), 11, ranks=4)  # nodes not ordered by depth
    topology = topology.trim(HEADS) if topology.depth > HEADS else topology
    heads = heads_of(vocab, seed)
    same(MedusaDrafter(heads, topology), heads, 1 + seed, monkeypatch, (Filling, "columns"))


@pytest.mark.parametrize("vocab", [None, 23])
@pytest.mark.parametrize("nodes", [2, 5, 12, 40])
@pytest.mark.parametrize("temperatures", [None, (0.5, 1.0, 2.0, 1.5)])
def test_a_tree_of_each_step(temperatures: Any, nodes: int, vocab: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_of(vocab, nodes)
    drafter = DynamicDrafter(heads, nodes, temperatures=temperatures)
    same(drafter, heads, HEADS + 1, monkeypatch, (Growing, "grow"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_of(23, 1, dtype)
    same(MedusaDrafter(heads, Topology.full([3, 2, 1])), heads, 9, monkeypatch, (Filling, "columns"))


def test_tokens_that_the_tokenizer_lacks_are_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_of(None, 2)
    monkeypatch.setattr(type(heads.trunk), "draftable", property(lambda trunk: 17))
    drafters = [(MedusaDrafter(heads, Topology.full([3, 2, 1])), "columns"), (DynamicDrafter(heads, 9), "grow")]
    for drafter, name in drafters:
        with monkeypatch.context() as patch:
            same(drafter, heads, 9, patch, (Filling if name == "columns" else Growing, name))
        assert all(bool((tree.tokens_BN[:, 1:] < 17).all()) for tree in trees_of(drafter, heads, 9))


def test_rows_that_sample_draw_their_children(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_of(None, 0)
    chance = Chance([SamplingParams(temperature=1.0)], [7], HashDraws(), "cpu")
    for tree in trees_of(MedusaDrafter(heads, Topology.full([2, 2])), heads, 9, chance):
        assert tree.sampled_BN is not None and tree.sampled_BN[:, 1:].all()
