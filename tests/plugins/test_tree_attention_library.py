"""Kernels compiled ahead of time on a machine without a GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.plugins.tree_attention.library import CUBIN, PTX, KernelImage, KernelLibrary, compile_library
from draftwood.plugins.tree_attention.operands import ATTENTION, COMBINE
from draftwood.plugins.tree_attention.plan import Variant

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="compiling needs Triton: pip install triton"
)
SMALL = Variant(64, 1, "fp16", 16)


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return compile_library(64, 1, "fp16", max_rows=16, capabilities=(90, 120))


@needs_triton
def test_ptx_and_cubins_of_every_kernel(library: KernelLibrary) -> None:
    found = {(image.kernel, image.format, image.capability): image for image in library.images}
    assert set(found) == {
        (kernel, *target) for kernel in (ATTENTION, COMBINE) for target in ((PTX, 80), (CUBIN, 90), (CUBIN, 120))
    }
    for (kernel, kind, _), image in found.items():
        assert image.entry == kernel and image.variant == SMALL
        assert image.num_warps == 4 and 0 <= image.shared_bytes < 227 * 1024
        assert image.code.startswith(b"\x7fELF") == (kind == CUBIN)
    portable = found[ATTENTION, PTX, 80].code
    assert b".target sm_80" in portable and b".version 8.0" in portable and b"mma.sync" in portable
    assert portable.endswith(b"\0"), "the driver reads PTX as a C string"


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "instruction"), [("bf16", b".bf16.bf16.f32"), ("fp32", b"fma.rn.f32")])
def test_other_dtypes(dtype: str, instruction: bytes) -> None:
    """bf16 by tensor cores; fp32 by fused multiply-adds, and not by TF32, which keeps 10 bits."""
    library = compile_library(128, 4, dtype, max_rows=4)
    (image,) = (each for each in library.images if each.kernel == ATTENTION)
    assert instruction in image.code and b".tf32" not in image.code


@needs_triton
def test_the_fingerprint_is_that_of_the_code(
    library: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled again from nothing it is the same; another variant, capability or code has another."""
    portable = replace(library, images=tuple(image for image in library.images if image.format == PTX))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which must not reach the compiler
    assert compile_library(64, 1, "fp16", 16).fingerprint == portable.fingerprint
    first, *others = library.images
    changed = [
        replace(library, triton="0"),
        replace(library, images=tuple(others)),
        replace(library, images=(replace(first, code=first.code + b"\0"), *others)),
        replace(library, images=(replace(first, variant=replace(SMALL, group=2)), *others)),
    ]
    assert len({each.fingerprint for each in (library, *changed)}) == 5


def stored() -> KernelLibrary:
    """A library without a compiler."""
    targets = ((PTX, 80), (CUBIN, 90))
    return KernelLibrary(
        tuple(KernelImage(ATTENTION, SMALL, each, kind, ATTENTION, 512, 4, kind.encode()) for kind, each in targets),
        "3.9.0",
    )


def test_bytes_and_back() -> None:
    assert KernelLibrary.from_bytes(stored().to_bytes()) == stored()


@pytest.mark.parametrize("damage", [b"", b"PTX", stored().to_bytes()[:-3], stored().to_bytes()[:12] + b"?"])
def test_damaged_bytes_are_refused(damage: bytes) -> None:
    with pytest.raises(ValueError, match="build the engines again"):
        KernelLibrary.from_bytes(damage)


def test_a_device_gets_its_own_code_or_ptx() -> None:
    def formats(capability: int) -> list[str]:
        return [image.format for image in stored().candidates(ATTENTION, SMALL, capability)]

    assert (formats(90), formats(121), formats(80)) == ([CUBIN, PTX], [PTX], [PTX])
    with pytest.raises(ValueError, match=r"compute capability 7\.5 \(it has \[80, 90\]\)"):
        stored().candidates(ATTENTION, SMALL, 75)
    with pytest.raises(ValueError, match="no such variant"):
        stored().candidates(ATTENTION, replace(SMALL, group=4), 90)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"compute capability 7\.5: build without the plugin"):
        compile_library(64, 1, "fp16", 16, (75,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[kernel\]'"):
        compile_library(64, 1, "fp16", 16)
