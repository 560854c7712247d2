"""Compiles the kernels of a round to PTX: `python -m draftwood.plugins.device_round.compile` writes `ptx/`, and with
`--check` compares it instead."""

from __future__ import annotations

import importlib
import os
import re
import sys

from ..tree_attention.library import SETTINGS
from .images import CAPABILITY, FOLDER, HEADER, KERNELS

PTX_VERSION = 80  # of CUDA 12.0


def compiled(name: str) -> str:
    """The content of a kernel's file."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = KERNELS[name]
    function = getattr(importlib.import_module(f"{__package__}.{kernel.file}"), name)
    parameters = [each for each in function.arg_names if each not in kernel.constants]
    source = ASTSource(
        fn=function,
        signature=dict(zip(parameters, kernel.types, strict=True)) | dict.fromkeys(kernel.constants, "constexpr"),
        constexprs=kernel.constants,
    )
    options = {"num_warps": 1, "num_stages": 1, "ptx_version": PTX_VERSION, "enable_fp_fusion": False}
    result = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    if result.metadata.global_scratch_size:
        raise RuntimeError(f"{name} wants scratch memory, which launches do not give")
    return HEADER.format(triton.__version__, result.metadata.shared) + re.sub(r"\s+\n", "\n", result.asm["ptx"])


def main() -> None:
    os.environ.update(SETTINGS)  # before Triton is imported
    for name in KERNELS:
        file, text = FOLDER / f"{name}.ptx", compiled(name)
        if "--check" not in sys.argv[1:]:
            file.write_text(text)
        elif file.read_text() != text:
            raise SystemExit(f"{file} is not what {KERNELS[name].file}.py compiles to: run this without --check")


if __name__ == "__main__":
    main()
