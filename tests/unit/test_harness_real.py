"""The engine in the real lm-evaluation-harness, where that is installed: scores are those of its own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa.cut import cut
from medusa.data.tokenizers import char_tokenizer
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.infer.engine import Engine
from medusa.infer.harness import harness_model
from medusa.testing import tiny_trunk
from medusa.trunk import Trunk

lm_eval = pytest.importorskip("lm_eval", reason="pip install lm-eval")

TEXT = "abcdefgh ."
ITEMS = [
    {"question": "abc", "choices": [" de", " gh"], "answer": 0, "text": "abcdefgh abc. "},
    {"question": "hgf a", "choices": [" b", " c"], "answer": 1, "text": "aabbccdd. abab" * 4},
    {"question": "ab ab", "choices": [" abab", " ."], "answer": 1, "text": "h g f e d c b a"},
    {"question": "a.b.c" * 9, "choices": [" d", ".d"], "answer": 1, "text": "...." * 20},  # longer than the context
]
TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "continue": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: byte_perplexity}
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tasks over lines of a local file."""
    from lm_eval.tasks import TaskManager

    folder: Path = tmp_path_factory.mktemp("tasks")
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS), encoding="utf-8")
    for name, about in TASKS.items():
        where = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {folder / 'items.jsonl'}}}\ntest_split: test"
        )
        (folder / f"{name}.yaml").write_text(f"task: medusa_{name}\n{where}{about}", encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    tokenizer = char_tokenizer(TEXT)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = "."
    return Trunk(tiny_trunk("llama", vocab_size=len(TEXT), seed=6, max_position_embeddings=32).model, tokenizer)


def evaluated(model: Any, tasks: Any) -> tuple[dict[str, Any], list[Any]]:
    """Scores by task and metric, and each item's answers."""
    names = [f"medusa_{name}" for name in TASKS]
    found = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True)
    scores = {
        f"{name} {metric}": value
        for name in names
        for metric, value in found["results"][name].items()
        if isinstance(value, (int, float)) and "stderr" not in metric
    }
    return scores, [sample["filtered_resps"] for name in names for sample in found["samples"][name]]


def leaves(answers: Any) -> list[Any]:
    """Texts, numbers and truth values of nested answers, in order."""
    if isinstance(answers, (list, tuple)):
        return [leaf for each in answers for leaf in leaves(each)]
    return [answers]


def test_scores_are_those_of_the_librarys_own_model_with_drafts_and_without(trunk: Trunk, tasks: Any) -> None:
    from lm_eval.models.huggingface import HFLM

    own = HFLM(pretrained=trunk.model, tokenizer=trunk.tokenizer, backend="causal", add_bos_token=False, device="cpu")
    expected, answers = evaluated(own, tasks)
    for engine in (Engine(trunk), Engine(trunk, DraftModelDrafter(cut(trunk, 1)))):
        scores, given = evaluated(harness_model(engine), tasks)
        assert scores == pytest.approx(expected, rel=1e-6)
        assert [type(each) for each in leaves(given)] == [type(each) for each in leaves(answers)]
        for mine, other in zip(leaves(given), leaves(answers), strict=True):
            assert mine == (pytest.approx(other, rel=1e-5) if isinstance(other, float) else other)
    drafted = engine.generate("abc", max_new_tokens=12, do_sample=False)
    assert drafted.tokens_per_step > 1 and any(isinstance(each, str) and each for each in leaves(answers))
