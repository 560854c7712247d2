"""SIGTERM, as from a container that is stopped, and a closed terminal leave as little after as Ctrl-C, which ends a
line, an answer or the command."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwood.__main__ import main as command
from draftwood.cli.line_editor import LineEditor
from draftwood.cli.main import main
from draftwood.cli.termination import termination_unwinds
from draftwood.runtime import RequestError

# `draftwood` whose builds do not end: the second engine takes as long as a test may wait.
UNFINISHED = """
import sys, time
from draftwood.builder import pipeline
from draftwood.__main__ import main as command
from draftwood.cli.main import main

make, made = pipeline.make_engine, []

def make_one(*arguments, **options):
    if made:
        time.sleep(600)
    made.append(True)
    return make(*arguments, **options)

pipeline.make_engine = make_one
sys.exit(main())
"""


def heed_interrupts() -> None:
    """A shell that runs the tests in the background, or nohup, has its processes ignore them."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_build_that_is_ended_leaves_nothing(number: int, code: int, tiny_pair: Path, tmp_path: Path) -> None:
    pair = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    command = [sys.executable, "-c", UNFINISHED, "build", *pair, "--output", str(tmp_path / "bundle")]
    unseen = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=unseen, stderr=unseen, preexec_fn=heed_interrupts) as process:
        while not list(tmp_path.glob(".bundle.partial-*")):
            assert process.poll() is None, "the build ended before it could be"
            time.sleep(0.002)
        process.send_signal(number)
        assert process.wait() == code
    assert not list(tmp_path.iterdir())


def test_a_second_signal_does_not_disturb_the_first_one() -> None:
    steps: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, termination_unwinds():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("cleaned up")
    assert ended.value.code == 143 and steps == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C, though whoever runs the tests has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize("swallowed", [True, False])
def test_what_a_library_makes_of_the_exception_changes_nothing(
    number: int, expected: type[BaseException], swallowed: bool
) -> None:
    """An extension module being imported raises an ImportError instead; a callback's exception may be dropped."""
    before = signal.getsignal(number)
    with pytest.raises(expected) as ended, termination_unwinds():
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        except BaseException as error:
            if not swallowed:
                raise ImportError("initialization failed") from error
    assert signal.getsignal(number) is before
    assert number == signal.SIGINT or ended.value.args == (143,)


@pytest.mark.usefixtures("heeded")
def test_a_later_repetition_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's exception was lost: whoever asks again is heard."""
    now = iter([5.0, 5.9, 7.0])
    monkeypatch.setattr("draftwood.cli.termination.time", SimpleNamespace(monotonic=lambda: next(now)))
    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt), termination_unwinds():
        for step in range(3):
            try:
                signal.raise_signal(signal.SIGINT)
                steps.append(step)
            except KeyboardInterrupt:
                steps.append(-step)
    assert steps == [0, 1, -2]


def test_who_ignores_interrupts_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with termination_unwinds():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_runs_commands_without_handling_signals(tmp_path: Path) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["inspect", str(tmp_path / "nowhere")])))
    thread.start()
    thread.join()
    assert codes == [2]


def test_an_interrupt_while_the_commands_are_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "draftwood.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "draftwood.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert command() == 130
    assert capsys.readouterr().err == "draftwood: interrupted\n"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def handler() -> Iterator[object]:
    before = signal.getsignal(signal.SIGINT)
    yield before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("own_cache")
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


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("line", ["half \udcff a character", None])
def test_a_line_that_is_no_utf_8_is_named(line: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(prompt: str) -> str:
        return b"\xff".decode() if line is None else line

    monkeypatch.setattr(builtins, "input", read)
    with LineEditor() as editor, pytest.raises(RequestError, match="no UTF-8 text"):
        editor.read("> ")


@pytest.mark.usefixtures("handler", "own_cache")
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
