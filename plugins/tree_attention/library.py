"""Kernels compiled ahead of time, without a GPU: cubins for the requested devices, and PTX for newer devices.

Compilation runs in child processes, one for each compute capability, because the parent may use Triton's interpreter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from ..installation import install
from .plan import Variant, row_blocks

PTX, CUBIN = "ptx", "cubin"
PTX_CAPABILITY = 80  # 8.0 and everything newer
CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 120, 121)  # Triton 3.9 uses no tensor cores on 7.5
MAGIC = b"DWKERNEL3"
SETTINGS = {  # of Triton, in the environment of a compilation
    "TRITON_INTERPRET": "0",
    "TRITON_DISABLE_LINE_INFO": "1",  # paths of this checkout, which would end up in the fingerprint
    "TRITON_DEFAULT_FP_FUSION": "1",
}


@dataclass(frozen=True, slots=True)
class KernelImage:
    """One compiled function. kernel: its name in `kernel.py`; entry: its symbol in `code`; capability: 90 for 9.0;
    shared_bytes: dynamic shared memory of a launch."""

    kernel: str
    variant: Variant
    capability: int
    format: str
    entry: str
    shared_bytes: int
    num_warps: int
    code: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """Every image that the calls of one operator need. triton: the version of the compiler."""

    images: tuple[KernelImage, ...]
    triton: str

    def candidates(self, kernel: str, variant: Variant, capability: int) -> tuple[KernelImage, ...]:
        """Images of a kernel for a device, best first: its own cubin, then PTX. Raises ValueError without any."""
        found = [image for image in self.images if (image.kernel, image.variant) == (kernel, variant)]
        own = [image for image in found if image.format == CUBIN and image.capability == capability]
        portable = [image for image in found if image.format == PTX and image.capability <= capability]
        if own or portable:
            return (*own, *portable)
        present = sorted({image.capability for image in found})
        raise ValueError(
            f"the kernel library has no {kernel} for {variant} on compute capability {capability / 10:.1f} (it has "
            f"{present or 'no such variant'}): build the engines again for this device and these sizes"
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of every image with its description, and of the compiler's version."""
        return hashlib.sha256(self._content()).hexdigest()

    def to_bytes(self) -> bytes:
        """The compressed content: every layer of an engine stores a copy."""
        return MAGIC + zlib.compress(self._content(), level=9)

    def _content(self) -> bytes:
        header = json.dumps({"triton": self.triton, "images": [describe(image) for image in self.images]}).encode()
        return struct.pack("<I", len(header)) + header + b"".join(image.code for image in self.images)

    @classmethod
    def from_bytes(cls, content: bytes) -> KernelLibrary:
        """The inverse of `to_bytes`. Raises ValueError for damaged bytes, and for those of another release."""
        if not content.startswith(MAGIC):
            raise ValueError("these bytes are no kernel library of this release: build the engines again")
        try:
            body = zlib.decompress(content[len(MAGIC) :])
            (size,) = struct.unpack_from("<I", body)
            header = json.loads(body[4 : 4 + size])
            images, start = [], 4 + size
            for entry in header["images"]:
                end = start + entry.pop("size")
                images.append(KernelImage(**entry | {"variant": Variant(**entry["variant"]), "code": body[start:end]}))
                start = end
        except (zlib.error, struct.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the kernel library is damaged ({error!r}): build the engines again") from error
        if start != len(body):
            raise ValueError("the kernel library is cut off: build the engines again")
        return cls(tuple(images), header["triton"])


def describe(image: KernelImage) -> dict[str, object]:
    """An image without its code, JSON-ready."""
    return asdict(replace(image, code=b"")) | {"code": "", "size": len(image.code)}


def compile_library(
    head_dim: int, group: int, dtype: str, max_rows: int, capabilities: Sequence[int] = ()
) -> KernelLibrary:
    """Compile for calls of up to `max_rows` rows: PTX for 8.0 and later, and a cubin for each of `capabilities` (90 for
    9.0, see `CAPABILITIES`). Needs no GPU; takes seconds per image.

    Raises ModuleNotFoundError, which names the extra to install, without Triton, ValueError for a capability that it
    cannot compile for, and RuntimeError with its output when it fails.
    """
    if unknown := [value for value in capabilities if value not in CAPABILITIES]:
        names, choices = (", ".join(f"{each / 10:.1f}" for each in group) for group in (unknown, CAPABILITIES))
        raise ValueError(
            f"the TreeAttention kernel is not compiled for compute capability {names}: build without the plugin, or "
            f"choose from {choices}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            f"compiling the TreeAttention kernel needs OpenAI Triton: {install('kernel')}, or build without the plugin",
            name="triton",
        )
    variants = [Variant(head_dim, group, dtype, block) for block in row_blocks(max_rows * group, head_dim, dtype)]
    targets = [(PTX, PTX_CAPABILITY), *((CUBIN, capability) for capability in sorted(set(capabilities)))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = list(pool.map(lambda target: compile_target(variants, *target), targets))
    return KernelLibrary(tuple(image for library in libraries for image in library.images), libraries[0].triton)


def compile_target(variants: Sequence[Variant], format: str, capability: int) -> KernelLibrary:
    """Run `compile.py` in a child process. Raises RuntimeError."""
    request = {"variants": [asdict(variant) for variant in variants], "format": format, "capability": capability}
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.compile"],
        input=json.dumps(request).encode(),
        capture_output=True,
        env=os.environ | SETTINGS,
    )
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"Triton could not compile the TreeAttention kernel for {capability / 10:.1f}: {message}")
    return KernelLibrary.from_bytes(done.stdout)
