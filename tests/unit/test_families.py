"""Any trunk: every family that is driven gives exactly its own greedy text, every other is refused by name.

docs/trunks.md is made here: ``MEDUSA_WRITE_DOCS=1 pytest tests/unit/test_families.py``.
"""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from medusa.decoding import Request, generate_ids
from medusa.drafters.base import Drafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.families import FAMILIES
from medusa.fingerprint import fingerprint
from medusa.heads import HeadsConfig
from medusa.selfcheck import tree_error
from medusa.testing import VOCAB, ScriptedDrafter, memorising_heads, plain_greedy, random_heads, tiny_model
from medusa.tree import Topology
from medusa.trunk import Trunk

from .drafting import UNTRAINED, untrained

DOCS = Path(__file__).resolve().parents[2] / "docs" / "trunks.md"
TOKENS = 16
SEEDS = {"smollm3": 0, "gemma4": 0}  # of the others 2: their texts are lively
# Ragged; inside the window of 8 tokens, across its edge and beyond it.
PROMPTS = [[3], [0, 17, 0, 5, 33, 60], [11, 0, 52, 4, 4, 19, 27, 35, 0, 61, 50]]
# All that reads more of a trunk than its states and logits goes with every family, the others in turn.
DRAFTERS = ("honest", "lying", "random heads", "memorising heads", "draft tree", "cut", "eagle", "eagle 3")
OTHERS = tuple(name for name in UNTRAINED if name not in DRAFTERS)
WINDOWED = [name for name, (_, _, config) in FAMILIES.items() if "sliding_window" in config]


@cache
def trunk_of(family: str) -> Trunk:
    return Trunk(tiny_model(family, seed=SEEDS.get(family, 2)))


@cache
def texts_of(family: str) -> list[list[int]]:
    return [plain_greedy(trunk_of(family), prompt, TOKENS) for prompt in PROMPTS]


def drafter_of(family: str, name: str, rows: list[int]) -> Drafter:
    trunk, texts = trunk_of(family), texts_of(family)
    if name in ("honest", "lying"):
        return ScriptedDrafter([texts[row] for row in rows], honesty=0.9 if name == "honest" else 0.3, size=8)
    if name in UNTRAINED:
        return untrained(trunk, name)
    config = HeadsConfig("hydra", num=3)
    if name == "random heads":
        return MedusaDrafter(random_heads(trunk, config), Topology.full([3, 2]))
    known = [prompt + text for prompt, text in zip(PROMPTS[:1], texts, strict=False)]
    return MedusaDrafter(memorising_heads(trunk, config, known), Topology.chain(3))


def decoded(family: str, drafter: str, rows: list[int]) -> list[list[int]]:
    requests = [Request(PROMPTS[row], TOKENS) for row in rows]
    return generate_ids(trunk_of(family), drafter_of(family, drafter, rows), requests)


@cache
def generated(family: str) -> list[list[int]]:
    """What the library's own loop makes of the prompts."""
    model = trunk_of(family).model
    outputs = [model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS) for prompt in PROMPTS]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, PROMPTS, strict=True)]


@cache
def batches(family: str) -> dict[str, list[list[int]]]:
    """The prompts as one ragged batch, by each of the family's drafters."""
    turn = list(FAMILIES).index(family)
    others = [OTHERS[(2 * turn + shift) % len(OTHERS)] for shift in range(2)]
    return {drafter: decoded(family, drafter, list(range(len(PROMPTS)))) for drafter in (*DRAFTERS, *others)}


# What is driven.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_models_own(family: str) -> None:
    assert generated(family) == texts_of(family)
    assert len({token for text in texts_of(family) for token in text}) > 5  # one token repeated would prove little
    for drafter, texts in batches(family).items():
        assert texts == texts_of(family), drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_batch_is_what_it_is_alone(family: str) -> None:
    for row in range(len(PROMPTS)):
        assert decoded(family, "honest", [row]) == [batches(family)["honest"][row]]


@pytest.mark.parametrize("family", WINDOWED)
def test_the_texts_run_past_the_window(family: str) -> None:
    # without the windows the text would be another: they are what makes it exact
    trunk = Trunk(tiny_model(family, seed=SEEDS.get(family, 2)))
    assert 8 in trunk.windows.values()
    trunk.windows = dict.fromkeys(trunk.windows)
    texts = texts_of(family)
    drafter = ScriptedDrafter(texts, honesty=0.9, size=8)
    assert generate_ids(trunk, drafter, [Request(prompt, TOKENS) for prompt in PROMPTS]) != texts
    assert tree_error(trunk) > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek3", "gpt_oss"])
