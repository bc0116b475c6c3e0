"""Recorded steps without a GPU: a recorder repeats a step's operations on the very tensors that they had."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa.cache import BLOCK, SlotCache
from medusa.compiled import CompiledSteps, StepSize
from medusa.decoding import Decoder, Request, decode, generate_ids
from medusa.drafters.base import layers_of
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.families import FAMILIES
from medusa.graphs import KEPT, WARM_UPS, CudaRecorder, GraphedSteps, Work, graphs_apply
from medusa.heads import HeadsConfig
from medusa.infer.warmup import NODES, step_sizes, use_compiled
from medusa.sampling import SamplingParams
from medusa.testing import VOCAB, ScriptedDrafter, plain_greedy, random_heads, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput

from .drafting import UNTRAINED, untrained
from .pretend import PretendedGPU, Traffic, asks, move

PROMPTS = [[3, 0, 17, 5], [64, 1, 2, 3, 0, 0, 9, 40, 11], [7]]
TREE = Topology.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 1]])


class Tape(TorchDispatchMode):
    """The operations under way, with the tensors that they read and wrote. What asks for a value is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asks(func, args):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        places = {x.untyped_storage().data_ptr() for x in given}
        view = any(x.untyped_storage().data_ptr() in places and all(x is not y for y in given) for x in made)
        if not view:  # which is no work
            self.operations.append((func, args, kwargs, made))
        return out

    def replay(self) -> None:
        """All of it once more: every result goes to where it went."""
        for func, args, kwargs, made in self.operations:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(made, again, strict=True):
                if old is not new:
                    old.copy_(new)


