"""Exported graphs: valid and readable, written without holding the model in memory, and, in the form that TensorRT is
given, the reference's numbers as ONNX Runtime computes them. test_compile.py compiles plans of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import SHAPES, VOCAB_SIZE, edit_weights, write_checkpoint
from engine_parts import BUSHY, engine_spec, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from trees import Tree, trees

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines import graph
from draftwood.builder.engines.export import export
from draftwood.builder.parity import COARSER, TOLERANCE, Scored, largest_difference, rows_of
from draftwood.builder.reference import score_rows
from draftwood.models import bindings
from draftwood.models.errors import BundleError, CheckpointError
from draftwood.plugins.tree_attention import op
from draftwood.runtime.engines.base import TokenBatch
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import prefill

CAPACITY = 200
few = settings(max_examples=8)


def compact_engine(checkpoint: Checkpoint, file: Path, precision: str, unprepared: bool = False) -> OnnxRuntimeEngine:
    export(checkpoint, bindings.DRAFT, CAPACITY, file, lambda name: None, form=bindings.COMPACT, precision=precision)
    spec = replace(engine_spec(checkpoint, "", bindings.DRAFT, CAPACITY), precision=precision)
    return OnnxRuntimeEngine(file, spec, unprepared=unprepared)


def reference(checkpoint: Checkpoint, engine: OnnxRuntimeEngine) -> Scored:
    return score_rows(checkpoint.tensor, checkpoint.config, rows_of(engine.spec))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp("compact"), "gqa"))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    return compact_engine(checkpoint, tmp_path_factory.mktemp("compact") / "draft.onnx", "fp32")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_compact_graph_computes_the_reference(shape: str, precision: str, tmp_path: Path) -> None:
    """A prompt, then a tree after it, through the body of the TreeAttention function."""
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "checkpoint", shape))
    for unprepared in (False, True):  # a build compares graphs without converting all of their weights at once
        engine = compact_engine(checkpoint, tmp_path / "draft.onnx", precision, unprepared)
        assert engine.form == bindings.COMPACT
        difference = largest_difference(engine, reference(checkpoint, engine))
        assert difference < TOLERANCE * COARSER.get(precision, 1) / 2


def test_a_wrong_scale_is_found_in_fp16_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Negative control: the coarser tolerance still sees attention scores that are off by a fifth."""
    engine = compact_engine(checkpoint, tmp_path / "right.onnx", "fp16")
    model = onnx.load(tmp_path / "right.onnx")
    for node in model.graph.node:
        if node.op_type == "TreeAttention":
            node.attribute[0].f *= 1.2
    onnx.save(model, tmp_path / "wrong.onnx")
    with pytest.raises(BundleError, match="differs from the reference"):
        largest_difference(OnnxRuntimeEngine(tmp_path / "wrong.onnx", engine.spec), reference(checkpoint, engine))


@few
@given(tree=trees(), prefix=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), data=st.data())
def test_i9_rows_in_two_passes_equal_rows_in_one(
    tree: Tree, prefix: list[int], data: st.DataObject, engine: OnnxRuntimeEngine
) -> None:
    """The mask of a later pass has columns for rows of an earlier one."""
    split = data.draw(st.integers(0, len(tree.tokens) - 1))
    cache = engine.new_cache()
    prefill(engine, cache, prefix)
    expected = score(engine, tree.batch(engine.spec, len(prefix)), cache)
    cache.commit([])
    first = score(engine, tree.batch(engine.spec, len(prefix), stop=split), cache) if split else expected[:0]
    second = score(engine, tree.batch(engine.spec, len(prefix), first=split), cache)
    np.testing.assert_allclose(np.concatenate((first, second)), expected, atol=TOLERANCE)


