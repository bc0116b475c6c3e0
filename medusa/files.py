"""Writing files so that nothing half-written is ever seen, reading JSON with errors that help, and whose files are."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa.errors import UserError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in place: never half a file is seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    temporary.touch(exist_ok=False)  # by the user's own umask, unlike tempfile's private files
    mode = temporary.stat().st_mode
    try:
        write(temporary)
        temporary.chmod(mode)  # a writer may have put a file of its own there
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content``, atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, atomically, line ends as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def is_own(path: Path) -> bool:
    """Whether nobody but the user can have written it, as far as the system knows users: asked of what is run.

    Raises:
        OSError: there is no such file.
    """
    if not hasattr(os, "geteuid"):
        return True
    stat = path.lstat()
    return stat.st_uid == os.geteuid() and not stat.st_mode & 0o022


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; UserError if it is missing or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give a folder made by `medusa train`") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as JSON ({error}): make the folder anew with `medusa train`") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: make the folder anew with `medusa train`")
    return content
