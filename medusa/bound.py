"""What heads and EAGLE layers have in common: a trunk they are bound to, and the tokens that they draft from.

Dimensions: D hidden, V vocabulary, V' the tokens drafted from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa.errors import UserError
from medusa.parallel import whole
from medusa.selfcheck import check_projection
from medusa.trunk import Trunk
from medusa.vocabulary import check_ids


class Bound(nn.Module):
    """A module that drafts for a trunk, of which it owns, saves and trains nothing.

    Args:
        trunk: whose it is.
        draft_ids: the ``vocab`` tokens to draft from (see :func:`medusa.vocabulary.draft_vocabulary`), None for all.
        vocab: how many there are by the config.
        name: of that setting, for errors.

    Raises:
        UserError: a trunk whose projection can't be repeated, or draft ids that are missing, wrong or not asked for.
    """

    draft_ids: Tensor | None

    def __init__(self, trunk: Trunk, draft_ids: Tensor | None, vocab: int | None, name: str) -> None:
        super().__init__()
        check_projection(trunk)
        self._trunk = (trunk,)  # in a tuple: a module attribute would be registered and saved
        self._shared: tuple[nn.Linear, ...] = ()  # a slice of the trunk's projection, where used; not registered
        self.register_buffer("draft_ids", _checked(draft_ids, vocab, name, trunk, trunk.device))

    @property
    def trunk(self) -> Trunk:
        """The trunk that this drafts for."""
        return self._trunk[0]

    def projection_rows(self) -> tuple[Tensor, Tensor | None]:
        """Of the trunk's projection what belongs to the tokens drafted from: weight [V', D], bias [V'] if there is one.

        A copy where there is a draft vocabulary.
        """
        output, ids = self.trunk.model.get_output_embeddings(), self.draft_ids
        weight, bias = whole(output.weight.data), None if output.bias is None else whole(output.bias.data)
        if ids is None:
            return weight, bias
        at = ids.to(weight.device)  # which may be another one's than the states', as with a device_map
        return weight[at].to(ids.device), None if bias is None else bias[at].to(ids.device)

    def share(self, weight: Tensor, bias: Tensor | None) -> None:
        """Draft by these rows of the trunk's projection."""
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self._shared = (layer,)

    def trunk_rows(self) -> tuple[Tensor, Tensor | None] | tuple[()]:
        """What :meth:`medusa.trunk.Trunk.project` takes to give the trunk's logits of the tokens drafted from."""
        if self._shared:
            return self._shared[0].weight, self._shared[0].bias
        return () if self.draft_ids is None else self.projection_rows()

    def projected(self, states: Tensor, projection: nn.Module | None = None) -> Tensor:
        """States [.., D] -> logits [.., V'] by a projection, or by the trunk's, with the trunk's scale and softcap."""
        if projection is None and not self._shared:
            return self.trunk.project(states).to(states.device)
        logits: Tensor = self.trunk.scaled((projection or self._shared[0])(states))
        return logits

    @property
    def parts(self) -> list[nn.Module]:
        """All that this computes with, but the trunk: itself, and what is not registered with it."""
        return [self, *self._shared]

    @property
    def choices(self) -> int:
        """How many tokens can be drafted."""
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


def _checked(ids: Tensor | None, vocab: int | None, name: str, trunk: Trunk, device: torch.device) -> Tensor | None:
    if (ids is None) != (vocab is None):
        given = "no draft_ids are" if ids is None else f"{len(ids)} draft_ids are"
        raise UserError(f"{name}={vocab} and {given} given: give as many ids, or set {name} to null")
    if ids is None or vocab is None:
        return None
    check_ids(ids, vocab, trunk)
    return ids.to(device)
