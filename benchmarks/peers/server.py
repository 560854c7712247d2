"""Start and stop a server on a free port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from urllib.request import urlopen

from benchmarks.tools.processor import read_tree_memory, read_tree_seconds

SECONDS_TO_LOAD, SECONDS_TO_END = 600, 30


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends this program as an exception does, and so its servers, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ServerError(Exception):
    """A server did not start, or did not answer as it should."""


class Server:
    """A running server, which a `with` block ends together with all its processes. url: its address without a path.

    Raises ServerError when it does not answer GET /health in time.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Sequence[tuple[str, str]] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        log.parent.mkdir(parents=True, exist_ok=True)
        started = [*command, "--host", "127.0.0.1", "--port", str(port)]
        with log.open("ab") as lines:
            lines.write(f"\n$ {' '.join(started)}\n".encode())
            lines.flush()
            self._process = subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                env=os.environ | dict(environment),
                cwd=log.parent,  # where ik_llama.cpp leaves a log of its own
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def processor_seconds(self) -> float:
        """Of all its processes so far."""
        return read_tree_seconds(self._process.pid)

    def memory(self) -> int:
        """Bytes that all its processes occupy now."""
        return read_tree_memory(self._process.pid)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has left, such as vLLM's engine
        self._process.wait()

    def _wait(self) -> None:
        deadline = monotonic() + SECONDS_TO_LOAD
        while monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}; see {self._log}")
            try:
                with urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (OSError, HTTPException):
                sleep(0.1)
        raise ServerError(f"the server did not answer within {SECONDS_TO_LOAD} s; see {self._log}")
