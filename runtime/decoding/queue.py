"""FairQueue: which requests run and in which order, whatever they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from ...models.errors import ConfigError, DraftwoodError, RequestError, shown

R = TypeVar("R")


def check_hashable(name: str, value: object) -> None:
    """Raises RequestError for a value that cannot tell requests apart."""
    try:
        hash(value)
    except TypeError as error:
        raise RequestError(f"{name} must be hashable, such as text, not {shown(value)}") from error


class QueueFullError(DraftwoodError):
    """All places are taken, or all places that this client may use. The client may retry later."""


def is_within_share(held: int, taken: int, places: int) -> bool:
    """Whether a client may take another place. held: the places of this client. taken: the places of all clients.

    A client may take a place while it holds no more places than are free. A single client thus gets little more than
    half of the places, and each further client about half of the rest."""
    return taken < places and held <= places - taken


def max_client_places(places: int) -> int:
    """The number of places that a client can take while no other client has any."""
    return (places + 2) // 2 if places else 0


class FairQueue(Generic[R]):
    """Admits requests, and orders the running requests by round robin.

    At most `max_running` requests run, since each of them holds caches. At most `max_waiting` requests wait, and
    `is_within_share` limits the waiting requests of each client. A free place goes to the next client in turn, within
    the client to its next user in turn, and then to the user's earliest request. A newly admitted request runs after
    all other running requests, so it waits for at most one turn of each of them.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        """Raises ConfigError for limits that allow no request."""
        if max_running < 1 or max_waiting < 0:
            raise ConfigError(
                f"max_running must be at least 1 and max_waiting at least 0, not {max_running} and {max_waiting}"
            )
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.running: deque[R] = deque()  # the next one to run first
        # By client, then by user, in the order of their turns; the earliest request first. Clients and users without
        # waiting requests are removed.
        self._waiting: dict[Hashable, dict[Hashable, deque[R]]] = {}

    @property
    def num_running(self) -> int:
        return len(self.running)

    def __len__(self) -> int:
        return self.num_running + self.num_waiting

    def __iter__(self) -> Iterator[R]:
        """All running and waiting requests, from a copy: requests may be removed during the iteration."""
        queues = chain.from_iterable(users.values() for users in self._waiting.values())
        return iter([*self.running, *chain.from_iterable(queues)])

    def submit(self, request: R, client: Hashable = None, user: Hashable = None) -> None:
        """Admit a request, or queue it.

        client: the sender of the request; None stands for all senders together and may take every place. user: the
        client's user that the request belongs to. Raises QueueFullError when all places, or all that this client may
        use, are taken, and RequestError for a client or user that is not hashable.
        """
        check_hashable("client", client)
        check_hashable("user", user)
        if self.num_running == self.max_running:
            self._check_room(client)
        self._waiting.setdefault(client, {}).setdefault(user, deque()).append(request)
        self.num_waiting += 1
        self._admit()

    def _check_room(self, client: Hashable) -> None:
        held = 0 if client is None else self._count_waiting(client)
        if self.num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{self.num_running} requests are running and {self.num_waiting} waiting, the most that this server "
                "accepts: retry later, or start it with a larger --max-waiting"
            )
        if not is_within_share(held, self.num_waiting, self.max_waiting):
            raise QueueFullError(
                f"{held} requests of this client are waiting, and the {self.max_waiting - self.num_waiting} free "
                "places are kept for other clients: retry later, or start the server with a larger --max-waiting"
            )

    def _count_waiting(self, client: Hashable) -> int:
        return sum(map(len, self._waiting.get(client, {}).values()))

    def rotate(self, request: R) -> None:
        self.running.remove(request)
        self.running.append(request)

    def remove(self, request: R) -> None:
        """Remove a request, and admit the next waiting one. Raises ValueError unless it is running or waiting."""
        if request in self.running:
            self.running.remove(request)
        else:
            self._remove_waiting(request)
        self._admit()

    def _remove_waiting(self, request: R) -> None:
        """Remove a waiting request. Raises ValueError when it does not wait."""
        for client, users in self._waiting.items():
            for user, requests in users.items():
                if request in requests:
                    requests.remove(request)
                    self.num_waiting -= 1
                    if not requests:
                        del users[user]
                    if not users:
                        del self._waiting[client]
                    return
        raise ValueError("this request is neither running nor waiting")

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self.max_running:
            client = next(iter(self._waiting))
            users = self._waiting.pop(client)
            user = next(iter(users))
            requests = users.pop(user)
            self.running.append(requests.popleft())
            self.num_waiting -= 1
            if requests:
                users[user] = requests  # after the client's other users
            if users:
                self._waiting[client] = users  # after the other clients
