"""What a logits processor does to scores, for all nodes of a tree at once: functions of tensors and the text so far.

A rule looks at the text before a node's successor. The nodes of a tree share the row's own text, so that a rule reads
that once per row, and per node only the few tokens of its path. All functions but :class:`Prefixes`' change
``scores_BNV`` in place, and none asks the device for anything.

Dimensions: B batch, T text, N nodes, A path tokens below the root, X tokens looked at, W words, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from medusa.tree import DraftTree

NONE = -1  # stands where a text has no token: before its beginning, beyond a path


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers of the host as int64 on the device, which is not waited for."""
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)


@dataclass(frozen=True)
class Prefixes:
    """The text before each node's successor: the row's own text up to its root, then the path to the node.

    ``text_BT`` int64 holds the rows' texts, the root last, right-aligned, -1 before the beginning; ``path_BNA`` int64
    the tokens from below the root down to the node, -1 beyond it; ``depth_BN`` int64 how many those are. ``lengths``
    are the texts' lengths, known to the host.
    """

    text_BT: Tensor
    path_BNA: Tensor
    depth_BN: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], tree: DraftTree) -> Prefixes:
        """Of a tree behind each row's text, which includes the root's token: ``tree.tokens_BN[:, 0]``."""
        tokens_BN, paths = tree.tokens_BN, tree.shape.paths[..., 1:]
        rows, nodes = tokens_BN.shape
        lengths = tuple(len(text) for text in texts)
        assert len(lengths) == rows and min(lengths) > 0, "one text per row, which holds at least the root"
        longest = max(lengths)
        line = array("q", [NONE]) * (rows * longest)  # int64; a tensor of lists takes eight times as long
        for row, text in enumerate(texts, start=1):
            line[row * longest - len(text) : row * longest] = array("q", text)
        text_BT = torch.frombuffer(line, dtype=torch.long).view(rows, longest)
        text_BT = text_BT.to(tokens_BN.device, non_blocking=True)
        paths = paths.expand(rows, -1, -1)
        path_BNA = tokens_BN.gather(1, paths.flatten(1).clamp(min=0)).view(rows, nodes, -1)
        path_BNA = path_BNA.masked_fill(paths < 0, NONE)
        return cls(text_BT, path_BNA, tree.shape.depths.expand(rows, -1), lengths)

    @property
    def deepest(self) -> int:
        """A bound on the nodes' depths, known to the host."""
        return self.path_BNA.shape[-1]

    @cached_property
    def length_BN(self) -> Tensor:
        """How many tokens each prefix has, int64 [B, N]."""
        return numbers(self.lengths, self.depth_BN.device)[:, None] + self.depth_BN

    @cached_property
    def ids_BNL(self) -> Tensor:
        """The prefixes written out: int64, right-aligned, -1 before their beginning, the node's own token last."""
        return self.tail(self.text_BT.shape[1] + self.deepest)

    def tail(self, count: int) -> Tensor:
        """Each prefix's last ``count`` tokens, int64 [B, N, count]; -1 before its beginning."""
        text_BX = self.text_BT[:, max(self.text_BT.shape[1] - count, 0) :]
        text_BX = pad(text_BX, (count - text_BX.shape[1], 0), value=NONE)
        line = torch.cat([text_BX[:, None].expand(-1, self.path_BNA.shape[1], -1), self.path_BNA], -1)
        columns = torch.arange(count, device=line.device) + self.depth_BN[..., None]  # deeper nodes end further right
        return line.gather(-1, columns)

    def rows(self, chosen: Sequence[int]) -> Prefixes:
        """The same for some of the rows."""
        index = numbers(chosen, self.text_BT.device)
        text_BT, path_BNA, depth_BN = (
            each.index_select(0, index) for each in (self.text_BT, self.path_BNA, self.depth_BN)
        )
        return Prefixes(text_BT, path_BNA, depth_BN, tuple(self.lengths[row] for row in chosen))


