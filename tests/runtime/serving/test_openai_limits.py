"""A real server under pressure: full queues, crowds, clients that vanish, the end of the process, wrong options."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from connections import LONG, SHORT, SLOW
from serving import WAITING, Served, faulty, paused, served, wait_for

from draftwood.cli.main import main

httpx = pytest.importorskip("httpx", reason="needs httpx")

PASS_S = 0.05  # of a slow pass: 45 s for LONG
ABORTED = 'draftwood_requests_total{finish_reason="abort"}'


@pytest.fixture(scope="module")
def pause(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that slows down the passes of the servers."""
    return tmp_path_factory.mktemp("pause") / "file"


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, pause: Path) -> Iterator[Served]:
    """One request at a time, one waiting, small bodies, a key."""
    limits = ("--max-running", "1", "--max-waiting", "1", "--max-body-bytes", "20000", "--api-key", "secret")
    with served(tiny_bundle, *SLOW, *limits, program=faulty(pause)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        yield client


def code_of(answer: Any) -> tuple[int, str | None]:
    """Status and code of an error in OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return answer.status_code, error["code"]


def test_a_full_queue_is_429_and_a_client_that_leaves_frees_its_place(server: Served, client: Any, pause: Path) -> None:
    asked = {"json": {**LONG, "stream": True}}
    with paused(pause, PASS_S), ThreadPoolExecutor() as pool, client.stream("POST", "/completions", **asked) as first:
        lines = first.iter_lines()  # its end would be the connection's
        next(lines)
        waiting = pool.submit(client.post, "/completions", json=SHORT)
        wait_for(lambda: server.metric(WAITING))
        refused = client.post("/completions", json=SHORT)
        assert code_of(refused) == (429, "queue_full") and refused.headers["retry-after"] == "1"
        first.close()
        assert waiting.result().json()["usage"]["completion_tokens"] == 3
    wait_for(lambda: server.idle and server.metric(ABORTED) == 1)


@pytest.mark.parametrize("key", [None, "Bearer wrong", "secret", "Bearer secrét"])
def test_without_the_key_only_the_state_is_answered(server: Served, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key.encode()}
    with httpx.Client(base_url=server.root, headers=headers, timeout=120) as stranger:
        assert code_of(stranger.post("/v1/completions", json=SHORT)) == (401, "invalid_api_key")
        refused = stranger.post("/v1/messages", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for path in ("/api/tags", "/api/ps", "/api/version", "/v1/responses/resp_1"):
            assert stranger.get(path).status_code == 401
        for path in ("/health", "/health/ready", "/metrics", "/"):
            assert stranger.get(path).status_code == 200
            assert stranger.head(path).status_code == 200  # how load testers ask, and `ollama`


def test_the_key_may_come_as_anthropics_clients_send_it(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for key, status in (("wrong", 401), ("secret", 400)):  # 400: this model has no chat template
        answer = httpx.post(f"{server.url}/messages", json=body, headers={"x-api-key": key}, timeout=120)
        assert answer.status_code == status and answer.json()["type"] == "error"
    large = httpx.post(f"{server.url}/messages", content=b" " * 20_001, headers={"x-api-key": "secret"}, timeout=120)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


def test_what_exceeds_a_limit_is_refused_also_if_it_hides_its_size(client: Any) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    for content in (b"x" * 20001, endless()):
        answer = client.post("/completions", content=content, headers={"content-type": "application/json"})
        assert code_of(answer) == (413, "body_too_large") and "20000 bytes" in answer.text
    many = client.post("/completions", json={**SHORT, "n": 3})
    assert many.status_code == 400 and "3 choices" in many.text, "one runs and one waits"
    assert client.post("/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "closed terminal"])
def test_a_stop_signal_finishes_what_runs_and_exits_with_0(tiny_bundle: Path, pause: Path, number: int) -> None:
    request = {**LONG, "max_tokens": 100}
    with served(tiny_bundle, *SLOW, "--max-running", "2", program=faulty(pause)) as running:
        with httpx.Client(base_url=running.root, timeout=120) as client, ThreadPoolExecutor() as pool:
            alone = client.post("/v1/completions", json=request).json()["choices"][0]["text"]
            with paused(pause):
                answers = [pool.submit(client.post, "/v1/completions", json=request) for _ in range(4)]
                wait_for(lambda: running.metric(WAITING) == 2)
                for _ in range(2):  # as timeout(1) does
                    running.process.send_signal(number)
                wait_for(lambda: client.get("/health/ready").status_code == 503)
                refused = client.post("/v1/completions", json=SHORT)
            assert code_of(refused) == (503, "shutting_down")
            assert [answer.result().json()["choices"][0]["text"] for answer in answers] == [alone] * 4
        assert running.process.wait(60) == 0
        assert running.process.stderr is not None and running.process.stderr.read() == ""


@pytest.mark.parametrize("options", [("--drain-timeout", "0.1"), ()], ids=["timeout", "second signal"])
def test_a_drain_that_takes_too_long_is_cut_off(tiny_bundle: Path, pause: Path, options: tuple[str, ...]) -> None:
    with paused(pause, PASS_S), served(tiny_bundle, *SLOW, *options, program=faulty(pause)) as running:
        request = {**LONG, "n": 8, "stream": True}
        with httpx.stream("POST", f"{running.url}/completions", json=request, timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            for _ in range(2):  # at once they are one, sent twice
                running.process.send_signal(signal.SIGTERM)
            if not options:
                wait_for(lambda: httpx.get(f"{running.root}/health/ready", timeout=120).status_code == 503)
                time.sleep(1)  # longer than signals count as one
                running.process.send_signal(signal.SIGTERM)
            *_, error, done = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        assert running.process.wait(60) == 1
        assert running.process.stderr is not None and "cut off" in running.process.stderr.read()


def test_only_this_machine_is_listened_to_unless_it_is_told_otherwise(server: Served, tiny_bundle: Path) -> None:
    other = "127.0.0.2"  # this machine, too, but not the address that is listened to
    with pytest.raises(OSError):
        socket.create_connection((other, urlsplit(server.url).port), timeout=120)
    options = ("--no-speculation", "--host", "0.0.0.0", "--request-timeout", "0.01")
    with served(tiny_bundle, *options, "--served-model-name", "small") as opened:
        if sys.platform == "linux":
            socket.create_connection((other, urlsplit(opened.url).port), timeout=120).close()
        assert opened.process.stderr is not None
        assert "0.0.0.0 may be reached by others, and no --api-key is set" in opened.process.stderr.readline()
        local = opened.url.replace("0.0.0.0", "127.0.0.1")
        late = httpx.post(f"{local}/completions", json=LONG, timeout=120)
        assert code_of(late) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--port", "BUSY"], "choose another --host or --port"),
        (["--port", "99999"], "choose another --host or --port"),
        (["--host", "no.such.host.invalid"], "choose another --host or --port"),
        (["--port", "0", "--max-running", "0"], "max_running"),
        (["--port", "0", "--kv-cache-bytes", "1000"], "--max-length"),
        (["--port", "0", "--max-connections", "0"], "--max-connections must be at least 1"),
        (["--port", "0", "--api-key", ""], "the API key of --api-key is empty"),
        (["--port", "0", "--api-key", "two words"], "visible ASCII"),
        (["--port", "0", "--api-keys-file", "/nowhere"], "cannot read the API keys of /nowhere"),
        (["--port", "0"], "the API key of the variable DRAFTWOOD_API_KEY is empty"),  # a secret that was not filled in
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    tiny_bundle: Path, options: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if "variable" in named:
        monkeypatch.setenv("DRAFTWOOD_API_KEY", "")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        assert main(["serve", str(tiny_bundle), *(option.replace("BUSY", port) for option in options)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("draftwood: error: ") and named in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *(("--trusted-proxies", each, "10.0.0.0/8, not") for each in ("*", "proxy.example", "10.0.0.0/99", "")),
        *(("--request-timeout", each, "seconds above 0, not") for each in ("0", "-1", "nan", "inf", "soon")),
    ],
)
def test_addresses_and_times_are_checked(tiny_bundle: Path, option: str, value: str, named: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_bundle), option, value])
    assert ended.value.code == 2 and f"{named} {value!r}" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_half_a_minute_of_everything_at_once(tmp_path: Path) -> None:
    """Texts stay right, and the server as large as before. `tests/support/soak.py` is the same for an hour."""
    from soak import native_demo, soak

    found = soak(native_demo(tmp_path / "bundle"), seconds=30, every=5)
    assert not found["complaints"], found["first_complaints"]
    assert found["texts_compared"] > 20 and found["texts_wrong"] == 0 and found["exit_code"] == 0
