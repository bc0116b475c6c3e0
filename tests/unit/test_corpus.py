"""Corpora: texts arrive byte for byte, splits and seams lie where they must, bad input is one line."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict

from medusa.data import cli, tinyshakespeare
from medusa.data.corpus import DataConfig, RandomBlocks, cut_at, flatten, load_texts, pack, tokenise
from medusa.data.tokenizers import char_tokenizer, train_bpe
from medusa.errors import UserError

AWKWARD = "\ufeffFirst line\r\n\n  two\x0b\x0c\u2028é\t end \r\n"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder that must stay empty, a cache of its own, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def config(path: Path, **options: object) -> DataConfig:
    return DataConfig(source=str(path), **options)  # type: ignore[arg-type]


def test_one_document_is_split_by_characters_and_kept_exactly(tmp_path: Path) -> None:
    text = AWKWARD * 10
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    train, heldout = load_texts(config(path))
    assert (len(train), len(heldout)) == (1, 1)
    assert train[0]["text"] + heldout[0]["text"] == text
    assert len(train[0]["text"]) == int(len(text) * 0.9)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "folder of splits"])
def test_many_rows_are_split_by_rows(kind: str, tmp_path: Path) -> None:
    texts = [f"{row} {AWKWARD}" for row in range(20)]
    rows = [{"id": row, "text": text} for row, text in enumerate(texts)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        lines(path, *rows)
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "folder":
        Dataset.from_list(rows).save_to_disk(path)
    else:
        DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])).save_to_disk(path)
    before = sorted(path.rglob("*"))
    train, heldout = load_texts(config(path, heldout=0.25))
    assert list(train["text"]) + list(heldout["text"]) == texts
    assert (len(train), len(heldout)) == (15, 5)
    assert train.column_names == ["text"]
    tokenise(train, char_tokenizer("".join(texts)))
    assert sorted(path.rglob("*")) == before, "something was left in the user's data folder"
    assert os.listdir() == [], "something was left in the working folder"


def test_another_field_and_a_part_of_a_split(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"body": str(row)} for row in range(10)))
    train, heldout = load_texts(config(path, text_field="body", split="train[:4]", heldout=0.5))
    assert (list(train["text"]), list(heldout["text"])) == (["0", "1"], ["2", "3"])


def test_a_single_row_is_one_document(tmp_path: Path) -> None:
    train, heldout = load_texts(config(lines(tmp_path / "a.jsonl", {"text": "0123456789"})))
    assert (train[0]["text"], heldout[0]["text"]) == ("012345678", "9")


def test_tinyshakespeare_comes_from_its_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    asked = []
    monkeypatch.setattr(tinyshakespeare, "obtain", lambda **options: asked.append(options) or path)
    train, _ = load_texts(DataConfig(path="~/my.txt"))
    assert train[0]["text"] == "012345678"
    assert asked == [{"path": Path("~/my.txt").expanduser(), "report": None}]


@pytest.mark.parametrize(
    ("length", "heldout", "cut"),
    [(1_115_394, 0.1, 1_003_854), (10, 0.8, 2), (10, 0.3, 7), (2, 0.01, 1), (2, 0.99, 1), (3, 0.5, 1)],
)
def test_cut_at(length: int, heldout: float, cut: int) -> None:
    assert cut_at(length, heldout) == cut


BAD_FILES = {
    "empty.txt": (b"", "empty.txt is empty"),
    "latin.txt": (b"abc\xe9def", r"latin.txt is not UTF-8 \(byte 0xe9 at offset 3\)"),
    "latin.jsonl": (b'{"text": "abc"}\n{"text": "\xe9 d"}\n', r"not UTF-8 \(byte 0xe9 at offset 26\)"),
    "short.txt": (b"a", "1 characters, too few to split"),
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "blank.jsonl": (b"\n\n", "can't load"),
    "broken.jsonl": (b'{"text": "abc"\n{"text": "d"}\n', "can't load .*JSON parse error"),
    "field.jsonl": (b'{"txt": "abc", "id": 1}\n', r"no field 'text' \(did you mean txt\?\), but txt, id"),
    "kind.jsonl": (b'{"text": 3}\n{"text": 4}\n', "field 'text' .* holds int64, not text"),
    "list.jsonl": (b'{"text": ["a"]}\n', "field 'text' .* holds list, not text"),
    "hole.jsonl": (b'{"text": "a"}\n{"id": 1}\n', "row 1 .* has no field 'text'"),
    "broken.parquet": (b"PAR1", "can't load"),
    "a.docx": (b"PK", "a.docx has an unknown ending: rename it to one of .txt"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_line(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_texts(config(tmp_path / name))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", ""), "datasets' own log or bars came through"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/a.txt", "a.txt can't be read .No such file"),
        ("a.jsonl", "a.jsonl does not exist"),
        ("/nowhere/at/all", "no file, folder or data set"),
        ("tinyshakespear", r"no file, folder or data set \(did you mean tinyshakespeare\?\)"),
        ("someone/nothing", "can't load 'someone/nothing'"),
        (".", "was not saved by datasets"),
    ],
)
def test_unknown_source(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_texts(DataConfig(source=source))


def test_unknown_split(tmp_path: Path) -> None:
    DatasetDict(train=Dataset.from_dict({"text": ["a", "b"]})).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match=r"no split 'trian' \(did you mean train\?\): it has train"):
        load_texts(config(tmp_path / "set", split="trian"))
    with pytest.raises(UserError, match="Unknown split"):
        load_texts(config(lines(tmp_path / "a.jsonl", {"text": "ab"}), split="test"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout": 0.0}, "data.heldout=0.0: it is a share"),
        ({"heldout": 1.0}, "data.heldout=1.0: it is a share"),
        ({"block": 1}, "data.block=1 leaves"),
        ({"source": "a.txt", "path": "b.txt"}, "data.path='b.txt' is for tinyshakespeare"),
    ],
)
def test_bad_config(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**options)  # type: ignore[arg-type]


def test_config_fields_are_documented_options() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(DataConfig, "data")
    assert "tokens in a training row." in parser.format_help()
    assert parser.parse_args(["--data.block=64", "--data.source=a.txt"]).data.block == 64


def test_tokenise_ends_each_document_once() -> None:
    tokenizer = train_bpe(["aaaa"], 257)
    a, end = tokenizer.encode("a")[0], tokenizer.eos_token_id
    dataset = Dataset.from_dict({"text": ["aa", "", "a<|endoftext|>"]})
    assert [ids.tolist() for ids in tokenise(dataset, tokenizer, eos=True)] == [[a, a, end], [end], [a, end]]
    assert [ids.tolist() for ids in tokenise(dataset, tokenizer, eos=False)] == [[a, a], [], [a, end]]


def test_tokenise_without_an_eos_token() -> None:
    documents = tokenise(Dataset.from_dict({"text": ["ab", "b"]}), char_tokenizer("ab"), eos=True)
    assert [ids.tolist() for ids in documents] == [[0, 1], [1]]
    assert documents[0].dtype == torch.int64


def test_tokenise_names_the_unknown_character() -> None:
    with pytest.raises(UserError, match=r"'c'.*offset 1"):
        tokenise(Dataset.from_dict({"text": ["ab", "bca"]}), char_tokenizer("ab"))


def documents_of(*lengths: int) -> list[torch.Tensor]:
    """Documents whose tokens count up: every token names its place in the stream."""
    return list(torch.arange(sum(lengths)).split(list(lengths)))


def test_pack_cuts_consecutive_rows_and_marks_seams() -> None:
    rows = pack(documents_of(3, 0, 6, 2), block=5)
    assert rows["input_ids"][:].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert rows["segments"][:].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert rows[0]["input_ids"].dtype == rows[0]["segments"].dtype == torch.int64


def test_pack_with_a_stride_overlaps() -> None:
    assert pack(documents_of(7), block=4, stride=3)["input_ids"][:].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]


@pytest.mark.parametrize("documents", [[], documents_of(3, 1)])
def test_too_short_for_a_block(documents: list[torch.Tensor]) -> None:
    with pytest.raises(UserError, match=f"has {sum(map(len, documents))} tokens, a block 5"):
        pack(documents, block=5)
    with pytest.raises(UserError, match="a block 5"):
        RandomBlocks(*flatten(documents), block=5, samples=1, seed=0)
    assert len(pack(documents_of(5), block=5)) == 1


def test_random_blocks_are_windows_with_their_seams() -> None:
    documents = documents_of(4, 7, 0, 9)
    tokens_T, segments_T = flatten(documents)
    blocks = RandomBlocks(tokens_T, segments_T, block=6, samples=50, seed=1)
    assert len(blocks) == len(list(blocks)) == 50
    for item in blocks:
        start = int(item["input_ids"][0])
        assert item["input_ids"].tolist() == list(range(start, start + 6))
        seams = [place - start for place in (4, 11) if start < place < start + 6]
        assert item["segments"].tolist() == [sum(place >= seam for seam in seams) for place in range(6)]


def test_random_blocks_depend_on_seed_and_index_alone() -> None:
    stream = flatten(documents_of(1000))
    short, long = (RandomBlocks(*stream, block=8, samples=samples, seed=3) for samples in (20, 40))
    order = random.Random(0).sample(range(20), 20)
    assert {index: short.offset(index) for index in order} == {index: long.offset(index) for index in range(20)}
    other = RandomBlocks(*stream, block=8, samples=20, seed=4)
    assert [other.offset(index) for index in range(20)] != [short.offset(index) for index in range(20)]
    assert [other.offset(index) for index in range(19)] != [short.offset(index) for index in range(1, 20)]


def test_random_blocks_reach_every_start_evenly() -> None:
    blocks = RandomBlocks(*flatten(documents_of(13)), block=4, samples=10_000, seed=0)
    counts = Counter(blocks.offset(index) for index in range(len(blocks)))
    assert sorted(counts) == list(range(10))
    assert max(abs(count - 1000) for count in counts.values()) < 150  # five standard deviations


def test_random_blocks_never_change() -> None:
    # A run resumed under another release must see the windows it would have seen.
    blocks = RandomBlocks(*flatten(documents_of(1_000_000)), block=1, samples=3, seed=7)
    assert [blocks.offset(index) for index in range(3)] == [246273, 301439, 320512]


@pytest.fixture
def fake_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fetched.txt"
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(tinyshakespeare, "obtain", lambda **_: path)
    return path


def test_command_prints_what_it_got(fake_corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("data", ["tinyshakespeare"]) == 0
    out = capsys.readouterr().out
    for part in (str(fake_corpus), "10 bytes", "84d89877f0d4", "9 characters", "1 characters"):
        assert part in out


def test_command_copies_as_a_whole(fake_corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert cli.run("data", ["tinyshakespeare", "--out", str(out / "a.txt")]) == 0
    assert (out / "a.txt").read_bytes() == fake_corpus.read_bytes()
    with pytest.raises(UserError, match="can't write"):
        cli.run("data", ["tinyshakespeare", "--out", str(tmp_path / "nowhere" / "a.txt")])
    with pytest.raises(UserError, match="can't write"):
        cli.run("data", ["tinyshakespeare", "--out", str(out)])
    assert [path.name for path in out.iterdir()] == ["a.txt"]
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tinyshakespear"], r"no data set 'tinyshakespear' \(did you mean tinyshakespeare\?\)"),
        ([], "medusa data: name is missing: give the corpus: tinyshakespeare"),
        (["tinyshakespeare", "--ouut", "x"], r"medusa data: unknown option 'ouut' \(did you mean out\?\)"),
        (["tinyshakespeare", "--sourc", "x"], r"unknown option 'sourc' \(did you mean sources\?\)"),  # no abbreviations
        (["tinyshakespeare", "--sources", "web,cach"], r"'cach'.*did you mean cache\?"),
    ],
)
def test_command_refuses(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        cli.run("data", argv)
    assert "\n" not in str(error.value)
