"""Chat templates render in processes of their own, which are ended when they loop, and of which none is left. Workers:
an answer that is there counts, however late the caller looks for it; processes go to calls in turn."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from serving import wait_for

from draftwood.models.errors import RequestError
from draftwood.runtime.text import chat_template
from draftwood.runtime.text.chat_template import PROCESSES, TASK, ChatTemplate
from draftwood.runtime.text.worker import receive
from draftwood.runtime.text.workers import Task, WorkerPool, WorkerProcess, line_of

LOOP = "{% if loop %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatTemplate]:
    """Its loops end at once where others wait, and else only if they are given up."""
    monkeypatch.setattr(chat_template, "TASK", TASK._replace(seconds=600.0, crowded_seconds=0.3))
    template = ChatTemplate(LOOP)
    yield template
    template.close()
    assert not template._pool._processes


def test_one_process_serves_many_conversations() -> None:
    template = ChatTemplate("{{ x }}\u00e9{{ y|tojson }}")
    assert [template.render({"x": number, "y": "\ud83d"}) for number in range(3)] == [
        f'{number}\u00e9"\ud83d"' for number in range(3)
    ]
    (process,) = template._pool._processes
    process._process.kill()
    process._process.wait()
    assert template.render({"x": 3, "y": 1}) == "3\u00e91", "it is replaced"
    assert len(template._pool._processes) == 1
    template.close()
    with pytest.raises(RequestError, match="given up"):
        template.render({})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 10 ** 10 }}", "MiB of memory"),
        ("{{ ('%10000000000s' % 'x') | length }}", "MiB of memory"),
        (
            "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + [n.l] * 9999 %}{% endfor %}",
            "MiB",
        ),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_eats_memory_is_refused(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TASK", TASK._replace(seconds=600.0))  # a busy machine fills memory slowly
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(RequestError, match=f"chat template cannot write.*{reason}"):
            template.render({})
    template.close()


def test_a_loop_is_ended_and_the_next_conversation_has_a_new_process(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RequestError, match=r"within 0\.5 s"):
        patch.setattr(template._pool, "_task", template._pool._task._replace(seconds=0.5))
        template.render({"loop": True})
    assert not template._pool._processes
    assert template.render({"loop": False}) == "ok"


def test_loops_that_keep_others_waiting_end_sooner(template: ChatTemplate) -> None:
    with ThreadPoolExecutor(PROCESSES) as threads:
        loops = [threads.submit(template.render, {"loop": True}) for _ in range(PROCESSES)]
        wait_for(lambda: len(template._pool._processes) == PROCESSES and not template._pool._idle)
        assert template.render({"loop": False}) == "ok"
        assert any("within 0.3 s" in str(loop.exception()) for loop in loops if loop.done())
        template.close()
        assert all(isinstance(loop.exception(300), RequestError) for loop in loops)


def test_who_gives_up_ends_the_process(template: ChatTemplate) -> None:
    given_up = Event()
    with ThreadPoolExecutor(1) as threads:
        loop = threads.submit(template.render, {"loop": True}, given_up)
        wait_for(lambda: template._pool._processes)
        (process,) = template._pool._processes
        given_up.set()
        assert isinstance(loop.exception(300), RequestError) and not process.alive


def test_nothing_is_left_of_a_template_that_nobody_closed() -> None:
    template = ChatTemplate("x")
    template.render({})
    (process,) = template._pool._processes
    del template
    gc.collect()
    assert not process.alive and not any(thread.is_alive() for thread in process._threads)


def test_what_json_cannot_express_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="JSON can express"):
        template.render({"messages": [{"content": object()}]})


def test_a_template_does_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_API_KEY", "secret")
    template = ChatTemplate("x")
    template.render({})
    (process,) = template._pool._processes
    seen = Path(f"/proc/{process._process.pid}/environ")
    if seen.exists():
        assert b"secret" not in seen.read_bytes() and b"PATH" in seen.read_bytes()
    template.close()


def test_a_process_ends_with_the_one_that_started_it(template: ChatTemplate) -> None:
    """Its input ends then, whatever it is doing."""
    with ThreadPoolExecutor(1) as threads:
        loop = threads.submit(template.render, {"loop": True})
        wait_for(lambda: template._pool._processes and next(iter(template._pool._processes))._setting is None)
        (process,) = template._pool._processes
        time.sleep(0.1)  # it has begun, or will begin: either way it ends
        assert process._process.stdin is not None
        os.close(os.dup(process._process.stdin.fileno()))
        process._process.stdin.close()
        assert process._process.wait(300) == 0
        assert isinstance(loop.exception(300), RequestError)


SLOW = """
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
    (folder / "task.py").write_text(SLOW)
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
