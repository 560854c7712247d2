"""Options of draftwood serve that no request, page and address would ever match; and of triton, without a server."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from draftwood.cli import serve
from draftwood.cli.main import arguments, main
from draftwood.models.errors import ConfigError
from draftwood.runtime.serving.http.server import bind


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


def test_a_port_that_is_taken_is_told_before_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "bundle_for", lambda args: pytest.fail("built"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "m.gguf", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


def test_triton_is_looked_for_before_anything_is_written(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["triton", str(tiny_bundle), "--output", str(tmp_path / "models"), "--run"]) == 2
    assert "Triton Inference Server is not installed" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
