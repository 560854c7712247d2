"""Weight formats: how far rounding goes, that the reference runs on an engine's very weights, and that engines do."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from bundling import DEMO
from checkpoints import edit_weights, write_checkpoint
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from lowbit import assert_same_bits, greedy_texts, held, in_one_pass, one_by_one, open_engine
from native_parts import held as held_natively
from numpy.typing import NDArray
from steps import quiet
from trees import Tree

from draftwood.builder.checkpoints.checkpoint import Checkpoint, is_finite
from draftwood.builder.engines import graph
from draftwood.builder.engines.native import write_weights
from draftwood.builder.options import BuildOptions
from draftwood.builder.parallel import PART
from draftwood.builder.parity import largest_difference, rows_of
from draftwood.builder.pipeline import build
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint, RoundedCheckpoint, WeightFormat
from draftwood.builder.reference import score_rows
from draftwood.models import bindings
from draftwood.models.errors import BundleError, CheckpointError, ConfigError
from draftwood.runtime import SpeculativeConfig
from draftwood.runtime.engines.backends import BLOCKS
from draftwood.runtime.engines.base import ForwardOutput

formats = st.builds(WeightFormat, st.sampled_from([8, 4]), st.sampled_from(BLOCKS))


@st.composite
def matrices(draw: st.DrawFn) -> NDArray[np.float32]:
    """Of any scale, with empty blocks and outliers."""
    rows, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    matrix = rng.standard_normal((rows, 128 * blocks)).astype(np.float32) * np.float32(10.0 ** draw(st.integers(-6, 4)))
    matrix[:, : draw(st.integers(0, 128))] = 0
    matrix[0, -1] *= draw(st.sampled_from([1, 50]))
    return matrix


@settings(max_examples=40)
@given(matrix=matrices(), form=formats)
def test_no_block_errs_more_than_rounding_to_its_largest_number_would(
    matrix: NDArray[np.float32], form: WeightFormat
) -> None:
    stored = form.quantize("matrix", matrix)
    codes, scales = stored.codes, stored.scales
    largest = 2 ** (form.bits - 1) - 1
    assert codes.min() >= -largest - 1 and codes.max() <= largest and (scales > 0).all()
    blocks = matrix.reshape(len(matrix), -1, form.block)
    errors = stored.dequantized().reshape(blocks.shape) - blocks
    step = np.abs(blocks).max(-1, keepdims=True) / largest
    rounded = np.rint(blocks / np.where(step > 0, step, 1)) * step
    assert (np.square(errors).sum(-1) <= np.square(rounded - blocks).sum(-1) * 1.001).all()
    assert (errors[np.broadcast_to(step == 0, blocks.shape)] == 0).all()


@settings(max_examples=40)
@given(matrix=matrices())
def test_fp8_errs_by_half_a_step_of_its_mantissa_or_of_its_smallest_numbers(matrix: NDArray[np.float32]) -> None:
    """3 bits of mantissa; below 2^-6 steps of 2^-9; and the rounding of the fp16 scale, by which the largest weight may
    be clipped."""
    stored = FORMATS["tensorrt", "fp8"].quantize("matrix", matrix)
    assert stored.codes.dtype == ml_dtypes.float8_e4m3fn and np.isfinite(stored.codes.astype(np.float32)).all()
    scales = np.repeat(stored.scales, 128, 1)
    assert (scales.astype(np.float16) == scales).all()
    clipped = np.maximum(np.abs(matrix) - 448 * scales, 0)
    limit = np.maximum(np.abs(matrix) / 16, scales * 2.0**-10) * 1.001 + clipped
    assert (np.abs(stored.dequantized() - matrix) <= limit).all()
    exact = scales > 1e-3  # an fp16 number of 11 bits
    assert (clipped[exact] <= np.abs(matrix[exact]) * 2.0**-10).all()


@settings(max_examples=40)
@given(matrix=matrices(), exponent=st.sampled_from([-40, -20, -17, -14, -9, 0]))
@example(matrix=np.linspace(-1, 1, 128, dtype=np.float32).reshape(1, -1), exponent=-17)  # weights near 1e-5
def test_the_kernels_round_to_8_bits_as_numpy_does(matrix: NDArray[np.float32], exponent: int) -> None:
    """Bit for bit: a block's scale is the fp16 number nearest to its peak over 127, or the next one where the peak's
    code would exceed 127. Also of blocks that fp16 can hardly tell from zero: a code is worth its smallest number."""
    matrix = np.ldexp(matrix, exponent)
    assume(np.abs(matrix).max() < np.finfo(np.float16).max)
    found = FORMATS["native", "int8"].quantize("matrix", matrix)
    blocks = matrix.reshape(len(matrix), -1, 32)
    peaks = np.abs(blocks).max(-1)
    scales = np.where(peaks > 0, peaks / np.float32(127), np.float32(1)).clip(2.0**-24, 65504.0)
    scales = scales.astype(np.float16)
    beyond = np.rint(peaks / scales.astype(np.float32)) > 127
    scales = np.where(beyond, np.nextafter(scales, np.float16(np.inf)), scales).astype(np.float32)
    np.testing.assert_array_equal(found.scales, scales)
    assert (np.abs(found.dequantized() - matrix) <= 0.501 * scales.repeat(32, 1)).all()
    codes = np.rint(blocks / scales[..., None]).clip(-128, 127)
    np.testing.assert_array_equal(found.codes, codes.reshape(matrix.shape))
    assert found.offsets is None


@pytest.mark.parametrize(
    ("key", "most"), [(("native", "int8"), 127), (("native", "int4"), 1), (("tensorrt", "fp8"), 448)]
)
def test_a_weight_beyond_a_format_is_refused(key: tuple[str, str], most: float) -> None:
    """It became the largest number, in silence."""
    matrix = np.full((2, 256), -65504 * most, np.float32)
    np.testing.assert_array_equal(FORMATS[key].quantize("matrix", matrix).dequantized(), matrix)
    matrix[1, 3] *= np.float32(1.001)
    with pytest.raises(
        CheckpointError, match=f"matrix has weights too large for {key[1]}: build with --precision bf16"
    ):
        FORMATS[key].quantize("matrix", matrix)


@pytest.mark.parametrize("key", FORMATS, ids="-".join)
def test_a_matrix_of_many_parts_is_rounded_as_its_rows_are(key: tuple[str, str]) -> None:
    """What several threads do at a time changes nothing."""
    matrix = np.random.default_rng(3).standard_normal((PART // 1024 + 21, 1024)).astype(np.float32)
    whole = FORMATS[key].quantize("matrix", matrix)
    for part in (slice(0, 16), slice(250, 290), slice(-21, None)):
        for one, other in zip(whole, FORMATS[key].quantize("matrix", matrix[part]), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                np.testing.assert_array_equal(one[part], other)
    weights = whole.codes.reshape(len(matrix), whole.scales.shape[1], -1) * whole.scales[..., None]
    weights += 0 if whole.offsets is None else whole.offsets[..., None]
    np.testing.assert_array_equal(whole.dequantized(), weights.reshape(matrix.shape))


@pytest.mark.parametrize("precision", bindings.EXPORTED)
@pytest.mark.parametrize("shape", ["gqa", "tied", "biases", "demo draft"])
def test_engines_compute_with_exactly_the_oracles_weights(
    shape: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp32 activations an engine agrees with torch on the dequantised weights as closely as an fp32 engine does;
    with rounded ones, its own arithmetic, it stays near. Weights may stand beside the graph."""
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 0 if shape == "tied" else 10**9)
    folder = DEMO / "draft" if shape == "demo draft" else write_checkpoint(tmp_path / "checkpoint", shape)
    weights = held(folder, "onnxruntime", precision)
    for computed, limit in (("fp32", 2e-5), (precision, 0.1)):
        engine = open_engine(folder, "onnxruntime", precision, tmp_path / "draft.onnx", bindings.DRAFT, computed)
        difference = largest_difference(engine, score_rows(weights.tensor, weights.config, rows_of(engine.spec)))
        assert 0 < difference < limit
    assert difference > 1e-4  # rounding happens
    assert (tmp_path / "draft.onnx.data").exists() == (shape == "tied")


