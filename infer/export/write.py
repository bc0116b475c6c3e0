"""Heads and EAGLE layers into another engine's folder, and the proof that what lies there is what was trained.

The folder is filled beside its place, read again by a model of the engine's own reader (``medusa.engines``,
``medusa.eagle_engines``) and compared on states of the trunk: names, shapes, every logit. Only then is it put in
place, whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import torch
from safetensors import SafetensorError

from medusa.eagle_exports import EAGLE_LAYOUTS
from medusa.eagle_files import eagle_place
from medusa.errors import UserError, nearest, reason
from medusa.exports import LAYOUTS, write
from medusa.files import write_text
from medusa.matrices import DTYPES, NotExpressible

from ..drafters import has_heads
from ..source import find
from .cards import Facts, card
from .eagle import eagle_piece
from .exportable import way_out
from .heads import heads_piece
from .parts import Agreement

CARD = "README.md"
FORMATS = (*LAYOUTS, *EAGLE_LAYOUTS)


@dataclass(frozen=True)
class Exported:
    """What was made: the folder, its files' sizes, and how near it came when it was read again."""

    folder: Path
    to: str
    sizes: dict[str, int]
    agreement: Agreement
    notes: list[str]


def export_run(
    source: str,
    to: str,
    out: str | Path,
    *,
    dtype: str = "auto",
    base: str | None = None,
    device: str = "auto",
    revision: str | None = None,
) -> Exported:
    """Write what ``source`` drafts with to the new folder ``out`` in the format ``to``, and check what was written.

    ``source`` is what :meth:`medusa.infer.Engine.load` takes. Its heads are written, and for the formats of EAGLE-3 its
    EAGLE layer. ``dtype``: of the weights, "auto" for what they are saved in. ``base``: the folder or hub id under
    which the engine finds the trunk; left out, where it lies here.

    Raises:
        UserError: an unknown format or dtype, something at ``out``, nothing to export, what the format can't express
            (the recipe for what it can, on the same trunk, is named), or a folder that does not read back as it should,
            which is then removed.
    """
    place = Path(out).expanduser()
    if to not in FORMATS:
        raise UserError(f"no format {to!r}{nearest(to, FORMATS)}: choose from {', '.join(FORMATS)}")
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"dtype={dtype!r}{nearest(dtype, DTYPES)}: choose from auto, {', '.join(DTYPES)}")
    folder = _folder(source, to, revision)
    precision = None if dtype == "auto" else getattr(torch, dtype)
    try:
        with new_folder(place) as made:
            piece = (heads_piece if to in LAYOUTS else eagle_piece)(
                folder, to, dtype=precision, base=base, device=device
            )
            write(made, piece.made)
            found = piece.compare(made)
            sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
            engine = LAYOUTS[to].engine if to in LAYOUTS else EAGLE_LAYOUTS[to].engine
            facts = Facts(
                place.name, to, engine, piece.base, piece.what, piece.about, piece.stage, piece.made, found.error
            )
            write_text(made / CARD, card(folder, piece.place, piece.trunk, facts))
            return Exported(place, to, sizes, found, piece.made.notes)
    except NotExpressible as error:
        raise UserError(f"{error}: {way_out(folder, eagle=to in EAGLE_LAYOUTS)}") from error


def _folder(source: str, to: str, revision: str | None) -> Path:
    """The folder of ``source``, if it holds what the format takes."""
    folder = find(source, revision)
    heads, layer = folder is not None and has_heads(folder), folder is not None and eagle_place(folder) is not None
    if folder is not None and (heads if to in LAYOUTS else layer):
        return folder
    if to in LAYOUTS:
        other = f"; its EAGLE layer goes to {' or '.join(EAGLE_LAYOUTS)}" if layer else ""
        raise UserError(
            f"{source} has no heads, which {to} takes: give a folder made by `medusa train`, or published heads{other}"
        )
    other = f"; its heads go to {' or '.join(LAYOUTS)}" if heads else ""
    raise UserError(
        f"{source} has no EAGLE layer, which {to} takes: give a run that trained one, by a recipe with eagle{other}"
    )


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A hidden folder beside ``place``, put there at the end if nothing was raised, and gone otherwise.

    Raises:
        UserError: something is there, or can't be put there.
    """
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise UserError(f"{place} exists: remove it, or name another folder with --out")
    made = place.parent / f".{place.name}.{token_hex(4)}"
    try:
        made.mkdir(parents=True)
        yield made
        os.replace(made, place)
    except (OSError, SafetensorError) as error:  # the latter is safetensors' name for a full disk
        raise UserError(f"{place} can't be written ({reason(error)}): name another folder with --out") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
