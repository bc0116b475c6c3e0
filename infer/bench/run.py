"""The benchmark: plain ``generate``, our loop without drafts and our loop with the tree, in one process, in turns.

``bench`` measures and returns a report that JSON can hold; ``run_bench`` is what ``medusa bench`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.drafters.base import Drafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.sized import SizedDrafter
from medusa.errors import UserError
from medusa.machine import describe, pick_threads
from medusa.packed import packed_layers, packed_ways
from medusa.processors import Processing
from medusa.tree import Topology
from medusa.trunk import Trunk

from ..options import UNSUPPORTED, Options
from .contenders import GREEDY, REFERENCE
from .measure import Run, compare, dissect, our_loop, plain_generate
from .summary import accepted_by_depth, paced, repeated, speedup, summary

if TYPE_CHECKING:
    from medusa.data.prompts import Documents

NULL = NullDrafter.name
DISSECTED = 4  # prompts whose steps are taken apart: some hundred steps, enough for medians
LOSS_ROWS = 128, 256  # rows and tokens each: the mean is then good to about 0.01 nats
# A first difference with a smaller top-2 logit gap is a near-tie; None: 4 units of rounding of the top logit.
NEAR_TIE = {torch.float64: 0.0, torch.float32: 1e-4}


@dataclass(frozen=True)
class BenchOptions:
    """How much is measured.

    Args:
        prompts: held-out prompts, or questions of each prompt set, 1 or more.
        prompt_length: tokens per prompt that is cut from a text; of a conversation, the most.
        max_new_tokens: tokens that every run emits, 2 or more; nothing ends a run earlier, but an EOS where axes are
            given.
        repeats: runs of each contender on each prompt.
        seed: of the bootstrap behind the intervals, and of sampling.
        threads: torch's threads, for all contenders; left out, 1 or all, whichever suits plain generate better.

    Raises:
        UserError: a number below its least value.
    """

    prompts: int = 16
    prompt_length: int = 64
    max_new_tokens: int = 200
    repeats: int = 3
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("prompt_length", 1), ("max_new_tokens", 2), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: give at least {least}")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads={self.threads}: give at least 1, or leave it out")


def run_bench(
    folder: str,
    options: BenchOptions,
    out: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    compile: bool = False,
    packed: bool | None = None,
) -> int:
    """Benchmark the checkpoint in ``folder``, print the tables and write the report to ``out`` (``folder``/report).

    ``compile`` compiles the steps of our own loop; the first, unmeasured round waits for it; ``packed``
    goes to ``Trunk.load``.
    Returns the exit code: 1 if an output differs from plain ``generate`` by more than a near-tie, else 0.
    """
    from medusa.data.prompts import heldout_prompts
    from medusa.progress import progress

    from ..engine import Engine
    from ..prompts import heldout_documents
    from .report import check_writable, print_report, write_report

    run = Path(folder).expanduser()
    target = Path(out).expanduser() if out else run / "report"
    check_writable(target, "name another folder with --out")  # before minutes of measuring
    engine = Engine.load(run, dtype=dtype, device=device, compile=compile, packed=packed)
    documents = heldout_documents(run)
    prompts = heldout_prompts(documents, options.prompts, options.prompt_length, "benchmark")
    heldout = _loss_rows(documents, engine.trunk)
    with progress(3 * len(prompts) * options.repeats + min(len(prompts), DISSECTED), "benchmark") as advance:
        report = bench(engine.trunk, engine.drafter, prompts, options, heldout=heldout, advance=advance)
    write_report(report, run, target)
    print_report(report, target)
    return 0 if report["identical"]["ok"] else 1


def _loss_rows(documents: Documents, trunk: Trunk) -> list[list[int]]:
    """Rows of held-out text for the trunk's loss; none of conversations, or where documents are too short for them."""
    from medusa.data.prompts import cut_prompts

    count, length = LOSS_ROWS
    texts = [document for document in documents if isinstance(document, Tensor)]
    try:
        return cut_prompts(texts, count, min(length, trunk.context or length), "benchmark")
    except UserError:  # too short, which the report says; prompts are shorter, so there may well be some
        return []


