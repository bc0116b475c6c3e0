"""Steps compiled ahead of time: a library of machine code per step, which another process has ready in milliseconds.

torch exports the step as a graph and inductor writes it out as C++ (AOTInductor). Neither weights nor addresses are in
what is compiled: weights are inputs of each call, so that a library holds for every checkpoint of a model, takes no
memory beside the model's own, and reads what a weight is now.

Dimensions: B rows, N nodes, T slots in view, S slots of the cache.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa import tree_attention
from medusa.packed import HELD, Packs
from medusa.products import FewRows
from medusa.traced import traceable, with_words

if TYPE_CHECKING:
    from medusa.trunk import Trunk

# Operations of ours that steps call from C++, by the texts NAME_op.cpp, and where what they call is. A step is told of
# it when it is loaded: where it is called medusa_NAME.
CALLS: dict[str, Callable[[], int]] = {"few_rows": FewRows().address, "tree_attention": tree_attention.address}

Bias = Tensor | dict[str, Tensor]
Planes = Sequence[Sequence[Tensor]]
Step = Callable[..., tuple[Tensor, ...]]

LIBRARY, OPERATIONS = "step.so", "step.json"  # the second: operations that the first calls back for, by name
WRAPPED = "O0"  # what calls the kernels is long: optimising it takes a third of all the time and brings nothing


def can_be_ahead(trunk: Trunk) -> bool:
    """Whether weights are plain tensors on a processor, which a library can be given."""
    weights = [weight for _, weight in _weights(trunk.model)]
    return all(type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" for each in weights)


class Library:
    """A compiled step of a trunk, loaded from the folder that :func:`compile_ahead` filled.

    Raises:
        RuntimeError: the system can't load it.
    """

    def __init__(self, folder: Path, trunk: Trunk) -> None:
        file = str(folder / LIBRARY)
        with traceable(trunk.model), with_words(trunk.model) as layers:  # the operations that it calls are there then
            self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(file, 1)
            self._weights = [weight for _, weight in _weights(trunk.model)]
        for name, address in CALLS.items():
            ctypes.c_void_p.in_dll(ctypes.CDLL(file), f"medusa_{name}").value = address()
        places = [place for place, _ in _weights(trunk.model)] + [(vars(layer), HELD) for layer in layers]
        self._held, self._names = [held for held, _ in places], [name for _, name in places]
        self._seen = [held.get(name) for held, name in places]
        self._packed = [layer.weight for layer in layers]
        self._versions = [layer.medusa_packed.state[1] for layer in layers]
        self._calls = Lock()  # the runner would wait for its turn without letting others take theirs

    @property
    def is_current(self) -> bool:
        """Whether the model has the very tensors that it had, and packed ones hold what was packed."""
        same = all(map(is_, map(dict.get, self._held, self._names), self._seen))
        return same and [weight._version for weight in self._packed] == self._versions

    def __call__(
        self, ids_BN: Tensor, positions_BN: Tensor, bias: Bias, slots_BN: Tensor, planes: Planes
    ) -> tuple[Tensor, ...]:
        """Logits, hidden and states; new keys and values are written into the planes."""
        flat = [plane for pair in planes for plane in pair]
        with self._calls:
            return tuple(self._runner.run([*self._weights, ids_BN, positions_BN, *_masks(bias), slots_BN, *flat]))


def is_settled(model: nn.Module) -> bool:
    """Whether packed weights hold what the model's do, as far as torch counts what is written to them."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, Packs)]
    return all(layer.medusa_packed is None or layer.medusa_packed.is_of(layer.weight) for layer in layers)


