"""The project's kernels as PTX: compiled as for a bundle, without a GPU."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from draftwood.plugins.tree_attention.library import CUBIN, PTX, SETTINGS, KernelImage
from draftwood.plugins.tree_attention.operands import ATTENTION
from draftwood.plugins.tree_attention.plan import Variant
from draftwood.runtime.engines.static.cuda import MOVE_ROWS, mover_options

from .parser import Program, parse

PORTABLE = 80  # the PTX that every bundle holds beside its cubins


class Image(NamedTuple):
    """A kernel's PTX, and what a launch needs."""

    text: str
    program: Program
    shared_bytes: int
    threads: int

    def changed(self, text: str) -> Image:
        """The same launch of other code."""
        return self._replace(text=text, program=parse(text))


@functools.cache
def attention_image(kernel: str, variant: Variant, capability: int, portable: bool = False) -> Image:
    """The PTX that a cubin for `capability` is assembled from, or the portable one."""
    from draftwood.plugins.tree_attention.compile import compile_triton

    with patch.dict("os.environ", SETTINGS):
        result = compile_triton(kernel, variant, PTX if portable else CUBIN, capability)
    text = result.asm["ptx"]
    return Image(text, parse(text), result.metadata.shared, 32 * result.metadata.num_warps)


def attention_cubin(variant: Variant, capability: int) -> KernelImage:
    """The image in a bundle."""
    from draftwood.plugins.tree_attention.compile import compile_kernel

    with patch.dict("os.environ", SETTINGS):
        return compile_kernel(ATTENTION, variant, CUBIN, capability)


@functools.cache
def mover_image(width: int) -> Image:
    """The kernel that moves rows of a cache, by NVRTC as in production, or by nvcc where NVRTC is missing."""
    try:
        text = by_nvrtc(MOVE_ROWS, mover_options(width))
    except (ImportError, RuntimeError):  # cuda.pathfinder's DynamicLibNotFoundError, too
        text = by_nvcc(MOVE_ROWS, mover_options(width))
    return Image(text, parse(text), 0, 0)


def by_nvrtc(source: str, options: list[str]) -> str:
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"move_rows.cu", 0, [], [])
    encoded = [option.encode() for option in (f"--gpu-architecture=compute_{PORTABLE}", *options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text: bytes = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode()


def by_nvcc(source: str, options: list[str]) -> str:
    with TemporaryDirectory() as folder:
        code, result = Path(folder) / "move_rows.cu", Path(folder) / "move_rows.ptx"
        code.write_text(source)
        command = ["nvcc", "-ptx", f"-arch=compute_{PORTABLE}", *options, str(code), "-o", str(result)]
        subprocess.run(command, check=True, capture_output=True)
        return result.read_text()
