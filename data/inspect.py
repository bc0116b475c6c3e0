"""The command ``medusa data inspect``: what a run would be trained on, in figures and as its first batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa import configs
from medusa.cli import new_parser, parse
from medusa.errors import UserError, reason

from .check import check_documents, check_examples, shared, warnings
from .corpus import DataConfig, RandomBlocks, load_texts, tokenise
from .examples import IGNORE, make_examples
from .packing import PackedRows, TiledBlocks, filler_id, text_rows
from .records import format_of
from .tokenizers import load_tokenizer

if TYPE_CHECKING:
    import jsonargparse
    from transformers import PreTrainedTokenizerBase

KEPT = ("train", "held out")


def run(argv: list[str]) -> int:
    """Run ``medusa data inspect ARGV``; return the exit code. Raises as loading and checking the data do."""
    args, config = read_arguments(argv)
    found, rows, tokenizer = inspect(config, args.trunk, args.rows, args.seed)
    previews = [list(preview(row, tokenizer)) for row in rows]
    if args.json:
        print(json.dumps(found | {"first_batch": [[vars(part) for part in parts] for parts in previews]}, indent=2))
        return 0
    print("\n".join(table(found)))
    for number, parts in enumerate(previews):
        _show(number, parts, args.width)
    return 0


def read_arguments(argv: list[str]) -> tuple[jsonargparse.Namespace, DataConfig]:
    """The options, and what they and the recipe say about the data. Raises UserError for wrong ones."""
    parser = new_parser("data inspect", "Say what a run would be trained on, and show its first batch.")
    parser.usage = "medusa data inspect RECIPE_OR_SOURCE [OPTIONS]"
    parser.add_argument("what", help="a recipe (a YAML file or a shipped one's name), or a source as data.source takes")
    parser.add_argument("--trunk", type=str, help="the trunk whose tokenizer is used; left out, the recipe's")
    parser.add_argument("--rows", type=int, default=8, help="rows of the first batch that are shown")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    parser.add_argument("--width", type=int, default=0, help="characters shown of each part of a row; 0 shows all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_class_arguments(DataConfig, "data")
    known = {f"data.{each.name}" for each in fields(DataConfig)}
    if argv and not argv[0].startswith("-"):
        argv = [argv[0], *_from_recipe(argv[0]), *argv[1:]]
    args = parse(parser, argv, known)
    for name in ("rows", "width"):
        if args[name] < 0:
            raise UserError(f"{name}={args[name]}: give at least 0")
    config: DataConfig = parser.instantiate(args).data
    return args, config


def _from_recipe(what: str) -> list[str]:
    """Options with what a recipe says; of a source its name. Later options override them."""
    path = Path(what).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if what not in configs.names() or path.exists():
            return [f"--data.source={what}"]
        path = configs.path(what)
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} can't be read ({reason(error)}): give a recipe in YAML") from error
    content = content if isinstance(content, dict) else {}
    data, trunk = content.get("data", {}), content.get("trunk", {})
    if not isinstance(data, dict) or not isinstance(trunk, dict):
        raise UserError(f"{path}: data and trunk are groups of keys, see `medusa train --help`")
    options = [f"--data.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in data.items()]
    options += [f"--trunk={trunk['name']}"] if trunk.get("name") else []
    return [*options, f"--seed={content.get('seed', 0)}"]


def inspect(
    config: DataConfig, trunk: str | None, rows: int, seed: int
) -> tuple[dict[str, Any], list[dict[str, Tensor]], PreTrainedTokenizerBase]:
    """Figures of the data, the first ``rows`` rows that a run of this seed trains on, and the tokenizer.

    Raises:
        UserError: as loading does, and as the check before training.
    """
    train, heldout = load_texts(config, lambda line: print(line, file=sys.stderr))
    tokenizer = load_tokenizer(config, train, heldout, trunk)
    found: dict[str, Any] = {"source": config.source, "format": format_of(train), "tokenizer": len(tokenizer)}
    found["rows"] = {name: len(split) for name, split in zip(KEPT, (train, heldout), strict=True)}
    made: RandomBlocks | TiledBlocks | PackedRows
    if found["format"] == "text":
        documents = tokenise(train, tokenizer)
        check_documents(documents, tokenizer)
        made = text_rows(documents, config, rows, seed)
        tokens = sum(map(len, documents))
        found |= {"tokens": tokens, "length": spread([len(ids) for ids in documents]), "supervised": 1.0}
        found |= {"block": config.block, "packed_rows": tokens // config.block, "filled": 1.0, "warnings": []}
    else:
        examples = make_examples(train, tokenizer, config)
        check_examples(examples, tokenizer)
        other = make_examples(heldout, tokenizer, config, first=len(train))
        made = PackedRows(
            examples.items, config.block, rows, seed, filler=filler_id(tokenizer), too_long=config.too_long
        )
        lengths = [len(example.ids) for example in examples]
        learnt = [int(example.supervised.sum()) for example in examples]
        found |= {"examples": len(examples), "tokens": sum(lengths), "length": spread(lengths)}
        found |= {"supervised_length": spread(learnt), "supervised": sum(learnt) / sum(lengths)}
        layout = made.layout
        found |= {"block": config.block, "packed_rows": len(layout.rows), "filled": layout.filled}
        found |= {"too_long": layout.too_long, "shared": shared(examples, other), **examples.counts}
        found["warnings"] = warnings(examples, layout)
    return found, [made[index] for index in range(rows)], tokenizer


def spread(numbers: Sequence[int]) -> dict[str, float]:
    """Least, median, the one that 90 % do not exceed, most."""
    ordered = sorted(numbers)
    return {
        "min": ordered[0],
        "median": median(ordered),
        "90%": ordered[-(-9 * len(ordered) // 10) - 1],
        "max": ordered[-1],
    }


def table(found: dict[str, Any]) -> list[str]:
    """The figures as lines."""
    rows = " and ".join(f"{count:,} {name}" for name, count in found["rows"].items())
    lines = [f"source      {found['source']}: {found['format']}, {rows}"]
    lines.append(f"tokens      {found['tokens']:,} to train on, vocabulary {found['tokenizer']:,}")
    for key, name in (("length", "length"), ("supervised_length", "supervised")):
        if key in found:
            figures = ", ".join(f"{part} {value:,.10g}" for part, value in found[key].items())
            lines.append(f"{name:<11} {figures} tokens")
    lines.append(f"share       {found['supervised']:.1%} of the tokens are supervised")
    lines.append(f"packed      {found['packed_rows']:,} rows of {found['block']} tokens, {found['filled']:.1%} full")
    lines += [f"warning     {line}" for line in found["warnings"]]
    if found.get("shared"):
        lines.append(f"warning     {found['shared']:,} held-out examples are also trained on")
    return lines


@dataclass(frozen=True)
class Part:
    """A run of tokens of one segment that are all supervised, or all not."""

    segment: int
    tokens: int
    supervised: bool
    text: str


def preview(row: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> Iterator[Part]:
    """A row in parts, decoded; the filler behind its last example is left out."""
    ids, segments = row["input_ids"].tolist(), row["segments"].tolist()
    learnt = [label != IGNORE for label in row["labels"].tolist()] if "labels" in row else [True] * len(ids)
    kinds = list(zip(segments, learnt, strict=True))
    cuts = [0, *(place for place in range(1, len(ids)) if kinds[place] != kinds[place - 1]), len(ids)]
    filler = "labels" in row and not any(flag for segment, flag in kinds if segment == segments[-1])
    for start, end in pairwise(cuts):
        segment = segments[start]
        if filler and segment == segments[-1]:
            return
        first = segments.index(segment)
        # Decoded with what stands before it in its segment: alone, a piece may lose its first space.
        before = str(tokenizer.decode(ids[first:start], clean_up_tokenization_spaces=False))
        whole = str(tokenizer.decode(ids[first:end], clean_up_tokenization_spaces=False))
        yield Part(segment, end - start, learnt[start], whole[len(before) :])


def _show(number: int, parts: Sequence[Part], width: int) -> None:
    """Supervised parts in green on a terminal, in [[ ]] elsewhere."""
    from rich.console import Console
    from rich.text import Text

    colours = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=True)
    shown, last = Text(), -1
    for part in parts:
        if part.segment != last:
            shown.append(f"\n--- row {number}, segment {part.segment}\n", style="dim")
            last = part.segment
        text = part.text
        if width and len(text) > width:
            text = f"{text[: width // 2]} … {text[len(text) - width // 2 :]}"
        if part.supervised and not colours:
            text = f"[[{text}]]"
        shown.append(text, style="bold green" if part.supervised else "")
    console.print(shown)