def check_task(trunk: Trunk, prompts: Sequence[Sequence[int]], options: BenchOptions) -> None:
    """Refuse what would make contenders do different work.

    Raises:
        UserError: prompt and new tokens together exceed the trunk's context, or as :func:`check_config`.
    """
    longest = max(map(len, prompts))
    if trunk.context is not None and longest + options.max_new_tokens > trunk.context:
        raise UserError(
            f"prompts of {longest} tokens and max_new_tokens={options.max_new_tokens} exceed the trunk's context of"
            f" {trunk.context}: ask for shorter prompts or fewer tokens"
        )
    check_config(trunk)


def check_config(trunk: Trunk) -> None:
    """Refuse a ``generation_config`` by which ``generate`` does what the timed loop does not. Raises UserError."""
    undone = {name: value for name, value in GREEDY.items() if name in UNSUPPORTED}  # by plain_generate itself
    asked, idle = Options.of({"temperature": 0.0, **undone}, trunk).processing, Processing()
    for name in (field.name for field in fields(Processing)):
        if name not in GREEDY and getattr(asked, name) != getattr(idle, name):
            raise UserError(
                f"the trunk's generation_config sets {name}={getattr(asked, name)!r}, which the timed loop leaves out:"
                " clear it in generation_config.json"
            )


def bench(
    trunk: Trunk,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: BenchOptions,
    *,
    heldout: Sequence[Sequence[int]] = (),
    advance: Callable[..., object] = lambda **_: None,
) -> dict[str, Any]:
    """Measure ``drafter`` against plain ``generate`` and the null drafter; return the report. Sets torch's threads.

    ``heldout``: rows of held-out text, of equal length, for the trunk's loss. ``advance(tokens=n)`` is called after
    each timed run, and after each prompt whose steps were taken apart.

    Raises:
        UserError: as :func:`check_task`.
    """
    check_task(trunk, prompts, options)
    set_threads(trunk, prompts[0], options.threads)
    tokens = options.max_new_tokens
    drafters: dict[str, Drafter] = {NULL: NullDrafter(), drafter.name: drafter}
    contenders = {REFERENCE: plain_generate(trunk)} | {name: our_loop(trunk, each) for name, each in drafters.items()}
    runs = compare(contenders, prompts, tokens, options.repeats, advance)
    anatomies = dissect(trunk, drafters, prompts[:DISSECTED], tokens, advance)
    return {
        "format": 1,
        "options": asdict(options),
        "machine": describe(),
        "trunk": describe_trunk(trunk) | {"heldout_loss": heldout_loss(trunk, heldout) if heldout else None},
        "drafter": describe_drafter(drafter) | {"node_share": anatomies[drafter.name].node_share},
        "compiled": compiled_sizes(trunk),
        **_compared(runs, options.seed),
        "accepted": accepted_by_depth(runs[drafter.name]),
        "steps": {name: asdict(anatomy.cost) for name, anatomy in anatomies.items()},
        "identical": identical(trunk, prompts, runs),
        "repeated_4grams": repeated([rows[0].ids for rows in runs[REFERENCE]], 4),
        "seconds": {name: [[run.seconds for run in row] for row in rows] for name, rows in runs.items()},
        "pace": {name: [[paced(run.pace) for run in row] for row in rows] for name, rows in runs.items()},
    }


def _compared(runs: dict[str, list[list[Run]]], seed: int) -> dict[str, Any]:
    """Each contender's totals, and how much faster it is than those before it."""
    pairs = [(of, over) for place, over in enumerate(runs) for of in list(runs)[place + 1 :]]
    return {
        "contenders": {name: summary(rows) for name, rows in runs.items()},
        "speedups": [speedup(runs, of, over, seed) for of, over in pairs],
    }


def describe_trunk(trunk: Trunk) -> dict[str, Any]:
    """Family, size, dtype, how many layers have packed weights in our loop, and how these are laid out."""
    return {
        "family": trunk.family,
        "parameters": trunk.model.num_parameters(),
        "dtype": str(trunk.dtype).removeprefix("torch."),
        "packed": packed_layers(trunk.model),
        "packed_ways": packed_ways(trunk.model),
    }


