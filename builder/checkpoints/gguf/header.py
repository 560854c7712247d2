"""The header of a GGUF file: its metadata, and the place of each tensor. Every count is compared with the size of the
file before anything is read or allocated; the gguf package's own reader does not check them.

Source: ggml's docs/gguf.md, versions 2 and 3, little-endian. The parts that are read here are the same in both.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ....models.errors import CheckpointError, shown
from ....models.plain_files import open_plain

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20  # tokens and merges of the largest vocabularies take 20 MB
MAX_ENTRIES = 1 << 17  # the limit for entries of metadata, and for tensors
MAX_ELEMENTS = 1 << 22  # of all arrays together: a vocabulary of 262,144 tokens has 1.3 million
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MIN_ENTRY_BYTES, MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS: dict[int, np.dtype[Any]] = {  # by the number of a value's type
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
Value = TypeVar("Value", int, float, bool, str, "list[Any]", "np.ndarray[Any, Any]")
AGAIN = "convert the model again with a current convert_hf_to_gguf.py"
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list of texts",
    np.ndarray: "a list of numbers",
}


class Tensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]  # outermost dimension first, as in numpy
    kind: int  # the number of a type, which may be unknown to GGMLQuantizationType
    begin: int  # in the file
    nbytes: int  # 0 for an unknown kind

    @property
    def dtype(self) -> str:
        known = self.kind in set(GGMLQuantizationType)
        return GGMLQuantizationType(self.kind).name if known else f"of type {self.kind}"


class Header(NamedTuple):
    """All of a file but the tensors' content."""

    metadata: dict[str, Any]  # numbers, booleans, strings, lists of strings and numpy arrays of numbers
    tensors: dict[str, Tensor]  # by GGUF's names


def read_header(file: Path) -> Header:
    """Read and check everything but the tensors' content. Raises CheckpointError."""
    try:
        with open_plain(file) as handle:
            return HeaderReader(file, handle).read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: give the path of a .gguf file, and all of its parts") from error
    except struct.error as error:
        raise CheckpointError(f"{file}: its header is cut off; download it again") from error
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is not read: {error}; give the path of a .gguf file") from error


