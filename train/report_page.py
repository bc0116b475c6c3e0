"""The report of a run as files: a page that needs nothing beside itself, its pictures, and the curves as JSON."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import medusa
from medusa.curves import as_json
from medusa.errors import UserError, reason
from medusa.files import write_bytes, write_text
from medusa.tables import Table

from .report import Picture, Run, Section, curves_of, facts, sections
from .report_bench import OURS

PAGE, CURVES = "index.html", "curves.json"
FORMAT = 1  # of curves.json


def write_pages(runs: Sequence[Run], folder: Path) -> Path:
    """Write the report of one run or of several to ``folder``, and return the page's path.

    Files of the same names are replaced, others stay.

    Raises:
        UserError: a file can't be written.
    """
    drawn = curves_of(runs)
    parts = list(sections(runs, drawn))
    content = {"format": FORMAT, "runs": as_json(drawn)}
    try:
        for picture in (picture for part in parts for picture in part.pictures if picture.name.startswith(OURS)):
            write_bytes(folder / f"{file_name(picture.name)}.png", picture.content)
        write_text(folder / CURVES, json.dumps(content, allow_nan=False) + "\n")
        write_text(folder / PAGE, page(runs, parts))
    except OSError as error:
        raise UserError(f"the report can't be written ({reason(error)}): name another folder with --out") from error
    return folder / PAGE


def file_name(name: str) -> str:
    """A name of a stage or figure, which a log may hold any of, as that of a file."""
    return re.sub(r"[^\w-]+", "_", name)


def page(runs: Sequence[Run], parts: Sequence[Section]) -> str:
    """The page as HTML. What comes from files is escaped."""
    title = f"medusa: {runs[0].name}" if len(runs) == 1 else f"medusa: {len(runs)} runs"
    template = Template(files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        head="\n".join(_head(run, len(runs) > 1) for run in runs),
        body="\n".join(_section(part) for part in parts),
        foot=f"Made by medusa {escape(medusa.__version__)} from the files of {escape(', '.join(_places(runs)))}.",
    )


def _places(runs: Sequence[Run]) -> list[str]:
    return [str(run.folder) for run in runs]


def _head(run: Run, named: bool) -> str:
    cards = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in facts(run))
    name = f"<p><b>{escape(run.name)}</b></p>\n" if named else ""
    return f'{name}<p class="soft">{escape(run.status())}</p>\n<div class="facts">{cards}</div>'


def _section(part: Section) -> str:
    shown = "".join(map(_figure, part.pictures))
    blocks = [f"<h2>{escape(part.title)}</h2>"]
    blocks += [f'<div class="pictures">{shown}</div>'] if shown else []
    blocks += [_table(table, part.open) for table in part.tables]
    blocks += [f'<p class="soft">{escape(line)}</p>' for line in part.lines]
    return "<section>\n" + "\n".join(blocks) + "\n</section>"


def _figure(picture: Picture) -> str:
    wide = ' class="wide"' if picture.wide else ""
    source = f"data:image/png;base64,{b64encode(picture.content).decode('ascii')}"
    return f'<figure{wide}><img src="{source}" alt="{escape(picture.says)}"></figure>\n'


def _table(table: Table, shown: bool) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.title)}</caption>" if table.title and shown else ""
    kind = ' class="texts"' if is_text(table) else ""
    made = (
        f'<div class="scroll"><table{kind}>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return made if shown else f"<details><summary>{escape(table.title)}</summary>{made}</details>"


def is_text(table: Table) -> bool:
    """Whether its columns are words rather than numbers: they may be wrapped, and stand on the left."""
    return any(cell[:1].isalpha() for row in table.rows for cell in row[1:])
