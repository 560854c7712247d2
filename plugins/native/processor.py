"""What the native kernels need of a processor, and which instructions it has."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "AMD64")  # names of the machine
FUSED = frozenset(("avx2", "fma", "f16c"))  # what the kernels need of x86; every 64-bit ARM has its like
VECTORS = frozenset(("avx2", "asimd"))  # a compiler that used neither found a lesser processor
WITHOUT = (
    "and the native kernels need AVX2 with FMA and F16C, or 64-bit ARM: run the bundle on such a processor, or build "
    "it with --backend onnxruntime"
)


class KernelError(ValueError):
    """The kernels cannot run here."""


def available(wanted: tuple[str, ...]) -> set[str]:
    """Instructions of this processor; where Linux does not list them, those that are wanted."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set(wanted)
    listed = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]  # on x86, on ARM
    return {word for line in listed for word in line.split()} or set(wanted)


def check_processor() -> None:
    """Raises KernelError where the processor cannot multiply and add in one step: sums would have other bits."""
    if platform.machine() in X86 and (missing := FUSED - available(tuple(FUSED))):
        raise KernelError(f"this processor has no {', '.join(sorted(missing))}, {WITHOUT}")