def test_parity_sees_another_weight(tmp_path: Path) -> None:
    """One code of one matrix differs by one: no bundle."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    engine = open_engine(folder, "onnxruntime", "int4", tmp_path / "target.onnx", computed="fp32")
    weights = held(folder, "onnxruntime", "int4")

    def other(name: str) -> NDArray[np.float32]:
        tensor = weights.tensor(name)
        if name == "model.layers.0.self_attn.o_proj.weight":
            tensor[0, 0] += np.abs(tensor[0, :32]).max() / 7
        return tensor

    with pytest.raises(BundleError, match="differs from the reference"):
        largest_difference(engine, score_rows(other, weights.config, rows_of(engine.spec)))


def test_parity_sees_what_is_no_number(tmp_path: Path) -> None:
    """Of the engine, of the reference, and of a weight that fp16 cannot hold. No comparison with NaN is true."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    engine = open_engine(folder, "onnxruntime", "fp32", tmp_path / "target.onnx")
    reference = score_rows(Checkpoint(folder).tensor, Checkpoint(folder).config, rows_of(engine.spec))
    broken = reference._replace(logits=np.full_like(reference.logits, np.nan))
    with pytest.raises(BundleError, match="infinite even in fp32: its weights are damaged"):
        largest_difference(engine, broken)
    engine.score = lambda batch, cache: output._replace(logits=np.full_like(output.logits, np.inf))  # type: ignore[method-assign]
    output = ForwardOutput(reference.logits, None, None)
    with pytest.raises(BundleError, match=r"infinite in fp32: .*--precision bf16 or fp32"):
        largest_difference(engine, reference)
    name = "model.layers.0.mlp.down_proj.weight"
    edit_weights(folder, lambda tensors: tensors[name].view(-1)[:1].fill_(1e5))
    assert np.isfinite(RoundedCheckpoint(Checkpoint(folder), "bf16").tensor(name)).all()
    with pytest.raises(CheckpointError, match=f"{name} has weights too large for fp16: build with --precision bf16"):
        RoundedCheckpoint(Checkpoint(folder), "fp16").tensor(name)


