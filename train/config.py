"""The configuration of a training run: one tree of dataclasses. A default is written once, here.

YAML files, the command line and ``--help`` are all read off these signatures, so a key that does not exist is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from medusa.calibrate import ROUNDS, SIZES
from medusa.data.corpus import DataConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig


@dataclass(frozen=True)
class NewTrunk:
    """Sizes of a Llama-type trunk to be trained from scratch.

    Args:
        layers: transformer blocks.
        hidden: size of the states.
        heads: attention heads.
        kv_heads: key and value heads, shared by groups of attention heads; must divide ``heads``.
        intermediate: inner size of the feed-forward part.
        context: most positions it can take.
        tied: whether the embedding is also the vocabulary projection.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 4
    intermediate: int = 384
    context: int = 1024
    tied: bool = False


@dataclass(frozen=True)
class TrunkConfig:
    """The trunk: one that exists, or a new one. Give ``name`` or ``new``.

    Args:
        name: a folder or hub id of a causal language model.
        new: sizes of a small trunk to be trained here, on the same data.
        revision: which revision of a hub id.
        dtype: what its weights are loaded in.
        device: where it runs; "auto" takes a GPU where there is one.
    """

    name: str | None = None
    new: NewTrunk | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.new is None:
            return
        for name, value in vars(self.new).items():
            if value < 1 and name != "tied":
                raise UserError(f"trunk.new.{name}={value}: give at least 1")
        if self.new.hidden % (2 * self.new.heads):
            raise UserError(
                f"trunk.new.hidden={self.new.hidden} and heads={self.new.heads}: each head takes an even share of the"
                f" states (rotary positions turn pairs), so make hidden a multiple of {2 * self.new.heads}"
            )
        if self.new.heads % self.new.kv_heads:
            raise UserError(f"trunk.new.kv_heads={self.new.kv_heads} does not divide heads={self.new.heads}")


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
    """

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

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every", "eval_every", "accumulate", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: give at least 1")
        if self.batch % self.accumulate:
            raise UserError(f"accumulate={self.accumulate} does not divide batch={self.batch}: the parts are equal")
        if self.save_every is not None and self.save_every < 1:
            raise UserError(f"save_every={self.save_every}: give at least 1, or null")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise UserError(f"save_minutes={self.save_minutes}: give more than 0, or null")
        for name in ("lr", "muon_lr", "clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)}: give more than 0")
        if self.warmup < 0 or self.weight_decay < 0:
            raise UserError(f"warmup={self.warmup}, weight_decay={self.weight_decay}: neither may be negative")
        if not 0 <= self.floor <= 1:
            raise UserError(f"floor={self.floor}: it is a share of the peak rate, from 0 to 1")


@dataclass(frozen=True)
class HeadsTraining(Training):
    """How the heads are trained; the trunk is frozen.

    Args:
        decay: head k weighs decay^k in the loss, so that head 0 weighs 1.
        targets: "text" learns the data's own tokens, "trunk" the trunk's law of them (cross-entropy to it),
            "acceptance" to be accepted by it: minus the logarithm of what the two laws share.
        chunk: positions whose logits exist at a time; null chooses by the vocabulary.
    """

    steps: int = 600
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 2.4e-2  # high, since new heads start from zero weights; the lowest loss of each kind on the demo
    decay: float = 0.8
    targets: Literal["text", "trunk", "acceptance"] = "text"
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"chunk={self.chunk}: give at least 1, or null")
        if not 0 < self.decay <= 1:
            raise UserError(f"decay={self.decay}: heads weigh decay^k, give more than 0 and at most 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation. Heads are judged on the trunk's own greedy continuations of held-out text.

    Args:
        rows: rows of held-out text in each evaluation of a trunk under training; the final one takes all.
        prompts: held-out prompts that the trunk continues; half of them grow the tree, half judge it.
        prompt_tokens: tokens of each prompt.
        tokens: tokens of each continuation.
        nodes: size of the tree that tokens per step are counted for while heads train.
    """

    rows: int = 64
    prompts: int = 64
    prompt_tokens: int = 64
    tokens: int = 128
    nodes: int = 16

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("prompts", 2), ("prompt_tokens", 1), ("tokens", 2), ("nodes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"evaluation.{name}={getattr(self, name)}: give at least {least}")


@dataclass(frozen=True)
class CalibrationConfig:
    """Which trees are tried on this machine.

    Args:
        sizes: numbers of nodes.
        rounds: times each of them is measured.
    """

    sizes: tuple[int, ...] = SIZES
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.rounds < 1:
            raise UserError(f"calibration.sizes={list(self.sizes)}, rounds={self.rounds}: give numbers from 1 up")


@dataclass(frozen=True)
class TrackingConfig:
    """Where progress is reported beside the run's own train_log.jsonl.

    Args:
        wandb: "offline" and "online" also log to Weights & Biases.
        project: the project there.
    """

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "medusa"


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Args:
        run: the folder that everything goes to.
        seed: of initial weights and of the order of the data.
        threads: processor threads; "auto" times a training step with one and with all.
        data: the text.
        trunk: the model that the heads draft for.
        trunk_training: how a new trunk is trained.
        heads: the heads.
        heads_training: how the heads are trained.
        evaluation: held-out evaluation.
        calibration: choice of the tree.
        tracking: reports beside the log.
    """

    run: str
    seed: int = 0
    threads: Literal["auto"] | int = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    trunk_training: Training = field(default_factory=Training)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    heads_training: HeadsTraining = field(default_factory=HeadsTraining)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.threads != "auto" and self.threads < 1:
            raise UserError(f"threads={self.threads}: give at least 1, or auto")
        if (self.trunk.name is None) == (self.trunk.new is None):
            given = "both are given" if self.trunk.name else "neither is given"
            raise UserError(f"trunk.name or trunk.new, {given}: name a trunk that exists, or give sizes of a new one")
        if (self.trunk.name is None) == (self.data.tokenizer == "trunk"):
            way = "char or bpe for a new trunk" if self.trunk.name is None else "trunk: this trunk has its own"
            raise UserError(f"data.tokenizer={self.data.tokenizer!r}: use {way}")
        if self.data.block < self.heads.num + 2:
            raise UserError(
                f"data.block={self.data.block} and heads.num={self.heads.num}: the last head predicts"
                f" {self.heads.num + 1} tokens ahead, so make the block at least {self.heads.num + 2}"
            )
        if self.trunk.new is not None:
            self.check_context(self.trunk.new.context)

    def check_context(self, context: int) -> None:
        """Refuse rows or evaluated texts that a trunk of this context can't take."""
        judged = self.evaluation.prompt_tokens + self.evaluation.tokens
        for name, tokens in (("data.block", self.data.block), ("evaluation.prompt_tokens + tokens", judged)):
            if tokens > context:
                raise UserError(f"{name}={tokens}, the trunk's context is {context}: make it at most that")


def keys(kind: Any = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, dotted, groups included."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        yield f"{prefix}{each.name}"
        for part in (hints[each.name], *get_args(hints[each.name])):
            if is_dataclass(part):
                yield from keys(part, f"{prefix}{each.name}.")


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
