"""The engine: what it loads, what it returns, what it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.errors import UserError
from medusa.heads import HeadsConfig, MedusaHeads
from medusa.infer import Completion, Engine
from medusa.infer.options import NEW_TOKENS
from medusa.testing import ScriptedDrafter, plain_greedy, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TREE = Topology.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint: a tiny trunk with the character tokenizer, root heads that were never trained, and a tree."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    tiny_trunk("llama").model.save_pretrained(path / "trunk")
    char_tokenizer(ALPHABET).save_pretrained(path / "trunk")
    heads = MedusaHeads(HeadsConfig("root", num=3), Trunk.load(path / "trunk"))
    save_heads(path, heads, str(path / "trunk"))
    save_tree(path, TREE)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder)


@pytest.fixture
def configured(engine: Engine) -> Any:
    """The trunk's generation_config, put back afterwards."""
    model = engine.trunk.model
    before, model.generation_config = model.generation_config, type(model.generation_config)()
    yield model.generation_config
    model.generation_config = before


def test_generates_what_the_trunk_alone_would(engine: Engine) -> None:
    out = engine.generate("ROMEO:", max_new_tokens=40)
    assert isinstance(out, Completion)
    ids = engine.trunk.tokenizer.encode("ROMEO:")  # type: ignore[union-attr]
    assert out.prompt_ids == ids
    assert out.token_ids == plain_greedy(engine.trunk, ids, 40)
    assert out.text == engine.trunk.tokenizer.decode(out.token_ids)  # type: ignore[union-attr]
    assert out.finish_reason == "length"
    assert out.seconds > 0


def test_counts_agree(engine: Engine) -> None:
    out = engine.generate("ROMEO:", max_new_tokens=40)
    assert sum(out.accepted) == out.steps
    assert out.tokens_per_step == 39 / out.steps > 1
    gained = sum(length * count for length, count in enumerate(out.accepted))
    assert 39 <= out.steps + gained <= 39 + TREE.depth  # the last step may have been cut


def test_baseline_is_the_same_text_in_more_steps(engine: Engine) -> None:
    tree, plain = (engine.generate("ROMEO:", max_new_tokens=40, baseline=flag) for flag in (False, True))
    assert plain.token_ids == tree.token_ids
    assert (plain.steps, plain.tokens_per_step, plain.accepted) == (39, 1.0, [39])
    assert tree.steps < plain.steps


def test_one_token_takes_no_step(engine: Engine) -> None:
    out = engine.generate("ROMEO:", max_new_tokens=1)
    assert (len(out.token_ids), out.steps, out.tokens_per_step, out.accepted) == (1, 0, 0.0, [])


def test_rows_of_a_batch_equal_their_solo_runs(engine: Engine) -> None:
    prompts = ["ROMEO:", "O", "What say you, my lord? I will not"]
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        batch = engine.generate(prompts, max_new_tokens=30, **options)
        solo = [engine.generate(prompt, max_new_tokens=30, **options) for prompt in prompts]
        assert [row.token_ids for row in batch] == [row.token_ids for row in solo]
        assert [(row.text, row.steps, row.accepted) for row in batch] == [
            (row.text, row.steps, row.accepted) for row in solo
        ]


def test_ids_and_texts_are_the_same_prompt(engine: Engine) -> None:
    encode = engine.trunk.tokenizer.encode  # type: ignore[union-attr]
    text = engine.generate("ROMEO:", max_new_tokens=9)
    assert engine.generate(encode("ROMEO:"), max_new_tokens=9).token_ids == text.token_ids
    assert engine.generate([encode("ROMEO:")], max_new_tokens=9)[0].token_ids == text.token_ids


@pytest.mark.parametrize("baseline", [False, True])
def test_stream_is_the_text(engine: Engine, baseline: bool) -> None:
    stream = engine.stream("ROMEO:", max_new_tokens=40, baseline=baseline)
    assert stream.completion is None
    pieces = list(stream)
    whole = engine.generate("ROMEO:", max_new_tokens=40, baseline=baseline)
    assert "".join(pieces) == whole.text
    assert all(pieces)
    assert stream.completion is not None
    assert stream.completion.token_ids == whole.token_ids
    assert stream.completion.text == whole.text
    assert len(pieces) == whole.steps + 1


