"""Tokenizers: the alphabet is exact, decoding gives back the text, nothing unknown is dropped, AutoTokenizer agrees."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from medusa.data.corpus import DataConfig
from medusa.data.tokenizers import END_OF_TEXT, char_tokenizer, load_tokenizer, train_bpe
from medusa.encoding import encode
from medusa.errors import UserError

ALPHABET = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase  # tinyshakespeare's
AWKWARD = ["", "\n", " ", "  two  and   three ", "\n\n  a\n b \n", "a .b ,c 's n't", "don't !", ALPHABET]


def split(*texts: str) -> Dataset:
    return Dataset.from_dict({"text": list(texts)})


def bpe_without_merges(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer that silently drops what it doesn't know."""
    core = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_char_ids_are_the_sorted_characters() -> None:
    tokenizer = char_tokenizer("ba\ncab")
    assert tokenizer.get_vocab() == {"\n": 0, "a": 1, "b": 2, "c": 3}
    assert len(char_tokenizer(ALPHABET)) == 65
    assert tokenizer.all_special_tokens == []
    assert tokenizer.eos_token_id is tokenizer.pad_token_id is tokenizer.unk_token_id is None


@pytest.mark.parametrize("text", AWKWARD)
def test_char_round_trip(text: str) -> None:
    tokenizer = char_tokenizer(ALPHABET)
    ids = encode(tokenizer, text, add_special_tokens=True)
    assert ids == [sorted(ALPHABET).index(char) for char in text]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["\r\n", "\t \x0b\u2028\u00a0", "e\u0301é", "日本 🐙🏽"])
def test_char_keeps_any_unicode(text: str) -> None:
    tokenizer = char_tokenizer(text)
    ids = encode(tokenizer, text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_char_loads_back_even_beside_a_llama_config(tmp_path: Path) -> None:
    char_tokenizer(ALPHABET).save_pretrained(tmp_path)
    LlamaConfig(vocab_size=65).save_pretrained(tmp_path)  # AutoTokenizer must not take Llama's own class for it
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(AWKWARD)
    assert encode(loaded, text, add_special_tokens=True) == encode(char_tokenizer(ALPHABET), text)
    assert loaded.decode(encode(loaded, text)) == text
    assert len(loaded) == 65
    assert loaded.all_special_tokens == []


def test_empty_text_has_no_char_tokenizer() -> None:
    with pytest.raises(UserError, match="empty text"):
        char_tokenizer("")


@pytest.mark.parametrize("build", [char_tokenizer, bpe_without_merges])
@pytest.mark.parametrize(
    ("text", "char", "offset"), [("ab€a", "€", 2), ("\tab", r"\\t", 0), ("ba\u0301é", "\u0301", 2)]
)
def test_unknown_character_is_named(build, text: str, char: str, offset: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=f"'{char}'.* at offset {offset} is not among the 3 symbols") as error:
        encode(build("ab "), text)
    assert "\n" not in str(error.value)


def test_unknown_after_a_word_start_mark_is_still_unknown() -> None:
    core = Tokenizer(models.BPE({"▁": 0, "a": 1}, []))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert encode(tokenizer, "a a") == [0, 1, 0, 1]
    with pytest.raises(UserError, match="offset 3"):
        encode(tokenizer, "aa b")


def test_unk_token_is_left_to_the_tokenizer() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    assert encode(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?"), "a b") == [0, 1]


def test_bpe_encodes_everything_and_ends_with_its_eos() -> None:
    tokenizer = train_bpe(["the cat the hat the bat"] * 3, 270)
    assert len(tokenizer) <= 270
    assert len(encode(tokenizer, "the the")) < len("the the")
    for text in [*AWKWARD, "日本 🐙🏽\t\r\n", "e\u0301"]:
        assert tokenizer.decode(encode(tokenizer, text)) == text
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT
    assert tokenizer.eos_token_id not in encode(tokenizer, "the end", add_special_tokens=True)


def test_bpe_loads_back(tmp_path: Path) -> None:
    tokenizer = train_bpe(["the cat the hat the bat"], 260)
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=260).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "  the cat\n\nsat é "
    assert encode(loaded, text, add_special_tokens=True) == encode(tokenizer, text)
    assert loaded.decode(encode(loaded, text)) == text
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_bpe_needs_room_for_the_bytes() -> None:
    assert len(train_bpe(["aaaa"], 257)) == 257
    with pytest.raises(UserError, match="256 can't hold"):
        train_bpe(["aaaa"], 256)


def test_load_tokenizer_kinds(tmp_path: Path) -> None:
    train, heldout = split("ab", "ba"), split("cz")
    char = load_tokenizer(DataConfig(tokenizer="char"), train, heldout)
    assert sorted(char.get_vocab()) == ["a", "b", "c", "z"]
    assert len(load_tokenizer(DataConfig(tokenizer="bpe", vocab_size=257), train, heldout)) == 257
    char.save_pretrained(tmp_path)
    assert len(load_tokenizer(DataConfig(), train, heldout, trunk=str(tmp_path))) == 4
    assert len(load_tokenizer(DataConfig(tokenizer=str(tmp_path)), train, heldout, trunk="elsewhere")) == 4


def test_load_tokenizer_refuses() -> None:
    with pytest.raises(UserError, match="and no trunk: name one"):
        load_tokenizer(DataConfig(), split("a"), split("b"))
    with pytest.raises(UserError, match=r"'chars' \(did you mean char\?\)"):
        load_tokenizer(DataConfig(tokenizer="chars"), split("a"), split("b"))
