"""``medusa bench RUN --profile``: load, take steps apart, write and show what they consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from medusa.drafters.base import Drafter
from medusa.errors import UserError, reason
from medusa.files import write_atomically, write_json, write_text
from medusa.machine import Rates, describe, pick_device, rates
from medusa.trunk import Trunk

from ..drafters import make_drafter
from .profile import WALL, clock_for, profile
from .profile_report import account, notes, tables, trunk_bytes
from .prompt_sets import prompt_set
from .run import BenchOptions, check_task, describe_trunk, set_threads
from .subject import TRIAL, Subject

FORMAT = 1
PROMPTS = 4  # at most: some hundred steps, enough for medians


def run_profile(
    source: str,
    options: BenchOptions,
    drafters: Sequence[str] | None = None,
    prompts: str | None = None,
    out: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    compile: bool = False,
    packed: bool | None = None,
    clock: str = WALL,
) -> int:
    """Profile ``drafters`` on ``source``, a run, shipped heads or a plain trunk; print the tables, write the report.

    Left out, ``drafters`` are none and the folder's own heads, and ``prompts`` the held-out text of a run, else the
    questions spec. The report goes to ``out``; left out, to the folder report in a run, else to profile-NAME here.
    """
    from medusa.progress import progress

    from ..warmup import warm_up
    from .report import print_tables

    subject = Subject.of(source, out, inside="report", beside="profile")
    clock_for(pick_device(device), clock)  # refused now
    trunk, folder = subject.load(dtype=dtype, device=device, packed=packed), subject.folder
    usual = ["none", "auto"] if subject.drafts else ["none"]
    made = {each: make_drafter(each, trunk, folder) for each in drafters or usual}
    named = {each.name if name == "auto" else name: each for name, each in made.items()}
    set_threads(trunk, TRIAL, options.threads)
    if compile:
        for each in named.values():
            warm_up(trunk, each)
    count = min(options.prompts, PROMPTS)
    name, tokens = prompts or subject.prompt_set, options.max_new_tokens
    chosen = prompt_set(name, trunk, folder, count=count, length=options.prompt_length, tokens=tokens)
    ids = [prompt.ids for prompt in chosen.prompts][:count]
    with progress(len(ids), "profile") as advance:
        report = profile_report(trunk, named, ids, options, advance, clock=clock)
    report |= {"source": source, "prompt_set": chosen.name}
    write_profile(report, subject.target)
    print_tables(tables(report), notes(report))
    print_tables([], [f"Profile and plot: {subject.target}"], soft_wrap=True)
    return 0


def profile_report(
    trunk: Trunk,
    drafters: dict[str, Drafter],
    prompts: Sequence[Sequence[int]],
    options: BenchOptions,
    advance: Callable[..., object] = lambda **_: None,
    known: Rates | None = None,
    clock: str = WALL,
) -> dict[str, Any]:
    """Profile the steps of ``drafters``; the report as JSON can hold it. ``known``: the machine's rates, else measured.

    Raises:
        UserError: prompts and new tokens exceed the trunk's context, or the clock is not one for its device.
    """
    check_task(trunk, prompts, options)
    limits = known or rates(trunk.device, trunk.dtype, trunk_bytes(trunk, 0))
    profile(trunk, drafters, prompts[:1], min(options.max_new_tokens, 8))  # warms up, unmeasured
    found = profile(trunk, drafters, prompts, options.max_new_tokens, advance, lambda: clock_for(trunk.device, clock))
    return {
        "format": FORMAT,
        "options": asdict(options),
        "machine": describe(),
        "rates": asdict(limits),
        "trunk": describe_trunk(trunk),
        "compiled": trunk.compiled is not None,
        "clock": clock,
        "drafters": {name: account(trunk, steps, limits) for name, steps in found.items()},
    }


def write_profile(report: dict[str, Any], folder: Path) -> None:
    """Write profile.json, profile.md and profile.png to ``folder``. UserError if that can't be."""
    from .profile_plots import step_parts
    from .report import markdown_of

    figure = step_parts(report)
    try:
        write_json(folder / "profile.json", report)
        write_text(folder / "profile.md", markdown_of("Profile of a step", tables(report), notes(report)))
        write_atomically(folder / "profile.png", partial(figure.savefig, dpi=150, format="png"))
    except OSError as error:
        raise UserError(f"the profile can't be written ({reason(error)}): name another folder with --out") from error
