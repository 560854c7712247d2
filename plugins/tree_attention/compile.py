"""`library.compile_library`'s child process: variants as JSON from stdin, a KernelLibrary to stdout."""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from . import kernel
from .library import PTX, KernelImage, KernelLibrary
from .operands import ATTENTION, COMBINE, Argument, Operands, Pointer, arguments
from .plan import COMBINE_OPTIONS, LaunchPlan, Shape, Variant

PTX_VERSION = 80  # of CUDA 12.0; every driver that supports the devices' TensorRT accepts it
MIN_SHARED = 86  # the capability with the least shared memory among those that accept the PTX
SCALARS = {int: "i32", float: "fp32"}


def main() -> None:
    request = json.load(sys.stdin)
    variants = [Variant(**each) for each in request["variants"]]
    target = request["format"], request["capability"]
    images = [compile_kernel(ATTENTION, variant, *target) for variant in variants]
    images += [
        compile_kernel(COMBINE, variant, *target) for variant in sorted({each.combined for each in variants}, key=str)
    ]
    sys.stdout.buffer.write(KernelLibrary(tuple(images), triton.__version__).to_bytes())


def compile_kernel(name: str, variant: Variant, format: str, capability: int) -> KernelImage:
    result = compile_triton(name, variant, format, capability)
    metadata = result.metadata
    if metadata.global_scratch_size:
        raise RuntimeError(f"{name} wants {metadata.global_scratch_size} bytes of scratch, which launchers do not give")
    code = result.asm["ptx"].encode() + b"\0" if format == PTX else result.asm["cubin"]
    return KernelImage(name, variant, capability, format, metadata.name, metadata.shared, metadata.num_warps, code)


def compile_triton(name: str, variant: Variant, format: str, capability: int) -> CompiledKernel:
    """Triton's result: every stage from its language to the code, and what a launch needs."""
    function = getattr(kernel, name)
    constants = variant.constants if name == ATTENTION else variant.combine_constants
    source = ASTSource(
        fn=function,
        signature=signature(name, variant, function.arg_names) | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=alignment(name, variant, function.arg_names),
    )
    options: dict[str, int] = dict(COMBINE_OPTIONS)
    if name == ATTENTION:
        stages = variant.num_stages(MIN_SHARED if format == PTX else capability)
        options = {"num_warps": variant.num_warps, "num_stages": stages}
    if format == PTX:
        options["ptx_version"] = PTX_VERSION
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def example(name: str, variant: Variant) -> tuple[Argument, ...]:
    """Example arguments, with the types of every launch."""
    shape = Shape(1, variant.group, 1, 1, 1, 1, variant.head_dim, variant.dtype)
    operands = Operands(0, 0, 0, 0, 0, 0, 0, (0, 0), (0, 0))
    attention, combine = arguments(LaunchPlan(shape, variant, 1), operands, 1.0)
    return {ATTENTION: attention, COMBINE: combine}[name]


def signature(name: str, variant: Variant, parameters: list[str]) -> dict[str, str]:
    """Triton's type of each run-time parameter."""
    return {
        parameter: f"*{value.dtype}" if isinstance(value, Pointer) else SCALARS[type(value)]
        for parameter, value in zip(parameters, example(name, variant), strict=False)
    }


def alignment(name: str, variant: Variant, parameters: list[str]) -> dict[tuple[int], list[list[object]]]:
    """Row addresses are multiples of 16 bytes; strides of 16 elements if the head size is."""
    aligned = {"query", "key", "value", "output", "partial", "logsum"}
    if variant.head_dim % 16 == 0:
        aligned |= {f"{tensor}_{axis}" for tensor in ("query", "output") for axis in ("head", "row")}
    return {(i,): [["tt.divisibility", 16]] for i, parameter in enumerate(parameters) if parameter in aligned}


if __name__ == "__main__":
    main()
