"""Packed products inside traces: what a trace reads is the one packed copy, for as long as that holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa import traced
from medusa.compiled import CompiledSteps, StepSize
from medusa.packed import Packs, Weight, pack, packed_layers, unpack
from medusa.testing import VOCAB, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

TREE = Topology.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 1]])


class Graphs:
    """A backend that runs what is traced as it is, and counts the packed products in it."""

    def __init__(self) -> None:
        self.products = 0

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        self.products += sum("packed_linear" in str(node.target) for node in graph.graph.nodes)
        return graph.forward


def packed_trunk(family: str = "llama", **options: Any) -> Trunk:
    trunk = tiny_trunk(family, dtype=torch.float32, **options)
    assert pack(trunk.model, always=True)
    return trunk


def layers_of(trunk: Trunk) -> list[Any]:
    return [layer for layer in trunk.model.modules() if isinstance(layer, Packs)]


def compiled(trunk: Trunk, backend: Any) -> CompiledSteps:
    return CompiledSteps(trunk, [StepSize(1, TREE.size)], backend=backend)


@torch.inference_mode()
def logits(trunk: Trunk, steps: CompiledSteps | None) -> Tensor:
    """Of a random tree behind a random text."""
    ids = torch.randint(VOCAB, (1, 9 + TREE.size), generator=torch.Generator().manual_seed(1))
    trunk.compiled, cache = None, trunk.new_cache(1)
    trunk.prefill(ids[:, :9], [9], cache)
    trunk.compiled = steps
    tree = DraftTree(Shape.static(TREE, "cpu"), ids[:, 9:], torch.ones(1, TREE.size, dtype=torch.bool))
    return trunk.tree_forward(tree, cache).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2: weights of the other orientation, and biases
def test_a_trace_holds_the_packed_products(family: str) -> None:
    trunk, graphs = packed_trunk(family), Graphs()
    assert torch.equal(logits(trunk, compiled(trunk, graphs)), logits(trunk, None))
    assert graphs.products == packed_layers(trunk.model) == len(layers_of(trunk))


def test_it_reads_the_packed_copy() -> None:
    trunk = packed_trunk()
    steps = compiled(trunk, Graphs())
    assert logits(trunk, steps).abs().max() > 0
    head = trunk.model.get_output_embeddings()
    zero = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    zero.weight.data.zero_()
    head.medusa_packed.packed = Weight(zero, head.medusa_packed.way).packed
    assert logits(trunk, steps).abs().max() == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("then", ["unpacked", "written to"])
def test_a_copy_that_holds_no_more_is_not_read(family: str, then: str) -> None:
    trunk = packed_trunk(family)
    steps = compiled(trunk, Graphs())
    logits(trunk, steps)
    if then == "unpacked":
        unpack(trunk.model)
    else:
        for layer in layers_of(trunk):
            layer.weight.mul_(0.5)  # unlike a write to its .data, that leaves a trace
    torch.testing.assert_close(logits(trunk, steps), logits(trunk, None), rtol=1e-5, atol=1e-5)


def test_a_trunk_that_goes_takes_its_entries_along() -> None:
    gc.collect()
    before = len(traced._LAYERS)
    trunk = packed_trunk()
    logits(trunk, compiled(trunk, Graphs()))
    assert len(traced._LAYERS) == before + packed_layers(trunk.model)
    del trunk
    torch._dynamo.reset()
    gc.collect()
    assert len(traced._LAYERS) <= before


def test_layers_are_what_they_were_after_a_trace_that_failed() -> None:
    trunk = packed_trunk()
    kinds = [type(layer) for layer in layers_of(trunk)]
    with pytest.raises(RuntimeError), traced.traceable(trunk.model) as count:
        assert count == len(kinds) and [type(layer) for layer in layers_of(trunk)] != kinds
        raise RuntimeError
    assert [type(layer) for layer in layers_of(trunk)] == kinds


@pytest.mark.slow
def test_inductor() -> None:
    trunk = packed_trunk(num_hidden_layers=1)
    steps = compiled(trunk, "inductor")
    steps.ahead = False  # as where weights are no plain tensors
    torch.testing.assert_close(logits(trunk, steps), logits(trunk, None), rtol=1e-5, atol=1e-5)
    head = trunk.model.get_output_embeddings()
    zero = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    zero.weight.data.zero_()
    head.medusa_packed.packed = Weight(zero, head.medusa_packed.way).packed
    assert logits(trunk, steps).abs().max() == 0
