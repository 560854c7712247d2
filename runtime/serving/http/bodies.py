"""ArrivingBodies: reads the bodies of requests completely, and bounds the bodies that are still arriving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from .clients import oldest_of_largest
from .errors import Refusal

MAX_ARRIVING = 256
ARRIVING_BYTES = 64 << 20  # most bytes of all arriving bodies together


class Arrival:
    """An arriving body. given_up: completed when the body is given up because others need its memory."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.content = bytearray()
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ArrivingBodies:
    """Arriving bodies, which do not count among the requests in progress. If they are too many or have too many bytes,
    the client with the most loses its oldest body, which is the slowest."""

    def __init__(
        self,
        max_body_bytes: int,
        seconds: float,
        max_arriving: int = MAX_ARRIVING,
        max_bytes: int = ARRIVING_BYTES,
    ) -> None:
        """max_body_bytes, seconds: limits of one body. max_bytes: limit of all; a few bodies always fit."""
        self._max_body_bytes = max_body_bytes
        self._seconds = seconds
        self._max_arriving = max_arriving
        self._max_bytes = max(max_bytes, 4 * max_body_bytes)
        self._arriving: dict[Arrival, None] = {}  # an ordered set, the oldest first
        self._num_bytes = 0

    async def read(self, client: str, receive: Receive) -> bytes | Refusal | None:
        """The whole body; None if the client disconnected before its end."""
        arrival = Arrival(client)
        self._arriving[arrival] = None
        if len(self._arriving) > self._max_arriving:
            self._give_up(lambda each: 1)
        reading = asyncio.ensure_future(self._read(arrival, receive))
        try:
            either = (reading, arrival.given_up)
            await asyncio.wait(either, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
        finally:
            reading.cancel()
            self._forget(arrival)
        if arrival.given_up.done():
            message = "the body arrived slowly, and its room was needed for others: retry later"
            return Refusal(408, message, code="body_too_slow", closing=True)
        return Refusal(408, f"the body did not arrive within {self._seconds:g} s", closing=True)

    def too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")

    async def _read(self, arrival: Arrival, receive: Receive) -> bytes | Refusal | None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            arrival.content += part
            if arrival in self._arriving:
                self._num_bytes += len(part)
            if len(arrival.content) > self._max_body_bytes:
                return self.too_large()
            if not message.get("more_body", False):
                return bytes(arrival.content)
            while self._num_bytes > self._max_bytes:
                self._give_up(lambda each: len(each.content))

    def _give_up(self, weight: Callable[[Arrival], int]) -> None:
        """Give up the oldest body of the client with the largest sum of `weight`; bodies of weight 0 are kept."""
        slowest = oldest_of_largest(self._arriving, weight)
        self._forget(slowest)
        slowest.given_up.set_result(None)

    def _forget(self, arrival: Arrival) -> None:
        if arrival in self._arriving:
            del self._arriving[arrival]
            self._num_bytes -= len(arrival.content)
