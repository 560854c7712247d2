"""Opening an engine: weights in a second file; files, devices and passes that are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from checkpoints import transformers_logits, write_checkpoint
from engine_parts import CAPACITY, TOLERANCE, engine_spec, random_text

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines import graph
from draftwood.builder.engines.export import export
from draftwood.models import bindings
from draftwood.models.errors import EngineError
from draftwood.models.layers import num_parameters
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import prefill


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gqa"), "gqa")


def test_weights_beside_the_graph_change_nothing(gqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models keep their weights in a second file."""
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 0)
    checkpoint, written = Checkpoint(gqa), list[str]()
    export(checkpoint, bindings.TARGET, CAPACITY, tmp_path / "target.onnx", written.append)
    assert (tmp_path / "target.onnx.data").stat().st_size > 4 * num_parameters(checkpoint.config)
    assert "lm_head.weight" in written
    engine = OnnxRuntimeEngine(tmp_path / "target.onnx", engine_spec(checkpoint, "onnxruntime", bindings.TARGET))
    text = random_text(50)
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    np.testing.assert_allclose(output.logits[0], transformers_logits(gqa)([text])[0], atol=TOLERANCE)


def test_a_file_that_is_no_graph_is_refused(gqa: Path, tmp_path: Path) -> None:
    spec = engine_spec(Checkpoint(gqa), "onnxruntime", bindings.TARGET)
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    for name in ("broken.onnx", "missing.onnx"):
        with pytest.raises(EngineError, match=f"{name} cannot be opened by ONNX Runtime"):
            OnnxRuntimeEngine(tmp_path / name, spec)


def test_devices_that_are_not_there_are_refused(gqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(gqa)
    spec = engine_spec(checkpoint, "onnxruntime", bindings.TARGET)
    with pytest.raises(EngineError, match="'tpu' is unknown; choose one of cpu, cuda"):
        OnnxRuntimeEngine(tmp_path / "any.onnx", spec, provider="tpu")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(EngineError, match=r"no CUDAExecutionProvider: install .*onnxruntime-gpu"):
        OnnxRuntimeEngine(tmp_path / "any.onnx", spec, provider="cuda")


def test_a_pass_that_fails_is_an_error_that_names_the_engine(gqa: Path, tmp_path: Path) -> None:
    """A token id beyond the vocabulary stands for what a backend may refuse while it runs."""
    checkpoint = Checkpoint(gqa)
    export(checkpoint, bindings.TARGET, CAPACITY, tmp_path / "target.onnx", lambda name: None)
    spec = engine_spec(checkpoint, "onnxruntime", bindings.TARGET)
    engine = OnnxRuntimeEngine(tmp_path / "target.onnx", spec)
    cache = engine.new_cache()
    with pytest.raises(EngineError, match="could not run a pass of the target"):
        prefill(engine, cache, [10**6])
    assert (cache.length, cache.speculative) == (0, 0)


def test_a_missing_onnxruntime_is_named(gqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match=r"pip install .*\[cpu\]'"):
        OnnxRuntimeEngine(tmp_path / "any.onnx", engine_spec(Checkpoint(gqa), "onnxruntime", bindings.TARGET))
