"""Weights packed for few rows: the usual product but for rounding, used where it serves and is faster."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from medusa import costs, folded, machine
from medusa import packed as packing
from medusa.compiled import CompiledSteps, StepSize
from medusa.cut import cut
from medusa.decoding import Request, generate_ids
from medusa.drafters.base import parts_of
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.eagle import EagleConfig, EagleLayer
from medusa.errors import UserError
from medusa.head_parts import Linear
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.infer.bench.contenders import Task, library_way
from medusa.infer.bench.measure import plain_generate
from medusa.packed import Packs, as_loaded, fastest, pack, packed, packed_layers, packed_ways, settle_products, unpack
from medusa.products import WAYS, OneDNN, Way
from medusa.selfcheck import tree_error
from medusa.testing import ScriptedDrafter, plain_greedy, tiny_model, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

from .serving import save_run

PROMPTS = [[3, 0, 17, 5], [64, 1, 2, 3, 0, 0, 9, 40, 11], [7]]
FULL, HALF = torch.float32, torch.bfloat16

if not OneDNN().fits(torch.ones(1)):
    pytest.skip("this torch has no oneDNN", allow_module_level=True)


def layer(inner: int = 5, outer: int = 3, bias: bool = True, dtype: torch.dtype = FULL) -> Any:
    torch.manual_seed(0)
    return nn.Linear(inner, outer, bias).to(dtype)


def packed_layer(**sizes: Any) -> Any:
    made = layer(**sizes)
    assert pack(made, always=True) == 1
    return made


class Spied:
    """A way that notes each product."""

    name = "spied"

    def __init__(self, way: Way) -> None:
        self.way, self.products = way, 0
        self.fits, self.pack = way.fits, way.pack

    def product(self, *given: Any) -> Any:
        self.products += 1
        return self.way.product(*given)


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing is always faster."""
    monkeypatch.setattr(packing, "fastest", lambda layers, usual: fastest(layers, usual=False))


def float_trunk(family: str = "llama") -> Trunk:
    return Trunk(tiny_model(family).float())


def test_it_reads_the_packed_weight_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = packed_layer(), torch.randn(2, 5)
    monkeypatch.setattr(made.medusa_packed, "product", lambda *_: "packed")
    with torch.no_grad():
        assert made(rows) == "packed"


@pytest.mark.parametrize(
    "why", ["gradients", "dtype", "changed", "replaced", "assigned", "copied", "pickled", "pruned"]
)
def test_where_it_can_t_serve_the_layer_is_what_it_was(why: str) -> None:
    made, rows = packed_layer(), torch.randn(2, 5)
    if why == "gradients":
        made(rows).sum().backward()
        assert torch.allclose(made.weight.grad, rows.sum(0).expand(3, 5), atol=1e-6)
        return
    if why == "dtype":
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            made(rows.double())
        return
    with torch.no_grad():
        if why == "changed":
            made.weight.mul_(2)
        elif why == "replaced":
            made.weight = nn.Parameter(torch.ones(3, 5))
        elif why == "assigned":
            with torch.inference_mode():
                made.weight = nn.Parameter(torch.ones(3, 5), requires_grad=False)
        elif why == "pruned":
            prune.random_unstructured(made, "weight", 0.5)
        else:
            made = copy.deepcopy(made) if why == "copied" else pickle.loads(pickle.dumps(made))
            assert type(made) is nn.Linear and "medusa_packed" not in vars(made)
        assert torch.equal(made(rows), linear(rows, made.weight, made.bias))


