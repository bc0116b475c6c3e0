"""Tools for testing exactness, ours and other engines': tiny models, reference decoding, drafters that know or lie."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from medusa.accept import Acceptance
from medusa.eagle import EagleConfig, EagleLayer
from medusa.families import FAMILIES, VOCAB
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.sampling import Chance
from medusa.tree import DraftTree, Shape, Topology
from medusa.trunk import Trunk, TrunkOutput


def tiny_model(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family of :data:`medusa.families.FAMILIES`, 65 symbols, id 0 a frequent answer.

    ``changes`` override fields of the family's config.
    """
    prefix, infix, own = FAMILIES[family]
    common = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{prefix}{infix}Config")(**(common | own | changes))
    name = f"{prefix}LMHeadModel" if family == "gpt2" else f"{prefix}ForCausalLM"
    model = getattr(transformers, name)(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = parameter.ndim > 1  # wide weights: the laws are peaked, and the text does not settle on one token
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * (0.3 if wide else 0.1)
            parameter.copy_(noise if wide else parameter + noise)
        model.get_output_embeddings().weight[0] *= 3.0  # id 0 often wins: a pad taken for a token would show
    return model


def tiny_trunk(family: str, **options: Any) -> Trunk:
    """A trunk of :func:`tiny_model`, which has the options."""
    return Trunk(tiny_model(family, **options))


@torch.no_grad()
def noisy_copy(trunk: Trunk, noise: float = 0.02, *, seed: int = 0) -> Trunk:
    """A trunk whose weights are those of ``trunk`` and some noise: a draft model that is often right."""
    model = copy.deepcopy(trunk.model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter) * noise
    return Trunk(model, trunk.tokenizer)


@torch.no_grad()
def memorising_heads(
    trunk: Trunk, config: HeadsConfig, texts: Sequence[Sequence[int]], *, seed: int = 0
) -> MedusaHeads:
    """Heads that know ``texts`` by heart: random blocks, and projections fitted to what follows by least squares.

    Good guesses without training, as long as there are fewer tokens than features: paths of every depth are accepted.
    """
    heads = random_heads(trunk, config, seed=seed)
    assert config.projection == "own", "a shared projection can't be fitted"
    # Tokens that never follow would tie but for rounding, which goes by how many rows there are: filters would differ.
    apart = torch.linspace(0.499, 0.5, trunk.vocab_size, dtype=trunk.dtype, device=trunk.device)
    for head in range(config.num):
        features, answers, before = [], [], []
        reads = config.reads(head)
        for text in texts:
            ids = torch.tensor([list(text)], device=trunk.device)
            known = len(text) - 2 - head  # states with an answer
            if known < 1:
                continue
            after = torch.stack([torch.arange(t + 1, t + 1 + max(reads, 1)) for t in range(known)])
            context = heads.context(head, heads.embed(ids[:, after]))
            features.append(heads.features(head, trunk.forward(ids).hidden[:, :known], context)[0])
            answers.append(ids[0, 2 + head :])
            before.append(ids[0, 1 + head : -1])
        target = torch.nn.functional.one_hot(torch.cat(answers), trunk.vocab_size).to(trunk.dtype)
        added = heads.behind(head, torch.zeros_like(target), torch.cat(before))  # by a Markov bias
        solved = torch.linalg.lstsq(torch.cat(features), target - apart - added).solution
        projection = heads.head(head).projection
        assert projection is not None
        projection.weight.copy_(solved.T)
        if projection.bias is not None:
            projection.bias.zero_()
    return heads


@torch.no_grad()
def random_heads(trunk: Trunk, config: HeadsConfig, *, seed: int = 0, scale: float = 0.3) -> MedusaHeads:
    """Heads with every parameter moved off its start, so that nothing they read is without effect."""
    heads = MedusaHeads(config, trunk)
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.copy_(parameter + noise.to(parameter))
    return heads.eval()


@torch.no_grad()
def random_eagle(trunk: Trunk, config: EagleConfig, *, seed: int = 0, scale: float = 0.1) -> EagleLayer:
    """An EAGLE layer with every parameter moved off its start; of a draft vocabulary it has random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if config.vocab is not None:
        ids = torch.randperm(trunk.draftable, generator=generator)[: config.vocab].sort().values
    layer = EagleLayer(config, trunk, ids)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.copy_(parameter + noise.to(parameter))
    return layer.eval()


@torch.no_grad()
def memorising_eagle(
    trunk: Trunk, config: EagleConfig, texts: Sequence[Sequence[int]], depth: int, *, seed: int = 0
) -> EagleLayer:
    """A layer of version 3 that knows ``texts`` by heart down to ``depth``: random, its projection fitted to them."""
    layer = random_eagle(trunk, config, seed=seed)
    assert layer.lm_head is not None and layer.norm is not None, "version 1 projects as the trunk does"
    states, answers = [], []
    for text in texts:
        ids = torch.tensor([list(text)], device=trunk.device)
        features = layer.features(trunk.forward(ids, layers=layer.layers))
        for level, state in enumerate(layer.unroll(ids, features, depth)):
            states.append(layer.norm(state[0, level:-1]))
            answers.append(ids[0, level + 2 :])
    target = torch.nn.functional.one_hot(torch.cat(answers), trunk.vocab_size).to(trunk.dtype)
    layer.lm_head.weight.copy_(torch.linalg.lstsq(torch.cat(states), target - 0.5).solution.T)
    return layer


@torch.no_grad()
def plain_greedy(trunk: Trunk, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy continuation by whole forwards without any cache: slow, and beyond doubt."""
    ids = list(prompt)
    for _ in range(tokens):
        logits = trunk.model(input_ids=torch.tensor([ids], device=trunk.device)).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def random_topology(rng: random.Random, size: int, ranks: int = 6, depth: int | None = None) -> Topology:
    """A random tree of ``size`` nodes: each under a random earlier one, at a free rank, at most ``depth`` deep."""
    paths: list[tuple[int, ...]] = [()]
    inner: list[tuple[int, ...]] = [()]  # nodes that may have children
    while len(paths) < size:
        path = (*rng.choice(inner), rng.randrange(ranks))
        if path not in paths:
            paths.append(path)
            if depth is None or len(path) < depth:
                inner.append(path)
    return Topology.from_paths(paths[1:]) if len(paths) > 1 else Topology.root()


Scripts = Sequence[Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]]


