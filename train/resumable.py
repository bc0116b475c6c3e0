"""The Trainer that fills checkpoints and goes on from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer

from medusa.errors import UserError, reason
from medusa.files import write_json

from .checkpoints import BEST, FORMAT, NEW, PREFIX, STATE, WEIGHTS, Checkpoints, Saved, told
from .distributed import ALONE, Group


class Kept(Protocol):
    """What an evaluation remembers from one time to the next."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Figures that JSON can hold, and tensors."""

    def load_state(self, figures: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what ``state`` gave."""


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; one that is tied to another has one name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class ResumableTrainer(Trainer):
    """Saves and restores what the coming steps depend on; ``store`` None saves nothing."""

    store: Checkpoints | None = None
    group: Group = ALONE
    kept: Kept | None = None
    notes: Callable[[], dict[str, Any]]  # the stage's part of ``Saved``

    def counters(self) -> dict[str, Any]:
        """What all processes have summed up since the log's last line. They take part in it together."""
        loss = self.group.sum(self._tr_loss) / self.group.size  # the log's line holds the mean
        return {"loss_sum": loss.item(), "last_logged": self._globalstep_last_logged}

    def pooled(self, sums: list[Tensor]) -> list[Any]:
        """Sums of each micro-batch, over all processes, as JSON can hold them."""
        found: list[Any] = self.group.sum(torch.stack(sums)).tolist() if sums else []
        return found

    def own_part(self, sums: list[Any]) -> list[Tensor]:
        """What a process goes on with of what :meth:`pooled` gave: the first with all, the others with zeros."""
        device = self.args.device
        given = [torch.tensor(each, dtype=torch.float64, device=device) for each in sums]
        return given if self.group.leads else [torch.zeros_like(each) for each in given]

    def restore(self, saved: Saved) -> None:
        """Go on counting where ``saved`` was: to be called once the Trainer has set its own counters to zero."""
        self._tr_loss.fill_(saved.counters["loss_sum"])
        self._globalstep_last_logged = saved.counters["last_logged"]
        if self.kept is not None:
            best = saved.folder / BEST
            self.kept.load_state(saved.figures, load_file(best) if best.exists() else {})

    def anywhere(self, *wishes: bool) -> tuple[bool, ...]:
        """Which of these wishes any of the processes has: they save and stop together."""
        return self.group.any(wishes, self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """What is trained, and nothing of a trunk that is not; DeepSpeed saves its parts itself."""
        if self.store is None or output_dir is None or not self.args.should_save or self.is_deepspeed_enabled:
            return
        folder = Path(output_dir)
        folder.mkdir(exist_ok=True)
        weights = {name: value.detach().contiguous().cpu() for name, value in trained(self.model).items()}
        save_file(weights, folder / WEIGHTS)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's own way, into a folder that no reader sees until it is whole.

        Raises:
            UserError: the disk takes no more. What was saved before stays.
        """
        assert self.store is not None
        way = "what was saved before is whole; make room and run the same command again to go on from it"
        with told(f"the checkpoint of step {self.state.global_step}", self.store.folder, way):
            try:
                self._fill_checkpoint(self.store, model, trial)
            finally:
                if self.args.should_save:
                    self.store.discard()

    def _fill_checkpoint(self, store: Checkpoints, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        if self.args.should_save:
            store.clear()
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(store.folder / NEW)
        super()._save_checkpoint(model, trial)
        counters = self.counters()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            made = store.folder / NEW / f"{PREFIX}{step}"
            figures, tensors = self.kept.state() if self.kept is not None else ({}, {})
            if tensors:
                save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, made / BEST)
            content = {"step": step, "counters": counters, "figures": figures, "kind": self.group.kind}
            write_json(made / STATE, {"format": FORMAT, **content, **self.notes()})
            store.publish(step)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Put the saved weights into what is trained.

        Raises:
            UserError: the file can't be read, or holds others.
        """
        path = Path(resume_from_checkpoint) / WEIGHTS
        way = f"remove {path.parent} to go on from the checkpoint before it"
        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} can't be read ({reason(error)}): {way}") from error
        places = trained(self.model if model is None else model)
        if {name: value.shape for name, value in weights.items()} != {name: p.shape for name, p in places.items()}:
            raise UserError(f"{path} holds other weights than are trained here: {way}")
        with torch.no_grad():
            for name, parameter in places.items():
                parameter.copy_(weights[name])
