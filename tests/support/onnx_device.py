"""A stand-in for ONNX Runtime's CUDA provider: that of the CPU, with caches, inputs and unread outputs in memory of its
own, as on a GPU. The code above it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftwood.runtime.engines.onnx.onnxruntime import PROVIDERS, Provider
from draftwood.runtime.engines.shared import memory


@contextmanager
def stand_in_device() -> Iterator[None]:
    """Engines that are opened with the provider "cuda" get the stand-in. The device has a GiB of free memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda: 1 << 30)
        patch.setitem(PROVIDERS, "cuda", Provider("CPUExecutionProvider", "cpu"))
        yield
