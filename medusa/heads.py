"""Medusa heads: extra language-modelling heads on the trunk's last hidden state.

Head k = 0, 1, … at position t reads the state of token t and predicts token t+2+k (the trunk's own head predicts
t+1). Three kinds share one body, residual blocks and a projection, and differ in what the first block reads beside
the state:

* ``medusa`` (Cai et al. 2024, section 2.1.1): nothing;
* ``root``: the embedding of token t+1, which has just been chosen when heads draft, so it costs no extra step;
* ``hydra`` (Ankner et al. 2024): the embeddings of tokens t+1 … t+1+k, those drafted before it.

Heads of the first two kinds may have a *Markov bias*: what a head says of token t+2+k gains a row of a low-rank matrix
that token t+1+k chooses. States and logits are still made for all heads at once; only that row is added level by level.

Dimensions: D hidden, E embedding, K heads, R rank, V vocabulary, V' the tokens that heads draft from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medusa.bound import Bound
from medusa.errors import UserError, nearest
from medusa.head_parts import Head, Linear, LowRank, Markov
from medusa.trunk import Trunk

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
        markov: rank of a bias that the token just before adds to a head's logits, 64 to 256 say; null for none. For the
            kinds ``medusa`` and ``root``: Hydra's heads read that token, and were no better with a bias beside.

    Raises:
        UserError: an unknown kind or projection, a number below 1, a rank where there is none or none where it is
            needed, or a bias for Hydra's heads.
    """

    kind: str = "hydra"
    num: int = 6
    layers: int = 1
    projection: str = "own"
    vocab: int | None = None
    rank: int | None = None
    markov: int | None = None

    def __post_init__(self) -> None:
        for name, value, options in (("kind", self.kind, KINDS), ("projection", self.projection, PROJECTIONS)):
            if value not in options:
                raise UserError(f"heads.{name}={value!r}: choose from {', '.join(options)}{nearest(value, options)}")
        for name in ("num", "layers", "vocab", "rank", "markov"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UserError(f"heads.{name}={number}: give at least 1")
        if (self.projection == "low_rank") != (self.rank is not None):
            way = "give heads.rank, 64 say" if self.rank is None else "leave rank out, or set heads.projection=low_rank"
            raise UserError(f"heads.rank={self.rank} with heads.projection={self.projection!r}: {way}")
        if self.markov is not None and self.kind == "hydra":
            raise UserError(
                f"heads.markov={self.markov} with heads.kind='hydra', whose heads read the token before as it is: leave"
                " markov out, or set heads.kind to medusa or root"
            )

    @property
    def stepwise(self) -> bool:
        """Whether a head's law depends on tokens drafted before it, so that a tree is filled level by level."""
        return self.kind == "hydra" or self.markov is not None

    def reads(self, head: int) -> int:
        """How many tokens after t head ``head`` reads: t+1 … t+reads."""
        return {"medusa": 0, "root": 1, "hydra": head + 1}[self.kind]


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
    extra = trunk.embedding * config.reads(index)
    return Head(config.layers, trunk.hidden, extra, _projection(config, trunk), _markov(config, trunk))


class MedusaHeads(Bound):
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

    def __init__(
        self,
        config: HeadsConfig,
        trunk: Trunk,
        draft_ids: Tensor | None = None,
        *,
        initialise: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(trunk, draft_ids, config.vocab, "heads.vocab")
        self.config = config
        output, rows = trunk.model.get_output_embeddings(), self.projection_rows()
        if config.projection == "shared" and config.vocab is not None:
            self.share(*rows)
        start = _start(config, *rows) if initialise else None
        extra = trunk.embed(torch.zeros(1, dtype=torch.long, device=trunk.device)).shape[-1]
        self.heads = nn.ModuleList()
        sizes = HeadSizes(trunk.hidden_size, extra, trunk.vocab_size, output.bias is not None)
        for head in range(config.num):
            made = new_head(config, head, sizes)
            # Before the start is copied: a detour by fp32 would round fp64 weights.
            made.to(trunk.device, dtype or trunk.dtype)
            if made.projection is not None and start is not None:
                made.projection.load_state_dict(start)
            if made.markov is not None and initialise:
                made.markov.start()
            self.heads.append(made)

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
        if isinstance(projection, LowRank):
            features = projection.down(features)
        return self.projected(features, projection)

    def behind(self, head: int, logits: Tensor, before: Tensor) -> Tensor:
        """Logits [.., V'] of head ``head`` behind the tokens ``before`` [..], those just before the ones it guesses.

        The first columns alone will do. The same logits where there is no Markov bias.
        """
        markov = self.head(head).markov
        return logits if markov is None else markov(logits, before)

    def vocabulary(self) -> list[Tensor]:
        """The weights whose rows are tokens."""
        heads = [self.head(index) for index in range(self.config.num)]
        biases = [head.markov for head in heads if head.markov is not None]
        projections = [head.projection.weight for head in heads if head.projection is not None]
        return [*projections, *(part.weight for bias in biases for part in (bias.before, bias.after))]

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


def _projection(config: HeadsConfig, trunk: HeadSizes) -> nn.Linear | None:
    hidden, vocab = trunk.hidden, config.vocab or trunk.vocab
    if config.projection == "shared":
        return None
    if config.rank is None:
        return Linear(hidden, vocab, bias=trunk.bias)
    if config.rank > (most := min(hidden, vocab)):
        raise UserError(f"heads.rank={config.rank}: a projection of {hidden} to {vocab} has at most {most}")
    return LowRank(hidden, config.rank, vocab, trunk.bias)


def _markov(config: HeadsConfig, trunk: HeadSizes) -> Markov | None:
    if config.markov is None:
        return None
    choices = config.vocab or trunk.vocab
    if config.markov > (most := min(trunk.vocab, choices)):
        raise UserError(
            f"heads.markov={config.markov}: a bias of {trunk.vocab} tokens on {choices} has at most rank {most}"
        )
    return Markov(trunk.vocab, config.markov, choices)


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
