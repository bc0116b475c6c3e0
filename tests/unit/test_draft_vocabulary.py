"""A draft vocabulary: which tokens are in it, and that nothing but guesses is lost by the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa.calibrate import NEVER, continuations, grow, head_ranks
from medusa.decoding import Request, decode
from medusa.drafters.children import MODES, Drafting
from medusa.drafters.medusa import MedusaDrafter
from medusa.errors import UserError
from medusa.heads import KINDS, PROJECTIONS, HeadsConfig, MedusaHeads
from medusa.lawkit import decoder_run, judge, trunk_law
from medusa.rules import RecursiveRule
from medusa.sampling import Chance, HashDraws, SamplingParams, to_probs
from medusa.testing import VOCAB, memorising_heads, plain_greedy, recompute, tiny_model, tiny_trunk
from medusa.train.cli import read_config
from medusa.train.record import to_yaml
from medusa.tree import DraftTree, Topology
from medusa.trunk import Trunk
from medusa.vocabulary import check_ids, draft_vocabulary, token_counts

IDS = [1, 2, 5, 8, 13, 21, 34, 40, 41, 55, 63, 64]


@cache
def trunk_of(family: str = "llama", vocab: int = VOCAB) -> Trunk:
    return tiny_trunk(family, vocab_size=vocab)


def heads_of(
    kind: str,
    projection: str = "own",
    ids: list[int] = IDS,
    trunk: Trunk | None = None,
    num: int = 2,
    scale: float = 0.3,
) -> MedusaHeads:
    """Heads with every parameter moved off its start; with the ids of no one, those that draft from all tokens."""
    trunk = trunk or trunk_of()
    rank = min(7, len(ids) or 7) if projection == "low_rank" else None
    config = HeadsConfig(kind, num, projection=projection, vocab=len(ids) or None, rank=rank)
    heads = MedusaHeads(config, trunk, torch.tensor(ids) if ids else None)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads.eval()


class Words:
    """A tokenizer of so many tokens."""

    def __init__(self, size: int, special: tuple[int, ...] = ()) -> None:
        self.size, self.all_special_ids = size, special

    def __len__(self) -> int:
        return self.size


def trunk_with(size: int, special: tuple[int, ...] = (), eos: int | None = None) -> Trunk:
    model = tiny_model("llama", vocab_size=12)
    model.generation_config.eos_token_id = eos
    return Trunk(model, Words(size, special), check=False)  # type: ignore[arg-type]


# Which tokens.


def test_tokens_are_counted_where_they_are_supervised() -> None:
    texts = [torch.tensor([[3, -100, 3], [0, 3, -100]]), torch.tensor([5]), torch.tensor([], dtype=torch.long)]
    assert token_counts(texts, 7).tolist() == [1, 0, 0, 3, 0, 1, 0]


COUNTS = torch.tensor([5, 0, 7, 5, 1, 9, 0, 2, 0, 0, 99, 98])


@pytest.mark.parametrize(
    ("size", "special", "eos", "expected"),
    [
        (1, (), None, [5]),
        (3, (), None, [0, 2, 5]),  # of 0 and 3, equally frequent, the lower id
        (4, (), None, [0, 2, 3, 5]),
        (3, (4,), None, [2, 4, 5]),  # a special token that occurs
        (3, (), 7, [2, 5, 7]),
        (3, (4, 6), 7, [4, 5, 7]),  # 6 never occurs
        (3, (11,), None, [0, 2, 5]),  # beyond the tokenizer, however frequent
        (8, (), None, [0, 1, 2, 3, 4, 5, 6, 7]),  # all that occur, then the lowest ids
        (10, (), None, list(range(10))),
    ],
)
def test_the_most_frequent_and_the_special_ones(
    size: int, special: tuple[int, ...], eos: int | None, expected: list[int]
) -> None:
    trunk, before = trunk_with(10, special, eos), COUNTS.clone()
    ids = draft_vocabulary(trunk, COUNTS, size)
    assert ids.tolist() == expected and ids.dtype == torch.long
    assert torch.equal(COUNTS, before)
    check_ids(ids, size, trunk)


@pytest.mark.parametrize(("size", "words"), [(0, "heads.vocab=0"), (11, "heads.vocab=11: the tokenizer has 10 tokens")])
def test_sizes_that_can_not_be_had(size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        draft_vocabulary(trunk_with(10), COUNTS, size)


def test_too_small_for_the_special_tokens() -> None:
    with pytest.raises(UserError, match=r"heads\.vocab=2: 3 special tokens occur"):
        draft_vocabulary(trunk_with(10, (2, 3), 4), COUNTS, 2)
    assert draft_vocabulary(trunk_with(10, (2, 3), 4), COUNTS, 3).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("ids", "vocab", "words"),
    [
        (None, 3, "heads.vocab=3 and no draft_ids"),
        (torch.tensor([1, 2]), None, "heads.vocab=None and 2 draft_ids"),
        (torch.tensor([1, 2]), 3, r"\(2,\): heads.vocab=3 needs"),
        (torch.tensor([[1], [2]]), 2, r"\(2, 1\)"),
        (torch.tensor([1, 2, 3], dtype=torch.int32), 3, "int32"),
        (torch.tensor([1, 3, 2]), 3, "do not ascend"),
        (torch.tensor([1, 2, 2]), 3, "do not ascend"),
        (torch.tensor([-1, 2, 3]), 3, "from -1 to 3"),
        (torch.tensor([1, 2, 10]), 3, r"from 1 to 10: ids lie in 0\.\.9"),
    ],
)
def test_ids_that_do_not_fit_are_named(ids: Tensor | None, vocab: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        MedusaHeads(HeadsConfig("medusa", 1, projection="shared", vocab=vocab), trunk_with(10), ids)
    assert "\n" not in str(caught.value)


def test_a_recipe_may_ask_for_them_and_need_not(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    plain = "run: x\ntrunk: {name: gpt2}\ndata: {tokenizer: trunk}\n"
    file.write_text(plain + "heads: {kind: root, projection: shared}\n")
    config = read_config([str(file)])[0]
    assert (config.heads.vocab, config.heads.rank, config.heads_training.targets) == (None, None, "text")
    file.write_text(
        plain + "heads: {projection: low_rank, vocab: 8192, rank: 64}\nheads_training: {targets: acceptance}\n"
    )
    config = read_config([str(file)])[0]
    assert config.heads == HeadsConfig(projection="low_rank", vocab=8192, rank=64)
    assert config.heads_training.targets == "acceptance"
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert read_config([str(again)])[0] == config


# What heads make of them.


@settings(deadline=None, max_examples=50)
@given(st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_columns_and_tokens_are_inverse(ids: set[int]) -> None:
    heads = MedusaHeads(
        HeadsConfig("medusa", 1, projection="shared", vocab=len(ids)), trunk_of(), torch.tensor(sorted(ids))
    )
    everything = torch.arange(-1, VOCAB + 3)
    columns = heads.columns(everything)
    for token, column in zip(everything.tolist(), columns.tolist(), strict=True):
        assert (column >= 0) == (token in ids)
        assert column < 0 or int(heads.tokens(torch.tensor(column))) == token
    assert heads.choices == len(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "gemma2"])  # a bias, a scale, a softcap
def test_a_new_head_has_the_trunks_own_columns(family: str, projection: str, kind: str) -> None:
    trunk = trunk_of(family)
    rank = len(IDS) if projection == "low_rank" else None  # no less than the rows have
    heads = MedusaHeads(HeadsConfig(kind, 2, 1, projection, len(IDS), rank), trunk, torch.tensor(IDS))
    output = trunk.forward(torch.tensor([[3, 0, 41, 7]]))
    embedded = torch.randn(1, 4, 2, 32, dtype=torch.float64)
    for head in range(2):
        features = heads.features(head, output.hidden, heads.context(head, embedded))
        logits = heads.logits(head, features)
        torch.testing.assert_close(logits, output.logits[..., IDS], rtol=1e-11, atol=1e-11)
        assert torch.equal(heads.draftable(logits), logits)


def test_shared_projections_store_nothing_but_the_ids() -> None:
    heads = heads_of("root", "shared")
    stored = heads.state_dict()
    assert stored.pop("draft_ids").tolist() == IDS
    assert all(name.startswith("heads.") and "projection" not in name for name in stored)
    assert "draft_ids" not in dict(heads.named_parameters())
    assert heads.half().draft_ids.dtype == torch.long  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("projection", ["own", "low_rank"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_every_token_in_it_nothing_changes(kind: str, projection: str, mode: str) -> None:
    few, all_ = heads_of(kind, projection, list(range(VOCAB))), heads_of(kind, projection, [])
    one, other = drafted(few, mode), drafted(all_, mode)
    assert torch.equal(one.tokens_BN, other.tokens_BN) and torch.equal(one.valid_BN, other.valid_BN)
    assert (one.q_BNV is None) == (mode == "greedy")
    if one.q_BNV is not None and other.q_BNV is not None:
        assert torch.equal(one.q_BNV, other.q_BNV)


TREE = Topology.from_paths([[0], [1], [7], [0, 0], [0, 3], [7, 11]])


def drafted(heads: MedusaHeads, mode: str, topology: Topology = TREE) -> DraftTree:
    drafting = None if mode == "greedy" else Drafting(mode)
    session = MedusaDrafter(heads, topology, drafting).open(heads.trunk)
    hidden_BD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root_B = torch.tensor([0, 17, 64])
    session.start([[0]] * 3, hidden_BD, heads.trunk.forward(root_B[:, None]))
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(3)]
    return session.propose(root_B, 9, None if mode == "greedy" else Chance(params, [1] * 3, HashDraws(), "cpu"))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_holds_its_rank_among_the_ids(kind: str, projection: str) -> None:
    heads = heads_of(kind, projection)
    tree = drafted(heads, "greedy")
    hidden_BD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, tokens in enumerate(tree.tokens_BN.tolist()):
        for node in range(1, TREE.size):
            line = [TREE.parents[node]]
            while line[-1] != 0:
                line.append(TREE.parents[line[-1]])
            head = len(line) - 1
            context = heads.context(head, heads.embed(torch.tensor([tokens[each] for each in reversed(line)])))
            logits = heads.logits(head, heads.features(head, hidden_BD[row], context))
            assert tokens[node] == IDS[int(logits.argsort(descending=True)[TREE.ranks[node]])]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_end_with_the_draft_vocabulary(kind: str) -> None:
    whole = Topology.from_paths([[rank] for rank in range(len(IDS))])
    tree = drafted(heads_of(kind), "greedy", whole)
    assert tree.tokens_BN[:, 1:].sort(-1).values.tolist() == [IDS] * 3
    with pytest.raises(UserError, match=f"rank {len(IDS)} of {len(IDS)} tokens"):
        MedusaDrafter(heads_of(kind), Topology.from_paths([[len(IDS)]]))


@pytest.mark.parametrize("mode", ["sampled", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_laws_are_spread_over_the_whole_vocabulary(kind: str, mode: str) -> None:
    tree = drafted(heads_of(kind, "shared"), mode)
    assert tree.q_BNV is not None and tree.sampled_BN is not None and tree.q_BNV.shape[-1] == VOCAB
    others = [token for token in range(VOCAB) if token not in IDS]
    assert not tree.q_BNV[..., others].any()  # zeros to the bit
    parents = sorted(set(TREE.parents[1:]))
    if mode == "sampled":
        torch.testing.assert_close(tree.q_BNV[:, parents].sum(-1), torch.ones(3, len(parents)).double())
    assert set(tree.tokens_BN[:, 1:].flatten().tolist()) <= set(IDS)
    for node in range(1, TREE.size):  # a drawn child has a probability in its parent's law
        q_B = tree.q_BNV[:, TREE.parents[node]].gather(1, tree.tokens_BN[:, [node]])[:, 0]
        assert (q_B[tree.sampled_BN[:, node]] > 0).all()


# What is emitted.

PROMPT = [1, 0]


@pytest.mark.parametrize(
    ("kind", "mode", "temperature"),
    [*((kind, mode, 1.0) for kind in KINDS for mode in MODES), *((kind, "sampled", 0.0) for kind in KINDS)],
)
def test_heads_are_lossless(kind: str, mode: str, temperature: float) -> None:
    trunk, params = trunk_of(vocab=4), SamplingParams(temperature=temperature)

    def next_law(text: tuple[int, ...]) -> list[float]:
        return to_probs(recompute(trunk, [*PROMPT, *text])[-1][None, None], [params])[0, 0].tolist()

    truth = trunk_law(next_law, 3)
    for ids in ([0, 2, 3], [1, 3]):
        heads = heads_of(kind, "low_rank" if len(ids) == 3 else "shared", ids, trunk, scale=0.2)
        drafter = MedusaDrafter(heads, Topology.full([2, 1]), Drafting(mode))
        for rule in (None, RecursiveRule()) if mode == "top" else (None,):
            assert judge(decoder_run(trunk, drafter, PROMPT, 3, rule, params), truth) is None


PROMPTS = [[3, 0, 41, 7], [11], [60, 2]]
TOKENS = 30


@cache
def texts_of(family: str) -> list[list[int]]:
    return [plain_greedy(trunk_of(family), prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("kind", KINDS)
def test_good_guesses_are_accepted_and_the_text_is_the_trunks(kind: str, family: str) -> None:
    trunk, texts = trunk_of(family), texts_of(family)
    known = sorted({token for text in texts for token in text})
    ids = [token for token in known if token not in (known[1], known[-1])]  # two that the text needs are not drafted
    full = memorising_heads(trunk, HeadsConfig(kind, 3), [p + t for p, t in zip(PROMPTS[:2], texts, strict=False)])
    heads = MedusaHeads(HeadsConfig(kind, 3, vocab=len(ids)), trunk, torch.tensor(ids))
    state = {name: value[ids] if "projection" in name else value for name, value in full.state_dict().items()}
    heads.load_state_dict(state | {"draft_ids": torch.tensor(ids)})
    emitted, steps = [[] for _ in PROMPTS], 0  # type: ignore[var-annotated]
    drafter = MedusaDrafter(heads, Topology.full([2, 2, 1]))
    for step in decode(trunk, drafter, [Request(prompt, TOKENS) for prompt in PROMPTS]):
        for row, tokens in step.tokens.items():
            emitted[row] += tokens
            steps += 1
    assert emitted == texts
    assert sum(map(len, emitted)) / steps > 1.3


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_outside_has_no_rank(kind: str, projection: str) -> None:
    trunk = trunk_of()
    held = continuations(trunk, PROMPTS, TOKENS)
    known = sorted({token for ids in held.ids for token in ids})
    heads = heads_of(kind, projection, known[::2])
    ranks, outside = head_ranks(heads, held), 0
    for row, ids, start, hidden_TD in zip(ranks, held.ids, held.starts, held.hidden, strict=True):
        for place in range(len(row)):
            for head in range(2):
                state = start - 1 + place
                if state + 2 + head >= len(ids):
                    assert row[place, head] == -1
                    continue
                answer = ids[state + 2 + head]
                if answer not in known[::2]:
                    outside += 1
                    assert row[place, head] == NEVER
                    continue
                read = torch.tensor(ids[state + 1 : state + 1 + heads.config.reads(head)], dtype=torch.long)
                context = heads.context(head, heads.embed(read)) if len(read) else None
                logits = heads.logits(head, heads.features(head, hidden_TD[state], context))
                assert known[::2][int(logits.argsort(descending=True)[int(row[place, head])])] == answer
    assert outside > 5
    MedusaDrafter(heads, grow(ranks, 500))  # the tree takes no rank that heads don't have
