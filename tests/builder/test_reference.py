"""The torch reference of a build, one layer's weights at a time, and the memory that packing takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import SHAPES, trained_head, write_checkpoint
from native_parts import held, spec_of
from numpy.typing import NDArray

from benchmarks.tools.torch_engine import TorchEngine
from draftwood.builder.checkpoints.checkpoint import is_finite
from draftwood.builder.engines.native import write_weights
from draftwood.builder.parity import batches, rows_of
from draftwood.builder.reference import score_rows
from draftwood.models.bindings import output_names
from draftwood.models.head_config import HeadConfig

WIDTHS = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_layer_at_a_time_gives_what_the_whole_model_gives(shape: str, tmp_path: Path) -> None:
    """The torch engine reads the prompt and then the tree behind its cache; the head of SpecDec++ included."""
    weights = held(write_checkpoint(tmp_path / "checkpoint", shape), "fp32")
    head = trained_head(HeadConfig(weights.config.hidden_size, 2, False), 1)
    spec = replace(spec_of(weights, "draft", "fp32", WIDTHS, 256), outputs=output_names("draft", True))
    found = score_rows(weights.tensor, weights.config, rows_of(spec), head)
    assert found.acceptance is not None
    engine = TorchEngine(weights.tensor, spec, head=head)
    cache, first = engine.new_cache(), 0
    for batch in batches(spec):
        output, end = engine.score(batch, cache), first + batch.num_tokens
        assert output.acceptance is not None
        rows = slice(end - 1, end) if len(batch.output_rows) == 1 else slice(first, end)
        count = rows.stop - rows.start
        np.testing.assert_allclose(found.logits[rows], output.logits[:count], atol=2e-5)
        np.testing.assert_allclose(found.acceptance[rows], output.acceptance[:count], atol=1e-5)
        cache.commit(range(batch.num_tokens))
        first = end
    assert first == len(found.logits) > 24


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
