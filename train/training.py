"""How a stage is trained: the part of the configuration that says it. A default is written once, here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from medusa.errors import UserError


@dataclass(frozen=True)
class Training:
    """How one stage is trained.

    Args:
        steps: optimizer steps.
        batch: rows of ``data.block`` tokens in a step.
        optimizer: "adamw", or "muon" for the matrices inside the network and AdamW for the rest.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon.
        weight_decay: of the matrices inside the network; nothing else decays.
        schedule: how the rate falls after the warm-up.
        warmup: steps in which the rate rises from 0 to its peak.
        floor: share of the peak that the rate ends at.
        clip: largest norm of all gradients together.
        log_every: steps between two lines of the log.
        eval_every: steps between two evaluations on held-out text; the last step is always followed by one.
        accumulate: parts that the rows of a step are taken in, one after the other, to need less memory; the step stays
            the same.
        save_every: steps between two checkpoints to go on from after an interruption; null goes by time alone.
        save_minutes: minutes between two checkpoints; null goes by steps alone.
        keep: checkpoints that are kept while the stage is under way.
        gradient_checkpointing: keep only what enters each block of the trunk and compute the rest again in the
            backward: less memory, about a third more time. Where the trunk is frozen no gradient passes through it,
            so it changes nothing.
    """

    group: ClassVar[str] = "trunk_training"  # where a configuration has it, for errors

    steps: int = 700
    batch: int = 8
    optimizer: Literal["adamw", "muon"] = "muon"
    lr: float = 4e-3
    muon_lr: float = 0.02
    weight_decay: float = 0.01
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = 50
    floor: float = 0.02
    clip: float = 1.0
    log_every: int = 10
    eval_every: int = 100
    accumulate: int = 1
    save_every: int | None = None
    save_minutes: float | None = 5.0
    keep: int = 2
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every", "eval_every", "accumulate", "keep"):
            self._check(name, getattr(self, name) >= 1, "give at least 1")
        if self.batch % self.accumulate:
            raise UserError(
                f"{self.group}.accumulate={self.accumulate} does not divide batch={self.batch}: the parts are equal"
            )
        self._check("save_every", self.save_every is None or self.save_every >= 1, "give at least 1, or null")
        self._check("save_minutes", self.save_minutes is None or self.save_minutes > 0, "give more than 0, or null")
        for name in ("lr", "muon_lr", "clip"):
            self._check(name, getattr(self, name) > 0, "give more than 0")
        for name in ("warmup", "weight_decay"):
            self._check(name, getattr(self, name) >= 0, "it may not be negative")
        self._check("floor", 0 <= self.floor <= 1, "it is a share of the peak rate, from 0 to 1")

    def _check(self, name: str, fits: bool, rule: str) -> None:
        """Raise UserError with the value and the rule where the one does not fit the other."""
        if not fits:
            raise UserError(f"{self.group}.{name}={getattr(self, name)!r}: {rule}")


@dataclass(frozen=True)
class DraftTraining(Training):
    """How what drafts is trained on a frozen trunk.

    Args:
        decay: what predicts k tokens further weighs decay^k in the loss, so that what predicts the nearest weighs 1.
        chunk: positions whose logits exist at a time; null chooses by the vocabulary.
        dtype: what the weights and the optimizer's moments are kept in; "auto" is float32 for a trunk in half
            precision, whose rounding would lose small updates, and else the trunk's own. They compute in the trunk's,
            as when they decode, and are saved in it.
        cache_states: keep the trunk's states of each row in the run folder until the stage is done, so that the trunk
            reads a row once and not in every epoch; true, false, or "auto": where every row comes twice or more and the
            disk has room. Windows of a plain text repeat with data.windows=tiled alone.
    """

    steps: int = 600
    optimizer: Literal["adamw", "muon"] = "adamw"
    decay: float = 0.8
    chunk: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    cache_states: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("chunk", self.chunk is None or self.chunk >= 1, "give at least 1, or null")
        self._check("decay", 0 < self.decay <= 1, "it is a weight's base, give more than 0 and at most 1")

    def kept_in(self, trunk: torch.dtype) -> torch.dtype:
        """What the weights are kept in for a trunk in the precision ``trunk``: as asked for, or >= float32."""
        if self.dtype == "auto":
            return torch.promote_types(trunk, torch.float32)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class HeadsTraining(DraftTraining):
    """How the heads are trained; the trunk is frozen.

    Args:
        decay: head k weighs decay^k in the loss, so that head 0 weighs 1.
        targets: "text" learns the data's own tokens, "trunk" the trunk's law of them (cross-entropy to it),
            "acceptance" to be accepted by it: minus the logarithm of what the two laws share.
    """

    group = "heads_training"

    lr: float = 2.4e-2  # high, since new heads start from zero weights; the lowest loss of each kind on the demo
    targets: Literal["text", "trunk", "acceptance"] = "text"


@dataclass(frozen=True)
class EagleTraining(DraftTraining):
    """How an EAGLE layer is trained; the trunk is frozen.

    Args:
        lr: peak learning rate of AdamW.
        passes: how often the layer reads a row, each time its own output of the pass before in place of the trunk's
            states, as it will when it drafts so many tokens (the training-time test of EAGLE-3, section 3.2). 1 trains
            on the trunk's states alone, as EAGLE-1 was.
        depth: levels that trees may have; more than ``passes`` is possible, the last one then stands for the deeper.
        decay: pass j weighs decay^j in the loss.
        targets: "text" learns the data's own tokens, "trunk" the trunk's law of them (cross-entropy to it).
        feature_weight: of the distance (smooth L1) between the layer's output and the trunk's next state, beside the
            loss of the tokens, which weighs 1; for version 1 alone, since version 3 makes states of its own. EAGLE-1's
            published 1.0 beside 0.1 is 10 here.
        noise: largest amount that is added to each number of the trunk's states as the layer reads them, or taken from
            it, drawn evenly.
        cache_states: as ``heads_training.cache_states``, for version 1 alone: version 3 reads states of inner layers.
    """

    group = "eagle_training"

    lr: float = 4e-3
    passes: int = 3
    depth: int = 6
    targets: Literal["text", "trunk"] = "trunk"
    feature_weight: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("passes", "depth"):
            self._check(name, getattr(self, name) >= 1, "give at least 1")
        if self.depth < self.passes:
            raise UserError(
                f"eagle_training.depth={self.depth}, passes={self.passes}: trees as deep as the passes are what those"
                " are for; make depth at least as much"
            )
        for name in ("feature_weight", "noise"):
            self._check(name, getattr(self, name) >= 0, "it may not be negative")


@dataclass(frozen=True)
class JointTraining(Training):
    """How trunk and heads are trained together, after the heads alone (Medusa-2; Cai et al. 2024, section 2.2.2).

    The trunk learns through an adapter of low rank (LoRA; Hu et al. 2021), which is merged into it at the end. What the
    heads learn, and how they weigh among each other, is as in ``heads_training``.

    Args:
        lr: peak learning rate of the adapter.
        heads_lr: peak learning rate of the heads.
        rank: of the adapter's matrices.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: share of an adapter's input that is left out in each step.
        modules: "all-linear" for every linear layer of the trunk but its vocabulary projection, or names of such layers
            such as [q_proj, v_proj].
        trunk_loss: "text" is the trunk's own loss of the next token, "teacher" the divergence (KL) of its law from that
            of the trunk without the adapter; both are means over the supervised tokens.
        heads_weight: what the heads' loss weighs beside the trunk's.
        heads_warmup: steps in which that weight rises from 0, as the first quarter of a sine.
        loss_tolerance: by what share the held-out loss of the adapted trunk may exceed that of the trunk; heads and
            adapters beyond it are not taken, whatever they bring.
    """

    group = "joint"

    steps: int = 300
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    heads_lr: float = 2.4e-3
    rank: int = 16
    alpha: float = 16.0
    dropout: float = 0.0
    modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    trunk_loss: Literal["text", "teacher"] = "text"
    heads_weight: float = 0.2
    heads_warmup: int = 50
    loss_tolerance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "adamw":
            raise UserError(f"joint.optimizer={self.optimizer!r}: an adapter's thin matrices are for adamw alone")
        self._check("rank", self.rank >= 1, "give at least 1")
        for name in ("heads_lr", "alpha"):
            self._check(name, getattr(self, name) > 0, "give more than 0")
        for name in ("heads_weight", "heads_warmup", "loss_tolerance"):
            self._check(name, getattr(self, name) >= 0, "it may not be negative")
        self._check("dropout", 0 <= self.dropout < 1, "it is a share, give at least 0 and less than 1")
        if not self.modules or (isinstance(self.modules, str) and self.modules != "all-linear"):
            raise UserError(
                f"joint.modules={self.modules!r}: give a list of names such as [q_proj, v_proj], or all-linear"
            )


@dataclass(frozen=True)
class OwnText:
    """Text of the trunk's own: it continues beginnings of the training text, and what drafts for it learns those.

    What drafts is judged by what the trunk says, not by what the data say (self-distillation; Cai et al. 2024, section
    2.3.2). Only the continuations are learnt.

    Args:
        prompts: beginnings, evenly spread over the training text.
        prompt_tokens: tokens of each.
        tokens: tokens of each continuation; null fills a row of ``data.block``.
        temperature: what continuations are drawn at, 0 being greedy; of several, each beginning takes one of them. On
            greedy text alone heads learn its loops, and hardly help where decoding samples.
        batch: texts that are continued at once.
    """

    prompts: int = 1600
    prompt_tokens: int = 48
    tokens: int | None = None
    temperature: tuple[float, ...] = (0.0, 1.0)
    batch: int = 32

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"own_text.{name}={getattr(self, name)}: give at least 1")
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"own_text.tokens={self.tokens}: give at least 1, or null to fill a row")
        if not self.temperature or min(self.temperature) < 0:
            raise UserError(f"own_text.temperature={list(self.temperature)}: give at least one, none of them negative")

    def new_tokens(self, block: int) -> int:
        """Tokens of each continuation, where rows have ``block`` of them.

        Raises:
            UserError: beginning and continuation don't fit a row.
        """
        tokens = block - self.prompt_tokens if self.tokens is None else self.tokens
        if tokens < 1 or self.prompt_tokens + tokens > block:
            raise UserError(
                f"own_text.prompt_tokens={self.prompt_tokens} and tokens={self.tokens}: a row of data.block={block}"
                " does not hold both; make them shorter, or the block longer"
            )
        return tokens