class Taping:
    """A recorder on the processor."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def __call__(self, work: Work) -> Work:
        with Tape() as tape:
            work()
        self.tapes.append(tape)

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay

    @property
    def count(self) -> int:
        return len(self.tapes)


def graphed(trunk: Trunk, *sizes: tuple[int, int], layers: Sequence[int] = ()) -> Taping:
    taping = Taping()
    steps = GraphedSteps(trunk, [StepSize(*size) for size in sizes], layers=layers, recorder=taping, compiled=False)
    trunk.compiled = steps
    return taping


def batch(trunk: Trunk, lengths: Sequence[int], seed: int = 1) -> SlotCache:
    """A cache that holds texts of these lengths."""
    cache = trunk.new_cache(len(lengths))
    ids_BT = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    trunk.prefill(ids_BT, lengths, cache)
    return cache


def random_tree(rows: int, topology: Topology = TREE, seed: int = 2) -> DraftTree:
    tokens_BN = torch.randint(VOCAB, (rows, topology.size), generator=torch.Generator().manual_seed(seed))
    return DraftTree(Shape.static(topology, "cpu"), tokens_BN, torch.ones_like(tokens_BN).bool())


@torch.inference_mode()
def assert_same(trunk: Trunk, lengths: Sequence[int], seed: int, topology: Topology = TREE) -> None:
    """Of a random tree without and with recorded steps: logits, states, and what is cached."""
    steps, tree = trunk.compiled, random_tree(len(lengths), topology, seed)
    outputs, caches = [], []
    for trunk.compiled in (None, steps):
        caches.append(batch(trunk, lengths, seed))
        outputs.append(trunk.tree_forward(tree, caches[-1]))
        caches[-1].set_lengths([length + tree.size for length in lengths])
    # eager attention takes its softmax in fp32, whose sums go by how many slots are in view
    close = {"rtol": 1e-5, "atol": 1e-5} if trunk.family in ("gemma2", "gpt_oss") else {"rtol": 1e-10, "atol": 1e-10}
    for name in ("logits", "hidden"):
        torch.testing.assert_close(*(getattr(output, name) for output in outputs), **close)
    for layer in range(len(trunk.layers)):
        for row in range(len(lengths)):
            for plain, recorded in zip(*(cache.read(layer, row) for cache in caches), strict=True):
                torch.testing.assert_close(plain, recorded, **close)


PLAIN = [name for name in FAMILIES if name not in ("deepseek3", "mixtral", "qwen3_moe", "gpt_oss")]


@pytest.mark.parametrize("family", PLAIN)
def test_the_logits_are_the_same(family: str) -> None:
    trunk = tiny_trunk(family)
    taping = graphed(trunk, (2, TREE.size))
    for seed, lengths in enumerate(([9, 9], [12, 3], [1, 30], [4, 4])):
        assert_same(trunk, lengths, seed)
    assert taping.count == 1 and taping.replays == 4


@pytest.mark.parametrize("family", ["mixtral", "deepseek3"])
def test_experts_that_are_counted_on_the_host_are_refused(family: str) -> None:
    trunk = tiny_trunk(family)
    graphed(trunk, (2, TREE.size))
    with pytest.raises(UserError, match=r"can't be recorded as CUDA graphs .*leave compile out"):
        assert_same(trunk, [9, 9], 0)


@pytest.mark.parametrize("fillers", [1, 4])
def test_a_smaller_tree_takes_fillers(fillers: int) -> None:
    trunk = tiny_trunk("mistral")  # a window of 8
    taping = graphed(trunk, (2, TREE.size + fillers))
    whole = Topology.full([2, TREE.size])
    for seed, lengths in enumerate(([4, 4], [17, 5], [2, 9])):
        assert_same(
            trunk, lengths, seed, Topology(whole.parents[: TREE.size + fillers], whole.ranks[: TREE.size + fillers])
        )
        assert_same(trunk, lengths, seed)
    assert taping.count == 1


def text(trunk: Trunk, drafter: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    return generate_ids(trunk, drafter, [Request(prompt, tokens) for prompt in prompts])


def scripted(expected: Sequence[Sequence[int]]) -> ScriptedDrafter:
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    return ScriptedDrafter(known, honesty=0.7, size=6)


def test_a_recording_serves_a_block_and_later_texts() -> None:
    trunk = tiny_trunk("llama", max_position_embeddings=3 * BLOCK)
    start = [(7 * index) % VOCAB for index in range(BLOCK - 12)]
    expected = plain_greedy(trunk, start, 24)
    taping = graphed(trunk, (1, 1), (1, 6))
    for _ in range(2):
        assert text(trunk, NullDrafter(), [start], 24) == [expected]
    assert taping.count == 2  # up to the end of the block, and beyond it
    for _ in range(2):
        assert text(trunk, ScriptedDrafter([expected], honesty=0.8, size=6), [start], 24) == [expected]
    assert taping.count == 4


def test_a_text_that_grows_out_of_its_storage() -> None:
    trunk = tiny_trunk("llama", max_position_embeddings=6 * BLOCK)
    start = [(7 * index) % VOCAB for index in range(3 * BLOCK - 12)]
    expected = text(trunk, NullDrafter(), [start], 30)
    taping = graphed(trunk, (1, 1))
    assert text(trunk, NullDrafter(), [start], 30) == expected
    assert taping.count == 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ragged_rows_that_end_and_join_at_different_times(family: str) -> None:
    trunk = tiny_trunk(family)
    expected = [plain_greedy(trunk, prompt, 20) for prompt in PROMPTS]
    taping = graphed(trunk, *((rows, nodes) for rows in (1, 2, 3) for nodes in (1, 6)))
    assert text(trunk, scripted(expected), PROMPTS, 20) == expected
    lengths, ids = [5, 20, 20], [[], [], []]  # type: ignore[var-annotated]
    requests = [Request(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    for step in decode(trunk, scripted(expected), requests, most=2):
        for row, tokens in step.tokens.items():
            ids[row] += tokens
    assert ids == [answer[:length] for answer, length in zip(expected, lengths, strict=True)]
    assert 0 < taping.count <= 6 < taping.replays


@pytest.mark.parametrize(
    ("name", "temperature"),
    [(name, 0.9) for name in UNTRAINED] + [(name, 0.0) for name in ("draft tree", "dynamic", "mixed", "eagle grown")],
)
def test_every_drafter(name: str, temperature: float) -> None:
    trunk, texts = tiny_trunk("llama"), []
    drafter = untrained(trunk, name)
    requests = [
        Request(prompt, 12, sampling=SamplingParams(temperature=temperature, seed=row))
        for row, prompt in enumerate(PROMPTS[:2])
    ]
    taping = graphed(trunk, *((rows, nodes) for rows in (1, 2) for nodes in NODES), layers=layers_of(drafter))
    steps = trunk.compiled
    for trunk.compiled in (None, steps):
        texts.append(generate_ids(trunk, untrained(trunk, name), requests))
    assert texts[0] == texts[1]
    assert taping.replays > 3


@pytest.mark.slow
def test_what_is_compiled_is_one_trace_for_all_lengths() -> None:
    trunk, traces = tiny_trunk("llama", max_position_embeddings=4 * BLOCK), []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        traces.append(graph)
        return aot_eager(graph, inputs)

    start = [(7 * index) % VOCAB for index in range(BLOCK - 4)]
    expected = text(trunk, NullDrafter(), [start], BLOCK + 8)  # two blocks further on, and as long as its first storage
    trunk.compiled = GraphedSteps(trunk, [StepSize(1, 1)], recorder=lambda work: work, backend=backend)
    assert text(trunk, NullDrafter(), [start], BLOCK + 8) == expected
    assert text(trunk, NullDrafter(), PROMPTS[:1], 4) == [plain_greedy(trunk, PROMPTS[0], 4)]
    assert len(traces) == 1


def test_two_decoders_in_turns_have_storages_of_their_own() -> None:
    trunk = tiny_trunk("llama")
    expected = [plain_greedy(trunk, prompt, 12) for prompt in PROMPTS[:2]]
    taping = graphed(trunk, (1, 1))
    decoders = [Decoder(trunk, NullDrafter()) for _ in expected]
    for decoder, prompt in zip(decoders, PROMPTS, strict=False):
        decoder.admit([Request(prompt, 12)])
    while any(decoder.live for decoder in decoders):
        for decoder in decoders:
            decoder.step()
    assert [decoder.last.text[decoder.last.prompt :] for decoder in decoders] == expected
    assert taping.count == 2


def test_what_lay_in_a_storage_before_is_gone() -> None:
    trunk = tiny_trunk("llama")
    expected = plain_greedy(trunk, PROMPTS[0], 12)
    graphed(trunk, (1, 1))
    steps: Any = trunk.compiled
    assert text(trunk, NullDrafter(), PROMPTS[1:2], 12)
    for storage in steps._berths[0].storages:
        storage.fill_(torch.nan)
    assert text(trunk, NullDrafter(), PROMPTS[:1], 12) == [expected]
    assert len(steps._berths) == 1


def test_what_is_returned_is_the_callers_own() -> None:
    trunk = tiny_trunk("llama")
    graphed(trunk, (1, TREE.size))
    cache = batch(trunk, [5])
    first: TrunkOutput = trunk.tree_forward(random_tree(1, seed=3), cache)
    kept = first.logits.clone(), first.hidden.clone()
    trunk.tree_forward(random_tree(1, seed=4), cache)
    assert torch.equal(kept[0], first.logits) and torch.equal(kept[1], first.hidden)


def test_free_storages_are_few_and_take_their_recordings_along() -> None:
    trunk = tiny_trunk("llama")
    taping = graphed(trunk, (1, TREE.size))
    caches = [batch(trunk, [5]) for _ in range(KEPT + 3)]
    for cache in caches:
        trunk.tree_forward(random_tree(1), cache)
    steps: Any = trunk.compiled
    assert len(steps._berths) == KEPT + 3 == taping.count
    replays = [weakref.ref(each) for berth in steps._berths for each in berth.recorded.values()]
    del caches, cache
    trunk.tree_forward(random_tree(1), batch(trunk, [5]))
    assert len(steps._berths) == KEPT + 1 and taping.count == KEPT + 3
    assert sum(each() is None for each in replays) == 2


def test_more_layers_are_recorded_anew() -> None:
    trunk = tiny_trunk("llama")
    taping = graphed(trunk, (1, TREE.size))
    cache, tree = batch(trunk, [5]), random_tree(1)
    trunk.tree_forward(tree, cache)
    assert trunk.compiled is not None
    trunk.compiled.add([], [1])
    states = trunk.tree_forward(tree, cache, layers=[1]).states
    trunk.compiled = None
    torch.testing.assert_close(states, trunk.tree_forward(tree, cache, layers=[1]).states)
    assert taping.count == 2


def test_where_graphs_apply() -> None:
    trunk = tiny_trunk("llama")
    assert not graphs_apply(trunk)
    with pytest.raises(UserError, match="on cpu: CUDA graphs are for one that is on one GPU"):
        GraphedSteps(trunk, step_sizes(NullDrafter(), [1]))
    with PretendedGPU():
        move(trunk)
        assert graphs_apply(trunk)


def test_compiled_steps_of_a_trunk_on_a_gpu_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("llama")
    assert type(use_compiled(trunk, NullDrafter())) is CompiledSteps
    trunk.compiled = None
    monkeypatch.setattr("medusa.graphs.CudaRecorder", lambda device: Taping())
    with PretendedGPU():
        move(trunk)
        steps = use_compiled(trunk, NullDrafter())
    assert isinstance(steps, GraphedSteps) and steps.compiles and steps.sizes == [(1, 1)]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_that_is_replayed_makes_the_host_wait_once(rows: int) -> None:
    trunk = tiny_trunk("llama")
    drafter = MedusaDrafter(random_heads(trunk, HeadsConfig(num=3), scale=0.1), TREE)
    with PretendedGPU() as gpu:
        move(trunk, drafter)
        sizes = [StepSize(rows, 1), StepSize(rows, TREE.size)]
        trunk.compiled = GraphedSteps(trunk, sizes, recorder=lambda work: work, compiled=False)
        decoder = Decoder(trunk, drafter)
        decoder.admit([Request(prompt, 12) for prompt in PROMPTS[:rows]])
        for _ in range(3):
            with gpu.noted() as traffic:
                decoder.step()
            assert not traffic.blocking and len(traffic.reads) == 1


def recorded_traffic(family: str) -> list[Traffic]:
    """What the work that a recorder is given does between a pretended GPU and its host, for two sizes."""
    trunk, traffic = tiny_trunk(family), []

    def noting(work: Work) -> Work:
        with gpu.noted() as each:
            work()
        traffic.append(each)
        return work

    with PretendedGPU() as gpu, torch.inference_mode():
        move(trunk)
        trunk.compiled = GraphedSteps(trunk, [StepSize(2, 6), StepSize(2, 1)], recorder=noting, compiled=False)
        for nodes in (1, 6):
            tokens_BN = torch.zeros(2, nodes, dtype=torch.long, device=trunk.device)
            shape = Shape.static(Topology.chain(nodes - 1), trunk.device)
            cache = trunk.new_cache(2)
            trunk.prefill(torch.zeros(2, 5, dtype=torch.long, device=trunk.device), [5, 3], cache)
            trunk.tree_forward(DraftTree(shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool)), cache)
    assert len(traffic) == 2
    return traffic


@pytest.mark.parametrize("family", [name for name in PLAIN if name != "falcon"])
def test_nothing_that_is_recorded_asks_the_device_or_copies_from_the_host(family: str) -> None:
    for traffic in recorded_traffic(family):
        assert traffic == Traffic()


def test_a_family_that_indexes_by_lists_of_the_host_is_known() -> None:
    """A GPU refuses to record that: if the library mends it, falcon may join the others."""
    assert all(traffic.waits for traffic in recorded_traffic("falcon"))


def test_the_recorder_of_cuda_graphs_warms_up_beside_and_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own signatures, on stand-ins: what a GPU makes of it nobody can test here."""
    done: list[str] = []
    capture = create_autospec(torch.cuda.graph, side_effect=lambda *_, **__: nullcontext(done.append("capture")))
    made = MagicMock()
    stands = {
        "graph": capture,
        "CUDAGraph": MagicMock(return_value=made),
        "Stream": MagicMock(),
        "current_stream": MagicMock(),
        "graph_pool_handle": lambda: (0, 1),
        "device": MagicMock(),
        "stream": create_autospec(torch.cuda.stream, side_effect=lambda stream: nullcontext(done.append("beside"))),
    }
    for name, stand in stands.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    replay = CudaRecorder(torch.device("cuda", 0))(lambda: done.append("work"))
    assert done == ["beside", *["work"] * WARM_UPS, "capture", "work"]
    assert capture.call_args.args == (made,) and capture.call_args.kwargs["pool"] == (0, 1)
    replay()
    made.replay.assert_called_once_with()
