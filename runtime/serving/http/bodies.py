"""ArrivingBodies: reads the bodies of requests completely, and bounds the bodies that are still arriving."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Receive

from .errors import Refusal
from .fair import FairLimit, Held

MAX_ARRIVING = 256
ARRIVING_BYTES = 64 << 20  # most bytes of all arriving bodies together


class ArrivingBodies:
    """Arriving bodies, which do not count among the requests in progress; see FairLimit."""

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
        self._count, self._bytes = FairLimit(max_arriving), FairLimit(max(max_bytes, 4 * max_body_bytes))

    async def read(self, client: str, receive: Receive) -> bytes | Refusal | None:
        """The whole body; None if the client disconnected before its end."""
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def give_up() -> None:
            with suppress(asyncio.InvalidStateError):  # given up already
                given_up.set_result(None)

        with self._count.hold(client, give_up) as one, self._bytes.hold(client, give_up) as held:
            one.add(1)
            reading = asyncio.ensure_future(self._read(held, receive))
            try:
                either = (reading, given_up)
                await asyncio.wait(either, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    return reading.result()
            finally:
                reading.cancel()
        if given_up.done():
            message = "the body arrived slowly, and its room was needed for others: retry later"
            return Refusal(408, message, code="body_too_slow", closing=True)
        return Refusal(408, f"the body did not arrive within {self._seconds:g} s", closing=True)

    def too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._max_body_bytes} bytes", code="body_too_large")

    async def _read(self, held: Held, receive: Receive) -> bytes | Refusal | None:
        content = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            content += part
            if len(content) > self._max_body_bytes:
                return self.too_large()
            if not message.get("more_body", False):
                return bytes(content)
            held.add(len(part))
