"""Workers: an answer that is there counts, however late the caller looks for it; processes go to calls in turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from serving import wait_for

from draftwood.models.errors import RequestError
from draftwood.runtime.text.worker import receive
from draftwood.runtime.text.workers import Task, WorkerPool, WorkerProcess, line_of

TASK = """
import json, os, time
MEMORY_BYTES, CPU_SECONDS = 2**34, 600

def outcome(prepared, line):
    with open(prepared + "asked", "a") as asked:
        asked.write(json.loads(line) + "\\n")
    while not os.path.exists(prepared + json.loads(line)):
        time.sleep(0.01)
    return {"found": json.loads(line)}
"""


def task(folder: Path, processes: int = 1) -> Task:
    """Of workers that answer with the name of a file as soon as the file exists; their setting is the folder."""
    (folder / "task.py").write_text(TASK)
    return Task(folder / "task.py", processes, 600.0, 599.0, lambda reason: RequestError(f"refused: {reason}"))


def test_only_an_answer_that_is_not_there_can_be_late(tmp_path: Path) -> None:
    worker = WorkerProcess(task(tmp_path), line_of(f"{tmp_path}/"))

    def late() -> float:
        (tmp_path / "found").touch()
        wait_for(lambda: not worker._lines.empty())
        return -1.0

    assert worker.ask(line_of("found"), late, Event()) == {"found": "found"}
    with pytest.raises(RequestError, match="refused: it did not finish within -1 s"):
        worker.ask(line_of("missing"), lambda: -1.0, Event())
    worker.end()
    assert not worker.alive


def test_a_worker_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    """Its pipe is full."""
    idle = task(tmp_path)
    idle.file.write_text("import time\ntime.sleep(600)\n")
    worker = WorkerProcess(idle, line_of("x" * (1 << 20)))
    given_up, refused = Event(), list[str]()

    def ask() -> None:
        with pytest.raises(RequestError) as error:
            worker.ask(b"1\n", lambda: 600.0, given_up)
        refused.append(str(error.value))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    given_up.set()
    asking.join(30)
    worker.end()
    assert refused == ["refused: it was given up"]


def test_a_worker_ends_when_it_can_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[bytes]:
        yield b"1\n"
        raise MemoryError

    ended, received = list[int](), SimpleQueue[bytes]()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines()))
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(MemoryError):
        receive(received)
    assert (received.get(), ended) == (b"1\n", [0])


def test_a_process_goes_to_the_call_that_has_waited_longest(tmp_path: Path) -> None:
    """All others wait, and only then the limit is the short one."""
    pool = WorkerPool(task(tmp_path), f"{tmp_path}/")
    names = [str(number) for number in range(12)]
    threads = [Thread(target=pool.ask, args=(name,)) for name in names]
    for number, thread in enumerate(threads):
        thread.start()
        wait_for(lambda number=number: len(pool._waiting) == number and bool(pool._processes))  # type: ignore[misc]
        assert pool._limit() == (599.0 if number else 600.0)
    for name in names:
        (tmp_path / name).touch()
    for thread in threads:
        thread.join()
    pool.close()
    assert (tmp_path / "asked").read_text().split() == names
