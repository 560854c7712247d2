"""Asynchronous products of one CTA that are under way: what they accumulate in, and what they read."""

from __future__ import annotations

from .faults import InFlight
from .memory import IN_FLIGHT, Numbers, Tracked
from .values import Values


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
