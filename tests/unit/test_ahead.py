"""Steps compiled ahead: the same numbers for any weights of the model, at any length, in the next process too."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from medusa import compiled, packages
from medusa.__main__ import main
from medusa.ahead import CALLS, LIBRARY, OPERATIONS, Library, can_be_ahead, export
from medusa.cache import BLOCK, SlotCache
from medusa.compiled import CompiledSteps, StepSize, stored_sizes
from medusa.data.tokenizers import char_tokenizer
from medusa.decoding import Request, generate_ids
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.family import OWN
from medusa.folded import settle
from medusa.infer import Engine
from medusa.infer.warmup import use_compiled, use_stored, warm_up
from medusa.packed import Weight, pack
from medusa.products import FewRows, OneDNN
from medusa.testing import VOCAB, ScriptedDrafter, plain_greedy, tiny_trunk
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

TREE = Topology.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 1]])
SIZE = StepSize(1, TREE.size)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def text_and_tree(lengths: Sequence[int], topology: Topology) -> tuple[Tensor, DraftTree]:
    """Random texts, of which each row has so much, and a tree behind them."""
    most, generator = max(lengths), torch.Generator().manual_seed(1)
    ids_BT = torch.randint(VOCAB, (len(lengths), most + topology.size), generator=generator)
    tokens_BN = ids_BT[:, most:]
    return ids_BT[:, :most], DraftTree(Shape.static(topology, "cpu"), tokens_BN, torch.ones_like(tokens_BN).bool())


@torch.inference_mode()
def outcome(
    trunk: Trunk, steps: CompiledSteps | None, lengths: Sequence[int] = (9,), topology: Topology = TREE
) -> tuple[Tensor, SlotCache]:
    """Logits of a tree behind texts of these lengths, and the cache, which counts the tree in."""
    ids_BT, tree = text_and_tree(lengths, topology)
    trunk.compiled, cache = None, trunk.new_cache(len(lengths))
    trunk.prefill(ids_BT, lengths, cache)
    trunk.compiled = steps
    logits = trunk.tree_forward(tree, cache).logits
    cache.set_lengths([length + tree.size for length in lengths])
    return logits, cache


def check(
    trunk: Trunk,
    steps: CompiledSteps,
    lengths: Sequence[int] = (9,),
    tolerance: float = 1e-5,
    topology: Topology = TREE,
) -> None:
    """Logits and cache are those of an eager step."""
    (plain, one), (found, other) = (outcome(trunk, each, lengths, topology) for each in (None, steps))
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)
    for layer in range(len(trunk.layers)):
        for row in range(len(lengths)):
            torch.testing.assert_close(one.read(layer, row), other.read(layer, row), rtol=tolerance, atol=tolerance)


class Standin:
    """In the place of the compiler: writes down a number, which is added to what the eager step gives."""

    def __init__(self) -> None:
        self.made, self.adds = 0, 0.0

    def compile(self, trunk: Trunk, step: Any, arguments: Any, to: Path) -> None:
        self.made += 1
        (to / LIBRARY).write_text(str(self.adds))


class Loaded(Library):
    layers: tuple[int, ...] = ()

    def __init__(self, folder: Path, trunk: Trunk) -> None:
        self.adds, self.step = float((folder / LIBRARY).read_text()), compiled._traced(trunk, self.layers)
        self.current = True

    @property
    def is_current(self) -> bool:
        return self.current

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        output = self.step(*arguments)
        for plane in (plane for pair in arguments[-1] for plane in pair):
            plane[0, :, arguments[3][0]] += self.adds
        return tuple(each + self.adds for each in output)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    made = Standin()
    monkeypatch.setattr(compiled, "compile_ahead", made.compile)
    monkeypatch.setattr(compiled, "Library", Loaded)
    return made


def test_the_next_process_takes_what_is_kept(standin: Standin) -> None:
    for seed in (0, 1):  # of another checkpoint too
        trunk = tiny_trunk("llama", seed=seed)
        steps = CompiledSteps(trunk, [SIZE])
        check(trunk, steps, tolerance=0)
        assert set(steps.compiled) == {SIZE} and standin.made == 1
    other = tiny_trunk("llama", intermediate_size=48)
    check(other, CompiledSteps(other, [SIZE]), tolerance=0)
    assert standin.made == 2


def test_what_is_not_kept_is_not_made_where_it_may_not(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    assert stored_sizes(trunk, [SIZE]) == []
    steps = CompiledSteps(trunk, [SIZE], makes=False)
    check(trunk, steps, tolerance=0)
    assert steps.sizes == [] and not steps.compiled and standin.made == 0


def test_stored_sizes(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loaded, "layers", (1,))
    trunk = tiny_trunk("llama")
    steps = CompiledSteps(trunk, [SIZE, StepSize(2, 6)], layers=[1])
    outcome(trunk, steps)  # is not asked for states: runs compiled
    sizes = [SIZE, StepSize(2, 6), StepSize(1, 2)]
    assert stored_sizes(trunk, sizes, [1]) == [SIZE]
    assert stored_sizes(trunk, sizes) == []
    assert stored_sizes(tiny_trunk("gpt2"), sizes, [1]) == []


def test_what_warming_up_left_is_used(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    use_stored(trunk, NullDrafter(), 4)
    assert trunk.compiled is None
    warm_up(trunk, NullDrafter(), [1, 3])
    assert standin.made == 2
    fresh = tiny_trunk("llama")
    use_stored(fresh, NullDrafter(), 4)
    assert fresh.compiled is not None and fresh.compiled.sizes == [(1, 1), (3, 1)] and not fresh.compiled.makes
    assert use_compiled(fresh, NullDrafter(), [1]).makes
    use_stored(fresh, NullDrafter(), 1)  # leaves as it is what was asked for
    assert fresh.compiled.makes


def test_an_engine_takes_what_is_kept(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    expected = Engine(trunk).generate([1, 2, 3], max_new_tokens=8).token_ids
    assert trunk.compiled is None
    Engine(trunk, compile=True).warmup([1, 2])
    for compile, sizes in ((None, [(1, 1), (2, 1)]), (False, None)):
        fresh = tiny_trunk("llama")
        engine = Engine(fresh, compile=compile)
        assert (fresh.compiled and fresh.compiled.sizes) == sizes
        assert engine.generate([1, 2, 3], max_new_tokens=8).token_ids == expected
    fresh = tiny_trunk("llama")
    Engine(fresh, max_rows=1)
    assert fresh.compiled is not None and fresh.compiled.sizes == [(1, 1)] and standin.made == 2


def test_the_commands_take_what_is_kept(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "trunk")
    tiny_trunk("llama").model.save_pretrained(folder)
    char_tokenizer("".join(map(chr, range(48, 48 + VOCAB)))).save_pretrained(folder)
    generate = ["generate", folder, "--prompt", "ABC", "--max-new-tokens", "12", "--threads", "1", "--baseline"]
    capsys.readouterr()
    assert main(generate) == 0
    plain = capsys.readouterr().out
    assert main(["warmup", folder, "--threads", "1", "--baseline"]) == 0
    out, told = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [["rows", "nodes"], ["1", "1"]]
    assert f"kept in {packages.steps_folder()}" in told and standin.made == 1
    calls: list[str] = []
    monkeypatch.setattr(Loaded, "is_current", property(lambda self: calls.append("") is None))
    for more, used in (([], True), (["--eager"], False), (["--compile"], True)):
        calls.clear()
        assert main([*generate, *more]) == 0
        assert capsys.readouterr().out == plain and bool(calls) is used
    assert standin.made == 1
    assert main([*generate, "--eager", "--compile"]) == 2
    assert "give one of the two" in capsys.readouterr().err


def test_what_is_damaged_is_made_anew(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    outcome(trunk, CompiledSteps(trunk, [SIZE]))
    (file,) = packages.steps_folder().glob(f"*/{LIBRARY}")
    file.write_text("7.0")
    check(trunk, CompiledSteps(trunk, [SIZE]), tolerance=0)
    assert standin.made == 2 and file.read_text() == "0.0"


@pytest.mark.parametrize("makes", [True, False])
def test_a_kept_step_that_gives_other_numbers_is_dropped(standin: Standin, makes: bool) -> None:
    trunk = tiny_trunk("llama")
    standin.adds = 1.0
    with pytest.raises(UserError, match="other numbers"):
        outcome(trunk, CompiledSteps(trunk, [SIZE]))
    assert packages.steps_folder().is_dir() and stored_sizes(trunk, [SIZE]) == []
    (name,) = {CompiledSteps(trunk, [SIZE])._name(SIZE)}
    bad = packages.steps_folder().parent / "bad"
    bad.mkdir()
    (bad / LIBRARY).write_text("1.0")
    assert packages.keep(name, bad, {})
    standin.adds = 0.0
    check(trunk, CompiledSteps(trunk, [SIZE], makes=makes), tolerance=0)
    assert standin.made == 1 + makes and bool(stored_sizes(trunk, [SIZE])) is makes


def test_logits_that_are_no_numbers_are_as_expected(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    trunk.model.lm_head.weight.fill_(torch.nan)
    steps = CompiledSteps(trunk, [SIZE])
    assert outcome(trunk, steps)[0].isnan().all() and set(steps.compiled) == {SIZE}


def test_threads_that_meet_what_is_not_kept(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    steps = CompiledSteps(trunk, [SIZE, StepSize(1, 1)], makes=False)
    plain, take, given = outcome(trunk, None)[0], steps._take, list[Any]()
    steps._take = lambda *arguments: (given.append(arguments), take(*arguments))[1]  # type: ignore[method-assign]
    outcome(trunk, steps)
    with torch.inference_mode():
        assert torch.equal(take(*given[0])[0], plain)  # the second one, which waited
    assert steps.sizes == [(1, 1)]


def test_a_closed_cache_folder_holds_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> Any:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("os.stat", closed)
        assert stored_sizes(tiny_trunk("llama"), [SIZE]) == []


def a_hook(trunk: Trunk) -> None:
    trunk.model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] * 2)


def an_adapter(trunk: Trunk) -> None:
    mlp = trunk.model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Tanh())


def a_switch(trunk: Trunk) -> None:
    trunk.model.model.layers[0].mlp.disabled = True


@pytest.mark.parametrize("makes", [True, False])
@pytest.mark.parametrize("change", [a_hook, an_adapter, a_switch])
def test_a_model_that_is_changed_is_not_run_as_it_was(
    standin: Standin, change: Callable[[Trunk], None], makes: bool
) -> None:
    """Whose weights are the same tensors: at the next prompt its steps are others, or eager ones."""
    trunk = tiny_trunk("llama")
    outcome(trunk, CompiledSteps(trunk, [StepSize(1, 1)]))
    engine = Engine(trunk, compile=False)
    steps = trunk.compiled = CompiledSteps(trunk, [StepSize(1, 1)])
    engine.generate([1, 2, 3], max_new_tokens=4)
    steps.makes, step = makes, steps.compiled[StepSize(1, 1)]
    engine.generate([1, 2, 3], max_new_tokens=4)
    assert standin.made == 1 and steps.compiled[StepSize(1, 1)] is step
    change(trunk)
    found = engine.generate([1, 2, 3], max_new_tokens=4).token_ids
    assert standin.made == 1 + makes and steps.compiled.get(StepSize(1, 1)) is not step
    trunk.compiled = None
    assert engine.generate([1, 2, 3], max_new_tokens=4).token_ids == found


def test_what_cannot_be_loaded_is_made_anew(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("llama")
    outcome(trunk, CompiledSteps(trunk, [SIZE]))
    fails = iter([True, False, False])

    def load(self: Any, folder: Path, trunk: Trunk) -> None:
        if next(fails):
            raise RuntimeError("invalid ELF header")
        Loaded.__init__(self, folder, trunk)

    monkeypatch.setattr(compiled, "Library", type("Failing", (Loaded,), {"__init__": load}))
    check(trunk, CompiledSteps(trunk, [SIZE]), tolerance=0)
    assert standin.made == 2


def test_a_model_that_is_another_takes_another_step(standin: Standin) -> None:
    trunk = tiny_trunk("llama")
    steps = CompiledSteps(trunk, [SIZE])
    outcome(trunk, steps)
    step: Any = steps.compiled[SIZE]
    step.current = False
    trunk.model.model.layers[0].mlp.act_fn = nn.GELU()
    check(trunk, steps, tolerance=0)
    assert standin.made == 2 and steps.compiled[SIZE] is not step


def test_weights_written_to_since_they_were_packed_run_eagerly_until_the_next_prompt(standin: Standin) -> None:
    trunk = tiny_trunk("llama", dtype=torch.float32)
    assert pack(trunk.model, always=True)
    steps = CompiledSteps(trunk, [SIZE])
    trunk.model.lm_head.weight.mul_(0.5)
    ids = torch.zeros(1, TREE.size, dtype=torch.long)
    cache = trunk.new_cache(1)
    cache.reserve(TREE.size)
    mask = torch.zeros(1, 1, TREE.size, TREE.size)
    with torch.inference_mode():
        steps(SIZE, ids, cache, mask, torch.arange(TREE.size)[None])
    assert standin.made == 0
    outcome(trunk, steps)
    assert standin.made == 1


def test_a_cache_folder_that_takes_no_files(standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    trunk = tiny_trunk("llama")
    check(trunk, CompiledSteps(trunk, [SIZE]), tolerance=0)
    assert standin.made == 1


def test_weights_that_are_no_plain_tensors() -> None:
    class Other(Tensor):
        pass

    trunk = tiny_trunk("llama")
    assert can_be_ahead(trunk)
    trunk.model.model.register_buffer("other", torch.zeros(1).as_subclass(Other))
    assert not can_be_ahead(trunk) and not CompiledSteps(trunk, [SIZE]).ahead


def test_what_cannot_be_exported_says_so() -> None:
    trunk = tiny_trunk("llama")
    trunk.model.model.layers[0].mlp.act_fn = Asking()
    with pytest.raises(UserError, match=r"can't be compiled here .*leave compile out"):
        outcome(trunk, CompiledSteps(trunk, [SIZE]))


class Asking(nn.Module):
    """An activation that goes by values: no graph."""

    def forward(self, values: Tensor) -> Tensor:
        return values if values.sum() > 0 else -values


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_our_code_in_a_step_is_in_its_name(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, seen = tiny_trunk(family, dtype=torch.float32), set[str]()
    assert pack(trunk.model, always=True)

    def watch(frame: Any, event: str, value: Any) -> None:
        seen.add(frame.f_code.co_filename)

    def exports(*given: Any) -> None:
        sys.setprofile(watch)
        try:
            export(*given[:3])
        finally:
            sys.setprofile(None)
        (given[3] / LIBRARY).write_text("0.0")

    monkeypatch.setattr(compiled, "compile_ahead", exports)
    monkeypatch.setattr(compiled, "Library", Loaded)
    outcome(trunk, CompiledSteps(trunk, [SIZE]))
    ours = {Path(file).name for file in seen if Path(file).parent == Path(compiled.__file__).parent}
    assert {"trunk.py", "cache.py", "traced.py"} <= ours <= {*packages.SOURCES}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("gpt2", 2), ("gemma3", 2), ("mistral", 1)])
def test_an_exported_step_is_the_step(family: str, rows: int) -> None:
    """Before it is compiled: to rounding in fp64, at lengths that it was not exported with, and for other weights."""
    trunk, other = tiny_trunk(family), tiny_trunk(family, seed=3)
    programs: list[Any] = []

    class Exports(Loaded):
        def __init__(self, folder: Path, trunk: Trunk) -> None:
            self.trunk = trunk

        def __call__(self, ids: Tensor, places: Tensor, bias: Any, slots: Tensor, planes: Any) -> tuple[Tensor, ...]:
            masks = [bias[kind] for kind in sorted(bias)] if isinstance(bias, dict) else [bias]
            weights = [
                *dict(self.trunk.model.named_parameters()).values(),
                *dict(self.trunk.model.named_buffers()).values(),
            ]
            output: tuple[Tensor, ...] = programs[0](weights, ids, places, masks, slots, planes)
            return output

        @property
        def is_current(self) -> bool:
            return True

    for model in (trunk, other):
        steps = CompiledSteps(model, [StepSize(rows, TREE.size)])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(compiled, "Library", Exports)
            patched.setattr(
                compiled,
                "compile_ahead",
                lambda *given: (
                    programs.append(export(*given[:3])[0].module(check_guards=False)),
                    (given[3] / LIBRARY).write_text(""),
                ),
            )
            for lengths in ([9] * rows, [3, 12][:rows], [30, 1][:rows]):
                check(model, steps, lengths, tolerance=1e-10)
    assert len(programs) == 1


class Kept(NamedTuple):
    """What a family's step is compiled for, and texts that it is tried behind."""

    topology: Topology
    lengths: tuple[tuple[int, ...], ...]


