"""The model card of what is exported: what it is, what it was trained on, what was measured, how to serve it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.checkpoint import CALIBRATION, CONFIG, RUN
from medusa.data.trunks import MANIFEST as TRUNK_MANIFEST
from medusa.exports import Export
from medusa.files import read_json
from medusa.tables import Table, machine_line, tables, verdict
from medusa.trunk import Trunk

from ..bench import grid_tables

REPORT = Path("report") / "report.json"  # where the benchmark leaves its own in a run


@dataclass(frozen=True)
class Facts:
    """What the export knows of itself: the folder's name, the engine, the trunk's name there, and what was written.

    ``what`` is exported, and ``about`` it is said first; ``stage`` is that of its training. ``error`` is the largest
    difference of a logit that was found when the folder was read again.
    """

    folder: str
    to: str
    engine: str
    base: str
    what: str
    about: str
    stage: str
    made: Export
    error: float


def card(source: Path, place: Path, trunk: Trunk, facts: Facts) -> str:
    """The card as Markdown behind YAML.

    ``source`` is the run, and ``place`` the folder in it that what is exported lies in with its own calibration.
    """
    hub = not Path(facts.base).is_absolute()
    name = facts.base if hub else Path(facts.base).name
    notes = facts.made.notes
    parts = [
        front(trunk, facts, hub),
        f"# {facts.what} for {name}, for {facts.engine}\n",
        f"{facts.about} The trunk checks every guess.\n",
        f"Read again as {facts.engine} reads it, what is here gives the logits of what was trained,"
        f" {nearness(facts.error)}.\n",
        *(f"* {note[:1].upper()}{note[1:]}." for note in notes),
        "" if notes else None,
        _training(source, facts.stage),
        _measured(source, place, facts.stage),
        f"## Use\n\n{USES[facts.to](facts)}",
    ]
    return "\n".join(part for part in parts if part is not None)


def nearness(error: float) -> str:
    """How near logits are, of which the largest difference is ``error``, relative to the largest."""
    return f"within {error:.1g} of the largest" if error else "to the bit"


def front(trunk: Trunk, facts: Facts, hub: bool) -> str:
    """What the hub reads: the trunk if it is there too, its licence if it names one, and tags."""
    lines = ["---"]
    if hub:
        lines.append(f"base_model: {facts.base}")
    if (license := _license(Path(str(trunk.model.name_or_path or "/nonexistent")))) is not None:
        lines.append(f"license: {license}")
    kind = "medusa" if facts.stage == "heads" else "eagle3"
    tags = [kind, "speculative-decoding", facts.to]
    lines += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in dict.fromkeys(tags)), "---\n"]
    return "\n".join(lines)


def _license(trunk: Path) -> str | None:
    """What the trunk's folder says its licence is: in its own card, or where `medusa trunk` wrote it."""
    from huggingface_hub.repocard import metadata_load

    if (trunk / TRUNK_MANIFEST).is_file():
        return str(read_json(trunk / TRUNK_MANIFEST).get("license", "")).lower() or None
    try:
        found = (metadata_load(trunk / "README.md") or {}).get("license") if (trunk / "README.md").is_file() else None
    except (OSError, ValueError):  # a card of others that can't be read says nothing
        return None
    return found if isinstance(found, str) else None


def _training(source: Path, stage: str) -> str | None:
    """What run.json says of the making; None if there is none."""
    if not (source / RUN).is_file():
        return None
    run = read_json(source / RUN)
    config, stages = run.get("config", {}), run.get("stages", {})
    if stage not in stages:
        return None
    data, training = config.get("data", {}), config.get(f"{stage}_training", {})
    text = data.get("source", "")
    text = Path(text).name if Path(text).is_absolute() else text
    joint = "; then trunk and heads jointly (Medusa-2)" if "joint" in stages and stage == "heads" else ""
    found = stages[stage].get("result", {})
    lines = [
        "## Training\n",
        f"* Text: {text}, in rows of {data.get('block')} tokens.",
        f"* {training.get('steps')} steps of {training.get('batch')} rows; the trunk was frozen{joint}.",
        *(f"* {name.replace('_', ' ').capitalize()}: {_number(value)}." for name, value in found.items()),
        f"* By medusa-decoding {run.get('versions', {}).get('medusa')}, which keeps the recipe in `{CONFIG}`.\n",
    ]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _measured(source: Path, place: Path, stage: str) -> str | None:
    """The benchmark's table, or calibration's; None if neither was made."""
    if (source / REPORT).is_file():
        report = read_json(source / REPORT)
        many = "cells" in report
        shown = grid_tables.tables(report) if many else tables(report)
        said = grid_tables.notes(report)[:1] if many else [verdict(report["identical"])]
        words = [*said, machine_line(report["machine"])]
        if stage == "heads" or any(name.startswith("eagle") for name in report["contenders"]):
            return _section("Measured", "by `medusa bench`, with this toolkit's own decoding", shown[:1], words)
    if (place / CALIBRATION).is_file():
        found = read_json(place / CALIBRATION)
        heads = ["nodes", "tokens/step", "ms/step", "tokens/s"]
        rows = [
            [
                str(row["nodes"]),
                f"{row['tokens_per_step']:.2f}",
                f"{row['step_ms']:.2f}",
                f"{row['tokens_per_second']:.0f}",
            ]
            for row in found["rows"]
        ]
        nodes = found["chosen"]["nodes"]
        chosen = f"has {nodes} nodes" if nodes > 1 else "is the root alone: there, drafts cost more than they gave"
        words = [f"The tree chosen {chosen}.", machine_line(found["machine"])]
        title = "by calibration on held-out text, with this toolkit's own decoding"
        return _section("Measured", title, [Table("Trees", heads, rows)], words)
    return None


