"""The files of what is bound to a trunk, heads or an EAGLE layer: a manifest that says whose it is, and its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.bound import Bound
from medusa.errors import UserError, reason
from medusa.files import read_json, write_atomically, write_json
from medusa.trunk import Trunk

FORMAT = 1
DRAFT_IDS = "draft_ids"  # the tensor beside the weights: which tokens are drafted from

Made = TypeVar("Made", bound=Bound)


@dataclass(frozen=True, kw_only=True)
class TrunkRef:
    """Which trunk a folder's weights belong to: its hub id or, if ``local``, its folder, relative to theirs."""

    trunk: str
    fingerprint: str
    revision: str | None = None
    local: bool = False


@dataclass(frozen=True)
class BoundFiles:
    """The names of the files, and what is in them, as errors name it: ``the heads``."""

    what: str
    manifest: str
    weights: str

    @property
    def again(self) -> str:
        """The way out where the files are of no use."""
        return f"train {self.what} anew with `medusa train`"

    def save(
        self,
        folder: Path,
        module: Bound,
        own: Mapping[str, Any],
        trunk: str,
        revision: str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Write the weights of ``module``, then the manifest that makes the folder one of such weights.

        Args:
            folder: theirs.
            module: what is saved.
            own: the manifest's part that says what ``module`` looks like.
            trunk: a hub id or a folder; a folder is stored relative to this one, so that both move together.
            revision: of the hub id.
            dtype: of the weights; None for the trunk's, in which all that is bound to it computes: what they were kept
                in beside that for training would be read by nobody.
        """
        dtype = dtype or module.trunk.dtype
        weights = {
            name: value.detach().to(dtype if value.is_floating_point() else value.dtype).contiguous().cpu()
            for name, value in module.state_dict().items()
        }
        write_atomically(folder / self.weights, lambda temporary: save_file(weights, temporary, {"format": "pt"}))
        if local := Path(trunk).is_dir():
            trunk = os.path.relpath(Path(trunk).resolve(), folder.resolve())
        ref = TrunkRef(trunk=trunk, fingerprint=module.trunk.fingerprint(), revision=revision, local=local)
        write_json(folder / self.manifest, {"format": FORMAT, **own, **vars(ref)})

    def read(self, folder: Path) -> dict[str, Any]:
        """What the manifest says, but its format; UserError if there is none, one of another format, or no trunk."""
        path = folder / self.manifest
        content = read_json(path)
        if (found := content.pop("format", None)) != FORMAT:
            raise UserError(f"{path} has format {found}: this version reads format {FORMAT}")
        if not isinstance(trunk := content.get("trunk"), str):
            raise UserError(f"{path}: trunk is {trunk!r}, not a name: {self.again}")
        return content

    def trunk_source(self, folder: Path, ref: TrunkRef) -> str:
        """The name to load the trunk by: its folder, if it was one, else a hub id. UserError if the folder is gone."""
        if not ref.local:
            return ref.trunk
        place = (folder / ref.trunk).resolve()
        if not place.is_dir():
            raise UserError(f"the trunk of {self.what} in {folder} is not at {place}: move it back, or {self.again}")
        return str(place)

    def load(
        self, folder: Path, ref: TrunkRef, trunk: Trunk, vocab: int | None, make: Callable[[Tensor | None], Made]
    ) -> Made:
        """Put the folder's weights into what ``make`` makes of the ids of the draft vocabulary, ``vocab`` of them.

        Raises:
            UserError: another trunk than that of ``ref``, what ``make`` refuses, or tensors that are missing, left over
                or mis-shaped.
        """
        if (found := trunk.fingerprint()) != ref.fingerprint:
            raise UserError(
                f"{folder} holds {self.what} of trunk {ref.fingerprint}, this trunk is {found}: load the one that it"
                f" names ({ref.trunk}), or train anew for this one"
            )
        path = folder / self.weights
        weights = self._tensors(path)
        draft_ids = None
        if vocab is not None:
            check_shapes(path, {name: weights[name] for name in weights if name == DRAFT_IDS}, {DRAFT_IDS: (vocab,)})
            draft_ids = weights[DRAFT_IDS]
        try:
            made = make(draft_ids)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        fill(made, weights, path)
        return made.eval()

    def _tensors(self, path: Path) -> dict[str, Tensor]:
        try:
            return load_file(path)
        except FileNotFoundError as error:
            raise UserError(f"{path} does not exist: {self.again}") from error
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} can't be read ({reason(error)}): {self.again}") from error


def fill(module: Bound, weights: Mapping[str, Tensor], path: Path) -> None:
    """Put ``weights``, those of ``path``, into ``module``. UserError if they are not exactly its own."""
    check_shapes(path, weights, {name: tuple(value.shape) for name, value in module.state_dict().items()})
    module.load_state_dict(dict(weights))


def check_shapes(path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are missing, left over or mis-shaped."""
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != expected.get(name):
            raise UserError(
                f"{path}: tensor {name} is {found}, what is said beside it needs"
                f" {expected.get(name, 'none of that name')}: the files don't belong together, or are of another trunk"
            )
