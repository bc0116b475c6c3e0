"""Another way of drawing drafts, for a call or a benchmark: what it changes, and that no text changes with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from medusa.drafters.base import Drafter
from medusa.drafters.children import Drafting
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.medusa import MedusaDrafter
from medusa.drafters.mixed import MixedDrafter
from medusa.drafters.none import NullDrafter
from medusa.drafters.prompt_lookup import Lookup, PromptLookupDrafter
from medusa.errors import UserError
from medusa.heads import HeadsConfig
from medusa.infer.engine import Engine
from medusa.infer.redraft import draws, redraft
from medusa.lawkit import decoder_run, judge, trunk_law
from medusa.sampling import SamplingParams
from medusa.testing import random_heads, recompute, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

from .drafting import untrained

PROMPT, TREE = [1, 0, 2], Topology.full([2, 1])
DRAWN = ("heads", "draft tree", "cut", "dynamic", "dynamic hydra", "mixed", "mixed hydra", "eagle", "eagle grown")


@cache
def tiny() -> Trunk:
    return tiny_trunk("llama", vocab_size=3)


def drafter_of(trunk: Trunk, name: str) -> Drafter:
    if name == "heads":
        return MedusaDrafter(random_heads(trunk, HeadsConfig("medusa", num=2), scale=0.2), TREE)
    if name == "mixed hydra":
        hydra = random_heads(trunk, HeadsConfig("hydra", num=2), scale=0.2)
        dynamic = DynamicDrafter(hydra, 4, sampling=Topology.chain(1))
        return MixedDrafter(dynamic, Lookup(least=1, branches=1, tokens=2, nodes=2))
    return untrained(trunk, name, "sampled", TREE)


def parts(drafter: Any) -> list[Any]:
    """What a drafter is made of, as far as it chooses tokens."""
    inner = [getattr(drafter, name, None) for name in ("dynamic", "sampling")]
    return [drafter, *(part for each in inner if each is not None for part in parts(each))]


@cache
def truth() -> dict[tuple[int, ...], float]:
    return trunk_law(lambda text: recompute(tiny(), [*PROMPT, *text])[-1].softmax(-1).tolist(), 3)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_every_draft_temperature_is_lossless(name: str, temperature: float) -> None:
    trunk, params = tiny(), SamplingParams(temperature=1.0)
    drafter = redraft(drafter_of(trunk, name), temperature=temperature)
    assert judge(decoder_run(trunk, drafter, PROMPT, 3, None, params), truth()) is None


@pytest.mark.parametrize("name", DRAWN)
def test_the_temperature_reaches_what_draws_and_the_given_drafter_stays(name: str) -> None:
    trunk = tiny()
    drafter = drafter_of(trunk, name)
    changed = redraft(drafter, temperature=2.5)
    assert draws(drafter) and draws(changed)
    assert parts(changed)[-1].drafting == Drafting(temperature=2.5)
    assert parts(drafter)[-1].drafting == Drafting()
    assert [type(part) for part in parts(changed)] == [type(part) for part in parts(drafter)]
    twice = redraft(
        changed, mode="top" if name == "dynamic" else "mixed" if name == "heads" else None, temperature=None
    )
    assert parts(twice)[-1].drafting.temperature == 2.5  # a mode leaves it


@pytest.mark.parametrize("name", DRAWN)
def test_it_changes_what_is_drafted(name: str) -> None:
    trunk = tiny_trunk("llama", vocab_size=7)
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    engine = Engine(trunk, drafter_of(trunk, name))
    usual, hot = (engine.generate(PROMPT, **extra, **options) for extra in ({}, {"draft_temperature": 9.0}))
    assert usual.accepted != hot.accepted
    greedy = [engine.generate(PROMPT, max_new_tokens=40, **extra) for extra in ({}, {"draft_temperature": 9.0})]
    assert greedy[0].token_ids == greedy[1].token_ids and greedy[0].accepted == greedy[1].accepted


def test_what_draws_nothing_is_refused() -> None:
    trunk = tiny()
    hydra = random_heads(trunk, HeadsConfig("hydra", num=2), scale=0.2)
    for drafter in (NullDrafter(), PromptLookupDrafter(), DynamicDrafter(hydra, 4), untrained(trunk, "mixed", "top")):
        assert not draws(drafter)
        with pytest.raises(UserError, match=f"draft_temperature=2.0: the drafter '{drafter.name}' draws nothing"):
            redraft(drafter, temperature=2.0)
    with pytest.raises(UserError, match="drafting='sampled': the drafter 'none' draws nothing"):
        redraft(NullDrafter(), mode="sampled")
    with pytest.raises(UserError, match="above 0"):
        redraft(drafter_of(trunk, "heads"), temperature=0.0)
    with pytest.raises(UserError, match="sampled or top"):
        redraft(untrained(trunk, "dynamic"), mode="mixed")
