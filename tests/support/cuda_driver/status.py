"""What the driver answers."""

from __future__ import annotations

OK = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100
INVALID_IMAGE = 200
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_FOUND = 500
ILLEGAL_ADDRESS = 700
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_WRONG_THREAD = 908

TEXTS = {OUT_OF_MEMORY: b"out of memory", CAPTURE_UNSUPPORTED: b"operation not permitted when stream is capturing"}


class Refused(Exception):
    """A call that is answered with an error. reason: what the caller did wrong, None where it did nothing wrong."""

    def __init__(self, status: int, reason: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason
