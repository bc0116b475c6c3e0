"""From the name of a prompt set to token ids for one trunk: held-out text, questions, or a file of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.checkpoint import CONFIG
from medusa.data.promptsets import Question, choose, read_questions, spec_questions
from medusa.data.sources import TINYSHAKESPEARE
from medusa.encoding import encode
from medusa.errors import UserError, nearest
from medusa.trunk import Trunk

from ..messages import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELDOUT, SPEC = "heldout", "spec"
SETS = (HELDOUT, TINYSHAKESPEARE, SPEC)
TEXT = "text"  # the category of prompts that are cut from a text


@dataclass(frozen=True)
class Prompt:
    """Token ids and the category they count for; ``turn`` is 0 but for later questions of one conversation."""

    ids: list[int]
    category: str = TEXT
    turn: int = 0


@dataclass(frozen=True)
class PromptSet:
    """Prompts under a name. ``chat``: they were put by the trunk's chat template."""

    name: str
    prompts: list[Prompt]
    chat: bool = False

    @property
    def categories(self) -> dict[str, list[Prompt]]:
        """The prompts of each category."""
        found: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            found.setdefault(prompt.category, []).append(prompt)
        return found


def prompt_set(
    name: str,
    trunk: Trunk,
    folder: Path | None,
    *,
    count: int,
    length: int,
    tokens: int,
    categories: Sequence[str] | None = None,
) -> PromptSet:
    """The prompt set ``name`` for ``trunk``: one of ``SETS``, or a .jsonl file with questions.

    ``folder``: the run whose recipe names the held-out text. ``count``: prompts cut from a text, or questions, whose
    later turns are prompts too: they hold the trunk's own answers, greedy and of at most ``tokens`` tokens.
    ``length``: tokens of each prompt that is cut from a text.

    Raises:
        UserError: an unknown name or category, no recipe, a file that can't be read, characters that the tokenizer
            does not know, or prompts that do not fit the context.
    """
    try:
        if name == HELDOUT:
            made = _from_heldout(folder, count, length)
        elif name == TINYSHAKESPEARE:
            made = _from_shakespeare(trunk, count, length)
        else:
            made = _from_questions(name, choose(_questions(name), count, categories), trunk, tokens)
        _check_room([prompt.ids for prompt in made.prompts], trunk, tokens)
    except UserError as error:
        raise UserError(f"prompt set {name!r}: {error}") from error
    return made


def check_set(name: str) -> None:
    """Refuse a name before a trunk is loaded for it. Raises UserError."""
    if name not in SETS and not name.endswith(".jsonl"):
        raise UserError(
            f"prompt set {name!r}{nearest(name, SETS)}: choose from {', '.join(SETS)}, or name a .jsonl file"
        )


def check_categories(names: Iterable[str], categories: Sequence[str] | None) -> None:
    """Refuse categories where no set ``names`` has such. Raises UserError."""
    if categories and set(names) <= {HELDOUT, TINYSHAKESPEARE}:
        raise UserError(f"categories={categories}: {', '.join(names)} has none; add a set of questions, such as {SPEC}")


def _from_heldout(folder: Path | None, count: int, length: int) -> PromptSet:
    from ..prompts import heldout_prompts

    if folder is None or not (folder / CONFIG).is_file():
        raise UserError(f"it is cut from the text that a run's {CONFIG} names, and there is none: choose another set")
    return PromptSet(HELDOUT, [Prompt(ids) for ids in heldout_prompts(folder, count, length)])


def _from_shakespeare(trunk: Trunk, count: int, length: int) -> PromptSet:
    from medusa.data import prompts
    from medusa.data.corpus import DataConfig, load_texts

    config = DataConfig(source=TINYSHAKESPEARE)
    heldout = prompts.heldout_documents(load_texts(config)[1], _tokenizer(trunk), config)
    made = prompts.heldout_prompts(heldout, count, length, "benchmark")
    return PromptSet(TINYSHAKESPEARE, [Prompt(ids) for ids in made])


def _tokenizer(trunk: Trunk) -> PreTrainedTokenizerBase:
    if trunk.tokenizer is None:
        raise UserError("the trunk has no tokenizer to read text with: give one that has")
    return trunk.tokenizer


def _questions(name: str) -> list[Question]:
    if name == SPEC:
        return spec_questions()
    return read_questions(Path(name).expanduser())


def _from_questions(name: str, questions: Sequence[Question], trunk: Trunk, tokens: int) -> PromptSet:
    chat = bool(_tokenizer(trunk).chat_template)
    made = [prompt for question in questions for prompt in (_asked if chat else _read)(question, trunk, tokens)]
    return PromptSet(name, made, chat)


def _asked(question: Question, trunk: Trunk, tokens: int) -> list[Prompt]:
    """The prompts of a conversation by the chat template; each holds the answers before it."""
    template = Template(trunk.tokenizer)
    messages: list[Message] = list(question.before)
    made = []
    for turn, text in enumerate(question.turns):
        messages = template.check([*messages, {"role": "user", "content": text}])
        made.append(Prompt(template.ids(messages), question.category, turn))
        if turn + 1 < len(question.turns):
            messages.append({"role": "assistant", "content": _answer(trunk, made[-1], tokens)})
    return made


def _read(question: Question, trunk: Trunk, tokens: int) -> list[Prompt]:
    """The same as a text, for a trunk without chat template: questions and answers, a blank line between them."""
    text = "".join(f"{message['content']}\n\n" for message in question.before)
    made: list[Prompt] = []
    for turn, asked in enumerate(question.turns):
        if made:
            text += _answer(trunk, made[-1], tokens).rstrip() + "\n\n"
        text += asked + "\n\n" if turn or len(question.turns) > 1 else asked
        made.append(Prompt(encode(_tokenizer(trunk), text, add_special_tokens=True), question.category, turn))
    return made


def _answer(trunk: Trunk, prompt: Prompt, tokens: int) -> str:
    """The trunk's own greedy answer, at most ``tokens`` tokens."""
    from ..engine import Engine

    _check_room([prompt.ids], trunk, tokens)
    return Engine(trunk).generate(prompt.ids, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.0).text


def _check_room(prompts: Sequence[list[int]], trunk: Trunk, tokens: int) -> None:
    """Refuse prompts that can't all be continued by so many tokens: then not every row would do the same work."""
    ends = [end for prompt in prompts if (end := trunk.horizon(len(prompt))) is not None]
    longest = max(map(len, prompts))
    if ends and longest + tokens > min(ends):
        raise UserError(
            f"its longest prompt has {longest} tokens, and with max_new_tokens={tokens} it exceeds the trunk's context"
            f" of {min(ends)}: ask for fewer tokens, for some of the categories, or for another set"
        )
