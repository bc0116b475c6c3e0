"""Compiling ahead: an engine's tree steps, before the first text needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from medusa.compiled import CompiledSteps, StepSize, stored_sizes
from medusa.drafters.base import Drafter, layers_of
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.errors import UserError
from medusa.graphs import GraphedSteps, graphs_apply
from medusa.machine import seconds
from medusa.packages import steps_folder
from medusa.progress import progress
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk

NODES = (1, 2, 4, 8, 16, 32)  # for drafters whose trees differ from step to step: each runs in the next size
PROMPT = 16  # tokens of the text behind which a step is compiled


def use_compiled(trunk: Trunk, drafter: Drafter, rows: Sequence[int] = (1,)) -> CompiledSteps:
    """Have the trunk run the trees of ``drafter`` compiled, in batches of so many ``rows``; each as it is first met.

    On a GPU compiled steps are recorded as CUDA graphs (:mod:`medusa.graphs`).

    Raises:
        UserError: a number of rows below 1, or a trunk that can't be compiled.
    """
    sizes = step_sizes(drafter, rows)
    if trunk.compiled is None:
        kind = GraphedSteps if graphs_apply(trunk) else CompiledSteps
        trunk.compiled = kind(trunk, sizes, layers=layers_of(drafter))
    else:
        trunk.compiled.makes = True
        trunk.compiled.add(sizes, layers_of(drafter))
    return trunk.compiled


def use_stored(trunk: Trunk, drafter: Drafter, most: int = 1) -> None:
    """Have the trunk run those trees of ``drafter`` compiled whose steps are on this machine's disk, in batches of up
    to ``most`` rows: what ``medusa warmup`` left there is used in milliseconds, and nothing is compiled.
    """
    if trunk.compiled is None:
        layers = layers_of(drafter)
        sizes = stored_sizes(trunk, step_sizes(drafter, range(1, most + 1)), layers)
        trunk.compiled = CompiledSteps(trunk, sizes, layers=layers, makes=False) if sizes else None


def step_sizes(drafter: Drafter, rows: Sequence[int]) -> list[StepSize]:
    """What is worth compiling for ``drafter``: its trees and the root alone, which ends a text.

    Raises:
        UserError: a number of rows below 1.
    """
    for count in rows:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"rows={count!r}: give whole numbers from 1")
    nodes = {1} if isinstance(drafter, NullDrafter) else {1, *tree_sizes(drafter)}
    return [StepSize(count, each) for count in sorted(set(rows)) for each in sorted(nodes)]


def tree_sizes(drafter: Any) -> list[int]:
    """Nodes of the trees that ``drafter`` makes, the root included.

    A static tree has one size, several have theirs. Trees of each step have theirs whatever their shape, and that of
    the tree which is given for rows that sample; a mixed tree goes from there to its own, as lookup adds to it. Others
    have any size.
    """
    if isinstance(drafter, MixedDrafter):
        own = tree_sizes(drafter.dynamic)
        return sorted({*own, *(size for size in NODES if min(own) < size < max(own))})
    topology, nodes = getattr(drafter, "topology", None), getattr(drafter, "nodes", None)
    found = {topology.size} if isinstance(topology, Topology) else set[int]()
    found |= {nodes} if isinstance(nodes, int) else set()
    found |= {tree.size for tree in getattr(drafter, "trees", ())}
    given = getattr(drafter, "sampling", None)
    return sorted(found | set(tree_sizes(given) if given is not None else ())) if found else list(NODES)


def warm_up(trunk: Trunk, drafter: Drafter, rows: Sequence[int] = (1,)) -> dict[StepSize, float]:
    """Compile the steps of ``drafter`` now, with a progress bar; return the seconds that each took.

    What is compiled already, in this process, is left out; what another process compiled comes from the disk, on a
    processor in milliseconds.

    Raises:
        UserError: as :func:`use_compiled`, or a compiler that is not there.
    """
    steps = use_compiled(trunk, drafter, rows)
    left = [size for size in step_sizes(drafter, rows) if size not in steps.compiled]
    taken = {}
    with progress(len(left), "compiling") as advance:
        for size in left:
            advance(0, rows=size.rows, nodes=size.nodes)
            taken[size] = seconds(lambda s=size: compile_step(trunk, s))  # type: ignore[misc]
            advance()
    return taken


@torch.inference_mode()
def compile_step(trunk: Trunk, size: StepSize) -> None:
    """Take one step of this size, as decoding will.

    Over random tokens: the same token again and again brings some models where half precision has no say, and what is
    compiled is compared with what is not.
    """
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(trunk.draftable, (size.rows, PROMPT + size.nodes), generator=generator).to(trunk.device)
    cache = trunk.new_cache(size.rows)
    trunk.prefill(ids_BT[:, :PROMPT], [PROMPT] * size.rows, cache)
    tokens_BN = ids_BT[:, PROMPT:].contiguous()
    shape = Shape.static(Topology.chain(size.nodes - 1), trunk.device)
    trunk.tree_forward(DraftTree(shape, tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool)), cache)


def run(command: str, argv: list[str]) -> int:
    """``medusa warmup``: compile a run's steps, so that later processes find them on the disk."""
    from medusa.cli import new_parser, parse

    from .cli import add_engine, load_engine

    parser = new_parser(
        command,
        "Compile the steps of a run's tree for this machine. What is compiled holds for the dtype and the number of"
        " threads it is compiled with. On a processor it is kept in the cache folder, for any weights of such a model:"
        " generate, chat and serve have it in milliseconds, without an option. On a GPU it is for `--compile`.",
    )
    parser.add_argument("run", type=str, help="a folder made by `medusa train`, or the hub id of one")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="rows of a batch, each number for itself")
    add_engine(parser)
    args = parse(parser, argv)
    engine = load_engine(args)
    times = engine.warmup(args.rows)
    print("rows  nodes  seconds")
    for size, taken in times.items():
        print(f"{size.rows:4}  {size.nodes:5}  {taken:7.1f}")
    if engine.trunk.compiled is not None and engine.trunk.compiled.ahead:
        print(f"kept in {steps_folder()}", file=sys.stderr)
    return 0