def test_many_rows_take_the_usual_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long prompt: they are few only where weights bound a product."""
    spied = Spied(OneDNN())
    monkeypatch.setattr(packing, "WAYS", (spied,))
    made = packed_layer()
    with torch.no_grad():
        for rows, seen in ((packing.MANY, 1), (packing.MANY + 1, 0)):
            spied.products = 0
            given = torch.randn(1, rows, 5)
            torch.testing.assert_close(made(given), linear(given, made.weight, made.bias))
            assert spied.products == seen


def test_another_weight_never_stands_where_the_packed_one_was_made_of() -> None:
    for _ in range(20):
        made = packed_layer(inner=64, outer=64)
        for value in (1.0, 2.0):
            made.load_state_dict(
                {name: torch.full_like(held, value) for name, held in made.state_dict().items()}, assign=True
            )
        with torch.no_grad():
            assert torch.equal(made(torch.ones(1, 64)), torch.full((1, 64), 130.0))


@pytest.mark.parametrize("how", ["data", "fused", "moved"])
def test_what_no_count_shows_shows_at_the_next_prompt(how: str) -> None:
    model = tiny_model("llama").float()
    trunk, ids = Trunk(model), torch.tensor([[3, 0, 17]])
    pack(model, always=True)
    layer: Any = model.get_output_embeddings()
    before = trunk.forward(ids).logits
    if how == "data":
        layer.weight.data += 1.0  # as peft merges an adapter
    elif how == "fused":
        layer.weight.requires_grad_().grad = torch.ones_like(layer.weight)
        torch.optim.SGD([layer.weight], lr=1.0, fused=True).step()
    else:
        model.double()
    logits, _, _ = trunk.prefill(ids, [3], Trunk(model).new_cache(1))
    with as_loaded(model):
        assert torch.allclose(logits, Trunk(model).forward(ids).logits[:, -1], atol=1e-4)
    assert how == "moved" or not torch.allclose(logits, before[:, -1], atol=1e-2)
    assert (layer.medusa_packed is None) is (how == "moved")


@given(st.integers(1, 1 << 40))
def test_the_values_that_are_looked_at_are_there(count: int) -> None:
    looked = packing.places(count).tolist()
    assert looked == sorted(looked) and (looked[0], looked[-1]) == (0, count - 1)


def test_a_row_on_another_device_is_an_error_and_no_crash() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"device"):
        packed_layer()(torch.randn(2, 5, device="meta"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_what_is_packed_anew_is_packed_in_the_same_way(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WAYS", (way,))
    made, rows = packed_layer(), torch.randn(2, 5)
    made.weight.data += 1.0
    packing.refresh(made)
    with torch.no_grad():
        assert made.medusa_packed.way is way
        torch.testing.assert_close(made(rows), linear(rows, made.weight, made.bias))


def test_bf16_needs_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert pack(layer(dtype=HALF), always=True) == 0 and pack(layer(), always=True) == 1


def test_a_trace_of_the_users_own_holds_the_usual_product() -> None:
    made, rows = packed_layer(), torch.randn(2, 5)
    with torch.no_grad():
        wanted = linear(rows, made.weight, made.bias)
        assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(rows), wanted)
        assert torch.equal(torch.jit.trace(made, rows)(rows), wanted)


def test_packing_and_unpacking_leave_no_trace() -> None:
    model = tiny_model("llama").float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    held = {name: set(vars(module)) for name, module in model.named_modules()}
    count = pack(model, always=True)
    assert count == sum(kind is nn.Linear for kind in kinds.values()) == packed_layers(model)
    assert all(isinstance(module, nn.Linear) for module in model.modules() if isinstance(module, Packs))
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    with as_loaded(model):
        assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert packed_layers(model) == count == pack(model, always=True)
    unpack(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert {name: set(vars(module)) for name, module in model.named_modules()} == held


def test_for_a_while(pays: None) -> None:
    bare, own = tiny_model("llama").float(), tiny_model("llama").float()
    pack(own)
    with pytest.raises(ZeroDivisionError), packed(bare, own):
        assert packed_layers(bare) == packed_layers(own) > 0
        raise ZeroDivisionError
    assert packed_layers(own) and not packed_layers(bare)


def test_layers_of_one_dtype_go_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[torch.dtype, int] = {}

    def chosen(of: list[Any], usual: bool) -> Way | None:
        tried[of[0].weight.dtype] = len(of)
        return OneDNN() if of[0].weight.dtype is FULL else None

    monkeypatch.setattr(packing, "fastest", chosen)
    model = nn.Sequential(layer(), layer(4, 4), layer(dtype=HALF), layer())
    assert pack(model) == 3 and [isinstance(each, Packs) for each in model] == [True, True, False, True]
    assert packed_ways(model) == ["oneDNN"] and packed_ways(layer()) == []
    assert tried == {FULL: 3, HALF: 1}


class Clock:
    """Seconds by what is called: those of each way, and once in a while many more."""

    def __init__(self, seconds: dict[Any, float]) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, work: Any, device: torch.device) -> float:
        before = {way: way.products for way in self.seconds if way}
        work()
        called = next((way for way, count in before.items() if way.products > count), None)
        self.calls += 1
        return 99.0 if self.calls <= len(self.seconds) else self.seconds.get(called, 50.0)


@pytest.mark.parametrize("usual", [True, False])
@pytest.mark.parametrize("order", [(0.0, 1.0, 2.0), (1.0, 2.0, 0.0), (2.0, 0.0, 1.0)])
def test_the_trial_goes_by_the_least_of_each_way(
    usual: bool, order: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [Spied(OneDNN()), Spied(OneDNN()), *([None] if usual else [])]
    monkeypatch.setattr(packing, "WAYS", tuple(ways[:2]))
    seconds = dict(zip(ways, order, strict=False))
    assert fastest([layer(), layer()], usual, Clock(seconds)) is min(ways, key=seconds.__getitem__)
    assert ways[0].products == machine.ROUNDS + 1  # two layers of one shape are tried once


def test_the_trial_goes_by_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small layers outweigh one that is a bit larger."""
    first, second = Spied(OneDNN()), Spied(OneDNN())
    monkeypatch.setattr(packing, "WAYS", (first, second))
    small, large = {first: 1.0, second: 2.0, None: 9.0}, {first: 6.0, second: 3.5, None: 9.0}
    monkeypatch.setattr(packing, "times", lambda ways, of, *_: dict(small if len(of) == 3 else large))
    sizes = [layer(), layer(), layer(9, 9)]
    assert fastest(sizes, usual=False) is second and fastest([*sizes, layer()], usual=False) is first


