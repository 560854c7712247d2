"""Compile the kernels for this machine's processor with its C compiler, once, when a bundle is built."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "kernels" / "llama.c"
# No fast-math: results would depend on how a loop was cut. Products and sums contract, everywhere in the same way.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared")
COMPILERS = ("cc", "gcc", "clang")


class CompilerError(ValueError):
    """There is no C compiler, or it does not compile the kernels."""


def compiler() -> list[str]:
    """The command of a C compiler: $CC, the system's, or the one that `pip install ziglang` brings. Raises
    CompilerError when there is none."""
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise CompilerError(
        "backend native compiles its kernels for this processor and finds no C compiler: install gcc or clang, or "
        "pip install 'draftwood[native]'"
    )


def compile_kernels(path: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Write the kernels as a shared library. Raises CompilerError with the compiler's message."""
    command = [*compiler(), *flags, str(SOURCE), "-o", str(path), "-lm", "-lpthread"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run ({error}): set CC to a C compiler") from error
    if result.returncode:
        raise CompilerError(
            f"the kernels do not compile with {' '.join(command[:2])}:\n{result.stderr.strip()[-2000:]}"
        )
