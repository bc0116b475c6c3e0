"""Prompts in all the forms that they come in: texts, ids, tensors, and what a tokenizer returns.

Dimensions: B batch, T time.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medusa.encoding import encode
from medusa.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = "give a text, token ids, a list of either, or a tokenizer's output"
READ = ("input_ids", "attention_mask")
# A tokenizer may return these too, and a prompt's ids are the same without them.
PASSED_OVER = ("length", "offset_mapping", "overflow_to_sample_mapping", "special_tokens_mask")


@dataclass(frozen=True)
class Prompts:
    """Token ids of each prompt, and whether it was one alone and not a list of one."""

    rows: list[list[int]]
    single: bool


def read_prompts(given: Any, mask: Any, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> Prompts:
    """The prompts of a call; an empty one becomes the BOS.

    Args:
        given: a text, ids [T], a tensor [T] or [B, T], a list of texts, ids or tensors, or a mapping with
            ``input_ids`` and perhaps ``attention_mask``. A mapping or anything of two dimensions is a list.
        mask: an attention mask beside ids, of their shape: 1 for a prompt's tokens, 0 for the pads on either side.
        tokenizer: encodes texts.
        vocabulary: ids lie below it.

    Raises:
        UserError: another form, prompts of mixed kinds, a mask that doesn't fit, an id outside the vocabulary, an
            empty prompt without a BOS to begin with.
    """
    mapped = isinstance(given, Mapping)
    if mapped:
        given, mask = _of_mapping(given, mask)
    plain = _plain(given)
    single = isinstance(plain, str) or (_is_ids(plain) and bool(plain))
    prompts = [plain] if single else plain
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise UserError(f"prompt {given!r:.60}: {FORMS}, not empty")
    rows = _rows([_plain(prompt) for prompt in prompts], given, tokenizer)
    if mask is not None:
        rows = _masked(rows, _plain(mask), single, texts=isinstance(prompts[0], str))
    for number, row in enumerate(rows):
        for token in row:
            if not 0 <= token < vocabulary:
                raise UserError(f"prompt {number} has token id {token}: ids lie in 0..{vocabulary - 1}")
    return Prompts(_begun(rows, tokenizer), single and not mapped)


def _of_mapping(given: Mapping[str, Any], mask: Any) -> tuple[Any, Any]:
    for name, value in given.items():
        if value is None or (name == "token_type_ids" and not any(map(any, _two_dimensional(_plain(value))))):
            continue
        if name not in READ + PASSED_OVER:
            hint = nearest(name, READ) or " (a trunk reads ids alone)"
            raise UserError(f"prompt with {name!r}{hint}: give input_ids and attention_mask")
    if given.get("input_ids") is None:
        raise UserError(f"prompt with {', '.join(map(repr, given)) or 'nothing'}: input_ids is missing")
    if mask is not None and given.get("attention_mask") is not None:
        raise UserError("attention_mask is given twice, in the prompt and beside it: leave one of them out")
    return given["input_ids"], mask if mask is not None else given.get("attention_mask")


def _two_dimensional(values: Any) -> Any:
    return values if values and isinstance(values[0], Sequence) else [values]


def _plain(value: Any) -> Any:
    """A tensor or array as the lists it holds; anything else as it is."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        if "float" in str(value.dtype) or "complex" in str(value.dtype):
            raise UserError(f"a prompt of {value.dtype} numbers: token ids are whole numbers")
        if not 1 <= len(value.shape) <= 2:
            raise UserError(f"a prompt of shape {tuple(value.shape)}: give ids of shape [T] or [B, T]")
        return value.tolist()
    return value


def _rows(prompts: list[Any], given: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    if all(isinstance(prompt, str) for prompt in prompts):
        if tokenizer is None:
            raise UserError(f"prompt {prompts[0]!r:.60}: the trunk has no tokenizer: give token ids")
        return [encode(tokenizer, prompt, add_special_tokens=True) for prompt in prompts]
    if all(_is_ids(prompt) for prompt in prompts):
        return [[operator.index(token) for token in prompt] for prompt in prompts]
    raise UserError(f"prompt {given!r:.60}: give texts alone or lists of token ids alone")


def _is_ids(prompt: object) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return False
    return all(map(_is_token, prompt))


def _is_token(token: object) -> bool:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        return False
    return not getattr(token, "shape", ())  # numbers of other libraries, but not their arrays


def _masked(rows: list[list[int]], mask: Any, single: bool, texts: bool) -> list[list[int]]:
    """The rows without their pads."""
    if texts:
        raise UserError("attention_mask beside texts: it tells pads among token ids, leave it out")
    flags = _two_dimensional(mask) if single else mask
    if not isinstance(flags, Sequence) or [len(each) for each in map(_line, flags)] != list(map(len, rows)):
        raise UserError("attention_mask has another shape than the ids: give one of 0 and 1 for each token")
    return [_unpadded(row, _line(line), number) for number, (row, line) in enumerate(zip(rows, flags, strict=True))]


def _line(values: Any) -> Sequence[Any]:
    line = _plain(values)
    return line if isinstance(line, Sequence) and not isinstance(line, str) else ()


def _unpadded(row: list[int], line: Sequence[Any], number: int) -> list[int]:
    if not all(flag in (0, 1) for flag in line):
        raise UserError(f"attention_mask of prompt {number} holds something else than 0 and 1: give 1 for its tokens")
    count = sum(map(int, line))
    if not count:
        raise UserError(f"attention_mask of prompt {number} is all zeros: at least one token is to be read")
    start = list(line).index(1)
    if not all(line[start : start + count]):
        raise UserError(f"attention_mask of prompt {number} has a hole: zeros mark pads before or behind the tokens")
    return row[start : start + count]


def _begun(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """The rows, with the BOS for empty ones."""
    if all(rows):
        return rows
    bos = tokenizer.bos_token_id if tokenizer is not None else None
    if bos is None:
        raise UserError(
            f"prompt {rows.index([])} is empty and the tokenizer has no BOS to begin with: give at least one token"
        )
    return [row or [bos] for row in rows]
