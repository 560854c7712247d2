"""Scheduler: who is admitted, and whose turn is next. Pure logic over requests of any kind; it runs nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from ..models.errors import ConfigError, DraftwoodError

R = TypeVar("R")


class QueueFullError(DraftwoodError):
    """Every place to run or to wait is taken: come back later."""


class Scheduler(Generic[R]):
    """Clients get places in turn, each for the request it sent first; those admitted take turns, and as many as fit
    share one.

    At most `max_running` requests run, since each of them holds caches; at most `max_waiting` wait for a place, however
    many are one client's. A newly admitted request takes its turn behind all others, so nobody waits longer than one
    turn of everybody else's.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        """Raises ConfigError for limits under which nothing could run."""
        if max_running < 1 or max_waiting < 0:
            raise ConfigError(
                f"max_running must be at least 1 and max_waiting at least 0, not {max_running} and {max_waiting}"
            )
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._running: deque[R] = deque()  # the next turn first
        # By client, the one whose turn it is first; the earliest arrival first. Nobody is here who waits for nothing.
        self._waiting: dict[Hashable, deque[R]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __len__(self) -> int:
        return self.num_running + self.num_waiting

    def __iter__(self) -> Iterator[R]:
        """Everybody, over a copy: requests may be removed meanwhile."""
        return iter([*self._running, *chain.from_iterable(self._waiting.values())])

    def submit(self, request: R, client: Hashable = None) -> None:
        """Admit a request, or let it wait. client: whose it is. Raises QueueFullError when there is no place left."""
        if self.num_running == self.max_running and self.num_waiting == self.max_waiting:
            raise QueueFullError(
                f"{self.num_running} requests are running and {self.num_waiting} waiting, which is all this server "
                "takes: retry later, or start it with a larger --max-waiting"
            )
        self._waiting.setdefault(client, deque()).append(request)
        self._admit()

    @property
    def running(self) -> tuple[R, ...]:
        """Those admitted, the next turn first."""
        return tuple(self._running)

    def served(self, request: R) -> None:
        """A running request had its turn: it goes to the end of the line."""
        self._running.remove(request)
        self._running.append(request)

    def remove(self, request: R) -> None:
        """A request ended, wherever it was; its place goes to the client whose turn it is."""
        if request in self._running:
            self._running.remove(request)
        else:
            client = next(client for client, requests in self._waiting.items() if request in requests)
            self._waiting[client].remove(request)
            if not self._waiting[client]:
                del self._waiting[client]
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            client = next(iter(self._waiting))
            requests = self._waiting.pop(client)
            self._running.append(requests.popleft())
            if requests:
                self._waiting[client] = requests
