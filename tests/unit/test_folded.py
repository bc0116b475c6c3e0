"""Attention without copies of keys and values, folded or our own: the library's sum, and used where it is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa import folded
from medusa.compiled import CompiledSteps, StepSize
from medusa.decoding import Request, generate_ids
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.family import FOLDED, LIBRARY, OWN
from medusa.folded import MOST, fastest, fold_mask, folded_attention, groups, own_attention, settle
from medusa.selfcheck import tree_error
from medusa.testing import ScriptedDrafter, plain_greedy, tiny_model, tiny_trunk
from medusa.tree_attention import available, tree_attention
from medusa.trunk import Trunk

GROUPED = ("llama", "qwen3", "gemma3")  # one mask; one with head sizes of its own; a mask per layer type
PROMPTS = [[3, 0, 17, 5], [64, 1, 2, 3, 0, 0, 9, 40, 11], [7]]
compiler = pytest.mark.skipif(not available(), reason="there is no C++ compiler here")


def module(copies: int) -> Any:
    made: Any = torch.nn.Module()
    made.num_key_value_groups = copies
    return made


def faster(name: str, trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> Trunk:
    """The trunk, whose attention of that name was found to be the fastest."""
    monkeypatch.setattr(folded, "fastest", lambda _: name)
    return settle(trunk)


def fold(trunk: Trunk, monkeypatch: pytest.MonkeyPatch) -> Trunk:
    """The trunk, found to be faster folded."""
    return faster(FOLDED, trunk, monkeypatch)


@given(
    shared=st.integers(1, 3),
    copies=st.integers(1, 3),
    nodes=st.integers(1, 5),
    prefix=st.integers(0, 4),
    rows=st.integers(1, 2),
    own=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_folded_mask_gives_what_the_library_gives(
    shared: int, copies: int, nodes: int, prefix: int, rows: int, own: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def states(heads: int, length: int) -> Tensor:
        return torch.randn(rows, heads, length, 4, generator=generator, dtype=torch.float64)

    query, key, value = (
        states(shared * copies, nodes),
        states(shared, prefix + nodes),
        states(shared, prefix + nodes),
    )
    seen = torch.rand(rows if own else 1, 1, nodes, prefix + nodes, generator=generator) < 0.5
    seen[..., -1] = True
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    expected, _ = sdpa_attention_forward(module(copies), query, key, value, mask, scaling=0.3)
    again = fold_mask(mask, copies)
    assert isinstance(again, Tensor) and again.shape[2] == (1 if nodes == 1 else copies * nodes)
    found, _ = folded_attention(module(copies), query, key, value, again, scaling=0.3)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-12)
    plain, _ = folded_attention(module(copies), query, key, value, mask, scaling=0.3)  # not folded: the library's own
    assert torch.allclose(plain, expected, atol=1e-12)


def test_a_layer_with_other_groups_takes_its_part_of_the_mask() -> None:
    query, key = torch.randn(1, 4, 3, 4), torch.randn(1, 4, 6, 4)
    mask = torch.zeros(1, 1, 3, 6).masked_fill(torch.rand(1, 1, 3, 6) < 0.5, torch.finfo(torch.float32).min)
    found, _ = folded_attention(module(1), query, key, key, fold_mask(mask, 3))  # type: ignore[arg-type]
    expected, _ = sdpa_attention_forward(module(1), query, key, key, mask)
    assert torch.equal(found, expected)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        assert key.data_ptr() == keys.data_ptr() and query.shape == (1, 2, 9, 4) and key.shape == (1, 2, 8, 4)
        return torch.zeros(*query.shape[:3], 4)

    keys = torch.randn(1, 2, 8, 4)
    monkeypatch.setattr(folded, "scaled_dot_product_attention", attend)
    mask = fold_mask(torch.zeros(1, 1, 3, 8), 3)
    found, _ = folded_attention(module(3), torch.randn(1, 6, 3, 4), keys, keys, mask)  # type: ignore[arg-type]
    assert found.shape == (1, 3, 6, 4)


def test_masks_that_are_left_alone() -> None:
    assert fold_mask(None, 3) is None and fold_mask({"full_attention": None}, 3) == {"full_attention": None}
    for nodes in (1, MOST + 1):
        mask = torch.zeros(1, 1, nodes, 8)
        assert fold_mask(mask, 3) is mask
    one = torch.zeros(1, 1, 2, 8)
    assert fold_mask(one, 1) is one


def test_groups_of_a_config() -> None:
    for heads, shared, expected in ((8, 2, 4), (8, 8, 1), (8, None, 1), (None, None, 1), (8, 3, 1), (8, 0, 1)):
        config = type("Config", (), {"num_attention_heads": heads, "num_key_value_heads": shared})
        assert groups(config) == expected


@pytest.mark.parametrize("family", GROUPED)
def test_texts_stay_the_trunks_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk(family)
    texts = [plain_greedy(trunk, prompt, 20) for prompt in PROMPTS]
    assert trunk.copies == 1
    fold(trunk, monkeypatch)
    assert trunk.copies > 1 and trunk.config._attn_implementation == FOLDED
    drafter = ScriptedDrafter({tuple(p): t for p, t in zip(PROMPTS, texts, strict=True)}, honesty=0.7)
    calls: list[tuple[int, int]] = []
    attend = folded._attend

    def watched(query: Tensor, *rest: Any) -> tuple[Tensor, None]:
        calls.append((query.shape[2], rest[2].shape[2]))
        return attend(query, *rest)

    monkeypatch.setattr(folded, "_attend", watched)
    assert generate_ids(trunk, drafter, [Request(prompt, 20) for prompt in PROMPTS]) == texts
    assert (8, 8 * trunk.copies) in calls
    assert tree_error(trunk) < 1e-5


@compiler
@pytest.mark.parametrize("family", [*GROUPED, "gpt2"])
def test_texts_stay_the_trunks_own_by_our_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk(family, dtype=torch.float32)
    texts = [plain_greedy(trunk, prompt, 20) for prompt in PROMPTS]
    faster(OWN, trunk, monkeypatch)
    assert trunk.copies == 1 and trunk.config._attn_implementation == OWN
    nodes: set[int] = set()

    def watched(query: Tensor, *rest: Any) -> Tensor:
        nodes.add(query.shape[2])
        return tree_attention(query, *rest)

    monkeypatch.setattr(folded, "tree_attention", watched)
    drafter = ScriptedDrafter({tuple(p): t for p, t in zip(PROMPTS, texts, strict=True)}, honesty=0.7)
    for each in (drafter, NullDrafter()):
        assert generate_ids(trunk, each, [Request(prompt, 20) for prompt in PROMPTS]) == texts
    assert {1, 8} <= nodes and tree_error(trunk) < 1e-5


def attention_problem(nodes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, length, 8, generator=generator) for heads, length in ((6, nodes), (2, 9)))
    mask = torch.zeros(1, 1, nodes, 9).masked_fill(torch.rand(1, 1, nodes, 9, generator=generator) < 0.5, -1e9)
    return query, key, mask


@compiler
@pytest.mark.parametrize("scaling", [None, 0.3, 0.0])
def test_our_attention_is_the_librarys_sum(scaling: float | None) -> None:
    query, key, mask = attention_problem()
    idle = {"sliding_window": 4, "softcap": None, "output_attentions": False}
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(folded, "sdpa_attention_forward", lambda *_, **__: pytest.fail("the library's"))
        found, _ = own_attention(module(3), query, key, key + 1, mask, scaling=scaling, **idle)  # type: ignore[arg-type]
        expected, _ = sdpa_attention_forward(module(3), query, key, key + 1, mask, scaling=scaling)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"dropout": 0.5},
        {"position_bias": torch.ones(1, 6, 3, 9)},
        {"softcap": 3.0},
        {"s_aux": torch.ones(6)},
        {"output_attentions": True},
    ],
    ids=lambda otherwise: next(iter(otherwise)),
)
def test_what_is_more_than_the_sum_is_left_to_the_library(
    otherwise: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def library(*given: Any, **named: Any) -> tuple[Any, None]:
        asked.update(named, dropout=given[5])
        return query, None

    monkeypatch.setattr(folded, "tree_attention", lambda *_: pytest.fail("our own sum"))
    monkeypatch.setattr(folded, "sdpa_attention_forward", library)
    query, key, mask = attention_problem()
    with torch.inference_mode():
        own_attention(module(3), query, key, key, mask, **otherwise)
    ((name, value),) = otherwise.items()
    assert asked[name] is value


def test_gradients_go_through_the_librarys_attention() -> None:
    query, key, mask = attention_problem()
    query.requires_grad_()
    found, _ = own_attention(module(3), query, key, key, mask)
    expected, _ = sdpa_attention_forward(module(3), query, key, key, mask)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), query)
    assert gradient.abs().max() > 0


def test_a_compiled_step_attends_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = fold(tiny_trunk("llama"), monkeypatch)
    texts = [plain_greedy(trunk, prompt, 12) for prompt in PROMPTS[:1]]
    trunk.compiled = CompiledSteps(trunk, [StepSize(1, 8)], backend=lambda graph, _: graph.forward)
    drafter = ScriptedDrafter(texts, honesty=0.7, size=6)  # takes fillers
    assert generate_ids(trunk, drafter, [Request(PROMPTS[0], 12)]) == texts
    assert StepSize(1, 8) in trunk.compiled.compiled


@compiler
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_our_attention_is_an_operation_in_a_trace(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = faster(OWN, tiny_trunk(family, dtype=torch.float32), monkeypatch)
    texts = [plain_greedy(trunk, prompt, 12) for prompt in PROMPTS[:1]]
    operations: list[str] = []

    def traced(graph: Any, _: Any) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    trunk.compiled = CompiledSteps(trunk, [StepSize(1, 8)], backend=traced)
    drafter = ScriptedDrafter(texts, honesty=0.7, size=6)  # takes fillers
    assert generate_ids(trunk, drafter, [Request(PROMPTS[0], 12)]) == texts
    assert sum("tree_attention" in each for each in operations) == trunk.config.num_hidden_layers


@pytest.mark.parametrize("name", [FOLDED, OWN])
def test_a_trunk_attends_otherwise_only_where_that_can_be_and_is_faster(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in (name, LIBRARY):
        trunk = faster(found, tiny_trunk("llama"), monkeypatch)
        assert trunk.config._attn_implementation == found and trunk.copies == (2 if found == FOLDED else 1)
    assert settle(tiny_trunk("llama"), choose=False).config._attn_implementation == LIBRARY
    eager = settle(Trunk(tiny_model("llama", attn_implementation="eager")))
    assert eager.config._attn_implementation == "eager" and eager.copies == 1


def test_one_that_is_not_exact_folded_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(query: Tensor, *rest: Any) -> tuple[Tensor, None]:
        output, _ = attend(query, *rest)
        return output.flip(1), None

    attend = folded._attend
    monkeypatch.setattr(folded, "_attend", wrong)
    trunk = fold(tiny_trunk("llama"), monkeypatch)
    assert trunk.copies == 1 and trunk.config._attn_implementation == LIBRARY
    assert tree_error(trunk) < 1e-5


def test_one_that_can_not_be_driven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("llama")
    monkeypatch.setattr(Trunk, "prefill", lambda *_: None)  # leaves the cache empty
    with pytest.raises(UserError, match="can't be driven exactly"):
        fold(trunk, monkeypatch)


@pytest.mark.parametrize("fast", [LIBRARY, FOLDED, OWN])
def test_the_fastest_way_is_found_by_the_clock(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "_ways", lambda _: {name: lambda n=name: n for name in (LIBRARY, FOLDED, OWN)})
    assert fastest(tiny_trunk("llama"), lambda way, _: 1.0 if way() == fast else 2.0) == fast


@compiler
def test_the_ways_that_a_trunk_can_attend_in(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.float32
    for trunk, expected in (
        (tiny_trunk("llama"), [LIBRARY, FOLDED]),
        (tiny_trunk("llama", dtype=full), [LIBRARY, FOLDED, OWN]),
        (tiny_trunk("llama", dtype=torch.bfloat16), [LIBRARY, FOLDED, OWN]),
        (tiny_trunk("gpt2", dtype=full), [LIBRARY, OWN]),
    ):
        ways = folded._ways(trunk)
        assert list(ways) == expected
        with torch.inference_mode():
            outputs = [[found for found, _ in way()] for way in ways.values()]  # type: ignore[attr-defined]
        for each in zip(*outputs, strict=True):
            assert all(torch.equal(output, each[0]) for output in each)  # of a trial with zeros
    monkeypatch.setattr(folded, "available", lambda: False)
    assert list(folded._ways(trunk)) == [LIBRARY]


def test_a_folder_is_loaded_so_and_saved_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa.data.tokenizers import char_tokenizer

    monkeypatch.setattr(folded, "fastest", lambda _: FOLDED)
    tiny_model("llama").save_pretrained(tmp_path)
    char_tokenizer("".join(map(chr, range(40, 105)))).save_pretrained(tmp_path)
    trunk = Trunk.load(tmp_path)
    assert trunk.copies == 2
    assert Trunk.load(tmp_path, attn_implementation="sdpa").copies == Trunk.load(tmp_path, check=False).copies == 1
    ids = torch.tensor([PROMPTS[0]])
    model = trunk.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert model[0, 4:].tolist() == plain_greedy(Trunk.load(tmp_path, check=False), PROMPTS[0], 9)
    trunk.model.save_pretrained(tmp_path / "again")
    assert "medusa" not in (tmp_path / "again" / "config.json").read_text()
