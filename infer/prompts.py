"""Held-out prompts of a run, from the end of the text that its ``config.yaml`` names, which training never saw."""

from __future__ import annotations

from pathlib import Path

from medusa.data import prompts
from medusa.data.corpus import load_texts
from medusa.data.prompts import Documents, Half

from .recipe import data_config
from .source import named_trunk


def heldout_prompts(folder: str | Path, count: int, length: int, half: Half = "benchmark") -> list[list[int]]:
    """``count`` prompts of ``length`` tokens from one half of the held-out text, evenly spread, the same each time.

    Of conversations they are what stands before an answer, ``length`` tokens at most.

    Heads are judged, and trees chosen, by prompts of the half "judging": those of "benchmark" share no token with them.

    Raises:
        UserError: the folder has no ``config.yaml`` or no trunk, the text can't be had, or it is too short.
    """
    return prompts.heldout_prompts(heldout_documents(folder), count, length, half)


def heldout_documents(folder: str | Path) -> Documents:
    """All held-out documents, the very ones that training cuts in halves. Raises as heldout_prompts."""
    from transformers import AutoTokenizer

    folder = Path(folder).expanduser()
    config = data_config(folder)
    train, heldout = load_texts(config)
    name, revision = named_trunk(folder)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    return prompts.heldout_documents(heldout, tokenizer, config, first=len(train))
