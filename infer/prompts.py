"""Held-out prompts of a run: cut from the end of the text that its ``config.yaml`` names, which training never saw."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from medusa.checkpoint import read_manifest, trunk_source
from medusa.data.corpus import DataConfig, load_texts, tokenise
from medusa.data.prompts import APART, cut_prompts
from medusa.errors import UserError, nearest

CONFIG = "config.yaml"


def heldout_prompts(folder: str | Path, count: int, length: int, *, shift: float = APART) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens from the held-out text, evenly spread; the same call gives the same ones.

    ``shift``, from 0 to 1, moves all of them by that part of their distance: a tree is chosen by other prompts (0)
    than it is then measured on.

    Raises:
        UserError: the folder has no ``config.yaml`` or no trunk, the text can't be had, or it is too short.
    """
    from transformers import AutoTokenizer

    folder = Path(folder).expanduser()
    _, heldout = load_texts(_data_config(folder / CONFIG))
    manifest = read_manifest(folder)
    tokenizer = AutoTokenizer.from_pretrained(trunk_source(folder, manifest), revision=manifest.revision)
    documents = tokenise(_some(heldout, 4 * count), tokenizer, eos=False)
    return cut_prompts(documents, count, length, shift)


def _some(dataset: Any, most: int) -> Any:
    """At most ``most`` rows of a ``datasets.Dataset``, evenly spread: a large corpus is not tokenised as a whole."""
    rows = len(dataset)
    return dataset if rows <= most else dataset.select([index * rows // most for index in range(most)])


def _data_config(path: Path) -> DataConfig:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: it names the text that held-out prompts come from") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} can't be read ({' '.join(str(error).split())}): it names the text of the run"
        ) from error
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise UserError(f"{path} has no section data: it names the text that held-out prompts come from")
    known = [field.name for field in fields(DataConfig)]
    for key in data:
        if key not in known:
            raise UserError(f"{path}: unknown key data.{key}{nearest(key, known)}: the keys are {', '.join(known)}")
    return DataConfig(**data)
