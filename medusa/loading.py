"""From a folder or hub id to a model and its tokenizer: whatever ``from_pretrained`` can load, or one line why not.

One of the files that know transformers' models.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.peft_utils import find_adapter_config_file

from medusa.errors import UserError, reason
from medusa.family import refuse_attention, refuse_by_config, text_config
from medusa.machine import as_dtype, pick_device
from medusa.parallel import keep_together, placement

# What the library raises for a folder that is broken in one way or another, or an optional package that is not there.
LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, ImportError, SafetensorError)
# The options that say where files are and how to read them: for the config and the tokenizer as well.
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
SHARED = (*HUB, "gguf_file", "subfolder", "trust_remote_code")
ADAPTER = "adapter_config.json"
SLOT = "default"  # peft's name for the one adapter
LENGTH = 200  # characters of what the library says


@dataclass(frozen=True)
class Place:
    """Where a trunk is: a folder or hub id, and of the latter the revision."""

    name: str
    revision: str | None = None


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    revision: str | None,
    adapter: str | Path | None,
    options: dict[str, Any],
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A causal language model, on its device, and its tokenizer. For the arguments see ``Trunk.load``.

    Raises:
        UserError: nothing there, files that are broken or lack weights, a kind of model that can't be a trunk.
    """
    if options.get("device_map") is not None and device != "auto":
        raise UserError(f"device={str(device)!r} and device_map={options['device_map']!r}: give one of them")
    refuse_attention(options.get("attn_implementation"))
    options = {"trust_remote_code": False} | options  # left open, the library asks at the terminal
    base, added = _places(Place(str(name), revision), None if adapter is None else str(adapter), options)
    shared = {key: options[key] for key in SHARED if key in options} | {"revision": base.revision}
    with _one_line(f"trunk {base.name}", "give a folder or a hub id"):
        config = AutoConfig.from_pretrained(base.name, **shared)
        _refuse_early(base.name, config)
        if options.get("tp_plan") is not None:
            options = placement(base.name, config, device, added is not None, options)
        else:
            options |= _placement(config, device, options)
        model, loading = AutoModelForCausalLM.from_pretrained(
            base.name, dtype=as_dtype(dtype), revision=base.revision, output_loading_info=True, **options
        )
        missing = {key for key in loading["missing_keys"] if added is None or f".{SLOT}" not in key}
        _refuse_gaps(f"trunk {base.name}", missing, "get the whole checkpoint")
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_at(base, added), **shared)
    keep_together(model)
    if options.get("device_map") is None and "distributed_config" not in options:
        model = model.to(pick_device(device))
    if added is not None:
        _put_on(model, added, options)
    return model, tokenizer


@contextmanager
def _one_line(what: str, way_out: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, LOADING_ERRORS):  # tokenizers raises the bare kind
            raise
        if "trust_remote_code" in str(error):
            way_out = "if you trust that code, give trust_remote_code=True"
        raise UserError(f"{what} can't be loaded: {reason(error)[:LENGTH]} ({way_out})") from error


def _places(trunk: Place, adapter: str | None, options: dict[str, Any]) -> tuple[Place, Place | None]:
    """Where the base model and the adapter are. An adapter alone, given as the trunk, names its base."""
    name = _folder(trunk.name, "trunk", "give a folder saved by save_pretrained, or a hub id")
    if adapter is not None:
        adapter = _folder(adapter, "adapter", "give a folder saved by peft's save_pretrained, or a hub id")
        if Path(adapter).is_dir() and not (Path(adapter) / ADAPTER).is_file():
            raise UserError(f"adapter {adapter} has no {ADAPTER}: give a folder saved by peft's save_pretrained")
        return Place(name, trunk.revision), Place(adapter)
    trunk = Place(name, trunk.revision)
    file = _adapter_config(trunk, options)
    if file is None:
        return trunk, None
    if (file.parent / "config.json").is_file():  # a whole model with its adapter
        return trunk, trunk
    with _one_line(f"adapter {name}", "save it anew with peft's save_pretrained"):
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"adapter {name} does not name its base model: give the base, and adapter={name!r}")
    return Place(_folder(base, f"base of adapter {name}", f"give the base, and adapter={name!r}")), trunk


def _adapter_config(trunk: Place, options: dict[str, Any]) -> Path | None:
    """The adapter's config, if there is one; asked of the hub where the name is no folder."""
    hub = {key: options[key] for key in HUB if key in options}
    found = find_adapter_config_file(trunk.name, revision=trunk.revision, **hub)
    return None if found is None else Path(found)


def _folder(name: str, what: str, way_out: str) -> str:
    """``name``, its ``~`` expanded. UserError if it can only be a folder and is not there."""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise UserError(f"no {what} at {name}: {way_out}")
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _placement(config: Any, device: str | torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """The map of a quantised model, unless one is given: it is packed for a device, and can't be moved to another."""
    quantised = options.get("quantization_config") or getattr(config, "quantization_config", None)
    packed = quantised is not None and options.get("device_map") is None and "gguf_file" not in options
    return {"device_map": {"": pick_device(device)}} if packed else {}


def _refuse_early(name: str, config: Any) -> None:
    """Refuse by the config and the class that would be made, before gigabytes are read."""
    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    made = made[0] if isinstance(made, tuple) else made
    if made is not None and made.config_class is type(text_config(config)):
        config = text_config(config)  # the library loads the text model alone
    takes = made is None or "position_ids" in inspect.signature(made.forward).parameters
    try:
        refuse_by_config(config.model_type, config, takes, stateful=bool(getattr(made, "_is_stateful", False)))
    except UserError as error:
        raise UserError(f"trunk {name}: {error}") from error


def _refuse_gaps(what: str, missing: set[str], way_out: str) -> None:
    """The library fills weights that are missing with random numbers, and says so in the log."""
    if missing:
        raise UserError(f"{what} lacks the weights {', '.join(sorted(missing)[:3])}: {way_out}")


def _tokenizer_at(base: Place, adapter: Place | None) -> str:
    """An adapter's folder may bring its own tokenizer, with the chat template it was trained on."""
    own = adapter is not None and (Path(adapter.name) / "tokenizer_config.json").is_file()
    return adapter.name if adapter is not None and own else base.name


def _put_on(model: Any, adapter: Place, options: dict[str, Any]) -> None:
    """Put an adapter on ``model``, beside its weights: none of them is changed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(f"adapter {adapter.name} needs the package peft: pip install peft") from error
    what, way_out = f"adapter {adapter.name}", "give a folder saved by peft's save_pretrained for this trunk"
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{what} can't be put on layers that are offloaded: give a device_map that keeps all in memory")
    hub = {key: options[key] for key in HUB if key in options} | {"revision": adapter.revision}
    with _one_line(what, way_out):
        config = peft.PeftConfig.from_pretrained(adapter.name, **hub)
        if config.is_prompt_learning:
            raise UserError(f"{what} is of type {config.peft_type.value}, which puts tokens before the text: {way_out}")
        config.inference_mode = True
        if not getattr(model, "_hf_peft_config_loaded", False):  # the library does it where both are in one folder
            peft.inject_adapter_in_model(config, model, SLOT)
        weights = peft.load_peft_weights(adapter.name, device=str(model.device), **hub)
        weights = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
        loaded = peft.set_peft_model_state_dict(model, weights, adapter_name=SLOT)
        _refuse_gaps(what, {key for key in loaded.missing_keys if f".{SLOT}" in key}, way_out)
        if loaded.unexpected_keys:
            raise UserError(f"{what} holds {', '.join(loaded.unexpected_keys[:3])}, which fit nothing here: {way_out}")
