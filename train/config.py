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

from .training import HeadsTraining, JointTraining, Training


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
        tensorboard: whether to also log for TensorBoard, in the run's folder tensorboard/.
    """

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "medusa"
    tensorboard: bool = False


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
        joint: how trunk and heads are trained together after that; null leaves the trunk as it is.
        evaluation: held-out evaluation.
        calibration: choice of the tree.
        tracking: reports beside the log.
        deepspeed: train with DeepSpeed, by its settings "zero2" or "zero3" or those of a JSON file; null trains without
            it. Several processes need no option: see docs/distributed.md.
    """

    run: str
    seed: int = 0
    threads: Literal["auto"] | int = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    trunk_training: Training = field(default_factory=Training)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    heads_training: HeadsTraining = field(default_factory=HeadsTraining)
    joint: JointTraining | None = None
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    deepspeed: str | None = None

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
