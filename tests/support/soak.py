"""A soak test: many kinds of clients use a real server for a long time; its texts and its memory are checked.

Visitors do one action after the other: they ask for texts, whole and as streams, read slowly, leave, and send what is
no request. Every deterministic text (greedy or seeded) is compared with the text that this process computes alone. The
program prints and writes a result. Its exit code is 1 if a text was wrong, an answer was a server error, memory or
descriptors grew, or the server ended.

    python tests/support/soak.py --seconds 3600 --output build/soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import date
from itertools import product
from pathlib import Path
from subprocess import TimeoutExpired
from threading import Thread
from typing import IO, Any, NamedTuple

import httpx
from bundling import DEMO
from connections import HEAD, opened, posted
from serving import Served, served, wait_for
from steps import quiet

from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.runtime import LLM, SamplingParams

CLIENTS = 8
GROWTH_BYTES = 48 << 20  # from the first third on; what is kept per request would be more within the hour
WORKERS = min(32, (os.cpu_count() or 1) + 4)  # asyncio's worker threads, which start when they are needed
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
STOP = ["self", "\n\n", "é"]
HOSTILE: list[Any] = [
    {"speculative": {"grow": "k-ary", "branching": [1000, 1000, 1000]}},
    {"max_tokens": -1},
    {"logprobs": 1000000},
    {"stop": ["a"] * 10_000},
    {"prompt": [-1, 99999999999]},
    {"prompt": "x" * 400_000},
    {"no such field": 1},
]
NONSENSE = (b"", b"\x00\xff\r\n\r\n", b"GET /health\r\n", HEAD + b"Content-Length: 100\r\n\r\n{", posted(DRAWN))


class Size(NamedTuple):
    """The size of a process: resident bytes, open files, threads."""

    resident: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(pages * 4096, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


class Record:
    """What happened in all visits. Threads append to lists, which is safe."""

    def __init__(self) -> None:
        self.visits, self.answers = list[str](), list[int]()  # kinds, statuses
        self.right, self.complaints = list[bool](), list[str]()  # of the texts that were compared

    def answer(self, status: int, what: str) -> None:
        self.answers.append(status)
        if status >= 500 and status not in (503, 504):
            self.complaints.append(f"{what} was answered {status}")

    def text(self, found: str, expected: str, what: str) -> None:
        self.right.append(found == expected)
        if found != expected:
            self.complaints.append(f"{what}: {found!r} instead of {expected!r}")


Texts = dict[tuple[str, float, int], str]  # computed alone: by prompt, temperature and seed


def texts_of(bundle: Path) -> Texts:
    with LLM(bundle) as llm:
        params = {key: SamplingParams(temperature=key[1], seed=key[2], **DRAWN)
                  for key in product(PROMPTS, TEMPERATURES, range(SEEDS))}  # fmt: skip
        return {key: llm.generate(key[0], each)[0].text for key, each in params.items()}


class Visitor:
    """A client that does one thing after the other, until its time is over."""

    def __init__(self, server: Served, texts: Texts, record: Record, number: int) -> None:
        self._server, self._texts, self._record, self._random = server, texts, record, random.Random(number)

    def visit(self, until: float) -> None:
        asking = (self.whole, self.stream, self.stream)
        while time.monotonic() < until and self._server.process.poll() is None:
            do = self._random.choice((*asking, self.left, self.hostile, self.state, self.storm))
            try:
                with httpx.Client(base_url=self._server.url, timeout=120) as client:
                    do(client)
                self._record.visits.append(do.__name__)
            except (httpx.TransportError, OSError) as error:
                self._record.visits.append("cut off")
                if do in asking and not isinstance(error, httpx.ConnectError):
                    self._record.complaints.append(f"{do.__name__} was cut off: {error!r}")

    def _draw(self, choices: int) -> dict[str, Any]:
        """A request whose texts are known."""
        drawn = {"seed": self._random.randrange(SEEDS - choices + 1), "n": choices, **DRAWN}
        return drawn | {"prompt": self._random.choice(PROMPTS), "temperature": self._random.choice(TEMPERATURES)}

    def _compare(self, body: dict[str, Any], choice: int, text: str) -> None:
        expected = self._texts[body["prompt"], body["temperature"], body["seed"] + choice]
        ends = [expected.find(stop) for stop in body.get("stop", ()) if stop in expected]
        self._record.text(text, expected[: min(ends, default=None)], f"choice {choice} of {body}")

    def whole(self, client: httpx.Client) -> None:
        others: list[dict[str, Any]] = [{}, {"logprobs": 5}, {"user": f"user {self._random.random()}"}, {"stop": STOP}]
        body = self._draw(self._random.choice([1, CHOICES])) | self._random.choice(others)
        answer = client.post("/completions", json=body)
        self._record.answer(answer.status_code, "a good request")
        if answer.status_code == 200:
            for choice in answer.json()["choices"]:
                self._compare(body, choice["index"], choice["text"])
        elif answer.status_code not in (429, 503):
            self._record.complaints.append(f"a good request was answered {answer.status_code}: {answer.text[:200]}")

    def stream(self, client: httpx.Client) -> None:
        """Read slowly, or as fast as it comes."""
        pause = self._random.choice([0, 0.05])
        body = self._draw(1) | {"stream": True, "logprobs": self._random.choice([None, 2])}
        with client.stream("POST", "/completions", json=body) as answer:
            self._record.answer(answer.status_code, "a stream")
            if answer.status_code != 200:
                return
            text = ""
            for line in answer.iter_lines():
                time.sleep(pause)
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self._compare(body, 0, text)

    def left(self, client: httpx.Client) -> None:
        long = self._draw(2) | {"max_tokens": 400, "stream": True}
        with client.stream("POST", "/completions", json=long) as answer:
            self._record.answer(answer.status_code, "a stream that is left")
            next(answer.iter_lines())

    def hostile(self, client: httpx.Client) -> None:
        body = {"prompt": "x", **self._random.choice(HOSTILE)}
        answer = client.post("/completions", json=body)
        self._record.answer(answer.status_code, str(body)[:60])
        if answer.status_code < 400:
            self._record.complaints.append(f"{str(body)[:60]} was answered {answer.status_code}")

    def state(self, client: httpx.Client) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            status = client.get(f"{self._server.root}{path}").status_code
            self._record.answer(status, path)
            if status != 200:
                self._record.complaints.append(f"{path} was answered {status}")

    def storm(self, client: httpx.Client) -> None:
        """Connections that say nothing, nonsense, half a request, or a whole one, and wait or leave at once."""
        with ExitStack() as connections:
            for _ in range(30):
                connections.enter_context(opened(self._server, self._random.choice(NONSENSE)))
            time.sleep(self._random.choice([0, 0.2, 2]))


def native_demo(bundle: Path) -> Path:
    build(BuildOptions(DEMO / "target", DEMO / "draft", bundle, backend="native"), quiet)
    return bundle


def soak(bundle: Path, seconds: float, clients: int = CLIENTS, every: float = 60) -> dict[str, Any]:
    """Run `clients` visitors for `seconds`, and measure the server's size `every` so many seconds. Returns the
    result."""
    texts, record, sizes, logged = texts_of(bundle), Record(), list[tuple[float, Size]](), Counter[str]()
    with served(bundle, "--max-running", "4") as server:

        def drain(stream: IO[str]) -> None:  # a full pipe would hold the server up
            for line in stream:
                logged["bytes"] += len(line)

        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            Thread(target=drain, args=(stream,), daemon=True).start()
        begin = time.monotonic()

        def measure() -> None:
            sizes.append((round(time.monotonic() - begin, 1), Size.of(server.process.pid)))

        with ThreadPoolExecutor(clients) as threads:
            visitors = [Visitor(server, texts, record, number) for number in range(clients)]
            visits = [threads.submit(visitor.visit, begin + seconds) for visitor in visitors]
            while not all(visit.done() for visit in visits) and server.process.poll() is None:
                measure()
                wait(visits, timeout=every)
            for visit in visits:
                visit.result()
        if server.process.poll() is None:
            try:
                wait_for(lambda: server.idle, 120)
            except (AssertionError, OSError) as error:
                record.complaints.append(f"the server never became idle: {error!r}")
            time.sleep(1)  # connections are closed a moment after their last answer
            measure()
            server.process.terminate()
        try:
            code: int | None = server.process.wait(60)
        except TimeoutExpired:
            code = None
    if code != 0:
        record.complaints.append(f"the server ended with {code}")
    settled, last = sizes[len(sizes) // 3][1], sizes[-1][1]
    growth = last.resident - settled.resident
    if growth > GROWTH_BYTES or last.files > settled.files + 200 or last.threads > settled.threads + WORKERS:
        record.complaints.append(f"the server grew from {settled} to {last}")
    return {
        "date": date.today().isoformat(),
        "seconds": round(sizes[-1][0]),
        "visits": dict(sorted(Counter(record.visits).items())),
        "answers": {str(status): count for status, count in sorted(Counter(record.answers).items())},
        "texts_compared": len(record.right),
        "texts_wrong": record.right.count(False),
        "resident_growth_mib": round(growth / 2**20, 1),
        "log_bytes": logged["bytes"],
        "exit_code": code,
        "complaints": len(record.complaints),
        "first_complaints": record.complaints[:20],
        "sizes": [{"second": at, **size._asdict()} for at, size in sizes],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        every = min(60, options.seconds / 6)
        result = soak(native_demo(Path(folder) / "bundle"), options.seconds, options.clients, every)
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 1 if result["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
