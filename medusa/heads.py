"""Medusa heads: extra language-modelling heads on the trunk's last hidden state.

Head k = 0, 1, … at position t reads the state of token t and predicts token t+2+k (the trunk's own head predicts
t+1). Three kinds share one body, residual blocks and a projection, and differ in what the first block reads beside
the state:

* ``medusa`` (Cai et al. 2024, section 2.1.1): nothing;
* ``root``: the embedding of token t+1, which has just been chosen when heads draft, so it costs no extra step;
* ``hydra`` (Ankner et al. 2024): the embeddings of tokens t+1 … t+1+k, those drafted before it.

Dimensions: D hidden, E embedding, K heads, R rank, V vocabulary, V' the tokens that heads draft from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medusa.errors import UserError, nearest
from medusa.selfcheck import check_projection
from medusa.trunk import Trunk
from medusa.vocabulary import check_ids

KINDS = ("medusa", "root", "hydra")
PROJECTIONS = ("own", "shared", "low_rank")


@dataclass(frozen=True)
class HeadsConfig:
    """What the heads look like.

    Args:
        kind: what a head reads: ``medusa`` the state, ``root`` also the token just chosen, ``hydra`` also the tokens
            drafted before it.
        num: number of heads K, the depth that a tree can have.
        layers: residual blocks per head.
        projection: ``own`` gives each head its own copy of the vocabulary projection to train, ``shared`` uses the
            trunk's, ``low_rank`` gives each head a product of two thin matrices, V' x ``rank`` and ``rank`` x D.
        vocab: how many tokens the heads draft from, the most frequent ones of the training text; null takes all.
        rank: of the projection ``low_rank``; null for the others.

    Raises:
        UserError: an unknown kind or projection, a number below 1, or a rank where there is none or none where it is
            needed.
    """

    kind: str = "hydra"
    num: int = 6
    layers: int = 1
    projection: str = "own"
    vocab: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        for name, value, options in (("kind", self.kind, KINDS), ("projection", self.projection, PROJECTIONS)):
            if value not in options:
                raise UserError(f"heads.{name}={value!r}: choose from {', '.join(options)}{nearest(value, options)}")
        for name in ("num", "layers", "vocab", "rank"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UserError(f"heads.{name}={number}: give at least 1")
        if (self.projection == "low_rank") != (self.rank is not None):
            way = "give heads.rank, 64 say" if self.rank is None else "leave rank out, or set heads.projection=low_rank"
            raise UserError(f"heads.rank={self.rank} with heads.projection={self.projection!r}: {way}")

    def reads(self, head: int) -> int:
        """How many tokens after t head ``head`` reads: t+1 … t+reads."""
        return {"medusa": 0, "root": 1, "hydra": head + 1}[self.kind]


class Linear(nn.Linear):
    """A linear layer that computes in the precision of its input, whatever its weights are kept in."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *_like(x, self))


