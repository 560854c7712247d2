"""The graph TensorRT is given, as ONNX Runtime computes it: the torch reference's numbers, over a cache of fixed size,
in both precisions ONNX Runtime has. The plans themselves are compiled in test_compile.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checkpoints import SHAPES, VOCAB_SIZE, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from trees import Tree, trees

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.engines.export import export
from draftwood.builder.parity import COARSER, TOLERANCE, Scored, largest_difference, rows_of
from draftwood.builder.reference import score_rows
from draftwood.models import bindings
from draftwood.models.errors import BundleError, EngineError
from draftwood.runtime.engines.base import EngineSpec, TokenBatch
from draftwood.runtime.engines.onnx.onnxruntime import OnnxRuntimeEngine
from draftwood.runtime.engines.passes import prefill

CAPACITY = 200
few = settings(max_examples=8)
BUSHY = Tree((9, 40, 41, 7, 200, 8, 8, 31), (-1, 0, 0, 1, 2, 2, 4, 6))


def compact_engine(checkpoint: Checkpoint, file: Path, precision: str, unprepared: bool = False) -> OnnxRuntimeEngine:
    export(checkpoint, bindings.DRAFT, CAPACITY, file, lambda name: None, form=bindings.COMPACT, precision=precision)
    outputs = bindings.output_names(bindings.DRAFT)
    spec = EngineSpec("draft", "", "", checkpoint.config, (1, 2, 4, 8, 16, 32), CAPACITY, precision, outputs)
    return OnnxRuntimeEngine(file, spec, unprepared=unprepared)


def reference(checkpoint: Checkpoint, engine: OnnxRuntimeEngine) -> Scored:
    return score_rows(checkpoint.tensor, checkpoint.config, rows_of(engine.spec))


def fields(spec: EngineSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in EngineSpec.__slots__}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp("compact"), "gqa"))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeEngine:
    return compact_engine(checkpoint, tmp_path_factory.mktemp("compact") / "draft.onnx", "fp32")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_compact_graph_computes_the_reference(shape: str, precision: str, tmp_path: Path) -> None:
    """A prompt, then a tree behind it, through the body of the TreeAttention function."""
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "checkpoint", shape))
    for unprepared in (False, True):  # a build compares graphs without converting all of their weights at once
        engine = compact_engine(checkpoint, tmp_path / "draft.onnx", precision, unprepared)
        assert engine.form == bindings.COMPACT
        difference = largest_difference(engine, reference(checkpoint, engine))
        assert difference < TOLERANCE * COARSER.get(precision, 1) / 2


def test_16_bit_types_are_everywhere_but_in_the_outputs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for precision, wanted in (("fp16", onnx.TensorProto.FLOAT16), ("bf16", onnx.TensorProto.BFLOAT16)):
        file = tmp_path / f"{precision}.onnx"
        export(checkpoint, bindings.DRAFT, 64, file, lambda name: None, form=bindings.COMPACT, precision=precision)
        model = onnx.load(file)
        onnx.checker.check_model(model, full_check=True)
        types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
        assert {types[bindings.past(kind, 0)] for kind in bindings.KINDS} == {wanted}
        assert {types[bindings.LOGITS.name], types[bindings.TOP_LOGPROBS.name]} == {onnx.TensorProto.FLOAT}
        floating = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
        assert {tensor.data_type for tensor in model.graph.initializer} & floating == {wanted}


def test_a_wrong_scale_is_found_in_fp16_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Negative control: the coarser tolerance still sees attention scores that are off by a fifth."""
    engine = compact_engine(checkpoint, tmp_path / "right.onnx", "fp16")
    model = onnx.load(tmp_path / "right.onnx")
    for node in model.graph.node:
        if node.op_type == "TreeAttention":
            node.attribute[0].f *= 1.2
    onnx.save(model, tmp_path / "wrong.onnx")
    with pytest.raises(BundleError, match="differs from the torch reference"):
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
        assert np.isfinite(output.logits).all() and np.isfinite(cache.buffer).all()
        results.append(output.logits[:8].copy())
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=TOLERANCE)


def test_the_cache_has_the_size_the_graph_was_exported_for(engine: OnnxRuntimeEngine) -> None:
    cache = filled(engine, CAPACITY - 8)
    assert cache.capacity == CAPACITY
    engine.score(BUSHY.batch(engine.spec, cache.length), cache)
    with pytest.raises(EngineError, match=f"{CAPACITY} cache slots"):
        engine.score(BUSHY.batch(engine.spec, cache.length), filled(engine, CAPACITY - 7))


def filled(engine: OnnxRuntimeEngine, length: int) -> Any:
    cache = engine.new_cache()
    prefill(engine, cache, [5] * length)
    return cache


def score(engine: OnnxRuntimeEngine, batch: TokenBatch, cache: Any) -> NDArray[np.float32]:
    return engine.score(batch, cache).logits[: batch.num_tokens].copy()
