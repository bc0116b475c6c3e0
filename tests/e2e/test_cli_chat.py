"""``medusa chat`` on tiny folders, through the command's own entrance: one question, pipes, a terminal, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa.__main__ import main
from medusa.checkpoint import save_heads, save_tree
from medusa.data.tokenizers import char_tokenizer
from medusa.heads import HeadsConfig
from medusa.infer import Engine
from medusa.infer.chat import Conversation
from medusa.infer.chat_cli import ASK, COMMANDS
from medusa.testing import memorising_heads, plain_greedy, tiny_trunk
from medusa.tree import Topology
from medusa.trunk import Trunk

ALPHABET = "\n !$&',-./3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ':' + message['content'] + eos_token }}{% endfor %}"
    "{% if shout %}{{ 'LOUD' }}{% endif %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with heads; its folder ``trunk`` is a trunk without any."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = TEMPLATE
    model = tiny_trunk("llama", vocab_size=len(tokenizer), max_position_embeddings=300).model
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.eos_token_id] = 0.0  # answers go on to their limit
    model.save_pretrained(folder / "trunk")
    tokenizer.save_pretrained(folder / "trunk")
    trunk = Trunk.load(folder / "trunk")
    prompts = [tokenizer.encode(f"<s>user:{turn}</s>assistant:") for turn in ("Ay", "What say you?")]
    known = [prompt + plain_greedy(trunk, prompt, 12) for prompt in prompts]
    save_heads(folder, memorising_heads(trunk, HeadsConfig("medusa", num=2), known), str(folder / "trunk"))
    save_tree(folder, Topology.from_paths([[0], [1], [0, 0]]))
    return folder


@pytest.fixture
def medusa(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with these lines on stdin; return exit code, stdout and stderr."""

    def chat(*argv: object, stdin: str = "") -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["chat", *map(str, argv)])
        out, err = capfd.readouterr()
        return code, out, err

    return chat


class Terminal(io.StringIO):
    """An output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command at a terminal where these lines are typed; an exception is a key such as Ctrl-C."""

    def chat(*argv: object, keys: Sequence[str | type[BaseException]], piped: bool = False) -> tuple[int, str, str]:
        typed, out, err = iter(keys), io.StringIO() if piped else Terminal(), Terminal()

        def ask(prompt: str = "") -> str:
            out.write(prompt)
            key = next(typed, EOFError)
            if isinstance(key, str):
                return key
            raise key

        with monkeypatch.context() as patch:
            patch.setattr("builtins.input", ask)
            patch.setattr(sys, "stdin", Terminal())
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = main(["chat", *map(str, argv)])
        return code, out.getvalue(), err.getvalue()

    return chat


def answers(source: Path, *turns: str, **options: Any) -> list[str]:
    conversation = Conversation(Engine.load(source), max_new_tokens=options.pop("max_new_tokens", 12), **options)
    return [conversation.say(turn).text for turn in turns]


# One question.


def test_one_question_one_answer_and_one_line_of_figures(run: Path, medusa: Run) -> None:
    (expected,) = answers(run, "What say you?")
    code, out, err = medusa(run, "--message", "What say you?", "--max-new-tokens", 12)
    assert (code, out) == (0, f"{expected}\n")
    (line,) = err.splitlines()
    assert line.startswith("12 tokens in ") and "tokens/s)" in line and "tokens per step" in line
    assert "30 of 30 prompt tokens read, cut at the limit (--max-new-tokens)" in line and "\x1b" not in line


