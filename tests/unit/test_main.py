"""The command `medusa`: what it lists, refuses and returns. Subcommands are stood in for by a small module."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from medusa import __main__ as cli
from medusa import __version__
from medusa.errors import UserError

Run = Callable[[str, list[str]], int]
Stand = Callable[[Run], None]


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Return a function that puts ``run`` in the place of the module behind ``medusa train``."""

    def put(run: Run) -> None:
        module = types.ModuleType("stand_in")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "stand_in", module)
        monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("stand_in", ""))

    return put


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"medusa {__version__}\n"


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("medusa: error: unknown command 'trian' (did you mean train?)") and err.count("\n") == 1


def test_hands_over_name_arguments_and_exit_code(stand: Stand) -> None:
    seen = []
    stand(lambda command, argv: seen.append((command, argv)) or 7)  # type: ignore[func-returns-value]
    assert cli.main(["train", "recipe", "--help"]) == 7
    assert seen == [("train", ["recipe", "--help"])]


def _raiser(error: BaseException) -> Run:
    def run(command: str, argv: list[str]) -> int:
        raise error

    return run


def test_user_error_is_one_line_and_code_2(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand(_raiser(UserError("bad\nvalue")))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr() == ("", "medusa: error: bad value\n")


def test_interrupt_is_code_130(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand(_raiser(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "medusa: interrupted\n"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'wandb.sdk'", name="wandb.sdk"),
        ImportError("Using `wandb` callbacks requires the package: `pip install wandb`"),
    ],
)
def test_missing_package_names_the_extra(
    error: ImportError, stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    stand(_raiser(error))
    assert cli.main(["train"]) == 2
    line = "medusa: error: this needs the package 'wandb': pip install 'medusa-decoding[train]'\n"
    assert capsys.readouterr().err == line


def test_faults_of_our_own_keep_their_traceback(stand: Stand) -> None:
    stand(_raiser(ModuleNotFoundError("No module named 'medusa.nowhere'", name="medusa.nowhere")))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        cli.main(["train"])


def test_closed_pipe_is_quiet() -> None:
    code = (
        "import sys, types, medusa.__main__ as m\n"
        "stand_in = sys.modules['stand_in'] = types.ModuleType('stand_in')\n"
        "stand_in.run = lambda command, argv: print('x' * 1_000_000) or 0\n"
        "m.COMMANDS['train'] = m.Command('stand_in', '')\n"
        "sys.exit(m.main(['train']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == cli.PIPE_CLOSED


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, medusa.__main__ as m\n"
        "m.main([])\n"
        "print([name for name in ('torch', 'transformers', 'jsonargparse', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
