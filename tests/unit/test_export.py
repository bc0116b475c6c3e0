"""Heads for other engines: each one's own names, shapes and arithmetic; what it can't express; never half a folder."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa import exports
from medusa.__main__ import main
from medusa.checkpoint import CALIBRATION, CONFIG, MANIFEST, TREE, save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.dialects import load_published, published_tree, published_trunk
from medusa.engines import ENGINES
from medusa.errors import UserError
from medusa.exports import LAYOUTS
from medusa.files import write_json
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Engine
from medusa.infer.export import write as exporting
from medusa.infer.export.cards import REPORT
from medusa.infer.export.heads import compare
from medusa.infer.export.write import export_run
from medusa.matrices import NotExpressible, matrices
from medusa.testing import tiny_model
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TREE_OF_5 = Topology.from_paths([[0], [1], [0, 0], [0, 0, 0]])
REFERENCE = ["tgi", "tensorrt-llm", "medusa-v1"]
D, V = 32, 65

# What each engine's own loader asks for, of three heads of two layers: from its source, not from ours.
VLLM = {
    "blocks.0.layers.0.weight": (D, D),
    "blocks.0.layers.0.bias": (D,),
    "blocks.0.layers.1.weight": (D, D),
    "blocks.0.layers.1.bias": (D,),
    "blocks.1.layers.0.weight": (D, D),
    "blocks.1.layers.0.bias": (D,),
    "blocks.1.layers.1.weight": (D, D),
    "blocks.1.layers.1.bias": (D,),
    "blocks.2.layers.0.weight": (D, D),
    "blocks.2.layers.0.bias": (D,),
    "blocks.2.layers.1.weight": (D, D),
    "blocks.2.layers.1.bias": (D,),
}
VLLM_OWN = {"lm_heads.0.weight": (V, D), "lm_heads.1.weight": (V, D), "lm_heads.2.weight": (V, D)}
MEDUSA_LM_HEAD = {
    "0.0.linear.weight": (D, D),
    "0.0.linear.bias": (D,),
    "0.1.linear.weight": (D, D),
    "0.1.linear.bias": (D,),
    "0.2.weight": (V, D),
    "1.0.linear.weight": (D, D),
    "1.0.linear.bias": (D,),
    "1.1.linear.weight": (D, D),
    "1.1.linear.bias": (D,),
    "1.2.weight": (V, D),
    "2.0.linear.weight": (D, D),
    "2.0.linear.bias": (D,),
    "2.1.linear.weight": (D, D),
    "2.1.linear.bias": (D,),
    "2.2.weight": (V, D),
}


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    char_tokenizer(ALPHABET).save_pretrained(folder)
    return folder


@cache
def model_folder(place: Path, family: str, dtype: torch.dtype) -> Path:
    return save(tiny_model(family, dtype=dtype), place / f"{family}-{dtype}")


@cache
def trunk_of(place: Path, family: str, dtype: torch.dtype) -> Trunk:
    return Trunk.load(model_folder(place, family, dtype), check=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def heads_of(trunk: Trunk, config: HeadsConfig) -> MedusaHeads:
    """Random heads; of a draft vocabulary, random ids."""
    generator = torch.Generator().manual_seed(4)
    ids = None if config.vocab is None else torch.randperm(V, generator=generator)[: config.vocab].sort().values
    heads = MedusaHeads(config, trunk, ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.3 * noise.to(parameter)
    return heads


def make_run(
    folder: Path, models: Path, family: str = "llama", dtype: torch.dtype = torch.float64, **sizes: Any
) -> MedusaHeads:
    """A run folder with random heads of three heads of two layers, unless ``sizes`` say otherwise."""
    trunk = trunk_of(models, family, dtype)
    config = {"kind": "medusa", "num": 3, "layers": 2, "projection": "own", "vocab": None, "rank": None} | sizes
    heads = heads_of(trunk, HeadsConfig(**config))
    save_heads(folder, heads, str(model_folder(models, family, dtype)))
    save_tree(folder, TREE_OF_5)
    return heads


def own_logits(heads: MedusaHeads, hidden: Tensor) -> list[Tensor]:
    """What our heads give, in the whole vocabulary: -inf for what they never draft."""
    whole = []
    for index in range(heads.config.num):
        logits = heads.logits(index, heads.features(index, hidden, None))
        spread = logits.new_full((*logits.shape[:-1], V), -torch.inf)
        spread[..., heads.tokens(torch.arange(logits.shape[-1]))] = logits
        whole.append(spread)
    return whole


def states() -> Tensor:
    return torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert len(files) == 1
    return {name: tuple(value.shape) for name, value in load_file(files[0]).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def refused(run: Path, to: str, out: Path, *words: str, **options: Any) -> str:
    """The refusal is one line with these words, and nothing is left behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(UserError) as caught:
        export_run(str(run), to, out, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert sorted(out.parent.iterdir()) == before
    return message


# Names, shapes, biases, logits.


@pytest.mark.parametrize("projection", ["own", "low_rank", "shared"])
def test_vllm_finds_its_own_names(projection: str, models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, projection=projection, rank=7 if projection == "low_rank" else None)
    made = export_run(str(tmp_path / "run"), "vllm", tmp_path / "out")
    assert shapes(tmp_path / "out") == VLLM | ({"lm_heads.0.weight": (V, D)} if projection == "shared" else VLLM_OWN)
    config = config_of(tmp_path / "out")
    expected = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": D,
        "vocab_size": V,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "truncated_vocab_size": V,
        "medusa_fc_bias": True,
        "original_lm_head": projection == "shared",
    }
    assert config == config | expected
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    read = ENGINES["vllm"](tmp_path / "out", D, V)
    for mine, theirs in zip(own_logits(heads, states()), read.logits(states()), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)
    assert made.agreement.same == made.agreement.positions and made.agreement.error < 1e-9
    assert ("rank" in str(made.notes)) == (projection == "low_rank")


