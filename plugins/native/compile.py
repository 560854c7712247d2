"""Compile the kernels with the machine's C compiler: for its own processor, or, as
`python -m draftwood.plugins.native.compile FOLDER`, for those of CARRIED, which a wheel carries."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ..installation import install
from .processor import CPUINFO, X86

SECOND_CACHE = (("AuthenticAMD", "25"),)  # vendor and family: Zen 3 and 4
SECOND = ("-DFETCHED=2",)


def choose_prefetch(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """The flag for processors that shall read weights ahead into their L2 cache (kernels/ahead.h); none where Linux
    does not tell which processor this is. On Zen 4 a pass of five rows takes 0.7 to 0.8 of the time with it; on Zen 5 a
    pass of eight takes 1.5 times as long. gcc 12 takes both for the same processor."""
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            first = [line.partition(":") for line in takewhile(str.strip, lines)]  # the lines of one processor
    except OSError:
        return ()
    told = {name.strip(): value.strip() for name, _, value in first}
    return SECOND if (told.get("vendor_id"), told.get("cpu family")) in SECOND_CACHE else ()


SOURCE = Path(__file__).parent / "kernels" / "llama.c"
# No fast-math: results would depend on how a loop was cut. Products and sums contract, everywhere in the same way.
PROCESSOR = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", PROCESSOR, "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared", *choose_prefetch())
COMPILERS = ("cc", "gcc", "clang")
VERSION_SECONDS = 60  # a compiler that has not told its version by then is none


class Variant(NamedTuple):
    """Kernels for a kind of x86-64 processors."""

    model: str  # as compilers name one of them
    needs: tuple[str, ...]  # instructions, as Linux names them, that a lesser variant does not need
    prefetch: tuple[str, ...] = ()  # see choose_prefetch

    @property
    def flags(self) -> tuple[str, ...]:
        shared = (flag for flag in FLAGS if flag not in (PROCESSOR, *SECOND))
        # Scheduled for no model: on Zen 4 passes of eight rows take 0.93 to 0.97 of the time of -mtune=cooperlake.
        return (*shared, f"-march={self.model}", "-mtune=generic", *self.prefetch)

    @property
    def file(self) -> Path:
        return SOURCE.with_name(f"llama-{self.model}{'-l2' if self.prefetch else ''}.so")


AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
CARRIED = (  # the best first
    Variant("sapphirerapids", ("amx_bf16", "amx_tile", "avx512_fp16", "gfni")),
    Variant("cooperlake", (*AVX512, "avx512_bf16", "avx512_vnni")),
    Variant("cooperlake", (*AVX512, "avx512_bf16", "avx512_vnni"), SECOND),  # Zen 4
    Variant("cascadelake", (*AVX512, "avx512_vnni")),
    Variant("skylake-avx512", AVX512),
    Variant("alderlake", ("avx_vnni", "gfni")),
    Variant("haswell", ("avx2",)),
    Variant("haswell", ("avx2",), SECOND),  # Zen 3
)


class CompilerError(ValueError):
    """There is no C compiler, or it does not compile the kernels."""


def compiler() -> list[str]:
    """The command of a C compiler: $CC, the system's, or the one that `pip install ziglang` brings. Raises
    CompilerError when there is none, and when $CC cannot be read."""
    if chosen := os.environ.get("CC"):
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise CompilerError(f"CC={chosen!r} is no command ({error}): correct it, or unset CC") from error
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise CompilerError(
        "backend native compiles its kernels for this processor and finds no C compiler: install gcc or clang, or "
        f"{install('native')}; or build the bundle with --backend onnxruntime, which needs none"
    )


@cache
def compiler_version(command: tuple[str, ...]) -> str:
    """What a compiler says of itself; asked once for each command. Raises CompilerError when it cannot be run."""
    asked = [*command, "--version"]
    try:
        result = subprocess.run(
            asked, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise not_runnable(command[0], error) from error
    return result.stdout + result.stderr


def compile_kernels(path: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Write the kernels as a shared library. Raises CompilerError with the compiler's message."""
    command = [*compiler(), *flags, str(SOURCE), "-o", str(path), "-lm", "-lpthread"]
    environment = {**os.environ, "LC_ALL": "C"}  # so that a full disk is known by its message
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environment
        )
    except OSError as error:
        raise not_runnable(command[0], error) from error
    if not result.returncode:
        return
    message = result.stderr.strip()[-2000:]
    if "No space left on device" in message or "File too large" in message:
        raise CompilerError(
            f"no room to compile the kernels in {path.parent}: free some space, or set DRAFTWOOD_CACHE and TMPDIR to "
            "folders on another disk"
        )
    raise CompilerError(f"the kernels do not compile with {' '.join(command[:2])}:\n{message}")


def not_runnable(program: str, error: Exception) -> CompilerError:
    return CompilerError(f"{program} cannot be run ({error}): set CC to a C compiler")


def compile_carried(folder: Path) -> None:
    """Write the libraries of CARRIED that this compiler can make, where it is x86-64's; says what is left out."""
    if sys.platform != "linux" or platform.machine() not in X86:
        return

    def make(variant: Variant) -> None:
        try:
            compile_kernels(folder / variant.file.name, variant.flags)
        except CompilerError as error:
            print(f"The wheel has no kernels for {variant.model}: {error}", file=sys.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(make, CARRIED))


if __name__ == "__main__":
    compile_carried(Path(sys.argv[1]))
