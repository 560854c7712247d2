"""The kernels of every instruction set compute the same bits: native_digests.c, compiled for other processors, run here
or under emulation, and compared with this processor's."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundling import ROOT

from draftwood.plugins.native import cache, processor
from draftwood.plugins.native.compile import AVX512, CARRIED, FLAGS, PROCESSOR, SECOND, SOURCE, compiler
from draftwood.plugins.native.processor import FUSED, X86, KernelError, available

DRIVER = ROOT / "tests" / "support" / "native_digests.c"
KEPT = [flag for flag in FLAGS if flag not in ("-O3", PROCESSOR, "-fPIC", "-shared")]
ARM = "aarch64-linux-gnu-gcc"
EMULATED = (  # compiler, its flags, emulator
    ("", ("-march=haswell",), ("qemu-x86_64", "-cpu", "Haswell")),
    (ARM, ("-march=armv8-a",), ("qemu-aarch64", "-cpu", "cortex-a57")),
    (ARM, ("-march=armv8.2-a+dotprod",), ("qemu-aarch64", "-cpu", "cortex-a76")),
    (ARM, ("-march=armv8.2-a+dotprod+i8mm",), ("qemu-aarch64", "-cpu", "max")),
)
on_x86 = pytest.mark.skipif(platform.machine() not in X86, reason="compares kernels of x86")


def compiled(command: list[str], flags: tuple[str, ...], program: Path) -> Path:
    # -O2: gcc makes fused products from there on.
    arguments = [*KEPT, "-O2", *flags, f"-I{SOURCE.parent}", str(DRIVER), "-o", str(program), "-lm", "-lpthread"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def digests(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of this processor."""
    if platform.machine() in X86 and (missing := FUSED - available(tuple(FUSED))):
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    program = compiled(compiler(), (PROCESSOR,), tmp_path_factory.mktemp("native") / "digests")
    lines = digests([str(program)])
    assert len(lines) > 20 and len({line.rpartition(" ")[2] for line in lines}) == len(lines)
    return lines


@on_x86
@pytest.mark.parametrize("march", ["x86-64-v3", pytest.param("skylake-avx512", marks=pytest.mark.full)])
def test_lesser_instructions_of_this_processor_compute_the_same_bits(
    march: str, expected: list[str], tmp_path: Path
) -> None:
    if march == "skylake-avx512" and "avx512bw" not in available(("avx512bw",)):
        pytest.skip("this processor has no AVX-512")
    assert digests([str(compiled(compiler(), (f"-march={march}",), tmp_path / "digests"))]) == expected


@pytest.mark.skipif("amx_bf16" not in available(("amx_bf16",)), reason="this processor has no matrix registers")
def test_where_linux_refuses_matrix_registers_vectors_compute_the_same_bits(
    expected: list[str], tmp_path: Path
) -> None:
    refused = ("-march=native", "-DREQUEST_PERMISSION=0xffff")  # arch_prctl has no such request
    assert digests([str(compiled(compiler(), refused, tmp_path / "digests"))]) == expected


@pytest.mark.full
@pytest.mark.parametrize(("cross", "flags", "emulator"), EMULATED, ids=lambda value: " ".join(value)[-14:])
def test_other_processors_compute_the_same_bits(
    cross: str, flags: tuple[str, ...], emulator: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    for needed in (emulator[0], *([cross] if cross else [])):
        if shutil.which(needed) is None:
            pytest.skip(f"there is no {needed}: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    if not cross and platform.machine() not in X86:
        pytest.skip("this machine's compiler is not one for x86")
    program = compiled([cross] if cross else compiler(), (*flags, "-static"), tmp_path / "digests")
    assert digests([*emulator, str(program)]) == expected


@pytest.mark.full
@pytest.mark.parametrize("target", ["x86_64-windows-gnu", "x86_64-macos", "aarch64-macos", "aarch64-linux-gnu"])
def test_the_kernels_compile_for_other_systems(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("there is no zig: pip install 'draftwood[native]'")
    flags = ("-march=x86_64_v3",) if target.startswith("x86") else ()
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *flags, *KEPT, "-O1", "-c", str(SOURCE)]
    done = subprocess.run([*command, "-o", str(tmp_path / "kernels.o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@on_x86
def test_a_processor_without_fused_products_is_told_both_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lesser = tmp_path / "cpuinfo"
    lesser.write_text("processor: 0\nflags\t\t: fpu sse2 avx f16c\n")
    monkeypatch.setattr(processor, "CPUINFO", lesser)
    for refuse in (cache.check_available, cache.open_kernels):
        with pytest.raises(KernelError, match=r"has no avx2, fma, .*run the bundle on .*--backend onnxruntime"):
            refuse()


def test_instructions_of_arm_are_read_as_linux_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nFeatures\t: fp asimd atomics asimddp i8mm\nCPU part\t: 0xd40\n")
    monkeypatch.setattr(processor, "CPUINFO", listed)
    assert available(()) == {"fp", "asimd", "atomics", "asimddp", "i8mm"}


@pytest.mark.parametrize("lesser", [(), pytest.param(("-mavx",), marks=on_x86)])
def test_a_library_without_vectors_is_of_no_use(monkeypatch: pytest.MonkeyPatch, lesser: tuple[str, ...]) -> None:
    """Where a system does not list its processor's instructions, the compiler knows them."""
    plain = cache.kernels((*(flag for flag in FLAGS if flag != PROCESSOR), *PLAIN, *lesser))
    monkeypatch.setattr(cache, "check_processor", lambda: None)
    monkeypatch.setattr(cache, "kernels", lambda: plain)
    with pytest.raises(KernelError, match=r"finds too few instructions on this processor, .*--backend onnxruntime"):
        cache.open_kernels()


PLAIN = ("-march=x86-64",)


ZEN4 = {"avx2", *AVX512, "avx512_bf16", "avx512_vnni", "gfni"}


@pytest.mark.parametrize(
    ("instructions", "prefetch", "models"),
    [
        ({"avx2"}, (), ["haswell", "haswell-l2"]),
        ({"avx2"}, SECOND, ["haswell-l2", "haswell"]),
        ({"avx2", *AVX512}, (), ["skylake-avx512", "haswell"]),
        (ZEN4, SECOND, ["cooperlake-l2", "haswell-l2", "cooperlake", "cascadelake"]),
        (ZEN4 | {"avx_vnni"}, (), ["cooperlake", "cascadelake", "skylake-avx512", "alderlake"]),
        (ZEN4 | {"avx512_fp16", "amx_tile", "amx_bf16"}, (), ["sapphirerapids", "cooperlake"]),
        ({"sse2"}, (), []),
    ],
)
def test_a_wheels_kernels_are_chosen_by_the_processor(
    instructions: set[str],
    prefetch: tuple[str, ...],
    models: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("draftwood.plugins.native.compile.SOURCE", tmp_path / "llama.c")
    monkeypatch.setattr(cache, "available", lambda wanted: instructions)
    monkeypatch.setattr(cache, "choose_prefetch", lambda: prefetch)
    assert cache.carried() == []
    for variant in CARRIED:
        variant.file.touch()
    assert [file.stem.removeprefix("llama-") for file in cache.carried()][: len(models)] == models
