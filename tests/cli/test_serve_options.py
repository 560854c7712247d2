"""Options of draftwood serve that no request, page and address would ever match; and of triton, without a server."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from draftwood.cli import serve
from draftwood.cli.main import arguments, main
from draftwood.models.errors import ConfigError
from draftwood.runtime.serving.http.server import bind


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-body-bytes", "0"], "--max-body-bytes: write a whole number, at least 1, not '0'"),
        (["--max-body-bytes", "-1"], "--max-body-bytes: write a whole number, at least 1"),
        (["--allowed-hosts", "http://llm.example"], "without scheme, port and path"),
        (["--allowed-hosts", "llm.example", "llm.example:8000"], "not 'llm.example:8000'"),
        (["--allowed-hosts", "llm.*"], "without scheme, port and path"),
        (["--allowed-hosts", ""], "without scheme, port and path"),
        (["--allowed-origins", "localhost:3000"], "such as http://localhost:3000, or *"),
        (["--allowed-origins", "http://localhost:3000/"], "write scheme, name and port alone"),
        (["--allowed-origins", "http://*.example"], "write scheme, name and port alone"),
        (["--otlp-traces-endpoint", "localhost:4318"], "http://localhost:4318/v1/traces, not"),
        (["--served-model-name", ""], "the name is empty"),
    ],
)
def test_what_would_match_nothing_is_refused(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(["serve", "x", *options])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and named in error and error.count("\n") == 1


def test_hosts_and_origins_are_taken_as_browsers_send_them() -> None:
    origins = ["http://LocalHost:3000", "https://[::1]", "null", "*"]
    hosts = ["llm.example.com", "*.example.com", "*", "::1", "10.0.0.1"]
    parsed = arguments(["serve", "x", "--allowed-origins", *origins, "--allowed-hosts", *hosts])
    assert parsed.allowed_origins == ["http://localhost:3000", "https://[::1]", "null", "*"]
    assert parsed.allowed_hosts == hosts


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("", "127.0.0.1 for this machine only, or 0.0.0.0 for all"),
        ("a\udcff", "choose another --host"),
        (f"{70 * 'a'}.example", "choose another --host"),
    ],
)
def test_a_host_that_is_no_name_is_refused(host: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        bind(host, 0).close()


@pytest.mark.parametrize("option", [("--host", "127.0.0.1"), ("--http-port", "8000"), ("--metrics-port", "9")])
def test_a_local_server_s_options_need_a_local_server(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["triton", str(tmp_path), "--output", str(tmp_path / "models"), *option]) == 2
    assert "add --run" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_port_that_is_taken_is_told_before_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "bundle_for", lambda args: pytest.fail("built"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "m.gguf", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err
