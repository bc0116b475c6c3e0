"""Compiled steps: the same text and logits, one compilation per size, whatever the text's length does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from medusa.__main__ import main
from medusa.cache import BLOCK, SlotCache
from medusa.checkpoint import save_heads, save_tree
from medusa.compiled import CompiledSteps, StepSize
from medusa.data.tokenizers import char_tokenizer
from medusa.decoding import Decoder, Request, decode, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.prompt_lookup import Lookup
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.infer.warmup import NODES, compile_step, step_sizes
from medusa.sampling import SamplingParams
from medusa.testing import VOCAB, ScriptedDrafter, plain_greedy, random_heads, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

PROMPTS = [[3, 0, 17, 5], [64, 1, 2, 3, 0, 0, 9, 40, 11], [7]]
TREE = Topology.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 1]])


class Tracer:
    """A backend that runs what is traced as it is: counts, and takes no compiler."""

    def __init__(self, then: Callable[..., Any] = lambda graph, inputs: graph.forward) -> None:
        self.count, self.then = 0, then

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        self.count += 1
        return self.then(graph, inputs)  # type: ignore[no-any-return]


def traced(trunk: Trunk, *sizes: tuple[int, int]) -> Tracer:
    tracer = Tracer()
    trunk.compiled = CompiledSteps(trunk, [StepSize(*size) for size in sizes], backend=tracer)
    return tracer


def batch(trunk: Trunk, lengths: Sequence[int]) -> SlotCache:
    """A cache that holds texts of these lengths."""
    cache = trunk.new_cache(len(lengths))
    ids_BT = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    trunk.prefill(ids_BT, lengths, cache)
    return cache


def random_tree(rows: int, topology: Topology = TREE) -> DraftTree:
    tokens_BN = torch.randint(VOCAB, (rows, topology.size), generator=torch.Generator().manual_seed(2))
    return DraftTree(Shape.static(topology, "cpu"), tokens_BN, torch.ones_like(tokens_BN).bool())


@torch.inference_mode()
def both(trunk: Trunk, lengths: Sequence[int], topology: Topology = TREE) -> tuple[Tensor, Tensor]:
    """Logits of a random tree without and with the compiled step, and that what is cached is the same."""
    steps, tree = trunk.compiled, random_tree(len(lengths), topology)
    assert steps is not None
    outputs, caches = [], []
    for trunk.compiled in (None, steps):
        caches.append(batch(trunk, lengths))
        outputs.append(trunk.tree_forward(tree, caches[-1]))
        caches[-1].set_lengths([length + tree.size for length in lengths])
    close = {"rtol": 1e-5, "atol": 1e-5} if trunk.dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(outputs[0].hidden, outputs[1].hidden, **close)
    for layer in range(len(trunk.layers)):
        for row in range(len(lengths)):
            for plain, compiled in zip(*(cache.read(layer, row) for cache in caches), strict=True):
                torch.testing.assert_close(plain, compiled, **close)
    return outputs[0].logits, outputs[1].logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])  # rotary, learned positions, a mask per kind of layer
def test_the_logits_are_the_same(family: str) -> None:
    trunk = tiny_trunk(family)
    tracer = traced(trunk, (2, TREE.size))
    for lengths in ([9, 9], [12, 3], [1, 30]):
        torch.testing.assert_close(*both(trunk, lengths), rtol=1e-10, atol=1e-10)
    assert tracer.count == 1


@pytest.mark.parametrize("fillers", [1, 4])
def test_a_smaller_tree_takes_fillers(fillers: int) -> None:
    trunk = tiny_trunk("mistral")  # a window of 8
    tracer = traced(trunk, (2, TREE.size + fillers))
    for lengths in ([4, 4], [17, 5]):
        torch.testing.assert_close(*both(trunk, lengths), rtol=1e-10, atol=1e-10)
    assert tracer.count == 1


def test_which_trees_a_size_serves() -> None:
    steps = CompiledSteps(tiny_trunk("llama"), [StepSize(1, 1), StepSize(1, 4), StepSize(1, 16), StepSize(2, 4)])
    served = {nodes: steps.size_for(1, nodes) for nodes in (1, 2, 3, 4, 5, 7, 8, 16, 17)}
    sizes = {nodes: size and size.nodes for nodes, size in served.items()}
    assert sizes == {1: 1, 2: 4, 3: 4, 4: 4, 5: None, 7: None, 8: 16, 16: 16, 17: None}
    assert steps.size_for(2, 3) == (2, 4) and steps.size_for(2, 1) is None and steps.size_for(3, 4) is None


def text(trunk: Trunk, drafter: Drafter, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    return generate_ids(trunk, drafter, [Request(prompt, tokens) for prompt in prompts])


def test_a_text_grows_beyond_a_block_of_the_cache() -> None:
    trunk, start = (
        tiny_trunk("llama", max_position_embeddings=2 * BLOCK),
        [(7 * index) % VOCAB for index in range(BLOCK - 12)],
    )
    expected = plain_greedy(trunk, start, 24)
    tracer = traced(trunk, (1, 1), (1, 6))
    assert text(trunk, NullDrafter(), [start], 24) == [expected]
    assert text(trunk, ScriptedDrafter([expected], honesty=0.8, size=6), [start], 24) == [expected]
    assert tracer.count == 2


def test_a_view_of_a_whole_block_is_no_other_trace() -> None:
    trunk, start = tiny_trunk("llama", max_position_embeddings=2 * BLOCK), [5] * (BLOCK - 4)
    tracer = Tracer(aot_eager)  # which, unlike the plain one, takes a view as large as its tensor for another case
    trunk.compiled = CompiledSteps(trunk, [StepSize(1, 1)], backend=tracer)
    text(trunk, NullDrafter(), [start], 9)
    assert tracer.count == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ragged_rows_that_end_at_different_times(family: str) -> None:
    trunk = tiny_trunk(family)
    expected = [plain_greedy(trunk, prompt, 20) for prompt in PROMPTS]
    tracer = traced(trunk, (3, 6), (2, 8))
    drafter = ScriptedDrafter({tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}, honesty=0.7, size=6)
    assert text(trunk, drafter, PROMPTS, 20) == expected
    assert tracer.count >= 1


def test_a_row_joins_a_compiled_batch() -> None:
    trunk = tiny_trunk("llama")
    expected = [plain_greedy(trunk, prompt, 16) for prompt in PROMPTS]
    tracer = traced(trunk, (2, 6))
    drafter = ScriptedDrafter({tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}, honesty=0.7, size=6)
    requests = [Request(PROMPTS[0], 5), Request(PROMPTS[1], 16), Request(PROMPTS[2], 16)]
    ids: list[list[int]] = [[], [], []]
    for step in decode(trunk, drafter, requests, most=2):
        for row, tokens in step.tokens.items():
            ids[row] += tokens
    assert ids == [expected[0][:5], *expected[1:]]
    assert tracer.count == 1


def test_warming_up_compiles_what_decoding_needs() -> None:
    trunk = tiny_trunk("llama")
    tracer = traced(trunk, (1, 1), (1, 6))
    assert trunk.compiled is not None
    for size in trunk.compiled.sizes:
        compile_step(trunk, size)
    assert tracer.count == 2 and set(trunk.compiled.compiled) == {(1, 1), (1, 6)}
    expected = plain_greedy(trunk, PROMPTS[0], 12)
    assert text(trunk, NullDrafter(), PROMPTS[:1], 12) == [expected]
    assert text(trunk, ScriptedDrafter([expected], honesty=0.8, size=6), PROMPTS[:1], 12) == [expected]
    assert tracer.count == 2


def test_what_is_compiled_for_a_drafter() -> None:
    heads = MedusaDrafter(random_heads(tiny_trunk("llama"), HeadsConfig(num=3)), TREE)
    assert step_sizes(NullDrafter(), [1]) == [(1, 1)]
    assert step_sizes(heads, [2, 1]) == [(1, 1), (1, 6), (2, 1), (2, 6)]
    assert step_sizes(ScriptedDrafter([], honesty=1.0), [1]) == [(1, nodes) for nodes in NODES]


@pytest.mark.parametrize("kind", ["root", "hydra"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_each_step_run_in_the_sizes_that_are_compiled_for_them(kind: str, temperature: float) -> None:
    trunk = tiny_trunk("llama")
    heads = random_heads(trunk, HeadsConfig(kind, num=3), scale=0.2)
    given = Topology.full([2, 1]) if kind == "hydra" else None
    dynamic = DynamicDrafter(heads, 24, sampling=given)
    mixed = MixedDrafter(dynamic, Lookup(least=1, tokens=9, branches=3, nodes=12))
    own = [1, 24] if given is None else [1, given.size, 24]
    assert [nodes for _, nodes in step_sizes(dynamic, [1])] == own
    assert [nodes for _, nodes in step_sizes(mixed, [1])] == sorted({*own, *((8, 16) if given else ())})
    for drafter in (dynamic, mixed):
        steps = CompiledSteps(trunk, step_sizes(drafter, [1]))
        request = Request(PROMPTS[0] * 3, 40, sampling=SamplingParams(temperature=temperature))
        sizes = {step.nodes for step in decode(trunk, drafter, [request]) if step.nodes}
        assert sizes and all(steps.size_for(1, nodes) is not None for nodes in sizes)


@pytest.mark.parametrize("rows", [0, True, 1.5])
def test_a_number_of_rows_that_is_none(rows: Any) -> None:
    with pytest.raises(UserError, match="rows="):
        step_sizes(NullDrafter(), [rows])


def test_frequencies_that_change_are_refused() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 16, "factor": 4.0}
    trunk = tiny_trunk("llama", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(UserError, match="rotary frequencies"):
        Engine(trunk, compile=True)


def test_a_model_that_cannot_be_compiled_says_so() -> None:
    def fails(graph: Any, inputs: list[Any]) -> Any:
        raise RuntimeError("no such operation")

    trunk = tiny_trunk("llama")
    trunk.compiled = CompiledSteps(trunk, [StepSize(1, 1)], backend=fails)
    with pytest.raises(UserError, match=r"can't be compiled here .*leave compile out"):
        Decoder(trunk, NullDrafter()).admit([Request([1, 2], 4)])
        compile_step(trunk, StepSize(1, 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with the character tokenizer, untrained heads and a tree."""
    tiny_trunk("llama").model.save_pretrained(tmp_path / "trunk")
    char_tokenizer("".join(map(chr, range(48, 48 + VOCAB)))).save_pretrained(tmp_path / "trunk")
    save_heads(tmp_path, MedusaHeads(HeadsConfig(num=3), Trunk.load(tmp_path / "trunk")), str(tmp_path / "trunk"))
    save_tree(tmp_path, TREE)
    return tmp_path


def test_the_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer()
    monkeypatch.setattr("medusa.infer.warmup.CompiledSteps", partial(CompiledSteps, backend=tracer))
    generate = ["generate", str(folder), "--prompt", "ABC", "--max-new-tokens", "12", "--threads", "1"]
    assert main(generate) == 0
    plain = capsys.readouterr().out
    assert main(["warmup", str(folder), "--threads", "1"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["rows", "nodes"], ["1", "1"], ["1", str(TREE.size)]]
    assert tracer.count == 2
    assert main([*generate, "--compile"]) == 0
    assert capsys.readouterr().out == plain
    assert tracer.count == 4  # a new process, but for the disk, which the stand-in does not use
