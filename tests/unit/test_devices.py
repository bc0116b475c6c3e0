"""The decode loop on a pretended GPU: nothing mixes devices, and a step makes the host wait once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa.cut import cut
from medusa.decoding import Decoder, Request, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.none import NullDrafter
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.processing import Processing
from medusa.sampling import SamplingParams, _drawn_apart, draw
from medusa.testing import plain_greedy, random_heads, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk
from medusa.uploads import upload

from .drafting import UNTRAINED, untrained
from .pretend import DEVICE, PretendedGPU, Traffic, is_there, move

HEADS = ("medusa", "root", "hydra")
DRAFTERS = ("none", *HEADS, *UNTRAINED)
PROMPTS = [[3, 0, 17, 5, 3, 0, 17], [64, 1, 2, 3, 0], [7, 7]]
TOKENS = 12
GROWN = ("dynamic", "mixed", "eagle grown")  # trees of another shape in each step and row
# Where the host makes the trees it may have to know more than what was accepted: what the window found, which tokens
# heads drafted beside what was looked up; of trees that change in every step and are drawn from, how wide they are.
GREEDY = {"lookahead": 2, "mixed": 2, "mixed markov": 2}
SAMPLED = dict.fromkeys(DRAFTERS, 2) | {"mixed": 3, "mixed markov": 3}

PROCESSING = Processing(
    repetition_penalty=1.2, frequency_penalty=0.2, no_repeat_ngram_size=3, bad_words_ids=((1, 2), (9,))
)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": SamplingParams(temperature=0.9, top_p=0.9, seed=3)},
    "processed": {"processing": PROCESSING},
}
OTHERS: list[dict[str, Any]] = [
    {"logprobs": 2, "sampling": SamplingParams(temperature=0.7, top_k=9, min_p=0.01, seed=1)},
    {"processor": lambda ids, scores: scores + torch.arange(scores.shape[1], device=scores.device) % 3},
]


def drafter_of(name: str, trunk: Trunk) -> Drafter:
    if name == "none":
        return NullDrafter()
    if name in HEADS:
        return MedusaDrafter(random_heads(trunk, HeadsConfig(name, num=3), scale=0.1), Topology.full([3, 2, 1]))
    return untrained(trunk, name)


def requests_of(asked: str, rows: int = 3) -> list[Request]:
    return [Request(prompt, TOKENS, **ASKED[asked]) for prompt in PROMPTS[:rows]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_the_same_on_a_device(name: str) -> None:
    """In a ragged batch that rows leave and join, each of which asks for something else."""
    trunk = tiny_trunk("llama")
    drafter = drafter_of(name, trunk)
    asked = enumerate([*ASKED.values(), *OTHERS])
    requests = [Request(PROMPTS[row % 3], 6 + row % 2, **options) for row, options in asked]
    expected = generate_ids(trunk, drafter, requests, most=3)
    with PretendedGPU():
        move(trunk, drafter)
        assert generate_ids(trunk, drafter, requests, most=3) == expected


def steps_of(trunk: Trunk, drafter: Drafter, requests: list[Request]) -> list[Traffic]:
    """The traffic of each step until a row ends."""
    found = []
    with PretendedGPU() as gpu:
        move(trunk, drafter)
        decoder = Decoder(trunk, drafter)
        decoder.admit(requests)
        assert is_there(decoder.root_B) and all(map(is_there, decoder.cache.storages))
        while len(decoder.rows) == len(requests):
            with gpu.noted() as traffic:
                decoder.step()
            found.append(traffic)
    assert len(found) > 2
    return found


def assert_waits(found: list[Traffic], most: int) -> None:
    for traffic in found[:-1]:  # with the last one a row leaves
        assert not traffic.blocking, traffic.blocking
        assert len(traffic.reads) <= most, traffic.reads


# A single row: those whose trees it changes, beside the static ones of the test of copies below.
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 3) for name in DRAFTERS), *((name, 1) for name in ("draft tree", "lookahead", *GROWN))]
)
def test_a_greedy_step_makes_the_host_wait_once(name: str, rows: int) -> None:
    trunk = tiny_trunk("llama")
    assert_waits(steps_of(trunk, drafter_of(name, trunk), requests_of("greedy", rows)), GREEDY.get(name, 1))


@pytest.mark.parametrize(
    ("name", "asked"),
    [(name, "sampled") for name in DRAFTERS] + [(name, "processed") for name in ("none", "root", "lookahead", *GROWN)],
)
def test_a_step_that_draws_waits_no_more_than_its_trees_take(name: str, asked: str) -> None:
    trunk = tiny_trunk("llama")
    most = SAMPLED if asked == "sampled" else GREEDY
    assert_waits(steps_of(trunk, drafter_of(name, trunk), requests_of(asked)), most.get(name, 1))


@pytest.mark.parametrize("name", ["none", *HEADS, "sized"])
def test_a_greedy_step_of_one_row_and_a_static_tree_copies_nothing_to_the_device(name: str) -> None:
    trunk = tiny_trunk("llama")
    found = steps_of(trunk, drafter_of(name, trunk), requests_of("greedy", 1))
    assert not any(traffic.queued for traffic in found[1:4])  # the first makes what a tree needs


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3", "mixtral"])
def test_other_families_on_a_device(family: str) -> None:
    trunk = tiny_trunk(family)
    drafter = drafter_of("root", trunk)
    expected = generate_ids(trunk, drafter, requests_of("greedy"))
    with PretendedGPU():
        move(trunk, drafter)
        assert generate_ids(trunk, drafter, requests_of("greedy")) == expected


def test_a_trunk_is_checked_and_cut_on_a_device() -> None:
    model = tiny_trunk("llama").model
    with PretendedGPU():
        move(model)
        trunk = Trunk(model)
        assert trunk.device == cut(trunk, 1).device == DEVICE
        assert all(plane.keys.device == DEVICE for plane in trunk.layers)


SPREAD = ("none", *HEADS, "prompt lookup", "lookahead", "sized", "dynamic", "dynamic hydra", "mixed", "markov", "eagle")
SPREAD += ("eagle grown", "eagle 3", "eagle 3 grown", "shared", "shared in part")


@pytest.mark.parametrize("name", SPREAD)
def test_a_trunk_over_two_devices(name: str) -> None:
    """Its first half on the processor, as a ``device_map`` leaves it: by accelerate's hooks."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, later = tiny_trunk("llama").model, ("layers.1", "norm", "lm_head")
    expected = plain_greedy(Trunk(model), PROMPTS[0], 8)
    with PretendedGPU():
        for part, module in model.named_modules():
            there = part.removeprefix("model.").startswith(later)
            if there or part.removeprefix("model.") in ("embed_tokens", "layers.0"):
                move(*[module] * there)
                device = DEVICE if there else torch.device("cpu")
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook(device, place_submodules=False))
        root = hooks.AlignDevicesHook(torch.device("cpu"), io_same_device=True, place_submodules=False)
        hooks.add_hook_to_module(model, root)
        trunk = Trunk(model)
        assert [layer.keys.device.type for layer in trunk.layers] == ["cpu", "cuda"]
        if "shared" in name:
            config = HeadsConfig("root", num=2, projection="shared", vocab=40 if "part" in name else None)
            ids = torch.arange(40) if "part" in name else None
            drafter: Drafter = MedusaDrafter(MedusaHeads(config, trunk, ids), Topology.full([2, 1]))
        else:
            drafter = drafter_of(name, trunk)
        assert generate_ids(trunk, drafter, [Request(PROMPTS[0], 8)]) == [expected]


