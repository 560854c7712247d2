"""WorkerPool: processes that can be killed and have limits, for what reads hostile input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any, NamedTuple
from weakref import finalize

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

Answer = dict[str, str]


class Task(NamedTuple):
    """What workers do, and their limits."""

    file: Path  # see `worker.py`
    processes: int  # at most; each starts when it is needed
    seconds: float  # time limit of one question
    crowded_seconds: float  # the same while other threads wait for a process
    refuse: Callable[[str], RequestError]  # makes the error for a reason


class WorkerPool:
    """Threads get a process in the order of their calls. `close`, or the end of the object, ends the processes."""

    def __init__(self, task: Task, setting: Any) -> None:
        """setting: for `prepare` of the task, as JSON has it."""
        self._task, self._setting = task, line_of(setting)
        self._changed = Condition()
        self._idle: list[WorkerProcess] = []
        self._processes: set[WorkerProcess] = set()
        self._waiting = deque[object]()  # one for each thread that waits for a process
        self._closed = False
        finalize(self, end_all, self._processes)

    def ask(self, question: Any, given_up: Event | None = None) -> Answer:
        """A worker's answer to a question. given_up: another thread sets it when the answer is no longer needed; the
        process is then ended. Raises the refusal if the work takes too long, fails, or was given up."""
        line, given_up = line_of(question), given_up or Event()
        process = self._take(given_up)
        try:
            answer = process.ask(line, self._limit, given_up)
        except BaseException:
            self._give_back(process, usable=False)
            raise
        self._give_back(process, usable=True)
        return answer

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

    def _take(self, given_up: Event) -> WorkerProcess:
        """Wait for a process that no other thread uses."""
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                while True:
                    if self._closed or given_up.is_set():
                        raise self._task.refuse("it was given up")
                    if self._waiting[0] is place and (process := self._free()) is not None:
                        return process
                    self._changed.wait(POLL_SECONDS)
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def _free(self) -> WorkerProcess | None:
        """An idle process or a new one; None if all are in use."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._end(process)
        if len(self._processes) == self._task.processes:
            return None
        process = WorkerProcess(self._task, self._setting)
        self._processes.add(process)
        return process

    def _limit(self) -> float:
        """The present limit of a question, in seconds."""
        with self._changed:
            return self._task.crowded_seconds if self._waiting else self._task.seconds

    def _give_back(self, process: WorkerProcess, usable: bool) -> None:
        with self._changed:
            if usable and not self._closed:
                self._idle.append(process)
            else:
                self._end(process)
            self._changed.notify_all()

    def _end(self, process: WorkerProcess) -> None:
        process.end()
        self._processes.discard(process)


class WorkerProcess:
    """One running worker, see `worker.py`."""

    def __init__(self, task: Task, setting: bytes) -> None:
        """setting: the first line of the input. Raises EngineError if the process cannot be started."""
        self._refuse = task.refuse
        paths = filter(os.path.isabs, sys.path)
        command = [sys.executable or "python3", "-I", "-c", BOOT, str(PROGRAM), str(task.file), *paths]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            raise EngineError(f"cannot start a process for {task.file.name} ({error}): see `ulimit -u`") from error
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        work = (self._read, self._write)
        self._threads = [Thread(target=each, name="draftwood-worker", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()
        self._setting: bytes | None = setting

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, seconds: Callable[[], float], given_up: Event) -> Answer:
        """The worker's answer to one line. seconds: returns the present time limit. given_up: see WorkerPool.ask.
        Raises the refusal if the worker takes too long, ends or was given up; afterwards only `end` may be called."""
        if self._setting is not None:
            self._unsent.put(self._setting)
            self._answer(lambda: START_SECONDS, given_up)
            self._setting = None
        self._unsent.put(line)
        return self._answer(seconds, given_up)

    def _answer(self, seconds: Callable[[], float], given_up: Event) -> Answer:
        began = monotonic()
        while True:
            is_late = monotonic() - began > (limit := seconds())
            with suppress(Empty):  # an answer that is there counts, even if this thread looks for it late
                line = self._lines.get(timeout=0 if is_late else POLL_SECONDS)
                if not line:
                    raise self._refuse("its process ended")
                answer: Answer = json.loads(line)
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


def line_of(content: Any) -> bytes:
    """A line of JSON. Raises TypeError, ValueError or RecursionError for what JSON cannot express."""
    return (json.dumps(content) + "\n").encode()


def end_all(processes: set[WorkerProcess]) -> None:
    for process in list(processes):
        process.end()
