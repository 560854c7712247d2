"""ChatTemplate: renders a model's chat template in processes that can be killed.

A template is a program that comes with a model, and a loop in the template may never end. A thread cannot be killed;
a process can, and its memory can be limited (`template_worker.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any
from weakref import finalize

from ...models.errors import EngineError, RequestError

RENDER_SECONDS = 5.0  # time limit of one conversation; usual templates take milliseconds
CROWDED_SECONDS = 1.0  # the same limit while other conversations wait for a process
START_SECONDS = 60.0  # limit for the start of a process, which takes a tenth of a second on an idle machine
PROCESSES = 4  # most processes; each starts when it is needed
POLL_SECONDS = 0.05  # interval of checks whether the caller still needs the text
WORKER = Path(__file__).with_name("template_worker.py")
# The paths of this process' packages come after the standard library's: an embedded interpreter does not know them.
BOOT = "import runpy, sys; sys.path.extend(sys.argv[2:]); runpy.run_path(sys.argv[1], run_name='__main__')"
# The only environment variables that a worker gets, because others may be secrets: the ones that systems need to start
# a process, time zone and language.
ENVIRONMENT = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")


class ChatTemplate:
    """May be used from several threads. `close` ends the processes; so does the end of the object."""

    def __init__(self, source: str) -> None:
        self._source = (json.dumps(source) + "\n").encode()
        self._changed = Condition()
        self._idle: list[TemplateProcess] = []
        self._processes: set[TemplateProcess] = set()
        self._num_waiting = 0
        self._closed = False
        finalize(self, end_all, self._processes)

    def render(self, variables: Mapping[str, Any], given_up: Event | None = None) -> str:
        """The text of one conversation.

        given_up: another thread sets it when the text is no longer needed; the process is then ended. Raises
        RequestError if the template refuses the conversation, fails, takes too long, or was given up.
        """
        try:
            line = (json.dumps(dict(variables)) + "\n").encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"a conversation must consist of what JSON can express: {error}") from error
        given_up = given_up or Event()
        process = self._take(given_up)
        try:
            answer = process.ask(line, given_up, lambda: self._num_waiting > 0)
        except BaseException:
            self._give_back(process, usable=False)
            raise
        self._give_back(process, usable=True)
        if "text" not in answer:
            raise refusal(answer["error"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End every process. Threads that wait for a process get an error, and so do later calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            processes = list(self._processes)
        for process in processes:
            process.end()
        with self._changed:
            self._processes.difference_update(processes)

    def _take(self, given_up: Event) -> TemplateProcess:
        """Wait for a process that no other thread uses."""
        with self._changed:
            while True:
                if self._closed or given_up.is_set():
                    raise refusal("it was given up")
                while self._idle:
                    process = self._idle.pop()
                    if process.alive:
                        return process
                    self._end(process)
                if len(self._processes) < PROCESSES:
                    process = TemplateProcess(self._source)
                    self._processes.add(process)
                    return process
                self._num_waiting += 1
                self._changed.wait(POLL_SECONDS)
                self._num_waiting -= 1

    def _give_back(self, process: TemplateProcess, usable: bool) -> None:
        with self._changed:
            if usable and not self._closed:
                self._idle.append(process)
            else:
                self._end(process)
            self._changed.notify()

    def _end(self, process: TemplateProcess) -> None:
        process.end()
        self._processes.discard(process)


class TemplateProcess:
    """One running worker."""

    def __init__(self, source: bytes) -> None:
        """source: the input line with the template. Raises EngineError if the process cannot be started."""
        command = [sys.executable or "python3", "-I", "-c", BOOT, str(WORKER), *filter(os.path.isabs, sys.path)]
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
            raise EngineError(f"cannot start a process for the chat template ({error}): see `ulimit -u`") from error
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._reader = Thread(target=self._read, name="draftwood-template", daemon=True)
        self._reader.start()
        self._source: bytes | None = source

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, given_up: Event, crowded: Callable[[], bool]) -> dict[str, str]:
        """The worker's answer to one line. crowded: returns whether other threads wait. Raises RequestError if the
        worker takes too long, ends or was given up; afterwards only `end` may be called."""
        if self._source is not None:
            self._answer(START_SECONDS, given_up)
            line, self._source = self._source + line, None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended: there will be no answer
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._answer(RENDER_SECONDS, given_up, crowded)

    def _answer(self, seconds: float, given_up: Event, crowded: Callable[[], bool] = lambda: False) -> dict[str, str]:
        began = monotonic()
        while True:
            with suppress(Empty):
                line = self._lines.get(timeout=POLL_SECONDS)
                if not line:
                    raise refusal("its process ended")
                answer: dict[str, str] = json.loads(line)
                return answer
            spent = monotonic() - began
            if given_up.is_set():
                raise refusal("it was given up")
            if spent > seconds or (spent > CROWDED_SECONDS and crowded()):
                limit = min(seconds, CROWDED_SECONDS) if spent <= seconds else seconds
                raise refusal(f"it did not finish within {limit:g} s")

    def end(self) -> None:
        """End the process, its thread and its pipes. May be called more than once, and by several threads."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # data in the buffer was not sent yet
            self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        """Put the worker's lines into a queue as they arrive; an empty line marks the end."""
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")


def refusal(reason: str) -> RequestError:
    return RequestError(f"the chat template cannot write this conversation: {reason}")


def end_all(processes: set[TemplateProcess]) -> None:
    for process in list(processes):
        process.end()
