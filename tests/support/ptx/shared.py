"""Shared memory of the CTAs that run together, and asynchronous copies into it (`cp.async`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .faults import InFlight, Misaligned, OutOfBounds
from .memory import Bytes, Numbers, Touch, Tracked


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
