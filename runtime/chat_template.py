"""ChatTemplate: a model's chat template, rendered in processes that can be ended.

A template is a program that comes with a model, and a loop in it may have no end. A thread cannot be ended from
outside; a process can, and its memory can be limited, too (`template_worker.py`).
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

from ..models.errors import EngineError, RequestError

RENDER_SECONDS = 5.0  # of one conversation; templates take milliseconds
CROWDED_SECONDS = 1.0  # the same while other conversations wait for a process
START_SECONDS = 60.0  # for a process to start, which takes a tenth of a second on an idle machine
PROCESSES = 4  # at most, started when they are needed
POLL_SECONDS = 0.05  # how often to look whether anybody still waits for the text
WORKER = Path(__file__).with_name("template_worker.py")
# The folders of this process' packages follow the standard library's: an embedded interpreter does not know them.
BOOT = "import runpy, sys; sys.path.extend(sys.argv[2:]); runpy.run_path(sys.argv[1], run_name='__main__')"
# All that a worker gets of the environment, which may hold secrets: what systems need to start it, clock and language.
ENVIRONMENT = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")


class ChatTemplate:
    """Usable from several threads. `close` ends its processes, and so does dropping it."""

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

        given_up: set by another thread when nobody wants the text any more; its process is then ended. Raises
        RequestError when the template refuses the conversation, fails, takes too long, or was given up.
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
            raise refused(answer["error"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End every process; who waits for one gets an error. Later conversations are refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            processes = list(self._processes)
        for process in processes:
            process.end()
        with self._changed:
            self._processes.difference_update(processes)

    def _take(self, given_up: Event) -> TemplateProcess:
        """A process nobody else uses, as soon as there is one."""
        with self._changed:
            while True:
                if self._closed or given_up.is_set():
                    raise refused("it was given up")
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
        """source: the line that tells it the template. Raises EngineError when no process can be started."""
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
        """The worker's answer to one line. crowded: says whether others wait. Raises RequestError, and leaves the
        process in a state in which only `end` makes sense, when it takes too long, ends or was given up."""
        if self._source is not None:
            self._answer(START_SECONDS, given_up)
            line, self._source = self._source + line, None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it ended, or was ended: there will be no answer
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._answer(RENDER_SECONDS, given_up, crowded)

    def _answer(self, seconds: float, given_up: Event, crowded: Callable[[], bool] = lambda: False) -> dict[str, str]:
        began = monotonic()
        while True:
            with suppress(Empty):
                line = self._lines.get(timeout=POLL_SECONDS)
                if not line:
                    raise refused("its process ended")
                answer: dict[str, str] = json.loads(line)
                return answer
            spent = monotonic() - began
            if given_up.is_set():
                raise refused("it was given up")
            if spent > seconds or (spent > CROWDED_SECONDS and crowded()):
                limit = min(seconds, CROWDED_SECONDS) if spent <= seconds else seconds
                raise refused(f"it did not finish within {limit:g} s")

    def end(self) -> None:
        """Leave no process, thread or pipe behind. May be called more than once, and by several threads."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # what was not sent yet
            self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        """Its lines as they come; an empty one when there will be no more."""
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")


def refused(reason: str) -> RequestError:
    return RequestError(f"the chat template cannot write this conversation: {reason}")


def end_all(processes: set[TemplateProcess]) -> None:
    for process in list(processes):
        process.end()
