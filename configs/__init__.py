"""The recipes that ship with the package: YAML files, each opening with the command that runs it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from medusa.errors import UserError, nearest


def names() -> list[str]:
    """Return the names of the shipped recipes, sorted: file names without ``.yaml``."""
    return sorted(Path(entry.name).stem for entry in files(__name__).iterdir() if entry.name.endswith(".yaml"))


def path(name: str) -> Path:
    """Return the file of the shipped recipe ``name``, for instance ``tinyshakespeare``.

    Raises:
        UserError: there is no such recipe.
    """
    known = names()
    if name not in known:
        raise UserError(
            f"no recipe named {name!r}{nearest(name, known)}: give one of {', '.join(known)} or the path of a YAML file"
        )
    return Path(str(files(__name__) / f"{name}.yaml"))