def test_a_trunk_without_heads_decodes_without_drafts_and_says_so(run: Path, medusa: Run) -> None:
    (expected,) = answers(run, "Ay")
    code, out, err = medusa(run / "trunk", "--message", "Ay", "--max-new-tokens", 12)
    assert (code, out) == (0, f"{expected}\n")
    assert err.count("no heads in") == 1 and str(run / "trunk") in err and "1.00 tokens per step" in err
    _, out, err = medusa(run, "--message", "Ay", "--max-new-tokens", 12, "--baseline")
    assert out == f"{expected}\n" and "no heads" not in err and "1.00 tokens per step" in err
    assert "no heads" not in medusa(run / "trunk", "--message", "Ay", "--max-new-tokens", 1, "--baseline")[2]
    _, _, err = medusa(run, "--message", "Ay", "--max-new-tokens", 12)
    assert "no heads" not in err and "1.00 tokens per step" not in err


def test_json_holds_messages_and_completion(run: Path, medusa: Run) -> None:
    code, out, err = medusa(
        run, "--system", "Be brief", "--message", "Ay", "--json", "--max-new-tokens", 9, "--top-logprobs", 2
    )
    found = json.loads(out)
    assert code == 0 and err.count("\n") == 1
    (expected,) = answers(run, "Ay", system="Be brief", max_new_tokens=9)
    assert found["text"] == expected and len(found["token_ids"]) == len(found["logprobs"]) == 9
    assert found["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Ay"},
        {"role": "assistant", "content": expected},
    ]
    assert all(len(each) == 2 for each in found["top_logprobs"]) and found["tokens_per_step"] > 1


def test_options_reach_the_answer(run: Path, medusa: Run) -> None:
    (expected,) = answers(run, "Ay", temperature=1.0, seed=4, chat_template_kwargs={"shout": True})
    argv = ("--message", "Ay", "--max-new-tokens", 12, "--temperature", 1, "--chat-template-kwargs", "{shout: true}")
    _, out, err = medusa(run, *argv, "--seed", 4)
    assert out == f"{expected}\n" and ", seed 4" in err
    seed = medusa(run, *argv)[2].strip().rpartition(", seed ")[2]
    assert int(seed) >= 0
    assert medusa(run, *argv, "--acceptance", "typical")[2].strip().endswith(", lossy")
    text = answers(run, "Ay")[0]
    _, out, err = medusa(run, "--message", "Ay", "--stop-strings", text[3:5], "--include-stop", "false")
    assert out == f"{text[: text.index(text[3:5])]}\n" and "cut" not in err


# Pipes.


def test_off_a_terminal_each_line_is_a_question(run: Path, medusa: Run) -> None:
    expected = answers(run, "Ay", " No, my lord ", "Why?")
    code, out, err = medusa(run, "--max-new-tokens", 12, stdin="Ay\n\n No, my lord \n   \nWhy?")
    assert code == 0 and out == "".join(f"{text}\n" for text in expected)
    assert len(err.splitlines()) == 3 and "/help" not in err and ASK not in out
    reads = [line.partition("tokens per step, ")[2].partition(" of ") for line in err.splitlines()]
    assert int(reads[0][0]) == int(reads[0][2].split()[0])
    assert all(int(few) < int(many.split()[0]) - 20 for few, _, many in reads[1:])


def test_a_wrong_line_ends_a_pipe(run: Path, medusa: Run) -> None:
    code, out, err = medusa(run, "--max-new-tokens", 3, stdin="Ay\nnaïve\nAy\n")
    assert code == 2 and out.count("\n") == out.strip("\n").count("\n") + 1 == 1 + answers(run, "Ay", max_new_tokens=3)[
        0
    ].count("\n")
    assert err.splitlines()[-1].startswith("medusa: error: the message: character 'ï'")
    assert medusa(run, stdin="/undo\n")[0] == 2


# A terminal.


