"""Compiles the kernels of a round to PTX: `python -m draftwood.plugins.device_round.compile` writes `ptx/` if it is not
current, and with `--digest` also `ptx.sha256`, which says in git what was compiled, by which release of Triton."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ..tree_attention.library import SETTINGS
from .images import CAPABILITY, FOLDER, HEADER, KERNELS, is_current, sources

PTX_VERSION = 80  # of CUDA 12.0
DIGEST = Path(__file__).with_name("ptx.sha256")


def compiled(name: str) -> str:
    """The content of a kernel's file."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = KERNELS[name]
    function = getattr(importlib.import_module(f"{__package__}.{kernel.file}"), name)
    source = ASTSource(fn=function, signature=dict(zip(function.arg_names, kernel.types, strict=True)))
    options = {"num_warps": 1, "num_stages": 1, "ptx_version": PTX_VERSION, "enable_fp_fusion": False}
    result = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    if result.metadata.global_scratch_size:
        raise RuntimeError(f"{name} wants scratch memory, which launches do not give")
    head = HEADER.format(triton.__version__, sources(), result.metadata.shared)
    return head + re.sub(r"\s+\n", "\n", result.asm["ptx"])


def digest() -> str:
    """What `ptx.sha256` says of the files in `ptx/`."""
    texts = [(FOLDER / f"{name}.ptx").read_text().split("\n", 1) for name in sorted(KERNELS)]
    (release,) = {head.split(",")[0].removeprefix("// ") for head, _ in texts}
    code = hashlib.sha256("".join(text for _, text in texts).encode()).hexdigest()
    return f"{code}  {len(KERNELS)} kernels by {release}\n"


def main() -> None:
    os.environ.update(SETTINGS)  # before Triton is imported
    if not is_current(FOLDER):
        FOLDER.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=".", dir=FOLDER) as work:  # each file appears whole, whoever else compiles
            for name in KERNELS:
                file = Path(work) / f"{name}.ptx"
                file.write_text(compiled(name))
                file.replace(FOLDER / file.name)
    if "--digest" in sys.argv[1:]:
        DIGEST.write_text(digest())


if __name__ == "__main__":
    main()
