"""DriverLauncher: launches kernels that were compiled ahead of time, through the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from .library import KernelImage, KernelLibrary
from .operands import ATTENTION, COMBINE, Argument, Operands, Pointer, arguments
from .plan import LaunchPlan, Variant

C_TYPES = {Pointer: ctypes.c_void_p, int: ctypes.c_int32, float: ctypes.c_float}
HIDDEN = (Pointer(0, "u8"), Pointer(0, "u8"))  # Triton ends every parameter list with two scratch pointers, here unused


class LoadedKernel(NamedTuple):
    image: KernelImage
    function: Any


class DriverLauncher:
    """Launches the kernels of a library through the CUDA driver; the machine needs no compiler.

    Modules are loaded when a kernel is launched for the first time in a CUDA context, and stay loaded.
    """

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._loaded: dict[tuple[int, str, Variant], LoadedKernel] = {}

    @property
    def multiprocessors(self) -> int:
        return device_attribute("MULTIPROCESSOR_COUNT")

    def launch(self, plan: LaunchPlan, operands: Operands, scale: float, stream: int) -> None:
        """See Launcher.launch. Raises ValueError if the library lacks the plan's variant."""
        attention, combine = arguments(plan, operands, scale)
        self._launch(ATTENTION, plan.variant, plan.grid, attention, stream)
        if plan.num_splits > 1:
            self._launch(COMBINE, plan.variant.combined, plan.combine_grid, combine, stream)

    def _launch(
        self, kernel: str, variant: Variant, grid: tuple[int, int, int], values: Sequence[Argument], stream: int
    ) -> None:
        from cuda.bindings import driver

        loaded = self._kernel(kernel, variant)
        every = (*values, *HIDDEN)
        packed = tuple(value.address if isinstance(value, Pointer) else value for value in every)
        types = tuple(C_TYPES[type(value)] for value in every)
        block = (32 * loaded.image.num_warps, 1, 1)
        check_status(
            driver.cuLaunchKernel(loaded.function, *grid, *block, loaded.image.shared_bytes, stream, (packed, types), 0)
        )

    def _kernel(self, kernel: str, variant: Variant) -> LoadedKernel:
        from cuda.bindings import driver

        key = int(check_status(driver.cuCtxGetCurrent())), kernel, variant
        if key not in self._loaded:
            self._loaded[key] = load(self._library.candidates(kernel, variant, current_capability()))
        return self._loaded[key]


def load(candidates: Sequence[KernelImage]) -> LoadedKernel:
    """Load the first image that the driver accepts. Raises RuntimeError with the driver's reason if it accepts none."""
    from cuda.bindings import driver

    for image in candidates:
        error, module = driver.cuModuleLoadData(image.code)
        if error == driver.CUresult.CUDA_SUCCESS:
            function = check_status(driver.cuModuleGetFunction(module, image.entry.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check_status(driver.cuFuncSetAttribute(function, attribute, image.shared_bytes))
            return LoadedKernel(image, function)
    raise RuntimeError(f"the CUDA driver takes no image of {image.entry} ({error.name}): update the driver")


def current_capability() -> int:
    """Compute capability of the current context's device, 90 for 9.0."""
    return 10 * device_attribute("COMPUTE_CAPABILITY_MAJOR") + device_attribute("COMPUTE_CAPABILITY_MINOR")


def device_attribute(name: str) -> int:
    """A CU_DEVICE_ATTRIBUTE of the current context's device. Raises RuntimeError without a driver or a context."""
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check_status(driver.cuDeviceGetAttribute(attribute, check_status(driver.cuCtxGetDevice()))))


def check_status(answer: tuple[Any, ...]) -> Any:
    """The result of a driver call without its status. Raises RuntimeError if the status is an error."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None