def test_i7_padding_rows_change_nothing_and_stay_finite(engine: OnnxRuntimeEngine) -> None:
    """Without a prefix a padding row sees nothing at all; what it leaves in the cache must not be NaN."""
    results = []
    for width in (8, 16, 32):
        cache = engine.new_cache()
        batch = BUSHY.batch(engine.spec, 0)
        padded = TokenBatch.pad(BUSHY.tokens, batch.position_ids[:8], batch.mask[:8, :8], width)
        output = engine.score(padded, cache)
        assert np.isfinite(output.logits).all() and np.isfinite(stored(cache)).all()
        results.append(output.logits[:8].copy())
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=TOLERANCE)


def score(engine: OnnxRuntimeEngine, batch: TokenBatch, cache: Any) -> NDArray[np.float32]:
    return engine.score(batch, cache).logits[: batch.num_tokens].copy()


@pytest.mark.parametrize("form", [bindings.ADDITIVE, bindings.COMPACT])
@pytest.mark.parametrize("role", bindings.ROLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_are_valid_and_readable(shape: str, role: str, form: str, tmp_path: Path) -> None:
    """The checker infers every shape; every node has a name of its own; attention is one node per layer, of the
    standard operator where the host makes the mask, and of our local function where it comes compact."""
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "checkpoint", shape))
    export(checkpoint, role, 128, tmp_path / "graph.onnx", lambda name: None, form=form)
    model = onnx.load(tmp_path / "graph.onnx")
    onnx.checker.check_model(model, full_check=True)
    names = Counter(node.name for node in model.graph.node)
    assert names[""] == 0 and set(names.values()) == {1}
    domain, name = ("", "Attention") if form == bindings.ADDITIVE else (op.DOMAIN, op.NAME)
    attention = [node.name for node in model.graph.node if (node.domain, node.op_type) == (domain, name)]
    layers = range(checkpoint.config.num_layers)
    assert attention == [f"layers.{layer}/attention/tree_attention" for layer in layers]
    functions = [(function.domain, function.name) for function in model.functions]
    assert functions == ([] if form == bindings.ADDITIVE else [(op.DOMAIN, op.NAME)])
    caches = [(kind, layer) for layer in layers for kind in bindings.KINDS]
    inputs = [item.name for item in bindings.inputs(form)] + [bindings.past(*cache) for cache in caches]
    outputs = [*bindings.output_names(role, form=form), *(bindings.present(*cache) for cache in caches)]
    assert [value.name for value in model.graph.input] == inputs
    assert [value.name for value in model.graph.output] == outputs
    # TensorRT copies the matrix of a product twice whose output is split along its last axis.
    axes = [attribute.i for node in model.graph.node if node.op_type == "Split" for attribute in node.attribute]
    assert axes == [2] * (2 * len(layers)), "rows [B, T, groups, size] are split into groups"


@pytest.mark.parametrize("external_data_bytes", [0, 10**9])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_damaged_weights_stop_the_export(
    name: str, external_data_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN is found while the weights are written, whichever file they go to."""
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", external_data_bytes)
    folder = write_checkpoint(tmp_path / "checkpoint")
    edit_weights(folder, lambda tensors: tensors[name][..., 3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN"):
        export(Checkpoint(folder), bindings.TARGET, 128, tmp_path / "graph.onnx", lambda name: None)


EXPORT_AND_MEASURE = """
import sys
from pathlib import Path
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

before = peak()
export(Checkpoint(Path(sys.argv[1])), "draft", 512, Path(sys.argv[2]), lambda name: None)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from /proc")
def test_exporting_needs_less_memory_than_the_checkpoint(tmp_path: Path) -> None:
    """The limit is 1.5 times the checkpoint, of bf16 weights that the fp32 graph doubles; it takes about 0.6 times.

    VmHWM and not ru_maxrss: the latter begins with the peak of the process that started this one.
    """
    folder = write_checkpoint(
        tmp_path / "checkpoint",
        dtype="bfloat16",
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
    )
    stored = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", EXPORT_AND_MEASURE, str(folder), str(tmp_path / "graph.onnx")]
    needed = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert stored > 190_000_000
    assert needed < 1.5 * stored
