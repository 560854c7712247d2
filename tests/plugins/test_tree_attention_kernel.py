"""The kernel's numbers, in Triton's interpreter, against the oracle. Invisible slots hold NaN in every case."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from attention import TOLERANCES, Case, cases, interpreted, interpreter
from hypothesis import HealthCheck, given, settings

from draftwood.plugins.tree_attention.plan import plan_launch

pytest.importorskip("triton", reason="the kernel is written in Triton's language: pip install triton")

TREE = Case(2, 4, 7, 5, 700, (300, 3), 64, "fp16", multiprocessors=8)


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    with interpreter() as pool:
        yield pool


def check(worker: ProcessPoolExecutor, case: Case) -> None:
    found, expected = worker.submit(interpreted, case).result(), case.tensors().expected()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES[case.dtype])


@settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_any_case_equals_the_oracle(worker: ProcessPoolExecutor, case: Case) -> None:
    check(worker, case)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.full)])
@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_splits_change_nothing(worker: ProcessPoolExecutor, dtype: str, multiprocessors: int) -> None:
    case = replace(TREE, dtype=dtype, multiprocessors=multiprocessors)
    assert (plan_launch(case.tensors().shape(), multiprocessors).num_splits > 1) == (multiprocessors > 1)
    check(worker, case)


@pytest.mark.parametrize("head_dim", [80, *(pytest.param(each, marks=pytest.mark.full) for each in (96, 128))])
def test_head_sizes(worker: ProcessPoolExecutor, head_dim: int) -> None:
    check(worker, replace(TREE, head_dim=head_dim))


def test_a_piece_of_prompt_takes_several_row_blocks(worker: ProcessPoolExecutor) -> None:
    """Nothing is committed, most blocks of the mask are empty above the diagonal."""
    case = Case(1, 2, 100, 0, 160, (0,), 128, "fp16")
    assert plan_launch(case.tensors().shape(), 1).grid == (4, 1, 1)
    check(worker, case)


@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_a_sequence_of_several_blocks_leaves_other_rows_alone(
    worker: ProcessPoolExecutor, multiprocessors: int
) -> None:
    """Its last block ends among the next sequence's rows, and the interpreter runs it behind that one's first block."""
    case = Case(1, 1, 40, 0, 700, (120, 90), 16, "fp32", multiprocessors, seed=1)
    assert case.sequences()[:, 0].tolist() == [0, 19]
    check(worker, case)


def test_sequences_without_rows_and_regions_in_any_order(worker: ProcessPoolExecutor) -> None:
    case = replace(TREE, lengths=(100, 0, 77, 130), rows=3, seed=3)
    first_rows, first_slots, *_ = case.sequences().T.tolist()
    assert len(set(first_rows)) < 4 and first_slots != sorted(first_slots)
    check(worker, case)


@pytest.mark.parametrize(("length", "live"), [(20, 1), (700, 11), (1400, 22)])
def test_more_splits_than_a_text_needs(worker: ProcessPoolExecutor, length: int, live: int) -> None:
    """Short contexts in a large cache: one split, which writes the output, or as many as the reduction reads at once,
    or more."""
    case = Case(1, 1, 3, 0, 8192, (length,), 64, "fp32", multiprocessors=132)
    layout = plan_launch(case.tensors().shape(), 132)
    assert layout.num_splits == 128 and layout.live_splits(length) == live
    check(worker, case)


def test_rows_that_see_nothing_give_zeros(worker: ProcessPoolExecutor) -> None:
    case = replace(TREE, lengths=(0, 0))
    assert not worker.submit(interpreted, case).result()[:, :, -1].any()


def test_a_full_cache_is_read_to_its_end_and_not_beyond(worker: ProcessPoolExecutor) -> None:
    """The mask has columns for slots that the cache does not have."""
    for length in (695, 699):
        check(worker, replace(TREE, lengths=(length,)))
    check(worker, replace(TREE, overhang=6))


def test_the_interpreter_refuses_bf16(worker: ProcessPoolExecutor) -> None:
    with pytest.raises(ValueError, match="take fp16 or fp32"):
        worker.submit(interpreted, replace(TREE, dtype="bf16")).result()
