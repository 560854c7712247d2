"""The operator's body in standard ONNX operators, run by ONNX Runtime, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from attention import TOLERANCES, Case, cases, model
from hypothesis import given, settings
from numpy.typing import NDArray

from draftwood.plugins.tree_attention import op


@cache
def session(precision: str, capacity: int, heads: int, kv_heads: int, head_dim: int) -> onnxruntime.InferenceSession:
    content = model(precision, capacity, heads, kv_heads, head_dim).SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def run(case: Case) -> NDArray[np.float32]:
    """With zeros in invisible slots: the body multiplies them by zero."""
    tensors = case.tensors(poison=0.0)
    sizes = (case.capacity, case.kv_heads * case.group, case.kv_heads, case.head_dim)
    feeds = {name: tensor.numpy() for name, tensor in zip(op.INPUTS, tensors, strict=True)}
    (output,) = session(case.dtype, *sizes).run(None, feeds)
    result: NDArray[np.float32] = output.astype(np.float32)
    return result


@settings(max_examples=30, derandomize=True)
@given(cases())
def test_onnxruntime_runs_the_body_as_the_oracle(case: Case) -> None:
    expected = case.tensors(poison=0.0).expected()
    np.testing.assert_allclose(run(case), expected, rtol=0, atol=TOLERANCES[case.dtype])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_rows_that_see_nothing_give_zeros(precision: str) -> None:
    case = Case(2, 2, 4, 0, 32, (0,), 64, precision)
    output, behind_text = run(case), run(replace(case, lengths=(5,)))
    assert np.isfinite(output).all()
    assert not output[0, :, -1].any() and behind_text[0, :, -1].all()


@pytest.mark.parametrize("precision", op.PRECISIONS)
def test_the_body_is_valid_onnx(precision: str) -> None:
    """Shape inference goes through it: the checker knows the output's shape and type."""
    onnx.checker.check_model(model(precision, 64, 8, 2, 64), full_check=True)


def test_a_fused_operator_where_runtimes_have_one() -> None:
    kinds = {precision: [node.op_type for node in op.function(precision, 64)] for precision in op.PRECISIONS}
    assert ["Attention" in kinds[precision] for precision in ("fp32", "fp16", "bf16")] == [False, True, True]
    assert not any("Range" in each for each in kinds.values())


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8' is unknown; choose one of fp32, fp16, bf16"):
        op.function("int8", 64)
