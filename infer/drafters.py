"""From the name of a drafter to a drafter: the one place that knows the names a user may give.

A name is a word, or a word and what it is about: ``cut:4`` drafts with the trunk's own first four layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from medusa.bound import Bound
from medusa.checkpoint import CALIBRATION, MANIFEST, load_heads, load_tree
from medusa.cut import cut
from medusa.dialects import is_published, load_published, published_tree
from medusa.drafters.base import Drafter
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.eagle import DEPTH, EagleDrafter
from medusa.drafters.lookahead import LookaheadDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.prompt_lookup import PromptLookupDrafter
from medusa.drafters.sized import SizedDrafter
from medusa.eagle import EagleLayer
from medusa.eagle_files import EAGLE, PLACE, eagle_place, eagle_tree, load_eagle
from medusa.eagle_published import is_published_eagle, load_published_eagle
from medusa.errors import UserError, nearest
from medusa.files import read_json
from medusa.packed import pack, packed_layers
from medusa.parallel import spread
from medusa.selfcheck import check_tree
from medusa.sizing import Sizing, rungs
from medusa.tree import Topology
from medusa.trunk import Trunk

Drafts = TypeVar("Drafts", bound=Bound)

# Each word, and what follows its colon; "" where nothing does, in brackets what may be left out.
DRAFTERS = {
    "auto": "",
    "none": "",
    "draft": "FOLDER",
    "cut": "LAYERS",
    "prompt-lookup": "",
    "lookahead": "",
    "sized": "",
    "dynamic": "NODES",
    "mixed": "NODES",
    "eagle": "[:FOLDER][:NODES]",
}
ALONE: dict[str, Callable[[], Drafter]] = {"prompt-lookup": PromptLookupDrafter, "lookahead": LookaheadDrafter}


def make_drafter(name: str, trunk: Trunk, folder: Path | None) -> Drafter:
    """The drafter ``name`` for ``trunk``.

    "auto" stands for the heads and the tree in ``folder``, or its EAGLE layer where it has none; "sized" for its heads
    with the tree of its calibration that is fastest here for as many rows as there are, or no drafts, but in batches
    with a row that samples with its own tree; "dynamic:NODES" for its heads with the likeliest tree of so many nodes in
    every step, "mixed:NODES" for the same and prompt lookup in one tree; "eagle" for its EAGLE layer and that one's
    tree, "eagle:NODES" for the layer with the likeliest tree,
    "eagle:FOLDER" and "eagle:FOLDER:NODES" for a layer elsewhere, ours or as it was published; "none" for no drafts,
    "draft:FOLDER" for a draft model with the trunk's tokenizer (a hub id will do), "cut:LAYERS" for the first layers of
    the trunk itself, "prompt-lookup" for what followed before in the text, "lookahead" for the trunk's own n-grams.

    Raises:
        UserError: an unknown name, or what it names is not there or doesn't belong to the trunk.
    """
    word, about = split_name(name)
    if word == "none":
        return NullDrafter()
    if word == "eagle" or (word == "auto" and has_drafts(folder) and not has_heads(folder)):
        return _eagle(name, about, trunk, folder)
    if word == "auto":
        return _heads(name, trunk, folder)
    if word == "sized":
        return _sized(_heads(name, trunk, folder), folder)
    if word in ("dynamic", "mixed"):
        if not about.isdecimal():
            raise UserError(f"drafter={name!r}: give the number of nodes, such as {word}:16")
        dynamic = _dynamic(_heads(name, trunk, folder), int(about), folder)
        return dynamic if word == "dynamic" else MixedDrafter(dynamic)
    made = ALONE[word]() if word in ALONE else DraftModelDrafter(draft_model(word, about, trunk))
    made.open(trunk)  # what does not fit is refused now
    return made


def split_name(name: str, names: Mapping[str, str] = DRAFTERS, kind: str = "drafter") -> tuple[str, str]:
    """The two parts of a drafter's name, or of another ``kind`` of name that is made like it.

    Raises:
        UserError: an unknown word, or one that needs what it is about, or takes none.
    """
    word, colon, about = name.partition(":")
    if word not in names:
        raise UserError(f"{kind}={name!r}{nearest(word, names)}: choose from {listed(names)}")
    may = names[word].startswith("[")
    if (bool(names[word]) != bool(about) and not may) or (colon and not about):
        raise UserError(f"{kind}={name!r}: give it as {listed({word: names[word]})}")
    return word, about


def listed(names: Mapping[str, str] = DRAFTERS) -> str:
    """The names that may be given, in words."""
    return ", ".join(f"{each}:{what}" if what and what[0] != "[" else each + what for each, what in names.items())


def draft_model(word: str, about: str, trunk: Trunk) -> Trunk:
    """The second model that ``draft:ABOUT`` or ``cut:ABOUT`` names, on the trunk's device and in its dtype."""
    if word == "draft":
        together = spread(trunk.model)
        packs = None if packed_layers(trunk.model) else False
        made = Trunk.load(about, dtype=trunk.dtype, device=trunk.device, check=not together, packed=packs)
        if together:  # checked without a trial of what is faster, which may end otherwise on each process
            check_tree(made)
        return made
    if not about.isdecimal():
        raise UserError(f"drafter='cut:{about}': give the number of layers, such as cut:2")
    return cut(trunk, int(about))


