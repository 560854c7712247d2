"""Twenty seconds of everything at once against a real server: right answers, and a process as large as before."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from serving import Served, served, wait_for

from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig

pytest.importorskip("fastapi", reason="needs the [serve] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")

SECONDS, WARM_SECONDS = 13.0, 5.0
CLIENTS = 8
GROWTH_BYTES = 8 << 20  # the allocator's own unrest; 10 KB per request would be more
WORKERS = min(32, (os.cpu_count() or 1) + 4)  # asyncio's, which appear as they are needed
KINDS = ("whole", "stream", "left", "hung up", "refused", "nonsense", "half a body")
# Few candidates per draw: with all 288, one draw in ten thousand falls upon a rounding edge.
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.8 * (seed % 2), top_k=4, seed=seed, ignore_eos=True)
    for seed in range(6)
]


class Size(NamedTuple):
    """Of a process: resident bytes, open files, threads."""

    resident: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(pages * 4096, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


class Visitor:
    """A client that does one thing after the other."""

    def __init__(self, server: Served, texts: list[str], number: int) -> None:
        self._server, self._texts, self._random = server, texts, random.Random(number)

    def visit(self, seconds: float) -> Counter[str]:
        """How often each thing was done."""
        end, done = time.monotonic() + seconds, Counter[str]()
        with httpx.Client(base_url=self._server.url, timeout=30) as client:
            while time.monotonic() < end:
                kind = self._random.choice(KINDS)
                self._do(kind, client)
                done[kind] += 1
        return done

    def _do(self, kind: str, client: Any) -> None:
        seed = self._random.randrange(len(PARAMS))
        params = PARAMS[seed]
        body = {"model": "bundle", "prompt": "hello", "max_tokens": params.max_tokens, "seed": seed}
        body |= {"temperature": params.temperature, "top_k": params.top_k, "ignore_eos": True}
        if kind == "whole":
            answer = client.post("/completions", json=body)
            assert answer.json()["choices"][0]["text"] == self._texts[seed]
        elif kind == "stream":
            with client.stream("POST", "/completions", json=body | {"stream": True, "logprobs": 2}) as answer:
                *events, done = (line[len("data: ") :] for line in answer.iter_lines() if line)
            assert done == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == self._texts[seed]
        elif kind == "left":
            long = body | {"max_tokens": 900, "stream": True, "n": 2}
            with client.stream("POST", "/completions", json=long) as answer:
                next(answer.iter_lines())
        elif kind == "refused":
            assert client.post("/completions", json=body | {"max_tokens": 0}).status_code == 400
        else:
            self._raw(kind, json.dumps(body | {"max_tokens": 900}).encode())

    def _raw(self, kind: str, body: bytes) -> None:
        """What an HTTP client cannot do."""
        address = urlsplit(self._server.url)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((address.hostname, address.port), timeout=20) as client:
            if kind == "nonsense":
                client.sendall(b"\x00\xff\r\n\r\n")
                assert client.recv(12) == b"HTTP/1.1 400"
            else:
                sent = body if kind == "hung up" else body[: len(body) // 2]
                client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
                time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_a_server_is_as_large_as_before(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, SpeculativeConfig(budget="fixed")) as llm:
        texts = [llm.generate("hello", params).text for params in PARAMS]
    with served(tiny_bundle, "--budget", "fixed", "--max-running", "4") as server:
        visitors = [Visitor(server, texts, number) for number in range(CLIENTS)]

        def size_after(seconds: float) -> tuple[Size, Counter[str]]:
            with ThreadPoolExecutor(CLIENTS) as threads:
                done = sum(threads.map(lambda visitor: visitor.visit(seconds), visitors), Counter[str]())
            wait_for(lambda: server.idle)
            time.sleep(0.2)  # connections are closed a moment after their last answer
            return Size.of(server.process.pid), done

        before, _ = size_after(WARM_SECONDS)
        after, done = size_after(SECONDS)
        server.process.terminate()
        assert server.process.wait(10) == 0
    assert set(done) == set(KINDS) and done.total() > 200
    assert after.resident - before.resident < GROWTH_BYTES
    assert after.files <= before.files + 1 and after.threads <= before.threads + WORKERS