@dataclass(frozen=True)
class Places:
    """Where in the vocabulary some tokens stand, ready to gather and to scatter.

    ``real`` bool [B, N|1, X] says which of the ids are tokens. ``index`` int64 of the same shape repeats one of these
    in place of the others, so that the same is scattered there twice; ``some`` bool [B, N|1, 1]: there is one.
    """

    index: Tensor
    real: Tensor
    some: Tensor

    @classmethod
    def of(cls, ids: Tensor, real: Tensor, vocabulary: int) -> Places:
        """Of the ``ids`` that are ``real``; those beyond the ``vocabulary`` (a larger embedding's) are not."""
        if not ids.shape[-1]:
            ids, real = pad(ids, (0, 1)), pad(real, (0, 1))
        real = real & (ids < vocabulary)
        known = torch.where(real, ids, NONE)
        spare = known.amax(-1, keepdim=True)
        return cls(torch.where(real, known, spare).clamp(min=0), real, spare >= 0)

    def read(self, scores_BNV: Tensor) -> Tensor:
        """The scores that stand there, [B, N, X]."""
        return scores_BNV.gather(-1, self._index(scores_BNV))

    def write(self, scores_BNV: Tensor, new_BNX: Tensor | float) -> None:
        """Put the ``new`` scores there; a node without a token keeps all of its own."""
        index = self._index(scores_BNV)
        kept_BN1 = scores_BNV.gather(-1, index[..., :1])  # without a token, the index is the same throughout
        scores_BNV.scatter_(-1, index, torch.where(self.some, new_BNX, kept_BN1).expand_as(index))

    def _index(self, scores_BNV: Tensor) -> Tensor:
        return self.index.expand(-1, scores_BNV.shape[1], -1)


def _of_text(prefixes: Prefixes, vocabulary: int, prompts: Sequence[int]) -> Places:
    """The places of each row's own text behind its prompt."""
    new = [length - prompt for length, prompt in zip(prefixes.lengths, prompts, strict=True)]
    width = max(1, *new)
    text_BX = prefixes.text_BT[:, prefixes.text_BT.shape[1] - width :]
    new_B1 = numbers(new, text_BX.device)[:, None]
    real_BX = torch.arange(width, 0, -1, device=text_BX.device) <= new_B1
    return Places.of(text_BX[:, None], real_BX[:, None], vocabulary)


def _of_path(prefixes: Prefixes, vocabulary: int) -> Places:
    return Places.of(prefixes.path_BNA, prefixes.path_BNA >= 0, vocabulary)


def penalise_repetition(scores_BNV: Tensor, prefixes: Prefixes, penalty: float) -> None:
    """Divide the positive scores of tokens that occurred, prompt included, by ``penalty``; multiply the negative."""
    vocabulary = scores_BNV.shape[-1]
    places = [_of_text(prefixes, vocabulary, [0] * len(prefixes.lengths)), _of_path(prefixes, vocabulary)]
    before = [place.read(scores_BNV) for place in places]  # a token of both text and path pays once
    for place, old in zip(places, before, strict=True):
        place.write(scores_BNV, torch.where(old < 0, old * penalty, old / penalty))


def penalise_frequency(
    scores_BNV: Tensor, prefixes: Prefixes, prompts: Sequence[int], frequency: float, presence: float
) -> None:
    """Subtract ``frequency`` per occurrence, and ``presence`` once, from tokens that occurred behind the prompt."""
    vocabulary = scores_BNV.shape[-1]
    text, path = _of_text(prefixes, vocabulary, prompts), _of_path(prefixes, vocabulary)
    counts_BV = scores_BNV.new_zeros(len(prompts), vocabulary)
    counts_BV.scatter_add_(-1, text.index[:, 0], text.real[:, 0].to(counts_BV.dtype))
    in_text = counts_BV.gather(-1, text.index[:, 0])[:, None]
    same_BNXA = (path.index[..., None] == path.index[..., None, :]) & path.real[..., None, :]
    in_both = counts_BV.gather(-1, path.index.flatten(1)).view_as(path.index) + same_BNXA.sum(-1)
    before = text.read(scores_BNV), path.read(scores_BNV)
    # the path last: a token of both then pays for both
    for place, old, count in zip((text, path), before, (in_text, in_both), strict=True):
        place.write(scores_BNV, old - frequency * count - presence)


def forbid_repeated_ngrams(scores_BNV: Tensor, prefixes: Prefixes, size: int) -> None:
    """Forbid each token that would complete a run of ``size`` tokens which the prefix already has."""
    suffix_BNX = prefixes.tail(size - 1)
    # windows that end in the row's text, which its nodes share; then those that end in the path
    for ids in (prefixes.text_BT[:, None], prefixes.tail(size - 1 + prefixes.deepest)):
        windows = ids.shape[-1] - size + 1
        if windows < 1:
            continue
        last = ids[..., size - 1 :]
        match = last >= 0  # a window that begins before the text equals no suffix then
        for offset in range(size - 1):
            match = match & (ids[..., offset : offset + windows] == suffix_BNX[..., offset, None])
        Places.of(last, match, scores_BNV.shape[-1]).write(scores_BNV, -torch.inf)