class HeaderReader:
    def __init__(self, file: Path, handle: BinaryIO) -> None:
        self._file, self._handle = file, handle
        self._size = os.fstat(handle.fileno()).st_size
        self._position = self._elements = 0

    def read(self) -> Header:
        magic = self._handle.read(4)
        self._position = 4
        if magic != MAGIC:
            raise self._damaged(f"it begins with {magic!r} and is no GGUF file")
        version = self._integer("<I")
        if version not in VERSIONS:
            if version.to_bytes(4, "big")[0] in VERSIONS:  # 2 and 3 in the other byte order
                raise CheckpointError(
                    f"{self._file} is big-endian, and only little-endian files are read: convert it with "
                    "gguf_convert_endian.py of the gguf package"
                )
            raise CheckpointError(
                f"{self._file} has version {version} of GGUF, and only {' and '.join(map(str, VERSIONS))} are read: "
                "convert the model again with a current convert_hf_to_gguf.py"
            )
        tensors, entries = self._integer("<Q"), self._integer("<Q")
        self._afford(entries, MIN_ENTRY_BYTES, MAX_ENTRIES, "entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"the key {shown(key)} stands in it twice")
            metadata[key] = self._value(key, self._integer("<I"))
        self._afford(tensors, MIN_TENSOR_BYTES, MAX_ENTRIES, "tensors")
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"{ALIGNMENT_KEY} is {shown(alignment)}, no power of two up to {MAX_ALIGNMENT}")
        return Header(metadata, self._placed(found, -(-self._position // alignment) * alignment, alignment))

    def _placed(self, found: list[tuple[str, Tensor]], start: int, alignment: int) -> dict[str, Tensor]:
        """Tensors by name, with `begin` counted from the start of the file. Raises CheckpointError for wrong places."""
        tensors: dict[str, Tensor] = {}
        end = start
        for name, tensor in sorted(found, key=lambda item: item[1].begin):
            if name in tensors:
                raise self._damaged(f"the tensor {shown(name)} stands in it twice")
            if tensor.begin % alignment:
                raise self._damaged(f"the tensor {shown(name)} lies at an offset that is no multiple of {alignment}")
            begin = start + tensor.begin
            if begin < end:
                raise self._damaged(f"the tensor {shown(name)} lies in another one")
            end = begin + tensor.nbytes
            if end > self._size:
                raise self._damaged(f"it is cut off: the tensor {shown(name)} ends at {end} of {self._size} bytes")
            tensors[name] = tensor._replace(begin=begin)
        return tensors

    def _tensor(self) -> tuple[str, Tensor]:
        """Read the name and the description of a tensor. Its `begin` is counted from the end of the header."""
        name, dimensions = self._string(), self._integer("<I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"the tensor {shown(name)} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._integer("<Q") for _ in range(dimensions))[::-1]
        kind, begin = self._integer("<I"), self._integer("<Q")
        size = math.prod(shape)
        if not 0 < size < 1 << 60:
            raise self._damaged(f"the tensor {shown(name)} has the shape {shown(shape)}")
        block, nbytes = GGML_QUANT_SIZES.get(kind, (1, 0))  # type: ignore[call-overload]
        if shape[-1] % block:
            raise self._damaged(
                f"rows of the tensor {shown(name)} have {shape[-1]} numbers, no multiple of its type's {block}"
            )
        return name, Tensor(self._file, shape, kind, begin, size // block * nbytes)

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._numbers(key, kind, 1)[0].item()
        kind, count = self._integer("<I"), self._integer("<Q")
        if kind == ARRAY:
            raise self._damaged(f"{shown(key)} holds arrays of arrays, which no model has")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise self._damaged(f"its arrays hold more than {MAX_ELEMENTS} elements")
        if kind != STRING:
            return self._numbers(key, kind, count)
        self._afford(count, 8, MAX_ELEMENTS, f"strings of {shown(key)}")
        return self._strings(count)

    def _numbers(self, key: str, kind: int, count: int) -> Any:
        dtype = SCALARS.get(kind)
        if dtype is None:
            raise self._damaged(f"{shown(key)} is of type {kind}, which GGUF does not have")
        content = self._bytes(count * dtype.itemsize)
        if kind == BOOL and set(content) - {0, 1}:
            raise self._damaged(f"{shown(key)} is neither true nor false")
        return np.frombuffer(content, dtype)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read consecutive strings. There may be millions, so the loop calls no other method."""
        read, found, most = self._handle.read, list[str](), min(self._size, MAX_HEADER_BYTES)
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            self._position += 8 + length
            if self._position > most:
                raise self._cut_off()
            content = read(length)
            try:
                found.append(content.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self._damaged(f"the text {shown(content)} is no UTF-8") from error
        return found

    def _integer(self, form: str) -> int:
        value: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        self._position += count
        if self._position > min(self._size, MAX_HEADER_BYTES):
            raise self._cut_off()
        return self._handle.read(count)

    def _cut_off(self) -> CheckpointError:
        return self._damaged(f"its header is cut off, or has more than {MAX_HEADER_BYTES} bytes")

    def _afford(self, count: int, least: int, most: int, what: str) -> None:
        """Refuse more than `most` items, or more than the rest of the file has room for at `least` bytes each."""
        if count > most:
            raise self._damaged(f"it claims {count} {what}, more than {most}")
        if count * least > self._size - self._position:
            raise self._damaged(f"it is cut off: it claims {count} {what}")

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._file} is damaged: {problem}; download it again")


class Metadata:
    """The metadata of a file. It remembers which keys were read, so that the others can be refused by name."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file, self._values = file, values
        self._asked: set[str] = set()

    def get(self, key: str, kind: type[Value]) -> Value | None:
        """A value, or None when the key is absent. Raises CheckpointError for a value of another type."""
        self._asked.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.file}: {key} must be {KINDS[kind]}, found {shown(value)}; {AGAIN}")
        found: Value = value
        return found

    def need(self, key: str, kind: type[Value]) -> Value:
        """A value that must be there. Raises CheckpointError."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file}: its metadata lacks {key}; {AGAIN}")
        return value

    def unread(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix` and were not read."""
        return sorted(key for key in self._values if key.startswith(prefix) and key not in self._asked)
