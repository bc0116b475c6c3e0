"""The trunk of a run: the one that is named, or a new one made here; and how to see that it has not changed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from medusa import configs
from medusa.data import trunks
from medusa.errors import UserError
from medusa.machine import pick_device
from medusa.trunk import Trunk

from .checkpoints import shared
from .config import NewTrunk, TrunkConfig
from .record import TRUNK


def llama_config(new: NewTrunk, vocab_size: int, **special: int | None) -> LlamaConfig:
    """The model's configuration; ``special`` are ids of tokens such as ``eos_token_id``."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=new.hidden,
        intermediate_size=new.intermediate,
        num_hidden_layers=new.layers,
        num_attention_heads=new.heads,
        num_key_value_heads=new.kv_heads,
        max_position_embeddings=new.context,
        tie_word_embeddings=new.tied,
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | special,
    )


def new_model(new: NewTrunk, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A Llama of these sizes with random weights, for the tokenizer's vocabulary."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(new, len(tokenizer), **special))


def save_model(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save model and tokenizer beside ``folder``, then put them in its place: no reader sees a half-written one."""
    temporary = folder.parent / f".{folder.name}.new"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    made, old = temporary / "made", temporary / "old"
    try:
        made.mkdir(parents=True)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        shared(made)
        if folder.exists():
            os.replace(folder, old)
        os.replace(made, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_trunk(trunk: TrunkConfig, run: Path) -> Trunk:
    """Load the trunk that is named, or the one made in the folder ``run``.

    Its products are the library's: which are faster here is a trial, and a run that goes on must go on to the bit.
    """
    name, device = trunk.name or str(run / TRUNK), pick_device(trunk.device)
    return Trunk.load(name, dtype=trunk.dtype, device=device, revision=trunk.revision, packed=False)


def check_name(name: str) -> None:
    """Refuse a trunk folder that is missing, naming the command that makes it where there is one."""
    if is_missing(name):
        maker = maker_of(name)
        way = f"`{maker}` makes it" if maker else "give a folder saved by save_pretrained, or a hub id"
        raise UserError(f"trunk.name={name}: there is no such folder; {way}")


def is_missing(name: str) -> bool:
    """Whether ``name`` means a folder, not a hub id, and is not there."""
    path = Path(name).expanduser()
    ours = path.name == TRUNK or _is_fetched(path)
    return (ours or name.count("/") > 1 or name.startswith((".", "~", "/"))) and not path.is_dir()


def _is_fetched(path: Path) -> bool:
    """Whether `medusa trunk` would make this folder."""
    return path.parent == trunks.PARENT and path.name in trunks.SOURCES


def maker_of(trunk: str) -> str | None:
    """The command that makes the folder ``trunk``: that of a shipped recipe, or `medusa trunk`."""
    import yaml

    if _is_fetched(Path(trunk)):
        return f"medusa trunk {Path(trunk).name}"
    for name in configs.names():
        recipe = yaml.safe_load(configs.path(name).read_text(encoding="utf-8"))
        if "new" in recipe.get("trunk", {}) and Path(recipe["run"]) / TRUNK == Path(trunk):
            return f"medusa train {name}"
    return None


@contextmanager
def unchanged(trunk: Trunk, trained: str) -> Iterator[None]:
    """Prove that the trunk's weights are the same to the byte after the training of ``trained`` alone.

    Raises:
        RuntimeError: they are not, by a fault of ours.
    """
    before = digest(trunk)
    yield
    if digest(trunk) != before:
        raise RuntimeError(f"the trunk's weights changed in the training of {trained} alone")


def digest(trunk: Trunk) -> str:
    """Hash of every weight in memory; the fingerprint looks at samples."""
    return digest_weights(trunk.model.state_dict())


def digest_weights(weights: Mapping[str, Tensor]) -> str:
    """Hash of every byte of ``weights``, and of their names."""
    whole = hashlib.blake2b(digest_size=16)
    for name, value in weights.items():
        whole.update(name.encode())
        whole.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
