"""Whose request it is, and by which names a server may be called."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.errors import ConfigError
from draftwood.runtime.serving.clients import ApiKey, network_of, owner_of, read_keys
from draftwood.runtime.serving.hosts import AllowedHosts


def test_a_file_of_keys_names_clients(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who key\n\nanna  k-1\nben k-2\nanna k-3\n")
    keys = read_keys(file)
    assert [key.name for key in keys] == ["anna", "ben", "anna"]
    for given_key, owner in (("k-1", "anna"), ("k-2", "ben"), ("k-3", "anna"), ("k-4", None), ("", None)):
        assert owner_of(keys, f"Bearer {given_key}") == owner
        assert owner_of(keys, f"bearer {given_key}") == owner
        assert owner_of(keys, f"Basic {given_key}") is None
        assert owner_of(keys, given_key) is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "has no API keys"),
        ("# only a comment", "has no API keys"),
        ("anna", "line 1, is no API key: write a name, a space and a key"),
        ("anna k 1", "line 1, is no API key"),
        ("anna k\nben k", "line 2, repeats the key of 'anna'"),
        ("anna schlüssel", "visible ASCII"),
    ],
)
def test_a_file_of_other_things_is_refused(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=named) as refused:
        read_keys(file)
    assert "k 1" not in str(refused.value), "errors reach logs, keys must not"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        read_keys(file)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "ключ"])
def test_what_no_header_carries_is_no_key(key: str) -> None:
    with pytest.raises(ConfigError, match="visible ASCII characters"):
        ApiKey.of("a", key, "--api-key")


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
        ("x" * 9999, "x" * 64),
    ],
)
def test_one_customer_of_a_provider_is_one_client(address: str, client: str) -> None:
    assert network_of(address) == client


LOOPBACK = ("localhost", "LOCALHOST.", "app.localhost:3000", "127.0.0.1", "127.8.9.1:80", "[::1]", "[::1]:8000")
NO_HOSTS = ("", ":", "[", "[::1", "::1]", "localhost:x", "localhost:80:80", "a b", "127.0.0.1.evil.example", "0x7f.1")


@pytest.mark.parametrize(
    ("listening", "names", "has_key", "allowed", "refused"),
    [
        ("127.0.0.1", [], False, LOOPBACK, (*NO_HOSTS, "evil.example", "localhost.evil.example", "192.0.2.1")),
        ("localhost", [], True, LOOPBACK, (*NO_HOSTS, "evil.example")),
        ("::1", ["Ours.example."], False, (*LOOPBACK, "ours.example:80"), (*NO_HOSTS, "x.ours.example")),
        ("127.0.0.1", ["*.ours.example"], False, ("a.ours.example", "a.b.ours.example"), ("ours.example", "x.com")),
        ("0.0.0.0", [], False, (*LOOPBACK, "192.0.2.1:80", "[2001:db8::1]"), (*NO_HOSTS, "evil.example", "box")),
        ("0.0.0.0", [], True, (*LOOPBACK, "evil.example", "box"), ()),
        ("0.0.0.0", ["box"], True, (*LOOPBACK, "box", "192.0.2.1"), (*NO_HOSTS, "evil.example")),
        ("box.lan", [], False, (*LOOPBACK, "box.lan"), (*NO_HOSTS, "evil.lan")),
        ("127.0.0.1", ["*"], False, (*LOOPBACK, "evil.example"), ()),
    ],
)  # fmt: skip
def test_a_server_answers_to_its_own_names(
    listening: str, names: list[str], has_key: bool, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    hosts = AllowedHosts.of(listening, names, has_key)
    assert [host for host in allowed if not hosts.allow(host)] == []
    assert [host for host in refused if hosts.allow(host)] == []


@given(st.text())
def test_any_text_may_be_sent_as_a_host(host: str) -> None:
    assert AllowedHosts.of("127.0.0.1", ["*"], False).allow(host)
    AllowedHosts.of("127.0.0.1", [], False).allow(host)
