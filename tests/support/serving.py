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


class Served(NamedTuple):
    """A running server. url: ends with /v1."""

    url: str
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """A number of /metrics; 0 before it is counted for the first time."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=20) as answer:
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
def served(bundle: Path, *options: str, program: Sequence[str] = ("-m", "draftwood.cli.main")) -> Iterator[Served]:
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


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
