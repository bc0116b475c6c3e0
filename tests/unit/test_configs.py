"""The recipes that ship with the package are found by name."""

from __future__ import annotations

import pytest

from medusa import configs
from medusa.errors import UserError


def test_every_shipped_recipe_is_found_by_name() -> None:
    assert "tinyshakespeare" in configs.names()
    for name in configs.names():
        assert configs.path(name).is_file() and configs.path(name).suffix == ".yaml"


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'tinyshakespear' \(did you mean tinyshakespeare"):
        configs.path("tinyshakespear")
