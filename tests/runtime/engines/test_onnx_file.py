"""ONNX graphs: what no build writes is refused before a library opens it, and so are devices that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from bundling import resigned
from checkpoints import Reference
from engine_parts import TOLERANCE, engine_spec, random_text
from onnx import TensorProto, helper

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines import graph
from draftwood.builder.engines.export import export
from draftwood.models.bindings import TARGET
from draftwood.models.errors import EngineError
from draftwood.models.layers import num_parameters
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.onnx.file import MOST_BYTES, OPERATORS, check_graph
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import prefill


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def external(model: Any, location: str, offset: int = 0) -> None:
    """Let the first weight of a graph lie elsewhere, as onnx itself says it."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT)
    length = len(tensor.raw_data)
    onnx.external_data_helper.set_external_data(tensor, location, offset, length)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


def node(kind: str, domain: str = "", **attributes: Any) -> Any:
    return helper.make_node(kind, ["input_ids"], ["more"], domain=domain, **attributes)


def loop() -> Any:
    return node("Identity", body=helper.make_graph([], "body", [], []))


def resized(model: Any, size: int) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = size


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: external(m, "/etc/passwd"), "lie in '/etc/passwd' instead of target.onnx.data"),
    (lambda m: external(m, "../target.onnx.data"), "lie in "),
    (lambda m: external(m, "tokenizer.json"), "lie in "),
    (lambda m: external(m, ""), "lie in "),
    (lambda m: external(m, "target.onnx.data", 1 << 40), "beyond the end|No such file"),
    (lambda m: m.graph.node.append(node("Loop")), "Loop.*which no build writes"),
    (lambda m: m.graph.node.append(node("Add", "com.microsoft")), "com.microsoft.Add.*which no build writes"),
    (lambda m: m.graph.node.append(node("PyOp", "ai.onnx.contrib")), "which no build writes"),
    (lambda m: m.graph.node.append(loop()), "a graph or sparse weights within an operator"),
    (lambda m: m.functions.add(name="f", domain="x"), "it holds functions"),
    (lambda m: m.training_info.add(), "it holds training"),
    (lambda m: m.graph.sparse_initializer.add(), "sparse weights"),
    (lambda m: resized(m, 100_000), "its output 'logits' is .* where the manifest says"),
    (lambda m: m.graph.output.pop(), "its output 'present_value.1' is None"),
    (lambda m: m.graph.input.pop(0), "its input 'input_ids' is None"),
    (lambda m: m.graph.input[0].type.tensor_type.__setattr__("elem_type", 1), "its input 'input_ids'"),
    (lambda m: m.ClearField("graph"), "its input 'attention_mask' is None"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_graph_that_no_build_writes_is_refused(bundle: Path, change: Callable[[Any], object], named: str) -> None:
    model = onnx.load(bundle / "target.onnx")
    change(model)
    (bundle / "target.onnx").write_bytes(model.SerializeToString())
    resigned(bundle)
    with pytest.raises(EngineError, match=named):
        EngineBundle.open(bundle).open_engine("target")
    EngineBundle.open(bundle).open_engine("draft").close()


def test_no_cut_and_no_flipped_bit_of_a_graph_is_more_than_an_error(bundle: Path) -> None:
    """The reader stands before everything else: whatever it is given, it answers."""
    file, spec = bundle / "draft.onnx", EngineBundle.open(bundle).manifest.engines["draft"]
    content = file.read_bytes()
    check_graph(file, spec)
    for size in range(1, len(content), max(1, len(content) // 97)):
        file.write_bytes(content[:size])
        with pytest.raises(EngineError, match="rebuild the bundle"):
            check_graph(file, spec)
    refused = 0
    for at in range(0, len(content), max(1, len(content) // 499)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x82]) + content[at + 1 :])
        try:
            check_graph(file, spec)
        except EngineError:
            refused += 1
    assert refused
    no_text = content.replace(b"input_ids", b"input_\xffds")
    for other in (b"", os.urandom(999), b"\xff" * 99, no_text, bytes(MOST_BYTES + 1)):
        file.write_bytes(other)
        with pytest.raises(EngineError, match="rebuild the bundle"):
            check_graph(file, spec)


def test_a_spec_that_is_not_the_graph_is_refused(tiny_bundle: Path) -> None:
    spec = EngineBundle.open(tiny_bundle).manifest.engines["draft"]
    for name in ("vocab_size", "num_layers", "num_kv_heads", "head_dim"):
        for value in (1, 2 * getattr(spec.model, name)):
            changed: dict[str, Any] = {name: value}
            with pytest.raises(EngineError, match="where the manifest says"):
                check_graph(tiny_bundle / spec.file, replace(spec, model=replace(spec.model, **changed)))


def test_weights_beside_the_graph_change_nothing(
    gqa: Path, gqa_reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models keep their weights in a second file. A token id beyond the vocabulary stands for what a backend may
    refuse while it runs."""
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 0)
    checkpoint, written, file = Checkpoint(gqa), list[str](), tmp_path / "target.onnx"
    export(checkpoint, TARGET, 600, file, written.append)
    beside = tmp_path / "target.onnx.data"
    assert beside.stat().st_size > 4 * num_parameters(checkpoint.config) and "lm_head.weight" in written
    spec = engine_spec(checkpoint, "onnxruntime", TARGET)
    check_graph(file, spec)
    engine, text = OnnxRuntimeEngine(file, spec), random_text(50)
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    np.testing.assert_allclose(output.logits, gqa_reference([text]), atol=TOLERANCE)
    cache = engine.new_cache()
    with pytest.raises(EngineError, match="could not run a pass of the target"):
        prefill(engine, cache, [10**6])
    assert (cache.length, cache.speculative) == (0, 0)
    os.truncate(beside, 1000)
    with pytest.raises(EngineError, match=r"beyond the end of target\.onnx\.data"):
        check_graph(file, spec)


def test_what_cannot_be_opened_is_refused(gqa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = engine_spec(Checkpoint(gqa), "onnxruntime", TARGET)
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")

    def refused(name: str, message: str, provider: str = "cpu") -> None:
        with pytest.raises(EngineError, match=message):
            OnnxRuntimeEngine(tmp_path / name, spec, provider=provider)

    refused("broken.onnx", "broken.onnx cannot be opened by ONNX Runtime")
    refused("missing.onnx", "missing.onnx cannot be opened by ONNX Runtime")
    refused("any.onnx", "'tpu' is unknown; choose one of cpu, cuda", "tpu")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    refused("any.onnx", r"no CUDAExecutionProvider: install .*onnxruntime-gpu", "cuda")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused("any.onnx", r"pip install .*\[onnxruntime\]'")


def test_onnx_runtime_tells_nobody_what_it_runs(tmp_path: Path) -> None:
    program = "import draftwood.runtime.engines.onnx.onnxruntime, onnxruntime; onnxruntime.SessionOptions()"
    others = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    places = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=others | places)
    assert not list(tmp_path.iterdir())


def test_the_operators_are_those_of_builds(demo_bundle: Path, tiny_bundle: Path) -> None:
    """Cast is of graphs in 16 bits, Concat of states, Split and Squeeze of several heads, four others of windows."""
    used = set()
    for bundle in (demo_bundle, tiny_bundle):
        for file in bundle.glob("*.onnx"):
            used |= {node.op_type for node in onnx.load(file, load_external_data=False).graph.node}
    assert used <= OPERATORS
    assert OPERATORS - used <= {"Cast", "Concat", "DequantizeLinear", "Mul", "CumSum", "Equal", "LessOrEqual", "Where"}
