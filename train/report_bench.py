"""What `medusa bench` left in a run folder: its report as it wrote it, tables, sentences and pictures."""

from __future__ import annotations

from pathlib import Path

from medusa.tables import Table

FOLDER, WORDS = "report", "report.md"
OURS = "run-"  # how the names of our own pictures begin, which lie beside the benchmark's
AGAIN = ("training", "cost_curve")  # its pictures of what is drawn here anyway


def read_words(folder: Path) -> tuple[list[Table], list[str]] | None:
    """The tables and sentences of the benchmark's report; None if there is none."""
    place = folder / FOLDER / WORDS
    return read_markdown(place.read_text(encoding="utf-8")) if place.is_file() else None


def read_markdown(text: str) -> tuple[list[Table], list[str]]:
    """Take apart what ``medusa.infer.bench.report.markdown`` writes: titles, the tables under them, and a list."""
    tables: list[Table] = []
    notes = []
    for line in text.splitlines():
        cells = line[2:-2].split(" | ")
        if line.startswith("## "):
            tables.append(Table(line[3:], [], []))
        elif line.startswith("* "):
            notes.append(line[2:])
        elif line.startswith("| ") and tables and not tables[-1].heads:
            tables[-1].heads.extend(cells)
        elif line.startswith("| ") and tables and not line.startswith("| --- |"):
            tables[-1].rows.append(cells)
    return tables, notes


def read_pictures(folder: Path) -> dict[str, bytes]:
    """The benchmark's pictures by name."""
    places = sorted((folder / FOLDER).glob("*.png"))
    return {
        place.stem: place.read_bytes()
        for place in places
        if not place.stem.startswith(OURS) and place.stem not in AGAIN and not place.name.startswith(".")
    }