class ScriptedDrafter:
    """Drafts from known continuations: an oracle where they are right, an adversary where they lie.

    ``continuations[row]`` is what follows the row's prompt; in a mapping the key is the prompt. Each step proposes a
    random tree whose rank-0 child is the scripted next token with probability ``honesty`` and whose other tokens are
    random; some nodes are fillers.
    """

    name = "scripted"

    def __init__(self, continuations: Scripts, *, honesty: float, size: int = 8, seed: int = 0) -> None:
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
        self.scripts: list[list[int]] = []
        self.at: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], hidden_BD: Tensor, output: TrunkOutput) -> None:
        """Look up the scripts of these prompts, by their number or by themselves."""
        known = self.drafter.continuations
        scripts = [known[tuple(prompt)] for prompt in prompts] if isinstance(known, Mapping) else known
        self.scripts = [list(script) for script in scripts]
        self.at = [1] * len(self.scripts)  # script[0] is the first root, chosen by the prefill

    def propose(self, root_B: Tensor, room: int, chance: Chance | None = None) -> DraftTree:
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
        parents, tokens, valid = [-1], [root], [True]
        truth = [self.at[row]]  # per node, the script's index of what follows it, or -1 off the script
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

    def admit(self, slots: Sequence[int], other: ScriptedSession) -> None:
        """Take over the scripts of another session's rows."""
        for slot, script, at in zip(slots, other.scripts, other.at, strict=True):
            self.scripts[slot : slot + 1], self.at[slot : slot + 1] = [script], [at]


def recompute(trunk: Trunk, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of a plain forward over ``ids``, without any cache."""
    with torch.no_grad():
        return trunk.model(input_ids=torch.tensor([list(ids)], device=trunk.device)).logits[0]
