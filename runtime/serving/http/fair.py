"""FairLimit: bounds what all clients have of something; the client with the most makes room for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Held:
    """What is held for one request. end: ends it when others need its room; its user may replace it."""

    def __init__(self, limit: FairLimit, client: str, end: Callable[[], None]) -> None:
        self.client, self.end = client, end
        self.size = 0
        self._limit = limit

    def add(self, size: int) -> None:
        """Hold more, or less if `size` is below 0. May end this one or another one."""
        self._limit.add(self, size)


class FairLimit:
    """If all together are too large, the client with the most loses its oldest one, which is its slowest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[Held, None] = {}  # an ordered set, the oldest first
        self._size = 0

    @contextmanager
    def hold(self, client: str, end: Callable[[], None]) -> Iterator[Held]:
        """Something that is held for the time of the `with` block."""
        held = Held(self, client, end)
        self._all[held] = None
        try:
            yield held
        finally:
            self._forget(held)

    def add(self, held: Held, size: int) -> None:
        """See Held.add. What was ended no longer counts."""
        if held not in self._all:
            return
        held.size += size
        self._size += size
        while self._size > self._most:
            ended = self._oldest_of_largest()
            self._forget(ended)
            ended.end()

    def _oldest_of_largest(self) -> Held:
        """Those of size 0 are kept."""
        sizes, first = Counter[str](), dict[str, Held]()
        for held in self._all:
            if held.size:
                sizes[held.client] += held.size
                first.setdefault(held.client, held)
        ((client, _),) = sizes.most_common(1)
        return first[client]

    def _forget(self, held: Held) -> None:
        if held in self._all:
            del self._all[held]
            self._size -= held.size
