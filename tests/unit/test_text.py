"""Incremental detokenisation: whole characters only, the same text as decoding at once, at linear cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.infer.text import PENDING, REPLACEMENT, Detokeniser, decoder

from .fallback import byte_fallback

# 1 to 4 bytes, a combining accent, an emoji of several code points joined, a flag of two
SYMBOLS = ["a", "B", " ", "\n", "é", "e\u0301", "你", "好", "😀", "👩\u200d👩\u200d👧", "🇫🇷", "<|endoftext|>"]
TEXTS = st.lists(st.sampled_from(SYMBOLS), max_size=20).map("".join)

# Merges of "hello" and of the first two bytes of the Chinese characters, so that tokens end inside characters.
BYTES = train_bpe(["hello hello 你 你 佢 佢"] * 3, 270)
CHARS = char_tokenizer("".join(sorted({char for symbol in SYMBOLS for char in symbol})))


FALLBACK = byte_fallback("abB")


def pieces(tokenizer: Any, ids: Sequence[int], cuts: Sequence[int] = (), context: Sequence[int] = ()) -> list[str]:
    """Push ``ids`` one by one, or in groups that end at ``cuts``; the last piece is what finish gives."""
    detokeniser = Detokeniser(tokenizer, context)
    ends = [*sorted({cut for cut in cuts if cut < len(ids)}), len(ids)] if cuts else range(1, len(ids) + 1)
    starts = [0, *list(ends)[:-1]]
    out = [detokeniser.push(ids[start:end]) for start, end in zip(starts, ends, strict=False)]
    return [*out, detokeniser.finish()]


def at_once(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("tokenizer", [BYTES, CHARS, FALLBACK], ids=["bytes", "chars", "fallback"])
@given(text=TEXTS, cuts=st.lists(st.integers(1, 60), max_size=6))
@settings(max_examples=60, deadline=None)
def test_text_comes_in_whole_characters_and_joined_is_the_text(tokenizer: Any, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    out = pieces(tokenizer, ids, cuts)
    assert "".join(out) == at_once(tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in out)
    assert out[-1] == ""  # nothing was held back for the end


@given(ids=st.lists(st.integers(0, len(BYTES) - 1), max_size=60), cuts=st.lists(st.integers(1, 60), max_size=6))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_text_come_out_as_when_decoded_at_once(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(BYTES, ids, cuts)) == at_once(BYTES, ids)


@given(ids=st.lists(st.integers(0, len(FALLBACK) - 1), max_size=60), cuts=st.lists(st.integers(1, 60), max_size=6))
@settings(max_examples=100, deadline=None)
def test_the_text_does_not_depend_on_how_tokens_are_grouped(ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(FALLBACK, ids, cuts)) == "".join(pieces(FALLBACK, ids))


def test_a_character_is_held_until_its_last_byte() -> None:
    ids = BYTES.encode("a😀b")
    assert len(ids) == 6
    assert pieces(BYTES, ids) == ["a", "", "", "", "😀", "b", ""]


def test_text_goes_on_where_no_token_ends_with_a_character() -> None:
    ((first, second, third), _) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("你")[0]
    vocabulary = {token: index for index, token in enumerate([first, second, third, third + first])}
    core = Tokenizer(BPE(vocabulary, [(third, first)]))
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    ids = [0, 1, *[3, 1] * 50, 2]
    assert at_once(tokenizer, ids) == "你" * 51
    assert pieces(tokenizer, ids) == ["", "", *["你", ""] * 50, "你", ""]


def test_a_character_cut_off_by_the_limit_comes_at_the_end() -> None:
    ids = BYTES.encode("a😀")[:-1]
    assert pieces(BYTES, ids) == ["a", "", "", "", REPLACEMENT]
    assert at_once(BYTES, ids) == "a" + REPLACEMENT


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 269), max_size=12))
def test_ids_are_decoded_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    for tokenizer in (BYTES, CHARS, FALLBACK):
        own = [token for token in ids if token < len(tokenizer)]
        assert decoder(tokenizer)(own) == tokenizer.decode(own, clean_up_tokenization_spaces=False)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **options: Any) -> str:
            return super()._decode(*args, **options).upper()

    loud = Loud(tokenizer_object=BYTES.backend_tokenizer)
    ids = BYTES.encode("hello")
    assert decoder(loud)(ids) == "HELLO" and decoder(BYTES)(ids) == "hello"
    loud.decode = lambda ids, **_: "other"
    assert decoder(loud)(ids) == "other"


def test_special_tokens_are_left_out_and_do_not_join_what_they_part() -> None:
    ids = [*BYTES.encode("hello"), BYTES.eos_token_id, *BYTES.encode(" a")]
    assert "".join(pieces(BYTES, ids)) == "hello a"


def test_the_first_space_after_a_prompt_stays() -> None:
    prompt, whole = FALLBACK.encode("B"), FALLBACK.encode("B a a")
    new = whole[len(prompt) :]
    assert at_once(FALLBACK, new) == "a a"  # decoded alone it is lost
    assert "".join(pieces(FALLBACK, new, context=prompt)) == " a a"


def test_a_character_begun_in_the_prompt_is_the_completions() -> None:
    ids = BYTES.encode("a😀b")
    assert "".join(pieces(BYTES, ids[3:], context=ids[:3])) == "😀b"


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(self.tokenizer.decode(ids, **options))


@pytest.mark.parametrize("kind", ["text", "characters", "garbage"])
def test_cost_is_linear(kind: str) -> None:
    rng = random.Random(0)
    lone = BYTES.encode("😀")[0]
    ids = {
        "text": [rng.choice(BYTES.encode("hello, worlds")) for _ in range(400)],
        "characters": BYTES.encode("你好😀" * 50),
        "garbage": [lone] * 400,
    }[kind]
    counts = []
    for length in (len(ids) // 2, len(ids)):
        counting = Counting(BYTES)
        "".join(pieces(counting, ids[:length]))
        counts.append(counting.decoded)
    assert counts[1] <= 2.2 * counts[0]
    assert counts[1] <= len(ids) * PENDING * 1.5
