"""What runs after the HTTP door, attacked in a real server process: panics in every thread, templates that loop or eat
memory, long texts, and too little memory. Everybody gets an answer, and health says what is true."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from http.client import HTTPConnection
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from checkpoints import write_checkpoint, write_tokenizer
from serving import RUNNING, Served, faulty, served, tell, wait_for, with_chat_template

from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.runtime.requests.health import MAX_FAILURES
from draftwood.runtime.text.chat_template import PROCESSES

# What a panic of tokenizers is, and everything else that is no Exception or means something to an iterator.
KINDS = ("PanicException", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "MemoryError", "StopAsyncIteration")
PLACES = ("encode", "decode", "target", "template")
# One whose process may take so many bytes of address space more than it has when the bundle is open.
LIMITED = """
import resource, sys
from draftwood.cli.main import main
from draftwood.runtime.requests.async_llm import AsyncLLM

more, begin = int(sys.argv.pop(1)), AsyncLLM.__init__

def limited(self, *arguments, **options):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))
    begin(self, *arguments, **options)

AsyncLLM.__init__ = limited
resource.setrlimit(resource.RLIMIT_AS, (1 << 44, resource.getrlimit(resource.RLIMIT_AS)[1]))
sys.exit(main(sys.argv[1:]))
"""
TEMPLATE = """{% for m in messages %}{% if 'loop' in m.content %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{% if 'eat' in m.content %}{{ (m.content * 10 ** 10) | length }}{% endif %}
{% if 'write' in m.content %}{% for i in range(99999) %}{{ m.content * 1000 }}{% endfor %}{% endif %}
{{ m.content }}{% endfor %}"""
HEALTHY = "draftwood_engine_healthy"
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 4}
SIGTERM_SECONDS = 40  # in which the process has ended; a template that looped held it for minutes


def complete(server: Served, **fields: Any) -> tuple[int, str]:
    return server.ask("/v1/completions", COMPLETION | fields)


def chat(server: Served, text: str) -> tuple[int, str]:
    return server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 4})


def children(process: int) -> list[int]:
    """Of a process; Linux only."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # this thread has ended
            found += map(int, task.read_text().split())
    return found


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("attack"), TEMPLATE)


@pytest.fixture
def fault(tmp_path: Path) -> Path:
    """The file that says what goes wrong in a server; its log is beside it."""
    return tmp_path / "fault"


def breakable(bundle: Path, fault: Path, *options: str) -> AbstractContextManager[Served]:
    return served(bundle, "--speculative", "budget=fixed", *options, program=faulty(fault, fault.with_suffix(".log")))


def test_a_panic_ends_its_request_and_no_other(bundle: Path, fault: Path) -> None:
    with breakable(bundle, fault) as server:
        for kind, place in product(KINDS, PLACES):
            tell(fault, f"{kind} {place}")
            status, text = chat(server, "hello") if place == "template" else complete(server)
            assert status in (500, 503) and "error" in json.loads(text), (place, kind, text)
            stream = server.ask("/v1/completions", COMPLETION | {"stream": True})[1]
            assert place == "template" or '"error"' in stream, (place, kind, stream)
            fault.unlink()
            assert complete(server)[0] == 200 and chat(server, "hello")[0] == 200, (place, kind)
            assert server.ask("/health") == (200, "ok")
        server.process.terminate()
        assert server.process.wait(SIGTERM_SECONDS) == 0


def test_a_few_requests_that_fail_are_no_failing_engine_and_it_recovers(bundle: Path, fault: Path) -> None:
    with breakable(bundle, fault) as server:
        tell(fault, "PanicException target")
        assert [complete(server, n=8, temperature=1)[0] for _ in range(3)] == [500] * 3
        assert [complete(server)[0] for _ in range(MAX_FAILURES - 4)] == [500] * (MAX_FAILURES - 4)
        assert server.ask("/health") == (200, "ok") and server.metric(HEALTHY) == 1
        assert complete(server)[0] == 500
        for path in ("/health", "/health/ready"):
            status, text = server.ask(path)
            assert status == 503 and text.startswith(f"failing: {MAX_FAILURES} requests") and "memory" not in text
        assert server.metric(HEALTHY) == 0
        fault.unlink()
        assert complete(server)[0] == 200 and server.metric(HEALTHY) == 1
        assert server.ask("/health") == (200, "ok") and server.ask("/health/ready") == (200, "ready")
        server.process.terminate()
        assert server.process.wait(60) == 0
    assert "an illegal memory access" in fault.with_suffix(".log").read_text()


def test_a_server_whose_engine_hangs_ends_all_the_same(bundle: Path, fault: Path) -> None:
    tell(fault, "wait")
    with breakable(bundle, fault, "--drain-timeout", "0.1") as server, ThreadPoolExecutor() as threads:
        answer = threads.submit(complete, server)
        wait_for(lambda: server.metric(RUNNING))
        server.process.terminate()
        assert server.process.wait(60) == 1
        with pytest.raises(OSError):  # its connection is gone
            answer.result()
    assert "the engine hangs" in fault.with_suffix(".log").read_text()


