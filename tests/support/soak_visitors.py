"""Visitors (clients) of a server for a soak test: each does one action after the other and records the results."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from serving import Served

from draftwood.runtime import LLM, SamplingParams

PROMPTS = [
    "import os\nimport sys\n",
    "class ThreadPool(object):\n",
    "# Überprüfung é漢🙂\ndef f(",
    "Return a new array",
]
SEEDS, CHOICES = 6, 3  # choice i is drawn with seed + i
TEMPERATURES = (0.0, 0.8)
# Few candidates per draw: with all of them, one draw in ten thousand falls upon a rounding edge.
DRAWN: dict[str, Any] = {"max_tokens": 32, "top_k": 4, "ignore_eos": True}
STOPPED = SamplingParams(max_tokens=48, temperature=0, stop=("self", "\n\n", "é"))
HOSTILE: list[bytes] = [
    b'{"prompt":"x","speculative":{"grow":"k-ary","branching":[1000,1000,1000]}}',
    b'{"prompt":"x","speculative":{"topology":' + json.dumps([-1] * 5000).encode() + b"}}",
    b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"prompt":"x","temperature":1e999}',
    b'{"prompt":"x","temperature":NaN}',
    b'{"prompt":"x","max_tokens":-1}',
    b'{"prompt":"x","n":1000000000}',
    b'{"prompt":"x","logprobs":1000000}',
    b'{"prompt":"x","stop":' + json.dumps(["a"] * 10_000).encode() + b"}",
    b'{"prompt":"\\ud800"}',
    b'{"prompt":[-1,99999999999]}',
    b'{"prompt":"x","no such field":1}',
    b'{"prompt":"' + b"x" * 400_000 + b'"}',
    b"\xff\xfe nonsense",
    b"",
]  # fmt: skip


@dataclass
class Record:
    """The record of all visits. done: visits by kind. answers: by status. wrong: errors, in words."""

    done: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    compared: int = 0
    wrong_texts: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def count(self, kind: str) -> None:
        with self.lock:
            self.done[kind] += 1

    def answer(self, status: int, what: str) -> None:
        with self.lock:
            self.answers[status] += 1
        if status >= 500 and status not in (503, 504):
            self.complain(f"{what} was answered {status}")

    def text(self, found: str, expected: str, what: str) -> None:
        with self.lock:
            self.compared += 1
            self.wrong_texts += found != expected
        if found != expected:
            self.complain(f"{what}: {found!r} instead of {expected!r}")

    def complain(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)


class Texts(NamedTuple):
    """Texts computed alone. drawn: by prompt, temperature and seed. stopped: greedy, ended by a stop string."""

    drawn: dict[tuple[str, float, int], str]
    stopped: dict[str, str]

    @classmethod
    def of(cls, bundle: Path) -> Texts:
        with LLM(bundle) as llm:
            drawn = {
                (prompt, temperature, seed): llm.generate(
                    prompt, SamplingParams(temperature=temperature, seed=seed, **DRAWN)
                )[0].text
                for prompt, temperature, seed in product(PROMPTS, TEMPERATURES, range(SEEDS))
            }
            return cls(drawn, {prompt: llm.generate(prompt, STOPPED)[0].text for prompt in PROMPTS})


class Visitor:
    """A client that does one thing after the other, until its time is over."""

    def __init__(self, server: Served, texts: Texts, record: Record, number: int) -> None:
        self._server, self._texts, self._record, self._random = server, texts, record, random.Random(number)

    def visit(self, until: float) -> None:
        asking = (self.whole, self.stream, self.choices, self.stopped, self.slow)
        others = (self.left, self.hostile, self.reading, self.storm, self.idle, self.half, self.hung_up, self.nonsense)
        while time.monotonic() < until and self._server.process.poll() is None:
            do = self._random.choice(asking + others)
            try:
                with httpx.Client(base_url=self._server.url, timeout=120) as client:
                    do(client)
                self._record.count(do.__name__)
            except httpx.ConnectError:
                self._record.count("no connection")
                time.sleep(0.1)
            except (httpx.TransportError, OSError) as error:  # a connection that asks for a text is never cut
                self._record.count("cut off")
                if do in asking:
                    self._record.complain(f"{do.__name__} was cut off: {error!r}")

    def _draw(self, seeds: int = SEEDS) -> dict[str, Any]:
        """A request whose text is known."""
        prompt, temperature = self._random.choice(PROMPTS), self._random.choice(TEMPERATURES)
        drawn = {"prompt": prompt, "temperature": temperature, "seed": self._random.randrange(seeds)}
        return {"model": "bundle"} | drawn | DRAWN

    def _compare(self, text: str, body: dict[str, Any], choice: int = 0) -> None:
        expected = self._texts.drawn[body["prompt"], body["temperature"], body["seed"] + choice]
        self._record.text(text, expected, f"choice {choice} of {body}")

    def _texts_of(self, client: httpx.Client, body: dict[str, Any]) -> list[str] | None:
        """The texts of the choices; None where the server has no place for them now."""
        answer = client.post("/completions", json=body)
        self._record.answer(answer.status_code, "a good request")
        if answer.status_code == 200:
            return [choice["text"] for choice in answer.json()["choices"]]
        if answer.status_code not in (429, 503):
            self._record.complain(f"a good request was answered {answer.status_code}: {answer.text[:200]}")
        time.sleep(0.2)
        return None

    def whole(self, client: httpx.Client) -> None:
        body = self._draw() | self._random.choice([{}, {"logprobs": 5}, {"user": f"user {self._random.random()}"}])
        for text in self._texts_of(client, body) or ():
            self._compare(text, body)

    def choices(self, client: httpx.Client) -> None:
        body = self._draw(SEEDS - CHOICES + 1) | {"n": CHOICES}
        for choice, text in enumerate(self._texts_of(client, body) or ()):
            self._compare(text, body, choice)

    def stopped(self, client: httpx.Client) -> None:
        prompt = self._random.choice(PROMPTS)
        body = {"model": "bundle", "prompt": prompt, "max_tokens": STOPPED.max_tokens, "temperature": 0}
        for text in self._texts_of(client, body | {"stop": list(STOPPED.stop)}) or ():
            self._record.text(text, self._texts.stopped[prompt], f"stopped, {prompt!r}")

    def stream(self, client: httpx.Client, pause: float = 0) -> None:
        body = self._draw() | {"stream": True, "logprobs": self._random.choice([None, 2])}
        with client.stream("POST", "/completions", json=body) as answer:
            self._record.answer(answer.status_code, "a stream")
            if answer.status_code != 200:
                time.sleep(0.2)
                return
            text = ""
            for line in answer.iter_lines():
                time.sleep(pause)
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self._compare(text, body)

    def slow(self, client: httpx.Client) -> None:
        self.stream(client, pause=0.05)

    def left(self, client: httpx.Client) -> None:
        long = self._draw() | {"max_tokens": 400, "stream": True, "n": 2}
        with client.stream("POST", "/completions", json=long) as answer:
            self._record.answer(answer.status_code, "a stream that is left")
            next(answer.iter_lines())

    def hostile(self, client: httpx.Client) -> None:
        body, path = self._random.choice(HOSTILE), self._random.choice(["/completions", "/chat/completions"])
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        self._record.answer(answer.status_code, f"{body[:60]!r}")
        if answer.status_code < 400:
            self._record.complain(f"{body[:60]!r} was answered {answer.status_code}")

    def reading(self, client: httpx.Client) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            status = client.get(f"{self._server.root}{path}").status_code
            self._record.answer(status, path)
            if status != 200:
                self._record.complain(f"{path} was answered {status}")

    def storm(self, client: httpx.Client) -> None:
        """Connections that ask for a text and are reset at once."""
        for _ in range(20):
            with self._connected() as connection:
                connection.sendall(self._head(self._long) + self._long)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def idle(self, client: httpx.Client) -> None:
        with ExitStack() as connections:
            for _ in range(40):
                connections.enter_context(self._connected())
            time.sleep(2)

    def half(self, client: httpx.Client) -> None:
        with ExitStack() as connections:
            for _ in range(10):
                each = connections.enter_context(self._connected())
                each.sendall(self._head(self._long) + self._long[: len(self._long) // 2])
            time.sleep(self._random.choice([0.01, 2]))

    def hung_up(self, client: httpx.Client) -> None:
        with self._connected() as connection:
            connection.sendall(self._head(self._long) + self._long)
            time.sleep(self._random.choice([0, 0.2]))

    def nonsense(self, client: httpx.Client) -> None:
        with self._connected() as connection:
            connection.sendall(self._random.choice([b"\x00\xff\r\n\r\n", b"GET /health\r\n", b"POST / HTTP/9\r\n\r\n"]))
            connection.settimeout(2)
            with suppress(OSError):
                connection.recv(64)

    @property
    def _long(self) -> bytes:
        return json.dumps(self._draw() | {"max_tokens": 400}).encode()

    def _connected(self) -> socket.socket:
        address = urlsplit(self._server.url)
        return socket.create_connection((address.hostname, address.port), timeout=20)

    def _head(self, body: bytes) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", f"Host: {urlsplit(self._server.url).netloc}",
                 "Content-Type: application/json", f"Content-Length: {len(body)}")  # fmt: skip
        return "\r\n".join([*lines, "", ""]).encode()
