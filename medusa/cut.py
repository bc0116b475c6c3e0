"""A trunk's own beginning as a model: its first layers, its final norm, its vocabulary projection.

Nothing is trained and nothing is copied: the cut shares every weight with the trunk, and has only a shorter list of
layers (the self-speculation of Zhang et al. 2024, "Draft & Verify", with the layers at the end skipped). How well it
guesses depends on the model; one trained with early exits (Elhoushi et al. 2024, LayerSkip) is made for it.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from medusa.errors import UserError
from medusa.family import text_config
from medusa.trunk import Trunk


def cut(trunk: Trunk, layers: int) -> Trunk:
    """The trunk of the first ``layers`` layers of ``trunk``, which is left as it is.

    Raises:
        UserError: not 1 to one less than there are; a model whose layers are not one list, or are moved to where they
            work for each forward.
    """
    total = trunk.config.num_hidden_layers
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers < total:
        raise UserError(f"a cut of {layers!r} layers: the trunk has {total}, give 1 to {total - 1}")
    path = _path_to_layers(trunk, total)
    module = trunk.model.get_submodule(path)
    shorter: nn.Module = nn.ModuleList(list(module)[:layers])
    shorter.train(module.training)
    while path:  # from the list up to the model: each module on the way is a copy that holds the one below
        path, _, name = path.rpartition(".")
        above = _shallow(trunk, trunk.model.get_submodule(path))
        above._modules[name] = shorter
        shorter = above
    model: Any = shorter
    # the body keeps the whole config: what it sized by the number of layers (Gemma 4's inputs per layer) stays as it is
    model.config = _shortened(trunk, layers)
    return Trunk(model, trunk.tokenizer)


def _path_to_layers(trunk: Trunk, total: int) -> str:
    """The name of the one list of the trunk's layers. Lists inside layers, such as experts, may be as long."""
    found: list[str] = []
    for name, module in trunk.model.named_modules():  # outer modules come first
        outer = not any(name.startswith(f"{each}.") for each in found)
        if outer and isinstance(module, nn.ModuleList) and len(module) == total:
            found.append(name)
    if len(found) != 1:
        lists = " and ".join(found) or "none"
        raise UserError(
            f"model type {trunk.family!r} can't be cut: of lists of its {total} layers there is not one but {lists};"
            " use a draft model of its own"
        )
    return found[0]


def _shallow(trunk: Trunk, module: nn.Module) -> nn.Module:
    """A copy with the same parameters and the same modules in a dict of its own."""
    if "forward" in vars(module):  # accelerate puts a forward on the object, which is bound to the whole model
        raise UserError(
            f"model type {trunk.family!r} is spread by a device_map, so it can't be cut: load it on one device, or use"
            " a draft model of its own"
        )
    shallow = copy.copy(module)
    shallow._modules = dict(module._modules)
    return shallow


def _shortened(trunk: Trunk, layers: int) -> Any:
    config = copy.deepcopy(trunk.model.config)
    text = text_config(config)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:layers]
    return config
