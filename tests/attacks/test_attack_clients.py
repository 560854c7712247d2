"""Clients of a real server process that try to get more than their share: forged names and addresses, full queues."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from connections import (
    ELSEWHERE,
    LINUX,
    LONG,
    SHORT,
    SLOW,
    answer_of,
    asked,
    opened,
    posted,
    quiet_end,
)
from serving import WAITING, Served, faulty, pace, paused, served, wait_for

pytest.importorskip("fastapi", reason="needs the [serve] extra")


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_forged_names_and_addresses_gain_a_client_nothing(server: Served, pause: Path) -> None:
    """Its `user`s and whatever it says of X-Forwarded-For are its own affair: another waits for one text of it."""
    with ExitStack() as stack, paused(pause):
        for number in range(16):
            forged = posted({**LONG, "max_tokens": 100, "user": (ELSEWHERE, f"u{number}")[number % 2]})
            forged = forged.replace(b"\r\n", b"\r\nX-Forwarded-For: 10.0.0.%d\r\n" % number, 1)
            stack.enter_context(opened(server, forged))
        wait_for(lambda: server.metric(WAITING) == 15)
        victim = stack.enter_context(opened(server, posted(SHORT), ELSEWHERE))
        wait_for(lambda: server.metric(WAITING) == 16)
        pace(pause, 0.03)  # each of the others takes seconds
        assert answer_of(victim).status == 200
        assert server.metric(WAITING) >= 8  # fourteen, but for the time it takes to ask
    wait_for(lambda: server.idle)


@pytest.mark.skipif(not LINUX, reason="other systems have one loopback address")
def test_a_client_that_fills_its_share_leaves_places_for_others(server: Served, pause: Path) -> None:
    with ExitStack() as stack:
        with paused(pause):
            many = stack.enter_context(opened(server, posted({**SHORT, "n": 32})))
            wait_for(lambda: server.metric(WAITING) == 31)
            refused = asked(server, posted(SHORT))
            assert refused.status == 429 and b"of this client are waiting" in refused.body
            other = stack.enter_context(opened(server, posted({**SHORT, "n": 15}), ELSEWHERE))
            wait_for(lambda: server.metric(WAITING) == 46)
        assert (answer_of(many).status, answer_of(other).status) == (200, 200)


def test_behind_a_proxy_clients_are_told_apart_by_what_it_says(tiny_bundle: Path, pause: Path, tmp_path: Path) -> None:
    """With the name and the key that clients use there; what a client says to the proxy itself counts for nothing."""
    keys = tmp_path / "keys"
    keys.write_text("all secret\n")
    options = ("--trusted-proxies", "127.0.0.0/8", "--allowed-hosts", "llm.example", "--api-keys-file", str(keys))
    load = ("--max-running", "1", "--max-waiting", "8")

    def forwarded(by: str, body: dict[str, object], key: str = "secret", host: str = "llm.example") -> bytes:
        told = f"X-Forwarded-For: 198.51.100.9, {by}, 127.0.0.1\r\nAuthorization: Bearer {key}\r\n".encode()
        return posted(body).replace(b"localhost\r\n", host.encode() + b"\r\n" + told)

    with (
        served(tiny_bundle, *SLOW, *load, *options, program=faulty(pause)) as running,
        ExitStack() as stack,
    ):
        assert asked(running, forwarded("192.0.2.1", SHORT, key="wrong")).status == 401
        assert asked(running, forwarded("192.0.2.1", SHORT, host="evil.example")).status == 421
        with paused(pause):
            many = stack.enter_context(opened(running, forwarded("192.0.2.1", {**SHORT, "n": 6})))
            wait_for(lambda: running.metric(WAITING) == 5)
            assert asked(running, forwarded("192.0.2.1", SHORT)).status == 429
            other = stack.enter_context(opened(running, forwarded("192.0.2.2", SHORT)))
            wait_for(lambda: running.metric(WAITING) == 6)
        assert (answer_of(many).status, answer_of(other).status) == (200, 200)
        quiet_end(running)