def test_two_streams_at_once_do_not_meet(engine: Engine) -> None:
    prompts = ["ROMEO:", "What"]
    streams = [engine.stream(prompt, max_new_tokens=20) for prompt in prompts]
    texts = ["", ""]
    for _ in range(21):
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == [row.text for row in engine.generate(prompts, max_new_tokens=20)]


def test_threads_share_an_engine(engine: Engine) -> None:
    prompts = ["ROMEO:", "What", "O", "My lord"]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 4},
        {"stop_strings": ["e", "a"], "include_stop": False, "repetition_penalty": 1.3},
    ]
    tasks = [(prompt, options) for prompt in prompts for options in kinds]
    expected = [engine.generate(prompt, max_new_tokens=15, **options) for prompt, options in tasks]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        prompt, options = tasks[number]
        if number % 2:
            found[number] = engine.generate(prompt, max_new_tokens=15, **options)
            return
        stream = engine.stream(prompt, max_new_tokens=15, **options)
        text = "".join(stream)
        found[number] = stream.completion
        assert stream.completion is not None and stream.completion.text == text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, row in enumerate(expected):
        assert (found[number].text, found[number].token_ids, found[number].stop) == (row.text, row.token_ids, row.stop)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_stops_at_eos_inside_a_run(limit: int) -> None:
    trunk = tiny_trunk("gpt2")
    expected = plain_greedy(trunk, [5, 6, 7], 20)
    eos = expected[limit - 1]
    end = expected.index(eos) + 1
    engine = Engine(trunk, ScriptedDrafter([expected], honesty=1.0))
    out = engine.generate([5, 6, 7], max_new_tokens=20, eos_token_id=[eos])
    assert (out.token_ids, out.finish_reason) == (expected[:end], "eos")
    assert engine.generate([5, 6, 7], max_new_tokens=20, eos_token_id=eos).token_ids == expected[:end]


def test_special_tokens_are_no_text_and_half_characters_are_held() -> None:
    tokenizer = train_bpe(["x"], 257)
    trunk = tiny_trunk("llama", vocab_size=257)
    trunk.tokenizer = tokenizer
    script = [*tokenizer.encode("é你"), tokenizer.eos_token_id]
    _say(trunk, script)
    engine = Engine(trunk)
    prompt = tokenizer.encode("x")
    out = engine.generate(prompt, max_new_tokens=20, eos_token_id=tokenizer.eos_token_id)
    assert (out.text, out.token_ids, out.finish_reason) == ("é你", script, "eos")
    stream = engine.stream(prompt, max_new_tokens=20, eos_token_id=tokenizer.eos_token_id)
    assert list(stream) == ["é", "你"]
    assert engine.generate("", max_new_tokens=2).prompt_ids == [tokenizer.bos_token_id]


def test_a_character_cut_by_the_limit_is_told_at_the_end() -> None:
    tokenizer = train_bpe(["x"], 257)
    trunk = tiny_trunk("llama", vocab_size=257)
    trunk.tokenizer = tokenizer
    script = tokenizer.encode("é你")[:4]
    _say(trunk, script)
    engine = Engine(trunk)
    assert engine.generate(tokenizer.encode("x"), max_new_tokens=4).text == "é\ufffd" == tokenizer.decode(script)
    assert list(engine.stream(tokenizer.encode("x"), max_new_tokens=4)) == ["é", "\ufffd"]