# A tree for two rows, under a mask per kind of layer; a single token, by weights of the other orientation and biases.
LAST = BLOCK - TREE.size
KEPT = {
    "gemma3": Kept(TREE, ((9, 5), (9, 9), (1, 12), (100, 3), (LAST - 1, 40), (2, LAST))),
    "gpt2": Kept(Topology.root(), ((9,), (1,), (100,))),
}


@pytest.fixture(scope="module", params=KEPT)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A family, and the cache folder with its compiled step."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        taken(request.param, *compiled_trunk(request.param))
    yield request.param, folder


@pytest.fixture
def kept(folder: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """The family whose step is kept; nothing else is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder[1]))
    monkeypatch.setattr(compiled, "compile_ahead", None)
    return folder[0]


def compiled_trunk(family: str, seed: int = 0) -> tuple[Trunk, CompiledSteps]:
    """In fp32 and packed. A gemma3 attends by our own attention; a matrix of gpt2 is packed by oneDNN, whose layout no
    step knows."""
    options: dict[str, Any] = {"n_layer": 1} if family == "gpt2" else {"max_position_embeddings": 2 * BLOCK}
    trunk = tiny_trunk(family, dtype=torch.float32, seed=seed, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("medusa.packed.WAYS", (FewRows(),))
        assert pack(trunk.model, always=True)
        patched.setattr("medusa.folded.fastest", lambda _: OWN)
        if family == "gpt2":
            layer = trunk.model.transformer.h[0].mlp.c_fc
            layer.medusa_packed = Weight(layer, OneDNN())
        else:
            assert settle(trunk).config._attn_implementation == OWN
    topology, (lengths, *_) = KEPT[family]
    return trunk, CompiledSteps(trunk, [StepSize(len(lengths), topology.size)])


def taken(family: str, trunk: Trunk, steps: CompiledSteps | None) -> Tensor:
    """The logits behind the first of the texts."""
    return outcome(trunk, steps, KEPT[family].lengths[0], KEPT[family].topology)[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_compiled(kept: str, seed: int) -> None:
    trunk, steps = compiled_trunk(kept, seed)
    for lengths in KEPT[kept].lengths:
        check(trunk, steps, lengths, 1e-4, KEPT[kept].topology)
    (step,) = steps.compiled.values()
    assert isinstance(step, Library) and step.is_current


@pytest.mark.slow
def test_a_text_by_a_kept_step(kept: str) -> None:
    topology, (lengths, *_) = KEPT[kept]
    prompts = [[3, 0, 17, 5], [64, 1, 2, 3, 0, 0, 9, 40, 11]][: len(lengths)]
    trunk, steps = compiled_trunk(kept)
    texts = [plain_greedy(trunk, prompt, 24) for prompt in prompts]
    trunk.compiled = steps
    drafter = ScriptedDrafter(texts, honesty=0.7, size=topology.size) if topology.size > 1 else NullDrafter()
    assert generate_ids(trunk, drafter, [Request(prompt, 24) for prompt in prompts]) == texts
    assert len(steps.compiled) == 1


@pytest.mark.slow
def test_what_is_called_from_cpp_and_what_is_called_back(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and products of ours without Python; a product in another layout is Python's."""
    called: list[str] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    attend, product = kind(CALLS["tree_attention"]()), OneDNN.product
    noting = kind(lambda problem: (called.append("attention"), attend(problem))[1])
    monkeypatch.setitem(CALLS, "tree_attention", lambda: ctypes.cast(noting, ctypes.c_void_p).value)
    monkeypatch.setattr(OneDNN, "product", lambda *given: (called.append("product"), product(*given))[1])
    trunk, steps = compiled_trunk(kept)
    expected = taken(kept, trunk, steps)
    ((size, step),) = steps.compiled.items()

    def watched(*arguments: Any) -> tuple[Tensor, ...]:
        called.clear()
        output = step(*arguments)
        called.append("end")
        return output

    steps.compiled[size] = watched
    assert torch.equal(taken(kept, trunk, steps), expected)
    assert called == [*(["product"] if kept == "gpt2" else ["attention"] * len(trunk.layers)), "end"]
    back = [file.read_text() for file in packages.steps_folder().glob(f"*/{OPERATIONS}")]
    assert len(back) == (kept == "gpt2") and all("packed_linear" in each and "few_rows" not in each for each in back)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["written to", "replaced", "its memory replaced"])
