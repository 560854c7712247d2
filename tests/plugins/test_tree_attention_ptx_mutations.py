"""What is wrong in a compiled kernel is noticed: barriers, waits, fences, bounds and strides, changed one at a time.

A change is noticed if the executor reports a fault, or if the output differs from the oracle's.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from attention import TOLERANCES, Case
from ptx.images import Image, attention_image
from ptx.launches import attend, for_capability
from ptx.parser import Fault

from draftwood.plugins.tree_attention.operands import ATTENTION
from draftwood.plugins.tree_attention.plan import Variant, plan_launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="compiling needs Triton: pip install triton"
)
SMALL = Case(2, 4, 7, 5, 600, (250, 3), 64, "fp16", multiprocessors=4)  # two splits, rows that fill no block
GROUPS = Case(1, 4, 15, 0, 201, (110,), 64, "fp16")  # 60 of 64 rows: warp groups on 9.0
SPLIT_GROUPS = Case(1, 4, 15, 0, 500, (400,), 64, "fp16", multiprocessors=8)  # the same in two splits
Pattern = str | Callable[[str], str]
Replacement = str | Callable[[re.Match[str]], str]


def kernel(case: Case, capability: int) -> tuple[Variant, Image]:
    variant = plan_launch(case.tensors().shape(), case.multiprocessors).variant
    return variant, attention_image(ATTENTION, variant, capability, capability == 80)


def noticed(case: Case, capability: int, text: str) -> str:
    """The fault, "wrong numbers", or nothing for a kernel whose text was changed."""
    others, (_, image) = for_capability(capability, capability == 80), kernel(case, capability)
    changed = image.changed(text)
    try:
        found = attend(case, lambda name, variant: changed if name == ATTENTION else others(name, variant)).output
    except Fault as fault:
        return type(fault).__name__
    same = np.allclose(found, case.tensors().expected(), rtol=0, atol=TOLERANCES[case.dtype])
    return "" if same else "wrong numbers"


def removed(text: str, places: list[re.Match[str]]) -> str:
    for place in reversed(places):
        text = text[: place.start()] + text[place.end() :]
    return text


def parameter(number: int, other: int) -> tuple[str, str]:
    """One of the kernel's numbers in place of another."""
    return rf"tree_attention_param_{number}\]", f"tree_attention_param_{other}]"


def bound_of_rows(text: str) -> str:
    """row < end_row; no comparison has a register as its bound more often."""
    bounds = Counter(re.findall(r"setp\.lt\.s32 \t%p\d+, %r\d+, (%r\d+);", text))
    ((bound, count),) = bounds.most_common(1)
    assert count >= 4
    return rf"setp\.lt\.s32 (\t%p\d+, %r\d+, {bound};)"


SWIZZLED_128, SWIZZLED_64 = (mode << 62 | 64 << 32 for mode in (1, 2))  # of a descriptor: its fields but the start
CAPACITY, ROWS, COLUMNS, QUERY_HEAD, QUERY_ROW, OUTPUT_HEAD, OUTPUT_ROW = 10, 12, 13, 15, 16, 17, 18  # parameters
ALONE = replace(SMALL, multiprocessors=1)
# A case, a capability, what is replaced at every place, and by what.
CHANGES: dict[str, tuple[Case, int, Pattern, Replacement]] = {
    "no wait for copies": (SMALL, 80, r"cp\.async\.wait_group \t\d+;", ""),
    "waits leave a group more": (SMALL, 80, r"(?<=cp\.async\.wait_group \t)\d+", lambda found: str(int(found[0]) + 1)),
    "copies that are not committed": (SMALL, 80, r"cp\.async\.commit_group;", ""),
    "one row too many": (SMALL, 80, bound_of_rows, r"setp.le.s32 \1"),
    "a column too early": (SMALL, 80, r"setp\.lt\.s32 (\t%p\d+, %r\d+, 0;)", r"setp.le.s32 \1"),
    "clamped to one too many": (SMALL, 80, r"max\.s32 (\t%r\d+, %r\d+), 0", r"max.s32 \1, 1"),
    "the mask's rows have another stride": (SMALL, 80, *parameter(COLUMNS, ROWS)),
    "the cache's heads have another stride": (SMALL, 80, *parameter(CAPACITY, ROWS)),
    "the query's rows have another stride": (SMALL, 80, *parameter(QUERY_ROW, QUERY_HEAD)),
    "the output's rows have another stride": (ALONE, 80, *parameter(OUTPUT_ROW, OUTPUT_HEAD)),
    "matrices that are not transposed": (SMALL, 80, r"\.trans\.shared", ".shared"),
    "a maximum that is no maximum": (SMALL, 80, r"max\.f32", "min.f32"),
    "the wrong thread's value": (SMALL, 80, r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+), 2,", r"\1, 1,"),
    "no fence of registers": (GROUPS, 90, r"wgmma\.fence\.sync\.aligned;", ""),
    "no fence for the asynchronous proxy": (GROUPS, 90, r"fence\.proxy\.async\.shared::cta;", ""),
    "no wait for products": (GROUPS, 90, r"wgmma\.wait_group\.sync\.aligned \d+;", ""),
    "products that are not committed": (GROUPS, 90, r"wgmma\.commit_group\.sync\.aligned;", ""),
    "another pattern of shared memory": (GROUPS, 90, str(SWIZZLED_128), str(SWIZZLED_64)),
    "no copy for warp groups is awaited": (GROUPS, 90, r"cp\.async\.wait_group \t\d+;", ""),
    "matrices are stored elsewhere": (SMALL, 120, r"(stmatrix[^;]*\[%r\d+)\]", r"\1+16]"),
    "pairs of fp32 the wrong way round": (SMALL, 120, r"(mov\.b64 \t%rd\d+, \{)(%r\d+), (%r\d+)\}", r"\1\3, \2}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_kernel_is_noticed(name: str) -> None:
    case, capability, pattern, replacement = CHANGES[name]
    _, image = kernel(case, capability)
    text, count = re.subn(pattern(image.text) if callable(pattern) else pattern, replacement, image.text)
    assert count and text != image.text
    assert noticed(case, capability, text)


@pytest.mark.parametrize(("case", "capability"), [(SMALL, 80), (GROUPS, 90), (SMALL, 120)])
def test_a_right_kernel_is_not(case: Case, capability: int) -> None:
    assert noticed(case, capability, kernel(case, capability)[1].text) == ""


def barriers(case: Case, capability: int, every: int = 1) -> None:
    """Each barrier alone; one that is idle, because no access lies between it and its neighbour, together with that."""
    _, image = kernel(case, capability)
    places = list(re.finditer(r"bar\.sync \t0;", image.text))
    assert len(places) >= 10
    chosen = range(0, len(places), every)
    idle = [i for i in chosen if not noticed(case, capability, removed(image.text, [places[i]]))]
    assert len(idle) <= len(chosen) // 4
    for i in idle:
        pairs = [sorted({i, j}) for j in (i - 1, i + 1) if 0 <= j < len(places)]
        texts = [removed(image.text, [places[j] for j in pair]) for pair in pairs]
        assert any(noticed(case, capability, text) for text in texts), f"barriers {i} and its neighbours"


def test_a_missing_barrier_is_noticed() -> None:
    barriers(SMALL, 80, every=5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "capability"), [(SMALL, 80), (SPLIT_GROUPS, 90), (SMALL, 120), (replace(SMALL, head_dim=128), 86)]
)
def test_each_missing_barrier_is_noticed(case: Case, capability: int) -> None:
    barriers(case, capability)
