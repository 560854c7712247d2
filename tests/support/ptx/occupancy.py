"""How many CTAs of a kernel run on one multiprocessor: from registers and shared memory of its cubin.

`python -m ptx.occupancy` (in tests/support) writes the budgets of every variant, which a test compares.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import triton

from draftwood.plugins.tree_attention.plan import Variant, row_blocks, shared_memory

from .images import attention_cubin

BUDGETS = Path(__file__).with_name("occupancy.json")
CAPABILITIES = (80, 86, 89, 90, 100, 120)
HEADS = ((64, "fp16"), (128, "fp16"))
GROUP = 4  # query heads of a key/value head; it changes neither blocks nor registers by much
REGISTERS, REGISTER_UNIT = 65536, 256  # of a multiprocessor; a warp gets a multiple
RESERVED = 1024  # bytes of shared memory that the system takes for each CTA
WARPS = {86: 48, 89: 48, 120: 48}  # that a multiprocessor holds; others hold 64


class Use(NamedTuple):
    """registers of a thread; shared: bytes of a CTA that its launch asks for; stack: bytes of a thread, where registers
    did not suffice; ctas that run on one multiprocessor."""

    registers: int
    shared: int
    stack: int
    ctas: int


def variants() -> Iterator[Variant]:
    for head_dim, dtype in HEADS:
        for block in row_blocks(64 * GROUP, head_dim, dtype):
            yield Variant(head_dim, GROUP, dtype, block)


def measured(variant: Variant, capability: int) -> Use:
    """Of the cubin in a bundle, by the cuobjdump of the package triton."""
    image = attention_cubin(variant, capability)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image.code)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", text)[0]) for name in ("REG", "STACK"))
    shared = image.shared_bytes  # the kernels declare none of their own
    return Use(registers, shared, stack, ctas(registers, shared, image.num_warps, capability))


def ctas(registers: int, shared: int, warps: int, capability: int) -> int:
    """The least of what registers, shared memory and warps allow (CUDA C++ programming guide, technical table)."""
    of_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        REGISTERS // of_warp // warps,
        shared_memory(capability) // (shared + RESERVED),
        WARPS.get(capability, 64) // warps,
    )


def name(variant: Variant) -> str:
    return f"{variant.dtype}, heads of {variant.head_dim}, {variant.block_rows} rows"


def main() -> None:
    table = {
        name(variant): {str(capability): measured(variant, capability) for capability in CAPABILITIES}
        for variant in variants()
    }
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    BUDGETS.write_text("{\n" + f'  "triton": "{triton.__version__}",\n' + ",\n".join(rows) + "\n}\n")
    sys.stdout.write(f"{BUDGETS}: {len(table)} variants\n")


if __name__ == "__main__":
    main()
