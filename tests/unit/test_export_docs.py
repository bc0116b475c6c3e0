"""The commands of docs/formats.md run, and it names every format."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.eagle import EagleConfig, EagleLayer
from medusa.eagle_files import PLACE, save_eagle
from medusa.heads import HeadsConfig
from medusa.infer.export.write import FORMATS
from medusa.testing import random_heads, tiny_model
from medusa.tree import Topology
from medusa.trunk import Trunk

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
COMMANDS = [line for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs that the page exports, as the recipes of these names make them, but for their training."""
    tiny_model("llama", dtype=torch.float32, num_hidden_layers=4).save_pretrained(tmp_path / "trunk")
    char_tokenizer(ALPHABET).save_pretrained(tmp_path / "trunk")
    trunk = Trunk.load(tmp_path / "trunk", check=False)
    heads = tmp_path / "runs" / "tinyshakespeare-medusa"
    save_heads(heads, random_heads(trunk, HeadsConfig("medusa", 3)), str(tmp_path / "trunk"))
    save_tree(heads, Topology.full([2, 2]))
    layer = EagleLayer(EagleConfig(3, None, (1, 2, 3)), trunk)
    save_eagle(tmp_path / "runs" / "tinyshakespeare-eagle3" / PLACE, layer, str(tmp_path / "trunk"))
    monkeypatch.chdir(tmp_path)


def test_commands_run(runs: None) -> None:
    assert len(COMMANDS) >= 4
    for command in COMMANDS:
        name, *rest = shlex.split(command)[1:]
        if name == "push":  # to the hub; tests/unit/test_push.py does that with a small one
            with pytest.raises(SystemExit, match="0"):
                main([name, "--help"])
            assert Path(rest[0]).is_dir()
        else:
            assert main([name, *rest]) == 0, command


def test_every_format_is_described() -> None:
    assert all(f"| `{name}` |" in PAGE for name in FORMATS)