def _like(x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the precision of ``x``."""
    return linear.weight.to(x.dtype), None if linear.bias is None else linear.bias.to(x.dtype)


class ResBlock(nn.Module):
    """``x + SiLU(W [x; context] + b)`` with W = b = 0 at the start, hence exactly the identity there."""

    def __init__(self, size: int, extra: int = 0) -> None:
        super().__init__()
        self.linear = Linear(size + extra, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        read = x if context is None else torch.cat([x, context], -1)
        return x + nn.functional.silu(self.linear(read))


class LowRank(nn.Linear):
    """A projection in two steps, D to R and R to V': ``down.weight`` [R, D], ``weight`` [V', R], ``bias`` [V']."""

    def __init__(self, hidden: int, rank: int, vocab: int, bias: bool) -> None:
        super().__init__(rank, vocab, bias=bias)
        self.down = Linear(hidden, rank, bias=False)


class Head(nn.Module):
    """Residual blocks of distinct parameters, and a projection unless the trunk's is shared."""

    def __init__(self, layers: int, hidden: int, extra: int, projection: nn.Linear | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(hidden, extra if layer == 0 else 0) for layer in range(layers))
        self.projection = projection

    def forward(self, hidden: Tensor, context: Tensor | None) -> Tensor:
        for block in self.blocks:
            hidden, context = block(hidden, context), None
        return hidden


@dataclass(frozen=True)
class HeadSizes:
    """What a head's size depends on in its trunk: sizes D, E and V, and whether the projection has a bias."""

    hidden: int
    embedding: int
    vocab: int
    bias: bool


def new_head(config: HeadsConfig, index: int, trunk: HeadSizes) -> Head:
    """Head ``index`` for a trunk of these sizes; its projection is random. On the meta device it takes no memory.

    Raises:
        UserError: a rank beyond the projection's.
    """
    projection = _projection(config, trunk)
    return Head(config.layers, trunk.hidden, trunk.embedding * config.reads(index), projection)


class MedusaHeads(nn.Module):
    """K heads bound to a trunk, whose embedding and projection they use but neither own, save nor train.

    A new head gives the trunk's own logits: exactly, or with the projection ``low_rank`` as nearly as its rank allows,
    by the truncated singular value decomposition of the trunk's projection.

    Args:
        config: what they look like.
        trunk: whose they are. Of a shared projection with a draft vocabulary a slice is taken here, once.
        draft_ids: the ``config.vocab`` tokens to draft from (see :func:`medusa.vocabulary.draft_vocabulary`).
        initialise: False leaves projections as they come, for weights that are loaded next.
        dtype: what their weights are kept in; None for the trunk's. They compute in the trunk's in any case: a wider
            one is for training, where half precision would round small updates away.

    Raises:
        UserError: a trunk whose projection can't be repeated, draft ids that are missing, wrong or not asked for, or a
            rank beyond the projection's.
    """

    draft_ids: Tensor | None

    def __init__(
        self,
        config: HeadsConfig,
        trunk: Trunk,
        draft_ids: Tensor | None = None,
        *,
        initialise: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_projection(trunk)
        self.config = config
        self._trunk = (trunk,)  # in a tuple: a module attribute would be registered and saved
        output = trunk.model.get_output_embeddings()
        self.register_buffer("draft_ids", _checked(draft_ids, config, trunk, output.weight.device))
        rows = _rows(output, self.draft_ids)
        self._shared: tuple[Tensor, Tensor | None] | tuple[()] = ()
        if config.projection == "shared" and config.vocab is not None:
            self._shared = rows
        start = _start(config, *rows) if initialise else None
        extra = trunk.embed(torch.zeros(1, dtype=torch.long, device=trunk.device)).shape[-1]
        self.heads = nn.ModuleList()
        sizes = HeadSizes(trunk.hidden_size, extra, trunk.vocab_size, output.bias is not None)
        for head in range(config.num):
            made = new_head(config, head, sizes)
            # Before the start is copied: a detour by fp32 would round fp64 weights.
            made.to(output.weight.device, dtype or trunk.dtype)
            if made.projection is not None and start is not None:
                made.projection.load_state_dict(start)
            self.heads.append(made)

    @property
    def trunk(self) -> Trunk:
        """The trunk these heads draft for."""
        return self._trunk[0]

    def head(self, index: int) -> Head:
        """Head ``index``, 0 for the nearest token."""
        head = self.heads[index]
        assert isinstance(head, Head)
        return head

    def features(self, head: int, hidden: Tensor, context: Tensor | None) -> Tensor:
        """State [.., D] -> the head's own state [.., D].

        ``context`` [.., reads * E] holds the embeddings of the tokens after t that the head reads, in order; None for
        a head that reads none.
        """
        return self.head(head)(hidden, context)

    def logits(self, head: int, features: Tensor) -> Tensor:
        """Features [.., D] -> logits [.., V'], with the trunk's own scale and softcap. :meth:`tokens` names them."""
        projection = self.head(head).projection
        if projection is None:
            return self.trunk.project(features, *self._shared)
        if isinstance(projection, LowRank):
            features = projection.down(features)
        return self.trunk.project(features, *_like(features, projection))

    def trunk_rows(self) -> tuple[Tensor, Tensor | None] | tuple[()]:
        """What :meth:`medusa.trunk.Trunk.project` takes to give the trunk's logits of the tokens that heads draft."""
        if self.draft_ids is None or self._shared:
            return self._shared
        return _rows(self.trunk.model.get_output_embeddings(), self.draft_ids)

    def context(self, head: int, embedded: Tensor) -> Tensor | None:
        """Flatten embeddings [.., n, E] of the tokens t+1 … t+n, n >= reads, to what head ``head`` reads."""
        reads = self.config.reads(head)
        return embedded[..., :reads, :].flatten(-2) if reads else None

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [.., E] as heads read them: the trunk's, each scaled to a root mean square of 1.

        A trunk's raw embeddings are often a hundred times smaller than its states, and would be learnt slowly beside
        them.
        """
        embedded = self.trunk.embed(ids)
        return nn.functional.rms_norm(embedded, embedded.shape[-1:])

    @property
    def choices(self) -> int:
        """How many tokens the heads can draft."""
        return self.trunk.draftable if self.draft_ids is None else len(self.draft_ids)

    def draftable(self, logits: Tensor) -> Tensor:
        """Logits without the vocabulary rows that the tokenizer lacks: [.., V'] -> [.., choices]."""
        return logits[..., : self.choices]

    def tokens(self, columns: Tensor) -> Tensor:
        """The ids of the tokens that ``columns`` of the logits stand for."""
        return columns if self.draft_ids is None else self.draft_ids[columns]

    def columns(self, ids: Tensor) -> Tensor:
        """The columns of the logits that stand for the tokens ``ids``; -1 for a token outside the draft vocabulary."""
        if self.draft_ids is None:
            return ids
        columns = torch.searchsorted(self.draft_ids, ids).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[columns] == ids, columns, -1)


def _checked(ids: Tensor | None, config: HeadsConfig, trunk: Trunk, device: torch.device) -> Tensor | None:
    if (ids is None) != (config.vocab is None):
        given = "no draft_ids are" if ids is None else f"{len(ids)} draft_ids are"
        raise UserError(f"heads.vocab={config.vocab} and {given} given: give as many ids, or set heads.vocab to null")
    if ids is None or config.vocab is None:
        return None
    check_ids(ids, config.vocab, trunk)
    return ids.to(device)


def _rows(output: nn.Linear, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The trunk's projection, or a copy of its rows ``ids``: weight [V', D] and bias [V'] if there is one."""
    weight, bias = output.weight.data, None if output.bias is None else output.bias.data
    return (weight, bias) if ids is None else (weight[ids], None if bias is None else bias[ids])


def _projection(config: HeadsConfig, trunk: HeadSizes) -> nn.Linear | None:
    hidden, vocab = trunk.hidden, config.vocab or trunk.vocab
    if config.projection == "shared":
        return None
    if config.rank is None:
        return nn.Linear(hidden, vocab, bias=trunk.bias)
    if config.rank > (most := min(hidden, vocab)):
        raise UserError(f"heads.rank={config.rank}: a projection of {hidden} to {vocab} has at most {most}")
    return LowRank(hidden, config.rank, vocab, trunk.bias)


def _start(config: HeadsConfig, weight_VD: Tensor, bias_V: Tensor | None) -> dict[str, Tensor]:
    """What a projection starts from."""
    start = {"weight": weight_VD} | ({} if bias_V is None else {"bias": bias_V})
    if config.rank is None:
        return start
    # The right singular vectors are the eigenvectors of W'W, a matrix of D x D however large the vocabulary is.
    wide_VD = weight_VD.double()
    down_RD = torch.linalg.eigh(wide_VD.T @ wide_VD).eigenvectors[:, -config.rank :].flip(-1).T
    largest_R1 = down_RD.gather(1, down_RD.abs().argmax(1, keepdim=True))
    down_RD = down_RD * largest_R1.sign()  # a vector's sign is free: fixed, or it would depend on the library
    return start | {"weight": wide_VD @ down_RD.T, "down.weight": down_RD}
