"""The file of weights that the native engine reads: names, types and shapes of its tensors, and their memory.

It is a safetensors file. Its content follows from the engine's spec alone. A file with any other content is refused
before the kernels read it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models.bindings import ACCEPTANCE as ACCEPTANCE_OUTPUT
from ....models.bindings import BITS, INTEGERS, SUPERBLOCKS
from ....models.config import LlamaConfig
from ....models.errors import EngineError, NoRoomError
from ....models.layers import Matrix, Network, network_of
from ....plugins.native.library import BLOCK
from ....plugins.native.packing import (
    GROUPS,
    LAYOUT,
    PAIR_BLOCK,
    PANEL,
    SUPERBLOCK,
    superblock_bytes,
    whole_panels,
)
from ..base import EngineSpec

# By safetensors' names. 16-bit floats and scales are stored as unsigned integers of the same bits.
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("float32"), "U16": np.dtype("uint16"), "U8": np.dtype("uint8")}
STORED = {"fp32": "F32", "fp16": "U16", "bf16": "U16", **dict.fromkeys(BITS, "U8")}  # matrices, by precision
OFFSETS = ("int5", "int4", "int5k", "int4k")  # precisions whose blocks have an offset beside the scale
METADATA, LAYOUT_KEY = "__metadata__", "draftwood_layout"
ROPE = (("cosine", "sine"), ("local_cosine", "local_sine"))  # rotary tables: the model's, the local ones
ACCEPTANCE = "acceptance."  # prefix of the names of an acceptance head's tensors
ALIGNMENT = 64  # bytes of a vector
LARGE_PAGE = 1 << 21  # bytes
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
MAX_DIMENSIONS, MAX_BYTES = 8, 1 << 53  # of a tensor: a product of so few numbers of this size costs nothing
MAX_BLOCKS = 64  # blocks of an acceptance head; those of SpecDec++ have 0 to 4

Weights = dict[str, NDArray[Any]]


class Stored(NamedTuple):
    """Dtype and shape of a tensor in the file. dtype: a name in DTYPES."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def packed_network(config: LlamaConfig, precision: str) -> Network:
    """The description of a model, with a feed-forward size that divides into blocks."""
    block = BLOCK if precision in INTEGERS else 1  # the feed-forward size is padded to whole blocks
    return network_of(replace(config, intermediate_size=-(-config.intermediate_size // block) * block))


def tables_of(network: Network) -> list[bool]:
    """Which rotary tables a model has, see models/rope.py: always those of the model."""
    return [False, *({True} & {layer.local for layer in network.layers})]


def packed_rows(matrix: Matrix) -> int:
    """Outputs of a packed matrix, each source of a gated one padded to whole panels, since their panels alternate."""
    return sum(map(whole_panels, matrix.outputs)) if matrix.gated else whole_panels(sum(matrix.outputs))


def expected_tensors(
    config: LlamaConfig, precision: str, others: Mapping[str, str], positions: int, head_blocks: int | None
) -> Iterator[tuple[str, Stored]]:
    """Name, dtype and shape of every tensor, in the order in which a pass reads them; an embedding that is not
    tied to the projection is last.

    others: see EngineSpec.matrices. positions: positions in the rotary tables. head_blocks: blocks of the acceptance
    head, None without one. Raises EngineError when the inputs of a matrix do not divide into blocks.
    """

    def vector(size: int) -> Stored:
        return Stored("F32", (whole_panels(size),))

    def matrix(part: Matrix) -> Iterator[tuple[str, Stored]]:
        name, inputs, rows = part.name, part.inputs, packed_rows(part)
        count, own = rows // PANEL, others.get(name, precision)
        if own in BITS:
            yield f"{name}.weights", Stored(STORED[own], (count, inputs * BITS[own] // 32, PANEL, 4))
            blocks, pair = blocks_of(own, name, inputs), (2,) if own in OFFSETS else ()
            plain, each = Stored("U16", (count, blocks, *pair, PANEL)), superblock_bytes(BITS[own], bool(pair))
            yield f"{name}.scales", Stored("U8", (count, blocks, each)) if own in SUPERBLOCKS else plain
        elif own == "bf16":
            pairs = -(-inputs // PAIR_BLOCK) * PAIR_BLOCK // 2
            yield f"{name}.weights", Stored(STORED[own], (count, pairs, PANEL, 2))
        else:
            yield f"{name}.weights", Stored(STORED[own], (count, inputs, PANEL))
        if part.bias:
            yield f"{name}.bias", Stored("F32", (rows,))

    hidden, network = config.hidden_size, packed_network(config, precision)
    for local in tables_of(network):
        for table in ROPE[local]:
            yield table, Stored("F32", (positions, config.rotary_size // 2))
    if network.fusion is not None:
        yield from matrix(network.fusion)
    for layer in network.layers:
        for norm in layer.norms:
            yield norm.name, vector(norm.size)
        for part in layer.matrices:
            yield from matrix(part)
    yield network.norm.name, vector(hidden)
    yield from matrix(network.head)
    if head_blocks is not None:
        yield ACCEPTANCE + "odds", vector(hidden)
        yield ACCEPTANCE + "shift", Stored("F32", (1,))
        for block in range(head_blocks):
            name = f"{ACCEPTANCE}block.{block}"
            yield f"{name}.weights", Stored("F32", (whole_panels(hidden) // PANEL, hidden, PANEL))
            yield f"{name}.bias", vector(hidden)
    if not config.tie_embeddings:
        yield from matrix(network.embedding)


def blocks_of(precision: str, name: str, inputs: int) -> int:
    """Number of blocks, or of superblocks, in a row of a matrix. Raises EngineError when its inputs do not divide."""
    supers = precision in SUPERBLOCKS
    if inputs % (SUPERBLOCK if supers else BLOCK):
        raise EngineError(f"{name} has {inputs} inputs, which divide into no blocks of {precision}: rebuild the bundle")
    return inputs // (SUPERBLOCK if supers else GROUPS[BITS[precision]])


def read_weights(path: Path, spec: EngineSpec, private: bool = False) -> Weights:
    """Map a file into memory, and return its tensors. Processes that open the file share its pages. private: whether
    the file is copied into one piece of memory instead; then later changes of the file do not matter. Raises
    EngineError when the file cannot be read or differs from the spec, and NoRoomError."""
    try:
        with path.open("rb") as file:
            places = read_header(file.read(8), file.read, path.stat().st_size)
            check_tensors(path.name, {name: place.stored for name, place in places.items()}, spec)
            size = max(place.end for place in places.values())
            memory = copied(file, size) if private else mapped(file, size)
    except MemoryError as error:
        raise NoRoomError(
            f"there is too little memory for a copy of {path.name}: free some, or map the file"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{path.name} cannot be read ({error}): rebuild the bundle") from error
    return {
        name: memory[place.begin : place.end].view(DTYPES[place.stored.dtype]).reshape(place.stored.shape)
        for name, place in places.items()
    }


def mapped(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """Map a file, and return its next `size` bytes. The mapping begins with the file's first byte and asks for large
    pages, which file systems of recent kernels have (ext4, xfs): with small pages a pass takes a tenth longer."""
    start = file.tell()
    pages = mmap.mmap(file.fileno(), start + size, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, size, start)


def copied(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """Read the next `size` bytes of a file into memory with large pages. Raises ValueError if there are fewer."""
    memory = np.empty(size + LARGE_PAGE, np.uint8)
    memory = memory[-memory.ctypes.data % LARGE_PAGE :][:size]
    if file.readinto(memory.data) < size:  # type: ignore[attr-defined]  # a file on disk has it
        raise ValueError("it is cut off")
    return memory


class Place(NamedTuple):
    """A tensor and the range of its bytes, counted from the end of the header."""

    stored: Stored
    begin: int
    end: int


def read_header(prefix: bytes, read: Callable[[int], bytes], file_bytes: int) -> dict[str, Place]:
    """Read the place of each tensor. prefix: the first 8 bytes of the file. read: reads the next bytes. Raises
    ValueError when the header does not describe a file of `file_bytes` bytes."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 0 < length <= min(file_bytes - 8, MAX_HEADER_BYTES):
        raise ValueError("its header is cut off")
    if (8 + length) % ALIGNMENT:
        raise ValueError("its header does not end at a vector")
    header = json.loads(read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop(METADATA, None)
    layout = metadata.get(LAYOUT_KEY) if isinstance(metadata, dict) else None
    if layout != LAYOUT:
        raise ValueError(f"it was packed by another release, in layout {layout!r} instead of {LAYOUT!r}")
    places = {name: place_of(name, entry) for name, entry in header.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: item[1][1:]):
        if place.begin < end or place.begin % ALIGNMENT:
            raise ValueError(f"tensor {name!r} lies in another one, or between vectors")
        end = place.end
    if end > file_bytes - 8 - length:
        raise ValueError("it is cut off")
    return places


def place_of(name: str, entry: Any) -> Place:
    """Read one entry of the header. Raises ValueError."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    lists = all(isinstance(fields.get(field), list) for field in ("shape", "data_offsets"))
    numbers: list[Any] = [*fields["shape"], *fields["data_offsets"]] if lists else [None]
    known = isinstance(fields.get("dtype"), str) and fields["dtype"] in DTYPES
    known = known and len(numbers) <= MAX_DIMENSIONS + 2
    if not known or any(type(number) is not int or not 0 <= number <= MAX_BYTES for number in numbers):
        raise ValueError(f"tensor {name!r} is not described")
    stored = Stored(fields["dtype"], tuple(fields["shape"]))
    begin, end = fields["data_offsets"] if len(fields["data_offsets"]) == 2 else (0, -1)
    if end - begin != stored.nbytes:
        raise ValueError(f"tensor {name!r} has other bytes than its shape")
    return Place(stored, begin, end)


def check_tensors(file: str, found: Mapping[str, Stored], spec: EngineSpec) -> None:
    """Raises EngineError unless a file has exactly the tensors that the spec requires, with their dtypes and shapes."""
    headed = ACCEPTANCE_OUTPUT.name in spec.outputs
    blocks = sum(name.startswith(f"{ACCEPTANCE}block.") and name.endswith(".weights") for name in found)
    if blocks > MAX_BLOCKS:
        raise EngineError(f"{file}: an acceptance head of {blocks} layers is too deep: rebuild the bundle")
    of_head = blocks if headed else None
    wanted = dict(expected_tensors(spec.model, spec.precision, spec.matrices, spec.capacity, of_head))
    for name, stored in wanted.items():
        if name not in found:
            raise EngineError(f"{file} lacks the tensor {name!r}: rebuild the bundle")
        if found[name] != stored:
            raise EngineError(
                f"{file}: tensor {name!r} is {found[name].dtype} {list(found[name].shape)} where the manifest says "
                f"{stored.dtype} {list(stored.shape)}: rebuild the bundle"
            )
    if more := found.keys() - wanted.keys():
        raise EngineError(f"{file} holds a tensor {min(more)!r} that the manifest does not say: rebuild the bundle")
