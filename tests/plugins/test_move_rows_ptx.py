"""The kernel that moves rows of a cache, compiled for a GPU and executed instruction by instruction."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import pytest
from onnx_program import moved
from ptx.faults import Race
from ptx.images import mover_image
from ptx.launches import moved_by_kernel

from draftwood.runtime.engines.static.device import CacheGeometry, RowMove

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None and shutil.which("nvcc") is None,
    reason="needs a compiler of CUDA C++: pip install 'cuda-bindings[all]'",
)


@pytest.mark.parametrize(("row_bytes", "width"), [(128, 16), (24, 8), (12, 4), (6, 2)])
def test_rows_are_moved_in_order(row_bytes: int, width: int) -> None:
    """Every plane of every layer, padding between layers untouched, more rows than one launch takes, and rows that are
    overwritten before they are read, each by one thread: the executor reports it if two touch one byte."""
    geometry = CacheGeometry(3, 2, 300, row_bytes, 2 * 300 * row_bytes + 64)
    rng = np.random.default_rng(0)
    for kept in (1, 5, 270):
        sources, targets = rng.choice(300, kept, replace=False), rng.choice(300, kept, replace=False)
        content = rng.integers(0, 255, geometry.nbytes, np.uint8)
        found = moved_by_kernel(content, geometry, sources, targets)
        moved(RowMove(content.ctypes.data, geometry, sources, targets))
        np.testing.assert_array_equal(found, content)
    assert mover_image(width).program.entry == "move_rows"


def test_threads_that_shared_bytes_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    image = mover_image(16)
    text = image.text.replace("%tid.x", "%ctaid.x")  # all threads move what the first moves
    assert text != image.text
    monkeypatch.setattr("ptx.launches.mover_image", lambda width: image.changed(text))
    geometry = CacheGeometry(1, 1, 40, 128, 40 * 128)
    with pytest.raises(Race):
        moved_by_kernel(np.ones(geometry.nbytes, np.uint8), geometry, np.arange(1, 9), np.arange(8))
