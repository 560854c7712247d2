"""Files of commands: an input file that cannot be read is refused with the fix. No output file replaces a file
that the command reads, and checking one leaves nothing behind."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest

from draftwood.cli.files import check_writable, read
from draftwood.cli.main import main
from draftwood.cli.streams import read_input
from draftwood.models.errors import RequestError

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
