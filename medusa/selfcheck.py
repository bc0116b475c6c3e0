"""Can this model be driven exactly? Asked of every trunk at load, since some families go wrong in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from medusa.errors import UserError, reason
from medusa.parallel import whole
from medusa.tree import DraftTree, Shape, Topology

if TYPE_CHECKING:
    from medusa.trunk import Trunk

TREE = Topology.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
# Relative to the largest logit. Eager attention takes its softmax in fp32, whatever the model is in.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
COARSE = 0.15  # bf16 and fp16
LONGEST_TRIAL = 64  # tokens of the prompt that the trial reads


def check_tree(trunk: Trunk) -> None:
    """Verify a random tree once and compare every node with a plain forward of its own path.

    Raises:
        UserError: the family's logits differ, by how much, and what to do.
    """
    worst = tree_error(trunk)
    tolerance = TOLERANCE.get(trunk.dtype, COARSE)
    if not worst <= tolerance:  # also true for NaN
        quantised = getattr(trunk.model, "hf_quantizer", None) is not None
        raise UserError(
            f"model type {trunk.family!r}{' as quantised' if quantised else ''} can't be driven exactly with a token"
            f" tree (logits off by {worst:.2g}, allowed {tolerance:.2g}): use another trunk, or another"
            f" {'quantization_config (bitsandbytes: llm_int8_threshold=0)' if quantised else 'attn_implementation'}"
        )


def tree_error(trunk: Trunk) -> float:
    """Largest difference between a node's logits in a tree and in a plain forward, relative to the largest logit.

    Two ragged rows are prefilled, so that prefill, positions, mask and cache are all part of the trial.
    """
    generator = torch.Generator().manual_seed(0)
    length, size = _trial_length(trunk), TREE.size
    prompt = torch.randint(trunk.draftable, (2, length), generator=generator).to(trunk.device)
    tokens = torch.randint(trunk.draftable, (2, size), generator=generator).to(trunk.device)
    lengths = [length, length - 2]
    tree = DraftTree(Shape.static(TREE, trunk.device), tokens, torch.ones_like(tokens, dtype=torch.bool))
    try:
        cache = trunk.new_cache(2)
        trunk.prefill(prompt, lengths, cache)
        logits = trunk.tree_forward(tree, cache).logits
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise UserError(
            f"model type {trunk.family!r} can't be driven with a token tree ({reason(error)}): use another trunk"
        ) from error
    worst = torch.zeros(())
    for row, kept in enumerate(lengths):
        for node in range(size):
            path = tree.shape.ancestors[0, node].nonzero()[:, 0]
            text = torch.cat([prompt[row, :kept], tokens[row, path]])[None]
            plain = trunk.forward(text).logits[0, -1]
            apart = (logits[row, node] - plain).abs().max() / plain.abs().max().clamp(min=1.0)
            worst = torch.maximum(worst, apart.double().cpu())
    return worst.item()


def _trial_length(trunk: Trunk) -> int:
    """Long enough to look past a short sliding window; a long one is taken on trust from the config."""
    windows = [window for window in trunk.windows.values() if window is not None and window <= LONGEST_TRIAL]
    length = max([6, *(window + 3 for window in windows)])
    return length if trunk.context is None else min(length, trunk.context - TREE.size)


def check_projection(trunk: Trunk) -> None:
    """Raise UserError unless a projection like the trunk's own, of its last state, gives what it returns as logits."""
    ids = torch.arange(4, device=trunk.device)[None] % trunk.vocab_size
    output = trunk.forward(ids)
    if trunk.hidden_size != output.hidden.shape[-1]:
        raise UserError(
            f"model type {trunk.family!r} projects states of {output.hidden.shape[-1]} to {trunk.hidden_size} before"
            " its vocabulary: heads can't read them; use another trunk"
        )
    head = trunk.model.get_output_embeddings()
    weight = whole(head.weight.data)
    if type(weight) is not torch.Tensor or not weight.is_floating_point() or weight.is_meta:
        raise UserError(
            f"model type {trunk.family!r} has its vocabulary projection quantised or offloaded, so heads can't start"
            " from it: leave that projection (lm_head) as it is, in memory"
        )
    # with an adapter on it, heads start from the base's
    parts = () if hasattr(head, "base_layer") else (weight, None if head.bias is None else whole(head.bias.data))
    own = trunk.project(output.hidden, *(part if part is None else part.to(output.hidden.device) for part in parts))
    error = (own - output.logits).abs().max().item()
    if not error <= 1e-2 * max(1.0, output.logits.abs().max().item()):
        raise UserError(
            f"model type {trunk.family!r} does more after its vocabulary projection than heads can repeat (off by"
            f" {error:.2g}): use another trunk"
        )


@torch.no_grad()
def projects_directly(trunk: Trunk) -> bool:
    """Whether the model's logits are, to the bit, ``trunk.project`` of its body's last state.

    If so, verification may call the body and project: less is computed around it, and no states are collected.
    """
    ids = torch.arange(4, device=trunk.device)[None] % trunk.vocab_size
    output = trunk.forward(ids)
    body = getattr(trunk.model, "base_model", trunk.model)
    if body is trunk.model:
        return False
    try:
        state = getattr(body(**trunk.arguments(ids)), "last_hidden_state", None)
    except TypeError:  # a body with other arguments than the whole model's
        return False
    if state is None or state.device != output.hidden.device:  # over several devices, whole models bring it back
        return False
    if not torch.equal(state, output.hidden) or state.shape[-1] != trunk.hidden_size:
        return False
    return torch.equal(trunk.project(state), output.logits)
