"""The kernels of a round as PTX, which depends on no model, and runs on 8.0 and later.

`compile.py` writes it to `ptx/`: when a wheel is built, and at first use in a checkout.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "ptx"
CAPABILITY = 80  # the least one that the PTX runs on
I32, I64, F32, F64, U8 = "*i32", "*i64", "*fp32", "*fp64", "*u8"
NUMBER, LONG = "i32", "i64"
OFFER_BLOCK = 256  # most offers of a layer: a frontier's nodes times their children
NODE_BLOCK = 128
ROW_BLOCK = 256  # most rows of a tree
COLUMN_BLOCK = 64
WORD_BLOCK = 128
LIST_BLOCK = 256  # tokens of a list that are read at once
LEVELS = 3  # of weights, see `drawing.is_of`
RANKS, BINS = 4, 12  # of estimates of acceptance: those of the runtime's `Calibration`
TOKEN_BLOCK = 512  # tokens of a block of a row of logits
MAX_BLOCKS = 512  # of a row
PENDING = 2  # most tokens that a draft has not read after a round: the last accepted one, and the target's own
STATE = 8  # numbers that say where a text of a round is, see inputs.py
DTYPES = {NUMBER: np.int32, LONG: np.int64}


class Kernel(NamedTuple):
    """A function of a file of this package, the types of its run-time parameters by Triton's names, and its constants.
    One warp executes it, so that no barrier is needed."""

    file: str
    types: tuple[str, ...]
    constants: dict[str, int]


TABLE = (I32, I32, I32, I32)  # tokens, parents, depths, slots
PASS = (I64, I64, I32, U8, I64, I64)  # input_ids, position_ids, sequences, tree_mask, write_indices, output_rows
DRAWN = {"BLOCK": TOKEN_BLOCK, "BLOCKS": MAX_BLOCKS}
TREE = {"ROWS": ROW_BLOCK, **DRAWN}
ROW = (F32, F32, F64, F64, F64, I32)  # logits, block_peaks, settings, sums, bounds, lasts
WALK = (F64, F64, I32, I32, I32, I64, I32, I32, NUMBER)  # of `traverse` and `reject`
LEFT = (F64, F64, *[I32] * 4, *[F64] * 4, I32, F64)
KERNELS = {
    "expand": Kernel("growth", (I64, F32, I32, I32, I32, F64, *TABLE, *[NUMBER] * 9), {"OFFERS": OFFER_BLOCK}),
    "unroll": Kernel("growth", (I32, F64, I32, I32, *[NUMBER] * 3), {"NODES": NODE_BLOCK}),
    "pending_inputs": Kernel("inputs", (I32, *PASS, *[I32] * 3, F64, *TABLE, *[NUMBER] * 8), {"COLUMNS": COLUMN_BLOCK}),
    "tree_inputs": Kernel("inputs", (I32, I32, *TABLE, *PASS, *[NUMBER] * 9), {"COLUMNS": COLUMN_BLOCK}),
    "verify": Kernel("acceptance", (I64, *[I32] * 4, F64, *[I32] * 11, F64, *[NUMBER] * 5), {"ROWS": ROW_BLOCK}),
    "peaks": Kernel("drawing", (F32, F32, NUMBER, NUMBER), {"BLOCK": TOKEN_BLOCK}),
    "weigh": Kernel("drawing", (*ROW, F64, I32, F64, I32, *[NUMBER] * 5), DRAWN),
    "gather": Kernel("cutting", (*ROW, F64, I32, I32, F64, I32, *[NUMBER] * 3), DRAWN),
    "cut": Kernel("cutting", (F64, F64, F64, I32, I32, F64, I32, NUMBER, NUMBER), DRAWN),
    "extend": Kernel("drawing", (*ROW, F64, I32, *TABLE, F64, I32, I32, F64, F64, F32, *[NUMBER] * 5), DRAWN),
    "draw": Kernel("drawing", (*ROW, F64, I32, I32, I64, F32, *[NUMBER] * 3), DRAWN),
    "chances": Kernel("chain", (*ROW, F64, F64, I32, F64, F32, *[NUMBER] * 3), {"BLOCKS": MAX_BLOCKS}),
    "excess": Kernel("chain", (*ROW, *[F64] * 4, NUMBER, NUMBER), DRAWN),
    "accept": Kernel("chain", (*ROW, *[F64] * 6, I32, I64, *[NUMBER] * 3), DRAWN),
    "grow": Kernel(
        "drawn_growth",
        (F32, *[F64] * 4, I32, *TABLE, F64, I32, I32, F64, I32, F64, F32, I32, *[NUMBER] * 9),
        {**DRAWN, "NODES": OFFER_BLOCK},
    ),
    "prepare": Kernel("drawn_tree", (*ROW, F64, *[I32] * 4, F64, F64, I32, F32, NUMBER, NUMBER), DRAWN),
    "refuse": Kernel(
        "drawn_tree",
        (F64, F64, I32, F64, I32, *[I32] * 5, *[F64] * 7, *[NUMBER] * 6),
        {**TREE, "BLOCK": LIST_BLOCK},
    ),
    "traverse": Kernel("drawn_tree", WALK, {"ROWS": ROW_BLOCK}),
    "reject": Kernel("drawn_tree", WALK, {"ROWS": ROW_BLOCK}),
    "remainder": Kernel("remainder", (*LEFT, *[NUMBER] * 3), TREE),
    "settle": Kernel("remainder", (*LEFT, F64, I64, *[NUMBER] * 3), TREE),
    "commit": Kernel("acceptance", (I32, I32, I32, I32, LONG, *[NUMBER] * 5), {"WORDS": WORD_BLOCK}),
}
HEADER = "// Triton {}, sources {}, shared bytes: {}\n"  # the first line of a file


class Image(NamedTuple):
    """A kernel's PTX. types: of its parameters, with the two scratch pointers that Triton appends. shared_bytes: of a
    launch."""

    text: str
    types: tuple[str, ...]
    shared_bytes: int
    threads: int = 32

    def arguments(self, values: Sequence[int]) -> list[NDArray[Any]]:
        """The arguments of a launch, each an array of one number: addresses and numbers, then null pointers."""
        every = (*values, 0, 0)
        return [np.array([value], DTYPES.get(each, np.uint64)) for each, value in zip(self.types, every, strict=True)]


@functools.cache
def image(name: str) -> Image:
    """A kernel of KERNELS. Raises RuntimeError where the kernels are not compiled and cannot be."""
    if not is_current(FOLDER):
        make_images()
    text = (FOLDER / f"{name}.ptx").read_text()
    found = re.match(HEADER.format(r"\S+", r"\S+", r"(\d+)"), text)
    assert found is not None, f"{name}.ptx has no header"
    return Image(text, (*KERNELS[name].types, U8, U8), int(found[1]))


def make_images() -> None:
    """Compile all kernels in a process of its own, which takes half a minute. Raises RuntimeError."""
    command = [sys.executable, "-m", f"{__package__}.compile"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the kernels of rounds cannot be compiled to {FOLDER} ({last}): pip install triton, once")


@functools.cache
def sources() -> str:
    """The digest of what the kernels are compiled from, 16 hexadecimal digits."""
    content = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def is_current(folder: Path) -> bool:
    """Whether a folder has every kernel, compiled from these sources."""
    try:
        heads = [(folder / f"{name}.ptx").read_text()[:200] for name in KERNELS]
    except OSError:
        return False
    return all(f", sources {sources()}," in head for head in heads)
