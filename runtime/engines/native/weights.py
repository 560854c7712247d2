"""The file of weights that the native engine reads: names, types and shapes of its tensors, and their memory.

It is a safetensors file. What it must hold follows from the engine's spec alone; a file that holds anything else is
refused before the kernels see a number of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models.bindings import ACCEPTANCE as ACCEPTANCE_OUTPUT
from ....models.bindings import BITS, LOW_BIT
from ....models.config import LlamaConfig
from ....models.errors import EngineError
from ....models.layers import EMBEDDING, Matrix, Network, network_of
from ....plugins.native.library import COMPUTED
from ....plugins.native.packing import LAYOUT, PANEL, whole_panels
from ..base import EngineSpec

# By safetensors' names. 16-bit floats and scales are kept as their bits.
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("float32"), "U16": np.dtype("uint16"), "U8": np.dtype("uint8")}
STORED = {"fp32": "F32", "fp16": "U16", "bf16": "U16", "int8": "U8", "int4": "U8"}  # matrices, by precision
# Inputs that share a scale: the largest that divide a matrix's, or fewer where a checkpoint was rounded so before. A
# feed-forward size is filled up to the first of them.
BLOCKS = {"int8": (128, 64, 32), "int4": (64, 32)}
METADATA, LAYOUT_KEY = "__metadata__", "draftwood_layout"
ACCEPTANCE = "acceptance."  # a prefix of names
ALIGNMENT = 64  # bytes: a vector
LARGE_PAGE = 1 << 21  # bytes
MOST_HEADER_BYTES = 100_000_000  # as safetensors itself has it
MOST_BLOCKS = 64  # of an acceptance head: SpecDec++'s have 0 to 4

Weights = dict[str, NDArray[Any]]


class Stored(NamedTuple):
    """How a tensor lies in the file. dtype: one of DTYPES."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def packed_network(config: LlamaConfig, precision: str) -> Network:
    """The description of a model whose matrices divide into blocks. Raises EngineError that names what the kernels do
    not compute."""
    if missing := [name for name in config.variant.differences if name not in COMPUTED]:
        raise EngineError(
            f"the native kernels do not compute {', '.join(missing)} of this model: build it with --backend onnxruntime"
        )
    block = BLOCKS.get(precision, (1,))[0]
    return network_of(replace(config, intermediate_size=-(-config.intermediate_size // block) * block))


def packed_rows(matrix: Matrix) -> int:
    """Outputs of a packed matrix, filled up to whole panels. The panels of a gated one's sources alternate, so that
    each source is filled up."""
    return sum(map(whole_panels, matrix.outputs)) if matrix.gated else whole_panels(sum(matrix.outputs))


def expected_tensors(
    config: LlamaConfig,
    precision: str,
    positions: int,
    head_blocks: int | None,
    block_size: Callable[[Matrix], int] | None = None,
) -> Iterator[tuple[str, Stored]]:
    """Name and form of every tensor, in the order a pass reads them; the embedding is last.

    positions: of the rotary tables. head_blocks: of SpecDec++'s head, None without one. block_size: how many of a
    matrix's inputs share a scale, None for what `block_of` says. Raises EngineError where a matrix divides into no
    blocks, and as packed_network does.
    """

    def vector(size: int) -> Stored:
        return Stored("F32", (whole_panels(size),))

    def matrix(part: Matrix) -> Iterator[tuple[str, Stored]]:
        name, inputs, rows = part.name, part.inputs, packed_rows(part)
        count = rows // PANEL
        if precision in LOW_BIT:
            size = block_of(precision, name, inputs) if block_size is None else block_size(part)
            yield f"{name}.weights", Stored(STORED[precision], (count, inputs * BITS[precision] // 32, PANEL, 4))
            yield f"{name}.scales", Stored("U16", (count, inputs // size, PANEL))
        else:
            yield f"{name}.weights", Stored(STORED[precision], (count, inputs, PANEL))
        if part.bias:
            yield f"{name}.bias", Stored("F32", (rows,))

    hidden, network = config.hidden_size, packed_network(config, precision)
    for table in ("cosine", "sine"):
        yield table, Stored("F32", (positions, config.head_dim // 2))
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
    yield EMBEDDING, Stored("F32", (config.vocab_size, hidden))


def block_in(found: Mapping[str, Stored], precision: str, matrix: Matrix) -> int:
    """How many of a matrix's inputs share a scale in a file, as the shape of its scales says; what `block_of` says
    where that is none of BLOCKS."""
    scales = found.get(f"{matrix.name}.scales")
    for block in BLOCKS[precision]:
        if scales is not None and len(scales.shape) == 3 and scales.shape[1] * block == matrix.inputs:
            return block
    return block_of(precision, matrix.name, matrix.inputs)


def block_of(precision: str, name: str, inputs: int) -> int:
    """How many of a matrix's inputs share a scale. Raises EngineError when no block divides them."""
    for block in BLOCKS[precision]:
        if inputs % block == 0:
            return block
    raise EngineError(f"{name} has {inputs} inputs, which divide into no blocks of {precision}: rebuild the bundle")


def read_weights(path: Path, spec: EngineSpec, private: bool = False) -> Weights:
    """The tensors of a file. They are read into one piece of memory, which then has large pages; but the embedding, of
    which a pass needs a few rows, is mapped. private: that is read, too, so that nothing which happens to the file
    later can reach this process. Raises EngineError, also when the file is not what the spec says."""
    tensors: Weights = {}
    try:
        with path.open("rb") as file:
            places = read_header(file.read(8), file.read, path.stat().st_size)
            check_tensors(path.name, {name: place.stored for name, place in places.items()}, spec)
            mapped = () if private else (EMBEDDING,)
            size = max(place.end for name, place in places.items() if name not in mapped)
            memory = np.empty(size + LARGE_PAGE, np.uint8)
            memory = memory[-memory.ctypes.data % LARGE_PAGE :][:size]
            start = file.tell()
            if file.readinto(memory.data) < size:
                raise ValueError("it is cut off")
        for name, (stored, begin, end) in places.items():
            dtype = DTYPES[stored.dtype]
            if name in mapped:
                tensors[name] = np.memmap(path, dtype, "r", start + begin, stored.shape)
            else:
                tensors[name] = memory[begin:end].view(dtype).reshape(stored.shape)
    except (OSError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{path.name} cannot be read ({error}): rebuild the bundle") from error
    return tensors


class Place(NamedTuple):
    """A tensor and its bytes, counted from the end of the header."""

    stored: Stored
    begin: int
    end: int


def check_weights(path: Path, spec: EngineSpec) -> None:
    """Compare the header of a file with a spec and read nothing else. Raises EngineError."""
    try:
        with path.open("rb") as file:
            places = read_header(file.read(8), file.read, path.stat().st_size)
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path.name} cannot be read ({error}): rebuild the bundle") from error
    check_tensors(path.name, {name: place.stored for name, place in places.items()}, spec)


def read_header(prefix: bytes, read: Callable[[int], bytes], file_bytes: int) -> dict[str, Place]:
    """Where each tensor lies. Raises ValueError for a header that does not describe a file of this size."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 0 < length <= min(file_bytes - 8, MOST_HEADER_BYTES):
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
    """One entry of the header. Raises ValueError."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    lists = all(isinstance(fields.get(field), list) for field in ("shape", "data_offsets"))
    numbers: list[Any] = [*fields["shape"], *fields["data_offsets"]] if lists else [None]
    known = isinstance(fields.get("dtype"), str) and fields["dtype"] in DTYPES
    if not known or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"tensor {name!r} is not described")
    stored = Stored(fields["dtype"], tuple(fields["shape"]))
    begin, end = fields["data_offsets"] if len(fields["data_offsets"]) == 2 else (0, -1)
    if end - begin != stored.nbytes:
        raise ValueError(f"tensor {name!r} has other bytes than its shape")
    return Place(stored, begin, end)


def check_tensors(file: str, found: Mapping[str, Stored], spec: EngineSpec) -> None:
    """Raises EngineError unless a file has every tensor that the engine reads, of the type and shape that it reads, and
    no other."""
    headed = ACCEPTANCE_OUTPUT.name in spec.outputs
    blocks = sum(name.startswith(f"{ACCEPTANCE}block.") and name.endswith(".weights") for name in found)
    if blocks > MOST_BLOCKS:
        raise EngineError(f"{file}: an acceptance head of {blocks} layers is too deep: rebuild the bundle")
    stored_block = partial(block_in, found, spec.precision)
    wanted = dict(expected_tensors(spec.model, spec.precision, spec.capacity, blocks if headed else None, stored_block))
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
