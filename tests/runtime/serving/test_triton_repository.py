"""draftwood triton: the model it writes, the server it starts, and what it says when either cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from serving import wait_for

from draftwood.cli.main import main
from draftwood.runtime import BundleError, ConfigError, EngineError, SpeculativeConfig
from draftwood.runtime.serving.triton.contract import OUTPUTS, ModelSettings
from draftwood.runtime.serving.triton.repository import Placement, write_model
from draftwood.runtime.serving.triton.server import Distribution, Ports, TritonServer

SETTINGS = ModelSettings("", SpeculativeConfig(grow="k-ary", branching=(2, 1)), 3, 2, "cpu", 5, 6)


def write(bundle: Path, repository: Path, name: str = "m", copy: bool = False, gpus: tuple[int, ...] = ()) -> Path:
    return write_model(bundle, repository, name, SETTINGS, Placement(2, gpus), copy)


def test_triton_reads_the_configuration_as_it_is_meant(tiny_bundle: Path, tmp_path: Path) -> None:
    text_format = pytest.importorskip("google.protobuf.text_format", reason="the [triton] extra is not installed")
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the [triton] extra is not installed")
    folder = write(tiny_bundle, tmp_path, gpus=(0, 3))
    config = text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 1)
    assert [(group.count, group.kind, list(group.gpus)) for group in config.instance_group] == [
        (2, 1, [0]),
        (2, 1, [3]),
    ]
    assert [output.name for output in config.output] == [spec.name for spec in OUTPUTS]
    assert [field.name for field in config.input if not field.optional] == ["text_input"]
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    expected = ModelSettings(str(tiny_bundle), *[getattr(SETTINGS, name) for name in SETTINGS.__slots__[1:]])
    assert ModelSettings.from_parameters(parameters) == expected


def test_settings_survive_the_configuration_and_edited_ones_that_make_no_sense_are_refused() -> None:
    for speculative in (None, SpeculativeConfig(), SpeculativeConfig(grow="static", topology=(0, 0, 1))):
        settings = ModelSettings('a "bundle"\\with\nodd characters é', speculative, provider="cuda", max_waiting=0)
        assert ModelSettings.from_parameters(settings.to_parameters()) == settings
    assert ModelSettings.from_parameters({"bundle": "x"}) == ModelSettings("x")
    for wrong in ({}, {"bundle": "x", "threads": "many"}, {"bundle": "x", "speculative": '{"x": 1}'}):
        with pytest.raises(ConfigError, match=r"config\.pbtxt"):
            ModelSettings.from_parameters(wrong)


def test_a_copied_bundle_makes_the_repository_independent(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    folder = write(bundle, tmp_path / "models", copy=True)
    shutil.rmtree(bundle)
    assert 'key: "bundle" value { string_value: "bundle" }' in (folder / "config.pbtxt").read_text()
    assert sorted(os.listdir(folder / "bundle")) == sorted(os.listdir(tiny_bundle))
    assert sorted(os.listdir(folder)) == ["1", "README.md", "bundle", "config.pbtxt"]


def test_a_model_is_replaced_but_nothing_else_is(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = write(tiny_bundle, tmp_path)
    (folder / "left over").touch()
    assert not (write(tiny_bundle, tmp_path) / "left over").exists()
    (tmp_path / "other" / "1").mkdir(parents=True)
    (tmp_path / "file").touch()
    for bundle, repository, name, error, said in (
        (tiny_bundle, tmp_path, "other", ConfigError, "not written by draftwood"),
        (tiny_bundle, tmp_path, "../m", ConfigError, "letters"),
        (tmp_path, tmp_path, "m", BundleError, "build"),
        (tiny_bundle, tmp_path / "file", "m", ConfigError, "choose another"),
    ):
        with pytest.raises(error, match=said):
            write(bundle, repository, name)
    assert sorted(os.listdir(tmp_path)) == ["file", "m", "other"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_path_that_is_no_utf_8_is_named(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Protobuf's text format cannot hold it. The error was about standard output."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / os.fsdecode(b"bundle\xff"))
    command = ["triton", str(bundle), "--output", str(tmp_path / "models")]
    assert main(command) == 2
    assert "bundle\\udcff" in capsys.readouterr().err and not os.listdir(tmp_path / "models")
    assert main([*command, "--copy-bundle"]) == 0


@pytest.mark.parametrize("more", [["--instances", "0"], ["--gpus", "0,0"], ["--name", "a/b"], ["--max-running", "0"]])
def test_mistakes_on_the_command_line(
    tiny_bundle: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["triton", str(tiny_bundle), "--output", str(tmp_path), *more]) == 2
    assert "must be" in capsys.readouterr().err


def test_the_readme_has_lines_that_can_be_copied(tiny_bundle: Path, tmp_path: Path) -> None:
    """Paths with a blank are one word of a shell."""
    repository, bundle = tmp_path / "my models", tmp_path / "my bundle"
    shutil.copytree(tiny_bundle, bundle)
    assert main(["triton", str(bundle), "--output", str(repository), "--gpus", "0,1"]) == 0
    text = (repository / "draftwood" / "README.md").read_text()
    server = f"tritonserver --model-repository='{repository}' "
    mounts = f" -v '{repository}:/models:ro'", f" -v '{bundle}:{bundle}:ro'"
    for line in (server, '"device=0,1"', *mounts, "[gpu]"):
        assert line in text
    assert '"client": "me"' in text


class Version(NamedTuple):
    major: int
    minor: int


@pytest.fixture
def wheel() -> Distribution:
    """The installed server, or a skip that says why there is none."""
    try:
        return Distribution.find()
    except EngineError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (sys, "version_info", Version(3, 7), r"3\.8, 3\.9, .*3\.13.*this is 3\.7"),
        (np, "__version__", "2.4.6", "numpy<2"),
        (importlib.util, "find_spec", lambda name: None, r"\[triton\]"),
    ],
)
def test_what_keeps_the_server_from_running_here(
    wheel: Distribution, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, said: str
) -> None:
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(EngineError, match=said):
        Distribution.find()


@pytest.mark.parametrize(
    ("file", "content", "timeout", "named"),
    [
        ("1/model.py", "raise RuntimeError('no such luck')", 60, "no such luck"),
        ("1/model.py", "import time; time.sleep(60)", 1, "not ready within 1 s"),
        ("bundle/draft.onnx", "", 60, "copy the bundle again"),
    ],
)
def test_a_model_that_does_not_start(
    wheel: Distribution, tiny_bundle: Path, tmp_path: Path, file: str, content: str, timeout: float, named: str
) -> None:
    (write(tiny_bundle, tmp_path, copy=True) / file).write_text(content)
    server = TritonServer(tmp_path, ready_timeout=timeout)
    with pytest.raises(EngineError, match=named), server:
        pass
    assert server.pid is not None and not Path(f"/proc/{server.pid}").exists()
    assert not server.log.exists()


def test_a_port_that_is_taken(wheel: Distribution, tiny_bundle: Path, tmp_path: Path) -> None:
    write(tiny_bundle, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = Ports.free()
        ports = Ports(free.http, taken.getsockname()[1], free.metrics)
        with pytest.raises(EngineError, match="in use"), TritonServer(tmp_path, ports):
            pass


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_run_serves_until_it_is_told_to_stop(
    wheel: Distribution, tiny_bundle: Path, tmp_path: Path, signal_number: signal.Signals
) -> None:
    ports = Ports.free()
    named = [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics")]
    command = [sys.executable, "-m", "draftwood", "triton", str(tiny_bundle), "--output", str(tmp_path / "models")]
    own_folder = os.environ | {"TMPDIR": str(tmp_path)}  # for what a killed command cannot remove
    with subprocess.Popen([*command, "--run", *named], stdout=subprocess.PIPE, text=True, env=own_folder) as process:
        assert process.stdout is not None
        assert "Model written" in process.stdout.readline()
        assert f"HTTP on 127.0.0.1:{ports.http}" in process.stdout.readline()
        url = f"http://127.0.0.1:{ports.http}/v2/models/draftwood/generate"
        body = json.dumps({"text_input": "hello", "max_tokens": 4}).encode()
        with urllib.request.urlopen(url, body, timeout=10) as answer:
            assert json.loads(answer.read())["text_output"].startswith("hello")
        process.send_signal(signal_number)
    assert process.returncode == (130 if signal_number == signal.SIGTERM else -signal.SIGKILL)
    with socket.socket() as client:  # tritonserver does not outlive the command that started it
        wait_for(lambda: client.connect_ex(("127.0.0.1", ports.http)) != 0, 60)
