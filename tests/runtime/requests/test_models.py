"""Several models, of which few are open: which is closed for another one, who waits, and what is counted."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from functools import partial
from typing import Any

import pytest

from draftwood.models.errors import ConfigError, NoRoomError
from draftwood.runtime.requests import models as module
from draftwood.runtime.requests.metrics import ServingMetrics
from draftwood.runtime.requests.models import Models, NotOpened, Opener
from draftwood.runtime.requests.stream import ShutdownError
from draftwood.runtime.serving.app import new_app
from draftwood.runtime.serving.several import SeveralModels


class Engine:
    """What Models needs of an AsyncLLM."""

    num_running, num_waiting, trouble = 0, 0, None

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.metrics, self._shelf, self._name, self.llm = ServingMetrics(), shelf, name, object()
        shelf.done.append(f"+{name}")
        if failure := shelf.failures.pop(name, None):
            raise failure

    @property
    def values(self) -> Any:
        return self.metrics.values({})

    def close(self) -> None:
        self._shelf.done.append(f"-{self._name}")

    async def drain(self, seconds: float | None) -> bool:
        return True


class Shelf:
    """Models a, b and c of 10 bytes, with what was opened and closed."""

    def __init__(self, **limits: Any) -> None:
        self.done: list[str] = []
        self.failures: dict[str, BaseException] = {}
        made: Any = Engine
        self.models = Models({name: Opener(partial(made, self, name), 10) for name in "abc"}, **limits)

    async def use(self, name: str) -> None:
        async with self.models.using(name):
            pass


def test_the_least_recently_used_model_is_closed() -> None:
    async def run() -> None:
        shelf = Shelf(max_loaded=2)
        for name in "abaca":
            await shelf.use(name)
        assert shelf.done == ["+a", "+b", "-b", "+c"]
        assert shelf.models.states == {"a": "open", "b": "closed", "c": "open"}

    asyncio.run(run())


def test_models_take_no_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 40)

    async def run() -> None:
        shelf = Shelf()
        for name in "abc":
            await shelf.use(name)
        assert shelf.done == ["+a", "+b", "-a", "+c"]  # 60 % of 40 bytes are for files

    asyncio.run(run())


def test_a_model_in_use_is_closed_after_its_requests_and_others_go_on() -> None:
    async def run() -> None:
        shelf = Shelf(max_loaded=1)
        async with shelf.models.using("a"):
            waiting, again = asyncio.create_task(shelf.use("b")), None
            await asyncio.sleep(0.01)
            again = asyncio.create_task(shelf.use("a"))  # comes after b, which came first
            await asyncio.sleep(0.01)
            assert shelf.done == ["+a"] and not waiting.done() and not again.done()
        await asyncio.gather(waiting, again)
        assert shelf.done == ["+a", "-a", "+b", "-b", "+a"]
        two = Shelf(max_loaded=2)
        async with two.models.using("a"), two.models.using("b"):
            assert two.done == ["+a", "+b"]  # neither waits for the other

    asyncio.run(run())


def test_one_opening_serves_all_who_wait_for_it() -> None:
    async def run() -> None:
        shelf = Shelf()
        first = asyncio.create_task(shelf.use("a"))
        await asyncio.sleep(0)
        first.cancel()  # a client that is gone; the model is opened nevertheless
        await asyncio.gather(shelf.use("a"), shelf.use("a"))
        assert shelf.done == ["+a"]

    asyncio.run(run())


def test_what_cannot_be_opened_is_tried_again() -> None:
    async def run() -> None:
        shelf = Shelf()
        await shelf.use("a")
        shelf.failures["b"] = ConfigError("this model has no draft")
        with pytest.raises(NotOpened):
            await shelf.use("b")
        assert shelf.models.states["a"] == "open", "it has nothing to do with memory"
        shelf.done.remove("+b")
        shelf.failures["b"] = NoRoomError("too little memory")
        await shelf.use("b")  # without a
        assert shelf.done == ["+a", "+b", "-a", "+b"]
        for failure in (ValueError("damaged"), MemoryError()):
            shelf.failures["c"] = failure
            shelf.models._models["b"].llm = None
            with pytest.raises(NotOpened, match="'c' cannot be opened"):
                await shelf.use("c")
        await shelf.use("c")
        assert shelf.models.states["c"] == "open"

    asyncio.run(run())


def test_counts_stay_when_a_model_is_closed() -> None:
    async def run() -> None:
        shelf = Shelf(max_loaded=1)
        async with shelf.models.using("a") as engine:
            engine.metrics.record_end("stop", 1.0)
        for name in ("b", "a"):
            await shelf.use(name)
            shelf.models.metrics.record_answer(200)
            text = shelf.models.to_prometheus()
            assert 'draftwood_requests_total{finish_reason="stop",model="a"} 1.0' in text
            assert text.count("# TYPE draftwood_requests_total ") == 1
        assert 'draftwood_http_responses_total{model="",status="200"} 2.0' in text

    asyncio.run(run())


def test_a_server_that_stops_opens_nothing() -> None:
    async def run() -> None:
        shelf = Shelf(max_loaded=1)
        async with shelf.models.using("a"):
            waiting = asyncio.create_task(shelf.use("c"))
            await asyncio.sleep(0.01)
            assert await shelf.models.drain()
            with pytest.raises(ShutdownError):
                await waiting
        assert not shelf.models.accepting
        with pytest.raises(ShutdownError):
            await shelf.use("b")
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        shelf.models.close()
        assert shelf.done == ["+a", "-a", "+c", "-c"]

    asyncio.run(run())


def test_a_request_waits_no_longer_than_its_time_and_a_closed_model_is_forgotten() -> None:
    async def run() -> None:
        shelf, sent = Shelf(max_loaded=1), list[Any]()

        async def told(message: Any) -> None:
            sent.append(message)

        def make(engine: Any, name: str) -> Any:
            async def app(scope: Any, receive: Any, send: Any) -> None:
                await send((engine, name)[1])

            return app

        several = SeveralModels(shelf.models, new_app(), frozenset(("/x",)), make, 0.5)

        async def ask(name: str) -> None:
            body: list[Any] = [{"body": json.dumps({"model": name}).encode()}]

            async def receive() -> Any:
                return body.pop() if body else await asyncio.sleep(60)

            await several({"type": "http", "method": "POST", "path": "/x"}, receive, told)

        await ask("a")
        async with shelf.models.using("a") as engine:
            await ask("b")
            assert sent[0] == "a" and sent[1]["status"] == 504
            kept = weakref.ref(engine)
        del engine
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        await ask("b")
        gc.collect()
        assert sent[-1] == "b" and kept() is None

    asyncio.run(run())
