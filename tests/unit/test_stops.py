"""Stop strings: found where transformers finds them, wherever they lie; what is certain, and what is left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.infer.stops import Found, StopFinder
from medusa.infer.transcript import Transcript

from .fallback import byte_fallback

LETTERS = "ab"
BYTES = train_bpe(["hello hello 你 你 佢 佢 ab abab bab"] * 3, 275)
CHARS = char_tokenizer("abcdef 你\n")
END = "<|endoftext|>"


FALLBACK = byte_fallback("abcdef")


def naive(stops: Sequence[str], before: str, text: str) -> tuple[int, str] | None:
    """The first character at which a stop ends, and the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if (before + text[:end]).endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3)


@given(
    stops=STOPS,
    before=st.text(LETTERS, max_size=6),
    text=st.text(LETTERS, max_size=16),
    cuts=st.lists(st.integers(0, 16), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_the_first_end_is_found_however_the_text_comes(
    stops: list[str], before: str, text: str, cuts: list[int]
) -> None:
    finder = StopFinder(stops, before)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    start, found = 0, None
    for end in ends:
        hit = finder.push(text[start:end])
        if hit is not None:
            found = (start + hit.end, hit.stop)
            break
        start = end
    assert found == naive(stops, before, text)


@given(stops=STOPS, text=st.text(LETTERS, max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_may_begin_a_stop_is_counted(stops: list[str], text: str) -> None:
    finder = StopFinder(stops)
    if finder.push(text) is not None:
        return
    beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
    assert finder.begun == max((len(part) for part in beginnings if text.endswith(part)), default=0)


def test_of_strings_that_end_together_the_longest_is_found() -> None:
    assert StopFinder(["b", "ab", "cb"]).push("xab") == Found("ab", 3)
    assert StopFinder(["ab", "b"], "a").push("b") == Found("ab", 1)
    assert StopFinder(["a"], "a").push("b") is None  # it ended in what precedes


def scripted(tokenizer: Any, seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    tokens = (
        range(len(tokenizer)) if tokenizer is BYTES else tokenizer.encode("ab ab 你 bab\n", add_special_tokens=False)
    )
    whole = [token for token in tokens if "\ufffd" not in tokenizer.decode([token])]  # no stray bytes
    return [rng.choice(whole) for _ in range(count)]


@pytest.mark.parametrize("tokenizer", [BYTES, CHARS, FALLBACK], ids=["bytes", "chars", "fallback"])
@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_row_stops_where_transformers_stops_it(tokenizer: Any, seed: int, data: st.DataObject) -> None:
    ids = scripted(tokenizer, seed, 24)
    if data.draw(st.booleans()):  # characters over several tokens
        ids[3:3] = tokenizer.encode("你a", add_special_tokens=False)
    prompt, new = ids[:6], ids[6:]
    text = tokenizer.decode(ids)
    starts = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))
    stops = [text[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    stops = [stop for stop in stops if "\ufffd" not in stop] or ["zzz" if tokenizer is BYTES else "\n\n\n"]
    criterion = StopStringCriteria(tokenizer, stops)
    transcript = Transcript(tokenizer, prompt, stops)
    expected = None
    for count, token in enumerate(new, start=1):
        transcript.push([token])
        if bool(criterion(torch.tensor([prompt + new[:count]]), None)):
            expected = count
            break
        assert transcript.stop is None
    assert (transcript.stop is not None) == (expected is not None)
    assert transcript.ids == new[:expected]
    if transcript.stop is not None:
        transcript.end()
        transcript.take()
        said = "".join(transcript.pieces)
        whole = tokenizer.decode(ids[: 6 + len(transcript.ids)])
        if "\ufffd" not in whole and END not in whole:
            assert (tokenizer.decode(prompt).rstrip("\ufffd") + said).endswith(transcript.stop)


@pytest.mark.parametrize("stop", [" 你", "b 你", "ab 你", "你", "你a"])
@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_string_may_begin_in_a_prompt_that_ends_within_a_character(stop: str, cut: int) -> None:
    # the space before the character is the first thing in a short window of the prompt, where decoding drops it
    ids = FALLBACK.encode("ab ab 你ab", add_special_tokens=False)
    cut = len(ids) - cut
    criterion, transcript = StopStringCriteria(FALLBACK, [stop]), Transcript(FALLBACK, ids[:cut], [stop])
    for end in range(cut + 1, len(ids) + 1):
        transcript.push([ids[end - 1]])
        if bool(criterion(torch.tensor([ids[:end]]), None)):
            break
        assert transcript.stop is None
    else:
        assert transcript.stop is None
        return
    assert transcript.stop == stop and len(transcript.ids) == end - cut


def run(tokenizer: Any, ids: Sequence[int], stops: Sequence[str], include: bool, prompt: Sequence[int] = ()) -> Any:
    """Push one by one; return the transcript and what was certain of text and ids after each push."""
    transcript = Transcript(tokenizer, list(prompt) or [0], stops, include_stop=include)
    certain = []
    for token in ids:
        transcript.push([token])
        transcript.take()
        certain.append(("".join(transcript.pieces), transcript.ids[: transcript.sure]))
        if transcript.stop is not None:
            break
    transcript.end()
    transcript.take()
    return transcript, certain


def text_of(transcript: Transcript) -> str:
    return "".join(transcript.pieces)


@given(text=st.text("ab ", min_size=1, max_size=20), stops=STOPS, include=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_text_and_ids_end_at_the_stop_and_nothing_beyond_was_told(
    text: str, stops: list[str], include: bool, seed: int
) -> None:
    rng = random.Random(seed)
    pieces = {token: BYTES.decode([token]) for token in range(len(BYTES))}
    ids = BYTES.encode(text)
    if rng.random() < 0.5:  # another way to cut the same text
        ids = [token for character in text for token in BYTES.encode(character)]
    transcript, certain = run(BYTES, ids, stops, include, prompt=BYTES.encode("zz"))
    found = naive(stops, "", text)
    end = len(text) if found is None else found[0] - (0 if include else len(found[1]))
    assert (text_of(transcript), transcript.stop) == (text[:end], None if found is None else found[1])
    lengths = [len(pieces[token]) for token in ids]
    covering = next(n for n in range(len(ids) + 1) if sum(lengths[:n]) >= end)
    assert transcript.ids == ids[:covering]
    for said, sure in certain:
        assert text_of(transcript).startswith(said)
        assert transcript.ids[: len(sure)] == sure
    told, _ = certain[-1]
    assert found is None or told == text_of(transcript)


def test_only_what_may_still_be_a_stop_waits() -> None:
    ids = BYTES.encode("x") + [token for character in "abacus" for token in BYTES.encode(character)]
    _, certain = run(BYTES, ids, ["abab"], include=False)
    assert [said for said, _ in certain] == ["x", "x", "x", "x", "xabac", "xabacu", "xabacus"]
    _, certain = run(BYTES, ids, ["abab"], include=True)
    assert [said for said, _ in certain] == ["x", "xa", "xab", "xaba", "xabac", "xabacu", "xabacus"]


def test_a_stop_inside_a_token_cuts_its_text_but_not_the_token() -> None:
    ids = [*BYTES.encode("b"), *BYTES.encode("hello")]
    assert len(ids) == 2
    for include, text, count in ((True, "bhel", 2), (False, "bh", 2)):
        transcript, _ = run(BYTES, ids, ["el"], include)
        assert (text_of(transcript), len(transcript.ids)) == (text, count)
    transcript, _ = run(BYTES, ids, ["hel"], include=False)
    assert (text_of(transcript), transcript.ids) == ("b", ids[:1])


def test_a_stop_may_begin_in_the_prompt() -> None:
    prompt, ids = BYTES.encode("xa"), BYTES.encode("b")
    transcript, _ = run(BYTES, ids, ["ab"], include=True, prompt=prompt)
    assert (text_of(transcript), transcript.stop, transcript.ids) == ("b", "ab", ids)
    transcript, _ = run(BYTES, ids, ["ab"], include=False, prompt=prompt)
    assert (text_of(transcript), transcript.stop, transcript.ids) == ("", "ab", [])
    transcript, _ = run(BYTES, ids, ["xa"], include=True, prompt=prompt)
    assert transcript.stop is None
    end = BYTES.convert_tokens_to_ids(END)
    transcript, _ = run(BYTES, ids, [f"{END}b"], include=True, prompt=[end])
    assert transcript.stop == f"{END}b"
    *prompt, last = BYTES.encode("x你")  # half a character of the prompt's is finished by the row
    transcript, _ = run(BYTES, [last], ["x你"], include=True, prompt=prompt)
    assert (text_of(transcript), transcript.stop) == ("你", "x你")


def test_a_special_token_ends_the_text_that_leaves_it_out() -> None:
    end = BYTES.convert_tokens_to_ids(END)
    ids = [*BYTES.encode("hello"), end]
    transcript, _ = run(BYTES, ids, [END], include=True)
    assert (text_of(transcript), transcript.ids, transcript.stop) == ("hello", ids, END)
    transcript, _ = run(BYTES, ids, [END], include=False)
    assert (text_of(transcript), transcript.ids) == ("hello", ids[:-1])
    transcript, certain = run(BYTES, [*ids, *BYTES.encode("b")], [f"lo{END}b"], include=False)
    assert (text_of(transcript), transcript.ids) == ("hel", ids[:1])  # "hello" is one token
    assert [said for said, _ in certain] == ["hel"] * 3


@pytest.mark.parametrize(
    ("stops", "found"),
    [(["|"], None), (["text|>"], None), ([END], END), (["|>", END], END), ([f"llo{END}"], f"llo{END}")],
)
def test_an_eos_is_no_stop_by_a_part_of_its_name(stops: list[str], found: str | None) -> None:
    end = BYTES.convert_tokens_to_ids(END)
    ids = [*BYTES.encode("hello"), end]
    for include in (True, False):
        transcript = Transcript(BYTES, [5], stops, include, frozenset([end, 7]))
        transcript.push(ids)
        transcript.end()
        transcript.take()
        assert transcript.stop == found
        assert transcript.ids == (ids if include or found is None else ids[:1])
        assert text_of(transcript) == ("he" if found == f"llo{END}" and not include else "hello")
        other = Transcript(BYTES, [5], stops, include, frozenset([7]))  # no EOS: it stops, as in transformers
        other.push(ids)
        assert other.stop is not None


def test_half_a_character_before_a_special_stop_is_told() -> None:
    ids = [*BYTES.encode("a"), BYTES.encode("好")[0], BYTES.convert_tokens_to_ids(END)]
    for include, count in ((True, 3), (False, 2)):
        transcript, _ = run(BYTES, ids, [END], include)
        assert (text_of(transcript), len(transcript.ids)) == ("a\ufffd", count)
        assert text_of(transcript) == BYTES.decode(ids, skip_special_tokens=True)


def test_a_special_token_before_what_is_cut_is_cut_too() -> None:
    end = BYTES.convert_tokens_to_ids(END)
    ids = [*BYTES.encode("b"), end, *BYTES.encode("a")]
    transcript, certain = run(BYTES, ids, ["a"], include=False)
    assert (text_of(transcript), transcript.ids) == ("b", ids[:1])
    assert [sure for _, sure in certain] == [ids[:1]] * 3


def test_no_stop_no_cut() -> None:
    ids = [*BYTES.encode("hello ab"), BYTES.convert_tokens_to_ids(END)]
    for include in (True, False):
        transcript, _ = run(BYTES, ids, ["hello abc"], include)
        assert (text_of(transcript), transcript.ids, transcript.stop) == ("hello ab", ids, None)
        assert transcript.sure == len(ids)


def test_the_cost_of_looking_is_linear() -> None:
    class Counting(str):
        reads = 0

        def __iter__(self) -> Any:
            Counting.reads += len(self)
            return super().__iter__()

    for size in (100, 200):
        Counting.reads = 0
        StopFinder(["a" * 50 + "b"]).push(Counting("a" * size))
        assert Counting.reads == size


def test_a_tokenizer_without_a_decoder_of_its_own() -> None:
    tokenizer: PreTrainedTokenizerFast = CHARS
    ids = tokenizer.encode("ab ab\nab")
    transcript, _ = run(tokenizer, ids, ["\nab", "b\n"], include=False, prompt=tokenizer.encode("a"))
    assert (text_of(transcript), transcript.stop) == ("ab a", "b\n")
