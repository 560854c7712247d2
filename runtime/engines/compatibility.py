"""Whether a TensorRT plan can run on a machine. The check compares the plan's description in the manifest with the
machine's GPU and packages. It calls no driver, so tests run it on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PACKAGES = ("tensorrt", "tensorrt-rtx")  # names of the pip packages and of the backends
# GPUs that TensorRT-RTX 1.7 supports (its ComputeCapability enumeration). Hopper and data-centre Blackwell are missing.
RTX_COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


class WidthFamily(NamedTuple):
    """One optimisation profile, for passes of `minimum` to `maximum` rows, tuned for `optimum` rows."""

    minimum: int
    optimum: int
    maximum: int


class LayerReport(NamedTuple):
    """Numbers of layers in the network that TensorRT compiled, by kind."""

    total: int
    plugin: int  # attention by Draftwood's kernel, through IPluginV3
    attention: int  # attention by TensorRT's own kernel
    kv_cache_update: int  # in-place cache writes, two per decoder layer


class Kernel(NamedTuple):
    """The attention kernel inside a plan. format: the format of the kernel library, which the runtime must support."""

    fingerprint: str
    format: str


class TensorRTPlan(NamedTuple):
    """What a TensorRT plan was compiled for. families: the optimisation profiles, in the plan's order."""

    package: str  # one of PACKAGES
    version: str  # of the package; the plan runs with this version only
    compute_capabilities: tuple[str, ...]  # for example "8.9"
    kernel: Kernel | None  # None: TensorRT's own attention
    families: tuple[WidthFamily, ...]
    columns: int  # mask columns of a pass: speculative slots, the pass's own rows included
    layers: LayerReport
    executed: bool  # False: the build machine could not run the plan, and the parity check ran its ONNX graph instead

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {
            "kernel": None if self.kernel is None else self.kernel._asdict(),
            "families": [family._asdict() for family in self.families],
            "layers": self.layers._asdict(),
        }


class Machine(NamedTuple):
    """The GPU and packages of a machine. name and compute_capability are None without an NVIDIA driver or GPU."""

    name: str | None
    compute_capability: str | None  # "9.0"
    packages: Mapping[str, str]  # installed version by package, of PACKAGES
    kernel: str | None  # format of the kernel libraries that this release supports


def obstacle(plan: TensorRTPlan, device: Machine) -> str | None:
    """The reason why `device` cannot run `plan`, and the fix; None when it can run the plan."""
    reason = reason_and_fix(plan, device)
    if reason is None:
        return None
    capabilities = ", ".join(plan.compute_capabilities)
    return f"built for SM {capabilities} with {plan.package} {plan.version}, cannot run here because {reason}"


def reason_and_fix(plan: TensorRTPlan, device: Machine) -> str | None:
    """The second half of `obstacle`'s message; None when `device` can run `plan`."""
    if device.compute_capability is None:
        return (
            "this machine has no NVIDIA driver or no GPU: use the bundle on a machine with such a GPU, "
            "or rebuild with --backend onnxruntime"
        )
    installed = device.packages.get(plan.package)
    if installed is None:
        return f"{plan.package} is not installed: pip install '{plan.package}=={plan.version}'"
    if device.compute_capability not in plan.compute_capabilities:
        fix = rebuild_advice(plan.package, device.compute_capability)
        return f"{device.name} is SM {device.compute_capability}: {fix}"
    if installed != plan.version:
        return (
            f"{plan.package} {installed} is installed, and a plan runs only with the version that built it: "
            f"pip install '{plan.package}=={plan.version}', or rebuild"
        )
    if plan.kernel is not None and plan.kernel.format != device.kernel:
        return (
            f"its attention kernel is of format {plan.kernel.format} and this release runs {device.kernel}: "
            "rebuild, or install the draftwood release that built it"
        )
    return None


def rebuild_advice(package: str, compute_capability: str) -> str:
    """The command-line option that builds a plan for this GPU."""
    if package == "tensorrt-rtx" and compute_capability in RTX_COMPUTE_CAPABILITIES:
        return f"rebuild with --compute-capability {compute_capability}"
    return "rebuild on this machine with --backend tensorrt"
