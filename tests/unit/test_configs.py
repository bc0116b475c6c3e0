"""The recipes that ship with the package: found by name, parsed, and planned without loading data or weights."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from medusa import __main__ as cli
from medusa import configs
from medusa.data import trunks
from medusa.errors import UserError
from medusa.train.cli import read_config
from medusa.train.config import TrainConfig
from medusa.train.newtrunk import check_name, maker_of
from medusa.train.plan import inner_size, plan
from medusa.train.record import to_yaml

LLAMA = Path(__file__).parent / "llama-8b"  # the config.json of Llama-3.1-8B, and no weights
SEVERAL = "8gpu"  # how recipes for several processes end
KINDS = ("tinyshakespeare", "tinyshakespeare-medusa", "tinyshakespeare-root")


@cache
def recipe(name: str) -> TrainConfig:
    return read_config([name])[0]


def test_every_shipped_recipe_is_found_by_name() -> None:
    assert "tinyshakespeare" in configs.names()
    for name in configs.names():
        assert configs.path(name).is_file() and configs.path(name).suffix == ".yaml"


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'tinyshakespear' \(did you mean tinyshakespeare"):
        configs.path("tinyshakespear")


@pytest.mark.parametrize("name", configs.names())
def test_a_recipe_opens_with_its_command_and_is_named_as_its_run(name: str) -> None:
    opening = configs.path(name).read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    launcher = "torchrun --standalone --nproc_per_node=8 -m -- " if name.endswith(SEVERAL) else ""
    assert f"#   {launcher}medusa train {name}\n" in opening + "\n"
    assert recipe(name).run == f"runs/{name}"


@pytest.mark.parametrize("name", configs.names())
def test_a_recipe_is_planned_without_data_or_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # no text is read
    assert cli.main(["train", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"runs/{name}" in out and ("heads " in out or "eagle " in out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", configs.names())
def test_a_recipe_survives_being_written_down(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(recipe(name)))
    assert read_config([str(tmp_path / "config.yaml")])[0] == recipe(name)


@pytest.mark.parametrize("name", configs.names())
def test_a_recipe_makes_its_trunk_or_names_one_that_another_makes(name: str) -> None:
    trunk = recipe(name).trunk
    if trunk.new is None and not (trunk.name or "").startswith("meta-llama/"):
        maker = maker_of(trunk.name or "")
        assert maker in [f"medusa train {other}" for other in configs.names()] + ["medusa trunk smollm2"]


def test_a_missing_trunk_of_medusa_trunk_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"trunks/smollm2: there is no such folder; `medusa trunk smollm2` makes it"):
        check_name("trunks/smollm2")
    (trunks.PARENT / "smollm2").mkdir(parents=True)
    check_name("trunks/smollm2")
    check_name("trunks/another")  # may be a hub id


@pytest.mark.parametrize("name", [name for name in configs.names() if name.startswith("llama-8b")])
def test_a_large_recipe_fits_its_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8" if name.endswith(SEVERAL) else "1")
    config = read_config([name, "--trunk.name", str(LLAMA)])[0]
    found = "\n".join(plan(config))
    assert "8,030,261,248 parameters" in found
    whole = [float(size) for size in re.findall(r"([\d.]+) GB with the others", found)]
    assert len(whole) == (1 if config.joint is None else 2) and max(whole) < 60  # of 80, for activations need some
    opening = configs.path(name).read_text().partition("\n\n")[0]
    assert f"{max(whole):.0f} GB" in opening and "Not run" in opening


def test_the_three_kinds_are_compared_at_equal_tokens_on_one_trunk() -> None:
    recipes = [read_config([name])[0] for name in KINDS]
    assert {recipe.heads.kind for recipe in recipes} == {"medusa", "root", "hydra"}
    tokens = {(r.heads_training.steps, r.heads_training.batch, r.data.block, r.heads.num) for r in recipes}
    assert len(tokens) == 1


def test_the_demo_trunk_is_large_enough_to_be_honest() -> None:
    new = read_config(["tinyshakespeare"])[0].trunk.new
    assert new is not None and inner_size(new) >= 800_000


def test_the_command_line_overrides_a_recipe() -> None:
    argv = ["tinyshakespeare", "--heads.num", "3", "--trunk.new.layers=2", "--calibration.sizes", "[1,4]"]
    config, _ = read_config(argv)
    assert config.heads.num == 3 and config.calibration.sizes == (1, 4)
    assert config.trunk.new is not None and config.trunk.new.layers == 2 and config.trunk.new.hidden == 128
