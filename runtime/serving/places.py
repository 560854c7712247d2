"""Places: bounds the requests in progress of a server, together and of each client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..decoding.queue import QueueFullError, is_within_share


class Places:
    """A request is in progress from before its texts are read until it is answered. `is_within_share` limits the
    requests of each client, so that a bounded number of them waits for the threads that read texts."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = Counter[str]()  # by client

    def shortage(self, client: str) -> str | None:
        """Why this client gets no further place at present; None if it gets one."""
        held, taken = self._taken[client], self._taken.total()
        if is_within_share(held, taken, self._places):
            return None
        return (
            f"{taken} requests are in progress, {held} of them yours, and this server takes {self._places}: retry later"
        )

    @contextmanager
    def take(self, client: str) -> Iterator[None]:
        """A place for the time of the `with` block. Raises QueueFullError if there is a shortage."""
        if shortage := self.shortage(client):
            raise QueueFullError(shortage)
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]
