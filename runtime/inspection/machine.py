"""What this machine can run: each engine with what it has here, or what it lacks and the fix.

`look_around` gathers facts without importing a backend's package, which takes seconds. `abilities` judges them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...models.errors import EngineError
from ...models.release import version_of
from ...plugins.installation import install
from ..engines.backends import NATIVE, ONNXRUNTIME, TENSORRT, TENSORRT_RTX, Backend
from ..engines.compatibility import RTX_COMPUTE_CAPABILITIES
from ..engines.gpus import Driver, find_driver
from ..engines.onnx.onnxruntime import GPU_PACKAGE, GPU_RELEASE

CPU_PACKAGE = "onnxruntime"  # installs into the same folder as GPU_PACKAGE
CUDA_MAJOR = 13  # of the packages on the index
CUDA_LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcudnn.so.9")  # that the CUDA provider opens
OLDEST_TENSORRT, OLDEST_KERNEL = (7, 5), (7, 5)  # compute capabilities
BINDINGS = "cuda-bindings"
PACKAGES = (CPU_PACKAGE, GPU_PACKAGE, TENSORRT.name, TENSORRT_RTX.name, BINDINGS, "torch", "triton")


class Surroundings(NamedTuple):
    versions: Mapping[str, str]  # of the installed packages of PACKAGES
    obstacles: Mapping[str, str | None]  # of the backends for CPUs, by name; None where there is none
    driver: Driver | str  # NVIDIA's, or why there is none, with the fix
    torch_cuda: str | None  # the CUDA that torch was built for; None for a build without CUDA
    missing: Sequence[str]  # libraries of CUDA_LIBRARIES that are not found


class Ability(NamedTuple):
    engine: str
    found: str  # what it has here
    obstacles: tuple[str, ...]  # what keeps it from running, each with the fix

    @property
    def runs(self) -> bool:
        return not self.obstacles


def abilities(here: Surroundings) -> list[Ability]:
    """Every engine, the usual choice for a CPU first."""
    judged = (native, onnxruntime_cpu, onnxruntime_cuda, tensorrt, tensorrt_rtx, torch_cpu, torch_cuda)
    return [judge(here) for judge in judged]


def native(here: Surroundings) -> Ability:
    return Ability(NATIVE.name, "CPU", some(here.obstacles[NATIVE.name]))


def onnxruntime_cpu(here: Surroundings) -> Ability:
    found = here.versions.get(CPU_PACKAGE) or here.versions.get(GPU_PACKAGE)
    return Ability(ONNXRUNTIME.name, words("CPU", found), some(here.obstacles[ONNXRUNTIME.name]))


def onnxruntime_cuda(here: Surroundings) -> Ability:
    """The CUDA provider, which only GPU_PACKAGE has."""
    wrong, right = here.versions.get(CPU_PACKAGE), here.versions.get(GPU_PACKAGE)
    fix = install("gpu")
    obstacles = list[str]()
    if wrong is not None:
        both = f"{CPU_PACKAGE} overwrites {GPU_PACKAGE}, in the same folder" if right else "no CUDA provider"
        uninstall = f"pip uninstall {CPU_PACKAGE}{f' {GPU_PACKAGE}' if right else ''}"
        obstacles.append(f"{CPU_PACKAGE} {wrong} is installed, {both}: {uninstall}; {fix}")
    elif right is None:
        obstacles.append(f"{GPU_PACKAGE} is not installed: {fix}")
    elif numbers(right) < numbers(GPU_RELEASE):
        obstacles.append(f"the CUDA provider of {right} lacks operators: {fix}")
    if here.missing and not obstacles:
        libraries = f"pip install '{GPU_PACKAGE}[cuda,cudnn]'"
        obstacles.append(f"no {', '.join(here.missing)}: {libraries}, or install CUDA {CUDA_MAJOR} and cuDNN 9")
    gpu, without = gpu_of(here, OLDEST_KERNEL)
    found = words(gpu, right, "with --provider cuda")
    return Ability(f"{ONNXRUNTIME.name} on CUDA", found, (*obstacles, *without))


def tensorrt(here: Surroundings) -> Ability:
    gpu, without = gpu_of(here, OLDEST_TENSORRT)
    lacks = package_obstacles(here, TENSORRT)
    return Ability(TENSORRT.name, words(gpu, here.versions.get(TENSORRT.name)), (*lacks, *without))


def tensorrt_rtx(here: Surroundings) -> Ability:
    gpu, without = gpu_of(here, OLDEST_TENSORRT)
    lacks = [*package_obstacles(here, TENSORRT_RTX), *without]
    if isinstance(here.driver, Driver) and not without:
        first = here.driver.gpus[0]
        if first.compute_capability not in RTX_COMPUTE_CAPABILITIES:
            lacks.append(
                f"it does not support SM {first.compute_capability} ({first.name}): use --backend {TENSORRT.name}"
            )
    return Ability(TENSORRT_RTX.name, words(gpu, here.versions.get(TENSORRT_RTX.name)), tuple(lacks))


def torch_cpu(here: Surroundings) -> Ability:
    found = here.versions.get("torch")
    lacks = () if found else (f"torch is not installed: {install('train')}",)
    return Ability("torch", words("CPU", found, "to train"), lacks)


def torch_cuda(here: Surroundings) -> Ability:
    found, obstacles = here.versions.get("torch"), list[str]()
    if found is None:
        obstacles.append(f"torch is not installed: {install('train')}")
    elif here.torch_cuda is None:
        obstacles.append(f"torch {found} is a build without CUDA: pip install --force-reinstall torch")
    elif isinstance(here.driver, Driver) and numbers(here.torch_cuda)[:1] > here.driver.cuda[:1]:
        runs = ".".join(map(str, here.driver.cuda))
        obstacles.append(f"torch was built for CUDA {here.torch_cuda}, the driver runs {runs}: install a newer driver")
    if found and "triton" not in here.versions:
        obstacles.append(f"triton, which compiles our kernel, is not installed: {install('kernel')}")
    gpu, without = gpu_of(here, OLDEST_KERNEL, cuda=None)
    return Ability("torch on CUDA", words(gpu, found, "to measure"), (*obstacles, *without))


def words(*facts: str | None) -> str:
    """What was found, without the versions of packages that are not installed."""
    return ", ".join(fact for fact in facts if fact is not None)


def package_obstacles(here: Surroundings, backend: Backend) -> list[str]:
    """Packages that a backend of plans lacks."""
    return [
        f"{package} is not installed: {install(backend.name)}"
        for package in (backend.name, BINDINGS)
        if package not in here.versions
    ]


def gpu_of(here: Surroundings, oldest: tuple[int, int], cuda: int | None = CUDA_MAJOR) -> tuple[str, list[str]]:
    """The first GPU in words, and what keeps an engine from using it. cuda: the CUDA that the driver must run."""
    if isinstance(here.driver, str):
        return "no GPU", [here.driver]
    gpu, obstacles = here.driver.gpus[0], list[str]()
    if numbers(gpu.compute_capability) < oldest:
        needed = ".".join(map(str, oldest))
        obstacles.append(f"{gpu.name} is SM {gpu.compute_capability}, older than {needed}: use a backend for CPUs")
    if cuda is not None and here.driver.cuda < (cuda, 0):
        runs = ".".join(map(str, here.driver.cuda))
        obstacles.append(f"the NVIDIA driver runs CUDA {runs}, and {cuda} is needed: install a newer driver")
    return f"{gpu.name} (SM {gpu.compute_capability}, {gpu.nbytes / 1e9:.0f} GB)", obstacles


def look_around() -> Surroundings:
    driver: Driver | str
    try:
        driver = find_driver()
    except EngineError as error:
        driver = str(error)
    versions = {package: found for package in PACKAGES if (found := version_of(package)) is not None}
    obstacles = {backend.name: obstacle_of(backend) for backend in (NATIVE, ONNXRUNTIME)}
    missing = [name for name in CUDA_LIBRARIES if not is_library(name)]
    return Surroundings(versions, obstacles, driver, cuda_of_torch(), missing)


def obstacle_of(backend: Backend) -> str | None:
    try:
        backend.check_machine(None)
    except EngineError as error:
        return str(error)
    return None


def cuda_of_torch() -> str | None:
    """The CUDA that torch was built for, from its file of versions: importing torch takes seconds."""
    place = find_spec("torch")
    if place is None or place.origin is None:
        return None
    try:
        text = Path(place.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= ['\"](.+)['\"]", text, re.MULTILINE)
    return None if found is None else found[1]


def is_library(name: str, load: Callable[[str], object] = ctypes.CDLL) -> bool:
    """Whether a library is among the packages of this Python, or where the system looks for libraries."""
    place = find_spec("nvidia")
    roots = [] if place is None else list(place.submodule_search_locations or ())
    if any(True for root in roots for _ in Path(root).glob(f"*/lib/{name}")):
        return True
    try:
        load(name)
    except OSError:
        return False
    return True


def some(obstacle: str | None) -> tuple[str, ...]:
    return () if obstacle is None else (obstacle,)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (1, 27) of "1.27.0rc1"."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
