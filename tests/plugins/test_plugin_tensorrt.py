"""The place that imports TensorRT's packages, and the command that adds packages."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.plugins import installation, tensorrt
from draftwood.plugins.installation import install, lacking
from draftwood.plugins.tensorrt import load_tensorrt, tensorrt_logger

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="TensorRT-RTX is not installed: pip install 'draftwood[tensorrt-rtx]'",
)
on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the wheel's libraries have versioned names on Linux"
)


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own: what a process imports it keeps."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(("backend", "package"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_a_missing_package_names_the_extra(backend: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "preload_rtx_libraries", lambda: None)  # which acts once in a process
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package} cannot .*pip install .*\[{backend}\]'") as raised:
        load_tensorrt.__wrapped__(backend)
    assert raised.value.name == package


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'onnxruntime' is no TensorRT backend; choose one of tensorrt, tensorrt-rtx"):
        load_tensorrt("onnxruntime")


@needs_rtx
def test_one_module_and_one_logger_per_process(caplog: pytest.LogCaptureFixture) -> None:
    """What TensorRT says goes to `logging`, without its lines about every node and every inlined name."""
    assert load_tensorrt("tensorrt-rtx") is load_tensorrt("tensorrt-rtx")
    logger, severity = tensorrt_logger("tensorrt-rtx"), load_tensorrt("tensorrt-rtx").ILogger.Severity
    assert logger is tensorrt_logger("tensorrt-rtx")
    caplog.set_level(logging.DEBUG, "draftwood.tensorrt")
    logger.log(severity.VERBOSE, "a kernel")
    logger.log(
        severity.WARNING, "A node already exists, the output tensors of this new instance will not be queryable."
    )
    logger.log(severity.WARNING, "trouble")
    logger.log(severity.INFO, "a phase")
    assert [(each.levelname, each.message) for each in caplog.records] == [("WARNING", "trouble"), ("DEBUG", "a phase")]


@needs_rtx
@on_linux
def test_the_preloaded_libraries_are_removed_with_the_process() -> None:
    code = (
        "from draftwood.plugins.tensorrt import load_tensorrt, preload_rtx_libraries\n"
        "load_tensorrt('tensorrt-rtx')\n"
        "print(preload_rtx_libraries().name)"
    )
    done = in_a_process(code)
    left = subprocess.run(["ls", done.stdout.strip()], capture_output=True)
    assert done.returncode == 0 and done.stdout.strip() and left.returncode != 0


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/a%20b/draftwood", "dir_info": {"editable": True}},
            "-e '/home/a b/draftwood[onnxruntime,otel]'",
        ),
        ({"url": "file:///src/draftwood", "dir_info": {}}, "'/src/draftwood[onnxruntime,otel]'"),
        (
            {"url": "file:///d/draftwood-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'/d/draftwood-0.1.0-py3-none-any.whl[",
        ),
        (
            {"url": "https://x.org/draftwood-0.1.0.whl", "archive_info": {}},
            "'https://x.org/draftwood-0.1.0.whl[onnxruntime,otel]'",
        ),
        (None, "'DRAFTWOOD.whl[onnxruntime,otel]'"),
    ],
)
def test_the_command_is_for_this_installation(
    origin: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr(installation, "distribution", lambda name: found)
    assert install("onnxruntime", "otel").startswith(f"pip install {command}")


@pytest.mark.parametrize(("others", "extra"), [([], "onnxruntime"), (["onnxruntime-gpu"], "gpu")])
def test_a_package_that_is_lacking_is_brought_beside_what_is_there(
    others: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime for GPUs and for CPUs have one package folder."""
    monkeypatch.setattr(installation, "distributions", lambda name: others)
    assert f"[{extra}]" in lacking(ModuleNotFoundError(name="onnx"))
