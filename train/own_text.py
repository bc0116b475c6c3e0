"""The stage that makes text of the trunk's own, which heads and an EAGLE layer then learn in place of the data's.

Drafts are verified by what the trunk says, so that is what they should learn (self-distillation; Cai et al. 2024,
section 2.3.2). The trunk continues beginnings of the training text, never of what is held out. The folder is one as
`medusa distill` makes, and is made by the same means: token ids, each text with its id, those that were cut marked.

Texts are made batch by batch, each batch always of the same ones: a batch that was broken off is made again as a whole,
and of it only what is missing is stored. So a run that was killed and goes on has the very same file.

Dimensions: B batch, T time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa.data.examples import Example
from medusa.data.packing import PackedRows, filler_id
from medusa.errors import UserError
from medusa.files import read_json, write_json
from medusa.machine import describe
from medusa.progress import progress
from medusa.trunk import Trunk

from .checkpoints import to_disk, told, vanish
from .distill import DistillConfig, distill
from .distill_run import Places, Tally
from .lines import FORMAT, Lines
from .prompts import Prompt
from .record import AGAIN, OWN, difference
from .training import OwnText

if TYPE_CHECKING:
    from .job import Job

LEARNERS = ("heads", "eagle")  # the stages that learn the text


def make_text(job: Job, trunk: Trunk, own: OwnText) -> None:
    """Let the trunk write the text that is learnt; the first process does, the others wait.

    Raises:
        UserError: data that are no plain texts, or too few; a text that was begun with other settings; heads or a layer
            that learnt another one and are not to be made anew; a disk that takes no more.
    """
    settings = {"trunk": trunk.fingerprint()} | job.settings("seed", "data", "own_text")
    if job.is_made("text", settings, job.folder / OWN):
        return
    job.group.alone(lambda: _make(job, trunk, own, settings))


def own_rows(job: Job, samples: int) -> PackedRows:
    """The trunk's own text as ``samples`` rows, in which the beginnings are read but not learnt."""
    data, path = job.config.data, Places.at(job.folder / OWN).answers
    return PackedRows(
        read_texts(path), data.block, samples, job.config.seed, filler=filler_id(job.corpus.tokenizer), too_long="drop"
    )


def read_texts(path: Path) -> list[Example]:
    """The texts of a file, in the order of their ids, of which the continuations alone are supervised.

    Raises:
        UserError: the file can't be read.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [_example(row, line) for row, line in enumerate(sorted(lines, key=lambda line: str(line["id"])))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} can't be read as the trunk's own text: make it anew with `--fresh text`") from error


def _example(row: int, line: Mapping[str, Any]) -> Example:
    start = len(line["prompt_ids"])
    ids_T = torch.tensor([*line["prompt_ids"], *line["answer_ids"]])
    return Example(ids_T, torch.arange(len(ids_T)) >= start, (start,), row)


def _make(job: Job, trunk: Trunk, own: OwnText, settings: dict[str, Any]) -> None:
    places, made_with = Places.at(job.folder / OWN), settings | {"fingerprint": settings["trunk"]}
    _check_learners(job, settings)
    if job.record.is_anew("text") or not places.settings.is_file():
        vanish(job.folder / OWN)
    elif change := difference(read_json(places.settings).get("settings", {}), made_with):
        raise UserError(
            f"{job.folder}: its text stage was left with {change}: set that back to go on, add `--fresh text` to begin"
            " it anew, or choose another folder with --run"
        )
    begins = job.corpus.beginnings(own)
    prompts = [Prompt(f"{number:08}", ids) for number, ids in enumerate(begins)]  # sorted, they stand as in the text
    start = job.begin("text")
    _set_threads(job, trunk, own, made_with, places)
    config = DistillConfig(own.new_tokens(job.config.data.block), own.temperature, seed=job.config.seed)
    tally = _write(trunk, prompts, config, own.batch, places.answers)
    to_disk(places.answers)
    result = {"texts": tally.examples, "tokens": tally.tokens, "cut": tally.cut, "repeated": tally.repeated}
    job.record.done("text", settings, start, result)
    job.report(f"text: {tally.text()}; saved in {places.answers}")


def _check_learners(job: Job, settings: Mapping[str, Any]) -> None:
    """Refuse to replace unasked what learnt the data's text, or another one of the trunk's own."""
    for stage in LEARNERS:
        done = None if job.record.is_anew(stage) else job.record.stages.get(stage)
        learnt = {"own_text": None if done is None else done["settings"].get("own_text")}
        if done is not None and (change := difference(learnt, {"own_text": settings["own_text"]})):
            raise UserError(
                f"{job.folder}: its {stage} stage was made with {change}: add `--fresh text` to make it anew on the"
                " trunk's own text, or choose another folder with --run"
            )


def _set_threads(job: Job, trunk: Trunk, own: OwnText, made_with: Mapping[str, Any], places: Places) -> None:
    """Use as many threads as before, or as suit, and write down with what the text is made."""
    before = read_json(places.settings).get("threads", 0) if places.settings.is_file() else 0
    ids_BT = torch.zeros(own.batch, 1, dtype=torch.long, device=trunk.device)
    job.set_threads(lambda: trunk.forward(ids_BT), before)
    with told("the trunk's own text", job.folder, AGAIN):
        about = {"settings": made_with, "threads": torch.get_num_threads(), "machine": describe()}
        write_json(places.settings, {"format": FORMAT} | about)


def _write(trunk: Trunk, prompts: Sequence[Prompt], config: DistillConfig, batch: int, path: Path) -> Tally:
    """Continue the prompts that ``path`` does not have yet; what all of them come to."""
    tally, known = Tally(), set[str]()
    with Lines(path) as lines:
        for line in lines.read():
            tally.add(line)
            known.add(line["id"])
        batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        missing = [some for some in batches if not known.issuperset(prompt.id for prompt in some)]
        with progress(sum(map(len, missing)), "own text") as advance:
            for some in missing:
                for example in distill(
                    trunk, some, config, rows=batch, on_step=lambda tokens: advance(0, tokens=tokens)
                ):
                    advance()
                    if example.id not in known:
                        lines.append(example.line())
                        tally.add(example.line())
    return tally
