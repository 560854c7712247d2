"""Clients that read slowly or not at all: nobody else waits for them, their places come back, the server stops."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, TypeVar

import pytest
from serving import wait_for
from together import held

from draftwood.runtime import LLM, AsyncLLM, SamplingParams

httpx = pytest.importorskip("httpx", reason="needs httpx")
from starlette.types import ASGIApp, Receive, Scope, Send  # noqa: E402 - only where fastapi is installed

from draftwood.runtime.serving.app import create_app  # noqa: E402
from draftwood.runtime.serving.http import connection_limit, connections  # noqa: E402
from draftwood.runtime.serving.http import server as http_server  # noqa: E402
from draftwood.runtime.serving.http.guard import Limits, RequestGuard  # noqa: E402

T = TypeVar("T")
BODY = {"model": "m", "prompt": "hello", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle) as llm:
        yield llm


def openai_api(async_llm: AsyncLLM, **limits: Any) -> ASGIApp:
    return create_app(async_llm, "m", Limits(10_000, 100, **limits))


def against(
    llm: LLM,
    client: Callable[[socket.socket, AsyncLLM], T],
    app: Callable[[AsyncLLM], ASGIApp] = openai_api,
    unread_seconds: float = 60,
) -> T:
    """What `client` returns, in a thread, while this one serves `app`; then comes a SIGTERM."""
    result: Future[T] = Future()
    with AsyncLLM(llm) as async_llm, http_server.bind("127.0.0.1", 0, unread_seconds) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the kernel reads along for the client

        def visit() -> None:
            try:
                result.set_result(client(listener, async_llm))
            except BaseException as error:
                result.set_exception(error)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=visit)
        serving = http_server.serve(app(async_llm), async_llm, listener, 120, "error", thread.start)
        assert asyncio.run(serving)
        thread.join()
    return result.result()


def asked(listener: socket.socket, body: dict[str, Any]) -> socket.socket:
    """A connection on which this was asked, and from which little is read ahead."""
    content = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(120)
    client.connect(listener.getsockname())
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


def post(listener: socket.socket, body: dict[str, Any]) -> Any:
    host, port = listener.getsockname()
    return httpx.post(f"http://{host}:{port}/v1/completions", json=body, timeout=120)


def test_nobody_waits_for_a_slow_reader_and_it_gets_all_of_its_text(llm: LLM) -> None:
    def visit(listener: socket.socket, async_llm: AsyncLLM) -> str:
        with held(llm.target):
            slow = asked(listener, {**BODY, "max_tokens": 900, "logprobs": 5, "stream": True})
            wait_for(lambda: async_llm.num_running == 1)
        with slow:
            with ThreadPoolExecutor(4) as threads:
                answers = [threads.submit(post, listener, {**BODY, "max_tokens": 20}) for _ in range(8)]
                texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
            assert texts == {llm.generate("hello", SamplingParams(20, temperature=0, ignore_eos=True))[0].text}
            wait_for(lambda: not async_llm.num_running)  # the engine did not wait for it either
            response = HTTPResponse(slow)
            response.begin()
            lines = [line[len(b"data: ") :] for line in response if line.startswith(b"data: {")]
            return "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    expected = llm.generate("hello", SamplingParams(900, temperature=0, ignore_eos=True))[0].text
    assert against(llm, visit) == expected


def test_a_connection_that_says_nothing_is_closed_and_a_long_answer_is_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a client that never asks, nor one that never finishes asking, nor one that stops after an answer."""
    asking = b"POST /v1/completions HTTP/1.1\r\nHost"

    def visit(listener: socket.socket, async_llm: AsyncLLM) -> int:
        def complete() -> int:
            while True:
                with suppress(httpx.TransportError):  # this thread was too slow to ask: then no request was aborted
                    return int(post(listener, {**BODY, "max_tokens": 900}).json()["usage"]["completion_tokens"])

        with ThreadPoolExecutor(1) as threads, held(llm.target):  # the answer takes longer than all that follows
            answer = threads.submit(complete)
            wait_for(lambda: async_llm.num_running == 1)
            for said, answers in ((b"", 0), (asking, 0), (asking, 1)):
                while heard(listener, answers, said) != answers:  # this thread was too slow to ask
                    pass
        assert 'finish_reason="abort"' not in async_llm.to_prometheus()
        return answer.result()

    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(connections, "KEPT_SECONDS", 0.1)
    assert against(llm, visit) == 900


