"""LineEditor: what ctrl-C means where, and a history that cannot be kept."""

from __future__ import annotations

import builtins
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwood.cli.line_editor import LineEditor
from draftwood.runtime import RequestError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def handler() -> Iterator[object]:
    before = signal.getsignal(signal.SIGINT)
    yield before
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_reading_stops_a_block_and_else_does_nothing(
    handler: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(prompt: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return "too late"

    monkeypatch.setattr(builtins, "input", press)
    with LineEditor() as editor:
        with pytest.raises(KeyboardInterrupt):
            editor.read("> ")
        signal.raise_signal(signal.SIGINT)
        with editor.stoppable() as stop:
            assert not stop.is_set()
            signal.raise_signal(signal.SIGINT)
            assert stop.is_set()
        with editor.stoppable() as stop:
            assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not handler


@pytest.mark.parametrize("line", ["half \udcff a character", None])
def test_a_line_that_is_no_utf_8_is_named(line: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(prompt: str) -> str:
        return b"\xff".decode() if line is None else line

    monkeypatch.setattr(builtins, "input", read)
    with LineEditor() as editor, pytest.raises(RequestError, match="no UTF-8 text"):
        editor.read("> ")


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("obstacle", ["no readline", "no folder", "no home"])
def test_without_a_history_lines_are_read_all_the_same(
    obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "no readline":
        monkeypatch.setitem(sys.modules, "readline", None)
    elif obstacle == "no folder":
        (tmp_path / "cache").write_text("a file")
    else:
        monkeypatch.setattr("draftwood.cli.line_editor.cache_folder", lambda: None)
    monkeypatch.setattr(builtins, "input", lambda prompt: "hello")
    with LineEditor() as editor:
        assert editor.read("> ") == "hello"
    assert not (tmp_path / "cache").is_dir()
