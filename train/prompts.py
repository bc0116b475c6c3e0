"""Prompts for distillation: read from a file, or written by an instruct model itself (Magpie; Xu et al., 2024)."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.data.corpus import read_text
from medusa.data.records import Message
from medusa.decoding import Request, decode
from medusa.drafters.base import Drafter
from medusa.encoding import encode
from medusa.errors import UserError
from medusa.sampling import SamplingParams
from medusa.trunk import Trunk

from .chatform import UserTurn, chat_ids, has_template, marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEYS = ("prompt", "messages")
FEW = 64  # prompts written before a model is given up that hardly writes any of use
SHARE = 0.02  # of them that must be of use


@dataclass(frozen=True)
class Prompt:
    """What is answered: an id that names it for ever, and its token ids up to where the answer begins."""

    id: str
    ids: list[int]


@dataclass(frozen=True)
class OwnPrompts:
    """Prompts that an instruct model writes itself, sampled after the bare header of a user's turn.

    Args:
        count: how many different ones to keep.
        temperature: what they are sampled with.
        top_p: and from the smallest set of most likely tokens whose mass reaches this; 1 keeps all.
        max_tokens: one that has not ended by then is dropped.
        min_chars: one that is shorter is dropped.
        bare: write them without the system turn that the template puts first.
    """

    count: int = 1000
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 96
    min_chars: int = 12
    bare: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "max_tokens", "min_chars"):
            if getattr(self, name) < 1:
                raise UserError(f"own.{name}={getattr(self, name)}: give at least 1")
        if self.temperature <= 0:
            raise UserError(f"own.temperature={self.temperature}: give more than 0, or all prompts are the same")
        SamplingParams(self.temperature, top_p=self.top_p)


@dataclass(frozen=True)
class Draft:
    """A prompt as the model wrote it: its number, its text, and whether it came to an end."""

    number: int
    text: str
    ended: bool


def seed_of(*parts: object) -> int:
    """A seed for what ``parts`` name, the same wherever and whenever it is asked for."""
    return int.from_bytes(_digest(*parts)[:8], "big") >> 1


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode("utf-8")).digest()


def prompt_of(trunk: Trunk, said: str | list[Message], system: str | None = None, name: str | None = None) -> Prompt:
    """A text, or messages of which the user's last turn is answered, as a prompt; its id is a hash unless it has one.

    A trunk with a chat template reads a text as what a user says, another one continues it.

    Raises:
        UserError: messages for a trunk without a template, or such as the template refuses.
    """
    tokenizer = trunk.tokenizer
    if tokenizer is None:
        raise UserError("the trunk has no tokenizer, and prompts are texts: save one beside it")
    if not has_template(tokenizer):
        if not isinstance(said, str) or system is not None:
            what = "messages" if system is None else "a system turn"
            raise UserError(f"the trunk's tokenizer has no chat template for {what}: give texts to be continued")
        return Prompt(name or _digest(said).hex()[:16], encode(tokenizer, said, add_special_tokens=True))
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Prompt(name or _digest(messages).hex()[:16], chat_ids(tokenizer, messages))


def read_prompts(path: Path, trunk: Trunk, system: str | None = None) -> tuple[list[Prompt], Counter[str]]:
    """The prompts of a file, and how many were dropped, by why.

    A ``.jsonl`` file has an object per line with ``prompt`` (a text) or ``messages``, and perhaps ``id``; in any other
    each line that is not empty is a prompt.

    Raises:
        UserError: the file can't be read, a line is wrong, or one id names two prompts.
    """
    found: dict[str, list[int]] = {}
    dropped: Counter[str] = Counter()
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        said, name = _parsed(line, f"{path}:{number}") if path.suffix == ".jsonl" else (line.strip(), None)
        try:
            prompt = prompt_of(trunk, said, system, name)
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if prompt.id not in found:
            found[prompt.id] = prompt.ids
        elif found[prompt.id] == prompt.ids:
            dropped["duplicate"] += 1
        else:
            raise UserError(f"{path}:{number}: the id {prompt.id!r} names an earlier prompt too: give each its own")
    if not found:
        raise UserError(f"{path} holds no prompt: give one per line")
    return [Prompt(name, ids) for name, ids in found.items()], dropped


def _parsed(line: str, place: str) -> tuple[str | list[Message], str | None]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is no JSON ({error}): give an object per line") from error
    given = [key for key in KEYS if isinstance(content, dict) and content.get(key)]
    if len(given) != 1:
        raise UserError(f"{place}: give an object with one of {' and '.join(KEYS)}, not {line:.60}")
    name = content.get("id")
    name = None if name is None else str(name)
    if given == ["prompt"]:
        if not isinstance(content["prompt"], str):
            raise UserError(f"{place}: prompt is {content['prompt']!r:.60}: give a text")
        return content["prompt"], name
    return _up_to_the_user(content["messages"], place), name


def _up_to_the_user(messages: object, place: str) -> list[Message]:
    """The messages up to the user's last turn; what was answered to it is left out."""
    if not isinstance(messages, list) or not all(
        isinstance(each, Mapping) and isinstance(each.get("content"), str) for each in messages
    ):
        raise UserError(f"{place}: messages is {messages!r:.60}: give a list of objects with role and content")
    last = max((index for index, each in enumerate(messages) if each.get("role") == "user"), default=None)
    if last is None:
        raise UserError(f"{place}: no message is the user's, so there is nothing to answer: add one")
    return [dict(each) for each in messages[: last + 1]]


