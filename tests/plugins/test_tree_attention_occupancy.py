"""Registers, shared memory and CTAs of every variant of the kernel, against the committed budgets.

`cd tests/support && python -m ptx.occupancy` writes them anew, where a change is meant.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("compiling needs Triton: pip install triton", allow_module_level=True)

from ptx.occupancy import BUDGETS, CAPABILITIES, Use, ctas, measured, name, variants

from draftwood.plugins.tree_attention.plan import Variant

TABLE = json.loads(BUDGETS.read_text(encoding="utf-8"))
VARIANTS = {name(variant): variant for variant in variants()}
SAMPLE = [("fp16, heads of 64, 32 rows", 90), ("fp16, heads of 64, 64 rows", 90)]


def check(variant: Variant, capability: int) -> None:
    """Another release of Triton may use fewer or more registers, but must not halve what runs together."""
    import triton

    budget, found = Use(*TABLE[name(variant)][str(capability)]), measured(variant, capability)
    if triton.__version__ == TABLE["triton"]:
        assert found == budget
    assert found.ctas >= budget.ctas and found.stack <= budget.stack + 64


def test_every_variant_has_a_budget_and_runs() -> None:
    assert set(TABLE) == {"triton", *VARIANTS}
    for variant in VARIANTS:
        assert set(TABLE[variant]) == set(map(str, CAPABILITIES))
        assert all(Use(*use).ctas >= 1 for use in TABLE[variant].values())


@pytest.mark.parametrize(("variant", "capability"), SAMPLE)
def test_a_sample_keeps_its_budget(variant: str, capability: int) -> None:
    check(VARIANTS[variant], capability)


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_keeps_its_budget(variant: str, capability: int) -> None:
    check(VARIANTS[variant], capability)


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
