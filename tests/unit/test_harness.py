"""The engine as a model of lm-evaluation-harness: its scores are the trunk's own, its answers the engine's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from medusa.cut import cut
from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.errors import UserError
from medusa.infer.engine import Engine
from medusa.infer.harness import Scorer, harness_model
from medusa.testing import recompute, tiny_trunk
from medusa.trunk import Trunk

TEXT = "abcdefgh ."


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = char_tokenizer(TEXT)
    tokenizer.bos_token = "."
    trunk = Trunk(tiny_trunk("llama", vocab_size=len(TEXT), seed=6, max_position_embeddings=32).model, tokenizer)
    return Engine(trunk, DraftModelDrafter(cut(trunk, 1)))


def expected(engine: Engine, before: str, text: str) -> tuple[float, bool]:
    """Token by token, without a cache."""
    tokenizer = engine.trunk.tokenizer
    assert tokenizer is not None
    ids, own = tokenizer.encode(before), tokenizer.encode(text)
    laws = recompute(engine.trunk, ids + own).log_softmax(-1)
    at = range(len(ids) - 1, len(ids) + len(own) - 1)
    greedy = all(laws[place].argmax().item() == token for place, token in zip(at, own, strict=True))
    return sum(laws[place, token].item() for place, token in zip(at, own, strict=True)), greedy


def test_loglikelihoods_are_the_trunks_own(engine: Engine) -> None:
    scorer = Scorer(engine)
    score, greedy = scorer.loglikelihood("abc", "de")
    assert (score, greedy) == (pytest.approx(expected(engine, "abc", "de")[0]), expected(engine, "abc", "de")[1])
    answer = engine.generate("abc", max_new_tokens=4, do_sample=False).text
    assert scorer.loglikelihood("abc", answer)[1]
    other = answer[:-1] + next(char for char in TEXT if char != answer[-1])
    assert not scorer.loglikelihood("abc", other)[1]
    assert scorer.loglikelihood("", "ab")[0] == pytest.approx(expected(engine, ".", "ab")[0])
    assert scorer.loglikelihood("abc ", "d")[0] == pytest.approx(expected(engine, "abc", " d")[0])


def test_a_context_that_is_too_long_loses_its_beginning(engine: Engine) -> None:
    long = "abcd" * 12
    assert Scorer(engine).loglikelihood(long, "ef")[0] == pytest.approx(
        expected(engine, (long + "ef")[-33:-2], "ef")[0]  # 32 are read, the last one is only looked for
    )


def test_a_rolling_score_counts_every_token_once(engine: Engine) -> None:
    scorer = Scorer(engine)
    assert scorer.rolling("abcdefg") == pytest.approx(expected(engine, ".", "abcdefg")[0])
    text = "abcdefgh" * 9  # 72 tokens; windows of 32 of them, the last one after as much as fits
    parts = [(".", text[:32]), ("." + text[:32], text[32:64]), (text[:64], text[64:])]
    total = sum(expected(engine, before[-(33 - len(part)) :], part)[0] for before, part in parts)
    assert scorer.rolling(text) == pytest.approx(total)


def test_answers_are_the_engines_and_end_before_a_stop(engine: Engine) -> None:
    scorer = Scorer(engine)
    whole = engine.generate("abc", max_new_tokens=9, do_sample=False).text
    stop = whole[4]
    found = scorer.generate(
        [
            ("abc", {"until": [stop, ""], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0}),
            ("abc", {"until": "no such text", "max_gen_toks": 9, "temperature": 0.7}),  # not told to sample
            ("abcd" * 12, {"max_gen_toks": 9}),
        ]
    )
    cut_off = engine.generate(("abcd" * 12)[-23:], max_new_tokens=9, do_sample=False).text
    assert found == [whole[: whole.index(stop)], whole, cut_off]
    assert scorer.generate([]) == []
    with pytest.raises(UserError, match=r"max_gen_toks=32: a text may reach 32 tokens"):
        scorer.generate([("a", {"max_gen_toks": 32})])


def test_the_harness_gets_its_own_kind_of_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class LM:
        """Stands in for lm_eval's."""

    module = ModuleType("lm_eval.api.model")
    module.LM = LM  # type: ignore[attr-defined]
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    model, scorer = harness_model(engine), Scorer(engine)
    assert isinstance(model, LM)

    def asked(*args: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(args=args)]

    assert model.loglikelihood(asked("abc", "de")) == [scorer.loglikelihood("abc", "de")]
    assert model.loglikelihood_rolling(asked("abcde")) == [scorer.rolling("abcde")]
    assert model.generate_until(asked("abc", {"max_gen_toks": 3})) == scorer.generate([("abc", {"max_gen_toks": 3})])


def test_without_the_harness_there_is_a_way_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.api.model"):  # the latter may be loaded
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"lm-evaluation-harness is not there \(.*\): pip install lm-eval"):
        harness_model(engine)
    with pytest.raises(UserError, match="has no tokenizer"):
        Scorer(Engine(tiny_trunk("llama")))
