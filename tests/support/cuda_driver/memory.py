"""Device memory and page-locked memory: blocks of host memory at aligned addresses."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DEVICE, PINNED = "device", "page-locked"
ALIGNMENT = 512
POISON = 0xFF  # what memory holds that nobody wrote: NaN in every floating type
KEPT = 1 << 26  # bytes of freed memory whose addresses are not given out again


class Span(NamedTuple):
    """The bytes [start, end)."""

    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end

    def read(self) -> bytes:
        return ctypes.string_at(self.start, self.end - self.start)


class Block(NamedTuple):
    kind: str
    span: Span
    content: NDArray[np.uint8]


class Memory:
    """total: bytes of the device's memory."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []
        self._freed: deque[Block] = deque()

    def used(self, kind: str) -> int:
        return sum(block.content.nbytes for block in self._blocks.values() if block.kind == kind)

    def take(self, kind: str, nbytes: int) -> int:
        if nbytes == 0:
            raise Refused(INVALID_VALUE, "an allocation of no bytes")
        if kind == DEVICE and self.used(DEVICE) + nbytes > self.total:
            raise Refused(OUT_OF_MEMORY)
        whole = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        skipped = -whole.ctypes.data % ALIGNMENT
        content = whole[skipped : skipped + nbytes]
        address = content.ctypes.data
        self._blocks[address] = Block(kind, Span(address, address + nbytes), content)
        self._starts = sorted(self._blocks)
        return address

    def free(self, kind: str, address: int) -> None:
        block = self._blocks.get(address)
        if block is None or block.kind != kind:
            raise Refused(INVALID_VALUE, f"{address:#x} is no {kind} memory, or was freed before")
        block.content[:] = POISON
        del self._blocks[address]
        self._starts.remove(address)
        self._freed.append(block)
        while sum(each.content.nbytes for each in self._freed) > KEPT:
            self._freed.popleft()

    def find(self, address: int) -> Block | None:
        """The block that an address is in."""
        index = bisect_right(self._starts, address) - 1
        block = self._blocks[self._starts[index]] if index >= 0 else None
        return block if block is not None and address < block.span.end else None

    def require(self, span: Span, kind: str, what: str) -> None:
        """Raises Refused unless all bytes of a span are one block's."""
        block = self.find(span.start)
        if block is None or span.end > block.span.end:
            freed = any(each.span.overlaps(span) for each in self._freed)
            raise Refused(
                INVALID_VALUE, f"{what} touches {'freed memory' if freed else 'memory that nobody allocated'}"
            )
        if block.kind != kind:
            raise Refused(INVALID_VALUE, f"{what} takes {block.kind} memory for {kind} memory")


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same bytes in as few spans as possible."""
    result: list[Span] = []
    for span in sorted(spans):
        if result and span.start <= result[-1].end:
            result[-1] = Span(result[-1].start, max(span.end, result[-1].end))
        else:
            result.append(span)
    return tuple(result)


def array_at(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array over memory that somebody else keeps alive."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    viewed: NDArray[Any] = block.view(dtype).reshape(shape)
    return viewed


OK = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100
INVALID_IMAGE = 200
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_FOUND = 500
ILLEGAL_ADDRESS = 700
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_WRONG_THREAD = 908

TEXTS = {OUT_OF_MEMORY: b"out of memory", CAPTURE_UNSUPPORTED: b"operation not permitted when stream is capturing"}


class Refused(Exception):
    """A call that is answered with an error. reason: what the caller did wrong, None where it did nothing wrong."""

    def __init__(self, status: int, reason: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason
