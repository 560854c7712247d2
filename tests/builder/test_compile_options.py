"""What a TensorRT compilation is asked for, and refused, before anything is built."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from compiling import COLUMNS, WIDTHS, options
from hypothesis import given
from hypothesis import strategies as st

from draftwood.builder.engines import plan
from draftwood.builder.engines.plan import CompileOptions, check_compiler, width_families
from draftwood.models.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compute_capabilities": ("9.0",)}, r"not for 9\.0: .*--backend tensorrt "),
        ({"compute_capabilities": ("8.0", "10.0")}, r"not for 10\.0"),
        ({"compute_capabilities": ("sm_80",)}, "not for sm_80"),
        ({"compute_capabilities": ("8.0", "8.0")}, "twice"),
        ({"precision": "bf16", "compute_capabilities": ("7.5", "8.0")}, r"no bf16 for SM 7\.5: choose --precision"),
        ({"precision": "int4", "compute_capabilities": ("7.5",)}, "no int4 for SM"),
        ({"precision": "fp32", "compute_capabilities": ("7.5",)}, "no fp32 for SM"),
        ({"precision": "fp8", "compute_capabilities": ("8.6", "8.9")}, r"SM 8\.6 multiply no fp8.*--precision int8"),
        ({"precision": "int3"}, "choose fp16, bf16, fp32"),
        ({"timing_cache": Path("x")}, "--timing-cache"),
        ({"workspace": 0}, "at least 1 MiB"),
        ({"max_batch": 2}, "--no-plugin"),
    ],
)
def test_limits_are_checked_before_anything_is_built(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        options(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"backend": "abacus"}, "tensorrt, tensorrt-rtx"),
        ({"backend": "tensorrt", "compute_capabilities": ("8.0",)}, "leave out --compute-capability"),
        ({"columns": 8}, "more than 8"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"backend": "tensorrt-rtx", "precision": "fp16", "widths": WIDTHS, "columns": COLUMNS}
    with pytest.raises(ConfigError, match=named):
        CompileOptions(**given | changes)


@given(st.sets(st.integers(2, 300)).map(lambda more: (1, *sorted(more))))
def test_every_width_is_in_one_family(widths: tuple[int, ...]) -> None:
    families = width_families(widths)
    for width in widths:
        assert sum(family.minimum <= width <= family.maximum for family in families) == 1
    assert families[0].minimum == 1 and families[-1].maximum == widths[-1]
    assert all(family.minimum <= family.optimum <= family.maximum for family in families)
    assert {family.optimum for family in families} <= set(widths)


def test_fp8_is_for_the_gpus_that_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the default GPUs of TensorRT-RTX; TensorRT compiles for this machine's, which may be older."""
    assert options(precision="fp8", compute_capabilities=()).targets == ("8.9", "12.0")
    monkeypatch.setattr(plan, "tensorrt_module", lambda backend: None)
    monkeypatch.setattr(plan, "polygraphy", nullcontext)
    monkeypatch.setattr(plan, "this_gpu", lambda: "8.6")
    with pytest.raises(ConfigError, match=r"SM 8\.6 multiply no fp8"):
        check_compiler(CompileOptions("tensorrt", "fp8", WIDTHS, COLUMNS))
