"""The configuration of a training run: one tree of dataclasses. A default is written once, here.

YAML files, the command line and ``--help`` are all read off these signatures, so a key that does not exist is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_type_hints

from medusa.calibrate import ROUNDS, SIZES
from medusa.data.corpus import DataConfig
from medusa.eagle import EagleConfig
from medusa.errors import UserError
from medusa.heads import HeadsConfig

from .training import EagleTraining, HeadsTraining, JointTraining, OwnText, Training


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
        if not self.sizes or min(self.sizes) < 1:
            raise UserError(f"calibration.sizes={list(self.sizes)}: give one or more numbers of nodes, from 1 up")
        if self.rounds < 1:
            raise UserError(f"calibration.rounds={self.rounds}: give at least 1")


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
        own_text: text that the trunk writes itself, learnt in place of the data's by all that drafts for it; null
            learns the data's.
        heads: the heads; null makes none, where an EAGLE layer is made.
        heads_training: how the heads are trained.
        eagle: the EAGLE layer, on the same trunk and data; null makes none.
        eagle_training: how the EAGLE layer is trained.
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
    own_text: OwnText | None = None
    heads: HeadsConfig | None = field(default_factory=HeadsConfig)
    heads_training: HeadsTraining = field(default_factory=HeadsTraining)
    eagle: EagleConfig | None = None
    eagle_training: EagleTraining = field(default_factory=EagleTraining)
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
        self._check_drafters()
        if self.eagle is not None:
            self._check_eagle(self.eagle.version)
        if self.own_text is not None:
            self.own_text.new_tokens(self.data.block)
        if self.trunk.new is not None:
            self.check_context(self.trunk.new.context)

    def _check_drafters(self) -> None:
        """Refuse a run that makes nothing to draft with, or what can't be made together."""
        if self.heads is None and self.eagle is None:
            raise UserError("heads=null and eagle=null: nothing would draft; give heads, an EAGLE layer, or both")
        if self.joint is not None and self.heads is None:
            raise UserError("joint with heads=null: it trains trunk and heads together; give heads, or leave joint out")
        if self.joint is not None and self.eagle is not None:
            raise UserError(
                "eagle with joint: that changes the trunk, and the layer is made for one that stays; leave one out, or"
                " train the layer in a run of its own with trunk.name=RUN/merged"
            )
        if self.own_text is not None and self.joint is not None and self.joint.trunk_loss == "text":
            raise UserError(
                "own_text with joint.trunk_loss=text: the trunk would learn what it says itself; set that to teacher,"
                " or leave own_text out"
            )
        if self.heads is not None and self.data.block < self.heads.num + 2:
            raise UserError(
                f"data.block={self.data.block} and heads.num={self.heads.num}: the last head predicts"
                f" {self.heads.num + 1} tokens ahead, so make the block at least {self.heads.num + 2}"
            )

    def _check_eagle(self, version: int) -> None:
        """Refuse options that a layer of this version has no use for, and rows too short for its passes."""
        training = self.eagle_training
        if version == 3 and training.feature_weight:
            raise UserError(
                f"eagle_training.feature_weight={training.feature_weight} with eagle.version=3: its states are its own"
                " and not to be the trunk's; set it to 0, or take version 1"
            )
        if version == 3 and training.cache_states is True:
            raise UserError(
                "eagle_training.cache_states=true with eagle.version=3: it reads states of inner layers, and the last"
                " ones alone are kept; set it to auto or false, or take version 1"
            )
        if self.data.block < (least := training.passes + 2):
            raise UserError(
                f"data.block={self.data.block} and eagle_training.passes={training.passes}: the last pass predicts"
                f" {least - 1} tokens ahead, so make the block at least {least}"
            )

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
