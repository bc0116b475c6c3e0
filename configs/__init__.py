"""What ships with the package: recipes, YAML files that open with their command; DeepSpeed's settings, JSON files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from medusa.errors import UserError, nearest

DEEPSPEED = "deepspeed"  # the folder of its settings


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


def deepspeed(name: str) -> Path:
    """Return the file of DeepSpeed settings that ``name`` means: one that ships, such as ``zero2``, or a path.

    Raises:
        UserError: there is no such file.
    """
    if name.endswith(".json"):
        if not (given := Path(name).expanduser()).is_file():
            raise UserError(f"deepspeed={name}: there is no such file; give zero2, zero3 or the path of a JSON file")
        return given
    folder = files(__name__) / DEEPSPEED
    known = sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".json"))
    if name not in known:
        raise UserError(
            f"deepspeed={name}: no settings of that name{nearest(name, known)}: give one of {', '.join(known)} or the"
            " path of a JSON file"
        )
    return Path(str(folder / f"{name}.json"))
