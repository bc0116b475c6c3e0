"""The data of a run as token ids, checked: rows to train on, rows and prompts held out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from medusa.data.check import check_documents, check_examples, shared, warnings
from medusa.data.corpus import RandomBlocks, load_texts, pack, tokenise
from medusa.data.examples import Examples, make_examples
from medusa.data.packing import PackedRows, TiledBlocks, filler_id, pack_examples, text_rows
from medusa.data.prompts import beginnings, heldout_prompts
from medusa.data.records import format_of
from medusa.data.sources import answered_by
from medusa.data.tokenizers import load_tokenizer
from medusa.errors import UserError
from medusa.trunk import Trunk

from .config import EvaluationConfig, TrainConfig
from .training import OwnText

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


class Corpus:
    """Read when first asked for: a run whose stages are all made needs none of it."""

    def __init__(self, config: TrainConfig, report: Callable[[str], None]) -> None:
        self.config = config
        self.report = report
        self._said: set[str] = set()
        self._trunk: Trunk | None = None

    @cached_property
    def _texts(self) -> tuple[Any, Any]:
        return load_texts(self.config.data, self.report)

    @property
    def _plain(self) -> bool:
        """Whether the data are texts, of which every token is learnt."""
        return format_of(self._texts[0]) == "text"

    def take_tokenizer(self, trunk: Trunk) -> None:
        """Use the tokenizer that was loaded with the trunk."""
        assert trunk.tokenizer is not None, "Trunk.load brings one"
        self.tokenizer, self._trunk = trunk.tokenizer, trunk

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That of a new trunk, made from the text or loaded by the name that the data's configuration gives."""
        return load_tokenizer(self.config.data, *self._texts)

    @cached_property
    def _heldout(self) -> Any:
        """Token ids of texts, or examples."""
        train, heldout = self._texts
        if self._plain:
            return tokenise(heldout, self.tokenizer)
        return make_examples(heldout, self.tokenizer, self.config.data, first=len(train))

    @cached_property
    def _examples(self) -> Examples:
        """Those to train on, checked."""
        examples = make_examples(self._texts[0], self.tokenizer, self.config.data)
        check_examples(examples, self.tokenizer)
        return examples

    def training_rows(self, steps: int, batch: int) -> RandomBlocks | TiledBlocks | PackedRows:
        """Rows for ``steps`` steps, in random order: windows of a text, or whole examples packed.

        Raises:
            UserError: data that can't be trained on (see medusa.data.check).
        """
        data, samples, seed = self.config.data, steps * batch, self.config.seed
        if self._plain:
            documents = tokenise(self._texts[0], self.tokenizer)
            check_documents(documents, self.tokenizer)
            return text_rows(documents, data, samples, seed)
        filler = filler_id(self.tokenizer)
        rows = PackedRows(self._examples.items, data.block, samples, seed, filler=filler, too_long=data.too_long)
        found = warnings(self._examples, rows.layout)
        if same := shared(self._examples, self._heldout):
            found.append(f"{same:,} of {len(self._heldout):,} held-out examples are also trained on")
        made_by = answered_by(data.source) if format_of(self._texts[0]) == "ids" else None
        if made_by and self._trunk and made_by != self._trunk.fingerprint():
            found.append("the answers were given by another trunk than this one: heads learn what that one says")
        for line in found:
            if line not in self._said:  # each stage asks for rows
                self.report(f"data: {line}")
        self._said.update(found)
        return rows

    def beginnings(self, own: OwnText) -> list[list[int]]:
        """Beginnings from the training text, which the trunk continues. No EOS ends them.

        Raises:
            UserError: data that are no plain texts, or too few.
        """
        if not self._plain:
            raise UserError(
                f"own_text with {format_of(self._texts[0])} data: texts alone are continued; let the trunk answer by"
                " `medusa distill`, give that as data.source, and leave own_text out"
            )
        documents = tokenise(self._texts[0], self.tokenizer, eos=False)
        check_documents(documents, self.tokenizer)
        return beginnings(documents, own.prompts, own.prompt_tokens)

    def heldout_rows(self) -> datasets.Dataset:
        """All that is held out."""
        data = self.config.data
        if self._plain:
            return pack(self._heldout, data.block)
        return pack_examples(self._heldout.items, data.block, filler_id(self.tokenizer), data.too_long)

    def heldout_prompts(self, evaluation: EvaluationConfig) -> list[list[int]]:
        """Prompts that heads are judged on and trees are grown on; of conversations at most ``prompt_tokens`` long."""
        documents = self._heldout if self._plain else self._heldout.items
        return heldout_prompts(documents, evaluation.prompts, evaluation.prompt_tokens, "judging")