def has_heads(folder: Path | None) -> bool:
    """Whether ``folder`` holds heads, ours or as the reference publishes them."""
    return folder is not None and ((folder / MANIFEST).is_file() or is_published(folder))


def has_drafts(folder: Path | None) -> bool:
    """Whether ``folder`` holds what "auto" takes: heads, or an EAGLE layer."""
    return has_heads(folder) or (folder is not None and eagle_place(folder) is not None)


def _eagle(name: str, about: str, trunk: Trunk, folder: Path | None) -> EagleDrafter:
    """An EAGLE layer, the run's or of a folder, with its tree or the likeliest of so many nodes."""
    elsewhere, _, last = about.rpartition(":")
    if not last.isdecimal():
        elsewhere, last = about, ""
    layer, place = _layer(name, Path(elsewhere).expanduser() if elsewhere else folder, trunk)
    tree = eagle_tree(place)
    if not last:
        return EagleDrafter(layer, tree)
    nodes, warm = int(last), kept_temperatures(place)
    sampling = Topology(tree.parents[:nodes], tree.ranks[:nodes]) if min(nodes, tree.size) > 1 else None
    return EagleDrafter(layer, sampling, nodes=nodes, temperatures=warm, depth=len(warm) if warm else DEPTH)


def _layer(name: str, folder: Path | None, trunk: Trunk) -> tuple[EagleLayer, Path]:
    """The EAGLE layer in a folder, and where it is. UserError if there is none."""
    place = None if folder is None else eagle_place(folder)
    if place is not None:
        return _as_the_trunk(load_eagle(place, trunk)), place
    if folder is not None and is_published_eagle(folder):
        return _as_the_trunk(load_published_eagle(folder, trunk)), folder
    where = "a plain trunk" if folder is None else str(folder)
    raise UserError(
        f"drafter={name!r} takes an EAGLE layer, and {where} has no {PLACE / EAGLE}: give a run that was trained with"
        " one, or eagle:FOLDER with the folder of a layer, ours or as it was published"
    )


def _heads(name: str, trunk: Trunk, folder: Path | None) -> MedusaDrafter:
    if folder is None or not has_heads(folder):
        where = "a plain trunk" if folder is None else str(folder)
        raise UserError(
            f"drafter={name!r} takes the heads of a folder made by `medusa train`, and {where} has no {MANIFEST}: give"
            " such a folder, or another drafter"
        )
    if not (folder / MANIFEST).is_file():
        heads = _as_the_trunk(load_published(folder, trunk))
        return MedusaDrafter(heads, published_tree(folder, heads.config))
    heads = _as_the_trunk(load_heads(folder, trunk))
    return MedusaDrafter(heads, load_tree(folder, heads.config))


def _as_the_trunk(drafts: Drafts) -> Drafts:
    """With packed weights where the trunk has them."""
    if packed_layers(drafts.trunk.model):
        for part in drafts.parts:
            pack(part)
    return drafts


def _dynamic(own: MedusaDrafter, nodes: int, folder: Path | None) -> DynamicDrafter:
    """The folder's heads with dynamic trees.

    Where laws depend on drafted tokens, rows that sample draw the folder's tree, as much of it as goes in.
    """
    sampling = None
    if own.heads.config.stepwise and nodes > 1:
        sampling = Topology(own.topology.parents[:nodes], own.topology.ranks[:nodes])
    return DynamicDrafter(own.heads, nodes, temperatures=kept_temperatures(folder), sampling=sampling)


def _sized(own: MedusaDrafter, folder: Path | None) -> SizedDrafter:
    """The folder's heads with the tree that pays for the rows there are."""
    assert folder is not None, "heads come from a folder"
    sizing = Sizing(own.heads, rungs(folder, own.topology), own=own.topology)
    return SizedDrafter(own, sizing.trees, sizing)


def kept_temperatures(folder: Path | None) -> list[float] | None:
    """Those that calibration found, if it did: heads as published have none, nor those calibrated before there were."""
    if folder is None or not (folder / CALIBRATION).is_file():
        return None
    found: list[float] | None = read_json(folder / CALIBRATION).get("temperatures")
    return found