@pytest.mark.parametrize("kind", ["PanicException", "SystemExit", "ValueError"])
def test_when_the_engines_thread_ends_everybody_learns_it(bundle: Path, fault: Path, kind: str) -> None:
    tell(fault, "wait")
    with breakable(bundle, fault, "--max-running", "2") as server, ThreadPoolExecutor(6) as threads:
        long = [threads.submit(complete, server, max_tokens=700, ignore_eos=True) for _ in range(6)]
        wait_for(lambda: server.metric(RUNNING) == 2)
        tell(fault, f"{kind} outside")
        assert {future.result(300)[0] for future in long} <= {500, 503}
        fault.unlink()
        for path in ("/health", "/health/ready"):
            assert server.ask(path)[0] == 503
        assert complete(server)[0] == 503 and chat(server, "hello")[0] == 503
        server.process.terminate()
        server.process.wait(SIGTERM_SECONDS)


def test_templates_without_an_end_or_a_bound_are_refused_and_hold_nobody_up(bundle: Path) -> None:
    with served(bundle) as server, ThreadPoolExecutor(3 * PROCESSES) as threads:
        for text, reason in (("eat", "memory"), ("write", "characters")):
            status, answer = chat(server, text)
            assert status == 400 and "chat template" in answer and reason in answer
        loops = [threads.submit(chat, server, "loop") for _ in range(2 * PROCESSES)]
        wait_for(lambda: len(children(server.process.pid)) >= PROCESSES)
        assert server.ask("/health") == (200, "ok") and complete(server)[0] == 200
        assert chat(server, "hello")[0] == 200
        tokenized = server.ask("/tokenize", {"messages": [{"role": "user", "content": "loop"}]})
        for status, answer in (tokenized, *(future.result(300) for future in loops)):
            assert status == 400 and "chat template" in answer and "finish" in answer
        workers = children(server.process.pid)
        assert len(workers) <= PROCESSES
        server.process.terminate()
        assert server.process.wait(SIGTERM_SECONDS) == 0
    wait_for(lambda: not any(map(alive, workers)))


def test_a_client_that_leaves_ends_its_template(bundle: Path) -> None:
    with served(bundle) as server:
        address = urlsplit(server.root)
        assert address.hostname is not None and address.port is not None
        body = json.dumps({"messages": [{"role": "user", "content": "loop"}]})
        client = HTTPConnection(address.hostname, address.port)
        client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        wait_for(lambda: children(server.process.pid))
        (worker,) = children(server.process.pid)
        client.close()
        wait_for(lambda: not alive(worker))
        assert chat(server, "hello")[0] == 200


@pytest.mark.parametrize("attack", ["loop", "text", "panic"])
def test_a_server_stops_whatever_it_is_doing(bundle: Path, fault: Path, attack: str) -> None:
    with breakable(bundle, fault) as server, ThreadPoolExecutor(2 * PROCESSES) as threads:
        before = set(children(server.process.pid))
        if attack == "loop":
            asked = [threads.submit(chat, server, "loop") for _ in range(2 * PROCESSES)]
            wait_for(lambda: len(children(server.process.pid)) >= PROCESSES)
        elif attack == "text":
            asked = [threads.submit(complete, server, prompt="x\u0301 y" * 100_000) for _ in range(PROCESSES)]
        else:
            tell(fault, "SystemExit outside")
            asked = [threads.submit(complete, server) for _ in range(PROCESSES)]
        workers = set(children(server.process.pid)) - before
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SIGTERM_SECONDS) in (0, 1)
        for future in asked:
            assert future.exception(300) is not None or future.result()[0] in (400, 500, 503)
        wait_for(lambda: not any(map(alive, workers)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair with caches of 18 KB for each token."""
    folder = tmp_path_factory.mktemp("wide")
    wide: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    for role, seed, shape in (("target", 0, wide | {"num_hidden_layers": 4}), ("draft", 1, {})):
        write_checkpoint(folder / role, "gqa", seed=seed, max_position_embeddings=4096, **shape)
        write_tokenizer(folder / role)
    return folder


@pytest.fixture(scope="module", params=["native", "onnxruntime"])
def wide_bundle(request: pytest.FixtureRequest, pair: Path) -> Iterator[Path]:
    output = pair / request.param
    build(BuildOptions(pair / "target", pair / "draft", output, backend=request.param), lambda step: lambda: None)
    yield output


def crowd(server: Served, requests: int, prompt: int, tokens: int) -> Counter[int]:
    """Statuses of so many different requests at a time."""

    def one(number: int) -> int:
        prompt_ids = [5 + number % 200] * prompt
        fields = {"prompt": prompt_ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return server.ask("/v1/completions", fields, seconds=1200)[0]

    with ThreadPoolExecutor(requests) as threads:
        return Counter(threads.map(one, range(requests)))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux'")
@pytest.mark.parametrize("long", [False, *(pytest.param(more, marks=pytest.mark.full) for more in (300, 500))])
def test_requests_wait_for_memory(wide_bundle: Path, tmp_path: Path, long: int) -> None:
    """64 of them may fill three times the slots that there is memory for. long: the megabytes of long requests."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED, encoding="utf-8")
    native = wide_bundle.name == "native"  # without admission by memory this one refuses some, and the other is slow
    program = (str(script), str((long or (300 if native else 400)) << 20))
    prompt, tokens = (600, 60) if long else (150 if native else 50, 4)
    with served(wide_bundle, "--max-running", "64", "--speculative", "budget=fixed", program=program) as server:
        assert crowd(server, 64, prompt, tokens) == {200: 64}
        if not long:
            status, text = complete(server, prompt=[5] * 3900, max_tokens=100)
            assert status == 400 and "--kv-cache-bytes" in text and "max_tokens" in text
        assert server.ask("/health") == (200, "ok") and complete(server)[0] == 200
