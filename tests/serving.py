"""`draftwood serve` in a process of its own, as people run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


class Served(NamedTuple):
    """A running server. url: ends with /v1."""

    url: str
    process: subprocess.Popen[str]

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")


def with_chat_template(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle, called "tiny", that can hold a conversation."""
    copy = folder / "tiny"
    shutil.copytree(bundle, copy)
    (copy / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return copy


@contextmanager
def served(bundle: Path, *options: str) -> Iterator[Served]:
    """A server on a free port; it is gone afterwards, whatever happened."""
    command = [sys.executable, "-m", "draftwood.cli.main", "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert "http://" in line, process.stderr.read()
            yield Served("http://" + line.split("http://")[1].split(",")[0], process)
        finally:
            process.kill()