def write_drafts(
    trunk: Trunk,
    drafter: Drafter,
    turn: UserTurn,
    config: OwnPrompts,
    numbers: Iterable[int],
    *,
    seed: int,
    rows: int,
    on_step: Callable[[int], object] = lambda tokens: None,
) -> Iterator[Draft]:
    """Let the trunk write the drafts of these numbers, ``rows`` at once; yields each as it ends.

    A draft depends on its number and ``seed`` alone. ``on_step`` is called with the tokens of each step.
    """
    numbers, tokenizer = list(numbers), trunk.tokenizer
    assert tokenizer is not None, "a turn was found with it"
    ends = trunk.eos_ids | ({turn.end_id} if turn.end_id is not None else set())
    requests = []
    for number in numbers:
        sampling = SamplingParams(config.temperature, top_p=config.top_p, seed=seed_of(seed, "prompt", number))
        watch = _Until(tokenizer, turn.end) if turn.end_id is None else None
        requests.append(Request(turn.header, config.max_tokens, ends, sampling, watch=watch))
    written: list[list[int]] = [[] for _ in numbers]
    for step in decode(trunk, drafter, requests, most=rows):
        on_step(sum(map(len, step.tokens.values())))
        for row, tokens in step.tokens.items():
            written[row] += tokens
        for row, why in step.finished.items():
            ids = written[row][:-1] if why == "eos" else written[row]
            text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            text = text.partition(turn.end)[0] if why == "stop" else text
            yield Draft(numbers[row], text.strip(), why != "length")


class _Until:
    """True from the token on with which the text holds ``end``, which is no token of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: str) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.ids: list[int] = []

    def __call__(self, token: int) -> bool:
        self.ids.append(token)
        # only the tail: each of its tokens may be a byte, and one more brings what the tokenizer puts in front
        tail = self.ids[-(len(self.end.encode()) + 8) :]
        return self.end in str(self.tokenizer.decode(tail, clean_up_tokenization_spaces=False))


def sift(
    drafts: Mapping[int, Draft], config: OwnPrompts, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], Counter[str]]:
    """The first ``config.count`` texts of use among the drafts 0, 1, .. up to the first missing; the others' faults.

    Which they are does not depend on the order in which the drafts ended. Texts that differ in case, white space or
    punctuation alone are duplicates.
    """
    foreign = marks(tokenizer)
    seen: set[str] = set()
    kept: list[str] = []
    dropped: Counter[str] = Counter()
    for number in range(len(drafts)):
        if number not in drafts or len(kept) == config.count:
            break
        draft = drafts[number]
        plain = normalised(draft.text)
        if fault := _fault(draft, plain, seen, config, foreign):
            dropped[fault] += 1
        else:
            seen.add(plain)
            kept.append(draft.text)
    return kept, dropped


def _fault(draft: Draft, plain: str, seen: set[str], config: OwnPrompts, foreign: list[str]) -> str | None:
    if not draft.ended:
        return "truncated"
    if not plain:
        return "empty"
    if len(draft.text) < config.min_chars:
        return "short"
    if "\ufffd" in draft.text or any(mark in draft.text for mark in foreign):
        return "garbled"  # half a character, or tokens of the template within the text
    return "duplicate" if plain in seen else None


def normalised(text: str) -> str:
    """Words alone, in lower case: what two texts share that say the same."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


def next_numbers(drafts: Mapping[int, Draft], config: OwnPrompts, kept: int) -> list[int]:
    """Which drafts to write so that there may be enough of use.

    Raises:
        UserError: hardly any of those written so far is.
    """
    known = next(number for number in range(len(drafts) + 1) if number not in drafts)
    if known >= FEW and kept < SHARE * known:
        raise UserError(
            f"of {known} prompts that the trunk wrote itself, {kept} are of use: give prompts by --prompts, or change"
            " --own.temperature, --own.max_tokens or --own.bare"
        )
    share = max(kept / known, SHARE) if known else 1.0
    more = min(math.ceil((config.count - kept) / share), 4 * config.count + FEW)
    return [number for number in range(known, known + more) if number not in drafts]


def as_draft(line: Mapping[str, Any]) -> Draft:
    """A draft from its line in a file."""
    return Draft(line["number"], line["text"], line["ended"])
