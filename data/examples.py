"""Examples: token ids, which of them are learnt, and where an answer begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.encoding import encode
from medusa.errors import UserError
from medusa.progress import progress

from .chat import ChatTemplate
from .records import Format, Message, conversation, format_of

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from .corpus import DataConfig

NO_TEMPLATE = "none"  # prompt and completion as they stand
IGNORE = -100  # the label of a token that is not supervised, as everywhere in torch and transformers


@dataclass(frozen=True)
class Example:
    """A conversation, or a prompt with its answer.

    ``ids`` int64 [T]; ``supervised`` bool [T], the tokens that are learnt; ``prompts``: how many tokens stand before
    each answer, which is what decoding would be given; ``row``: where it comes from.
    """

    ids: Tensor
    supervised: Tensor
    prompts: tuple[int, ...]
    row: int

    def labels(self) -> Tensor:
        """The ids where they are learnt, -100 elsewhere: int64 [T]."""
        return self.ids.masked_fill(~self.supervised, IGNORE)


@dataclass
class Examples:
    """The examples of a split, and what was noticed while they were made.

    ``counts``: "faulty", rows left out; "open_ended", answers that no token ends; "truncated", answers that were cut
    off when they were made; "repeated", further examples of conversations that a template rewrites as they go on.
    """

    items: list[Example] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.items)


def make_examples(
    dataset: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig, first: int = 0
) -> Examples:
    """Turn the rows of a split that ``load_texts`` gave, and that are no plain texts, into examples.

    Args:
        dataset: messages, prompts with completions, or token ids.
        tokenizer: encodes them, and brings the chat template.
        config: the template, what is supervised, and what becomes of faulty rows.
        first: the number of the first row, for errors.

    Raises:
        UserError: a row without an answer, of the wrong kind, or that the template does not write faithfully; it names
            the row. With ``config.faulty`` "drop" it is left out instead, unless none is left.
    """
    maker = _Maker(tokenizer, config, format_of(dataset))
    found = Examples()
    with progress(len(dataset), "tokenise") as advance:
        for number, row in enumerate(dataset, start=first):
            try:
                made = maker.make(row, number, found.counts)
            except UserError as error:
                fault = f"row {number} of {config.source!r}: {error}"
                if config.faulty == "error":
                    raise UserError(
                        f"{fault}; mend or remove it, or leave out such rows by data.faulty=drop"
                    ) from error
                found.counts["faulty"] += 1
                found.faults.append(fault)
                made = []
            found.items += made
            advance()
    if not found.items:
        raise UserError(f"no row of {config.source!r} is of use, the first because: {found.faults[0]}")
    return found


class _Maker:
    """Makes the examples of one row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, kind: Format) -> None:
        self.tokenizer, self.config, self.kind = tokenizer, config, kind
        self.template: ChatTemplate | None = None
        if kind == "messages" and config.template == NO_TEMPLATE:
            raise UserError("data.template=none joins a prompt and its completion, but the data are messages: name one")
        named = config.template is not None or bool(tokenizer.chat_template)
        if kind == "messages" or (kind == "completion" and named and config.template != NO_TEMPLATE):
            self.template = ChatTemplate(tokenizer, config.template, config.template_options)

    def make(self, row: Mapping[str, Any], number: int, counts: Counter[str]) -> list[Example]:
        """The examples of a row: one, or several where the template rewrites earlier answers."""
        if self.kind == "ids":
            return [self._from_ids(row, number, counts)]
        if self.kind == "messages":
            return self._chat(conversation(row["messages"], "messages"), 0, number, counts)
        prompt, completion = row["prompt"], row["completion"]
        if prompt is None or completion is None:
            raise UserError(f"it has no {'prompt' if prompt is None else 'completion'}: fill it in")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            if self.template is None:
                raise UserError(
                    "prompt and completion are messages, and there is no chat template: name one by data.template"
                )
            before, after = conversation(prompt, "prompt"), conversation(completion, "completion")
            return self._chat([*before, *after], len(before), number, counts)
        if not completion:
            raise UserError("the completion is empty: give the text that follows the prompt")
        if self.template is None:
            return [self._plain(prompt, completion, number)]
        turns = {"user": prompt, "assistant": completion}
        return self._chat([{"role": role, "content": text} for role, text in turns.items()], 0, number, counts)

    def _chat(self, messages: list[Message], first: int, number: int, counts: Counter[str]) -> list[Example]:
        assert self.template is not None
        rendered = self.template.answers(messages, first)
        counts["open_ended"] += sum(each.open_ended for each in rendered)
        if self.config.supervise == "answers":
            counts["repeated"] += len(rendered) - 1
            return [self._example(each.ids, each.written, each.prompts, number) for each in rendered]
        ids, last = self.template.ids(messages), rendered[-1]
        prompts = [start for start in last.prompts if ids[:start] == last.ids[:start]]
        return [self._example(ids, None, prompts, number)]

    def _plain(self, prompt: str, completion: str, number: int) -> Example:
        """A prompt and its completion as they stand, ended by the EOS."""
        before, ids = self._encoded(prompt), self._encoded(prompt + completion)
        if ids[: len(before)] != before:
            raise UserError(
                f"the tokens of the prompt's end {prompt[-20:]!r} and the completion's beginning {completion[:20]!r}"
                " merge, so decoding would see other ones than training: let the completion begin with the space"
            )
        end = self.tokenizer.eos_token_id
        ids = ids if end is None or ids[-1] == end else [*ids, end]
        return self._example(ids, [place >= len(before) for place in range(len(ids))], [len(before)], number)

    def _encoded(self, text: str) -> list[int]:
        """Ids with what the tokenizer puts first, a BOS mostly, but without what it puts last."""
        ids, bare = (encode(self.tokenizer, text, add_special_tokens=added) for added in (True, False))
        first = next(first for first in range(len(ids)) if ids[first : first + len(bare)] == bare) if bare else 0
        return ids[: first + len(bare)]

    def _from_ids(self, row: Mapping[str, Any], number: int, counts: Counter[str]) -> Example:
        prompt, answer = (_ids(row[name], name) for name in ("prompt_ids", "answer_ids"))
        if not answer:
            raise UserError("answer_ids is empty: there is nothing to learn")
        most, vocabulary = max([*prompt, *answer]), len(self.tokenizer)
        if most >= vocabulary:
            raise UserError(
                f"token id {most} is none of the {vocabulary} of the tokenizer: take the trunk that answered"
            )
        counts["truncated"] += row.get("finish") == "length"
        written = [False] * len(prompt) + [True] * len(answer)
        return self._example([*prompt, *answer], written, [len(prompt)], number)

    def _example(self, ids: Sequence[int], written: list[bool] | None, prompts: Sequence[int], number: int) -> Example:
        """``written`` None: all is learnt."""
        supervised = torch.ones(len(ids), dtype=torch.bool)
        if written is not None and self.config.supervise == "answers":
            supervised = torch.tensor(written, dtype=torch.bool)
        return Example(torch.tensor(ids, dtype=torch.int64), supervised, tuple(prompts), number)


def _ids(value: object, name: str) -> list[int]:
    if not isinstance(value, Sequence) or not all(type(each) is int and each >= 0 for each in value):
        raise UserError(f"{name} is {value!r:.60}: give a list of token ids")
    return list(value)
