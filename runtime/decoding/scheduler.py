"""Scheduler: who is admitted, and whose turn is next. Pure logic over requests of any kind; it runs nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from ...models.errors import ConfigError, DraftwoodError

R = TypeVar("R")


class QueueFullError(DraftwoodError):
    """Every place to run or to wait is taken, or this client's share of them: come back later."""


def is_within_share(held: int, taken: int, places: int) -> bool:
    """Whether a client that holds `held` of the `taken` places may have another one: while it holds no more than are
    free, so that one client alone gets little more than half of them, and each further one half of what is left."""
    return taken < places and held <= places - taken


def max_client_places(places: int) -> int:
    """How many places a client may get that is alone."""
    return (places + 2) // 2 if places else 0


class Scheduler(Generic[R]):
    """Clients get places in turn, and the users of one client in turn among themselves, each for the request it sent
    first; those admitted take turns, and as many as fit share one.

    At most `max_running` requests run, since each of them holds caches; at most `max_waiting` wait for a place, and no
    client has more of those than `is_within_share` says. A newly admitted request takes its turn behind all others, so
    nobody waits longer than one turn of everybody else's.
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
        # By client and user, whoever's turn it is first; the earliest arrival first. Nobody is here who waits for
        # nothing.
        self._waiting: dict[Hashable, dict[Hashable, deque[R]]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(self._count_waiting, self._waiting))

    def __len__(self) -> int:
        return self.num_running + self.num_waiting

    def __iter__(self) -> Iterator[R]:
        """Everybody, over a copy: requests may be removed meanwhile."""
        queues = chain.from_iterable(users.values() for users in self._waiting.values())
        return iter([*self._running, *chain.from_iterable(queues)])

    def submit(self, request: R, client: Hashable = None, user: Hashable = None) -> None:
        """Admit a request, or let it wait.

        client: whose it is; None, where nobody tells clients apart, may have every place. user: for whom the client
        sent it. Raises QueueFullError when there is no place left, or none for this client.
        """
        if self.num_running == self.max_running:
            self._check_room(client)
        self._waiting.setdefault(client, {}).setdefault(user, deque()).append(request)
        self._admit()

    def _check_room(self, client: Hashable) -> None:
        held = 0 if client is None else self._count_waiting(client)
        if self.num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{self.num_running} requests are running and {self.num_waiting} waiting, which is all this server "
                "takes: retry later, or start it with a larger --max-waiting"
            )
        if not is_within_share(held, self.num_waiting, self.max_waiting):
            raise QueueFullError(
                f"{held} requests of this client are waiting, and the {self.max_waiting - self.num_waiting} places "
                "that are left are for others: retry later, or start the server with a larger --max-waiting"
            )

    def _count_waiting(self, client: Hashable) -> int:
        """Requests of this client that wait."""
        return sum(map(len, self._waiting.get(client, {}).values()))

    @property
    def running(self) -> tuple[R, ...]:
        """Those admitted, the next turn first."""
        return tuple(self._running)

    def rotate(self, request: R) -> None:
        """A running request had its turn: it goes to the end of the line."""
        self._running.remove(request)
        self._running.append(request)

    def remove(self, request: R) -> None:
        """A request ended, wherever it was; its place goes to the client whose turn it is."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._remove_waiting(request)
        self._admit()

    def _remove_waiting(self, request: R) -> None:
        """Let a request wait no more."""
        for client, users in self._waiting.items():
            for user, requests in users.items():
                if request in requests:
                    requests.remove(request)
                    if not requests:
                        del users[user]
                    if not users:
                        del self._waiting[client]
                    return
        raise ValueError("this request is neither running nor waiting")

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            client = next(iter(self._waiting))
            users = self._waiting.pop(client)
            user = next(iter(users))
            requests = users.pop(user)
            self._running.append(requests.popleft())
            if requests:
                users[user] = requests  # behind the client's other users
            if users:
                self._waiting[client] = users  # behind the other clients