def test_copies_that_would_fill_the_memory_are_not_made(monkeypatch: pytest.MonkeyPatch, pays: None) -> None:
    model = nn.Sequential(layer(10, 10), layer(10, 10))
    for free, count in ((1_599, 0), (1_600, 2), (None, 2)):
        monkeypatch.setattr(packing, "free_memory", lambda free=free: free)
        assert pack(model) == count
        unpack(model)
    monkeypatch.setattr(packing, "free_memory", lambda: 0)
    assert pack(model, always=True) == 2


def test_free_memory_is_some_of_it() -> None:
    free = packing.free_memory()
    assert free is None or 2**20 < free < 2**50


def test_a_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made, right, wrong = layer(), OneDNN(), Spied(OneDNN())
    wrong.product = lambda input, *_: linear(input, made.weight, made.bias) * 1.001  # type: ignore[method-assign]
    monkeypatch.setattr(packing, "WAYS", (wrong,))
    assert pack(made, always=True) == 0
    monkeypatch.setattr(packing, "WAYS", (wrong, right))
    assert pack(made, always=True) == 1 and made.medusa_packed.way is right


def test_what_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        """Quantised layers, adapters and the like."""

    def hooked(input: Any) -> Any:
        return input

    bound: Any = layer()
    bound.forward = hooked
    with torch.inference_mode():
        made_there = nn.Linear(2, 2)
    for module in (Own(2, 2), bound, made_there, layer(dtype=torch.float64), layer(dtype=torch.float16)):
        assert pack(module, always=True) == 0 and not isinstance(module, Packs)
    monkeypatch.setattr(packing, "spread", lambda _: True)
    assert pack(layer(), always=True) == 0
    monkeypatch.undo()
    monkeypatch.setattr(packing, "WAYS", ())
    assert pack(layer(), always=True) == 0


