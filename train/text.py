"""The text of a run as token ids: rows to train on, rows and prompts held out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa.data.corpus import RandomBlocks, flatten, load_texts, pack, tokenise
from medusa.data.prompts import cut_prompts
from medusa.data.tokenizers import load_tokenizer
from medusa.trunk import Trunk

from .config import EvaluationConfig, TrainConfig

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


class Corpus:
    """Read when first asked for: a run whose stages are all made needs none of it."""

    def __init__(self, config: TrainConfig, report: Callable[[str], None]) -> None:
        self.config = config
        self.report = report

    @cached_property
    def _texts(self) -> tuple[Any, Any]:
        return load_texts(self.config.data, self.report)

    def take_tokenizer(self, trunk: Trunk) -> None:
        """Use the tokenizer that was loaded with the trunk."""
        assert trunk.tokenizer is not None, "Trunk.load brings one"
        self.tokenizer = trunk.tokenizer

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of a new trunk, made from the text or loaded by the name that the data's configuration gives."""
        return load_tokenizer(self.config.data, *self._texts)

    @cached_property
    def _heldout(self) -> list[Tensor]:
        return tokenise(self._texts[1], self.tokenizer)

    def training_rows(self, steps: int, batch: int) -> RandomBlocks:
        """Rows for ``steps`` steps, in random order."""
        tokens_T, segments_T = flatten(tokenise(self._texts[0], self.tokenizer))
        return RandomBlocks(tokens_T, segments_T, self.config.data.block, steps * batch, self.config.seed)

    def heldout_rows(self) -> datasets.Dataset:
        """All of the held-out text."""
        return pack(self._heldout, self.config.data.block)

    def heldout_prompts(self, evaluation: EvaluationConfig) -> list[list[int]]:
        """Prompts that heads are judged on and trees are grown on."""
        return cut_prompts(self._heldout, evaluation.prompts, evaluation.prompt_tokens, "judging")