def test_the_commands(run: Path, terminal: Run) -> None:
    first, second = answers(run, "Ay", "No")
    keys = ["Ay", "No", "/undo", "No", "/help", "/rest", "/reset", "/undo", " ", "Ay", "/quit", "Why?"]
    code, out, err = terminal(run, "--max-new-tokens", 12, keys=keys)
    assert code == 0
    texts = [first, second, second, first]
    assert out.replace(ASK, "") == "".join(f"{text}\n" for text in texts)
    assert out.count(ASK) == len(keys) - 1
    assert "\x1b[2m" in err and "/help lists the commands" in err
    assert "forgotten: No" in err and "all forgotten" in err
    assert all(f"{name} " in err for name in COMMANDS)
    assert "medusa: no command /rest (did you mean /reset?): /help lists them" in err
    assert "medusa: no turn to undo" in err


def test_a_line_that_begins_with_a_slash_and_has_more_words_is_a_message(run: Path, terminal: Run) -> None:
    (expected,) = answers(run, "/quit or not to quit")
    keys = ["/quit or not to quit"]
    assert expected in terminal(run, "--max-new-tokens", 12, keys=keys)[1]


def test_a_prompt_does_not_go_where_the_answers_are_sent(run: Path, terminal: Run) -> None:
    (expected,) = answers(run, "Ay")
    _, out, err = terminal(run, "--max-new-tokens", 12, keys=["Ay"], piped=True)
    assert out == f"{expected}\n" and err.count(ASK) == 2


