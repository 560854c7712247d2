"""The native kernels, for this processor and for lesser ones."""

from __future__ import annotations

import pytest
from native_parts import kernels

from draftwood.plugins.native.library import NativeLibrary
from draftwood.plugins.native.processor import KernelError

# Every file of instructions that x86 compiles, with and without products of bytes.
PROCESSORS = (
    (),
    ("-march=skylake-avx512",),
    ("-march=x86-64-v3",),
    ("-march=x86-64-v3", "-mavxvnni"),
    ("-march=x86-64",),
)


@pytest.fixture(scope="module", params=PROCESSORS, ids=lambda flags: " ".join(flags) or "native")
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    try:
        return NativeLibrary(kernels(*request.param))
    except KernelError as error:
        pytest.skip(f"needs another processor: {error}")