@dataclass(frozen=True)
class Biases:
    """Biases on the last token of sequences, grouped by length.

    ``tokens_X`` int64 are the tokens that any sequence ends with, ``single_X`` the bias of each alone. A group is the
    sequences of one length: what precedes their last token, int64 [W, length - 1]; the place of that token in
    ``tokens_X``, int64 [W]; and the biases [W].
    """

    tokens_X: Tensor
    single_X: Tensor
    groups: tuple[tuple[Tensor, Tensor, Tensor], ...]

    @classmethod
    def of(cls, biases: Mapping[tuple[int, ...], float], device: torch.device) -> Biases:
        """Of token sequences and their biases, which are rounded to fp32 as the library rounds them."""
        # sorted: thousands of words are read and written in the order of memory
        place = {token: index for index, token in enumerate(sorted({words[-1] for words in biases}))}
        single = [biases.get((token,), 0.0) for token in place]
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for words, bias in biases.items():
            if len(words) > 1:
                groups.setdefault(len(words), []).append((words, bias))
        return cls(
            torch.tensor(list(place), dtype=torch.long, device=device),
            torch.tensor(single, dtype=torch.float32, device=device),
            tuple(
                (
                    torch.tensor([words[:-1] for words, _ in group], device=device),
                    torch.tensor([place[words[-1]] for words, _ in group], device=device),
                    torch.tensor([bias for _, bias in group], dtype=torch.float32, device=device),
                )
                for group in groups.values()
            ),
        )

    def add(self, scores_BNV: Tensor, prefixes: Prefixes) -> None:
        """Add each sequence's bias to its last token where the prefix ends with what precedes that."""
        index = self.tokens_X.expand(*scores_BNV.shape[:2], -1)
        bias_BNX = self.single_X.to(scores_BNV.dtype).expand_as(index).clone()
        for before_WX, place_W, bias_W in self.groups:
            tail_BNX = prefixes.tail(before_WX.shape[1])
            match = tail_BNX[..., None, 0] == before_WX[:, 0]
            for offset in range(1, before_WX.shape[1]):
                match = match & (tail_BNX[..., None, offset] == before_WX[:, offset])
            due_BNW = torch.where(match, bias_W.to(scores_BNV.dtype), 0.0)
            bias_BNX.scatter_add_(-1, place_W.expand_as(due_BNW), due_BNW)
        scores_BNV.scatter_(-1, index, scores_BNV.gather(-1, index) + bias_BNX)


def forbid(scores_BNV: Tensor, tokens_X: Tensor, where_BN: Tensor | None = None) -> None:
    """Forbid the tokens given, all of them in the vocabulary, at the nodes where ``where_BN`` is true."""
    index = tokens_X.expand(*scores_BNV.shape[:2], -1)
    if where_BN is None:
        scores_BNV.scatter_(-1, index, -torch.inf)
    else:
        old = scores_BNV.gather(-1, index)
        scores_BNV.scatter_(-1, index, old.masked_fill(where_BN[..., None], -torch.inf))


def force(scores_BNV: Tensor, tokens_X: Tensor, where_BN: Tensor) -> None:
    """Forbid all but the tokens given, which get one score, at the nodes where ``where_BN`` is true."""
    scores_BNV.masked_fill_(where_BN[..., None], -torch.inf)
    index = tokens_X.expand(*scores_BNV.shape[:2], -1)
    scores_BNV.scatter_(-1, index, scores_BNV.gather(-1, index).masked_fill(where_BN[..., None], 0.0))


def hasten(scores_BNV: Tensor, tokens_X: Tensor, factor: float, late_BN: Tensor) -> None:
    """Raise the scores of the tokens given by ``|score| * (factor**late - 1)`` where ``late_BN`` is above 0.

    Scores that are not finite stay; a power too large for the dtype gives its largest number rather than infinity,
    of which no law could be made.
    """
    limit = torch.finfo(scores_BNV.dtype).max
    growth_BN = (torch.pow(factor, late_BN.double()) - 1).clamp(max=limit).to(scores_BNV.dtype)
    index = tokens_X.expand(*scores_BNV.shape[:2], -1)
    old = scores_BNV.gather(-1, index)
    new = (old + old.abs() * growth_BN[..., None]).clamp(-limit, limit)
    scores_BNV.scatter_(-1, index, torch.where((late_BN[..., None] > 0) & old.isfinite(), new, old))
