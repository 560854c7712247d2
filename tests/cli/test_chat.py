"""draftwood chat: conversations in a real terminal, over pipes, and as JSON."""

from __future__ import annotations

import io
import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from bundling import built
from checkpoints import write_checkpoint, write_tokenizer
from serving import with_chat_template
from terminal import CTRL_D, SIGN, Terminal, in_terminal

from draftwood.cli.chat_commands import COMMANDS, LARGEST_FILE
from draftwood.cli.main import main
from draftwood.runtime import LLM

GREEDY = ["--temperature", "0", "--ignore-eos"]
SHORT = [*GREEDY, "--max-tokens", "12"]
LONG = 30_000  # tokens of context: no answer fills it before a test stops the answer


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose answers do not end before somebody stops them, and whose draft is always right."""
    folder = tmp_path_factory.mktemp("endless")
    for role in ("target", "draft"):
        write_checkpoint(folder / role, "gqa", max_position_embeddings=LONG)
        write_tokenizer(folder / role)
    return with_chat_template(built(folder / "target", folder / "draft", folder / "bundle"), folder)


UNLOADABLE = (  # what a file may hold that /load refuses, and what the error names
    (b"\xff", "foreign.json cannot be read ('utf-8' codec"),
    (b"[", "foreign.json cannot be read (Expecting value"),
    (b'"hello"', "a conversation is a list of messages"),
    (b'[{"role": "judge", "content": "hello"}]', "messages[0].role must be one of"),
    (b'[{"role": "user", "content": 5}]', "messages[0].content must be text, not 5"),
    (b'[{"role": "user", "content": "hello"}]', "the user's last message has no answer"),
    (b'[{"role": "assistant", "content": "hello"}]', "messages[0] is not a text of the user"),
    (b'[{"role": "\\u001b[2J", "content": "a"}]', r"tool, not '\x1b[2J'"),
    (b" " * (LARGEST_FILE + 1), f"foreign.json cannot be read (it has {LARGEST_FILE + 1} bytes, more than"),
)


def say(terminal: Terminal, line: str) -> str:
    """Type a line, wait for the next prompt, and return what was shown."""
    terminal.type(f"{line}\n")
    terminal.wait_for("\n")  # its echo
    return terminal.wait_for(SIGN)


def test_a_conversation_in_a_terminal(endless: Path, tmp_path: Path) -> None:
    """Every command, in one session."""
    file = tmp_path / "saved.json"
    command = ["chat", str(endless), "--system", "Be brief.", "--speculative", "budget=fixed", *SHORT]
    with in_terminal(command, tmp_path) as terminal:
        assert "/help" in terminal.wait_for(SIGN)
        assert "no answer yet" in say(terminal, "/stats")
        first = say(terminal, "hello")
        assert "12 tokens" in first and "tokens/s" in first and "acceptance" in first
        assert re.findall(r"(\d+) of", say(terminal, "/stats")) == ["0", "0"]
        say(terminal, "and again")
        last, everything, *_ = re.findall(r"(\d+) of (\d+) prompt tokens cached", say(terminal, "/stats"))
        begin = len("<system>Be brief.\n<user>hello\n<assistant>")
        assert int(last[0]) > begin / 2 and last[0] == everything[0] and int(last[1]) < int(everything[1])

        assert "temperature 0.5" in say(terminal, "/set temperature 0.5")
        assert "error: temperature must be 0 (greedy) or between" in say(terminal, "/set temperature -1")
        assert "error: temperature is a number, not 'hot'" in say(terminal, "/set temperature hot")
        assert "did you mean top_p?" in say(terminal, "/set top-p 0.9")
        assert "seed 7" in say(terminal, "/set seed 7") and "seed none" in say(terminal, "/set seed none")
        assert 'stop ["END"]' in say(terminal, "/set stop END")
        assert r'stop ["\n\n"]' in say(terminal, r'/set stop "\n\n"')
        assert "stop none" in say(terminal, "/set stop none")
        assert "stop_token_ids 3,4" in say(terminal, "/set stop_token_ids 3,4")
        assert "stop_token_ids none" in say(terminal, "/set stop_token_ids none")
        assert "ignore_eos is on or off, not 'maybe'" in say(terminal, "/set ignore_eos maybe")
        assert "speculation off" in say(terminal, "/set speculation off")
        assert "acceptance" not in say(terminal, "plainly")
        shown = say(terminal, "/set")
        assert all(each in shown for each in ("temperature 0.5", "speculation off", "max_tokens 12", "ignore_eos on"))
        assert "speculation on" in say(terminal, "/set speculation on")

        assert "12 tokens" in say(terminal, "/retry") and "removed your message 'plainly'" in say(terminal, "/undo")
        assert f"wrote {file}: 5 messages" in say(terminal, f"/save {file}")
        messages = json.loads(file.read_text())
        assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant"]
        assert messages[0]["content"] == "Be brief." and messages[3]["content"] == "and again"
        assert "the system message applies from the next answer on" in say(terminal, "/system Be loud.")
        assert f"{file} exists and was not changed" in say(terminal, f"/save {file}")
        assert json.loads(file.read_text()) == messages
        assert f"replaced {file}: 5 messages" in say(terminal, f"/save! {file}")
        assert json.loads(file.read_text())[0]["content"] == "Be loud."
        assert "needs the name of a file" in say(terminal, "/save")
        assert "choose a file in an existing folder" in say(terminal, f"/save {tmp_path}/nowhere/file.json")
        saved = json.loads(file.read_text())
        assert "a new conversation; the system message stays" in say(terminal, "/reset")
        assert "12 tokens" in say(terminal, "something else")
        for content, named in UNLOADABLE:
            (tmp_path / "foreign.json").write_bytes(content)
            assert named in say(terminal, f"/load {tmp_path}/foreign.json")
        assert "/load needs the name of a file" in say(terminal, "/load")
        assert "nowhere.json cannot be read (No such file" in say(terminal, f"/load {tmp_path}/nowhere.json")
        assert "cannot be read (Is a directory)" in say(terminal, f"/load {tmp_path}")
        assert "removed your message 'something else'" in say(terminal, "/undo"), "errors changed nothing"
        assert "no system message any more" in say(terminal, "/system")
        shown = say(terminal, f"/load {file}")
        assert f"loaded {file}: 5 messages, with its system message" in shown
        assert "no answer yet" in say(terminal, "/stats") and "12 tokens" in say(terminal, "/retry")
        say(terminal, f"/save! {file}")
        assert json.loads(file.read_text())[:-1] == saved[:-1], "only the last answer is a new one"
        assert "a new conversation" in say(terminal, "/reset")
        assert "error: there is nothing to undo" in say(terminal, "/undo")
        assert "error: there is nothing to answer again" in say(terminal, "/retry")
        assert "no system message any more" in say(terminal, "/system")

        assert "did you mean /stats?" in say(terminal, "/stat")
        assert "/reset takes no argument" in say(terminal, "/reset now")
        assert "12 tokens" in say(terminal, "//usr/bin is a folder")
        assert "removed your message '/usr/bin is a folder'" in say(terminal, "/undo")
        shown = say(terminal, "/help")
        assert all(f"── /{name} " in shown for name in COMMANDS)
        terminal.type("\x1b[200~two\nlines\x1b[201~\n")
        terminal.wait_for("12 tokens")
        terminal.wait_for(SIGN)
        assert r"removed your message 'two\nlines'" in say(terminal, "/undo")
        terminal.type("\n")
        terminal.type("/quit\n")
        assert terminal.wait_for_end() == 0
    assert b"\x1b[32m" in terminal.shown, "accepted draft tokens are green"
    history = tmp_path / "chat_history"
    assert "/system Be loud.\n" in history.read_text() and stat.S_IMODE(history.stat().st_mode) == 0o600
    with in_terminal(command, tmp_path) as terminal:
        terminal.wait_for(SIGN)
        terminal.type("\x1b[A\x1b[A\n")  # up, twice: the session before had another line
        terminal.wait_for("error: there is nothing to undo")
        terminal.wait_for(SIGN)
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0


def test_ctrl_c_stops_an_answer_and_then_leaves(endless: Path, tmp_path: Path) -> None:
    with in_terminal(["chat", str(endless), *GREEDY], tmp_path) as terminal:
        terminal.wait_for(SIGN)
        terminal.type("hello\n")
        terminal.wait_for("tokens/s")
        terminal.press_ctrl_c()
        assert "stopped, and what was written stays in the conversation" in terminal.wait_for(SIGN)
        file = tmp_path / "saved.json"
        say(terminal, f"/save {file}")
        messages = json.loads(file.read_text())
        assert [each["role"] for each in messages] == ["user", "assistant"] and messages[1]["content"]
        say(terminal, "/set max_tokens 5")
        assert "5 tokens" in say(terminal, "go on")
        assert "error" not in say(terminal, "/stats")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.press_ctrl_c()
        assert "ctrl-C again, or ctrl-D, leaves" in terminal.wait_for(SIGN)
        say(terminal, "/stats")  # a line in between: the next ctrl-C is a first one again
        terminal.press_ctrl_c()
        terminal.wait_for(SIGN)
        terminal.press_ctrl_c()
        assert terminal.wait_for_end() == 0
    with in_terminal(["chat", str(endless), *GREEDY], tmp_path) as terminal:
        terminal.wait_for(SIGN)
        terminal.type("hello\n")
        terminal.wait_for("tokens/s")
        terminal.press_ctrl_c()
        terminal.wait_for(SIGN)
        terminal.press_ctrl_c()
        assert terminal.wait_for_end() == 0


def test_no_escape_sequence_of_a_model_reaches_the_terminal(bundle: Path, tmp_path: Path) -> None:
    """At this temperature every byte is about as probable as any other."""
    noise = ["--temperature", "100", "--seed", "1", "--ignore-eos", "--max-tokens", "500"]
    chat = ["chat", str(bundle), *noise]
    done = subprocess.run(
        [sys.executable, "-m", "draftwood", *chat, "--json"], input="hello\n", capture_output=True, text=True
    )
    text = json.loads(done.stdout)["text"]
    hostile = [mark for mark in "\x00\x07\x08\x1b" if mark in text]
    assert len(hostile) > 1, "the model writes control characters"
    with in_terminal(chat, tmp_path) as terminal:
        terminal.wait_for(SIGN)
        terminal.type("hello\n")
        terminal.wait_for("── 500 tokens")
        terminal.wait_for(SIGN)
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    for mark in hostile:
        assert f"\\x{ord(mark):02x}".encode() in terminal.shown
    beyond = re.sub(rb"\x1b\[[?\d;]*[A-Za-z]", b"", terminal.shown)  # colours, and movements of the cursor
    assert not set(b"\x00\x07\x08\x1b") & set(beyond)


class Piped(NamedTuple):
    """What came of a conversation over pipes."""

    code: int
    out: str
    error: str


Chat = Callable[..., Piped]


@pytest.fixture
def chat(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """`draftwood chat` in this process. Its arguments are options, and the bytes of standard input."""

    def run(*options: str, lines: bytes | str) -> Piped:
        given = io.StringIO(lines) if isinstance(lines, str) else io.TextIOWrapper(io.BytesIO(lines), "utf-8")
        monkeypatch.setattr(sys, "stdin", given)
        monkeypatch.setattr("draftwood.cli.chat.LONGEST_LINE", 4000)
        return Piped(main(["chat", str(bundle), *options]), *capsys.readouterr())

    return run


def test_lines_of_a_pipe_are_messages(bundle: Path, chat: Chat) -> None:
    lines = b"hello\n\n  \n/help is no command here\n"
    command = [sys.executable, "-m", "draftwood", "chat", str(bundle), *SHORT]
    piped = subprocess.run(command, input=lines, capture_output=True)
    plain, objects = (chat(*SHORT, option, lines=lines) for option in ("--no-speculation", "--json"))
    assert plain.code == piped.returncode == objects.code == 0
    answers = [json.loads(line) for line in objects.out.splitlines()]
    assert len(answers) == 2
    assert piped.stdout.decode() == plain.out == "".join(f"{answer['text']}\n" for answer in answers)
    assert piped.stderr == b"" and plain.error == ""
    with LLM(bundle) as llm:
        conversation = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": answers[0]["text"]},
            {"role": "user", "content": "/help is no command here"},
        ]
        assert answers[0]["prompt_token_ids"] == llm.encode_chat(conversation[:1])
        assert answers[1]["prompt_token_ids"] == llm.encode_chat(conversation)
    reused = answers[1]["stats"]["num_cached_tokens"]
    assert answers[0]["stats"]["num_cached_tokens"] == 0 and reused >= len(answers[0]["prompt_token_ids"])
    assert answers[0]["finish_reason"] == "length" and answers[0]["num_left_out"] == 0


def test_a_program_gets_each_answer_before_it_sends_the_next_message(bundle: Path) -> None:
    command = [sys.executable, "-m", "draftwood", "chat", str(bundle), "--json", *SHORT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for message in ("hello", "again"):
            process.stdin.write(f"{message}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["stats"]["num_tokens"] == 12
        process.stdin.close()
        assert process.wait() == 0


def test_the_oldest_turns_give_way_and_a_line_says_so(bundle: Path, chat: Chat) -> None:
    """The context has 1024 tokens."""
    lines = b"\n".join([180 * b"x"] * 9)
    done = chat(*SHORT, "--system", "Be brief.", "--json", lines=lines)
    answers = [json.loads(line) for line in done.out.splitlines()]
    left_out = [answer["num_left_out"] for answer in answers]
    assert done.code == 0 and left_out[0] == 0 and left_out[-1] > 1 and left_out == sorted(left_out)
    assert len(set(left_out)) < 4, "several turns at a time"
    with LLM(bundle) as llm:
        system = llm.encode_chat([{"role": "system", "content": "Be brief."}])[: len("<system>B")]
    assert all(answer["prompt_token_ids"][:6] == system[:6] for answer in answers)
    shown = chat(*SHORT, lines=lines)
    assert "oldest turns are left out" in shown.error and shown.out.count("\n") >= 9


@pytest.mark.parametrize(
    ("options", "lines", "named"),
    [
        ([], 2000 * b"x", "shorten it, or rebuild with a larger --max-length"),
        ([], b"\xff\xfe\n", "send lines of UTF-8 text"),
        ([], "half \udcff a character", "send lines of UTF-8 text"),  # as some locales read it
        ([], 5000 * "x", "more than 4000 characters"),
        (["--temperature", "-1"], b"", "temperature"),
        (["--logprobs", "2"], b"", "--logprobs needs --json"),
        (["--min-tokens", "2000", "--max-tokens", "5000"], b"", "min_tokens must be between 0 and max_tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(chat: Chat, options: list[str], lines: bytes | str, named: str) -> None:
    done = chat(*options, lines=lines)
    assert done.code == 2 and done.error.count("\n") == 1
    assert done.error.startswith("draftwood: error: ") and named in done.error


def test_a_template_that_refuses_the_system_message_is_named(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    )
    bundle = with_chat_template(tiny_bundle, tmp_path, template)
    assert main(["chat", str(bundle), "--system", "Be brief."]) == 2
    assert "no system messages" in capsys.readouterr().err
