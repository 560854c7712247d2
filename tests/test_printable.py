"""Text of strangers on a terminal: shown, never obeyed."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.cli.main import main
from draftwood.models.printable import printable


@given(st.text(st.characters(codec=None)))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert all(letter in "\t\n" or unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp") for letter in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\ttwo\n", "one\ttwo\n"),
        ("grün 日本 👩‍🚀 \\x1b", "grün 日本 👩‍🚀 \\x1b"),
        ("\x1b[2J\x9b31m\r\x07\x7f", "\\x1b[2J\\x9b31m\\r\\x07\\x7f"),
        ("\u202egnp.exe\u2069", "\\u202egnp.exe\\u2069"),
        ("\udcff", "\\udcff"),
    ],
)
def test_controls_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_error_repeats_no_escape_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's name, and what stands in a file."""
    assert main(["inspect", f"{tmp_path}/\x1b]0;owned\x07"]) == 2
    error = capsys.readouterr().err
    assert "\\x1b]0;owned\\x07" in error and "\x1b" not in error and "\x07" not in error
