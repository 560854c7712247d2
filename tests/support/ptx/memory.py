"""Bytes with who touched them last, and global memory as allocations.

A *stamp* says who touched a byte and when: the CTA (from 1), the machine's step, and the thread in the CTA. Two touches
of a byte by different threads, one of them a write, need a barrier between them: of their CTA, or of their warp if they
are in one; touches by different CTAs have none. Touches are of aligned rows of `width` bytes: arrays of addresses, one
per thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .parser import InFlight, Misaligned, OutOfBounds, Race
from .values import Values

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

THREAD_BITS, STEP_BITS = 12, 28
THREADS = (1 << THREAD_BITS) - 1  # as a thread number: several threads
WARP, OF_WARP = 32, 1 << THREAD_BITS - 1  # threads of a warp; as a thread number: several of warp 0, then of warp 1...
CTA = THREAD_BITS + STEP_BITS
IN_FLIGHT = np.int64(1) << 62  # as a stamp: an asynchronous operation, which no barrier ends
SEVERAL = np.int64(1) << 61  # as a stamp: several CTAs
WHO = ~(((np.int64(1) << STEP_BITS) - 1) << THREAD_BITS)  # a stamp without its step
FIRST_ADDRESS = 0x7F1234560000
GUARD = 1024  # bytes between allocations
POISON = 0xFF  # what memory holds that nobody wrote: NaN in every floating type


class Touch(NamedTuple):
    """Who touches: the stamps of each thread now, of the last barriers of its CTA and warp, all [threads, 1]; the text
    of the instruction."""

    stamps: Numbers
    barriers: Numbers
    warp_barriers: Numbers
    text: str


class Tracked:
    """nbytes (a multiple of 16) with their last writers and readers."""

    def __init__(self, nbytes: int) -> None:
        self.content: Bytes = np.full(nbytes, POISON, np.uint8)
        self.writers: Numbers = np.zeros(nbytes, np.int64)
        self.readers: Numbers = np.zeros(nbytes, np.int64)

    def read(self, places: Numbers, width: int, touch: Touch) -> Bytes:
        """[threads, width]. Raises Race and InFlight."""
        rows = places // width
        self.check(self.writers.reshape(-1, width).take(rows, 0), touch, "wrote what this reads")
        readers = self.readers.reshape(-1, width)
        before = readers.take(rows, 0)
        mine = np.where(conflicts(before, touch), together(before, touch.stamps), touch.stamps)
        readers[rows] = mine
        kept = readers.take(rows, 0)
        if (lost := kept != mine).any():  # several threads read one byte at once
            both = together(kept, mine)
            for several in (both != (mine | THREADS), both == (mine | THREADS)):  # of all warps last: it stays
                of_row, column = np.nonzero(lost & several)
                readers[rows[of_row], column] = both[of_row, column]
        return self.content.reshape(-1, width).take(rows, 0)

    def write(self, places: Numbers, values: Bytes, touch: Touch) -> None:
        """values [threads, width]. Raises Race and InFlight; equal values of several threads are no race."""
        width = values.shape[1]
        rows = places // width
        self.check(self.readers.reshape(-1, width).take(rows, 0), touch, "reads what this writes")
        content, writers = self.content.reshape(-1, width), self.writers.reshape(-1, width)
        before = writers.take(rows, 0)
        self.check(np.where(content.take(rows, 0) == values, before & IN_FLIGHT, before), touch, "writes this, too")
        content[rows] = values
        writers[rows] = touch.stamps
        if not np.array_equal(content.take(rows, 0), values):
            raise Race(f"{touch.text}: two threads write different values to one place")

    def start(self, places: Numbers, width: int, touch: Touch) -> None:
        """An asynchronous copy to these rows begins: they hold nothing until `finish`. Raises Race and InFlight."""
        rows = places // width
        self.check(self.readers.reshape(-1, width).take(rows, 0), touch, "reads what this copies to")
        self.check(self.writers.reshape(-1, width).take(rows, 0), touch, "writes what this copies to")
        self.content.reshape(-1, width)[rows] = POISON
        self.writers.reshape(-1, width)[rows] = IN_FLIGHT

    def finish(self, places: Numbers, values: Bytes, stamps: Numbers) -> None:
        """The copy ended: as if its thread wrote the values now."""
        rows = places // values.shape[1]
        self.content.reshape(-1, values.shape[1])[rows] = values
        self.writers.reshape(-1, values.shape[1])[rows] = stamps

    @staticmethod
    def check(before: Numbers, touch: Touch, what: str) -> None:
        wrong = conflicts(before, touch)
        if wrong.any():
            if (before[wrong] >= IN_FLIGHT).any():
                raise InFlight(f"{touch.text}: an asynchronous operation that nobody awaited {what}")
            thread = int(np.nonzero(wrong)[0][0])
            other = int(before[wrong][0]) & THREADS
            mine = int(touch.stamps[thread, 0]) & THREADS
            raise Race(f"{touch.text}: thread {other} {what} in thread {mine}, without a barrier between")


def warps_of(stamps: Numbers) -> Numbers:
    """The warp in its CTA; -1 for threads of several."""
    threads = stamps & THREADS
    warps = np.where(threads < OF_WARP, threads // WARP, threads - OF_WARP)
    return np.where(threads == THREADS, -1, warps)


def together(before: Numbers, now: Numbers) -> Numbers:
    """The stamp of two different threads' touches: several threads of a warp, or of several."""
    warps = warps_of(now)
    is_shared = (warps_of(before) == warps) & (warps >= 0) & (before >> CTA == now >> CTA)
    return np.where(is_shared, (now & ~np.int64(THREADS)) + OF_WARP + warps, now | THREADS)