def compile_ahead(trunk: Trunk, step: Step, arguments: Sequence[Any], to: Path) -> None:
    """Compile ``step`` for arguments of these sizes but for T and S, and put the library into the folder ``to``.

    Raises:
        RuntimeError: it can't be exported or compiled here.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its own
        program, given = export(trunk, step, arguments)
        tree_attention.define()
        texts = {name: Path(__file__).with_name(f"{name}_op.cpp").read_text(encoding="utf-8") for name in CALLS}
        options = {
            "aot_inductor.compile_wrapper_opt_level": WRAPPED,
            "aot_inductor.custom_ops_to_c_shims": {
                getattr(torch.ops.medusa, name).default: [text] for name, text in texts.items()
            },
            "aot_inductor.output_path": folder,
        }
        made = Path(str(torch._inductor.aot_compile(program.module(check_guards=False), given, options=options)))
        shutil.copyfile(made, to / LIBRARY)
        if (named := made.with_suffix(".json")).is_file():
            shutil.copyfile(named, to / OPERATIONS)


@torch.no_grad()
def export(trunk: Trunk, step: Step, arguments: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """``step`` as torch's exported program of weights and arguments, and what to compile it with.

    Raises:
        RuntimeError: it can't be exported.
    """
    ids_BN, positions_BN, bias, slots_BN, planes = arguments
    # Planes lie in one storage. That they don't overlap would be found out pair by pair, in a minute for 30 layers.
    apart = [[plane.clone() for plane in pair] for pair in planes]
    kinds, free = sorted(bias) if isinstance(bias, dict) else None, torch.export.Dim.DYNAMIC
    with traceable(trunk.model), with_words(trunk.model):
        weights = [weight for _, weight in _weights(trunk.model)]
        given = (weights, ids_BN, positions_BN, _masks(bias), slots_BN, apart)
        free_sizes = (
            [None] * len(weights),
            None,
            None,
            [{3: free} for _ in given[3]],
            None,
            [[{2: free}] * 2] * len(apart),
        )
        program = torch.export.export(
            _Pure(trunk.model, _names(trunk.model), step, kinds),
            given,
            dynamic_shapes=free_sizes,
            strict=False,
        )
    return program, given


class _Pure(nn.Module):
    """A step as a function of all that it reads."""

    def __init__(self, model: nn.Module, names: list[str], step: Step, kinds: list[str] | None) -> None:
        super().__init__()
        self.inner = [_Calls(model, step)]  # in a list: its weights are none of this module's
        self.names, self.kinds = [f"model.{name}" for name in names], kinds

    def forward(
        self,
        weights: list[Tensor],
        ids_BN: Tensor,
        positions_BN: Tensor,
        masks: list[Tensor],
        slots_BN: Tensor,
        planes: Planes,
    ) -> tuple[Tensor, ...]:
        slots = planes[0][0].shape[2]
        for plane in (plane for pair in planes for plane in pair):
            torch._check(plane.shape[2] == slots)
        torch._check(masks[0].shape[3] < slots)
        for mask in masks:
            torch._check(mask.shape[3] == masks[0].shape[3])
        bias = masks[0] if self.kinds is None else dict(zip(self.kinds, masks, strict=True))
        named = dict(zip(self.names, weights, strict=True))
        arguments = (ids_BN, positions_BN, bias, slots_BN, planes)
        output: tuple[Tensor, ...] = torch.func.functional_call(self.inner[0], named, arguments)
        return output


class _Calls(nn.Module):
    """A step as a module, which has the model's weights."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        return self.step(*arguments)


def _masks(bias: Bias) -> list[Tensor]:
    return [bias[kind] for kind in sorted(bias)] if isinstance(bias, dict) else [bias]


def _names(model: nn.Module) -> list[str]:
    return [*dict(model.named_parameters()), *dict(model.named_buffers())]


def _weights(model: nn.Module) -> list[tuple[tuple[dict[str, Any], str], Tensor]]:
    """Each parameter and buffer once, in the order of their names, with where its module holds it."""
    found = []
    for full in _names(model):
        module, _, name = full.rpartition(".")
        own = model.get_submodule(module)
        held: dict[str, Any] = own._parameters if name in own._parameters else own._buffers
        found.append(((held, name), held[name]))
    return found
