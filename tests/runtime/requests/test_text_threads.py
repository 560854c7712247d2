"""The threads that encode texts, render chat templates and try grammars: whose work comes next."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from threading import Event
from weakref import ref

from together import PATIENCE_S

from draftwood.runtime.engines.shared.memory import LONG_TEXT
from draftwood.runtime.requests.text_threads import GRAMMAR_THREADS, FairThreads, TextThreads
from draftwood.runtime.structured.grammars import PROCESSES


def test_threads_work_for_clients_in_turn() -> None:
    threads, go, done = FairThreads(1, "test"), Event(), Event()
    order: list[str] = []
    threads.submit(lambda: go.wait(PATIENCE_S), "a")
    for name in ("a0", "a1", "a2", "b0", "b1", "c0"):
        threads.submit(lambda name=name: order.append(name), name[0])  # type: ignore[misc]
    threads.submit(done.set, "a")
    go.set()
    assert done.wait(PATIENCE_S)
    threads.close()
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_work_that_fails_leaves_its_thread_to_others() -> None:
    threads, done = FairThreads(1, "test"), Event()
    threads.submit(lambda: 1 // 0, None)
    threads.submit(done.set, None)
    assert done.wait(PATIENCE_S)
    threads.close()


def test_work_that_has_not_begun_never_does_after_the_end() -> None:
    threads, go, begun, late = FairThreads(1, "test"), Event(), Event(), Event()

    def wait() -> None:
        begun.set()
        go.wait(PATIENCE_S)

    threads.submit(wait, "a")
    threads.submit(late.set, "b")
    assert begun.wait(PATIENCE_S)
    threads.close()
    go.set()
    threads._pool.shutdown(wait=True)
    assert not late.is_set()


def test_the_next_grammar_is_that_of_the_next_client() -> None:
    """No more grammars begin than there are processes and one that waits: the others keep their turns."""

    async def compile_all() -> list[str]:
        threads, order = TextThreads(), list[str]()
        goes = {name: Event() for name in ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "b")}

        def work(name: str, given_up: Event) -> None:
            order.append(name)
            goes[name].wait(PATIENCE_S)

        calls = [asyncio.ensure_future(threads.compile(partial(work, name), name[0])) for name in goes]
        for number in range(3):
            while len(order) < GRAMMAR_THREADS + number:
                await asyncio.sleep(0.001)
            goes[order[number]].set()
        for go in goes.values():
            go.set()
        await asyncio.gather(*calls)
        threads.close()
        return order

    assert GRAMMAR_THREADS == PROCESSES + 1 == 3
    found = asyncio.run(compile_all())
    assert {*found[:3]} == {"a0", "a1", "a2"} and found[3:5] == ["a3", "b"]


def test_a_text_that_is_given_up_is_forgotten_while_its_thread_works_for_others() -> None:
    class Text:
        pass

    async def give_up() -> bool:
        threads, go, begun, text = TextThreads(), Event(), Event(), Text()

        def work(given_up: Event) -> bool:
            begun.set()
            return go.wait(PATIENCE_S)

        def held(text: Text, given_up: Event) -> bool:
            return bool(text)

        first = asyncio.ensure_future(threads.compute(work, LONG_TEXT + 1))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        second = asyncio.ensure_future(threads.compute(partial(held, text), LONG_TEXT + 1))
        await asyncio.sleep(0)
        known = ref(text)
        second.cancel()
        await asyncio.wait((second,))
        del second, text
        await asyncio.sleep(0)  # asyncio lets the task go
        gc.collect()
        forgotten = known() is None
        go.set()
        await first
        threads.close()
        return forgotten

    assert asyncio.run(give_up())
