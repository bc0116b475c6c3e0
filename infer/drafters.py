"""From the name of a drafter to a drafter: the one place that knows the names a user may give.

A name is a word, or a word and what it is about: ``cut:4`` drafts with the trunk's own first four layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from medusa.checkpoint import CALIBRATION, MANIFEST, load_heads, load_tree
from medusa.cut import cut
from medusa.dialects import is_published, load_published, published_tree
from medusa.drafters.base import Drafter
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.lookahead import LookaheadDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.prompt_lookup import PromptLookupDrafter
from medusa.errors import UserError, nearest
from medusa.files import read_json
from medusa.tree import Topology
from medusa.trunk import Trunk

# Each word, and what follows its colon; "" where nothing does.
DRAFTERS = {
    "auto": "",
    "none": "",
    "draft": "FOLDER",
    "cut": "LAYERS",
    "prompt-lookup": "",
    "lookahead": "",
    "dynamic": "NODES",
    "mixed": "NODES",
}
ALONE: dict[str, Callable[[], Drafter]] = {"prompt-lookup": PromptLookupDrafter, "lookahead": LookaheadDrafter}


def make_drafter(name: str, trunk: Trunk, folder: Path | None) -> Drafter:
    """The drafter ``name`` for ``trunk``.

    "auto" stands for the heads and the tree in ``folder``, "dynamic:NODES" for its heads with the likeliest tree of so
    many nodes in every step, "mixed:NODES" for the same and prompt lookup in one tree, "none" for no drafts,
    "draft:FOLDER" for a draft model with the trunk's tokenizer (a hub id will do), "cut:LAYERS" for the first layers of
    the trunk itself, "prompt-lookup" for what followed before in the text, "lookahead" for the trunk's own n-grams.

    Raises:
        UserError: an unknown name, or what it names is not there or doesn't belong to the trunk.
    """
    word, about = split_name(name)
    if word == "none":
        return NullDrafter()
    if word == "auto":
        return _heads(name, trunk, folder)
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
    if bool(names[word]) != bool(about) or (colon and not about):
        raise UserError(f"{kind}={name!r}: give it as {listed({word: names[word]})}")
    return word, about


def listed(names: Mapping[str, str] = DRAFTERS) -> str:
    """The names that may be given, in words."""
    return ", ".join(f"{each}:{what}" if what else each for each, what in names.items())


def draft_model(word: str, about: str, trunk: Trunk) -> Trunk:
    """The second model that ``draft:ABOUT`` or ``cut:ABOUT`` names, on the trunk's device and in its dtype."""
    if word == "draft":
        return Trunk.load(about, dtype=trunk.dtype, device=trunk.device)
    if not about.isdecimal():
        raise UserError(f"drafter='cut:{about}': give the number of layers, such as cut:2")
    return cut(trunk, int(about))


def has_heads(folder: Path | None) -> bool:
    """Whether ``folder`` holds heads, ours or as the reference publishes them."""
    return folder is not None and ((folder / MANIFEST).is_file() or is_published(folder))


def _heads(name: str, trunk: Trunk, folder: Path | None) -> MedusaDrafter:
    if folder is None or not has_heads(folder):
        where = "a plain trunk" if folder is None else str(folder)
        raise UserError(
            f"drafter={name!r} takes the heads of a folder made by `medusa train`, and {where} has no {MANIFEST}: give"
            " such a folder, or another drafter"
        )
    if not (folder / MANIFEST).is_file():
        heads = load_published(folder, trunk)
        return MedusaDrafter(heads, published_tree(folder, heads.config))
    heads = load_heads(folder, trunk)
    return MedusaDrafter(heads, load_tree(folder, heads.config))


def _dynamic(own: MedusaDrafter, nodes: int, folder: Path | None) -> DynamicDrafter:
    """The folder's heads with dynamic trees; those of Hydra draw the folder's tree, as much of it as goes in."""
    sampling = None
    if own.heads.config.kind == "hydra" and nodes > 1:
        sampling = Topology(own.topology.parents[:nodes], own.topology.ranks[:nodes])
    return DynamicDrafter(own.heads, nodes, temperatures=_temperatures(folder), sampling=sampling)


def _temperatures(folder: Path | None) -> list[float] | None:
    """Those that calibration found, if it did: heads as published have none, nor those calibrated before there were."""
    if folder is None or not (folder / CALIBRATION).is_file():
        return None
    found: list[float] | None = read_json(folder / CALIBRATION).get("temperatures")
    return found
