"""WorkerPool: a few worker processes for several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Event
from weakref import finalize

from ...models.errors import RequestError
from .worker_process import POLL_SECONDS, WorkerProcess


class WorkerPool:
    """May be used from several threads, which get a process in the order of their calls. Each process starts when it is
    needed. `close` ends the processes; so does the end of the object."""

    def __init__(
        self,
        task: Path,
        setting: bytes,
        refuse: Callable[[str], RequestError],
        processes: int,
        seconds: float,
        crowded_seconds: float,
    ) -> None:
        """task, setting, refuse: see WorkerProcess. processes: most processes. seconds: time limit of one line;
        crowded_seconds: the same while other threads wait for a process."""
        self._task, self._setting, self._refuse = task, setting, refuse
        self._most, self._seconds, self._crowded_seconds = processes, seconds, crowded_seconds
        self._changed = Condition()
        self._idle: list[WorkerProcess] = []
        self._processes: set[WorkerProcess] = set()
        self._waiting = deque[object]()  # one for each thread that waits for a process
        self._closed = False
        finalize(self, end_all, self._processes)

    def ask(self, line: bytes, given_up: Event | None = None) -> dict[str, str]:
        """A worker's answer to one line. given_up: another thread sets it when the answer is no longer needed; the
        process is then ended. Raises the refusal if the work takes too long, fails, or was given up."""
        given_up = given_up or Event()
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
                        raise self._refuse("it was given up")
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
        if len(self._processes) == self._most:
            return None
        process = WorkerProcess(self._task, self._setting, self._refuse)
        self._processes.add(process)
        return process

    def _limit(self) -> float:
        """The present limit of a line, in seconds."""
        with self._changed:
            return self._crowded_seconds if self._waiting else self._seconds

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


def end_all(processes: set[WorkerProcess]) -> None:
    for process in list(processes):
        process.end()
