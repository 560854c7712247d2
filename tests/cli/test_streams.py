"""Standard streams that are closed, full, left by their reader, or of a narrow encoding: Python buffers output here, as
it does for a user. Files that cannot be read, and outputs that would replace an input."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import with_chat_template

from draftwood.cli.files import check_writable, read
from draftwood.cli.main import main
from draftwood.cli.streams import read_input
from draftwood.models.errors import RequestError

COMMAND = f"{sys.executable} -m draftwood"
CLOSED = "standard output is closed"


@pytest.fixture
def chat_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return with_chat_template(tiny_bundle, tmp_path)


def shell(line: str, **variables: str) -> tuple[int, str]:
    """The exit code of a command in a shell, which ends with that of the whole pipe, and its errors."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, env=inherited | variables
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", ["--version", "--help", "inspect BUNDLE", "inspect BUNDLE --json"])
def test_a_reader_that_went_before_the_output_is_no_error(options: str, tiny_bundle: Path) -> None:
    line = f"{COMMAND} {options.replace('BUNDLE', str(tiny_bundle))} | true"
    assert shell(line, TERM="dumb") == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", ["--version", "inspect BUNDLE --json", "generate BUNDLE --prompt x --max-tokens 2"])
def test_an_output_without_room_is_one_line(options: str, tiny_bundle: Path) -> None:
    code, error = shell(f"{COMMAND} {options.replace('BUNDLE', str(tiny_bundle))} >/dev/full")
    assert code == 2 and error.count("\n") == 1 and "No space left on device): free some space" in error


@pytest.mark.parametrize("form", ["", "--json"])
def test_no_result_is_lost_in_a_closed_output(form: str, tiny_bundle: Path) -> None:
    code, error = shell(f"{COMMAND} generate {tiny_bundle} --prompt x --max-tokens 2 {form} >&-")
    assert code == 2 and error.count("\n") == 1 and CLOSED in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("errors", ["2>/dev/full", "2> >(true)", "2>&-"])
@pytest.mark.parametrize(("prompt", "code"), [("x", 0), ("", 2)])
def test_errors_that_nobody_takes_change_no_exit_code(prompt: str, code: int, errors: str, no_bos_bundle: Path) -> None:
    """A note without room was exit code 1, with which an audit says that two texts differ."""
    line = f"{COMMAND} generate {no_bos_bundle} --prompt '{prompt}' --max-tokens 2 --temperature 0 --audit --json"
    done = subprocess.run(["bash", "-c", f"{line} {errors}"], capture_output=True, text=True)
    assert (done.returncode, bool(done.stdout)) == (code, not code)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("generate BUNDLE --prompt-file - <&-", "standard input is closed"),
        ("chat BUNDLE --json <&-", "standard input is closed"),
        ("chat BUNDLE <&-", "standard input is closed"),
        ("generate BUNDLE --prompt-file - <<< $'a\\xff'", "send UTF-8 text"),
    ],
)
def test_an_input_that_cannot_be_read_is_one_line(line: str, named: str, chat_bundle: Path) -> None:
    command = f"{COMMAND} {line.replace('BUNDLE', str(chat_bundle))}"
    code, error = shell(command, PYTHONIOENCODING="utf-8:strict")
    assert code == 2 and error.count("\n") == 1 and named in error


def test_an_encoding_that_cannot_hold_the_output_is_named(tiny_bundle: Path) -> None:
    code, error = shell(f"{COMMAND} inspect {tiny_bundle}", PYTHONIOENCODING="ascii")
    assert code == 2 and error.count("\n") == 1 and "in ascii cannot hold" in error and "PYTHONIOENCODING" in error


@pytest.mark.parametrize("mode", ["0", "1"])  # of UTF-8, in which Python reads other bytes as lone surrogates
def test_an_input_that_is_no_utf_8_is_one_line(mode: str, tiny_bundle: Path) -> None:
    line = f"printf 'a\\377' | {COMMAND} generate {tiny_bundle} --prompt-file - --max-tokens 2"
    code, error = shell(line, PYTHONUTF8=mode, LC_ALL="C.UTF-8")
    assert code == 2 and error.count("\n") == 1
    assert "standard input cannot be read" in error and error.endswith("send UTF-8 text\n")


REFUSED = "would replace a file that this command reads: choose another one"


@pytest.mark.parametrize("name", ["prompt.txt", "link.txt", "bundle/manifest.json", "bundle/tokenizer.json"])
def test_no_input_is_replaced(name: str, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, prompts = tmp_path / "bundle", tmp_path / "prompt.txt"
    shutil.copytree(tiny_bundle, bundle)
    prompts.write_text('{"prompt": "hello"}\n')
    (tmp_path / "link.txt").hardlink_to(prompts)
    output = tmp_path / name
    before = output.read_bytes()
    for command in (
        ["generate", str(bundle), "--prompt-file", str(prompts), "--max-tokens", "2", "--explain", str(output)],
        ["bench", str(bundle), "--prompts", str(prompts), "--max-tokens", "2", "--output", str(output)],
    ):
        assert main(command) == 2
        assert REFUSED in capsys.readouterr().err and output.read_bytes() == before


def test_a_check_leaves_a_link_to_a_file_that_is_still_to_come(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "page.html")
    check_writable(link, "--explain")
    assert link.is_symlink() and os.listdir(tmp_path) == ["link.html"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory"), (b"ab\xff", "'utf-8' codec can't decode byte 0xff in position 2: .*")],
)
def test_an_input_that_cannot_be_read_is_refused_with_the_fix(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    refusal = rf"^--prompt-file .*prompt.txt cannot be read \({reason}\): give a text file in UTF-8$"
    with pytest.raises(RequestError, match=refusal):
        read(file, "--prompt-file")


@pytest.mark.parametrize("source", ["a file", "standard input"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    content = "\ufeffa\ufeffb".encode()
    (tmp_path / "prompt.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    text = read_input() if source == "standard input" else read(tmp_path / "prompt.txt", "--prompt-file")
    assert text == "a\ufeffb"