def test_colour_can_be_refused(run: Path, terminal: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in terminal(run, keys=["/help"])[2]


def test_a_refused_question_does_not_end_the_chat(run: Path, terminal: Run) -> None:
    (expected,) = answers(run, "Ay")
    keys = ["naïve", "A" * 400, "Ay", KeyboardInterrupt, "/exit", "No"]
    code, out, err = terminal(run, "--max-new-tokens", 12, keys=keys)
    assert code == 0 and out.replace(ASK, "") == f"{expected}\n"
    assert "medusa: the message: character 'ï'" in err
    assert "may reach 300 with this trunk: undo turns or reset the conversation" in err
    assert "Ctrl-D or /quit leaves" in err


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("step", [1, 3])
def test_ctrl_c_stops_the_answer_and_not_the_chat(
    presses: int, step: int, run: Path, terminal: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is a wish that the step under way ends well; the second breaks it off."""
    forward, stream, calls = Trunk.forward, Conversation.stream, -99  # loading tries the trunk
    ended: list[int] = []

    def pressed(self: Trunk, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        output = forward(self, *args, **options)
        ended.append(calls)
        return output

    def begun(self: Conversation, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls = 0 if calls < 0 else step
        return stream(self, *args, **options)

    monkeypatch.setattr(Trunk, "forward", pressed)
    monkeypatch.setattr(Conversation, "stream", begun)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = terminal(run, "--max-new-tokens", 40, keys=["What say you?", "/undo", "Ay"])
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    whole, (after,) = answers(run, "What say you?", max_new_tokens=40)[0], answers(run, "Ay", max_new_tokens=40)
    cut = out.split(ASK)[1].removesuffix("\n")
    assert code == 0 and len(cut) < len(whole) and whole.startswith(cut)
    assert bool(cut) == (step > 1)
    assert (step in ended) == (presses == 1)
    if cut:
        assert "stopped; /undo forgets what was said" in err and "forgotten: What say you?" in err
    else:
        assert "stopped; the question is forgotten" in err and "medusa: no turn to undo" in err
    assert out.split(ASK)[3] == f"{after}\n"


def test_ctrl_c_ends_a_single_answer_and_a_pipe(run: Path, medusa: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa.infer.answers.Answer.start", interrupted)
    for argv, stdin in ((("--message", "Ay"), ""), ((), "Ay\nAy\n")):
        code, out, err = medusa(run, *argv, stdin=stdin)
        assert (code, out) == (130, "") and err.endswith("medusa: interrupted\n")
    monkeypatch.setattr("builtins.input", interrupted)
    assert medusa(run)[0] == 130


def test_ctrl_c_between_a_question_and_its_answer_is_one_at_the_prompt(
    run: Path, terminal: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def turn(conversation: object, line: str, at_terminal: bool) -> None:
        asked.append(line)
        if line == "Ay":
            raise KeyboardInterrupt

    monkeypatch.setattr("medusa.infer.chat_cli._turn", turn)
    code, _, err = terminal(run, keys=["Ay", "No"])
    assert code == 0 and asked == ["Ay", "No"] and err.count("Ctrl-D or /quit leaves") == 1


@pytest.mark.slow
def test_a_real_terminal(run: Path) -> None:
    """Line by line through a pseudo-terminal: the prompt, an answer, Ctrl-C in the middle of one, Ctrl-D."""
    mine, theirs = pty.openpty()
    argv = [sys.executable, "-m", "medusa", "chat", str(run), "--max-new-tokens", "200", "--eos-token-id", "[]"]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = ""

    def until(*texts: str, seconds: float = 120) -> str:
        """Read on to the first of ``texts``; return it."""
        nonlocal seen
        end = time.monotonic() + seconds
        while not any(text in seen for text in texts):
            ready, _, _ = select.select([mine], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {texts!r} in {seen!r}"
            seen += os.read(mine, 4096).decode()
        found = min((text for text in texts if text in seen), key=seen.index)
        seen = seen.partition(found)[2]
        return found

    try:
        until("/help lists")
        until(ASK)
        os.write(mine, b"Ay\n")
        until("Ay")
        until("tokens per step")
        until(ASK)
        for _ in range(20):  # Ctrl-C may come after the answer has ended
            os.write(mine, b"/reset\n")
            until("all forgotten")
            until(ASK)
            os.write(mine, b"No\n")
            until("No\r\n")
            until(*string.printable)  # it has begun
            os.kill(process.pid, signal.SIGINT)
            met = until("stopped", "tokens per step", "Ctrl-D or /quit leaves")
            until(ASK)
            if met == "stopped":
                break
        assert met == "stopped"
        for _ in range(20):  # Ctrl-C just before the line is waited for shows with the next key only: press again
            os.kill(process.pid, signal.SIGINT)
            if select.select([mine], [], [], 2)[0]:
                break
        until("Ctrl-D or /quit leaves")
        until(ASK)
        os.write(mine, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)


# What is refused.


def test_a_base_model_is_sent_to_generate(medusa: Run, tmp_path: Path) -> None:
    tiny_trunk("llama", dtype=torch.float32).model.save_pretrained(tmp_path / "base")
    char_tokenizer(ALPHABET).save_pretrained(tmp_path / "base")
    for argv in ((), ("--message", "Ay")):
        code, out, err = medusa(tmp_path / "base", *argv)
        assert (code, out, err.count("\n")) == (2, "", 1) and "no chat template" in err and "`medusa generate`" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--json"], "--json without --message"),
        (["--message", "Ay", "--logprobs"], "without --json"),
        (["--message", ""], "the message has an empty content"),
        (["--message", "Ay", "--sistem", "x"], "unknown option 'sistem' (did you mean system?)"),
        (["--message", "Ay", "--temperature", "-1"], "temperature"),
        (["--message", "Ay", "--chat-template-kwargs", "shout"], "chat_template_kwargs"),
        (["--message", "Ay", "--chat-template-kwargs", "{tokenize: true}"], "chat_template_kwargs has 'tokenize'"),
        (["--message", "Ay", "--threads", "0"], "threads=0"),
    ],
)
def test_wrong_input_ends_in_one_line(argv: list[str], says: str, run: Path, medusa: Run) -> None:
    code, out, err = medusa(run, *argv)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1 and err.startswith("medusa: error: ")


def test_no_such_folder(medusa: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = medusa("runs/x", "--message", "Ay")
    assert (code, err.count("\n")) == (2, 1) and "no folder runs/x here" in err


def test_help(medusa: Run, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        medusa("--help")
    assert end.value.code == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "``" not in text and "None" not in text and "--system" in text and "--message" in text
