"""`draftwood serve` in a separate process, as users run it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bundling import resigned

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"

RUNNING, WAITING = "draftwood_requests_running", "draftwood_requests_waiting"
# `draftwood serve` whose target's passes wait for as long as a file exists, or for the seconds that are in it.
PAUSABLE = """
import signal, sys, time
from pathlib import Path
from draftwood.cli.main import main
from draftwood.runtime.bundle.bundle import EngineBundle

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has its processes ignore
pause, opened = Path(sys.argv.pop(1)), EngineBundle.open_engine

def seconds():
    try:
        return float(pause.read_text() or "inf")
    except FileNotFoundError:
        return 0

def open_engine(self, role, *options):
    engine = opened(self, role, *options)
    forward = engine.score

    def waiting(*arguments):
        begun = time.monotonic()
        while role == "target" and time.monotonic() - begun < seconds():
            time.sleep(0.01)
        return forward(*arguments)

    engine.score = waiting
    return engine

EngineBundle.open_engine = open_engine
sys.exit(main(sys.argv[1:]))
"""


class Served(NamedTuple):
    """A running server. url: ends with /v1."""

    url: str
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """A number of /metrics; 0 before it is counted for the first time."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=120) as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0

    @property
    def idle(self) -> bool:
        return not self.metric(RUNNING) and not self.metric(WAITING)


def with_chat_template(bundle: Path, folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A copy of a bundle, called "tiny", that can hold a conversation."""
    copy = folder / "tiny"
    shutil.copytree(bundle, copy)
    (copy / "chat_template.jinja").write_text(template)
    return resigned(copy)


@contextmanager
def served(bundle: Path, *options: str, program: Sequence[str] = ("-m", "draftwood")) -> Iterator[Served]:
    """A server on a free port; it is gone afterwards, whatever happened. program: what Python runs."""
    command = [sys.executable, *program, "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert "http://" in line, process.stderr.read()
            yield Served("http://" + line.split("http://")[1].split(",")[0], process)
        finally:
            process.kill()


def pausable(pause: Path) -> tuple[str, ...]:
    """The program whose passes wait while `pause` exists."""
    return "-c", PAUSABLE, str(pause)


def pace(pause: Path, seconds: float | None = None) -> None:
    """Let every pass take so many seconds from now on; without a number, each one waits for the next call."""
    ready = pause.with_suffix(".new")
    ready.write_text("" if seconds is None else str(seconds))
    ready.replace(pause)


@contextmanager
def paused(pause: Path, seconds: float | None = None) -> Iterator[None]:
    """While the block runs, requests run and do not end, or are so slow."""
    pace(pause, seconds)
    try:
        yield
    finally:
        pause.unlink()


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