def test_experts_in_fused_kernels(family: str) -> None:
    trunk = Trunk(tiny_model(family, dtype=torch.float32, experts_implementation="grouped_mm"))
    assert trunk.config._experts_implementation == "grouped_mm"
    assert tree_error(trunk) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fingerprint_read_off_the_files(family: str, tmp_path: Path) -> None:
    # as for a quantised or offloaded load; the library may hold tensors otherwise than files do
    tiny_model(family, dtype=torch.float32).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = fingerprint(model)
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="any"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= -1  # what is in memory says nothing
    assert fingerprint(model) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), zip(FAMILIES, cycle(("medusa", "root", "hydra"))))
def test_many_prompts(family: str, kind: str) -> None:
    rng = random.Random(family)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    trunk = Trunk(tiny_model(family, seed=3))
    texts = [plain_greedy(trunk, prompt, 24) for prompt in prompts]
    known = [prompt + text for prompt, text in zip(prompts[:2], texts, strict=False)]
    heads = memorising_heads(trunk, HeadsConfig(kind, num=4, layers=2), known)
    for drafter in (ScriptedDrafter(texts, honesty=0.7, size=12), MedusaDrafter(heads, Topology.full([3, 2, 2]))):
        assert generate_ids(trunk, drafter, [Request(prompt, 24) for prompt in prompts]) == texts


# What is refused: by the config and the class that would be made, before any weights are looked for.

SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "BLOOM": ("Bloom", {}),
    "MPT": ("Mpt", {}),
    "GPT-Neo": ("GPTNeo", {}),
    "Falcon with ALiBi": ("Falcon", {"alibi": True}),
    "XLNet": ("XLNet", {}),
    "Mamba": ("Mamba", {}),
    "Mamba 2": ("Mamba2", {}),
    "RWKV": ("Rwkv", {}),
    "RecurrentGemma": ("RecurrentGemma", {}),
    "Qwen3-Next": ("Qwen3Next", {}),
    "Qwen3.5": ("Qwen3_5Text", {}),
    "Jamba": ("Jamba", {}),
    "Falcon-H1": ("FalconH1", {}),
    "Granite 4 hybrid": ("GraniteMoeHybrid", {}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"], **SMALL}),
    "Llama 4": ("Llama4Text", {}),
    "DeepSeek V3.2": ("DeepseekV32", {}),
    "T5": ("T5", {}),
    "BART": ("Bart", {}),
    "Whisper": ("Whisper", {}),
    "Gemma 3, vision": ("Gemma3", {}),
    "Qwen2-VL": ("Qwen2VL", {}),
    "LLaVA": ("Llava", {}),
    "Qwen2-Audio": ("Qwen2Audio", {}),
    "Phi-4 multimodal": ("Phi4Multimodal", {}),
    "GIT": ("Git", {}),
}


def refusal(name: str, folder: Path) -> tuple[str, str]:
    """The model type of a refused family, and what is said of it."""
    prefix, own = REFUSED[name]
    config = getattr(transformers, f"{prefix}Config")(**own)
    config.save_pretrained(folder)
    with pytest.raises(UserError) as caught:
        Trunk.load(folder)
    message, beginning = str(caught.value), f"trunk {folder}: model type '{config.model_type}' "
    assert message.startswith(beginning) and "\n" not in message
    return config.model_type, message.removeprefix(beginning)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_driven_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    _, message = refusal(name, tmp_path)
    assert "use a trunk" in message or "give its text model" in message  # the way out


# The table.


def attention_of(trunk: Trunk) -> str:
    windows = set(trunk.windows.values())
    span = "full" if windows == {None} else "full and sliding" if None in windows else "sliding"
    keys, values = trunk.layers[0].keys, trunk.layers[0].values
    if keys.size != values.size:
        kept = "keys and values of different size"
    elif keys.heads == trunk.config.num_attention_heads:
        kept = "one key per query head"
    else:
        kept = "one key head" if keys.heads == 1 else "grouped"
    return f"{span}, {kept}, {trunk.config._attn_implementation}"


def positions_of(trunk: Trunk) -> str:
    rotary = any(getattr(trunk.config, key, None) is not None for key in ("rope_parameters", "rotary_dim"))
    return "rotary" if rotary else "learned"


def logits_of(trunk: Trunk) -> str:
    steps = ["projection"]
    if trunk.model.get_output_embeddings().bias is not None:
        steps.append("bias")
    words = {"logit_scale": "scale", "logits_scaling": "division", "final_logit_softcapping": "softcap"}
    return ", ".join(steps + [word for key, word in words.items() if getattr(trunk.config, key, None) is not None])


