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
from collections import namedtuple
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
    """A function of a file of this package, and the types of its parameters by Triton's names. One warp executes it, so
    that no barrier is needed."""

    file: str
    types: tuple[str | tuple[str, ...], ...]

    @property
    def arguments(self) -> list[str]:
        """The types of a launch's arguments: what stands together in a parameter follows one another."""
        return [each for types in self.types for each in ([types] if isinstance(types, str) else types)]


def together(**types: str) -> tuple[str, ...]:
    """The types of what stands together in one parameter, a named tuple."""
    return namedtuple("Together", types)(**types)


INPUTS = together(input_ids=I64, position_ids=I64, sequences=I32, tree_mask=U8, write_indices=I64, output_rows=I64)
LISTS = together(draft_rows=I32, frontier=I32, totals=I32)
LAYERS = together(frontier=I32, totals=I32)
TABLE = together(tokens=I32, parents=I32, depths=I32, slots=I32)  # of the nodes
RANKING = together(top_ids=I64, top_logprobs=F32)
TREE = together(row_nodes=I32, tokens=I32, parents=I32, depths=I32, node_values=F64, rows=I32, slots=I32)
PATH = together(summary=I32, accepted=I32, target_rows=I32, draft_rows=I32, moves=I32)
ROWS = together(tokens=I32, parents=I32, depths=I32, row_values=F64)
SCORES = together(logits=F32, block_peaks=F32, settings=F64, sums=F64, bounds=F64, lasts=I32)  # of rows: drawing.py
GROWN = together(tokens=I32, parents=I32, depths=I32, slots=I32, node_values=F64, frontier=I32, totals=I32)
DRAFT = together(block_peaks=F32, sums=F64, weights=F64)
SITES = together(reach=F64, ranks=I32)
FOUND = together(shares=F64, row_peaks=F32, num_drawn=I32)
SIZES = together(columns=NUMBER, blocks=NUMBER, num_names=NUMBER, stride=NUMBER)
OFFERS = together(counts=I32, weights=F64, columns=I32, names=I32)
DRAWN = together(row_nodes=I32, row_parents=I32, tokens=I32, slots=I32)
SCRATCH = together(residual=F64, remaining=F64)
REFUSALS = together(norms=F64, masses=F64, pis=F64, totals=F64)
CUT = (I32, F64, I32)  # found, found_weights, found_columns
WALK = (F64, F64, I32, I32, I32, I64, I32, I32, NUMBER)  # of `traverse` and `reject`
LEFT = (F64, F64, DRAWN, REFUSALS, I32, F64)
KERNELS = {
    "expand": Kernel("growth", (RANKING, I32, LAYERS, F64, TABLE, *[NUMBER] * 9)),
    "unroll": Kernel("growth", (I32, F64, I32, I32, *[NUMBER] * 3)),
    "pending_inputs": Kernel("inputs", (I32, INPUTS, LISTS, F64, TABLE, *[NUMBER] * 8)),
    "tree_inputs": Kernel("inputs", (I32, I32, TABLE, INPUTS, *[NUMBER] * 9)),
    "verify": Kernel("acceptance", (I64, TREE, I32, PATH, ROWS, *[NUMBER] * 5)),
    "peaks": Kernel("drawing", (F32, F32, NUMBER, NUMBER)),
    "weigh": Kernel("drawing", (SCORES, F64, I32, F64, I32, *[NUMBER] * 5)),
    "gather": Kernel("cutting", (SCORES, F64, I32, *CUT, *[NUMBER] * 3)),
    "cut": Kernel("cutting", (F64, F64, F64, I32, *CUT, NUMBER, NUMBER)),
    "extend": Kernel("drawing", (SCORES, F64, I32, GROWN, F64, F64, F32, *[NUMBER] * 5)),
    "draw": Kernel("drawing", (SCORES, F64, I32, I32, I64, F32, *[NUMBER] * 3)),
    "chances": Kernel("chain", (SCORES, F64, F64, I32, F64, F32, *[NUMBER] * 3)),
    "excess": Kernel("chain", (SCORES, *[F64] * 4, NUMBER, NUMBER)),
    "accept": Kernel("chain", (SCORES, *[F64] * 6, I32, I64, *[NUMBER] * 3)),
    "grow": Kernel("drawn_growth", (DRAFT, F64, F64, I32, GROWN, SITES, FOUND, SIZES, *[NUMBER] * 5)),
    "prepare": Kernel("drawn_tree", (SCORES, F64, *[I32] * 4, F64, F64, I32, F32, NUMBER, NUMBER)),
    "refuse": Kernel("drawn_tree", (F64, F64, OFFERS, DRAWN, SCRATCH, REFUSALS, F64, *[NUMBER] * 6)),
    "traverse": Kernel("drawn_tree", WALK),
    "reject": Kernel("drawn_tree", WALK),
    "remainder": Kernel("remainder", (*LEFT, *[NUMBER] * 3)),
    "settle": Kernel("remainder", (*LEFT, F64, I64, *[NUMBER] * 3)),
    "commit": Kernel("acceptance", (I32, I64, I32, I32, I32, LONG, *[NUMBER] * 5)),
}
HEADER = "// Triton {}, sources {}, shared bytes: {}\n"  # the first line of a file


class Image(NamedTuple):
    """A kernel's PTX. types: of its arguments, with Triton's two scratch pointers. shared_bytes: of a launch."""

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
    return Image(text, (*KERNELS[name].arguments, U8, U8), int(found[1]))


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