@pytest.mark.parametrize("projection", ["own", "low_rank", "shared"])
def test_a_draft_vocabulary_is_vllms_token_map(projection: str, models: Path, tmp_path: Path) -> None:
    heads = make_run(
        tmp_path / "run", models, projection=projection, vocab=20, rank=7 if projection == "low_rank" else None
    )
    export_run(str(tmp_path / "run"), "vllm", tmp_path / "out")
    config, found = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (V, 20)
    assert heads.draft_ids is not None and torch.equal(found["token_map"], heads.draft_ids)
    assert found["token_map"].dtype == torch.int64 and found["lm_heads.0.weight"].shape == (20, D)
    read = ENGINES["vllm"](tmp_path / "out", D, V)
    for mine, theirs in zip(own_logits(heads, states()), read.logits(states()), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


@pytest.mark.parametrize("projection", ["own", "low_rank", "shared"])
@pytest.mark.parametrize("to", REFERENCE)
def test_the_references_names(to: str, projection: str, models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, projection=projection, rank=7 if projection == "low_rank" else None)
    out = tmp_path / "out"
    export_run(str(tmp_path / "run"), to, out)
    assert shapes(out) == MEDUSA_LM_HEAD
    config = config_of(out)
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2) and "architectures" not in config
    assert config.get("num_medusa_heads") == (3 if to == "tensorrt-llm" else None)
    assert config["base_model_name_or_path"] == str(model_folder(models, "llama", torch.float64).resolve())
    files = {"config.json", "README.md", "medusa_lm_head.safetensors"}
    assert {path.name for path in out.iterdir()} == files | (set() if to == "tgi" else {"medusa_lm_head.pt"})
    paths = [list(path) for path in TREE_OF_5.paths[1:]]
    assert config.get("medusa_choices") == (None if to == "tgi" else paths)
    for mine, theirs in zip(own_logits(heads, states()), ENGINES[to](out, D, V).logits(states()), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


class Reference(nn.Module):
    """A head of the reference as its paper has it; its names are what ``nn.Sequential`` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


@torch.no_grad()
def test_a_module_of_the_reference_takes_the_pickle_strictly(models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models)
    export_run(str(tmp_path / "run"), "medusa-v1", tmp_path / "out")
    modules = nn.ModuleList(
        nn.Sequential(Reference(), Reference(), nn.Linear(D, V, bias=False, dtype=torch.float64)) for _ in range(3)
    )
    modules.load_state_dict(torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True), strict=True)
    for mine, module in zip(own_logits(heads, states()), modules, strict=True):
        torch.testing.assert_close(module(states()), mine, rtol=0, atol=1e-11)


@pytest.mark.parametrize("to", REFERENCE)
def test_what_is_exported_comes_back_through_the_dialects(to: str, models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, projection="shared")
    export_run(str(tmp_path / "run"), to, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = load_published(tmp_path / "out", heads.trunk)
        tree = published_tree(tmp_path / "out", back.config)
    assert back.config == HeadsConfig("medusa", 3, 2) and (to == "tgi" or tree == TREE_OF_5)
    for mine, theirs in zip(own_logits(heads, states()), own_logits(back, states()), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore:heads in .* don't say")
def test_an_engine_decodes_with_the_folder_and_exports_it_again(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models)
    export_run(str(tmp_path / "run"), "medusa-v1", tmp_path / "out")
    first, second = (Engine.load(tmp_path / name).generate("ROMEO:", max_new_tokens=20) for name in ("run", "out"))
    assert first.token_ids == second.token_ids and first.accepted == second.accepted
    export_run(str(tmp_path / "out"), "tensorrt-llm", tmp_path / "again")
    file = "medusa_lm_head.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    assert config_of(tmp_path / "again")["base_model_name_or_path"] == published_trunk(tmp_path / "out")


# What a trunk does after its projection.


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("family", ["cohere", "granite"])
def test_a_scale_goes_into_the_projection(family: str, projection: str, to: str, models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, family, projection=projection)
    export_run(str(tmp_path / "run"), to, tmp_path / "out")
    for mine, theirs in zip(
        own_logits(heads, states()), ENGINES[to](tmp_path / "out", D, V).logits(states()), strict=True
    ):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-11)


def test_a_softcap_is_left_out_and_said(models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, "gemma2")
    made = export_run(str(tmp_path / "run"), "vllm", tmp_path / "out")
    assert any("softcap" in note for note in made.notes) and made.agreement.error < 1e-9
    for mine, theirs in zip(
        own_logits(heads, states()), ENGINES["vllm"](tmp_path / "out", D, V).logits(states()), strict=True
    ):
        torch.testing.assert_close(5 * torch.tanh(theirs / 5), mine, rtol=0, atol=1e-11)
        assert torch.equal(mine.argsort(-1), theirs.argsort(-1))


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_a_projection_with_a_bias_is_refused(projection: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models, "phi", projection=projection)
    refused(tmp_path / "run", "vllm", tmp_path / "out", "bias", "medusa train")


def test_a_bias_of_zeros_is_none(models: Path, tmp_path: Path) -> None:
    trunk = trunk_of(models, "phi", torch.float64)
    heads = heads_of(trunk, HeadsConfig("medusa", 1))
    projection = heads.head(0).projection
    assert projection is not None
    nn.init.zeros_(projection.bias)
    assert matrices(heads, "vLLM").projections[0].shape == (V, D)


def test_a_shared_projection_with_a_draft_vocabulary_becomes_whole(models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, projection="shared", vocab=20)
    made = export_run(str(tmp_path / "run"), "tgi", tmp_path / "out")
    assert any("all tokens" in note and "20" in note for note in made.notes)
    read = ENGINES["tgi"](tmp_path / "out", D, V).logits(states())
    for mine, theirs in zip(own_logits(heads, states()), read, strict=True):
        drafted = mine.isfinite()
        torch.testing.assert_close(theirs[drafted], mine[drafted], rtol=0, atol=1e-11)
        assert theirs.isfinite().all()


# What can't be expressed.


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("kind", ["root", "hydra"])
def test_heads_that_read_tokens_are_refused(kind: str, to: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models, kind=kind)
    refused(tmp_path / "run", to, tmp_path / "out", kind, LAYOUTS[to].engine, "state alone", "medusa train")


@pytest.mark.parametrize("to", LAYOUTS)
def test_a_markov_bias_is_refused(to: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models, markov=4)
    refused(tmp_path / "run", to, tmp_path / "out", "heads.markov=4", LAYOUTS[to].engine)


@pytest.mark.parametrize("to", REFERENCE)
@pytest.mark.parametrize("projection", ["own", "low_rank"])
def test_a_draft_vocabulary_of_their_own_is_refused(projection: str, to: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models, projection=projection, vocab=20, rank=7 if projection == "low_rank" else None)
    refused(tmp_path / "run", to, tmp_path / "out", "heads.vocab=20", "vllm takes them")


def test_the_demos_way_out_is_its_medusa_recipe(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trunk = tmp_path / "runs" / "tinyshakespeare" / "trunk"
    save(tiny_model("llama"), trunk)
    run = Path("runs/tinyshakespeare")
    save_heads(run, heads_of(Trunk.load(trunk, check=False), HeadsConfig("hydra", 2)), str(trunk))
    message = refused(run, "vllm", tmp_path / "out")
    assert message.endswith("with `medusa train tinyshakespeare-medusa`")


DEMO = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "intermediate": 384, "context": 1024, "tied": False}


@pytest.mark.parametrize("apart", [False, True])
def test_the_way_out_of_the_demo_elsewhere_names_its_trunk(apart: bool, tmp_path: Path) -> None:
    trunk = save(tiny_model("llama"), tmp_path / "made" / "trunk")
    run = tmp_path / ("other" if apart else "made")
    save_heads(run, heads_of(Trunk.load(trunk, check=False), HeadsConfig("hydra", 2)), str(trunk))
    data = {"source": "tinyshakespeare", "tokenizer": "char", "block": 256}
    (tmp_path / "made" / CONFIG).write_text(yaml.safe_dump({"trunk": {"new": DEMO}, "data": data}))
    expected = f"medusa train tinyshakespeare-medusa --trunk.name {trunk.resolve()} --run {run}-medusa"
    refused(run, "vllm", tmp_path / "out", expected)


@pytest.mark.parametrize("other", [{"hidden": 64}, {"data": "bpe"}, {"place": "merged"}])
def test_the_way_out_of_another_run_is_its_own_recipe(other: dict[str, Any], tmp_path: Path) -> None:
    trunk = save(tiny_model("llama"), tmp_path / "made" / other.pop("place", "trunk"))
    run = tmp_path / "made"
    save_heads(run, heads_of(Trunk.load(trunk, check=False), HeadsConfig("root", 2)), str(trunk))
    data = {"source": "tinyshakespeare", "tokenizer": other.pop("data", "char")}
    (run / CONFIG).write_text(yaml.safe_dump({"trunk": {"new": DEMO | other}, "data": data}))
    message = refused(run, "vllm", tmp_path / "out", "--heads.kind medusa", f"--trunk.name {trunk.resolve()}")
    assert f"medusa train {run / CONFIG}" in message


def test_the_way_out_of_a_hub_trunk(models: Path, tmp_path: Path) -> None:
    trunk = trunk_of(models, "llama", torch.float64)
    for name, words in (
        ("meta-llama/Llama-3.1-8B-Instruct", "`medusa train llama-8b-medusa1-8gpu`"),
        ("smollm2", "`medusa train smollm2-chat --run runs/exportable --heads.kind medusa"),
    ):
        save_heads(tmp_path / name, heads_of(trunk, HeadsConfig("root", 2)), name)
        refused(tmp_path / name, "tgi", tmp_path / "out", words)


# Precision.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("projection", ["own", "low_rank", "shared"])
def test_weights_are_rounded_as_asked(projection: str, dtype: str, models: Path, tmp_path: Path) -> None:
    rank = 7 if projection == "low_rank" else None
    make_run(tmp_path / "run", models, dtype=torch.float32, projection=projection, rank=rank)
    made = export_run(str(tmp_path / "run"), "vllm", tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {getattr(torch, dtype)}
    assert config_of(tmp_path / "out")["torch_dtype"] == dtype
    # Rounded alike on both sides nothing is left of it, but for a product that is rounded once more.
    assert made.agreement.error < (8e-2 if projection == "low_rank" else 1e-4)


def test_weights_stay_as_they_are_saved(models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, dtype=torch.float32)
    save_heads(tmp_path / "run", heads, str(model_folder(models, "llama", torch.float32)), dtype=torch.float16)
    export_run(str(tmp_path / "run"), "tgi", tmp_path / "out")
    found = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    kept = load_file(tmp_path / "run" / "heads.safetensors")
    assert torch.equal(found["1.0.linear.weight"], kept["heads.1.blocks.0.linear.weight"])
    assert found["1.0.linear.weight"].dtype == torch.float16


def test_what_overflows_is_refused(models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models, dtype=torch.float32)
    with torch.no_grad():
        heads.head(1).blocks.get_submodule("0.linear").weight[3, 4] = 7e4  # type: ignore[operator]
    save_heads(tmp_path / "run", heads, str(model_folder(models, "llama", torch.float32)))
    refused(tmp_path / "run", "vllm", tmp_path / "out", "head 1", "7e+04", "float16", "bfloat16", dtype="float16")
    export_run(str(tmp_path / "run"), "vllm", tmp_path / "out", dtype="bfloat16")


# The proof finds what is wrong, and then there is no folder.


def swapped(names: dict[str, Tensor]) -> dict[str, Tensor]:
    first, second = [name for name in names if name.endswith("bias")][:2]
    return names | {first: names[second], second: names[first]}


def missing(names: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in names.items() if name not in ("lm_heads.1.weight", "1.2.weight")}


def misnamed(names: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("bias", "b"): value for name, value in names.items()}


def added(names: dict[str, Tensor]) -> dict[str, Tensor]:
    return names | {"extra.weight": torch.zeros(2)}


def cleared(names: dict[str, Tensor]) -> dict[str, Tensor]:
    return names | {name: torch.zeros_like(names[name]) for name in names if name.endswith("bias")}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (swapped, "does not read back"),
        (cleared, "does not read back"),
        (missing, "is missing"),
        (misnamed, "none of that name"),
        (added, "extra.weight"),
    ],
)
@pytest.mark.parametrize("to", LAYOUTS)
def test_a_fault_in_what_is_written_is_found(
    to: str, fault: Any, words: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", models)
    layout = LAYOUTS[to]
    monkeypatch.setitem(
        LAYOUTS, to, exports.Layout(**vars(layout) | {"names": lambda found: fault(layout.names(found))})
    )
    refused(tmp_path / "run", to, tmp_path / "out", words)


def test_what_is_no_number_is_no_match(models: Path, tmp_path: Path) -> None:
    heads = make_run(tmp_path / "run", models)
    export_run(str(tmp_path / "run"), "vllm", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    weights["blocks.1.layers.1.bias"][3] = torch.nan
    save_file(weights, file)
    with pytest.raises(UserError, match="differ by nan"):
        compare(tmp_path / "out", "vllm", heads, torch.float64)


@pytest.mark.parametrize(
    ("to", "change", "words"),
    [
        ("vllm", {"medusa_num_heads": 5}, "blocks.3.layers.0.bias is missing"),  # taken for num_heads by its reader
        ("vllm", {"num_attention_heads": 4}, "missing"),
        ("vllm", {"medusa_fc_bias": False}, "medusa_fc_bias"),
        ("vllm", {"model_type": "llama"}, "Medusa"),
        ("vllm", {"truncated_vocab_size": 64}, "lm_heads.0.weight"),
        ("vllm", {"hidden_size": 64}, "hidden_size"),
        ("tgi", {"architectures": ["X"]}, "architectures"),
        ("tgi", {"medusa_num_layers": 1}, "0.1.linear.bias"),
        ("tgi", {"base_model_name_or_path": None}, "base_model_name_or_path"),
        ("tensorrt-llm", {"num_medusa_heads": None}, "num_medusa_heads"),
        ("tensorrt-llm", {"medusa_choices": [[0, 0]]}, "medusa_choices"),
        ("medusa-v1", {"medusa_choices": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "medusa_choices"),
    ],
)
def test_a_config_that_the_engine_would_misread_is_found(
    to: str, change: dict[str, Any], words: str, models: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", models)
    out = tmp_path / "out"
    export_run(str(tmp_path / "run"), to, out)
    write_json(out / "config.json", config_of(out) | change)
    with pytest.raises(UserError, match=words):
        ENGINES[to](out, D, V)


@pytest.mark.parametrize("to", ["tensorrt-llm", "medusa-v1"])
def test_two_files_that_differ_are_found(to: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models)
    export_run(str(tmp_path / "run"), to, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    weights["2.1.linear.bias"] += 1e-9
    save_file(weights, tmp_path / "out" / "medusa_lm_head.safetensors")
    with pytest.raises(UserError, match="hold different weights"):
        ENGINES[to](tmp_path / "out", D, V)


def test_what_is_there_stays(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models)
    (tmp_path / "out").mkdir()
    export_run(str(tmp_path / "run"), "vllm", tmp_path / "out")  # an empty folder is no loss
    (tmp_path / "out" / "notes").write_text("mine")
    refused(tmp_path / "run", "vllm", tmp_path / "out", "exists", "--out")
    assert (tmp_path / "out" / "notes").read_text() == "mine"
    (tmp_path / "file").write_text("")
    refused(tmp_path / "run", "vllm", tmp_path / "file", "exists")
    with pytest.raises(UserError, match="can't be written"):
        export_run(str(tmp_path / "run"), "vllm", tmp_path / "file" / "out")


def test_an_interruption_leaves_nothing(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", models)

    def interrupt(*args: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "card", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_run(str(tmp_path / "run"), "vllm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tree_of_the_root_alone_becomes_a_chain(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models)
    save_tree(tmp_path / "run", Topology.root())
    made = export_run(str(tmp_path / "run"), "tensorrt-llm", tmp_path / "out")
    assert config_of(tmp_path / "out")["medusa_choices"] == [[0], [0, 0], [0, 0, 0]]
    assert any("chain" in note for note in made.notes)
    (tmp_path / "run" / TREE).unlink()
    with pytest.raises(UserError, match=r"medusa_choices None"):
        export_run(str(tmp_path / "run"), "tensorrt-llm", tmp_path / "other")


# The command.


def test_the_command_and_its_card(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", models)
    row = {
        "nodes": 5,
        "depth": 3,
        "tokens_per_step": 2.75,
        "step_ms": 12.5,
        "forward_ms": 9.0,
        "tokens_per_second": 220,
    }
    machine = {"processor": "A", "cores": 2, "threads": 1, "accelerator": "none", "torch": "2"}
    found = {"chosen": row, "rows": [row], "machine": machine | {"transformers": "5", "python": "3"}}
    write_json(tmp_path / "run" / CALIBRATION, found)
    training = {"data": {"source": "tinyshakespeare", "block": 256}, "heads_training": {"steps": 600, "batch": 8}}
    result = {"heads": {"result": {"tokens_per_step": 2.5}}}
    write_json(tmp_path / "run" / "run.json", {"config": training, "stages": result, "versions": {"medusa": "9.9"}})
    command = ["export", str(tmp_path / "run"), "--to", "vllm", "--out", str(tmp_path / "out"), "--base", "me/trunk"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed and "15 tensors" in printed and "24 of 24 positions" in printed
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    said = yaml.safe_load(front)
    assert said["base_model"] == "me/trunk" and {"medusa", "vllm", "speculative-decoding"} <= set(said["tags"])
    for words in ("3 Medusa heads of 2 residual blocks", "600 steps", "tinyshakespeare", "| 5 | 2.75 | 12.50 | 220 |"):
        assert words in body, words
    line = next(line for line in body.splitlines() if line.startswith("vllm serve me/trunk"))
    speculative = json.loads(line.partition("--speculative-config '")[2].rstrip("'"))
    assert speculative == {"method": "medusa", "model": "out", "num_speculative_tokens": 3}


@pytest.mark.parametrize("to", LAYOUTS)
def test_a_card_of_bare_heads_says_what_it_can(to: str, models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models)
    export_run(str(tmp_path / "run"), to, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in text.split("---\n", 2)[1]  # a folder is no repository
    assert "## Training" not in text and "## Measured" not in text and "## Use" in text and "None" not in text


def test_a_card_has_the_trunks_licence_and_the_benchmarks_table(models: Path, tmp_path: Path) -> None:
    trunk = tmp_path / "trunk"
    save(tiny_model("llama"), trunk)
    (trunk / "README.md").write_text("---\nlicense: mit\n---\n# A trunk\n")
    save_heads(tmp_path / "run", heads_of(Trunk.load(trunk, check=False), HeadsConfig("medusa", 1)), str(trunk))
    one = {"tokens_per_second": 100.0, "ms_per_token": 10.0, "tokens_per_step": 1.0}
    report = {
        "drafter": {"name": "medusa", "tree": {"nodes": 4}},
        "contenders": {"generate": one, "medusa": one | {"tokens_per_step": 2.125}},
        "speedups": [],
        "accepted": {"share": [], "conditional": []},
        "steps": {},
        "identical": {"equal": 4, "prompts": 4, "near_ties": [], "mismatches": []},
        "machine": {"processor": "A", "cores": 2, "threads": 1, "accelerator": "none", "torch": "2"}
        | {"transformers": "5", "python": "3"},
    }
    write_json(tmp_path / "run" / REPORT, report)
    export_run(str(tmp_path / "run"), "tgi", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n", 2)[1])["license"] == "mit"
    assert "| medusa, 4 nodes | 100.0 | 10.00 | 2.12 |" in text and "identical to generate: 4 of 4" in text


def test_a_trunk_that_the_engine_has_no_medusa_for_is_said(models: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", models, "gemma2")
    made = export_run(str(tmp_path / "run"), "tensorrt-llm", tmp_path / "out")
    assert any("gemma2" in note for note in made.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "vlm", "--out", "out"], "no format 'vlm' (did you mean vllm?)"),
        (["--out", "out"], "--to is missing"),
        (["--to", "vllm"], "--out is missing"),
        (["--to", "vllm", "--out", "out", "--dtype", "float8"], "dtype='float8'"),
        (["--to", "vllm", "--out", "run"], "exists"),
    ],
)
def test_wrong_input_is_one_line(
    options: list[str],
    words: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", models)
    assert main(["export", "run", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_without_heads_is_refused(models: Path, tmp_path: Path) -> None:
    refused(model_folder(models, "llama", torch.float64), "vllm", tmp_path / "out", "no heads")
    assert issubclass(NotExpressible, UserError) and MANIFEST == "medusa.json"