def verdict_of(family: str) -> str:
    wrong = sum(texts != texts_of(family) for texts in (*batches(family).values(), generated(family)))
    return "exact" if wrong == 0 else f"{wrong} drafters differ"


def rows_driven() -> list[list[str]]:
    rows = []
    for family in sorted(FAMILIES, key=lambda family: FAMILIES[family][0].lower()):
        trunk = trunk_of(family)
        form = [attention_of(trunk), positions_of(trunk), logits_of(trunk)]
        dtype = str(trunk.dtype).removeprefix("torch.")
        rows.append([FAMILIES[family][0], f"`{trunk.family}`", *form, dtype, verdict_of(family)])
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


OPTIONS = {
    "`dtype`": "exact in fp64 and fp32. In bf16 and fp16 a tree and a single token are rounded differently, so near"
    " ties may fall otherwise than in `model.generate`, as they may between any two ways to batch",
    "`device_map`": "respected: the model stays where it puts it, offloaded layers too. Not together with `device`",
    "`adapter`": "a peft adapter that changes layers (LoRA, DoRA, IA3, saved modules), put on the trunk; or, as the"
    " trunk, a folder of an adapter alone, which names its base. Exact to the adapted model; heads made for the base"
    " fit. No prompt tuning",
    "`quantization_config`": "weights in few bits (torchao int8, bitsandbytes 4-bit) are as exact as the type they"
    " compute in. Where activations are rounded to 8 bits too, a last-bit difference may grow to a step of those 8"
    " bits, as in bf16; bitsandbytes 8-bit is refused in fp32 unless `llm_int8_threshold=0`. Heads need a vocabulary"
    " projection that is not quantised, the libraries' default",
    "`gguf_file`": "exact to what the file holds",
    "`attn_implementation`": "`sdpa` or `eager`",
    "`packed`": "on a processor linear layers in fp32 and bf16 keep a second copy of their weights, packed for few"
    " rows, where that is faster and takes no more than half of the free memory; `True` always, `False` never. They are"
    " rounded otherwise than `model.generate`'s, by some units in the last place",
    "`trust_remote_code`, `subfolder`, `token`, `cache_dir`": "for config, weights and tokenizer",
}

PAGE = """# Trunks

What can be the trunk, and what can't. Made by `tests/unit/test_families.py`, which fails when this page is stale; make
it anew with `MEDUSA_WRITE_DOCS=1 pytest tests/unit/test_families.py`.

## Driven

Each family as a tiny random model, windows of {window} tokens where it has any, {prompts} ragged prompts, texts that
run past the windows. *Exact*: as a batch and alone, with drafts that are right, wrong, of random heads and of heads
that know the text, the greedy text is that of whole forwards without a cache and that of `model.generate`, token for
token. Heads fit all of them. Other families load too, where the check that every trunk passes at load finds no
difference.

{driven}

## Refused

By name and in one line, before any weights are read.

{refused}

Refused as well: models without a language-modelling head, `attn_implementation` other than `sdpa` and `eager` (no other
takes the mask of a token tree), and any model that the check at load finds to differ.

## Ways to load

`Trunk.load` hands what it does not know itself to `from_pretrained`.

{options}

Heads know their trunk by a fingerprint, which is the same in any type, with any adapter, offloaded or quantised at load
(read off the source's `*.safetensors` then). What was *saved* quantised, a GGUF file too, is a trunk of its own; a GGUF
file in fp32 or fp16 is not.
"""


def test_the_page_is_what_was_found(tmp_path: Path) -> None:
    refused = [[name, *refusal(name, tmp_path / str(number))] for number, name in enumerate(REFUSED)]
    page = PAGE.format(
        window=8,
        prompts=len(PROMPTS),
        driven=table(["family", "type", "attention", "positions", "logits", "tested in", "verdict"], rows_driven()),
        options=table(["option", "what holds"], [list(item) for item in OPTIONS.items()]),
        refused=table(["family", "type", "why"], [[name, f"`{kind}`", why] for name, kind, why in refused]),
    )
    if os.environ.get("MEDUSA_WRITE_DOCS"):
        DOCS.write_text(page, encoding="utf-8")
    found = DOCS.read_text(encoding="utf-8") if DOCS.is_file() else ""
    assert found == page, "docs/trunks.md is stale: MEDUSA_WRITE_DOCS=1 pytest tests/unit/test_families.py"
