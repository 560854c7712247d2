"""Registers, shared memory and CTAs of every variant of the kernel, against the committed budgets.

`cd tests/support && python -m ptx.occupancy` writes them anew, where a change is meant.
"""

from __future__ import annotations

import json
from itertools import product

import pytest

triton = pytest.importorskip("triton", reason="compiling needs Triton: pip install triton")

from ptx.occupancy import BUDGETS, CAPABILITIES, Use, ctas, measured, name, variants  # noqa: E402

TABLE = json.loads(BUDGETS.read_text(encoding="utf-8"))
VARIANTS = {name(variant): variant for variant in variants()}
SAMPLE = [("fp16, heads of 64, 32 rows", 90), ("fp16, heads of 64, 64 rows", 90)]


def test_every_variant_has_a_budget_and_runs() -> None:
    assert set(TABLE) == {"triton", *VARIANTS}
    for variant in VARIANTS:
        assert set(TABLE[variant]) == set(map(str, CAPABILITIES))
        assert all(Use(*use).ctas >= 1 for use in TABLE[variant].values())


@pytest.mark.parametrize(
    ("variant", "capability"),
    [pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.full) for each in product(VARIANTS, CAPABILITIES)],
)
def test_a_variant_keeps_its_budget(variant: str, capability: int) -> None:
    """Another release of Triton may use fewer or more registers, but must not halve what runs together."""
    budget, found = Use(*TABLE[variant][str(capability)]), measured(VARIANTS[variant], capability)
    if triton.__version__ == TABLE["triton"]:
        assert found == budget
    assert found.ctas >= budget.ctas and found.stack <= budget.stack + 64


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "capability", "expected"),
    [
        (128, 1024, 4, 80, 4),  # registers: 65536 / (128 * 128)
        (129, 1024, 4, 80, 3),  # 136 of them, by the unit in which a warp gets them
        (64, 81 * 1024, 4, 80, 2),  # shared memory: 164 KB, 82 of them for each with what the system takes
        (64, 82 * 1024, 4, 80, 1),
        (32, 1024, 8, 89, 6),  # warps: 48
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, capability: int, expected: int) -> None:
    assert ctas(registers, shared, warps, capability) == expected