@pytest.mark.parametrize("which", ["packed", "other"])
def test_it_reads_what_weights_are(kept: str, how: str, which: str) -> None:
    trunk, steps = compiled_trunk(kept)
    before = taken(kept, trunk, steps)
    module: Any = trunk.model.get_output_embeddings() if which == "packed" else trunk.model.get_input_embeddings()
    if how == "written to":
        module.weight.mul_(0.5)
    elif how == "replaced":
        module.weight = nn.Parameter(module.weight * 0.5, requires_grad=False)
    else:
        module.weight.data = module.weight.data * 0.5
    check(trunk, steps, KEPT[kept].lengths[0], 1e-4, KEPT[kept].topology)
    assert not torch.allclose(taken(kept, trunk, steps), before, rtol=0.01)


@pytest.mark.slow
def test_it_reads_the_packed_copy(kept: str) -> None:
    trunk, steps = compiled_trunk(kept)
    assert taken(kept, trunk, steps).abs().max() > 0
    trunk.model.get_output_embeddings().medusa_packed.packed.zero_()
    assert taken(kept, trunk, steps).abs().max() == 0


@pytest.mark.slow
def test_several_threads_take_steps_at_once(kept: str) -> None:
    topology, (lengths, *_) = KEPT[kept]
    trunk, steps = compiled_trunk(kept)
    expected, tree = taken(kept, trunk, steps), text_and_tree(lengths, topology)[1]
    caches = [outcome(trunk, None, lengths, topology)[1] for _ in range(4)]
    trunk.compiled = steps
    found: list[bool] = []

    def work(own: SlotCache) -> None:
        own.set_lengths(lengths)
        with torch.inference_mode():
            found.extend(torch.allclose(trunk.tree_forward(tree, own).logits, expected) for _ in range(50))

    threads = [Thread(target=work, args=(own,)) for own in caches]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(found) == 200 and all(found)
