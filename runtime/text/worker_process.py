"""WorkerProcess: a program of untrusted input in a process of its own, which can be killed and has limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic

from ...models.errors import EngineError, RequestError

PROGRAM = Path(__file__).with_name("worker.py")
START_SECONDS = 60.0  # limit for the start of a process, which takes a tenth of a second on an idle machine
POLL_SECONDS = 0.05  # interval of checks whether the caller still needs the answer
# The paths of this process' packages come after the standard library's: an embedded interpreter does not know them.
BOOT = (
    "import runpy, sys; sys.path.extend(sys.argv[3:]); del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
# The only environment variables that a worker gets, because others may be secrets: the ones that systems need to start
# a process, time zone and language.
ENVIRONMENT = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")


class WorkerProcess:
    """One running worker, see `worker.py`."""

    def __init__(self, task: Path, setting: bytes, refuse: Callable[[str], RequestError]) -> None:
        """task: see `worker.py`. setting: the first line of the input. refuse: makes the error for a reason. Raises
        EngineError if the process cannot be started."""
        self._refuse = refuse
        paths = filter(os.path.isabs, sys.path)
        command = [sys.executable or "python3", "-I", "-c", BOOT, str(PROGRAM), str(task), *paths]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            raise EngineError(f"cannot start a process for {task.name} ({error}): see `ulimit -u`") from error
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        self._threads = [
            Thread(target=work, name="draftwood-worker", daemon=True) for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()
        self._setting: bytes | None = setting

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, seconds: Callable[[], float], given_up: Event) -> dict[str, str]:
        """The worker's answer to one line. seconds: returns the present time limit. given_up: another thread sets it
        when the answer is no longer needed. Raises the refusal if the worker takes too long, ends or was given up;
        afterwards only `end` may be called."""
        if self._setting is not None:
            self._unsent.put(self._setting)
            self._answer(lambda: START_SECONDS, given_up)
            self._setting = None
        self._unsent.put(line)
        return self._answer(seconds, given_up)

    def _answer(self, seconds: Callable[[], float], given_up: Event) -> dict[str, str]:
        began = monotonic()
        while True:
            is_late = monotonic() - began > (limit := seconds())
            with suppress(Empty):  # an answer that is there counts, even if this thread looks for it late
                line = self._lines.get(timeout=0 if is_late else POLL_SECONDS)
                if not line:
                    raise self._refuse("its process ended")
                answer: dict[str, str] = json.loads(line)
                return answer
            if given_up.is_set():
                raise self._refuse("it was given up")
            if is_late:
                raise self._refuse(f"it did not finish within {limit:g} s")

    def end(self) -> None:
        """End the process, its threads and its pipes. May be called more than once, and by several threads."""
        self._process.kill()
        self._process.wait()
        self._unsent.put(b"")
        for thread in self._threads:
            thread.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # data in the buffer was not sent yet
            self._process.stdin.close()
        self._process.stdout.close()

    def _write(self) -> None:
        """Send lines to the worker, up to an empty one. A thread of its own does so: a worker that does not read would
        block the caller for ever, whatever the time limit."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended: there will be no answer
            while line := self._unsent.get():
                self._process.stdin.write(line)
                self._process.stdin.flush()
                del line  # it may have megabytes

    def _read(self) -> None:
        """Put the worker's lines into a queue as they arrive; an empty line marks the end."""
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")
