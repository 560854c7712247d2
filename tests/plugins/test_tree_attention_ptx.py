"""The compiled kernel, executed instruction by instruction, against the oracle. Invisible slots hold NaN.

Every device gets the PTX from which its cubin is assembled; "portable" is the PTX in every bundle.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from attention import TOLERANCES, Case, live_splits, split_traffic

from draftwood.plugins.tree_attention.plan import ITEM_BYTES, plan_launch
from draftwood.plugins.tree_attention.reference import sequence_of, visible_slots

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="compiling needs Triton: pip install triton"
)
PORTABLE = 0
TREE = Case(2, 4, 7, 5, 600, (250, 3), 64, "fp16", multiprocessors=4)
EIGHT = replace(TREE, rows=12, capacity=700, lengths=(60, 0, 77, 13, 5, 64, 1, 40), multiprocessors=1)
PROMPT = Case(1, 4, 40, 0, 200, (90,), 64, "fp16")  # 160 rows of one matrix: two blocks of 128
SAMPLE = {
    "portable": (PORTABLE, TREE),
    "portable, 8 sequences": (PORTABLE, EIGHT),
    "portable, fp32": (PORTABLE, replace(TREE, dtype="fp32", capacity=300, lengths=(100, 3))),
    "portable, bf16, heads of 256": (PORTABLE, replace(TREE, head_dim=256, dtype="bf16", group=1)),
    "portable, heads of 12": (PORTABLE, replace(TREE, head_dim=12, group=3)),
    "a text without rows, regions in any order": (PORTABLE, replace(TREE, lengths=(100, 0, 77, 130), rows=3, seed=3)),
    "nothing is committed": (PORTABLE, replace(TREE, lengths=(0, 0))),
    "a cache that is nearly full": (PORTABLE, replace(TREE, lengths=(595,))),
    "a full cache": (PORTABLE, replace(TREE, lengths=(599,))),
    "a mask with columns beyond the cache": (PORTABLE, replace(TREE, overhang=6)),
    "a prompt in several row blocks": (PORTABLE, Case(1, 2, 100, 0, 160, (0,), 128, "fp16")),
    "a block that ends among the next text's rows": (PORTABLE, Case(1, 1, 40, 0, 700, (120, 90), 16, "fp32", 1, 1)),
    "the same in splits": (PORTABLE, Case(1, 1, 40, 0, 700, (120, 90), 16, "fp32", 8, 1)),
    "8.6": (86, replace(TREE, dtype="bf16", head_dim=128)),
    "8.9": (89, replace(TREE, head_dim=80)),
    "9.0": (90, TREE),
    "9.0, warp groups": (90, replace(PROMPT, rows=16)),
    "9.0, two warp groups": (90, PROMPT),
    "10.0": (100, TREE),
    "12.0": (120, replace(TREE, dtype="bf16")),
    "12.0, large blocks": (120, PROMPT),
}


def check(capability: int, case: Case) -> None:
    """The output, and that every visible byte of keys and values was read and no other."""
    from ptx.launches import attend, for_capability

    answer, tensors = attend(case, for_capability(capability or 80, capability == PORTABLE)), case.tensors()
    np.testing.assert_allclose(answer.output, tensors.expected(), rtol=0, atol=TOLERANCES[case.dtype])
    visible = np.zeros(case.capacity, np.bool_)
    mask, sequences = tensors.tree_mask.numpy()[0], case.sequences()
    for row in range(case.rows):
        visible[visible_slots(sequence_of(row, sequences), mask[row], case.capacity)] = True
    for read in answer.read:
        assert read.shape == (case.kv_heads, case.capacity, case.head_dim * ITEM_BYTES[case.dtype])
        assert (read == visible[None, :, None]).all()


@pytest.mark.parametrize("name", SAMPLE)
def test_the_kernel_equals_the_oracle(name: str) -> None:
    check(*SAMPLE[name])


@pytest.mark.parametrize(("length", "live"), [(20, 1), (250, 2), (1500, 12)])
def test_partial_results_are_those_of_the_splits_that_a_text_needs(length: int, live: int) -> None:
    """The grid has 32 splits for any length."""
    from ptx.launches import attend, for_capability

    case = Case(1, 4, 3, 0, 4096, (length,), 64, "fp16", multiprocessors=16)
    plan = plan_launch(case.tensors().shape(), case.multiprocessors)
    answer = attend(case, for_capability(80, portable=True))
    assert plan.grid[2] == 32 and live_splits(plan, length) == live
    assert answer.split_traffic == split_traffic(plan, length)
    np.testing.assert_allclose(answer.output, case.tensors().expected(), rtol=0, atol=TOLERANCES["fp16"])


KINDS = ((1, 8), (8, 3))  # heads of a group, sequences: blocks of 16 rows, and of 64 or 128 with splits
MATRIX = [
    *product((PORTABLE, 86, 89, 90, 120), ("fp16", "bf16"), (12, 24, 64, 80, 96, 128, 256), KINDS),
    *product((PORTABLE, 90, 120), ("fp32",), (12, 64, 80, 128, 256), KINDS),
    *product((100,), ("fp16", "bf16", "fp32"), (12, 64, 96, 128, 256), KINDS[:1]),
]


@pytest.mark.full
@pytest.mark.parametrize(("capability", "dtype", "head_dim", "kind"), MATRIX)
def test_every_device_dtype_and_head_size(capability: int, dtype: str, head_dim: int, kind: tuple[int, int]) -> None:
    group, count = kind
    lengths = {3: (100, 0, 150), 8: EIGHT.lengths}[count]
    rows = 7 if group == 1 else 24 if dtype != "fp32" else 5
    case = Case(1, group, rows, 3, 700, lengths, head_dim, dtype, multiprocessors=1 if count == 8 else 4, seed=head_dim)
    check(capability, case)
