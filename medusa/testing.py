"""Tools for testing exactness, ours and other engines': tiny models, reference decoding, drafters that know or lie."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from medusa.accept import Acceptance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput

VOCAB = 65


def tiny_trunk(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Trunk:
    """A random trunk of family ``llama`` (grouped heads), ``gpt2`` or ``neox``, 65 symbols, id 0 a frequent answer.

    ``changes`` override fields of the family's config.
    """
    common = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    makers: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 2}),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {}),
        "neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
    }
    config_class, model_class, own = makers[family]
    if family == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        }
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**(common | sizes | own | changes))).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # wide weights: the laws are peaked, and the text does not settle on one token
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
        model.get_output_embeddings().weight[0] *= 2.0  # id 0 often wins: a pad taken for a token would show
    return Trunk(model)


@torch.no_grad()
def plain_greedy(trunk: Trunk, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy continuation by whole forwards without any cache: slow, and beyond doubt."""
    ids = list(prompt)
    for _ in range(tokens):
        logits = trunk.model(input_ids=torch.tensor([ids], device=trunk.device)).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def random_topology(rng: random.Random, size: int, ranks: int = 6) -> Topology:
    """A random tree of at most ``size`` nodes: each node under a random earlier one, at a random free rank."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(size - 1):
        path = (*rng.choice(paths), rng.randrange(ranks))
        if path not in paths:
            paths.append(path)
    return Topology.from_paths(paths[1:]) if len(paths) > 1 else Topology.root()


class ScriptedDrafter:
    """Drafts from known continuations: an oracle where they are right, an adversary where they lie.

    ``continuations[row]`` is what follows the row's prompt. Each step proposes a random tree whose rank-0 child is
    the scripted next token with probability ``honesty`` and whose other tokens are random; some nodes are fillers.
    """

    name = "scripted"

    def __init__(self, continuations: Sequence[Sequence[int]], *, honesty: float, size: int = 8, seed: int = 0) -> None:
        self.continuations = continuations
        self.honesty = honesty
        self.size = size
        self.seed = seed

    def open(self, trunk: Trunk) -> ScriptedSession:
        """A session that follows the script."""
        return ScriptedSession(self, trunk)


class ScriptedSession:
    """Counts how far each row has come in its script."""

    def __init__(self, drafter: ScriptedDrafter, trunk: Trunk) -> None:
        self.drafter = drafter
        self.device = trunk.device
        self.vocab = trunk.vocab_size
        self.rng = random.Random(drafter.seed)
        self.scripts = [list(script) for script in drafter.continuations]
        self.at = [1] * len(self.scripts)  # script[0] is the first root, chosen by the prefill

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """The script is all it needs."""

    def propose(self, root_B: Tensor, room: int) -> DraftTree:
        """A random tree per row, all of the same size; rows have different topologies."""
        parents, tokens, valid = [], [], []
        for row, root in enumerate(root_B.tolist()):
            row_parents, row_tokens, row_valid = self._row_tree(row, root)
            parents.append(row_parents)
            tokens.append(row_tokens)
            valid.append(row_valid)
        shape = Shape.of(torch.tensor(parents, device=self.device))
        return DraftTree(shape, torch.tensor(tokens, device=self.device), torch.tensor(valid, device=self.device))

    def _row_tree(self, row: int, root: int) -> tuple[list[int], list[int], list[bool]]:
        rng, script, size = self.rng, self.scripts[row], self.drafter.size
        parents, tokens, valid, truth = (
            [-1],
            [root],
            [True],
            [self.at[row]],
        )  # truth: script index of the next token, or -1
        children: dict[int, set[int]] = {0: set()}
        while len(parents) < size:
            parent = rng.randrange(len(parents))
            follows = truth[parent]
            honest = 0 <= follows < len(script) and rng.random() < self.drafter.honesty
            token = script[follows] if honest else rng.randrange(self.vocab)
            if token in children[parent] or not valid[parent]:
                token = next(t for t in range(self.vocab) if t not in children[parent])
            right = 0 <= follows < len(script) and token == script[follows]
            children[parent].add(token)
            children[len(parents)] = set()
            parents.append(parent)
            tokens.append(token)
            # a filler may hold the right token, and must still not be accepted
            valid.append(valid[parent] and rng.random() < 0.9)
            truth.append(follows + 1 if right else -1)
        return parents, tokens, valid

    def commit(self, tree: DraftTree, verified: TrunkOutput, acceptance: Acceptance) -> None:
        """Move each row on by what it emitted."""
        for row, count in enumerate(acceptance.length_B.tolist()):
            self.at[row] += count

    def select(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``."""
        self.scripts = [self.scripts[row] for row in rows]
        self.at = [self.at[row] for row in rows]


def recompute(trunk: Trunk, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of a plain forward over ``ids``, without any cache."""
    with torch.no_grad():
        return trunk.model(input_ids=torch.tensor([list(ids)], device=trunk.device)).logits[0]