def compiled_sizes(trunk: Trunk) -> list[list[int]]:
    """Rows and nodes of the steps that ran compiled; empty where all ran eagerly."""
    return [] if trunk.compiled is None else [list(size) for size in sorted(trunk.compiled.compiled)]


def describe_drafter(drafter: Drafter) -> dict[str, Any]:
    """Name, for heads or an EAGLE layer what they look like and their parameters, and the tree where it is fixed."""
    found: dict[str, Any] = {"name": drafter.name}
    if isinstance(drafter, (MedusaDrafter, SizedDrafter, DynamicDrafter, MixedDrafter)):
        found["heads"] = asdict(drafter.heads.config)
        found["parameters"] = sum(parameter.numel() for parameter in drafter.heads.parameters())
    if isinstance(drafter, EagleDrafter):
        found["eagle"] = asdict(drafter.layer.config) | {"nodes": drafter.nodes}
        found["parameters"] = sum(parameter.numel() for parameter in drafter.layer.parameters())
    tree = getattr(drafter, "topology", None)
    if isinstance(tree, Topology):
        shape = {"parents": list(tree.parents), "ranks": list(tree.ranks)}
        found["tree"] = shape | {"nodes": tree.size, "depth": tree.depth}
    return found


@torch.inference_mode()
def heldout_loss(trunk: Trunk, rows: Sequence[Sequence[int]], batch: int = 8) -> float:
    """The trunk's mean loss on rows of equal length, in nats per token; the first token of a row is not predicted."""
    total = count = 0.0
    for start in range(0, len(rows), batch):
        ids_BT = torch.tensor([list(row) for row in rows[start : start + batch]], device=trunk.device)
        logits_BTV = trunk.forward(ids_BT).logits[:, :-1].float()
        labels_BT = ids_BT[:, 1:]
        total += torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
        ).item()
        count += labels_BT.numel()
    return total / count


def identical(trunk: Trunk, prompts: Sequence[Sequence[int]], runs: dict[str, list[list[Run]]]) -> dict[str, Any]:
    """Compare all runs with the first of plain ``generate``, and judge each first difference.

    In fp32 a difference counts as a near-tie when the two best logits there lie less than 1e-4 apart; in fp64 none
    does. Anything else is a mismatch, and ``ok`` is false.
    """
    near_ties: list[dict[str, Any]] = []
    mismatches: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        expected = runs[REFERENCE][index][0].ids
        for name, rows in runs.items():
            other = next((run.ids for run in rows[index] if run.ids != expected), None)
            if other is None:
                continue
            position = next(
                (at for at, pair in enumerate(zip(expected, other, strict=False)) if len(set(pair)) > 1), None
            )
            found: dict[str, Any] = {"contender": name, "prompt": index, "position": position, "gap": None}
            tie = False
            if position is not None:  # else one output is the beginning of the other
                found["gap"], limit = _gap(trunk, [*prompt, *expected[:position]])
                tie = found["gap"] < limit
            (near_ties if tie else mismatches).append(found)
    differing = {found["prompt"] for found in near_ties + mismatches}
    return {
        "ok": not mismatches,
        "prompts": len(prompts),
        "equal": len(prompts) - len(differing),
        "near_ties": near_ties,
        "mismatches": mismatches,
    }


@torch.inference_mode()
def _gap(trunk: Trunk, ids: Sequence[int]) -> tuple[float, float]:
    """Gap of the two best logits after ``ids``, and the gap below which they count as tied."""
    logits_V = trunk.forward(torch.tensor([list(ids)], device=trunk.device)).logits[0, -1].double()
    best, second = logits_V.topk(2).values.tolist()
    limit = NEAR_TIE.get(trunk.dtype)
    return best - second, 4 * torch.finfo(trunk.dtype).eps * abs(best) if limit is None else limit


def set_threads(trunk: Trunk, prompt: Sequence[int], threads: int | None) -> None:
    """Set torch's threads, to 1 or to all where no number is asked for, whichever suits plain generate better."""
    if threads is not None:
        torch.set_num_threads(threads)
    elif trunk.device.type == "cpu":
        pick_threads(partial(plain_generate(trunk), prompt, 16))
