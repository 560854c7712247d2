"""ONNX Runtime tells nobody what it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_onnx_runtime_keeps_no_events_for_its_makers(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    program = "import draftwood.runtime.engines.onnx.onnxruntime, onnxruntime; onnxruntime.SessionOptions()"
    others = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    places = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=others | places)
    assert not list(tmp_path.iterdir())