def test_another_kind_goes_on_in_its_own_way() -> None:
    made = Linear(4, 4, bias=False)
    assert pack(made, always=True) == 1 and type(made).__name__ == "PackedLinear"
    rows = torch.randn(2, 4, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(made(rows), linear(rows, made.weight.double()))
        assert torch.allclose(made(rows.float()).double(), made(rows), atol=1e-6)


@pytest.mark.parametrize("own", ["heads", "shared", "low rank", "eagle"])
def test_what_drafts_is_packed_too_and_drafts_the_same(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = float_trunk()
    ids = torch.arange(0, 60, 2)
    made: Any
    if own == "eagle":
        made = EagleLayer(EagleConfig(version=1, vocab=30), trunk, ids)
    else:
        choices: dict[str, Any] = {
            "heads": {},
            "shared": {"projection": "shared"},
            "low rank": {"projection": "low_rank", "rank": 4},
        }
        made = MedusaHeads(HeadsConfig(num=2, kind="medusa", vocab=30, **choices[own]), trunk, ids)
    states = torch.randn(1, 3, trunk.hidden_size)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return made.logits(states) if own == "eagle" else made.logits(1, made.features(1, states, None))

    before = logits()
    counts = [pack(part, always=True) for part in made.parts]
    assert counts[0] > 0 and len(counts) == (2 if own in ("shared", "eagle") else 1) and counts[-1] > 0
    for part in made.parts:
        unpack(part)
    way = Spied(OneDNN())
    monkeypatch.setattr(packing, "WAYS", (way,))
    assert [pack(part, always=True) for part in made.parts] == counts
    way.products = 0
    assert torch.allclose(logits(), before, atol=1e-5) and way.products
    assert parts_of(MedusaDrafter(made, Topology.chain(1)) if own != "eagle" else EagleDrafter(made, Topology.chain(1)))


def test_choices() -> None:
    model = tiny_model("llama").float()
    settle_products(model, False)
    assert not packed_layers(model)
    settle_products(model, True)
    assert packed_layers(model)
    with pytest.raises(
        UserError, match=r"packed=True: the trunk has no linear layers on a processor.*leave packed out"
    ):
        settle_products(tiny_model("llama").double(), True)
    settle_products(tiny_model("llama").double(), None)


def test_gpt_2_s_own_layer() -> None:
    made = Conv1D(7, 5)  # 5 to 7; its weight lies the other way
    nn.init.normal_(made.bias)
    rows = torch.randn(2, 3, 5)
    with torch.no_grad():
        wanted = made(rows)
        assert pack(made, always=True) == 1 and torch.allclose(made(rows), wanted, atol=1e-5)
        made.weight.zero_()
        assert torch.equal(made(rows), made.bias.expand(2, 3, 7))
    unpack(made)
    assert type(made) is Conv1D


@pytest.mark.parametrize("family", ["llama", "gemma3", "neox", "gpt2"])
def test_texts_stay_the_trunks_own(family: str) -> None:
    trunk = float_trunk(family)
    texts = [plain_greedy(trunk, prompt, 20) for prompt in PROMPTS]
    assert pack(trunk.model, always=True)
    assert tree_error(trunk) < 1e-5
    drafter = ScriptedDrafter({tuple(p): t for p, t in zip(PROMPTS, texts, strict=True)}, honesty=0.7)
    found = generate_ids(trunk, drafter, [Request(prompt, 20) for prompt in PROMPTS])
    assert found == texts
    short = cut(trunk, 1)
    assert packed_layers(short.model) and tree_error(short) < 1e-5


def test_compiled_steps_of_a_packed_trunk_say_the_same() -> None:
    trunk = tiny_trunk("llama")
    plain = Trunk(tiny_model("llama").float())
    text = plain_greedy(plain, PROMPTS[0], 12)
    assert trunk.dtype is torch.float64  # whose texts are those of fp32, but for ties
    pack(plain.model, always=True)
    plain.compiled = CompiledSteps(plain, [StepSize(1, 4)], backend="eager")
    drafter = ScriptedDrafter({tuple(PROMPTS[0]): text}, honesty=1.0)
    assert generate_ids(plain, drafter, [Request(PROMPTS[0], 12)]) == [text]
    assert packed_layers(plain.model)


def test_loading_packs_and_training_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays: None) -> None:
    from medusa.train.config import TrunkConfig
    from medusa.train.newtrunk import load_trunk

    tiny_model("llama").float().save_pretrained(tmp_path)
    monkeypatch.setattr("medusa.trunk.load_model", lambda *_, **__: (tiny_model("llama").float(), None))
    assert packed_layers(Trunk.load(tmp_path).model)
    assert not packed_layers(Trunk.load(tmp_path, packed=False).model)
    assert not packed_layers(load_trunk(TrunkConfig(name=str(tmp_path)), tmp_path).model)


def test_an_engine_s_heads_go_with_its_trunk(tmp_path: Path, pays: None) -> None:
    run = save_run(tmp_path)
    for choice, said in ((None, True), (False, False)):
        engine: Any = Engine.load(run, dtype="float32", packed=choice)
        assert [packed_layers(each) > 0 for each in (engine.trunk.model, engine.drafter.heads)] == [said, said]


def test_steps_are_timed_packed(monkeypatch: pytest.MonkeyPatch, pays: None) -> None:
    heads, seen = MedusaHeads(HeadsConfig(num=1), float_trunk()), list[bool]()

    def note(trunk: Trunk, drafters: Any, *_: Any) -> list[tuple[float, float]]:
        seen.extend(packed_layers(each) > 0 for each in (trunk.model, drafters[0].heads))
        return []

    monkeypatch.setattr(costs, "_in_turns", note)
    costs.step_costs(heads, [Topology.root()], [PROMPTS[0]], 1)
    assert seen == [True, True] and not packed_layers(heads.trunk.model) and not packed_layers(heads)


@pytest.mark.parametrize("way", ["contenders", "measure"])
def test_the_library_is_timed_as_it_is(way: str) -> None:
    trunk = float_trunk()
    pack(trunk.model, always=True)
    folded._register()
    trunk.model.set_attn_implementation("medusa_folded")
    generate, seen = trunk.model.generate, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((packed_layers(trunk.model), trunk.config._attn_implementation))
        return generate(*args, **kwargs)

    trunk.model.generate = spy
    if way == "contenders":
        tokens = library_way(trunk)([PROMPTS[0]], Task(4)).rows[0]
    else:
        tokens = plain_generate(trunk)(PROMPTS[0], 4).ids
    assert seen == [(0, "sdpa")] and packed_layers(trunk.model) and len(tokens) == 4
    assert trunk.config._attn_implementation == "medusa_folded"