def conflicts(before: Numbers, touch: Touch) -> NDArray[np.bool_]:
    """Where an earlier touch is another thread's, and not ordered by a barrier."""
    own_cta, warps = touch.barriers >> CTA << CTA, warps_of(touch.stamps)
    ordered = (before >= own_cta) & (before < touch.barriers)
    ordered |= (before >= own_cta) & (before < touch.warp_barriers) & (warps_of(before) == warps) & (warps >= 0)
    found: NDArray[np.bool_] = (before != 0) & ~ordered & (((before ^ touch.stamps) & WHO) != 0)
    return found


class Allocation(NamedTuple):
    """[start, end), whose bytes begin at `place` of the memory's content."""

    name: str
    start: int
    end: int
    writable: bool


class GlobalMemory:
    """Allocations with a guard before and after each. `touched` notes the bytes that were read."""

    def __init__(self, nbytes: int = 1 << 22) -> None:
        nbytes += -nbytes % 16
        self.bytes = Tracked(nbytes)
        self.touched = np.zeros(nbytes, np.bool_)
        self.allocations: list[Allocation] = []
        self._free = GUARD
        self._starts = self._ends = np.zeros(0, np.int64)
        self._writable = np.zeros(0, np.bool_)

    def put(self, name: str, array: NDArray[Any], alignment: int = 16) -> int:
        """Copies an array that is only read; returns its address, which is no multiple of more than `alignment`."""
        address = self._take(name, array.nbytes, alignment, writable=False)
        self.fill(address, np.ascontiguousarray(array))
        return address

    def reserve(self, name: str, nbytes: int, alignment: int = 16) -> int:
        """Memory that a kernel may write."""
        return self._take(name, nbytes, alignment, writable=True)

    def fill(self, address: int, array: NDArray[Any]) -> None:
        """Writes from the host."""
        self.bytes.content[address - FIRST_ADDRESS :][: array.nbytes] = array.view(np.uint8).ravel()

    def get(self, address: int, nbytes: int) -> Bytes:
        return self.bytes.content[address - FIRST_ADDRESS :][:nbytes].copy()

    def read_bytes(self, address: int, nbytes: int) -> NDArray[np.bool_]:
        """Which bytes any kernel has read."""
        return self.touched[address - FIRST_ADDRESS :][:nbytes]

    def next_launch(self) -> None:
        """A launch sees everything that the earlier ones wrote."""
        self.bytes.writers[:] = self.bytes.readers[:] = 0

    def read(self, addresses: Numbers, width: int, touch: Touch) -> Bytes:
        """[threads, width]. Raises Misaligned, OutOfBounds and Race."""
        places, writable = self._places(addresses, width, touch, write=False)
        self.touched.reshape(-1, width)[places // width] = True
        if writable.any():
            return self.bytes.read(places, width, touch)
        return self.bytes.content.reshape(-1, width).take(places // width, 0)

    def write(self, addresses: Numbers, values: Bytes, touch: Touch) -> None:
        places, _ = self._places(addresses, values.shape[1], touch, write=True)
        self.bytes.write(places, values, touch)

    def _places(self, addresses: Numbers, width: int, touch: Touch, write: bool) -> tuple[Numbers, NDArray[np.bool_]]:
        if (addresses % width).any():
            raise Misaligned(f"{touch.text}: {int(addresses[addresses % width != 0][0]):#x} is no multiple of {width}")
        owner = np.searchsorted(self._starts, addresses, "right") - 1
        inside = (owner >= 0) & (addresses + width <= self._ends[owner])
        writable = inside & self._writable[owner]
        allowed = writable if write else inside
        if not allowed.all():
            wrong = int(addresses[~allowed][0])
            raise OutOfBounds(f"{touch.text}: {'writes' if write else 'reads'} {width} bytes {self._describe(wrong)}")
        return addresses - FIRST_ADDRESS, writable

    def _describe(self, address: int) -> str:
        """An address by the nearest allocation before it."""
        before = [each for each in self.allocations if each.start <= address]
        if not before:
            return f"at {address:#x}, before every allocation"
        last = before[-1]
        return f"at byte {address - last.start} of {last.name}, which has {last.end - last.start}"

    def _take(self, name: str, nbytes: int, alignment: int, writable: bool) -> int:
        place = self._free + -self._free % (2 * alignment) + alignment
        if place + nbytes + GUARD > len(self.touched):
            raise MemoryError(f"the machine has {len(self.touched)} bytes of global memory, no room for {name}")
        self._free = place + nbytes + GUARD
        start = FIRST_ADDRESS + place
        self.allocations.append(Allocation(name, start, start + nbytes, writable))
        self._starts, self._ends, self._writable = columns(self.allocations)
        return start


def columns(allocations: Sequence[Allocation]) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    starts, ends = (np.array([each[i] for each in allocations], np.int64) for i in (1, 2))
    return starts, ends, np.array([each.writable for each in allocations], np.bool_)


@dataclass(slots=True)
class Copy:
    """One `cp.async`: threads that issued it, places, values to come, and each thread's number of its group."""

    threads: Numbers
    places: Numbers
    values: Bytes
    groups: Numbers
    text: str


class SharedMemory:
    """nbytes for each of `ctas`, whose `threads` each are numbered one CTA after the other."""

    def __init__(self, nbytes: int, ctas: int, threads: int) -> None:
        self.nbytes = nbytes
        self.stride = nbytes + -nbytes % 1024
        self.bytes = Tracked(self.stride * ctas)
        self.base: Numbers = np.repeat(np.arange(ctas, dtype=np.int64) * self.stride, threads)
        self.committed: Numbers = np.zeros(ctas * threads, np.int64)
        self.copies: list[Copy] = []

    def places(self, threads: Numbers, addresses: Numbers, width: int, text: str) -> Numbers:
        """Where the threads' addresses are. Raises Misaligned and OutOfBounds."""
        if (addresses % width).any():
            raise Misaligned(f"{text}: {int(addresses[addresses % width != 0][0])} is no multiple of {width}")
        outside = (addresses < 0) | (addresses + width > self.nbytes)
        if outside.any():
            raise OutOfBounds(f"{text}: byte {int(addresses[outside][0])} of {self.nbytes} of shared memory")
        return addresses + self.base[threads]

    def read(self, threads: Numbers, addresses: Numbers, width: int, touch: Touch) -> Bytes:
        return self.bytes.read(self.places(threads, addresses, width, touch.text), width, touch)

    def write(self, threads: Numbers, addresses: Numbers, values: Bytes, touch: Touch) -> None:
        self.bytes.write(self.places(threads, addresses, values.shape[1], touch.text), values, touch)

    def copy(self, threads: Numbers, addresses: Numbers, values: Bytes, touch: Touch) -> None:
        """Begins an asynchronous copy."""
        places = self.places(threads, addresses, values.shape[1], touch.text)
        self.bytes.start(places, values.shape[1], touch)
        self.copies.append(Copy(threads, places, values, self.committed[threads], touch.text))

    def commit(self, threads: Numbers) -> None:
        """The copies of these threads since the last commit become their next group."""
        self.committed[threads] += 1

    def wait(self, active: NDArray[np.bool_], pending: int, stamps: Numbers) -> None:
        """The active threads' copies end, but those of their last `pending` groups. stamps: of every thread."""
        remaining = []
        for copy in self.copies:
            done = active[copy.threads] & (copy.groups < self.committed[copy.threads] - pending)
            self.bytes.finish(copy.places[done], copy.values[done], stamps[copy.threads[done], None])
            if not done.all():
                keep = ~done
                kept = copy.threads[keep], copy.places[keep], copy.values[keep], copy.groups[keep]
                remaining.append(Copy(*kept, copy.text))
        self.copies = remaining

    def end(self) -> None:
        """Raises InFlight if a copy is still under way when the CTAs end."""
        if self.copies:
            raise InFlight(f"{self.copies[0].text}: nobody awaited this copy before the kernel ended")


class Products:
    """results, sources: registers with their values and the number of their group. reading: places in shared memory
    that products since the last commit read; groups: those of committed groups that nobody awaited."""

    def __init__(self) -> None:
        self.results: dict[str, tuple[Values, int]] = {}
        self.sources: dict[str, tuple[Values, int]] = {}
        self.reading: list[Numbers] = []
        self.groups: list[list[Numbers]] = []
        self.committed = 0
        self._fenced: dict[str, Values] = {}

    def fence(self, registers: dict[str, Values]) -> None:
        """What these registers hold now may be used by products."""
        self._fenced = dict(registers)

    def take(self, registers: dict[str, Values], name: str, text: str) -> Values | None:
        """An accumulator, None if nobody wrote it; nobody may touch it from now on. Raises InFlight."""
        if name in self.results:
            return self.results[name][0]
        if name not in registers:
            return None
        if self._fenced.get(name) is not registers[name]:
            raise InFlight(f"{text}: {name} was written after the last wgmma.fence")
        return registers.pop(name)

    def read(self, values: Values, name: str, text: str) -> None:
        """A register of A, which nobody may change from now on. Raises InFlight."""
        if self._fenced.get(name) is not values:
            raise InFlight(f"{text}: {name} was written after the last wgmma.fence")
        self.sources[name] = values, self.committed

    def commit(self) -> None:
        self.groups.append(self.reading)
        self.reading = []
        self.committed += 1

    def wait(self, pending: int, registers: dict[str, Values], shared: Tracked, stamp: int, text: str) -> None:
        """All but the last `pending` groups end. Raises InFlight for registers that were touched meanwhile."""
        readers = shared.readers.reshape(-1, 2)
        while len(self.groups) > pending:
            for places in self.groups.pop(0):
                readers[places // 2] = stamp
        for places in (*self.reading, *(each for group in self.groups for each in group)):
            readers[places // 2] = IN_FLIGHT
        finished = self.committed - pending
        for name, (values, group) in list(self.sources.items()):
            if group < finished:
                if registers.get(name) is not values:
                    raise InFlight(f"{text}: {name} was written while a product read it")
                del self.sources[name]
        for name, (values, group) in list(self.results.items()):
            if group < finished:
                if name in registers:
                    raise InFlight(f"{text}: {name} was written while a product accumulated in it")
                registers[name] = values
                del self.results[name]
