"""The openai client and `draftwood serve`, two real processes: crowds, vanishing clients, killed servers, nonsense."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import RUNNING, Served, pausable, paused, served, wait_for, with_chat_template

from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig

pytest.importorskip("fastapi", reason="needs the [serve] extra")
openai = pytest.importorskip("openai", reason="needs the openai package")
httpx = pytest.importorskip("httpx", reason="needs httpx")

MODEL = "tiny"
FIXED = ("--speculative", "budget=fixed")
LONG: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
ABORTED = 'draftwood_requests_total{finish_reason="abort"}'
PICKY_TEMPLATE = """{% if messages[0].role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}
{% for m in messages %}{{ m.role + m.content + '' * (1 // m.content|length) }}{% endfor %}"""
NO_REQUESTS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS, where none is spoken
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: x\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",
)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = with_chat_template(tiny_bundle, tmp_path_factory.mktemp("faults"), PICKY_TEMPLATE)
    return copy


@pytest.fixture(scope="module")
def pause(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that slows down the server's passes."""
    return tmp_path_factory.mktemp("pause") / "file"


@pytest.fixture(scope="module")
def server(bundle: Path, pause: Path) -> Iterator[Served]:
    limits = ("--max-running", "4", "--max-waiting", "28")
    with served(bundle, *FIXED, *limits, program=pausable(pause)) as running:
        yield running


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, SpeculativeConfig(budget="fixed")) as llm:
        yield llm


def connected(server: Served) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def some_request(number: int) -> dict[str, Any]:
    """A request with settings of its own: SamplingParams' names, and the same text every time."""
    draw = random.Random(number)
    settings: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": number}
    settings["temperature"] = draw.choice([0.0, 0.7, 1.0])
    settings["top_k"] = 4  # with all candidates, one draw in ten thousand falls upon a rounding edge
    for name, values in (
        ("top_p", [0.5, 0.9]),
        ("min_p", [0.05]),
        ("repetition_penalty", [1.2]),
        ("presence_penalty", [0.5]),
        ("min_tokens", [1, settings["max_tokens"]]),
        ("stop", ["e", ["a", "zz"]]),
        ("ignore_eos", [True]),
        ("stop_token_ids", [(40, 41)]),
    ):
        if draw.random() < 0.4:
            settings[name] = draw.choice(values)
    return settings


def answered(client: Any, prompt: str, settings: dict[str, Any], n: int, stream: bool) -> tuple[list[str], Any]:
    """Texts and usage of one request."""
    standard = {"max_tokens", "seed", "temperature", "top_p", "presence_penalty", "stop"}
    options = {name: value for name, value in settings.items() if name in standard}
    extra = {name: value for name, value in settings.items() if name not in standard}
    if not stream:
        answer = client.completions.create(model=MODEL, prompt=prompt, n=n, extra_body=extra, **options)
        return [choice.text for choice in answer.choices], answer.usage
    texts, usage = [""] * n, None
    options["stream_options"] = {"include_usage": True}
    for chunk in client.completions.create(model=MODEL, prompt=prompt, n=n, stream=True, extra_body=extra, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage
    return texts, usage


def test_a_crowd_gets_what_each_would_get_alone(server: Served, llm: LLM) -> None:
    """Eight clients at a time, each with requests of every kind, some taken back, some refused."""

    def visit(number: int) -> list[tuple[list[str], Any]]:
        with connected(server) as client:
            with client.completions.create(**LONG, stream=True) as cancelled:
                next(iter(cancelled))
            with pytest.raises(openai.BadRequestError, match="min_tokens"):
                client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body={"min_tokens": 2})
            kinds = ((1, True), (2, False), (2, True))
            return [
                answered(client, f"prompt {number}", some_request(number + index), n, stream)
                for index, (n, stream) in enumerate(kinds)
            ]

    numbers = range(0, 48, 3)
    with ThreadPoolExecutor(8) as threads:
        visits = list(threads.map(visit, numbers))
    for number, answers in zip(numbers, visits, strict=True):
        for index, (texts, usage) in enumerate(answers):
            params = SamplingParams(**some_request(number + index))
            choices = [replace(params, seed=number + index + choice) for choice in range(len(texts))]
            expected = [llm.generate(f"prompt {number}", choice)[0] for choice in choices]
            assert texts == [result.text for result in expected], params
            assert usage.completion_tokens == sum(len(result.token_ids) for result in expected)
    wait_for(lambda: server.idle)


def test_a_client_that_is_killed_frees_the_engine(server: Served, pause: Path) -> None:
    code = f"""
import openai
client = openai.OpenAI(base_url={server.url!r}, api_key="none")
for chunk in client.completions.create(**{LONG!r}, stream=True):
    pass
"""
    aborted = server.metric(ABORTED)
    with paused(pause, 0.05), subprocess.Popen([sys.executable, "-c", code]) as client:
        try:
            wait_for(lambda: server.metric(RUNNING))
        finally:
            client.kill()
        wait_for(lambda: server.idle)
    assert server.metric(ABORTED) == aborted + 1


def test_a_template_that_fails_is_the_clients_error(server: Served, llm: LLM) -> None:
    good = [{"role": "user", "content": "hello"}]
    with connected(server) as client:
        for messages, named in (
            ([{"role": "system", "content": "be kind"}], "no system message, please"),
            ([{"role": "user", "content": ""}], "chat template cannot write.*by zero"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                client.chat.completions.create(model=MODEL, messages=messages)
        answer = client.chat.completions.create(model=MODEL, messages=good, max_tokens=9, seed=1)
    assert answer.choices[0].message.content == llm.chat(good, SamplingParams(max_tokens=9, seed=1))[0].text


@pytest.mark.parametrize("nonsense", NO_REQUESTS)
def test_what_is_no_http_is_a_400_and_the_end_of_the_connection(server: Served, nonsense: bytes) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=120) as client:
        client.sendall(nonsense)
        assert client.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 413")
    with connected(server) as client:
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=2, seed=0).usage.prompt_tokens == 2


def test_a_killed_server_is_an_error_for_its_clients_at_once(bundle: Path) -> None:
    with served(bundle, *FIXED) as running, connected(running) as client:
        with client.completions.create(**LONG, stream=True) as stream:
            chunks = iter(stream)
            next(chunks)
            running.process.send_signal(signal.SIGKILL)
            with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
                list(chunks)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model=MODEL, prompt="x")


def test_only_this_machine_is_listened_to_unless_it_is_told_otherwise(server: Served, bundle: Path) -> None:
    other = "127.0.0.2"  # this machine, too, but not the address that is listened to
    with pytest.raises(OSError):
        socket.create_connection((other, urlsplit(server.url).port), timeout=120)
    with served(bundle, "--no-speculation", "--host", "0.0.0.0") as opened:
        if sys.platform == "linux":
            socket.create_connection((other, urlsplit(opened.url).port), timeout=120).close()
        assert opened.process.stderr is not None
        assert "0.0.0.0 may be reached by others, and no --api-key is set" in opened.process.stderr.readline()
