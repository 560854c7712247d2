"""A GPU's driver on the host: what it allows, in which order work runs, and what it counts.

`faults` has a sentence for everything that a program did wrong. Each is an error for the caller, too, but a caller may
catch it. What is wrong: a call without a context, memory that is freed while queued work uses it or used after it was
freed, host memory that is not page-locked or that changes under a queued copy, work of two streams upon one memory
without a wait between, calls that a capture forbids, and what the executor finds in a kernel.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from draftwood.models.errors import EngineError

from .kernels import STATIC_SHARED, Kernel, Launched, pointed
from .memory import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    DEVICE,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    OK,
    PINNED,
    Memory,
    Refused,
    Span,
    joined,
)
from .streams import Streams, Work

CONTEXT = 0x77
GARBAGE = 0xA5  # what a copy's target holds on the host until the host has waited
NAME = b"Stand-in GPU"
ZEROING = "cuMemsetD8Async"


class Function(NamedTuple):
    kernel: Kernel
    limits: list[int]  # its maximum of shared memory, which a call may raise


class Machine:
    """One device. counts: launches, waits, copies and their bytes, by name. ran: names of the work that was queued,
    inside graphs too. captures: whether work can be captured at all. images: modules of host functions by the bytes of
    their image. takes_ptx: whether PTX is loaded."""

    def __init__(self, seed: int = 0, total: int = 1 << 32) -> None:
        self.memory, self.streams = Memory(total), Streams(seed)
        self.faults: list[str] = []
        self.counts, self.ran = Counter[str](), Counter[str]()
        self.launches: list[Launched] = []
        self.images: dict[bytes, tuple[Kernel, ...]] = {}
        self.captures = self.takes_ptx = True
        self.is_present = False
        self.attributes = {75: 8, 76: 9, 16: 4}  # compute capability 8.9, 4 multiprocessors
        self.graphs: dict[int, list[Work]] = {}
        self.handles: dict[int, Any] = {}  # modules and functions
        self.lock = threading.RLock()
        self._next = 0x9000
        self._context = threading.local()

    @property
    def calls(self) -> dict[str, int]:
        """The counts of what is no number of bytes."""
        return {name: count for name, count in self.counts.items() if "bytes" not in name}

    @contextmanager
    def expecting(self) -> Iterator[list[str]]:
        """The faults of a block, which are then no longer the machine's. What the block left queued is dropped."""
        before = len(self.faults)
        found: list[str] = []
        yield found
        found += self.faults[before:]
        del self.faults[before:]
        self.streams.drop()

    def answer(self, function: Callable[..., None], *arguments: Any) -> int:
        """Call a function of the driver; its status."""
        with self.lock:
            try:
                function(*arguments)
            except Refused as refusal:
                if refusal.reason is not None:
                    self.faults.append(refusal.reason)
                return refusal.status
            except Exception as error:  # from a kernel or a program; ctypes would only print it
                self.faults.append(f"{type(error).__name__}: {error}")
                return ILLEGAL_ADDRESS
            return OK

    def enter(self, function: str, forbidden_in_capture: bool) -> None:
        """What every call begins with."""
        if self.context == 0:
            raise Refused(INVALID_CONTEXT, f"{function} in a thread without a context")
        if forbidden_in_capture:
            self.streams.require_no_capture(function)

    @property
    def context(self) -> int:
        """Of the calling thread."""
        return int(getattr(self._context, "value", 0))

    @context.setter
    def context(self, value: int) -> None:
        self._context.value = value

    def handle(self, thing: Any) -> int:
        self._next += 16
        self.handles[self._next] = thing
        return self._next

    def get(self, handle: int, kind: type) -> Any:
        if not isinstance(thing := self.handles.get(handle), kind):
            raise Refused(INVALID_HANDLE, f"{handle:#x} is no handle of that kind")
        return thing

    def free(self, kind: str, address: int) -> None:
        block = self.memory.find(address)
        if block is not None:
            self.streams.require_unused(block.span)
        self.memory.free(kind, address)

    def submit(self, works: list[Work], stream: int, count: str) -> None:
        """Queue work of one call. Raises Refused for memory that it may not touch."""
        capturing = self.streams.get(stream).capture is not None
        for work in works:
            for span in (*work.reads, *work.writes):
                block = self.memory.find(span.start)
                self.memory.require(span, PINNED if block is not None and block.kind == PINNED else DEVICE, work.name)
        self.streams.submit(works, stream)
        self.counts["captured" if capturing else count] += 1
        if not capturing:
            self.ran.update(work.name for work in works)

    def synchronize(self, stream: int) -> None:
        """The host waits. Waits for memory that is zeroed are counted apart."""
        unawaited = self.streams.get(stream).unawaited
        is_zeroing = bool(unawaited) and all(work.name == ZEROING for work, _ in unawaited)
        self.counts["wait for zeros" if is_zeroing else "wait"] += 1
        self.streams.synchronize(stream)

    def fill(self, target: Span, value: int, stream: int) -> None:
        run = partial(ctypes.memset, target.start, value, target.end - target.start)
        self.submit([Work(ZEROING, lambda: (run, nothing), (), (target,))], stream, "memset")

    def upload(self, target: Span, source: Span, stream: int) -> None:
        """A copy to the device. The host must not change the source until it has waited."""
        self.memory.require(source, PINNED, "the source of an upload")
        self.memory.require(target, DEVICE, "the target of an upload")

        def submitted() -> tuple[Callable[[], object], Callable[[], None]]:
            self.counts["upload bytes"] += source.end - source.start
            digest = zlib.crc32(source.read())

            def seen() -> None:
                if zlib.crc32(source.read()) != digest:
                    raise Refused(INVALID_VALUE, "the source of an upload changed before the host had waited")

            return partial(ctypes.memmove, target.start, source.start, source.end - source.start), seen

        self.submit([Work("an upload", submitted, (source,), (target,))], stream, "upload")

    def download(self, target: Span, source: Span, stream: int) -> None:
        """A copy to the host. The target is garbage until the host has waited."""
        self.memory.require(source, DEVICE, "the source of a download")
        self.memory.require(target, PINNED, "the target of a download")

        def submitted() -> tuple[Callable[[], object], Callable[[], None]]:
            self.counts["download bytes"] += source.end - source.start
            ctypes.memset(target.start, GARBAGE, target.end - target.start)
            content: list[bytes] = []

            def seen() -> None:
                ctypes.memmove(target.start, content[0], len(content[0]))

            return lambda: content.append(source.read()), seen

        self.submit([Work("a download", submitted, (source,), (target,))], stream, "download")

    def enqueue(self, name: str, run: Callable[[], None], spans: Iterable[Iterable[Span]], stream: int) -> None:
        """Queue what is no call of the driver, such as a program of TensorRT. spans: that it reads, and that it
        writes."""
        reads, writes = map(joined, spans)
        work = Work(name, lambda: (run, nothing), reads, writes)
        if self.answer(self.submit, [work], stream, "enqueue") != OK:
            raise EngineError(self.faults[-1])

    def launch(self, function: Function, launched: Launched, stream: int) -> None:
        """A launch may read and write all of the memory that a parameter points into."""
        kernel = function.kernel
        if launched.shared_bytes > function.limits[0]:
            raise Refused(INVALID_VALUE, f"{kernel.name} has {launched.shared_bytes} bytes of shared memory, too many")
        self.launches.append(launched)
        writes = tuple(block.span for block in pointed(launched.values, self.memory))

        run = partial(kernel.run, launched, self.memory)
        self.submit([Work(kernel.name, lambda: (run, nothing), (), writes)], stream, "launch")

    def end_capture(self, stream: int) -> int:
        capture = self.streams.end(stream)
        if capture.is_broken:
            raise Refused(CAPTURE_INVALIDATED)
        if not self.captures:
            raise Refused(CAPTURE_UNSUPPORTED)
        return self.new_graph(capture.works)

    def new_graph(self, works: list[Work]) -> int:
        self._next += 16
        self.graphs[self._next] = list(works)
        return self._next

    def graph(self, handle: int) -> list[Work]:
        if handle not in self.graphs:
            raise Refused(INVALID_HANDLE, f"{handle:#x} is no graph, or was destroyed")
        return self.graphs[handle]


def nothing() -> None:
    """What the host sees of most work."""


def new_function(kernel: Kernel) -> Function:
    return Function(kernel, [STATIC_SHARED])