def heard(listener: socket.socket, requests: int, said: bytes) -> int:
    """The answers to so many requests on one connection, which then says this and waits for its end."""
    answers = 0
    with suppress(ConnectionError), socket.create_connection(listener.getsockname(), timeout=120) as silent:
        for _ in range(requests):
            silent.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            part = b"-"
            while part and part[-2:] != b"ok":
                part = silent.recv(1000)
            answers += bool(part)
        silent.sendall(said)
        assert silent.recv(1) == b""
    return answers


def test_answers_that_nobody_reads_take_bounded_memory(llm: LLM) -> None:
    """The connection of one that does not read is closed, and a whole answer that is too large ends as an error."""
    many = {**BODY, "max_tokens": 400, "logprobs": 5}

    def visit(listener: socket.socket, async_llm: AsyncLLM) -> tuple[bytes, Any, Any]:
        with asked(listener, {**many, "stream": True}) as slow:
            wait_for(lambda: 'finish_reason="abort"' in async_llm.to_prometheus())
            read, part = b"", b"-"
            with suppress(ConnectionError):
                while part := slow.recv(1 << 16):
                    read += part
        large, small = (post(listener, {**many, "max_tokens": tokens}).json() for tokens in (400, 20))
        return read, large, small

    read, large, small = against(llm, visit, partial(openai_api, answer_bytes=100_000))
    assert b"200 OK" in read and b"[DONE]" not in read
    assert large["error"]["code"] == "out_of_memory"
    assert small["usage"]["completion_tokens"] == 20


@pytest.mark.skipif(sys.platform != "linux", reason="limits are different elsewhere")
def test_as_many_files_may_be_open_as_there_may_be_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = before[1] // 2 if before[1] > 0 else 5000
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, wanted), before[1]))
        assert connection_limit.raise_file_limit(wanted) == wanted
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert wanted < raised <= wanted + 512
        assert connection_limit.raise_file_limit(wanted // 2) == wanted // 2
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def endless(seen: threading.Event) -> Callable[[AsyncLLM], ASGIApp]:
    """An answer without an end, once `seen` is set, to whoever asks for "much", at most one at a time."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        much = b"much" in (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while much and not seen.is_set():
            await asyncio.sleep(0.01)
        while much and not gone.done():
            await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
        gone.cancel()
        await send({"type": "http.response.body", "body": b"enough"})

    return lambda async_llm: RequestGuard(app, Limits(10_000, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a client does not read")
def test_the_place_of_a_client_that_reads_nothing_comes_back(llm: LLM) -> None:
    seen = threading.Event()

    def visit(listener: socket.socket, async_llm: AsyncLLM) -> None:
        with asked(listener, {"prompt": "much"}):
            wait_for(lambda: post(listener, {}).status_code == 429)
            seen.set()
            wait_for(lambda: post(listener, {}).status_code == 200)

    against(llm, visit, endless(seen), unread_seconds=0.5)


def test_the_end_of_the_server_does_not_wait_for_one_that_reads_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped, seen = list[float](), threading.Event()
    seen.set()

    def visit(listener: socket.socket, async_llm: AsyncLLM) -> socket.socket:
        client = asked(listener, {"prompt": "much"})
        assert client.recv(12) == b"HTTP/1.1 200"
        stopped.append(time.monotonic())
        return client

    monkeypatch.setattr(http_server, "FLUSH_SECONDS", 0.5)
    against(llm, visit, endless(seen), unread_seconds=600).close()
    assert 0.5 <= time.monotonic() - stopped[0] < 300
    assert capfd.readouterr().err == ""
