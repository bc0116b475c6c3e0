"""A distillation as files: answers, the prompts that the trunk wrote itself, and what both were made with.

All of it goes on where it was stopped, at whatever moment that was.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import medusa
from medusa.drafters.base import Drafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.machine import describe
from medusa.progress import progress
from medusa.trunk import Trunk

from .chatform import has_template, user_turn
from .distill import DistillConfig, distill
from .lines import Lines, keep_settings
from .prompts import OwnPrompts, Prompt, as_draft, next_numbers, prompt_of, read_prompts, sift, write_drafts

TEMPLATE_DIGITS = 16


@dataclass(frozen=True)
class Places:
    """Where a distillation lies: beside a file ``X.jsonl``, or in a folder."""

    answers: Path
    drafts: Path
    settings: Path

    @classmethod
    def at(cls, out: str | Path) -> Places:
        """A name that ends with .jsonl is that of the answers' file, any other a folder's."""
        out = Path(out).expanduser()
        if out.suffix == ".jsonl":
            return cls(out, out.with_suffix(".prompts.jsonl"), out.with_suffix(".meta.json"))
        if out.is_file():
            raise UserError(f"{out} is a file: name a folder, or a file that ends with .jsonl")
        return cls(out / "answers.jsonl", out / "prompts.jsonl", out / "meta.json")


class Tally:
    """Counts what the answers come to."""

    def __init__(self) -> None:
        self.examples = self.tokens = self.cut = 0
        self._repeated = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count an answer's line."""
        self.examples += 1
        self.tokens += len(line["answer_ids"])
        self.cut += line["finish"] == "length"
        self._repeated += line["repeated"]

    @property
    def repeated(self) -> float:
        """The mean share of an answer's 4-grams that came before in it."""
        return self._repeated / max(self.examples, 1)

    def text(self) -> str:
        """What there is, and of which quality."""
        if not self.examples:
            return "no answers"
        return (
            f"{self.examples:,} answers, {self.tokens:,} tokens, {self.cut / self.examples:.1%} cut at the limit,"
            f" {self.repeated:.1%} of 4-grams repeated"
        )


