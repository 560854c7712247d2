"""The torch reference of a build, one layer's weights at a time, and the memory that packing takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_checkpoint
from native_parts import held
from numpy.typing import NDArray

from draftwood.builder.checkpoints.checkpoint import is_finite
from draftwood.builder.engines.native import write_weights

WIDTHS = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_packing_needs_the_memory_of_one_layer(precision: str, tmp_path: Path) -> None:
    """Numpy's memory at its highest is that of one layer, however many there are."""
    peaks = []
    for layers in (2, 12):
        sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": layers}
        weights = held(write_checkpoint(tmp_path / f"{layers}", **sizes), precision)
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
