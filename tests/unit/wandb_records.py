"""Reads the file that Weights & Biases writes, by its format alone: LevelDB's log behind a header of seven bytes."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32 * 1024
MAGIC, VERSION = 0xBEE1, 0
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path, torn: bool = False) -> list[Any]:
    """All records of a file that is whole; AssertionError if it is not, unless it may be ``torn`` at its end."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert struct.unpack("<4sHB", content[:HEADER]) == (b":W&B", MAGIC, VERSION)
    found, parts, at = [], [], HEADER
    while at < len(content):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            assert not any(content[at : at + left])
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        part = content[at + HEADER : at + HEADER + length]
        if torn and len(part) < length:
            return found
        assert len(part) == length <= left - HEADER and zlib.crc32(bytes([kind]) + part) == checksum
        assert (kind in (FULL, FIRST)) == (not parts)
        parts.append(part)
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
        at += HEADER + length
    assert not parts
    return found


def is_whole(path: Path) -> bool:
    """Whether the run has ended in the file: wandb's own process writes it, shortly after it has ended here."""
    try:
        return any(record.WhichOneof("record_type") == "exit" for record in read_records(path))
    except (AssertionError, struct.error):
        return False


def config_of(records: list[Any]) -> dict[str, Any]:
    """The run's configuration, without wandb's own part."""
    found = {}
    for record in records:
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else []
        for item in updates:
            found[item.key or item.nested_key[0]] = json.loads(item.value_json)
    return {key: value for key, value in found.items() if key != "_wandb"}


def rows_of(records: list[Any]) -> list[dict[str, Any]]:
    """The rows of its history, in order, without wandb's own columns but the step."""
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if key not in ("_timestamp", "_runtime")})
    return rows


def run_of(records: list[Any]) -> Any:
    """The record that names the run."""
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")
