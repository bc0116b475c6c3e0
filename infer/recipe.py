"""What the ``config.yaml`` of a run says to decoding: the text it was trained on, and how its tree is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from medusa.checkpoint import CONFIG
from medusa.data.corpus import DataConfig
from medusa.errors import UserError, nearest, reason

# What calibration goes by: the section of the recipe and the least value of each.
CALIBRATED_BY = {
    "prompts": ("evaluation", 2),
    "prompt_tokens": ("evaluation", 1),
    "tokens": ("evaluation", 2),
    "sizes": ("calibration", 1),
    "rounds": ("calibration", 1),
}


def data_config(folder: Path) -> DataConfig:
    """The text of the run in ``folder``. Raises UserError if its recipe is missing, broken or names none."""
    path = folder / CONFIG
    data = _read(path).get("data")
    if not isinstance(data, dict):
        raise UserError(f"{path} has no section data: it names the text that held-out prompts come from")
    known = [field.name for field in fields(DataConfig)]
    for key in data:
        if key not in known:
            raise UserError(f"{path}: unknown key data.{key}{nearest(key, known)}: the keys are {', '.join(known)}")
    return DataConfig(**data)


def calibration_settings(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each key of ``CALIBRATED_BY``: the one ``given`` or, where that is None, the recipe's.

    Raises:
        UserError: neither has a value, or one is out of range.
    """
    path = folder / CONFIG
    recipe = _read(path) if None in given.values() else {}
    settings = {}
    for name, (section, least) in CALIBRATED_BY.items():
        value, called = given[name], name
        if value is None:
            part, called = recipe.get(section), f"{path}: {section}.{name}"
            value = part.get(name) if isinstance(part, dict) else None
            if value is None:
                raise UserError(f"{path} has no {section}.{name}: give --{name}")
        numbers = value if name == "sizes" else [value]
        if not isinstance(numbers, list) or not numbers or any(type(n) is not int or n < least for n in numbers):
            kind = "whole numbers" if name == "sizes" else "a whole number"
            raise UserError(f"{called}={value}: give {kind} of at least {least}")
        settings[name] = value
    return settings


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: it names the text that held-out prompts come from") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} can't be read ({reason(error)}): it names the text of the run") from error
    return content if isinstance(content, dict) else {}
