"""Graphs of strangers: what no build writes is refused before a library opens it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from bundling import resigned
from onnx import TensorProto, helper

from draftwood.models.errors import EngineError
from draftwood.runtime.bundle import EngineBundle
from draftwood.runtime.engines.onnx_file import OPERATORS, check_graph


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
    (lambda m: external(m, "/etc/passwd"), "lie in b'/etc/passwd' instead of target.onnx.data"),
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
    for other in (b"", os.urandom(999), b"\xff" * 99):
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


def test_weights_beside_a_graph_stay_allowed(tiny_bundle: Path, tmp_path: Path) -> None:
    """As larger models have them."""
    spec = EngineBundle.open(tiny_bundle).manifest.engines["target"]
    onnx.save(
        onnx.load(tiny_bundle / "target.onnx"),
        tmp_path / "target.onnx",
        save_as_external_data=True,
        location="target.onnx.data",
        size_threshold=0,
    )
    check_graph(tmp_path / "target.onnx", spec)
    assert (tmp_path / "target.onnx.data").stat().st_size > 1000
    os.truncate(tmp_path / "target.onnx.data", 1000)
    with pytest.raises(EngineError, match=r"beyond the end of target\.onnx\.data"):
        check_graph(tmp_path / "target.onnx", spec)


def test_the_operators_are_those_of_builds(demo_bundle: Path, tiny_bundle: Path) -> None:
    """Cast is of graphs in 16 bits, Split and Squeeze of several heads."""
    used = set()
    for bundle in (demo_bundle, tiny_bundle):
        for file in bundle.glob("*.onnx"):
            used |= {node.op_type for node in onnx.load(file, load_external_data=False).graph.node}
    assert used <= OPERATORS
    assert OPERATORS - used <= {"Cast", "DequantizeLinear", "Mul"}
