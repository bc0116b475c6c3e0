"""What could be exported where this can't: the recipe for heads of kind ``medusa`` on the same trunk, or EAGLE-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa import configs
from medusa.checkpoint import CONFIG, MANIFEST, read_manifest
from medusa.data.trunks import PARENT, SOURCES
from medusa.eagle_files import eagle_place, read_eagle_manifest

TRUNK = "trunk"  # the folder in its run of a trunk that was made there
PLAIN = ("vocab", "rank", "markov")  # what a recipe of exportable heads leaves out
# By whether it is an EAGLE layer: what a new run is called after, and the options that make it exportable.
KIND = {False: "medusa", True: "eagle3"}
PLAINLY = {
    False: "--heads.kind medusa --heads.vocab null --heads.markov null",
    True: "--eagle.version 3 --eagle.layers [1,2,3]",
}


def way_out(folder: Path, *, eagle: bool = False) -> str:
    """What to run for heads on the trunk of the run ``folder`` that every format takes, or for an ``eagle`` layer."""
    what = "an exportable layer" if eagle else "exportable heads"
    manifest = _manifest(folder, eagle)
    if manifest is None:
        return f"train {what} for that trunk with `medusa train`"
    trunk = _trunk(*manifest)
    names = sorted(configs.names(), key=len)  # the plainest of several for one trunk has the shortest name
    recipes = {name: _read(configs.path(name)) for name in names}
    known = [trunk, *_as_recipes_have_it(Path(trunk), recipes)]
    same = {name: content for name, content in recipes.items() if _drafts_alone(content, known)}
    for name, content in same.items():
        if _is_exportable(content, eagle):
            here = content["trunk"]["name"] == trunk
            elsewhere = "" if here else f" --trunk.name {trunk} --run {folder}-{KIND[eagle]}"
            return f"train {what} on the same trunk with `medusa train {name}{elsewhere}`"
    if (folder / CONFIG).is_file():
        run = f"--run {folder}-{KIND[eagle]}"
        again = f"{folder / CONFIG} --trunk.new null --trunk.name {trunk} --data.tokenizer trunk {run}"
    else:
        again = f"{next(iter(same), 'RECIPE')} --run runs/exportable"
    return f"train {what} on the same trunk with `medusa train {again} {PLAINLY[eagle]}`"


def _manifest(folder: Path, eagle: bool) -> tuple[Path, str, bool] | None:
    """The folder whose manifest names the trunk, that name, and whether it is a folder relative to it."""
    if eagle:
        place = eagle_place(folder)
        found = None if place is None else read_eagle_manifest(place)
        return None if place is None or found is None else (place, found.trunk, found.local)
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    return folder, manifest.trunk, manifest.local


def _is_exportable(recipe: dict[str, Any], eagle: bool) -> bool:
    if eagle:
        layer = recipe.get("eagle") or {}
        return layer.get("version") == 3 and layer.get("layers") is not None
    heads = recipe.get("heads") or {}
    return heads.get("kind") == "medusa" and not any(heads.get(key) for key in PLAIN)


def _trunk(folder: Path, name: str, local: bool) -> str:
    """The trunk's name as a recipe has it: a hub id, or a folder, from here if it lies below."""
    if not local:
        return str(PARENT / name) if name in SOURCES else name
    place = (folder / name).resolve()
    here = Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else str(place)


def _as_recipes_have_it(trunk: Path, recipes: dict[str, dict[str, Any]]) -> list[str]:
    """What recipes call a trunk that was made by one of them, wherever it lies: of that one's size, on its text."""
    config = trunk.parent / CONFIG  # of the run that made it
    mine = _read(config) if trunk.name == TRUNK and config.is_file() else {}
    found = []
    for recipe in recipes.values():
        new, sizes = recipe.get("trunk", {}).get("new"), (mine.get("trunk") or {}).get("new")
        if not new or not sizes or any(sizes.get(key) != value for key, value in new.items()):
            continue
        if all((mine.get("data") or {}).get(key) == recipe["data"].get(key) for key in ("source", "tokenizer")):
            found.append(f"{recipe['run']}/{TRUNK}")
    return found


def _read(path: Path) -> dict[str, Any]:
    import yaml

    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def _drafts_alone(recipe: dict[str, Any], trunks: list[str]) -> bool:
    """Whether a recipe leaves the trunk as it is, and that is one of these."""
    return recipe.get("trunk", {}).get("name") in trunks and "joint" not in recipe