class Distillation:
    """Prompts and their answers, on disk.

    Args:
        trunk: answers, and writes the prompts where there is no file of them.
        out: a folder, or a file that ends with .jsonl.
        source: a file of prompts, or how the trunk writes its own.
        config: how they are answered.
        drafter: what makes it faster; None is plain decoding.
        system: a system turn put before each prompt that has none; None leaves that to the template.
        rows: how many texts are decoded at once.
        name: what the trunk is called.
        report: called with what is worth a line.

    Raises:
        UserError: what is there was made with other settings, or the trunk can't write prompts.
    """

    def __init__(
        self,
        trunk: Trunk,
        out: str | Path,
        source: Path | OwnPrompts,
        config: DistillConfig,
        *,
        drafter: Drafter | None = None,
        system: str | None = None,
        rows: int = 32,
        name: str = "",
        report: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.trunk, self.source, self.config, self.system = trunk, source, config, system
        self.drafter, self.rows, self.report = drafter or NullDrafter(), rows, report
        self.places, self.tally = Places.at(out), Tally()
        if rows < 1:
            raise UserError(f"rows={rows}: answer at least 1 at once")
        if isinstance(source, OwnPrompts):
            self.turn = self._turn(name)
        info = {
            "trunk": name,
            "drafter": self.drafter.name,
            "rows": rows,
            "source": None if isinstance(source, OwnPrompts) else str(source),
            "versions": {"medusa": medusa.__version__},
            "machine": describe(),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        keep_settings(self.places.settings, self.settings, info, self.places.answers, self.places.drafts)

    def _turn(self, name: str) -> Any:
        tokenizer = self.trunk.tokenizer
        if not has_template(tokenizer):
            raise UserError(
                f"trunk {name} has no chat template, so it can't write prompts of its own: give them by --prompts"
            )
        assert isinstance(self.source, OwnPrompts) and tokenizer is not None
        return user_turn(tokenizer, self.system, self.source.bare)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides on every answer. The number of prompts does not: it may grow."""
        tokenizer = self.trunk.tokenizer
        template = str(tokenizer.chat_template) if has_template(tokenizer) and tokenizer is not None else None
        own = None
        if isinstance(self.source, OwnPrompts):
            own = {key: value for key, value in asdict(self.source).items() if key != "count"}
        return {
            "fingerprint": self.trunk.fingerprint(),
            "dtype": str(self.trunk.dtype).removeprefix("torch."),
            "template": template and hashlib.sha256(template.encode()).hexdigest()[:TEMPLATE_DIGITS],
            "system": self.system,
            **asdict(self.config),
            "prompts": "file" if own is None else "own",
            "own": own,
        }

    def run(self) -> Tally:
        """Make what is missing.

        Raises:
            UserError: prompts that are wrong, a file that can't be written, or one that holds other prompts.
        """
        self.tally = Tally()
        prompts = self._with_room(self._written() if isinstance(self.source, OwnPrompts) else self._read())
        with Lines(self.places.answers) as lines:
            missing = self._unanswered(prompts, lines)
            if self.tally.examples:
                self.report(f"there already: {self.tally.text()}")
            with progress(len(missing), "answers") as advance:
                for example in distill(
                    self.trunk,
                    missing,
                    self.config,
                    drafter=self.drafter,
                    rows=self.rows,
                    on_step=lambda tokens: advance(0, tokens=tokens),
                ):
                    line = example.line()
                    lines.append(line)
                    self.tally.add(line)
                    advance()
        return self.tally

    def _unanswered(self, prompts: list[Prompt], lines: Lines) -> list[Prompt]:
        known = {}
        for line in lines.read():
            try:
                known[line["id"]] = line["prompt_ids"]
                self.tally.add(line)
            except (KeyError, TypeError) as error:
                raise UserError(f"{lines.path} holds a line that is no answer: name another by --out") from error
        for prompt in prompts:
            if prompt.id in known and known[prompt.id] != prompt.ids:
                raise UserError(
                    f"{lines.path} answers another prompt of the id {prompt.id!r} than the one given now: name another"
                    " file by --out, or give the prompt a new id"
                )
        return [prompt for prompt in prompts if prompt.id not in known]

    def _read(self) -> list[Prompt]:
        assert isinstance(self.source, Path)
        if not has_template(self.trunk.tokenizer):
            self.report("the trunk has no chat template: prompts are continued as texts")
        prompts, dropped = read_prompts(self.source, self.trunk, self.system)
        self.report(f"{len(prompts):,} prompts{_list(dropped)}")
        return prompts

    def _written(self) -> list[Prompt]:
        """The trunk's own prompts, in rounds until there are enough of use."""
        config, tokenizer = self.source, self.trunk.tokenizer
        assert isinstance(config, OwnPrompts) and tokenizer is not None
        with Lines(self.places.drafts) as lines:
            try:
                drafts = {draft.number: draft for draft in map(as_draft, lines.read())}
            except KeyError as error:
                raise UserError(f"{lines.path} holds a line that is no prompt: name another by --out") from error
            while len((found := sift(drafts, config, tokenizer))[0]) < config.count:
                numbers = next_numbers(drafts, config, len(found[0]))
                with progress(len(numbers), "prompts") as advance:
                    for draft in write_drafts(
                        self.trunk,
                        self.drafter,
                        self.turn,
                        config,
                        numbers,
                        seed=self.config.seed,
                        rows=self.rows,
                        on_step=lambda tokens, advance=advance: advance(0, tokens=tokens),  # type: ignore[misc]
                    ):
                        lines.append(vars(draft))
                        drafts[draft.number] = draft
                        advance()
        kept, dropped = found
        self.report(f"{len(kept):,} prompts of the trunk's own{_list(dropped)}")
        return [prompt_of(self.trunk, text, self.system) for text in kept]

    def _with_room(self, prompts: list[Prompt]) -> list[Prompt]:
        """Those whose answers have room; a shorter context than asked for is not passed off as an answer's end."""
        kept = []
        for prompt in prompts:
            horizon = self.trunk.horizon(len(prompt.ids))
            if horizon is None or len(prompt.ids) + self.config.max_new_tokens <= horizon:
                kept.append(prompt)
        if len(kept) < len(prompts):
            self.report(
                f"{len(prompts) - len(kept):,} prompts dropped: with {self.config.max_new_tokens} tokens of an answer"
                " they are longer than the trunk's context"
            )
        if not kept:
            raise UserError(
                f"no prompt leaves room for max_new_tokens={self.config.max_new_tokens} in the trunk's context: ask for"
                " fewer"
            )
        return kept


def _list(dropped: Counter[str]) -> str:
    """``; dropped: 3 duplicate, 1 empty``, or nothing."""
    parts = ", ".join(f"{count:,} {why}" for why, count in sorted(dropped.items()))
    return f"; dropped: {parts}" if parts else ""
