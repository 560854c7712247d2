"""What measurements of clients share: a server of a bundle, and versions of packages in another environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(bundle: Path) -> Iterator[str]:
    """The address of a server of the bundle, which ends afterwards."""
    command = [sys.executable, "-m", "draftwood", "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield "http://" + process.stdout.readline().split("http://")[1].split(",")[0]
        finally:
            process.terminate()


def version_of(package: str, python: Path) -> str:
    """The version of a package that another interpreter has."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
