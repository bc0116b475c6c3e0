"""Tokenizers that are ours: character level and a trained byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from medusa.errors import UserError, nearest

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from .corpus import DataConfig

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257  # the 256 bytes and END_OF_TEXT


def char_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Build the character tokenizer of ``text``: its sorted distinct characters and nothing else (no pad, EOS or unk).

    For tinyshakespeare: 65 symbols, id 0 the newline. Raises UserError for an empty text.
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    if not text:
        raise UserError("an empty text has no characters to build a tokenizer from: give a text that is not empty")
    # WordLevel without an unk token refuses what it doesn't know; BPE without merges would drop it silently.
    core = Tokenizer(WordLevel({char: index for index, char in enumerate(sorted(set(text)))}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")  # Oniguruma: (?m:.) also matches newlines
    core.decoder = decoders.Fuse()
    return _as_transformers(core)


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on ``texts``: every text can be encoded; ``<|endoftext|>`` (id 0) is both EOS and BOS.

    A small corpus may hold fewer merges than asked for: ``len(tokenizer)`` is the size that came out.
    Raises UserError when ``vocab_size`` can't hold the 256 bytes and the EOS.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    if vocab_size < SMALLEST_BPE:
        raise UserError(
            f"vocab_size {vocab_size} can't hold the 256 bytes and {END_OF_TEXT}: make it {SMALLEST_BPE} or more"
        )
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return _as_transformers(core, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def load_tokenizer(
    config: DataConfig, train: datasets.Dataset, heldout: datasets.Dataset, trunk: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``config.tokenizer`` names: "trunk" (saved with ``trunk``), "char", "bpe", or another.

    "char" takes its alphabet from both splits, so that held-out text never holds an unknown character; "bpe" is trained
    on ``train`` alone. Raises UserError when a name or folder has no tokenizer, or one can't be made of this text.
    """
    if config.tokenizer in ("char", "bpe") and "text" not in train.column_names:
        raise UserError(
            f"tokenizer {config.tokenizer!r} is made from plain texts, and {config.source!r} holds none: name one that"
            " exists"
        )
    if config.tokenizer == "char":
        alphabet: set[str] = set()
        for split in (train, heldout):
            for text in split["text"]:
                alphabet.update(text)
        return char_tokenizer("".join(alphabet))
    if config.tokenizer == "bpe":
        return train_bpe(train["text"], config.vocab_size)
    if config.tokenizer == "trunk" and trunk is None:
        raise UserError("data.tokenizer='trunk' and no trunk: name one (--trunk), or take data.tokenizer=char or bpe")
    return _pretrained(cast(str, trunk) if config.tokenizer == "trunk" else config.tokenizer)


def _as_transformers(core: object, **special: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    # Clean-up would eat the space before a full stop: decoding must give back the very text.
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **special)


def _pretrained(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        hint = nearest(name, ("trunk", "char", "bpe"))
        raise UserError(
            f"no tokenizer can be loaded from {name!r}{hint}: use trunk, char, bpe, a folder or a hub id"
        ) from error