def _asks(session: Any, accepted: Any) -> None:
    accepted.path_BA[0, 0].item()


def _sends(session: Any, accepted: Any) -> None:
    torch.tensor([1], device=accepted.path_BA.device)


def _mixes(session: Any, accepted: Any) -> None:
    accepted.path_BA + torch.ones(1)


@pytest.mark.parametrize(
    ("fault", "error"), [(_asks, AssertionError), (_sends, AssertionError), (_mixes, RuntimeError)]
)
def test_a_fault_in_a_step_is_found(
    fault: Callable[[Any, Any], None], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa.drafters.heads import HeadsSession

    commit = HeadsSession.commit

    def faulty(self: Any, tree: Any, verified: Any, acceptance: Any) -> None:
        commit(self, tree, verified, acceptance)
        fault(self, acceptance)

    monkeypatch.setattr(HeadsSession, "commit", faulty)
    trunk = tiny_trunk("llama")
    with pytest.raises(error):
        assert_waits(steps_of(trunk, drafter_of("root", trunk), requests_of("greedy", 1)), 1)


OPERATIONS: dict[str, tuple[Callable[[Tensor], Any], Traffic]] = {
    "item": (lambda x: x[0, 0].item(), Traffic(reads=[""])),
    "bool": (lambda x: bool((x > 0).any()), Traffic(reads=[""])),
    "tolist": (lambda x: x.tolist(), Traffic(reads=[""])),
    "cpu": (lambda x: x.cpu(), Traffic(reads=[""])),
    "nonzero": (lambda x: (x > 0).nonzero(), Traffic(reads=[""])),
    "mask": (lambda x: x[x > 0], Traffic(reads=[""])),
    "equal": (lambda x: torch.equal(x, x), Traffic(reads=[""])),
    "index of lists": (lambda x: x[:, [0, 1]], Traffic(blocking=[""])),
    "tensor": (lambda x: torch.tensor([1], device=x.device), Traffic(blocking=[""])),
    "upload": (lambda x: upload([1], x.device), Traffic(queued=[""])),
    "arithmetic": (lambda x: (x + 1).where(x > 0, 0.0).topk(2).indices.gather(1, x.long()), Traffic()),
    "new": (lambda x: x.new_zeros(2) + torch.arange(2, device="cuda"), Traffic()),
    "iterate": (lambda x: [row + x[0] for row in x], Traffic()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_the_pretended_gpu_notes(name: str) -> None:
    work, expected = OPERATIONS[name]
    with PretendedGPU() as gpu:
        x = torch.zeros(2, 2, device="cuda")
        with gpu.noted() as traffic:
            work(x)
    assert [len(each) for each in (traffic.reads, traffic.blocking, traffic.queued)] == [
        len(each) for each in (expected.reads, expected.blocking, expected.queued)
    ]


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + torch.ones(2),
    "gather": lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.long)),
    "cat": lambda x: torch.cat([x, torch.zeros(1, 2)]),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, torch.zeros(2, 2)),
    "generator": lambda x: torch.rand(2, device=x.device, generator=torch.Generator()),
    "assignment": lambda x: x.__setitem__(0, torch.ones(2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_pretended_gpu_refuses(name: str) -> None:
    with PretendedGPU():
        x = torch.zeros(2, 2, device="cuda")
        with pytest.raises(RuntimeError, match="processor"):
            REFUSED[name](x)


@pytest.mark.parametrize("vocab", [2, 50, 1000])
def test_a_draw_where_sums_are_made_in_parallel(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    drawn = {"generator": generator, "dtype": torch.float64}
    p_BNV = torch.rand(7, 9, vocab, **drawn) * (torch.rand(7, 9, vocab, **drawn) < 0.4)  # type: ignore[call-overload]
    p_BNV[..., 0] += 0.1
    uniform_BN = torch.rand(7, 9, **drawn)  # type: ignore[call-overload]
    uniform_BN[0, 0], uniform_BN[1, 1] = 0.0, 1 - 2**-53
    sums = p_BNV.cumsum(-1)
    assert torch.equal(_drawn_apart(sums, p_BNV, uniform_BN), draw(p_BNV, uniform_BN))
    rough = sums * (1 + 1e-3 * torch.randn(7, 9, vocab, **drawn))  # type: ignore[call-overload]
    token_BN = _drawn_apart(rough, p_BNV, uniform_BN)
    assert (p_BNV.gather(-1, token_BN[..., None]) > 0).all()