def _say(trunk: Trunk, script: list[int]) -> None:
    """Make the trunk say ``script`` after a prompt of one token, whatever it reads."""
    head = trunk.model.get_output_embeddings()

    def answer(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        spoken = getattr(answer, "spoken", 0)
        answer.spoken = spoken + 1  # type: ignore[attr-defined]
        forced = torch.zeros_like(output)
        forced[..., script[spoken % len(script)]] = 1
        return forced

    head.register_forward_hook(answer)


def test_options_left_out_come_from_the_generation_config(engine: Engine, configured: Any) -> None:
    assert len(engine.generate("O", max_new_tokens=None).token_ids) == min(NEW_TOKENS, 127)  # the context is 128
    configured.max_length = 11
    assert len(engine.generate("O").token_ids) == 10
    configured.max_new_tokens = 7
    assert len(engine.generate("O").token_ids) == 7
    assert len(engine.generate("O", max_new_tokens=3).token_ids) == 3
    assert len(engine.generate("O", max_length=5).token_ids) == 4
    greedy = engine.generate("O")
    configured.temperature = 5.0
    assert engine.generate("O").token_ids == greedy.token_ids  # do_sample is not set
    configured.do_sample = True
    sampled = engine.generate("O", seed=1)
    assert sampled.token_ids == engine.generate("O", temperature=5.0, top_k=50, seed=1).token_ids != greedy.token_ids
    assert engine.generate("O", temperature=0).token_ids == greedy.token_ids
    configured.do_sample = False
    configured.eos_token_id = greedy.token_ids[2]
    assert engine.generate("O").finish_reason == "eos"
    assert engine.generate("O", eos_token_id=[]).token_ids == greedy.token_ids


def test_seeds_choose_the_text(engine: Engine) -> None:
    texts = [engine.generate("ROMEO:", max_new_tokens=20, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_every_row_draws_its_own_and_names_it(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0}
    rows = [*engine.generate(["ROMEO:"] * 3, **options), engine.generate("ROMEO:", **options)]
    seeds = [row.seed for row in rows]
    assert len(set(seeds)) == 4 and all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)
    assert len({row.text for row in rows}) == 4
    for row in rows:  # the seed that was drawn gives the row again
        assert engine.generate("ROMEO:", seed=row.seed, **options).token_ids == row.token_ids


def test_a_given_seed_is_every_row_s(engine: Engine) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 7}
    first, second, other = engine.generate(["ROMEO:", "ROMEO:", "What"], **options)
    assert (first.seed, second.seed, other.seed) == (7, 7, 7)
    assert first.token_ids == second.token_ids == engine.generate("ROMEO:", **options).token_ids
    assert other.token_ids == engine.generate("What", **options).token_ids


def test_a_greedy_row_has_no_seed(engine: Engine) -> None:
    assert engine.generate("O", max_new_tokens=2).seed is None
    assert engine.generate("O", max_new_tokens=2, seed=3).seed is None
    stream = engine.stream("O", max_new_tokens=2, temperature=1.0)
    list(stream)
    assert stream.completion is not None and stream.completion.seed is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5}, r"unknown option 'max_tokens' \(did you mean max_new_tokens\?\)"),
        ({"temprature": 1.0}, r"did you mean temperature\?"),
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5': give a whole number"),
        ({"max_new_tokens": 2, "max_length": 20}, "give one of the two"),
        ({"max_length": 6}, "the prompt has 6 tokens and max_length is 6"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "give a number"),
        ({"top_p": 0.5}, "no effect on greedy decoding"),
        ({"temperature": 1, "top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"eos_token_id": 65}, r"ids in 0\.\.64"),
        ({"eos_token_id": ["x"]}, r"ids in 0\.\.64"),
        ({"baseline": 1}, "give True or False"),
    ],
)
def test_refuses_options(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        engine.generate("ROMEO:", **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        engine.stream("ROMEO:", **options)  # at the call, before any piece is asked for


def test_what_does_nothing_is_let_pass(engine: Engine) -> None:
    expected = engine.generate("O", max_new_tokens=5).token_ids
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "stop_strings": None, "bad_words_ids": []}
    assert engine.generate("O", max_new_tokens=5, temperature=0, top_p=0.5, **neutral).token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no BOS"),
        ([], "not empty"),
        ([[]], "no BOS"),
        (["O", ""], "prompt 1 is empty"),
        (["O", [1]], "texts alone or lists of token ids alone"),
        ([1, "O"], "texts alone"),
        (7, "give a text"),
        (None, "give a text"),
        ([[True]], "texts alone"),
        ([[1, -1]], "prompt 0 has token id -1: ids lie in"),
        ("100%", r"character '1' \(U\+0031\) at offset 0"),
        ([[1, 65]], "token id 65"),
        (["O" * 128], "may reach 128"),
    ],
)
def test_refuses_prompts(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        engine.generate(prompt, max_new_tokens=5)
    assert "\n" not in str(caught.value)


def test_without_a_tokenizer_there_are_ids_alone() -> None:
    engine = Engine(tiny_trunk("llama"))
    out = engine.generate([1, 2, 3], max_new_tokens=4)
    assert (len(out.token_ids), out.text) == (4, "")
    for call in (engine.generate, engine.stream):
        with pytest.raises(UserError, match="no tokenizer"):
            call("O")


def test_loads_a_trunk_alone_when_asked(folder: Path, engine: Engine) -> None:
    expected = engine.generate("ROMEO:", max_new_tokens=10).token_ids
    for source in (folder, folder / "trunk"):
        plain = Engine.load(source, drafter="none", check=False)
        out = plain.generate("ROMEO:", max_new_tokens=10)
        assert (out.token_ids, out.steps) == (expected, 9)


@pytest.mark.parametrize("name", ["prompt-lookup", "lookahead", "cut:1", "draft:"])
def test_loads_drafters_that_need_no_heads(folder: Path, engine: Engine, name: str) -> None:
    name = f"draft:{folder / 'trunk'}" if name == "draft:" else name
    prompts = ["ROMEO:", "O", "What say you, my lord? I will not say you, my"]
    expected = engine.generate(prompts, max_new_tokens=20)
    for source in (folder, folder / "trunk"):
        other = Engine.load(source, drafter=name, check=False)
        found = other.generate(prompts, max_new_tokens=20)
        assert [row.token_ids for row in found] == [row.token_ids for row in expected]
        assert sum(row.steps for row in found) < 3 * 19  # one token per step would be plain decoding
        drawn, plain = (
            each.generate("ROMEO:", max_new_tokens=20, temperature=1.0, seed=4, baseline=each is engine)
            for each in (other, engine)
        )
        if name in ("prompt-lookup", "lookahead"):  # guesses that are not drawn: the very tokens of plain decoding
            assert drawn.token_ids == plain.token_ids
        else:  # a draft model takes what is said of drafts
            assert other.generate("ROMEO:", max_new_tokens=9, temperature=1.0, drafting="mixed", draft_temperature=1.3)


def test_what_the_trunk_takes_is_handed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    load = Trunk.load

    def spy(*args: Any, **options: Any) -> Trunk:
        asked.append(options)
        return load(*args, **{name: value for name, value in options.items() if name != "adapter"})

    monkeypatch.setattr(Trunk, "load", spy)
    more: dict[str, Any] = {"attn_implementation": "eager", "adapter": "some/adapter"}
    for source, drafter in ((folder, "auto"), (folder / "trunk", "none")):
        engine = Engine.load(source, drafter=drafter, check=False, max_rows=3, **more)
        assert engine.trunk.model.config._attn_implementation == "eager"
        assert engine.max_rows == 3
    assert [{name: options[name] for name in more} for options in asked] == [more, more]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_no_more_rows_at_once_than_allowed(engine: Engine, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["ROMEO:", "O", "What say you, my lord? I will not", "so", "Thus", "And then"]
    limits = [{"max_new_tokens": count} for count in (9, 2, 20, 1, 13, 4)]
    few = Engine(engine.trunk, engine.drafter, max_rows=rows)
    sizes: list[int] = []
    forward = engine.trunk.forward

    def spy(ids_BT: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(len(ids_BT))
        return forward(ids_BT, *args, **options)

    monkeypatch.setattr(engine.trunk, "forward", spy)
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 3}
    for options in ({}, drawn):
        found = few.generate(prompts, each=limits, **options)
        alone = [engine.generate(prompt, **each, **options) for prompt, each in zip(prompts, limits, strict=True)]
        assert [row.token_ids for row in found] == [row.token_ids for row in alone]
        assert [row.steps for row in found] == [row.steps for row in alone]
    assert max(sizes) == rows


@pytest.mark.parametrize("rows", [0, -1, True, 2.5, "3"])
def test_refuses_numbers_of_rows(engine: Engine, rows: Any) -> None:
    with pytest.raises(UserError, match="max_rows="):
        Engine(engine.trunk, max_rows=rows)


def test_loads_in_another_dtype(folder: Path) -> None:
    assert Engine.load(folder, dtype="float32", check=False).trunk.dtype == torch.float32


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        (
            "tiny/trunk",
            {},
            r"no medusa\.json, so no heads: .* `medusa generate --baseline`, in Python .* drafter='none'",
        ),
        ("tinny", {}, r"no folder .*tinny here \(did you mean tiny\?\)"),
        ("tiny", {"drafter": "non"}, r"drafter='non' \(did you mean none\?\): choose from auto, none, draft:FOLDER,"),
        ("tiny/trunk", {"drafter": "lookahed"}, r"drafter='lookahed' \(did you mean lookahead\?\)"),
        ("tiny/trunk", {"drafter": "cut"}, r"drafter='cut': give it as cut:LAYERS"),
        ("tiny/trunk", {"drafter": "cut:9"}, r"a cut of 9 layers: the trunk has 2, give 1 to 1"),
        ("tiny/trunk", {"drafter": "draft:./nowhere"}, r"no trunk at ./nowhere"),
        ("tiny", {"dtype": "float7"}, "dtype='float7'"),
        ("tiny", {"device": "nowhere"}, "device='nowhere'"),
    ],
)
def test_refuses_to_load(folder: Path, part: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Engine.load(folder.parent / part, **options)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_neither_folder_nor_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("nobody/nothing", "runs/x", "runs/x/y"):
        with pytest.raises(UserError) as caught:
            Engine.load(name)
        message = str(caught.value)
        assert message.startswith(f"no folder {name} here (make it with `medusa train`), and not from the hub: ")
        assert "\n" not in message and len(message) < 300
    assert "form 'repo_name' or 'namespace/repo_name'" in message  # the hub's own reason


def test_the_device_is_a_gpu_where_there_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    load = Trunk.load
    monkeypatch.setattr(
        Trunk, "load", lambda *args, **options: asked.append(options["device"]) or load(*args, **options)
    )
    Engine.load(folder, check=False)
    Engine.load(folder, check=False, device="cpu")
    Engine.load(folder / "trunk", check=False, drafter="none")
    assert asked == ["auto", "cpu", "auto"]


def test_loads_an_engine_or_a_trunk_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fetched = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append((name, revision, allow_patterns))
        return str(folder if name == "some/engine" else folder.parent)  # there is no medusa.json in the latter

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    engine = Engine.load("some/engine", revision="v1", check=False)
    assert engine.drafter.name == "root"
    ((name, revision, patterns),) = fetched
    assert (name, revision) == ("some/engine", "v1")
    assert {"medusa.json", "heads.safetensors", "tree.json", "trunk/*"} <= set(patterns)
    assert "*.safetensors" not in patterns  # a plain trunk of many gigabytes is not fetched to be refused
    with pytest.raises(UserError, match=r"some/trunk has no medusa\.json"):
        Engine.load("some/trunk")
    loaded = []
    monkeypatch.setattr(Trunk, "load", lambda name, **options: loaded.append((name, options["revision"])))
    Engine.load("some/trunk", drafter="none", revision="v2", compile=False)
    assert loaded == [("some/trunk", "v2")]


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = "import sys, medusa.infer.cli; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert done.stdout.strip() == "[]"