@pytest.mark.parametrize("precision", bindings.EXPORTED)
def test_onnx_runtime_takes_its_low_bit_kernel_for_every_matrix(precision: str, tmp_path: Path) -> None:
    open_engine(DEMO / "target", "onnxruntime", precision, tmp_path / "target.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(tmp_path / "target.onnx"), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("MatMulNBits") == 4 * 4 + 1 and "MatMul" not in kinds


def test_only_matrices_are_rounded_and_a_tied_embedding_is_kept(tmp_path: Path) -> None:
    """In graphs; the native engine rounds the embedding as it does the projection, and keeps one of both."""
    source = Checkpoint(write_checkpoint(tmp_path / "checkpoint", "tied", attention_bias=True))
    view = QuantizedCheckpoint(source, WeightFormat(4))
    embedding = source.tensor("model.embed_tokens.weight")
    np.testing.assert_array_equal(view.tensor("model.embed_tokens.weight"), embedding)
    head = view.tensor("lm_head.weight")
    tied = QuantizedCheckpoint(source, WeightFormat(4, embedding=True))
    assert tied.config.tie_embeddings
    np.testing.assert_array_equal(tied.tensor("model.embed_tokens.weight"), head)
    assert 0 < np.abs(head - embedding).max() < 0.2 * np.abs(embedding).max()
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        np.testing.assert_array_equal(view.tensor(name), source.tensor(name))
    # 48 feed-forward channels fill up to one block; the new ones are zero on both sides.
    assert (source.config.intermediate_size, view.config.intermediate_size) == (48, 128)
    assert (view.tensor("model.layers.0.mlp.up_proj.weight")[48:] == 0).all()
    assert (view.tensor("model.layers.0.mlp.down_proj.weight")[:, 48:] == 0).all()


def test_a_size_without_blocks_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", "head_dim 6")
    with pytest.raises(ConfigError, match=r"q_proj.weight has 30 inputs, no multiple of 32.*--precision fp32"):
        QuantizedCheckpoint(Checkpoint(folder), FORMATS["onnxruntime", "int4"])


@pytest.mark.parametrize("precision", bindings.EXPORTED)
def test_onnx_runtime_gives_a_chain_the_bits_of_plain_decoding(precision: str, tmp_path: Path) -> None:
    """In passes of two rows or more, and in chains: its attention adds in vector lanes, so that a tree, whose paths
    leave slots out, may differ in the last bit, and rounded activations may make more of it."""
    engine = open_engine(DEMO / "target", "onnxruntime", precision, tmp_path / "target.onnx")
    tokens = tuple(range(20, 30))
    chain = Tree(tokens, tuple(range(-1, 9)))
    expected = one_by_one(engine, range(5, 45), tokens)
    for width in (16, 32, 64):
        assert_same_bits(in_one_pass(engine, range(5, 45), chain, range(10), width), expected)


@pytest.mark.parametrize("precision", bindings.EXPORTED)
def test_speculative_text_is_plain_text(precision: str, tmp_path: Path) -> None:
    options = BuildOptions(DEMO / "target", DEMO / "draft", tmp_path / "bundle", precision=precision)
    manifest = build(options, quiet).manifest
    assert manifest.engines["target"].widths[0] == 2 and manifest.engines["draft"].widths[0] == 1
    prompts = ["def fibonacci(n):\n", "import os\n\n", "class Stack:\n    "]
    chain = SpeculativeConfig("chain", max_draft_len=5, budget="fixed")
    assert greedy_texts(options.output, chain, prompts, 100) == greedy_texts(options.output, None, prompts, 100)


WIDTHS = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_packing_needs_the_memory_of_one_layer(precision: str, tmp_path: Path) -> None:
    """Numpy's memory at its highest is that of one layer, however many there are."""
    peaks = []
    for layers in (2, 12):
        sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": layers}
        weights = held_natively(write_checkpoint(tmp_path / f"{layers}", **sizes), precision)
        followed: list[int] = []
        write_weights(weights, 64, tmp_path / "warm", follow=followed.append)
        assert followed == list(range(layers))
        peaks.append(min(peak_of(partial(write_weights, weights, 64, tmp_path / "file")) for _ in range(3)))
    assert peaks[1] < 1.5 * peaks[0]  # with all of twelve layers it is more than four times as much


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that numpy and Python have at most while `work` runs."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("dtype", "largest"), [(np.float32, 3.4028235e38), (np.float16, 65504.0), (ml_dtypes.bfloat16, 3.3895314e38)]
)
def test_what_is_not_finite_is_found(dtype: type, largest: float) -> None:
    numbers: NDArray[Any] = np.array([[0.0, -0.0, largest, -largest, 1e-7, -1.0]], dtype)
    assert is_finite(numbers) and is_finite(numbers[:, :0])
    for wrong in (np.nan, -np.nan, np.inf, -np.inf):
        for place in range(6):
            damaged = numbers.copy()
            damaged[0, place] = wrong
            assert not is_finite(damaged)