def _section(title: str, by: str, shown: list[Table], words: list[str]) -> str:
    parts = [f"## {title}\n\nMeasured {by}, greedy; other engines have other costs.\n"]
    for table in shown:
        lines = [table.heads, ["---"] + ["---:"] * (len(table.heads) - 1), *table.rows]
        parts.append(f"{table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return "\n".join([*parts, *(f"* {each}" for each in words), ""])


def _block(*lines: str) -> str:
    return "```\n" + "\n".join(lines) + "\n```\n"


def _vllm(facts: Facts) -> str:
    num = facts.made.config["num_heads"]
    speculative = json.dumps({"method": "medusa", "model": facts.folder, "num_speculative_tokens": num})
    return "It drafts a chain of first choices, one per head.\n\n" + _block(
        f"vllm serve {facts.base} --speculative-config '{speculative}'"
    )


def _tgi(facts: Facts) -> str:
    num = facts.made.config["medusa_num_heads"]
    return "It finds the trunk by this folder's config and drafts a chain of first choices, one per head.\n\n" + _block(
        f"text-generation-launcher --model-id {facts.folder} --speculate {num}"
    )


def _tensorrt(facts: Facts) -> str:
    num, layers = facts.made.config["num_medusa_heads"], facts.made.config["num_medusa_layers"]
    choices = facts.made.config.get("medusa_choices", [])
    return "It compiles trunk and heads into one engine; scripts of its `examples/`.\n\n" + _block(
        f"python medusa/convert_checkpoint.py --model_dir {facts.base} --medusa_model_dir {facts.folder} \\",
        f"    --num_medusa_heads {num} --num_medusa_layers {layers} --max_medusa_token_len {len(choices)} \\",
        "    --dtype float16 --output_dir checkpoint",
        "trtllm-build --checkpoint_dir checkpoint --output_dir engine --gemm_plugin float16 \\",
        "    --speculative_decoding_mode medusa",
        f"python run.py --engine_dir engine --tokenizer_dir {facts.base} --temperature 0.0 \\",
        f'    --medusa_choices="{json.dumps(choices)}" --max_output_len 100 --input_text "Once upon"',
    )


def _reference(facts: Facts) -> str:
    return (
        "The reference's package is called `medusa` as well: install it in an environment of its own. Above temperature"
        " 0 it accepts by a rule of its own, which is lossy. This toolkit reads the folder too, with its tree.\n\n"
        + _block(
            f"python -m medusa.inference.cli --model {facts.folder}", f"medusa generate {facts.folder} --prompt ..."
        )
    )


def _sglang(facts: Facts) -> str:
    return "A tree of the likeliest guesses, as wide and deep as its options say.\n\n" + _block(
        f"python -m sglang.launch_server --model {facts.base} --speculative-algorithm EAGLE3 \\",
        f"    --speculative-draft-model-path {facts.folder} --speculative-num-steps 5 \\",
        "    --speculative-eagle-topk 8 --speculative-num-draft-tokens 32",
    )


def _speculators(facts: Facts) -> str:
    proposal = facts.made.config["speculators_config"]["proposal_methods"][0]
    speculative = {"method": "eagle3", "model": facts.folder, "num_speculative_tokens": proposal["speculative_tokens"]}
    return "vLLM finds the trunk by this folder's config; it drafts a chain.\n\n" + _block(
        f"vllm serve {facts.folder}",
        f"vllm serve {facts.base} --speculative-config '{json.dumps(speculative)}'  # the same, the trunk named",
    )


USES: dict[str, Callable[[Facts], str]] = {
    "vllm": _vllm,
    "tgi": _tgi,
    "tensorrt-llm": _tensorrt,
    "medusa-v1": _reference,
    "sglang": _sglang,
    "speculators": _speculators,
}
